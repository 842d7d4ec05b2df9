"""The one training loop. It knows drafters only by `forward(batch, carry)`.

Everything that happens in step s is a function of the weights and s: the batch, the learning rate
and the noise. A resumed run therefore ends in the same weights as one that was never interrupted.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.blocks import BatchSource, EvaluationBlocks, Phases
from draftsmith.distill.callbacks import Callback, StepReport
from draftsmith.distill.checkpoint import Checkpoint
from draftsmith.distill.objective import Objective
from draftsmith.distill.settings import TrainerConfig, keyed_noise, make_accelerator
from draftsmith.drafters._base import Drafter
from draftsmith.errors import BackendError, InputError
from draftsmith.types import TrajectoryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """How a run ended."""

    steps: int
    skipped: int
    tokens: int
    losses: tuple[tuple[int, float], ...]
    """(step, mean training loss since the entry before)."""
    evaluation: dict[str, float]


class Learner(nn.Module):
    """Drafter and objective in one forward, so that data-parallel wrappers see every gradient."""

    def __init__(self, drafter: Drafter, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, batch: TrajectoryBatch, carry: Any) -> dict[str, Any]:
        prediction, carry = self.drafter(batch, carry)
        terms = self.objective.loss(prediction, batch, self.drafter.head())
        return {"total": terms.total, "weight": terms.weight, "carry": carry}


class Trainer:
    """Trains `drafter` on `source`; `train()` may be called again after any interruption.

    `identity`: what the run must agree on to be resumed (data digest, options, ...), JSON values.
    `folder` receives `checkpoints/`. Several processes train data-parallel: each holds all weights
    (checkpoints of weights sharded over processes are not written yet).
    Raises BackendError on repeated non-finite steps or a failed save, InputError when the folder's
    checkpoint belongs to another run.
    """

    def __init__(
        self,
        *,
        drafter: Drafter,
        objective: Objective,
        source: BatchSource,
        config: TrainerConfig,
        folder: Path,
        identity: dict[str, Any],
        evaluation: EvaluationBlocks | None = None,
        callbacks: Sequence[Callback] = (),
        accelerator: Accelerator | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.evaluation = evaluation
        self.callbacks = tuple(callbacks)
        self.folder = folder / "checkpoints"
        self.identity = identity
        self.accelerator = accelerator or make_accelerator(config.precision)
        self.drafter = drafter
        self.optimizer = torch.optim.AdamW(
            _groups(drafter, config.weight_decay), lr=config.learning_rate, betas=config.betas
        )
        learner = Learner(drafter, objective)
        self.learner, self.prepared = self.accelerator.prepare(learner, self.optimizer)
        self.step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.tokens = 0
        self.losses: list[tuple[int, float]] = []
        self._recent: list[float] = []
        self._signal: int | None = None

    @property
    def total_steps(self) -> int:
        return self.config.steps

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def train(self) -> TrainReport:
        """Run to the last step, from the newest checkpoint if there is one.

        SIGINT and SIGTERM finish the step, save, and raise KeyboardInterrupt or SystemExit(143).
        """
        newest = checkpoints.latest(self.folder)
        if newest is not None:
            self.restore(checkpoints.load(newest), newest)
        values: dict[str, float] = {}
        with self._signals():
            for callback in self.callbacks:
                callback.on_start(self)
            try:
                while self.step < self.config.steps and self._signal is None:
                    report = self.one_step()
                    for callback in self.callbacks:
                        callback.on_step(self, report)
                    every = self.config.evaluate_every
                    last = self.step == self.config.steps
                    if self.evaluation and every and self.step % every == 0 and not last:
                        self._evaluate(limit=16)
                    if self.step % self.config.save_every == 0 or last or self._signal:
                        self.save()
                if self._signal is None and self.evaluation is not None:
                    values = self._evaluate(limit=None)
            finally:
                for callback in self.callbacks:
                    callback.on_end(self)
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        return TrainReport(
            steps=self.step,
            skipped=self.skipped,
            tokens=self.tokens,
            losses=tuple(self.losses),
            evaluation=values,
        )

    def one_step(self) -> StepReport:
        """One optimiser step; a non-finite loss or gradient leaves the weights alone."""
        rate = self.config.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.learner.train()
        self.prepared.zero_grad(set_to_none=True)
        processes = self.accelerator.num_processes
        parts = self.config.accumulation * processes
        sums = torch.zeros(3, dtype=torch.float64)  # loss, weight, tokens
        scale = 0.0
        with keyed_noise(self.config.seed, self.step, self.accelerator.process_index):
            for micro in range(self.config.accumulation):
                part = micro * processes + self.accelerator.process_index
                batch = _to(self.source.batch(self.step, part, parts), self.accelerator.device)
                # Any fixed scale keeps sums small; the exact mean is restored below.
                scale = scale or 1.0 / (batch.tokens_BT.numel() * parts)
                final = micro == self.config.accumulation - 1
                sums += self._backward(batch, scale, sync=final)
        if processes > 1:
            sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum").cpu()
        total, weight, tokens = sums.tolist()
        # Data-parallel wrappers average gradients over processes: undo that too.
        factor = processes / (scale * max(weight, 1.0))
        for parameter in self.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        norm = float(
            self.accelerator.clip_grad_norm_(self.learner.parameters(), self.config.clip_norm)
        )
        loss = total / max(weight, 1.0)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.prepared.step()
        self.step += 1
        self.tokens += int(tokens)
        self._count(loss, finite)
        return StepReport(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=int(tokens),
            skipped=not finite,
        )

    def save(self) -> None:
        """Write a checkpoint of this moment; all processes wait for it."""
        self.accelerator.wait_for_everyone()
        if self.is_main:
            state = {
                "identity": self.identity,
                "plan": self._plan(),
                "skipped": self.skipped,
                "skipped_in_a_row": self.skipped_in_a_row,
                "tokens": self.tokens,
                "losses": self.losses,
                "recent": self._recent,
            }
            path = checkpoints.save(
                self.folder,
                Checkpoint(
                    step=self.step,
                    weights=_weights(self.drafter),
                    optimizer=self.optimizer.state_dict(),
                    state=state,
                ),
                keep=self.config.keep,
            )
            for callback in self.callbacks:
                callback.on_save(self, path)
        self.accelerator.wait_for_everyone()

    def restore(self, saved: Checkpoint, path: Path) -> None:
        """Continue from `saved`; InputError when it belongs to a run with other options."""
        theirs = saved.state["identity"]
        for key in sorted(self.identity.keys() | theirs.keys()):
            if self.identity.get(key) != theirs.get(key):
                raise InputError(
                    f"{path} was made with {key} = {theirs.get(key)!r}, now it is "
                    f"{self.identity.get(key)!r}; choose another --out or repeat the options"
                )
        _check_plan(saved.state["plan"], self._plan(), saved.step, path)
        own = _weights(self.drafter)
        if own.keys() != saved.weights.keys():
            raise BackendError(f"{path} holds other parameters than this model")
        with torch.no_grad():
            for name, tensor in own.items():
                if tensor.shape != saved.weights[name].shape:
                    raise BackendError(f"{path} holds {name} in another shape")
                tensor.copy_(saved.weights[name])
        self.optimizer.load_state_dict(saved.optimizer)
        self.step = saved.step
        self.skipped = saved.state["skipped"]
        self.skipped_in_a_row = saved.state["skipped_in_a_row"]
        self.tokens = saved.state["tokens"]
        self.losses = [(int(step), float(loss)) for step, loss in saved.state["losses"]]
        self._recent = list(saved.state["recent"])

    def _plan(self) -> dict[str, int | None]:
        """What depends on the number of steps."""
        second_from = self.source.second_from if isinstance(self.source, Phases) else None
        return {
            "steps": self.config.steps,
            "decay_from": self.config.decay_from,
            "second_from": second_from,
        }

    def evaluate(self, *, limit: int | None) -> dict[str, float]:
        """Mean loss in nats per token over the held-out blocks (the first `limit` batches)."""
        assert self.evaluation is not None
        self.learner.eval()
        batches = self.evaluation.num_batches
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for index in range(batches if limit is None else min(limit, batches)):
                batch = _to(self.evaluation.batch(index), self.accelerator.device)
                out = self.learner(batch, None)
                sums += torch.stack([out["total"], out["weight"]]).double().cpu()
        total, weight = sums.tolist()
        return {"loss": total / max(weight, 1.0), "tokens": weight}

    def _evaluate(self, *, limit: int | None) -> dict[str, float]:
        values = self.evaluate(limit=limit)
        for callback in self.callbacks:
            callback.on_evaluate(self, values)
        return values

    def _backward(self, batch: TrajectoryBatch, scale: float, *, sync: bool) -> Tensor:
        """Gradients of one part; [summed loss, weight, tokens] in float64 on the CPU."""
        carry: Any = None
        total: Tensor | None = None
        sums = torch.zeros(3, dtype=torch.float64)
        sums[2] = batch.tokens_BT.numel()
        each = self.drafter.backward == "each"
        for index in range(self.drafter.num_steps):
            last = index == self.drafter.num_steps - 1
            with _maybe(self.accelerator.no_sync(self.learner), not (sync and last)):
                out = self.learner(batch, carry)
                carry = out["carry"]
                sums[:2] += torch.stack([out["total"], out["weight"]]).detach().double().cpu()
                if each:
                    self.accelerator.backward(out["total"] * scale)
                else:
                    total = out["total"] if total is None else total + out["total"]
                    if last:
                        self.accelerator.backward(total * scale)
        return sums

    def _count(self, loss: float, finite: bool) -> None:
        if not finite:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.config.max_skipped:
                raise BackendError(
                    f"{self.skipped_in_a_row} steps in a row had a non-finite loss or gradient "
                    f"(now step {self.step}); lower the learning rate or check the data"
                )
            return
        self.skipped_in_a_row = 0
        self._recent.append(loss)
        if len(self._recent) >= max(1, self.config.steps // 100) or self.step == self.config.steps:
            self.losses.append((self.step, sum(self._recent) / len(self._recent)))
            self._recent = []

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the loop after this step; a second one is obeyed at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number
            signal.signal(number, before[number])

        self._signal = None
        before: dict[int, Any] = {}
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def _check_plan(
    theirs: dict[str, int | None], own: dict[str, int | None], step: int, path: Path
) -> None:
    """InputError when another number of steps would change what the steps done so far were."""
    if theirs["steps"] == own["steps"]:
        return
    for key, place, before in (
        ("decay_from", "decay", "while the learning rate is constant"),
        ("second_from", "long blocks", "before the long blocks begin"),
    ):
        starts = [start for start in (theirs.get(key), own[key]) if start is not None]
        if starts and step > min(starts):
            raise InputError(
                f"{path} is in the {place} of a run of {theirs['steps']} or of {own['steps']} "
                f"steps; the number of steps can only change {before}"
            )


@contextmanager
def _maybe(context: Any, wanted: bool) -> Iterator[None]:
    if wanted:
        with context:
            yield
    else:
        yield


def _groups(drafter: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def _weights(drafter: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, shared ones once."""
    return {name: parameter.data for name, parameter in drafter.named_parameters()}


def _to(batch: TrajectoryBatch, device: torch.device) -> TrajectoryBatch:
    documents = batch.documents_BT
    return TrajectoryBatch(
        tokens_BT=batch.tokens_BT.to(device),
        loss_mask_BT=batch.loss_mask_BT.to(device),
        documents_BT=None if documents is None else documents.to(device),
    )
