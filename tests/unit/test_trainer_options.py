"""What a run may be told about memory and machines: recomputed layers, devices, DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tests.small_trainer import (
    CONFIG,
    Bigram,
    FakeDeepSpeed,
    build,
    check_close,
    choosing,
    llama,
    make_trainer,
    named,
    same,
    weights,
)
from torch import Tensor, nn
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.core.types import FullLaws, TopLaws, TrajectoryBatch
from draftsmith.distill import distributed, trainer_config
from draftsmith.distill.distributed import Engine, to_device
from draftsmith.distill.trainer import Trainer
from draftsmith.distill.trainer_config import (
    make_accelerator,
    read_deepspeed,
    recompute_layers,
)
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
    plain = build(tmp_path / "a", {"drafter": "llama", "accumulation": 2})
    again = build(
        tmp_path / "b", {"drafter": "llama", "accumulation": 2, "gradient_checkpointing": True}
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
    recompute_layers(drafter)
    assert drafter.asked == {"use_reentrant": False}


def test_a_drafter_without_layers_to_recompute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Bigram has no layers that can be computed again"):
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
    top = TopLaws(ids_NK=torch.zeros(3, 2), log_p_NK=torch.zeros(3, 2))
    whole = FullLaws(hidden_NH=torch.zeros(3, 8), head=nn.Identity())
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


# --------------------------------------------------------------------------- DeepSpeed's file


def config_of(folder: Path, content: Any, **changes: Any) -> trainer_config.TrainerConfig:
    path = folder / "ds.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return replace(CONFIG, deepspeed=path, **changes)


ZERO = {"zero_optimization": {"stage": 2}}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        ({}, 1, (2, 1, 2)),
        ({"train_batch_size": 24}, 3, (24, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 4}, 3, (24, 4, 2)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 1, (8, 4, 2)),
        (dict.fromkeys(SIZES, "auto"), 2, (4, 1, 2)),
    ],
)
def test_missing_batch_sizes_follow_from_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    processes: int,
    expected: tuple[int, int, int],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    found = read_deepspeed(config_of(tmp_path, ZERO | given, accumulation=2, clip_norm=0.5))
    assert found is not None
    assert tuple(found[key] for key in SIZES) == expected
    assert found["zero_optimization"] == {"stage": 2} and found["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{half", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ([], "must hold one JSON object"),
        (3, "must hold one JSON object"),
        ({}, "needs an object 'zero_optimization'"),
        ({"zero_optimization": 2}, "needs an object 'zero_optimization'"),
        (
            {"zero_optimization": {"stage": 3, trainer_config.GATHER: False}},
            "stage3_gather_16bit_weights_on_model_save must be true or left out",
        ),
        (ZERO | {"optimizer": {"type": "AdamW"}}, "remove 'optimizer'"),
        (ZERO | {"scheduler": {"type": "WarmupLR"}}, "remove 'scheduler'"),
        (ZERO | {"gradient_clipping": 0.3}, "gradient_clipping is 0.3, the trainer's .* is 1.0"),
        (ZERO | {"train_batch_size": 0}, "train_batch_size must be a positive whole number"),
        (ZERO | {"train_batch_size": "8"}, "train_batch_size must be a positive whole number"),
        (ZERO | {"train_batch_size": True}, "train_batch_size must be a positive whole number"),
        (ZERO | {"gradient_accumulation_steps": 4}, "steps is 4, the trainer accumulates 2"),
        (
            ZERO | {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
            "is 30, but 4 per process x 2 accumulated x 1 processes are 8",
        ),
        (ZERO | {"train_batch_size": 7}, "is 7, but 3 per process"),
    ],
)
def test_a_file_that_contradicts_itself_or_the_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, message: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match=message) as caught:
        read_deepspeed(config_of(tmp_path, content, accumulation=2))
    assert "ds.json" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the DeepSpeed file .*none\.json: No such"):
        read_deepspeed(replace(CONFIG, deepspeed=tmp_path / "none.json"))
    with pytest.raises(InputError, match="DeepSpeed spreads the weights itself"):
        replace(CONFIG, deepspeed=tmp_path / "none.json", parallel="sharded")
    assert read_deepspeed(CONFIG) is None


def test_without_the_package_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(trainer_config, "is_deepspeed_available", lambda: False)
    with pytest.raises(BackendError, match="'deepspeed' is not installed: pip install deepspeed"):
        make_trainer(tmp_path, config=config_of(tmp_path, ZERO))


def test_the_configuration_reaches_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(trainer_config, "is_deepspeed_available", lambda: True)

    def accelerator(**options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(num_processes=1, distributed_type=DistributedType.DEEPSPEED)

    monkeypatch.setattr(trainer_config, "Accelerator", accelerator)
    content = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "train_batch_size": 6}
    make_accelerator("float32", deepspeed=read_deepspeed(config_of(tmp_path, content)))
    plugin = given["deepspeed_plugin"]
    assert isinstance(plugin, trainer_config.DeepSpeedPlugin)
    assert plugin.zero_stage == 3 and plugin.gradient_clipping == CONFIG.clip_norm
    handed = plugin.hf_ds_config.config
    assert handed["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,  # or no weights could be written
    }
    assert tuple(handed[key] for key in SIZES) == (6, 6, 1)


def test_models_that_are_loaded_later_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Zero3:
        def is_zero3(self) -> bool:
            return True

    zero3 = Zero3()  # transformers holds it by a weak reference

    def accelerator(**options: Any) -> Any:
        set_hf_deepspeed_config(zero3)  # as accelerate's does when it selects the plug-in
        return SimpleNamespace(num_processes=1, distributed_type=DistributedType.DEEPSPEED)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(trainer_config, "is_deepspeed_available", lambda: True)
    monkeypatch.setattr(trainer_config, "Accelerator", accelerator)
    content = {"zero_optimization": {"stage": 3}}
    make_accelerator("float32", deepspeed=read_deepspeed(config_of(tmp_path, content)))
    assert not is_deepspeed_zero3_enabled()


def test_deepspeed_without_a_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BackendError, match=r"start it with torchrun"):
        make_accelerator("float32", deepspeed=read_deepspeed(config_of(tmp_path, ZERO)))


def test_stage_3_of_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for each other where unlike numbers of places count."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"Use stage 2, or .* --parallel sharded"):
        read_deepspeed(config_of(tmp_path, {"zero_optimization": {"stage": 3}}))


def test_processes_that_accelerate_does_not_join_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would train everything, into the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # of a kind without groups
    alone = SimpleNamespace(num_processes=1, device="mps")
    monkeypatch.setattr(trainer_config, "Accelerator", lambda **options: alone)
    with pytest.raises(BackendError, match=r"3 processes were started, .* joins 1 of them on mps"):
        make_accelerator("float32")


def test_a_group_that_nobody_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BackendError, match="WORLD_SIZE is 2, but there is no RANK: start"):
        make_accelerator("float32")


def test_deepspeed_that_accelerate_leaves_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where ACCELERATE_USE_CPU is set: the run would be one without it."""
    plain = SimpleNamespace(num_processes=1, distributed_type=DistributedType.MULTI_CPU)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(trainer_config, "is_deepspeed_available", lambda: True)
    monkeypatch.setattr(trainer_config, "Accelerator", lambda **options: plain)
    with pytest.raises(BackendError, match="unset that"):
        make_accelerator("float32", deepspeed=read_deepspeed(config_of(tmp_path, ZERO)))


# --------------------------------------------------------------------------- DeepSpeed's engine


@pytest.mark.parametrize("backward", ["sum", "each"])
def test_an_engine_that_steps_by_itself_makes_the_same_steps(tmp_path: Path, backward: str) -> None:
    config = replace(CONFIG, accumulation=2)
    runs = []
    for name, fake in (("usual", None), ("engine", FakeDeepSpeed())):
        drafter = Bigram(dropout=0, num_steps=2, backward=backward)
        trainer = make_trainer(tmp_path / name, drafter=drafter, config=config, accelerator=fake)
        runs.append((trainer, trainer.train()))
    (usual, first), (engine, second) = runs
    assert isinstance(engine.layout, Engine) and engine.accelerator.steps == CONFIG.steps
    check_close(weights(engine), weights(usual), rtol=1e-3, atol=1e-4)
    assert second.losses[-1][1] == pytest.approx(first.losses[-1][1], rel=1e-4)
    again = make_trainer(tmp_path / "engine", config=config, accelerator=FakeDeepSpeed())
    with pytest.raises(BackendError, match="cannot take weights from a checkpoint"):
        again.train()


def test_the_best_weights_of_an_engine_are_copied_though_it_takes_none_in(tmp_path: Path) -> None:
    config = replace(CONFIG, evaluate_every=1, learning_rate=0.5)
    fake: Any = FakeDeepSpeed()
    trainer = make_trainer(tmp_path, config=config, evaluations=[choosing()], accelerator=fake)
    report = trainer.train()
    best = make_trainer(tmp_path / "best", evaluations=[choosing()])
    assert trainer.copy_best_into(best.drafter) == report.best_step != CONFIG.steps
    assert best.evaluate() == report.best_evaluation != report.evaluation


def test_where_the_main_process_alone_is_given_the_weights_all_can_copy_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = make_trainer(tmp_path / "0", accelerator=FakeDeepSpeed())
    main.one_step()
    other = make_trainer(tmp_path / "1", accelerator=FakeDeepSpeed(num_processes=2, rank=1))

    def from_main(box: list[Any]) -> None:
        assert box == [None], "with ZeRO-3, what others than the main process are given"
        box[0] = main.accelerator.get_state_dict(main.layout.learner)

    monkeypatch.setattr(distributed, "broadcast_object_list", from_main)
    assert other.layout.weights() == {}, "a checkpoint is written by the main process"
    copy = Bigram()
    other.copy_into(copy)
    assert same(dict(copy.named_parameters()), weights(main))


def test_an_engine_is_not_fed_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    class Poison:
        def loss(self, prediction: Any, batch: Any, head: Any) -> Any:
            total = prediction.hidden_BTH.sum() * float("nan")
            return SimpleNamespace(total=total, weight=torch.ones(()))

    fake: Any = FakeDeepSpeed()
    trainer = make_trainer(tmp_path, objective=Poison(), accelerator=fake)
    before = weights(trainer)
    assert trainer.one_step().skipped and fake.steps == 0
    assert same(before, weights(trainer))


def test_the_tiny_llama_of_these_tests_has_a_frozen_parameter_and_tied_ones() -> None:
    parameters = dict(llama().named_parameters())
    assert sum(not value.requires_grad for value in parameters.values()) == 1
    assert not any("lm_head" in name for name in parameters)
