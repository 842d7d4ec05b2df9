"""What a run may be told about memory and machines: recomputed layers, devices, processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.small_trainer import (
    CONFIG,
    Bigram,
    build,
    llama,
    make_trainer,
    named,
    same,
    weights,
)
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.core.types import FullLogprobs, TopLogprobs, TrajectoryBatch
from draftsmith.distill import distributed
from draftsmith.distill.config import RunConfig, ScheduleConfig
from draftsmith.distill.distributed import (
    faster_precision,
    make_accelerator,
    precision,
    precision_of,
    to_device,
)
from draftsmith.distill.trainer import Trainer, recompute_layers
from draftsmith.errors import BackendError, InputError

# --------------------------------------------------------------------------- recomputed layers


def forwards(trainer: Trainer) -> int:
    """How often a layer's part runs in one step."""
    calls: list[int] = []
    for module in trainer.drafter.modules():
        if isinstance(module, LlamaMLP):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.one_step()
    return len(calls)


def test_recomputed_layers_run_twice_and_change_nothing(tmp_path: Path) -> None:
    plain = build(tmp_path / "a", {"drafter": "llama", "gradient_accumulation": 2})
    again = build(
        tmp_path / "b",
        {"drafter": "llama", "gradient_accumulation": 2, "gradient_checkpointing": True},
    )
    assert forwards(plain) == 2 * 2 and forwards(again) == 2 * 2 * 2
    gradients = [
        {name: p.grad for name, p in named(trainer).items() if p.grad is not None}
        for trainer in (plain, again)
    ]
    assert same(gradients[0], gradients[1]) and same(weights(plain), weights(again))


def test_a_drafter_may_bring_its_own_way_to_recompute() -> None:
    class Own(Bigram):
        asked: dict[str, Any] | None = None

        def gradient_checkpointing_enable(
            self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
        ) -> None:
            self.asked = gradient_checkpointing_kwargs

    drafter = Own()
    drafter.inner = Own()  # which the outer one may not let be asked
    recompute_layers(drafter)
    assert drafter.asked == {"use_reentrant": False} and drafter.inner.asked is None


def test_a_drafter_without_layers_to_recompute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Bigram.*layers"):
        make_trainer(tmp_path, config=replace(CONFIG, gradient_checkpointing=True))


# --------------------------------------------------------------------------- devices


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    names = getattr(type(value), "__dataclass_fields__", {})
    return [tensor for name in names for tensor in tensors_in(getattr(value, name))]


@pytest.mark.parametrize("full", [False, True])
def test_everything_in_a_batch_moves_to_the_device(full: bool) -> None:
    grid = torch.zeros(2, 4, dtype=torch.long)
    top = TopLogprobs(ids_NK=torch.zeros(3, 2), log_p_NK=torch.zeros(3, 2))
    whole = FullLogprobs(hidden_NH=torch.zeros(3, 8), head=nn.Identity())
    batch = TrajectoryBatch(
        tokens_BT=grid,
        loss_mask_BT=grid,
        documents_BT=grid,
        laws=whole if full else top,
        law_row_BT=grid,
        weights_BT=grid.float(),
    )
    moved = to_device(batch, torch.device("meta"))
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta"] * (6 if full else 7)
    assert type(moved.laws) is type(batch.laws)
    assert not full or moved.laws.head is whole.head
    bare = to_device(TrajectoryBatch(tokens_BT=grid, loss_mask_BT=grid), torch.device("meta"))
    assert bare.laws is None and bare.weights_BT is None and len(tensors_in(bare)) == 2


@pytest.mark.parametrize(
    ("gain", "chosen"), [(0.6, "float32"), (1.1, "float32"), (4.0, "bfloat16")]
)
def test_auto_is_the_arithmetic_that_this_processor_multiplies_faster(
    gain: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1e-3 < distributed.bfloat16_gain() < 1e3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(distributed, "bfloat16_gain", lambda: gain)
    assert faster_precision() == chosen


@pytest.mark.parametrize("begun", ["bfloat16", "float32"])
def test_a_run_goes_on_in_the_arithmetic_that_it_was_begun_in(
    begun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under --dtype auto: the same machine may measure another one on another day."""
    other = "float32" if begun == "bfloat16" else "bfloat16"
    monkeypatch.setattr(distributed, "faster_precision", lambda: other)
    options = RunConfig(out=tmp_path)
    assert precision(options) == other
    trainer = build(tmp_path / "work", {"drafter": "bigram"})
    trainer.identity = {"precision": begun}
    trainer.save()
    assert precision(options) == begun
    assert precision(replace(options, dtype=other)) == other  # what is asked for is refused later
    assert precision_of(make_accelerator(begun)) == begun


def test_processes_that_accelerate_does_not_join_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would train everything, into the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # of a kind without groups
    alone = SimpleNamespace(num_processes=1, device="mps")
    monkeypatch.setattr(distributed, "Accelerator", lambda **options: alone)
    with pytest.raises(BackendError, match=r"3 processes.*1 of them on mps"):
        make_accelerator("float32")


def test_a_group_that_nobody_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BackendError, match=r"WORLD_SIZE is 2\b.*RANK"):
        make_accelerator("float32")


def test_the_tiny_llama_of_these_tests_has_a_frozen_parameter_and_tied_ones() -> None:
    parameters = dict(llama().named_parameters())
    assert sum(not value.requires_grad for value in parameters.values()) == 1
    assert not any("lm_head" in name for name in parameters)


# --------------------------------------------------------------------------- DeepSpeed


def test_deepspeed_is_refused_and_what_replaces_it_is_named() -> None:
    with pytest.raises(InputError, match=r"--deepspeed .*cannot resume.* --parallel sharded"):
        ScheduleConfig(deepspeed=Path("ds.json")).validate()
    ScheduleConfig().validate()
