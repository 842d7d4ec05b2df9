"""The one training loop. It knows drafters only by `forward(batch, carry)`.

Everything that happens in step s is a function of the weights and s: the batch, the learning rate
and the noise. A resumed run therefore ends in the same weights as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import math
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.config import Duration
from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.batches import BatchSource, close
from draftsmith.distill.callbacks import Callback, StepReport
from draftsmith.distill.checkpoint import Checkpoint
from draftsmith.distill.config import RunConfig, TrainerConfig
from draftsmith.distill.distributed import (
    Layout,
    Precision,
    check_weights,
    fill,
    make_accelerator,
    on_main,
    to_device,
)
from draftsmith.distill.evaluation import (
    Best,
    Evaluation,
    discard_others,
    find_best,
    is_better,
    sums_of,
)
from draftsmith.distill.objectives.distillation import Distillation, Objective
from draftsmith.drafters.base import Drafter
from draftsmith.errors import BackendError, InputError

SCALE = 2.0**-10
"""Factor of losses in the backward pass, which keeps sums small. It is the same for all parts of a
step, however large they are, and a power of two: no rounding depends on it."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What ends training after the step in which it comes."""


class Interruption:
    """The signal that asked for the end, if one did. A second one is obeyed at once."""

    signal: int | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Note SIGNALS in here; nothing is noted in a thread, where handlers cannot be set."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            signal.signal(number, before[number])

        self.signal = None
        before: dict[int, Any] = {}
        with suppress(ValueError):  # in a thread
            for number in SIGNALS:
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """How a run ended."""

    steps: int
    skipped: int
    tokens: int
    losses: tuple[tuple[int, float], ...]
    """(step, mean training loss since the entry before)."""
    evaluation: dict[str, float]
    best: Best | None
    """None: no evaluation chooses."""

    def results(self) -> dict[str, Any]:
        """What run.json says about the training itself."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped,
            "tokens": self.tokens,
            "training_loss": [[step, round(loss, 4)] for step, loss in self.losses],
        }


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a checkpoint keeps beside weights, optimiser and identity, as JSON."""

    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    """Losses since the last entry of `losses`."""
    evaluated: int = 0
    """The step of the last evaluation."""


class Trainer:
    """Trains `drafter` on `source`; `train()` may be called again after any interruption.

    `identity`: what the run must agree on to be resumed (data digest, options, ...), JSON values.
    `folder` receives `checkpoints/`. `evaluation` is made every `eval_every` steps and at
    the end; the weights of the best one are kept if it `chooses`. Several processes share
    the work of each step, and with `parallel="sharded"` the weights, too (see `distributed`).
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
        evaluation: Evaluation | None = None,
        callbacks: Sequence[Callback] = (),
        accelerator: Accelerator | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.objective = objective
        self.evaluation = evaluation
        self.chooser = evaluation if evaluation is not None and evaluation.chooses else None
        self.callbacks = tuple(callbacks)
        self.folder = folder / "checkpoints"
        self._best_folder = self.folder / "best"
        self.identity = identity
        self.accelerator = accelerator or make_accelerator(config.precision)
        self._device = self.accelerator.device
        self.drafter = drafter
        if config.gradient_checkpointing:
            recompute_layers(drafter)
        optimizer = partial(adamw, drafter, config)
        self.layout = Layout(config.parallel, drafter, optimizer, self.accelerator)
        self.optimizer = self.layout.optimizer
        self.step = self._saved = 0
        self.progress = Progress()
        self._best: Best | None = None
        self._interruption = Interruption()
        self._agreed: int | None = None

    @property
    def _stop(self) -> int | None:
        """The signal that ends training. Several processes agree on it in the next step, because
        they hear it in different ones."""
        alone = self.accelerator.num_processes == 1
        return self._interruption.signal if alone else self._agreed

    def train(self) -> TrainReport:
        """Run to the last step, from the newest checkpoint if there is one.

        SIGINT and SIGTERM finish the step, save, and raise KeyboardInterrupt or SystemExit(143).
        """
        newest = checkpoints.latest(self.folder)
        if newest is not None:
            self.restore(checkpoints.load(newest), newest)
        if self.chooser is not None:
            own = self.identity if newest is not None else None
            others = partial(discard_others, self._best_folder, self.chooser, own)
            on_main(self.accelerator, others)
            self._best = find_best(self._best_folder, self.chooser)
        values: dict[str, float] = {}
        self._agreed = None
        with self._interruption.heard():
            for callback in self.callbacks:
                callback.on_start(self)
            try:
                self._evaluate_when_due()  # where damaged data ended the run in front of it
                while self.step < self.config.steps and self._stop is None:
                    report = self.one_step()
                    for callback in self.callbacks:
                        callback.on_step(self, report)
                    self._evaluate_when_due()
                    # Behind the evaluation: the weights saved here had their chance to be best.
                    if self.step % self.config.save_every == 0:
                        self.save()
                # Behind the loop: a signal may come after any look at it.
                if self.step > self._saved:
                    self.save()
                if self._stop is None:
                    values = self._evaluate(final=True)
            finally:
                close(self.source)
                for callback in self.callbacks:
                    callback.on_end(self)
        if self._stop == signal.SIGINT:
            raise KeyboardInterrupt
        if self._stop is not None:
            raise SystemExit(128 + self._stop)
        return TrainReport(
            steps=self.step,
            skipped=self.progress.skipped,
            tokens=self.progress.tokens,
            losses=tuple(self.progress.losses),
            evaluation=values,
            best=self._best,
        )

    def one_step(self) -> StepReport:
        """One optimiser step; a non-finite loss or gradient leaves the weights alone."""
        rate = self.config.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.layout.mode(train=True)
        self.optimizer.zero_grad(set_to_none=True)
        processes = self.accelerator.num_processes
        parts = self.config.gradient_accumulation * processes
        # loss, weight, tokens, and SIGNALS
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        with keyed_noise(self.config.seed, self.step, self.accelerator.process_index):
            mine = range(self.accelerator.process_index, parts, processes)
            objectives, batches = self._to_learn(mine, parts)
            for micro, batch in enumerate(batches):
                final = micro == self.config.gradient_accumulation - 1
                sums += self._backward(batch, objectives, sync=final)
        sums[3:] = sums.new_tensor([self._interruption.signal == number for number in SIGNALS])
        sums = self.accelerator.reduce(sums, "sum")
        # Layouts average gradients over processes: undo that too. Loss and norm are sums over all
        # processes, so that all of them skip a step or none does.
        factor = processes / (SCALE * sums[1].where(sums[1] > 0, 1.0))
        before = self.layout.finish(factor, self.config.clip_norm, self.config.clip_value)
        # the trainer's only look at the device's numbers in a step
        total, weight, tokens, *heard, norm = torch.cat([sums, before.to(sums).view(1)]).tolist()
        self._agreed = max(
            (n for n, count in zip(SIGNALS, heard, strict=True) if count), default=None
        )
        loss = total / (weight if weight > 0 else 1.0)
        norm = norm if math.isfinite(loss) else math.nan
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.step += 1
        self.progress.tokens += int(tokens)
        self._count(loss, norm)
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
        weights, optimizer = self.layout.weights(), self.layout.optimizer_state()

        def write() -> None:
            state = {"identity": self.identity, "plan": self._plan(), **asdict(self.progress)}
            saved = Checkpoint(step=self.step, weights=weights, optimizer=optimizer, state=state)
            path = checkpoints.save(self.folder, saved, keep=self.config.keep)
            for callback in self.callbacks:
                callback.on_save(self, path)

        on_main(self.accelerator, write)
        self._saved = self.step

    def restore(self, saved: Checkpoint, path: Path) -> None:
        """Continue from `saved`; InputError when it belongs to a run with other options."""
        theirs = saved.state["identity"]
        for key in sorted(self.identity.keys() | theirs.keys()):
            if self.identity.get(key) != theirs.get(key):
                raise InputError(
                    f"{path} was made with {key} = {theirs.get(key)!r}, now it is "
                    f"{self.identity.get(key)!r}; choose another --out or repeat the options"
                )
        check_plan(saved.state["plan"], self._plan(), saved.step, path)
        check_weights(self.drafter, saved.weights, path)
        self.layout.load(saved.weights, saved.optimizer)
        self.step = self._saved = saved.step
        state = {"evaluated": saved.step} | saved.state  # older checkpoints lack it
        self.progress = Progress(**{key.name: state[key.name] for key in fields(Progress)})
        self.progress.losses = [(step, loss) for step, loss in self.progress.losses]

    def _plan(self) -> dict[str, int | None]:
        """What depends on the number of steps."""
        return {
            "steps": self.config.steps,
            "decay_from": self.config.decay_from,
            "second_from": getattr(self.source, "second_from", None),
        }

    def copy_best_into(self, drafter: Drafter) -> int:
        """Copy the best weights, whole, into a drafter that is not being trained; the step they are
        from. The trained one keeps its own: not every layout can take weights in."""
        best = None if self.chooser is None else find_best(self._best_folder, self.chooser)
        if best is None:
            raise BackendError(f"{self._best_folder} holds no weights: no evaluation chose any")
        saved = checkpoints.load(best.path)
        check_weights(drafter, saved.weights, best.path)
        fill(drafter, saved.weights)
        return saved.step

    def copy_into(self, drafter: Drafter) -> None:
        """Copy the weights as they are now, whole, into a drafter that is not being trained. Every
        process calls this and fills its own."""
        fill(drafter, self.layout.weights(everywhere=True))

    def evaluate(self, *, final: bool = True) -> dict[str, float]:
        """All figures; unless `final`, perhaps over the first batches only."""
        evaluation = self.evaluation
        if evaluation is None:
            return {}

        def forward(batch: TrajectoryBatch, carry: Any, objective: Objective) -> dict[str, Any]:
            return self.layout.forward(to_device(batch, self._device), carry, objective)

        turns = self.accelerator.process_index, self.accelerator.num_processes
        steps = self.drafter.eval_steps or self.drafter.num_steps
        self.layout.mode(train=False)
        with torch.no_grad():
            sums = sums_of(evaluation, forward, evaluation.num_batches(final), steps, turns)
        total = self.accelerator.reduce(sums, "sum").cpu()
        self.layout.mode(train=False)
        return evaluation.report(*total.sum(0).unbind(1))

    def _evaluate_when_due(self) -> None:
        every = self.config.eval_every
        due = every and self.step % every == 0 and self.step != self.progress.evaluated
        if due and self.step < self.config.steps:
            with self._saving_when_damaged():
                self._evaluate(final=False)
            self.progress.evaluated = self.step

    def _evaluate(self, *, final: bool) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        values = self.evaluate(final=final)
        if self.chooser is not None:
            self._choose(self.chooser, values)
        for callback in self.callbacks:
            callback.on_evaluate(self, values)
        return values

    def _choose(self, choice: Evaluation, values: dict[str, float]) -> None:
        value = values.get(choice.name)
        if not is_better(self._best, choice, step=self.step, value=value):
            return
        weights = self.layout.weights()
        state = {"value": value, "values": values, "figure": choice.figure}
        state["identity"] = self.identity
        new = Checkpoint(step=self.step, weights=weights, optimizer={}, state=state)
        on_main(self.accelerator, partial(checkpoints.save, self._best_folder, new, keep=1))
        self._best = find_best(self._best_folder, choice)

    def _to_learn(
        self, mine: Iterable[int], parts: int
    ) -> tuple[Sequence[Objective], Iterable[TrajectoryBatch]]:
        """The objective of each of the drafter's steps, and the parts of this process."""
        batches: Iterable[TrajectoryBatch] = (
            to_device(self._batch(part, parts), self._device) for part in mine
        )
        objective, steps = self.objective, self.drafter.num_steps
        if parts == 1 or not isinstance(objective, Distillation) or not objective.pools:
            return [objective] * steps, batches
        # What the loss normalises over a whole step is counted first, in all parts of it, by a pass
        # without gradient. A step that is one part needs none: the loss counts what it is given.
        batches = tuple(batches)  # read twice; what is drawn online is drawn once
        counts_S2 = torch.zeros(steps, 2, dtype=torch.float64, device=self._device)
        counting = replace(objective, counting=True)
        # The draws of this pass are made again by the loss: both begin from one random state.
        with torch.no_grad(), forked_noise():
            for batch in batches:
                carry: Any = None
                for counts_2 in counts_S2:
                    out = self.layout.forward(batch, carry, counting)
                    carry = out["carry"]
                    counts_2 += torch.stack([out["total"], out["weight"]])
        return [objective.given(own) for own in self.accelerator.reduce(counts_S2, "sum")], batches

    def _batch(self, part: int, parts: int) -> TrajectoryBatch:
        """One part of this step's batch. Raises BackendError when its data is damaged."""
        with self._saving_when_damaged():
            return self.source.batch(self.step, part, parts)

    @contextmanager
    def _saving_when_damaged(self) -> Iterator[None]:
        """Save the steps that are done when data that is read in here is damaged."""
        try:
            yield
        except BackendError:
            # the weights are still those of the last step; other processes do not wait here
            if self.accelerator.num_processes == 1 and self.step > self._saved:
                self.save()
            raise

    def _backward(
        self, batch: TrajectoryBatch, objectives: Sequence[Objective], *, sync: bool
    ) -> Tensor:
        """Add the gradients of one part; [summed loss, weight, tokens, 0, 0] in float64."""
        carry: Any = None
        total: Tensor | None = None
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        sums[2] = batch.tokens_BT.numel()
        for index in range(self.drafter.num_steps):
            last = index == self.drafter.num_steps - 1
            with nullcontext() if sync and last else self.layout.apart():
                out = self.layout.forward(batch, carry, objectives[index])
                carry, loss = out["carry"], out["total"] * out["share"]
                sums[:2] += torch.stack([loss, out["weight"]]).detach().double()
                total = loss if total is None else total + loss
                if last:
                    self.accelerator.backward(total * SCALE)
        return sums

    def _count(self, loss: float, norm: float) -> None:
        finite, done = math.isfinite(norm), self.progress
        done.skipped += not finite
        done.skipped_in_a_row = 0 if finite and norm > 0 else done.skipped_in_a_row + 1
        if done.skipped_in_a_row > self.config.max_skipped:
            count = f"{done.skipped_in_a_row} steps in a row (now step {self.step}) had"
            if finite:
                raise BackendError(
                    f"{count} no gradient: no position of their texts counts, or nothing is left "
                    "to learn"
                )
            raise BackendError(
                f"training diverged: {count} a loss or gradient that is no finite number; lower "
                f"--learning-rate (now {self.config.learning_rate:g}) or check the data"
            )
        if finite:
            done.recent.append(loss)
        every = max(1, self.config.steps // 100)
        if len(done.recent) >= every or (done.recent and self.step == self.config.steps):
            done.losses.append((self.step, sum(done.recent) / len(done.recent)))
            done.recent = []


def trainer_config(
    options: RunConfig, steps_per_epoch: float, precision: Precision
) -> TrainerConfig:
    """The schedule of these options, with its number of steps."""
    steps = Duration.parse(options.training.duration).steps(
        tokens_per_step=options.training.batch_tokens, steps_per_epoch=steps_per_epoch
    )
    return TrainerConfig(
        **vars(options.training),
        steps=steps,
        precision=precision,
        **{name: getattr(options, name) for name in ("seed", "save_every", "eval_every")},
    )


def check_plan(
    theirs: dict[str, int | None], own: dict[str, int | None], step: int, path: Path
) -> None:
    """InputError when another number of steps would change what the steps done so far were."""
    if theirs["steps"] == own["steps"]:
        return
    if own["steps"] is not None and step > own["steps"]:
        raise InputError(
            f"{path} is behind the end of a run of {own['steps']} steps; choose another --out or a "
            "longer --duration"
        )
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
def keyed_noise(seed: int, step: int, process: int) -> Iterator[None]:
    """Global random state keyed by (seed, step, process); the caller's state comes back after."""
    key = hashlib.sha256(f"{seed}:{step}:{process}".encode()).digest()
    with forked_noise():
        torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
        yield


def forked_noise() -> AbstractContextManager[None]:
    """What is drawn in here leaves the global random state as it was."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    fork: AbstractContextManager[None] = torch.random.fork_rng(devices=devices)
    return fork


def adamw(drafter: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """The optimiser: weight decay on matrices only."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def recompute_layers(drafter: nn.Module) -> None:
    """Turn on gradient checkpointing in the outermost models that offer it, as transformers' do
    (`gradient_checkpointing_enable`); InputError if none."""

    def offering(module: nn.Module) -> Iterator[Any]:
        if hasattr(module, "gradient_checkpointing_enable"):
            yield module
            return
        for child in module.children():
            yield from offering(child)

    found = list(offering(drafter))
    if not found:
        raise InputError(
            f"{type(drafter).__name__} has no layers that can be computed again in the backward "
            "pass; leave gradient checkpointing off"
        )
    for model in found:
        with warnings.catch_warnings():  # transformers 5.23 has a second name for it
            warnings.simplefilter("ignore", FutureWarning)
            # The re-entrant kind wants inputs that have gradients.
            model.gradient_checkpointing_enable({"use_reentrant": False})
