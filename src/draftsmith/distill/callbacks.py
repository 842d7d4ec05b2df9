"""What may watch a training run. Order of calls, for every callback in the order given:

    on_start(run)                    once, after a checkpoint was restored, before the first step
      on_step(run, report)           after every optimiser step
      on_evaluate(run, values)       after an evaluation of that step
      on_save(run, path)             after a checkpoint became visible
    on_end(run)                      once, however training ends

A callback sees, it does not steer: nothing it does changes the weights.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftsmith.provenance import append_jsonl, write_text_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One optimiser step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Nats per predicted token, before the step."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Tokens fed in this step, by all processes."""
    skipped: bool
    """The loss or the gradient was not finite: weights were left alone."""


class Run(Protocol):
    """What a callback may look at."""

    @property
    def total_steps(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def is_main(self) -> bool: ...


class Callback:
    """Does nothing; subclasses override what they need."""

    def on_start(self, run: Run) -> None: ...
    def on_step(self, run: Run, report: StepReport) -> None: ...
    def on_evaluate(self, run: Run, values: dict[str, float]) -> None: ...
    def on_save(self, run: Run, path: Path) -> None: ...
    def on_end(self, run: Run) -> None: ...


class ProgressBar(Callback):
    """Steps, loss, tokens per second and time left on stderr; plain lines if no terminal."""

    def __init__(self, *, every_seconds: float = 30.0) -> None:
        self.every_seconds = every_seconds
        self.console = Console(file=sys.stderr)
        self.progress: Progress | None = None
        self.tokens = 0
        self.began = self.said = time.monotonic()
        self.smooth = float("nan")

    def on_start(self, run: Run) -> None:
        self.began = self.said = time.monotonic()
        if not (run.is_main and self.console.is_terminal):
            return
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        self.progress.start()
        self.task = self.progress.add_task(
            "training", total=run.total_steps, completed=run.step, status=""
        )
        self.first = run.step

    def on_step(self, run: Run, report: StepReport) -> None:
        if not run.is_main:
            return
        self.tokens += report.tokens
        if not report.skipped:
            known = self.smooth == self.smooth
            self.smooth = 0.95 * self.smooth + 0.05 * report.loss if known else report.loss
        now = time.monotonic()
        rate = self.tokens / max(now - self.began, 1e-9)
        status = f"loss {self.smooth:.3f}  {rate:,.0f} tokens/s"
        if self.progress is not None:
            self.progress.update(self.task, completed=report.step, status=status)
        elif now - self.said >= self.every_seconds:
            self.said = now
            left = (run.total_steps - report.step) * report.tokens / max(rate, 1e-9)
            self._say(f"step {report.step}/{run.total_steps}  {status}  {left / 60:.1f} min left")

    def on_evaluate(self, run: Run, values: dict[str, float]) -> None:
        if run.is_main:
            self._say(f"step {run.step}: {_shown(values)}")

    def on_end(self, run: Run) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def _shown(values: dict[str, float]) -> str:
    """Figures in one line; those of the depths of a chain, name_1, name_2, ..., behind one name."""
    rows: dict[str, list[str]] = {}
    for name, value in values.items():
        rows.setdefault(re.sub(r"_\d+$", "", name), []).append(f"{value:.4f}")
    return "  ".join(f"{name} {' '.join(figures)}" for name, figures in rows.items())


class MetricsFile(Callback):
    """One JSON line per step and evaluation, appended; a resumed run continues the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, run: Run) -> None:
        # Steps after the checkpoint are about to be done again: their lines go.
        if not (run.is_main and self.path.is_file()):
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= run.step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue  # the line that a kill cut short
        write_text_atomic(self.path, "".join(kept))

    def on_step(self, run: Run, report: StepReport) -> None:
        self._add(
            run,
            {
                "step": report.step,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "skipped": report.skipped,
            },
        )

    def on_evaluate(self, run: Run, values: dict[str, float]) -> None:
        self._add(run, {"step": run.step, **values})

    def _add(self, run: Run, record: dict[str, Any]) -> None:
        if run.is_main:
            append_jsonl(self.path, record)


class Trackers(Callback):
    """Hands figures to accelerate's trackers (tensorboard, wandb, trackio, ...)."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def on_step(self, run: Run, report: StepReport) -> None:
        if not report.skipped:
            values = {
                "train/loss": report.loss,
                "train/grad_norm": report.grad_norm,
                "train/learning_rate": report.learning_rate,
            }
            self.accelerator.log(values, step=report.step)

    def on_evaluate(self, run: Run, values: dict[str, float]) -> None:
        named = {f"eval/{name}": value for name, value in values.items()}
        self.accelerator.log(named, step=run.step)

    def on_end(self, run: Run) -> None:
        self.accelerator.end_training()
