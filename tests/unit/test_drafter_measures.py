"""Folders of drafters over hidden states that ask for something else than is computed here, or that
are damaged: refused in a sentence that names it, and never half understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.types import Signals
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter, make_drafter
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(64, layers=8)


def released(kind: str, target: HFTarget, folder: Path, **changes: Any) -> Path:
    """A folder as the authors' code writes it: without what only ours says."""
    drafter = make_drafter(kind)
    drafter.bind(target)
    drafter.save(folder, kind=kind)
    (folder / "drafter.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def loaded(kind: str, target: HFTarget, folder: Path) -> Drafter:
    drafter = load_drafter(f"{kind}:{folder}")
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "griffin"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' in its config.json, and only 'silu'"),
        ({"norm_output": True}, "norm_output is True in its config.json, and only False"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"hidden_size": 16, "target_hidden_size": 32}, r"narrower \(16\) than its target \(32\)"),
        ({"hidden_size": 16}, "its hidden_size is 16, the target's is 32"),
        ({"num_attention_heads": 3}, "Cannot load the drafter"),
        ({"hidden_size": "x"}, "Cannot load the drafter"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "Cannot load the drafter"),
        ({"intermediate_size": -1}, "Cannot load the drafter"),
    ],
)
def test_measures_that_are_not_computed_here_are_named(
    kind: str, changes: dict[str, Any], said: str, target: HFTarget, tmp_path: Path
) -> None:
    folder = released(kind, target, tmp_path, **changes)
    with pytest.raises(BackendError, match=said):
        loaded(kind, target, folder)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_config": {IDS: [0, 2, 7]}}, (0, 2, 7)),
        ({IDS: [1, 3, 8]}, (0, 2, 7)),
        # the usual ones of a target with L layers: outputs of 1, L / 2 - 1 and L - 4
        ({"eagle_config": {IDS: [1, 3, 4]}}, (1, 3, 4)),
        ({IDS: [2, 4, 5]}, (1, 3, 4)),
        ({"eagle_config": {IDS: []}}, (1, 3, 4)),
        ({IDS: []}, (1, 3, 4)),
    ],
)
def test_eagle3_reads_the_layers_that_its_folder_declares(
    config: dict[str, Any], layers: tuple[int, ...], target: HFTarget, tmp_path: Path
) -> None:
    """Inside `eagle_config` by their outputs, beside it by what stands in front of them."""
    folder = released("eagle3", target, tmp_path, **config)
    assert loaded("eagle3", target, folder).signals == Signals(layers=layers)


@pytest.mark.parametrize("said", [[1, 3], [-1, 2, 4], [2, 4, 8], ["a", "b", "c"], "all"])
def test_layers_that_the_target_has_not_are_refused(
    said: object, target: HFTarget, tmp_path: Path
) -> None:
    folder = released("eagle3", target, tmp_path, eagle_config={IDS: said})
    with pytest.raises(BackendError, match=r"numbers from 0 to 7\b"):
        loaded("eagle3", target, folder)


@pytest.mark.parametrize("said", [[1], "all"])
def test_an_eagle_config_that_is_no_object_is_refused(
    said: object, target: HFTarget, tmp_path: Path
) -> None:
    folder = released("eagle3", target, tmp_path, eagle_config=said)
    with pytest.raises(BackendError, match=r"eagle_config is .* should be an object"):
        loaded("eagle3", target, folder)


@pytest.mark.parametrize("kind", ["int8", "int32", "float8_e4m3fn", "float8_e5m2"])
def test_quantised_weights_are_refused(kind: str, target: HFTarget, tmp_path: Path) -> None:
    path = released("eagle", target, tmp_path) / "model.safetensors"
    found = load_file(path)
    name = "layers.0.self_attn.q_proj.weight"
    save_file(found | {name: found[name].to(getattr(torch, kind))}, path)
    with pytest.raises(BackendError, match=rf"{name}.*{kind}.*floating-point.*16"):
        loaded("eagle", target, tmp_path)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_map_of_other_numbers_is_refused(kind: str, target: HFTarget, tmp_path: Path) -> None:
    path = released("eagle3", target, tmp_path) / "model.safetensors"
    found = load_file(path)
    save_file(found | {"d2t": found["d2t"].to(getattr(torch, kind))}, path)
    wanted = f"holds d2t as {kind}, where whole numbers of 16 to 64 bits belong"
    with pytest.raises(BackendError, match=wanted):
        loaded("eagle3", target, tmp_path)


@pytest.mark.parametrize("change", ["late row", "short", "narrow", "number"])
def test_a_copy_of_another_embedding_is_noticed(
    change: str, target: HFTarget, tmp_path: Path
) -> None:
    path = released("eagle", target, tmp_path) / "model.safetensors"
    with torch.no_grad():
        embedding = target.embed(torch.arange(64)).clone()
    found = load_file(path) | {"embed_tokens.weight": embedding}
    save_file(found, path)
    loaded("eagle", target, tmp_path)
    if change == "late row":
        embedding[60] += 1
    elif change == "short":
        found["embed_tokens.weight"] = embedding[:60].clone()
    else:
        other = embedding[:, :16].clone() if change == "narrow" else torch.tensor(1.0)
        found["embed_tokens.weight"] = other
    save_file(found, path)
    with pytest.raises(BackendError, match="copy of the embedding"):
        loaded("eagle", target, tmp_path)


def test_heads_of_any_width_are_written(tmp_path: Path) -> None:
    """Not only of widths that the usual number of attention heads divides."""
    target = tiny_target(64, hidden=48)
    released("medusa", target, tmp_path)
    loaded("medusa", target, tmp_path)


def test_heads_that_are_none_are_refused(target: HFTarget, tmp_path: Path) -> None:
    released("medusa", target, tmp_path)
    for held in ({}, {"0.weight": torch.ones(2)}):
        save_file(held, tmp_path / "medusa_lm_head.safetensors")
        with pytest.raises(BackendError, match="holds no Medusa heads"):
            loaded("medusa", target, tmp_path)


def test_a_folder_of_a_kind_that_is_not_installed_says_so(target: HFTarget, tmp_path: Path) -> None:
    released("eagle", target, tmp_path)
    said = {"kind": "eagel", "options": {}, "target": {}}
    (tmp_path / "drafter.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"'eagel'.*not installed"):
        load_drafter(str(tmp_path))
