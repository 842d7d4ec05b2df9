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
import logging
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator
from tqdm import tqdm

from draftsmith.distill.config import RunConfig
from draftsmith.distill.evaluation import TOKENS_PER_STEP
from draftsmith.provenance import append_jsonl, write_text_atomic

if TYPE_CHECKING:
    from draftsmith.distill.trainer import Trainer

_log = logging.getLogger(__name__)


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


class Callback:
    """Does nothing; subclasses override what they need."""

    def on_start(self, run: Trainer) -> None: ...
    def on_step(self, run: Trainer, report: StepReport) -> None: ...
    def on_evaluate(self, run: Trainer, values: dict[str, float]) -> None: ...
    def on_save(self, run: Trainer, path: Path) -> None: ...
    def on_end(self, run: Trainer) -> None: ...


class ProgressBar(Callback):
    """Steps, loss, tokens per second and time left: a bar on a terminal, else logged lines."""

    def __init__(self, *, every_seconds: float = 30.0) -> None:
        self.every_seconds = every_seconds
        self.tokens = 0
        self.smooth = float("nan")

    def on_start(self, run: Trainer) -> None:
        self.began = self.logged = time.monotonic()
        # None: only on a terminal
        self.bar = tqdm(desc="training", total=run.config.steps, initial=run.step, disable=None)

    def on_step(self, run: Trainer, report: StepReport) -> None:
        self.tokens += report.tokens
        if not report.skipped:
            known = self.smooth == self.smooth
            self.smooth = 0.95 * self.smooth + 0.05 * report.loss if known else report.loss
        now = time.monotonic()
        rate = self.tokens / max(now - self.began, 1e-9)
        status = f"loss {self.smooth:.3f}  {rate:,.0f} tokens/s"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update()
        if self.bar.disable and now - self.logged >= self.every_seconds:
            self.logged = now
            left = (run.config.steps - report.step) * report.tokens / max(rate, 1e-9)
            _log.info(f"step {report.step}/{run.config.steps}  {status}  {left / 60:.1f} min left")

    def on_evaluate(self, run: Trainer, values: dict[str, float]) -> None:
        self.bar.clear()
        _log.info(f"step {run.step}: {_shown(values)}")

    def on_end(self, run: Trainer) -> None:
        self.bar.close()


def _shown(values: dict[str, float]) -> str:
    """Figures in one line; those of the depths of a chain, name_1, name_2, ..., behind one name.
    Tokens per step that were not counted while decoding are called so."""
    rows: dict[str, list[str]] = {}
    for name, value in values.items():
        name = f"{name}_along_texts" if name in TOKENS_PER_STEP else name
        rows.setdefault(re.sub(r"_\d+$", "", name), []).append(f"{value:.4f}")
    return "  ".join(f"{name} {' '.join(figures)}" for name, figures in rows.items())


class MetricsFile(Callback):
    """One JSON line per step and evaluation, appended; a resumed run continues the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, run: Trainer) -> None:
        # Steps and evaluations after the checkpoint are about to be made again: their lines go.
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                last = run.step if "grad_norm" in record else run.progress.evaluated
                if record["step"] <= last:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # the line that a kill cut short
        write_text_atomic(self.path, "".join(kept))

    def on_step(self, run: Trainer, report: StepReport) -> None:
        record = asdict(report)
        del record["tokens"]
        append_jsonl(self.path, record)

    def on_evaluate(self, run: Trainer, values: dict[str, float]) -> None:
        append_jsonl(self.path, {"step": run.step, **values})


class Trackers(Callback):
    """Hands figures to accelerate's trackers (tensorboard, wandb, trackio, ...)."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_step(self, run: Trainer, report: StepReport) -> None:
        if not report.skipped:
            names = ("loss", "grad_norm", "learning_rate")
            values = {f"train/{name}": getattr(report, name) for name in names}
            self.accelerator.log(values, step=report.step)

    def on_evaluate(self, run: Trainer, values: dict[str, float]) -> None:
        named = {f"eval/{name}": value for name, value in values.items()}
        self.accelerator.log(named, step=run.step)

    def on_end(self, run: Trainer) -> None:
        self.accelerator.end_training()


def usual_callbacks(options: RunConfig, accelerator: Accelerator, project: str) -> list[Callback]:
    """What every run has: on the main process progress and OUT/metrics.jsonl, and the trackers of
    --report-to."""
    found: list[Callback] = []
    if accelerator.is_main_process:
        found += [ProgressBar(), MetricsFile(options.out / "metrics.jsonl")]
    if accelerator.log_with:
        accelerator.init_trackers(project)
        found.append(Trackers(accelerator))
    return found
