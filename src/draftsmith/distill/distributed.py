"""How the weights of a run lie over its processes: whole on each, or a part on each.

    data      process 0  [w0 w1 w2 w3]      process 1  [w0 w1 w2 w3]     DDP, through accelerate
    sharded   process 0  [w0 w1      ]      process 1  [      w2 w3]     FSDP2, torch's fully_shard

A sharded run holds its part of weights, gradients and optimiser state; the weights of one decoder
layer at a time are gathered while they are needed. Both average gradients over processes, and both
write the same checkpoints: whole tensors, so that a run may go on with another layout or number of
processes. torch is used directly because accelerate's plug-in ignores processes on CPUs silently.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, broadcast_object_list, convert_to_fp32
from accelerate.utils.environment import get_int_from_env, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.config import RunConfig, ScheduleConfig
from draftsmith.distill.objectives.distillation import Objective
from draftsmith.drafters.base import Drafter
from draftsmith.errors import BackendError, InputError, nearest
from draftsmith.provenance import memory_bytes, output_folder, recorded, write_error


class Learner(nn.Module):
    """Drafter and objective in one forward, so that wrappers see every weight and gradient."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: TrajectoryBatch, carry: Any, objective: Objective) -> dict[str, Any]:
        prediction, carry = self.drafter(batch, carry)
        terms = objective.loss(prediction, batch, prediction.head or self.drafter.head())
        return {
            "total": terms.total,
            "weight": terms.weight,
            "share": prediction.weight,
            "carry": carry,
        }


class Layout:
    """A drafter and its optimiser spread over the processes.

    Sharded gradients are spread after each backward, also while they accumulate: a whole gradient
    would cost what sharding saves. One process holds everything in either layout.
    """

    def __init__(
        self,
        parallel: Literal["data", "sharded"],
        drafter: Drafter,
        make_optimizer: Callable[[], torch.optim.Optimizer],
        accelerator: Accelerator,
    ) -> None:
        self.accelerator, self.drafter, self.learner = accelerator, drafter, Learner(drafter)
        self.sharded = parallel == "sharded" and accelerator.num_processes > 1
        if not self.sharded:
            self.learner, self.optimizer = accelerator.prepare(self.learner, make_optimizer())
            return
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.learner.to(accelerator.device)
        for layer in decoder_layers(self.learner):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.learner, mesh=mesh)
        self.optimizer = make_optimizer()  # of the parts: `fully_shard` made other parameters

    def forward(self, batch: TrajectoryBatch, carry: Any, objective: Objective) -> dict[str, Any]:
        """One call of the learner, in the run's precision."""
        out: dict[str, Any]
        if not self.sharded:
            out = self.learner(batch, carry, objective)
        else:  # as `accelerator.prepare` does it for replicated weights
            with self.accelerator.autocast():
                out = convert_to_fp32(self.learner(batch, carry, objective))
        return out

    def mode(self, train: bool) -> None:
        """Training or evaluation. Called before and after evaluating: nothing stays gathered."""
        self.learner.train(train)
        # Sharded: without a backward the outermost weights stay gathered; others may be next.
        for module in self.learner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def apart(self) -> AbstractContextManager[Any]:
        """Backward in here need not reach the other processes: a later one of this step does."""
        return nullcontext() if self.sharded else self.accelerator.no_sync(self.learner)

    def finish(self, factor: Tensor, clip_norm: float, clip_value: float) -> Tensor:
        """Multiply the gradients, clip them, and return the norm of the whole before clipping,
        without waiting for the device."""
        for parameter in self.drafter.parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
        norm: Tensor = self.accelerator.clip_grad_norm_(self.drafter.parameters(), clip_norm)
        if clip_value < math.inf:
            nn.utils.clip_grad_value_(self.drafter.parameters(), clip_value)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """All parameters by name, whole, shared ones once. Every process calls this; the main one
        gets them, and the others if `everywhere`."""
        if not self.sharded:
            return {name: parameter.data for name, parameter in self.drafter.named_parameters()}
        options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
        found: dict[str, Any] = get_model_state_dict(self.drafter, options=options)
        return {name: found[name] for name, _ in self.drafter.named_parameters() if name in found}

    def optimizer_state(self) -> dict[str, Any]:
        """As the optimiser of a single process would have it; see `weights`."""
        if not self.sharded:
            state: dict[str, Any] = self.optimizer.state_dict()
            return state
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the main process
        found = get_optimizer_state_dict(self.drafter, self.optimizer, options=options)
        return _renamed(found, {name: i for i, name in enumerate(self._names())}) if found else {}

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Take these in, to go on training; every process gives the same."""
        if not self.sharded:
            fill(self.drafter, weights)
            self.optimizer.load_state_dict(optimizer)
            return
        # Not strict: a second name of a shared parameter is in no checkpoint.
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.drafter, dict(weights), options=options)
        named = _renamed(optimizer, dict(enumerate(self._names())))
        set_optimizer_state_dict(self.drafter, self.optimizer, named, options=options)

    def _names(self) -> list[str]:
        """Names of the parameters in the order in which an optimiser numbers them."""
        name = {parameter: name for name, parameter in self.drafter.named_parameters()}
        groups = self.optimizer.param_groups
        return [name[parameter] for group in groups for parameter in group["params"]]


def on_main(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Let the main process do it while the others wait; its failure is everybody's."""
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            work()
        except Exception as error:
            failure = error
    (said,) = broadcast_object_list([failure and (str(failure) or type(failure).__name__)])
    if failure is not None:
        raise failure
    if said is not None:
        raise BackendError(f"on the main process: {said}")


def decoder_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost transformers layers in `module`: each is called as a module, once per forward.
    What lies outside of them (embedding, head, layers of another make) is gathered together."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from decoder_layers(child)


def to_device(value: Any, device: torch.device) -> Any:
    """The same frozen dataclass with every tensor that it holds, at any depth, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: to_device(part, device) for name, part in parts.items()})
    return value


def check_weights(drafter: Drafter, weights: dict[str, Tensor], path: Path) -> None:
    """BackendError when the weights of the checkpoint `path` are not this drafter's."""
    own = {(name, parameter.shape) for name, parameter in drafter.named_parameters()}
    other = own ^ {(name, weight.shape) for name, weight in weights.items()}
    if other:
        name, _ = min(other)
        raise BackendError(f"{path} holds other parameters or other shapes, such as {name}")


def fill(drafter: Drafter, weights: dict[str, Tensor]) -> None:
    """Copy these weights into the parameters of the same names."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])


def _renamed(state: dict[str, Any], other: dict[Any, Any]) -> dict[str, Any]:
    """An optimiser's state with its parameters called otherwise."""
    return {
        "state": {other[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [other[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


# --------------------------------------------------------------------------- processes


Precision = Literal["bfloat16", "float32"]


def faster_precision() -> Precision:
    """The arithmetic in which this machine learns faster."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if bfloat16_gain() > LEAST_GAIN else "float32"


LEAST_GAIN = 1.2
"""`bfloat16_gain` above which bfloat16 is worth it. Two measurements differ by less."""


@functools.cache
def bfloat16_gain() -> float:
    """Seconds of a product of float32 matrices, of the size that a small model learns with, over
    those of one of bfloat16, on this processor. Its instructions do not tell: on a Xeon with
    AVX-512's products of bfloat16 it is 0.6, with tiles (AMX) beside them far above 1."""
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    left, right = torch.ones(512, 576), torch.ones(576, 1536)
    for _ in range(4):  # the first of each is not like the others
        for dtype, its in seconds.items():
            a, b = left.to(dtype), right.to(dtype)
            began = perf_counter()
            a @ b
            its.append(perf_counter() - began)
        if seconds[torch.bfloat16][0] > 10 * seconds[torch.float32][0]:
            break  # emulated, and four of them would be waited for
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def start_accelerator(options: RunConfig) -> Accelerator:
    """Return the devices, processes, mixed precision and trackers of this run."""
    names = [name.strip() for name in options.report_to.split(",")]
    names = [name for name in names if name not in ("", "none")]
    for name in names:
        if name not in (known := [*map(str, LoggerType)]):
            raise InputError(f"--report-to: there is no tracker {name!r}{nearest(name, known)}")
        if name not in ("all", *map(str, get_available_trackers())):
            raise InputError(f"--report-to {name}: its package is not installed")
    return make_accelerator(precision(options), names, options.out if names else None)


def precision(options: RunConfig) -> Precision:
    """The arithmetic of this run; all of its processes call this.

    With --dtype auto a run goes on as it was begun, and a new one computes as is faster on the
    machine of its first process: what is measured differs from day to day, and between processes.
    """
    if options.dtype != "auto":
        return options.dtype
    processes = _join()
    found: list[Any] = [None]
    if processes == 1 or PartialState().is_main_process:
        found = [_begun_in(options.out / "work" / "checkpoints") or faster_precision()]
    if processes > 1:
        broadcast_object_list(found)
    chosen: Precision = found[0]
    return chosen


def _begun_in(folder: Path) -> Precision | None:
    """The arithmetic of the run whose checkpoints these are; None: there is none."""
    newest = checkpoints.latest(folder)
    with suppress(BackendError):  # one that cannot be read is refused where it is restored
        if newest is not None:
            found: Precision | None = checkpoints.read_state(newest)["identity"].get("precision")
            return found
    return None


def precision_of(accelerator: Accelerator) -> Precision:
    """The arithmetic that it was made for."""
    return "bfloat16" if accelerator.mixed_precision == "bf16" else "float32"


def make_accelerator(
    precision: str, log_with: Sequence[str] = (), folder: Path | None = None
) -> Accelerator:
    """Make an Accelerator for this precision, also when the process had one with another before."""
    mixed = "bf16" if precision == "bfloat16" else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()
    processes = _join()
    names = list(log_with) or None
    accelerator = Accelerator(mixed_precision=mixed, log_with=names, project_dir=folder)
    if accelerator.num_processes < processes:
        raise BackendError(
            f"{processes} processes were started, and accelerate joins {accelerator.num_processes} "
            f"of them on {accelerator.device}: each would train everything; start one"
        )
    return accelerator


def _join() -> int:
    """Join the processes that were started; how many they are.

    accelerate joins processes without a device only where `ACCELERATE_USE_CPU` says so: those of
    torchrun would each train everything, into the same folder.
    """
    processes = started()
    if processes == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and "WORLD_SIZE" in os.environ and missing:
        raise BackendError(
            f"WORLD_SIZE is {processes}, but there is no {' and no '.join(missing)}: start "
            "the processes with torchrun, or unset WORLD_SIZE to train with one"
        )
    PartialState(cpu=on_cpu or parse_flag_from_env("ACCELERATE_USE_CPU"))
    return processes


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU, or of the machine; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()


def started() -> int:
    """How many processes a launcher started, found as accelerate does."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    return int(get_int_from_env(names, 1))


_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What tells that a folder holds a model."""


@contextmanager
def training_folder(out: Path) -> Iterator[None]:
    """Around a run that trains in `out/work`; the first of its processes holds `out` for all.

    Raises:
        InputError: see `output_folder`; or `out` holds a model, or another verb's results.
    """
    names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    first = started() == 1 or get_int_from_env(names, 0) == 0
    work = out / "work"
    with output_folder(out) if first else nullcontext():
        if (out / "run.json").exists():
            whose, what = recorded(out / "run.json", "verb"), "a finished model"
            if whose in ("distill", "pretrain"):
                shutil.rmtree(work, ignore_errors=True)  # a kill came just before that
            elif whose is not None:
                what = f"the results of `draftsmith {whose}`"
            raise InputError(f"--out {out} already holds {what}; choose another folder")
        foreign = [name for name in _MODEL_FILES if (out / name).exists()]
        if foreign and not work.exists():  # a kill while ours was put there leaves its checkpoints
            raise InputError(
                f"--out {out} already holds a model ({foreign[0]}), which would be replaced; "
                "choose another folder"
            )
        try:
            work.mkdir(parents=True, exist_ok=True)  # now, not where the first checkpoint is lost
        except OSError as error:
            raise write_error(work, error) from error
        try:
            yield
        finally:
            with suppress(OSError):  # not empty: there is something to go on with
                work.rmdir()


def check_parts(training: ScheduleConfig, rows: int, what: str) -> None:
    """InputError for more parts of a step than it has rows; `what`: these, by their flags."""
    passes, processes = training.gradient_accumulation, started()
    parts = passes * processes
    if rows < parts:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise InputError(
            f"--gradient-accumulation {passes}{each} divides a step into {parts} parts, but it has "
            f"only {rows} {what}: every part needs one; give more of these, or fewer parts"
        )


_LEAST_PER_TOKEN = 1024
"""Bytes that a token of a pass takes in the training of any network, at the very least."""


def check_pass(training: ScheduleConfig) -> None:
    """InputError for passes of more tokens than the machine's memory holds."""
    parts, memory = training.gradient_accumulation * started(), memory_bytes()
    tokens = -(-training.batch_tokens // parts)
    if memory is not None and tokens * _LEAST_PER_TOKEN > memory:
        raise InputError(
            f"--batch-tokens {training.batch_tokens} has {tokens} tokens in a pass, more than "
            f"{memory / 2**30:.1f} GiB of memory hold; give fewer, or a larger "
            "--gradient-accumulation"
        )
