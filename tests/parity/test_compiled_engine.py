"""The compiled engine: its products and forwards against readable twins, and the promise that what
it computes for a token is equal bit for bit whatever is computed beside it."""

from __future__ import annotations

import ctypes
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals, TreeShape
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import InputError, UnsupportedModel
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.gguf import INDEX, StoredBlocks, blocks_index, gguf_file
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native import bindings as native
from draftsmith.targets.native import engine, weights
from draftsmith.targets.native.bindings import library
from draftsmith.targets.native.engine import why_not
from draftsmith.targets.native.weights import (
    Blocks,
    Memory,
    multiply,
    pack,
    pack_blocks,
    products_are_exact,
    quantise_int4,
    quantise_int8,
    wide_group,
)

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")

FORMS = ("float32", "bfloat16", "w8a8", "int8", "int4")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied and scaled": LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        attention_bias=True,
        mlp_bias=True,
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    **{f"llama, heads of {n}": LlamaConfig(**{**SIZES, "head_dim": n}) for n in (64, 96, 128)},
}
TEXT = [(7 * i * i + 3 * i + 1) % 100 for i in range(90)]
"""More tokens than pass a layer together."""


def rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Activations as 8 bits give them: a scale per group, ties to even."""
    grouped = x.astype(np.float32).reshape(len(x), -1, group)
    top = np.abs(grouped).max(-1, keepdims=True)
    by = np.float32(127) / np.where(top == 0, np.float32(1), top)
    whole = np.rint(grouped * by).astype(np.float64)
    return (whole * (top / np.float32(127))).reshape(x.shape)


def twin(weight: Tensor, form: str, x: np.ndarray) -> np.ndarray:
    """The product in float64, of what the format makes of weights and activations."""
    if form == "float32":
        return x.astype(np.float64) @ weight.double().numpy().T
    if form == "bfloat16":
        return x.astype(np.float64) @ weight.bfloat16().double().numpy().T
    if form == "int4":
        return rounded(x, 32) @ quantise_int4(weight).whole().double().numpy().T
    group = wide_group(x.shape[1]) if form == "w8a8" else 32
    numbers, scale = quantise_int8(weight, group)
    whole = numbers.double().unflatten(1, (-1, group)) * scale.double()[..., None]
    return rounded(x, group) @ whole.flatten(1).numpy().T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [16, 34, 70])  # of 16: one, three and five panels
def test_products_are_those_of_the_twin_for_every_number_of_tokens(form: str, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, 96, generator=draw)
    bias = torch.randn(rows, generator=draw)
    x = torch.randn(65, 96, generator=draw).numpy()
    packed = pack(library(), weight, form, bias)
    together = multiply(library(), packed, x)
    expected = twin(weight, form, x) + bias.double().numpy()
    assert np.abs(together - expected).max() < 2e-5 * np.abs(expected).max()
    for width in range(1, 65):
        for first in (0, 1, 65 - width):
            some = multiply(library(), packed, x[first : first + width])
            assert (some == together[first : first + width]).all(), (width, first)


@pytest.mark.parametrize("form", ["w8a8", "int8"])
def test_integer_products_are_exact_at_the_ends_of_their_range(form: str) -> None:
    """Older instruction sets cut off sums of pairs beyond 16 bits."""
    signs = np.where(np.arange(512) % 3 == 0, -1, 1)
    for own, given in ((signs, signs), (signs, np.ones(512)), (np.ones(512), np.ones(512))):
        weight = torch.from_numpy(127.0 * own).float().repeat(16, 1)
        packed = pack(library(), weight, form)
        out = multiply(library(), packed, 127.0 * given[None])
        assert (out == 127 * 127 * (own * given).sum()).all()


def test_an_engine_whose_products_are_cut_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_are_exact(library())
    monkeypatch.setattr(weights, "products_are_exact", lambda lib: False)
    target = target_of(CONFIGS["llama"])
    assert target.engine == "transformers"
    assert target.not_compiled is not None and "not exact" in target.not_compiled


def test_blocks_of_a_file_are_taken_as_they_are() -> None:
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (20, 64), generator=draw, dtype=torch.uint8)
    scale = torch.rand(20, 2, generator=draw).half()
    blocks = Blocks(numbers_RK=numbers, scale_RG=scale, least_RG=-8 * scale)
    x = torch.randn(3, 64, generator=draw).numpy()
    out = multiply(library(), pack_blocks(library(), blocks), x)
    expected = rounded(x, 32) @ blocks.whole().double().numpy().T
    assert np.abs(out - expected).max() < 1e-5 * np.abs(expected).max()


# ------------------------------------------------------------------------- forwards


def target_of(config: Any, form: str = "auto", dtype: torch.dtype = torch.float32) -> HFTarget:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.data.normal_(0, 0.1)
    weights = {"float32": "auto", "bfloat16": "bf16"}.get(form, form)
    return HFTarget(model, weights=weights, compile=True, end_ids=frozenset())


def logits_of(target: HFTarget, texts: Sequence[Sequence[int]], keep: int) -> Tensor:
    cache = target.new_cache(len(texts), 200)
    tokens, block = lay_out(cache, texts)
    return target.forward(torch.from_numpy(tokens), block, keep, Signals()).logits_BNV


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_states_are_those_of_transformers(name: str) -> None:
    target = target_of(CONFIGS[name])
    assert target.not_compiled is None
    signals = Signals(last_hidden=True, layers=(0, 2))
    cache = target.new_cache(1, 200)
    tokens, block = lay_out(cache, [TEXT])
    out = target.forward(torch.from_numpy(tokens), block, len(TEXT), signals)
    with target.native("eager") as model, target.capture(signals) as captured:
        theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits
    states = captured.signals_BTS
    assert out.signals_BTS is not None and states is not None
    assert (out.logits_BNV - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (out.signals_BTS - states).abs().max() < 1e-4 * states.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", *(f"llama, heads of {n}" for n in (64, 96, 128))]
)
def test_logits_of_a_token_are_equal_whatever_is_computed_beside_it(name: str, form: str) -> None:
    #     row 0   90 known | p p p      tree   p(last) -+- 0 --- 2 --- 4
    #     row 1   40 known | p                          `- 1 --- 3
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    target = target_of(CONFIGS[name], form, dtype)
    assert target.engine.endswith(f"{form} weights)")
    parents = np.array([-1, -1, 0, 1, 2])
    nodes = np.array([11, 22, 33, 44, 55])
    paths = {0: [0], 1: [1], 2: [0, 2], 3: [1, 3], 4: [0, 2, 4]}
    known, pending = [TEXT, TEXT[30:70]], [[5, 6, 7], [8]]
    cache = target.new_cache(2, 300)
    tokens, block = lay_out(cache, known)
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(np.array([len(text) for text in known]))
    tokens, block = lay_out(cache, pending, np.stack([nodes] * 2), np.stack([parents] * 2))
    drafted = target.forward(torch.from_numpy(tokens), block, 6, Signals()).logits_BNV
    for b in range(2):
        text = [*known[b], *pending[b]]
        for node, path in {-1: [], **paths}.items():
            whole = [*text, *nodes[path].tolist()]
            # token by token at the end, in pieces before it
            alone = target.new_cache(1, 300)
            pieces = [whole[:17], whole[17:-2], whole[-2:-1], whole[-1:]]
            for piece in pieces:
                tokens, block = lay_out(alone, [piece])
                out = target.forward(torch.from_numpy(tokens), block, 1, Signals()).logits_BNV
                alone.commit(np.array([len(piece)]))
            assert torch.equal(out[0, 0], drafted[b, node + 1]), (b, node)
            assert torch.equal(out, logits_of(target, [whole], 1)), "in one piece"


@pytest.mark.parametrize("name", ["llama", "llama, heads of 96"])
def test_a_long_chain_with_branches_gives_the_logits_of_its_paths(name: str) -> None:
    """What is staged fills more than one block of sixteen keys, and siblings see a part of it.

    0 - 1 - ... - 16 - 17 - ... - 23
                    `- 24
                    `- 25 - 26
    """
    target = target_of(CONFIGS[name], "int8", torch.float32)
    parents = np.array([*range(-1, 23), 16, 16, 25])
    nodes = np.array([(5 * n + 3) % 100 for n in range(len(parents))])
    known, pending = TEXT[:21], [5, 6]
    cache = target.new_cache(1, 300)
    tokens, block = lay_out(cache, [known])
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(np.array([len(known)]))
    tokens, block = lay_out(cache, [pending], nodes[None], parents[None])
    drafted = target.forward(torch.from_numpy(tokens), block, 1 + len(nodes), Signals()).logits_BNV
    for node in (-1, 0, 13, 14, 15, 16, 17, 23, 24, 25, 26):
        path = []
        while node != -1:
            path.append(node)
            node = int(parents[node])
        whole = [*known, *pending, *nodes[path[::-1]].tolist()]
        at = path[0] + 1 if path else 0
        assert torch.equal(logits_of(target, [whole], 1)[0, 0], drafted[0, at]), path


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other instructions are named there")
@pytest.mark.parametrize(("instructions", "named"), [("x86-64-v3", "avx2"), ("x86-64", "plain")])
def test_other_instructions_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, instructions: str, named: str
) -> None:
    def built(name: str, *machine: str) -> native.Library:
        rest = [one for one in native.OPTIONS if "-march" not in one]
        with monkeypatch.context() as patch:
            patch.setattr(native, "OPTIONS", (*rest, *machine))
            native._build(native.compiler(), tmp_path / name)
        return native.Library(tmp_path / name)

    other = built("other.so", f"-march={instructions}")
    assert other.instructions == named
    tiles = "amx" in engine.usable_library().instructions
    lanes = built("lanes.so", "-march=native", "-mno-amx-tile") if tiles else library()
    assert "amx" not in lanes.instructions
    for form in FORMS:
        for name in ("llama", "llama, heads of 96"):
            dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
            found = []
            for one in (lanes, other):
                with monkeypatch.context() as patch:
                    patch.setattr(engine, "usable_library", lambda one=one: one)
                    found.append(
                        logits_of(target_of(CONFIGS[name], form, dtype), [TEXT, TEXT[:9]], 3)
                    )
            assert torch.equal(*found), (form, name)
            if form == "bfloat16" and tiles:
                # sums in another order, then keys and values rounded to bfloat16
                here = logits_of(target_of(CONFIGS[name], form, dtype), [TEXT, TEXT[:9]], 3)
                torch.testing.assert_close(here, found[0], rtol=0, atol=0.02 * float(here.std()))


@pytest.mark.parametrize("cols", [32, 48, 96, 1536])
def test_bfloat16_products_are_alike_at_every_width(cols: int) -> None:
    """One token goes another way than several where there are tiles; 48 columns fill none. Some
    sums lie below the normal numbers."""
    draw = torch.Generator().manual_seed(cols)
    weight = torch.randn(100, cols, generator=draw).to(torch.bfloat16)
    sizes = torch.logspace(-40, 3, 37)[:, None]
    x = (torch.randn(37, cols, generator=draw) * sizes).numpy()
    packed = weights.pack(engine.usable_library(), weight, "bfloat16")
    together = weights.multiply(engine.usable_library(), packed, x)
    exact = x.astype(np.float64) @ weight.double().numpy().T
    # roundings of sums; an activation cut to 16 bits would be off by 4e-6
    off = np.square((together - exact) / np.abs(exact).std(1, keepdims=True))
    normal = sizes[:, 0].numpy() > 1e-20
    assert off[normal].mean() < 2e-6**2 and normal.sum() > 15
    assert off[normal].max() < 1.2e-5**2
    for width in (1, 2, 5, 16, 17, 32):
        parts = [
            weights.multiply(engine.usable_library(), packed, x[at : at + width])
            for at in range(0, len(x), width)
        ]
        assert np.array_equal(np.concatenate(parts), together), width


@pytest.mark.parametrize("token", [-1, 100, 1 << 40])
def test_tokens_that_the_model_lacks_are_refused(token: int) -> None:
    """The extension reads a row of the embedding wherever it is told to."""
    target = target_of(CONFIGS["llama"])
    with pytest.raises(InputError, match="this model knows 0 to 99"):
        logits_of(target, [[1, 2, token], [3]], 1)
    logits_of(target, [[1, 2, 99], [0]], 1)


@pytest.mark.parametrize("form", ["bfloat16", "w8a8", "int4"])
def test_drafts_change_no_token(form: str) -> None:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    target = target_of(CONFIGS["llama"], form, dtype)
    prompts = [TEXT[:9], TEXT[20:50], [3]]

    def texts(drafter: Any, temperature: float) -> list[list[int]]:
        drafter.bind(target)
        options = DecodeOptions(
            sampler=Sampler(temperature=temperature),
            max_new_tokens=40,
            rule="match",
            shape=TreeShape.chain(5),
        )
        out: list[list[int]] = [[] for _ in prompts]
        for step in decode(target, drafter, prompts, options):
            for b, emitted in enumerate(step.emitted):
                out[b] += emitted
        return out

    for temperature in (0.0, 1.0):
        lookup = PromptLookup(PromptLookup.Config(length=5))
        assert texts(lookup, temperature) == texts(NoDrafter(), temperature)


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "form", "reason"),
    [
        (LlamaConfig(**{**SIZES, "hidden_size": 72}), "float32", "hidden size is 72"),
        (LlamaConfig(**{**SIZES, "intermediate_size": 80}), "int4", "no multiple of 32"),
        (LlamaConfig(**{**SIZES, "intermediate_size": 80}), "w8a8", "no multiple of 32"),
        (LlamaConfig(**{**SIZES, "head_dim": 16}), "float32", "head is 16"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "float32", "activation is gelu"),
        (MistralConfig(**SIZES, sliding_window=8), "float32", "has a window"),
    ],
)
def test_what_cannot_be_compiled_runs_in_transformers_and_says_why(
    config: Any, form: str, reason: str
) -> None:
    if form == "float32":
        target = target_of(config)
        assert target.engine == "transformers"
        assert target.not_compiled is not None and reason in target.not_compiled
    else:
        with pytest.raises(UnsupportedModel, match=reason):
            target_of(config, form)


def test_a_machine_without_a_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    library.cache_clear()
    try:
        target = target_of(CONFIGS["llama"])
        assert target.not_compiled is not None and "no C++ compiler" in target.not_compiled
        assert "no C++ compiler" in caplog.text
        with pytest.raises(UnsupportedModel, match="no C\\+\\+ compiler"):
            target_of(CONFIGS["llama"], "int8")
    finally:
        library.cache_clear()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'cxx: cannot do that' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.cache_clear()
    try:
        with pytest.raises(native.NotBuilt, match="cannot do that"):
            library()
    finally:
        library.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("script", ["", "#!/bin/sh\nexit 0\n", "#!/nowhere/sh\n"])
def test_a_compiler_that_makes_nothing_is_named(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cxx"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.cache_clear()
    try:
        with pytest.raises(native.NotBuilt, match=str(broken)):
            library()
    finally:
        library.cache_clear()


def test_a_damaged_build_is_made_again_and_never_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that was cut ends the process when it is loaded."""
    whole, built = Path(library().c._name).read_bytes(), []

    def build(command: str, file: Path) -> None:
        built.append(command)
        file.write_bytes(whole)

    monkeypatch.setattr(native, "_build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        for content in (None, whole, b"", whole[: len(whole) // 2], whole):
            if content is not None:
                (file,) = (tmp_path / "cache").rglob("engine.so")
                file.unlink()  # the one that is loaded stays as it is
                file.write_bytes(content)
            library.cache_clear()
            assert library().instructions
    finally:
        library.cache_clear()
    assert len(built) == 3, "at first, and twice for what was damaged"


def test_formats_of_the_engine_want_the_engine() -> None:
    with pytest.raises(InputError, match="--weights int4: only the compiled engine"):
        ModelConfig(target="x", weights="int4", compile=False).validate()
    ModelConfig(target="x", weights="int4").validate()
    assert why_not(target_of(CONFIGS["llama"]).model, (None,), "int8") is None


def test_a_model_that_does_not_fit_into_memory_twice_is_not_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "free_memory_bytes", lambda: 1000)
    assert target_of(CONFIGS["llama"]).engine == "transformers"
    assert "GiB more memory, and 0.0 GiB are free" in caplog.text
    monkeypatch.setattr(engine, "free_memory_bytes", lambda: None)
    assert target_of(CONFIGS["llama"]).engine != "transformers"


def test_small_arrays_share_pages() -> None:
    lib = library()
    some = [Memory(lib, torch.full((n,), float(n))) for n in (3, 100, 1)]
    starts = [one.at for one in some]
    assert all(at % 64 == 0 for at in starts)
    assert starts == sorted(starts) and starts[-1] - starts[0] <= 1024
    for one, n in zip(some, (3, 100, 1), strict=True):
        assert (np.ctypeslib.as_array((ctypes.c_float * n).from_address(one.at)) == n).all()


# ------------------------------------------------------------------------- GGUF


def test_blocks_of_a_gguf_file_are_the_weights_that_it_holds(tmp_path: Path) -> None:
    """Queries and keys lie there in another order of rows (llama.cpp's rotary embedding)."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    draw = np.random.default_rng(0)
    weights = {}
    for number, kind in enumerate(("Q4_0", "Q4_1", "Q8_0")):
        kind_id = gguf.GGMLQuantizationType[kind]
        for part, rows in (("attn_q", 128), ("ffn_down", 64)):
            data = gguf.quants.quantize(draw.standard_normal((rows, 64), np.float32), kind_id)
            writer.add_tensor(f"blk.{number}.{part}.weight", data, raw_dtype=kind_id)
            weights[number, part] = gguf.quants.dequantize(data, kind_id)
    writer.add_tensor("token_embd.weight", draw.standard_normal((100, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / INDEX).write_text(json.dumps(blocks_index(file)))
    stored = StoredBlocks(file, tmp_path, CONFIGS["llama"])
    for number in range(3):
        blocks = stored(f"model.layers.{number}.mlp.down_proj")
        assert blocks is not None
        assert np.allclose(blocks.whole(), weights[number, "ffn_down"], rtol=0, atol=1e-6)
        blocks = stored(f"model.layers.{number}.self_attn.q_proj")
        assert blocks is not None
        halves = weights[number, "attn_q"].reshape(4, 16, 2, 64).swapaxes(1, 2).reshape(128, 64)
        assert np.allclose(blocks.whole(), halves, rtol=0, atol=1e-6)
    assert stored("model.embed_tokens") is None, "not in blocks"


def test_a_target_names_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.gguf' does not exist"):
        gguf_file(str(tmp_path / "nothing.gguf"))
    assert gguf_file(str(tmp_path)) is None
    (tmp_path / "one.gguf").touch()
    assert gguf_file(str(tmp_path)) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(InputError, match="holds 2 GGUF files"):
        gguf_file(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert gguf_file(str(tmp_path)) is None, "a folder of transformers"
