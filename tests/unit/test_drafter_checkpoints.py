"""Folders of feature-level drafters: what is written is read, what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import tiny_tokenizer
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.hidden.drafter import FeatureDrafter, TrainedDrafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

KINDS = ("eagle", "eagle3", "fspad", "griffin", "hass", "medusa", "p_eagle", "parallel", "unrolled")


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(64, layers=8)


def made(kind: str, target: HFTarget, source: str = "", options: Sequence[str] = ()) -> Drafter:
    drafter = make_drafter(f"{kind}:{source}" if source else kind, options)
    drafter.bind(target)
    return drafter


def saved(kind: str, target: HFTarget, folder: Path) -> dict[str, Tensor]:
    """A drafter with weights of its own on disk; its tensors."""
    drafter = made(kind, target)
    for parameter in drafter.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    drafter.save(folder, kind=kind)
    return tensors(drafter)


def tensors(drafter: Drafter) -> dict[str, Tensor]:
    """By the names that the folder has for them."""
    return {
        name.removeprefix("network."): one.clone() for name, one in drafter.state_dict().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(kind: str, target: HFTarget, tmp_path: Path) -> None:
    written = saved(kind, target, tmp_path)
    read = tensors(made(kind, target, str(tmp_path)))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in written)


def weights_of(*stems: str) -> set[str]:
    """NAME.{a,b} is NAME.a and NAME.b; all end with `weight`."""
    names: set[str] = set()
    for stem in stems:
        head, _, rest = stem.partition("{")
        each = [f"{head}{one}{rest.partition('}')[2]}" for one in rest.partition("}")[0].split(",")]
        names |= {f"{name}.weight" for name in each}
    return names


ATTENTION = "self_attn.{q,k,v,o}_proj"
LAYER = weights_of(f"layers.0.{ATTENTION}", "layers.0.mlp.{gate,up,down}_proj") | {
    "layers.0.post_attention_layernorm.weight"
}
PARTS = ("{input,post_attention}_layernorm", ATTENTION, "mlp.{gate,up,down}_proj")
RELEASED = {
    "eagle": LAYER | {"fc.weight", "fc.bias"},
    "hass": LAYER | {"fc.weight", "fc.bias"},
    "fspad": LAYER
    | weights_of("fc.{fc,post_attention_layernorm}", "fc.mlp.{gate,up,down}_proj")
    | {"fc.fc.bias"},
    "unrolled": LAYER
    | weights_of("fc.{fc,post_attention_layernorm}", "fc.mlp.{gate,up,down}_proj")
    | {"fc.fc.bias"},
    "griffin": LAYER
    | weights_of("fc.{fc,post_attention_layernorm}", "fc.mlp.{input_layernorm,up_proj,down_proj}")
    | {"fc.fc.bias"},
    "eagle3": weights_of(
        "midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}",
        f"midlayer.{ATTENTION}",
        "midlayer.mlp.{gate,up,down}_proj",
        "{fc,norm,lm_head}",
    )
    | {"d2t", "t2d"},
    "medusa": weights_of("{0,1,2,3}.0.linear", "{0,1,2,3}.1")
    | {f"{head}.0.linear.bias" for head in range(4)},
    "p_eagle": weights_of(
        "layers.0.hidden_norm",
        *(f"layers.{number}.{part}" for number in (0, 1) for part in PARTS),
        "{fc,norm,lm_head}",
    )
    | {"d2t", "t2d", "mask_embedding", "mask_hidden"},
    "parallel": weights_of(
        *(f"layers.{number}.{part}" for number in (0, 1) for part in PARTS),
        "{fc,hidden_norm,norm,out,markov_in,markov_out}",
    )
    | {"masks"},
}
"""Every name in a file that the authors' own code writes, but for copies of the embedding; of
`parallel` and `p_eagle` in our own."""


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_released_names(kind: str, target: HFTarget, tmp_path: Path) -> None:
    saved(kind, target, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    assert load_file(path).keys() == RELEASED[kind]
    assert path.name == ("medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors")


def test_the_measures_of_medusa_heads_are_written(target: HFTarget, tmp_path: Path) -> None:
    saved("medusa", target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"medusa_num_heads": 4, "medusa_num_layers": 1, "hidden_size": 32, "vocab_size": 64}
    assert wanted.items() <= config.items()


def test_neither_embedding_nor_head_of_the_target_is_written(
    target: HFTarget, tmp_path: Path
) -> None:
    for kind in ("eagle", "hass", "fspad", "griffin"):
        names = saved(kind, target, tmp_path / kind).keys()
        assert not any(
            "embed" in name or "lm_head" in name or name == "norm.weight" for name in names
        )


PICKLED = ("pickled=true",)


def test_a_released_folder_with_an_embedding_loads(target: HFTarget, tmp_path: Path) -> None:
    written = saved("eagle", target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "drafter.json").unlink()
    with torch.no_grad():
        embedding = target.embed(torch.arange(64))
    everything = {f"model.{name}": one for name, one in written.items()}
    torch.save(everything | {"embed_tokens.weight": embedding}, tmp_path / "pytorch_model.bin")
    drafter = made("eagle", target, str(tmp_path), PICKLED)
    assert torch.equal(tensors(drafter)["fc.weight"], written["fc.weight"])
    drafter.save(tmp_path / "again", kind="eagle")
    made("eagle", target, str(tmp_path / "again"))
    assert "pickled" not in (tmp_path / "again" / "drafter.json").read_text()
    torch.save(everything | {"embed_tokens.weight": embedding + 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BackendError, match="copy of the embedding"):
        made("eagle", target, str(tmp_path), PICKLED)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_pickled_weights_are_read_only_when_that_is_asked(
    kind: str, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saved(kind, target, tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    weights.unlink()
    name = "medusa_lm_head.pt" if kind == "medusa" else "pytorch_model.bin"
    torch.save(written, tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("it is unpickled"))
        with pytest.raises(BackendError, match=rf"{name}.*pickled=true.*safetensors"):
            made(kind, target, str(tmp_path))
    read = tensors(made(kind, target, str(tmp_path), PICKLED))
    assert all(torch.equal(written[name], read[name]) for name in written)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('ran')",))


@pytest.mark.parametrize("content", [{"fc.weight": Harmful()}, {"fc.weight": 3}, [torch.ones(2)]])
def test_nothing_but_tensors_is_taken_from_a_pickle(
    target: HFTarget, tmp_path: Path, content: object
) -> None:
    """What torch advises there, to turn its guard off, is not passed on."""
    saved("eagle", target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(BackendError, match=r"weights in .*pytorch_model\.bin") as caught:
        made("eagle", target, str(tmp_path), PICKLED)
    assert "weights_only" not in str(caught.value)
    assert "tensors" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 700])
def test_a_pickle_that_was_cut_is_called_damaged(
    kept: int, target: HFTarget, tmp_path: Path
) -> None:
    written = saved("eagle", target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(written, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BackendError, match=r"pytorch_model\.bin cannot be read: it is damaged"):
        made("eagle", target, str(tmp_path), PICKLED)


def test_released_medusa_heads_load(target: HFTarget, tmp_path: Path) -> None:
    written = saved("medusa", target, tmp_path)
    for prefix in ("", "medusa_head."):
        heads = {f"{prefix}{name}": one for name, one in written.items()}
        save_file(heads, tmp_path / "medusa_lm_head.safetensors")
        drafter = made("medusa", target, str(tmp_path))
        assert (drafter.num_steps, drafter.longest) == (4, 4)
        read = tensors(drafter)
        assert all(torch.equal(written[name], read[name]) for name in written)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", 10**12),
        ("num_attention_heads", 10**9),
        ("head_dim", 10**10),
        ("num_hidden_layers", 10**7),
        ("draft_vocab_size", 10**12),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_memory_is_asked_for(
    target: HFTarget, tmp_path: Path, key: str, value: int
) -> None:
    saved("eagle3", target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(BackendError, match=r"config\.json") as caught:
        made("eagle3", target, str(tmp_path))
    assert "alloc" not in str(caught.value)


def test_heads_that_are_numbered_absurdly_are_refused(target: HFTarget, tmp_path: Path) -> None:
    heads = saved("medusa", target, tmp_path)
    heads["1000000000.0.linear.weight"] = heads.pop("3.0.linear.weight")
    save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(BackendError, match=r"\b1000000000\.0\.linear\.weight"):
        made("medusa", target, str(tmp_path))


def test_a_tensor_under_two_names_is_refused(target: HFTarget, tmp_path: Path) -> None:
    found = saved("eagle", target, tmp_path)
    found["model.fc.weight"] = found["fc.weight"] + 1
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match="two names"):
        made("eagle", target, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks fc.weight: .*KIND:FOLDER.*"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "its kind has no, extra: .*"),
        (lambda tensors: tensors.update({"fc.bias": torch.ones(3)}), r"fc.bias is \[3\], .*"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], said: str, target: HFTarget, tmp_path: Path
) -> None:
    saved("eagle", target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match=rf"{said}train or convert .* again"):
        made("eagle", target, str(tmp_path))


def test_a_drafter_for_another_target_is_refused(target: HFTarget, tmp_path: Path) -> None:
    saved("griffin", target, tmp_path)
    for other in (tiny_target(64, hidden=64), tiny_target(80)):
        with pytest.raises(BackendError, match="made for another target"):
            made("griffin", other, str(tmp_path))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"layers": [0, 1, 2]}, r"layers \[0, 1, 2\]"),
        ({"vocabulary_sha256": "0123456789abcdef"}, "the tokenizer 0123456789ab"),
        ({"vocabulary_sha256": -1}, "the tokenizer -1"),
        ({"vocabulary_sha256": [0]}, r"the tokenizer \[0\]"),
    ],
)
def test_a_folder_says_which_target_it_is_for(
    facts: dict[str, object], said: str, tmp_path: Path
) -> None:
    known = tiny_target(300, layers=8)
    known.tokenizer = tiny_tokenizer()
    saved("eagle3", known, tmp_path)
    made("eagle3", known, str(tmp_path))
    manifest = json.loads((tmp_path / "drafter.json").read_text())
    manifest["target"] |= facts
    (tmp_path / "drafter.json").write_text(json.dumps(manifest))
    with pytest.raises(BackendError, match=said):
        made("eagle3", known, str(tmp_path))


def test_maps_between_vocabularies_must_agree(target: HFTarget, tmp_path: Path) -> None:
    saved("eagle3", target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    t2d = torch.ones(64, dtype=torch.bool)
    save_file(found | {"t2d": t2d}, tmp_path / "model.safetensors")
    made("eagle3", target, str(tmp_path))
    t2d[5] = False
    save_file(found | {"t2d": t2d}, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match="contradict"):
        made("eagle3", target, str(tmp_path))


SMALL_VOCABULARIES = ["eagle3", "eagle", "griffin", "medusa", "p_eagle"]


def kept(kind: str, target: HFTarget, folder: Path, tokens: list[int]) -> TrainedDrafter:
    """A drafter that knows these tokens, on disk."""
    drafter = make_drafter(kind, [f"draft_vocab={len(tokens)}"])
    drafter.bind(target)
    counts_V = torch.zeros(64)
    counts_V[tokens] = 1.0
    assert isinstance(drafter, TrainedDrafter)
    assert drafter.wants_token_counts
    drafter.choose_vocabulary(counts_V)
    drafter.save(folder, kind=kind)
    return drafter


@pytest.mark.parametrize("kind", SMALL_VOCABULARIES)
def test_both_maps_of_a_vocabulary_are_written(kind: str, target: HFTarget, tmp_path: Path) -> None:
    drafter = kept(kind, target, tmp_path, [3, 9, 60])
    found = load_file(tmp_path / drafter.weights_file)
    assert found["d2t"].tolist() == [3, 8, 58]
    assert found["t2d"].shape == (64,) and found["t2d"].nonzero().flatten().tolist() == [3, 9, 60]
    again = made(kind, target, str(tmp_path))
    assert isinstance(again, TrainedDrafter) and not again.wants_token_counts
    states = torch.randn(2, 32, dtype=torch.float64)
    assert torch.equal(again.head()(states), drafter.head()(states))
    # what an untrained drafter would choose stays as it is on disk
    again.choose_vocabulary(torch.arange(64.0))
    assert again.network.target_ids.tolist() == [3, 9, 60]


@pytest.mark.parametrize("kind", SMALL_VOCABULARIES)
@pytest.mark.parametrize(
    ("d2t", "known", "said"),
    [
        ([3, 600, 500], None, "token 1 the id 601 .* ids below 64;"),
        ([3, 8, -70], None, "token 2 the id -68 .* ids below 64;"),
        ([3, 2, 58], None, "token 1 the id 3 .* as to the one before it;"),
        ([9, 2, 8], None, "token 1 the id 3 .* behind 9: they must ascend;"),
        ([3, 8, 58], 70, "d2t and t2d"),
    ],
    ids=["beyond the end", "below 0", "one token twice", "descending", "a longer vocabulary"],
)
def test_a_map_that_cannot_be_is_refused(
    kind: str, target: HFTarget, tmp_path: Path, d2t: list[int], known: int | None, said: str
) -> None:
    """The first token of the drafter that is wrong is named, and what to do."""
    file = tmp_path / kept(kind, target, tmp_path, [3, 9, 60]).weights_file
    found = load_file(file)
    del found["t2d"]
    found["d2t"] = torch.tensor(d2t)
    if known is not None:
        found["t2d"] = torch.zeros(known, dtype=torch.bool)
        found["t2d"][[3, 9, 60]] = True
    save_file(found, file)
    with pytest.raises(BackendError, match=f"{said}.* train or convert it again"):
        made(kind, target, str(tmp_path))


@pytest.mark.parametrize("size", [-1, 65])
def test_a_draft_vocabulary_beyond_the_targets_is_refused(size: int, target: HFTarget) -> None:
    for kind in SMALL_VOCABULARIES:
        with pytest.raises(InputError, match="draft_vocab must lie between 0"):
            make_drafter(kind, [f"draft_vocab={size}"]).bind(target)


@pytest.mark.parametrize("kind", SMALL_VOCABULARIES)
def test_without_counts_no_vocabulary_is_chosen(kind: str, target: HFTarget) -> None:
    drafter = make_drafter(kind, ["draft_vocab=5"])
    drafter.bind(target)
    with pytest.raises(InputError, match="learn from a --store"):
        drafter.choose_vocabulary(None)


def test_a_whole_vocabulary_has_no_other_order(target: HFTarget, tmp_path: Path) -> None:
    saved("eagle3", target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    found["d2t"][-1] = 500
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match=r"ids below 64\b"):
        made("eagle3", target, str(tmp_path))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(
    target: HFTarget, tmp_path: Path, value: float
) -> None:
    saved("griffin", target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    name = sorted(found)[3]
    found[name].view(-1)[0] = value
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match=rf"not finite.*{name}"):
        made("griffin", target, str(tmp_path))


@pytest.mark.parametrize("kind", ["eagle", "griffin"])
def test_biases_by_their_released_name(kind: str, target: HFTarget, tmp_path: Path) -> None:
    """GRIFFIN's configuration for Qwen2 says `qkv_bias`, and not `attention_bias`."""
    saved(kind, target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    for name in [name for name in found if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        found[name.replace("weight", "bias")] = torch.ones(len(found[name]))
    for name in [name for name in found if name.endswith("v_proj.weight")]:
        found[name.replace("weight", "bias")] = torch.full((len(found[name]),), 2.0)
    save_file(found, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"qkv_bias": True}))
    read = tensors(made(kind, target, str(tmp_path)))
    assert torch.equal(
        read["layers.0.self_attn.v_proj.bias"], found["layers.0.self_attn.v_proj.bias"]
    )


@pytest.mark.parametrize("key", ["qkv_bias", "attention_bias"])
def test_released_biases_win(key: str, target: HFTarget, tmp_path: Path) -> None:
    """Released code reads `qkv_bias` alone, whatever `attention_bias` says beside it."""
    saved("griffin", target, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    biases = {
        name.replace("weight", "bias"): torch.ones(len(one))
        for name, one in found.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    if key == "qkv_bias":
        save_file(found | biases, tmp_path / "model.safetensors")
    said = {"qkv_bias": False, "attention_bias": False} | {key: True}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    read = tensors(made("griffin", target, str(tmp_path)))
    assert (biases.keys() <= read.keys()) == (key == "qkv_bias")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (LLAMA3, LLAMA3 | {"type": "llama3"}),
    ],
    ids=lambda one: None if one is None else one.get("rope_type", ""),
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "griffin"])
def test_released_code_finds_its_keys(
    kind: str, rope: dict[str, object], scaling: dict[str, object] | None, tmp_path: Path
) -> None:
    """They stand at the top level; released code takes a missing base for 10,000."""
    other = tiny_target(64, layers=8)
    other.config.rope_parameters = rope | {"rope_theta": 5e5}
    other.config.attention_bias = True
    saved(kind, other, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"rope_theta": 5e5, "rope_scaling": scaling, "qkv_bias": True}
    assert {name: config[name] for name in wanted} == wanted

    def read_back() -> dict[str, object]:
        drafter = made(kind, other, str(tmp_path))
        assert isinstance(drafter, FeatureDrafter)
        return dict(drafter.layer.rope_parameters)

    assert read_back() == rope | {"rope_theta": 5e5}
    # as code that knows nothing of `rope_parameters` reads it
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (rope | {"rope_theta": 5e5}).items() <= read_back().items()


def test_a_whole_vocabulary_needs_no_maps(target: HFTarget, tmp_path: Path) -> None:
    """Released EAGLE-3 has none where its vocabulary is the target's."""
    written = saved("eagle3", target, tmp_path)
    assert len(written["d2t"]) == target.vocab_size
    found = load_file(tmp_path / "model.safetensors")
    del found["d2t"], found["t2d"]
    save_file(found, tmp_path / "model.safetensors")
    read = tensors(made("eagle3", target, str(tmp_path)))
    assert all(torch.equal(written[name], read[name]) for name in written)


def test_a_part_of_the_vocabulary_needs_a_map(target: HFTarget, tmp_path: Path) -> None:
    kept("eagle3", target, tmp_path, [3, 9, 60])
    found = load_file(tmp_path / "model.safetensors")
    del found["d2t"]
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match="lacks d2t"):
        made("eagle3", target, str(tmp_path))


def test_a_folder_without_weights_or_measures_says_so(target: HFTarget, tmp_path: Path) -> None:
    saved("eagle", target, tmp_path)
    config = (tmp_path / "config.json").rename(tmp_path / "aside")
    with pytest.raises(BackendError, match=r"config\.json"):
        made("eagle", target, str(tmp_path))
    config.rename(tmp_path / "config.json")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BackendError, match="holds no weights"):
        made("eagle", target, str(tmp_path))
    assert json.loads((tmp_path / "drafter.json").read_text())["kind"] == "eagle"
