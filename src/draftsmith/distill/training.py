"""What `pretrain` and `distill` share: arithmetic, trackers, the trainer's settings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import AutoConfig

from draftsmith.distill.config import DistillConfig, PretrainConfig, ScheduleConfig
from draftsmith.distill.trainer_config import (
    TrainerConfig,
    make_accelerator,
    started,
)
from draftsmith.errors import InputError
from draftsmith.provenance import is_first_process
from draftsmith.targets.hf import loading

Precision = Literal["bfloat16", "float32"]


def precision(dtype: Literal["auto", "bfloat16", "float32"]) -> Precision:
    """The arithmetic that --dtype means on this machine."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if _fast_bfloat16() else "float32"


def trackers(report_to: str) -> list[str]:
    """The trackers that --report-to names."""
    names = [name.strip() for name in report_to.split(",")]
    return [name for name in names if name not in ("", "none")]


def start_accelerator(
    options: PretrainConfig | DistillConfig, training: ScheduleConfig
) -> Accelerator:
    """Return the devices, processes, mixed precision and trackers of this run."""
    names = trackers(options.report_to)
    return make_accelerator(
        precision(options.dtype),
        names,
        options.out if names else None,
    )


def say(line: str) -> None:
    """On stderr, at once; of several processes only the first says it."""
    if is_first_process():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def work_folder(out: Path) -> Iterator[None]:
    """`out/work` exists inside; a run that ends before it has written anything leaves nothing.

    Raises:
        InputError: it cannot be made.
    """
    work = out / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to --out {out}: {error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty: there is something to go on with
            work.rmdir()
            out.rmdir()


def text_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The text part of a target's configuration, without its weights. Raises BackendError."""
    with loading(f"the configuration of {source!r}"):
        config = AutoConfig.from_pretrained(
            source, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    return config.get_text_config(decoder=True)


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


def trainer_config(
    options: PretrainConfig | DistillConfig, training: ScheduleConfig, steps: int
) -> TrainerConfig:
    """Settings of the training loop for this many steps."""
    return TrainerConfig(
        steps=steps,
        accumulation=training.gradient_accumulation,
        learning_rate=training.learning_rate,
        min_learning_rate=training.min_learning_rate,
        warmup_steps=training.warmup,
        schedule=training.schedule,
        decay_share=training.decay_share,
        betas=training.betas,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_norm,
        clip_value=training.clip_value,
        precision=precision(options.dtype),
        seed=options.seed,
        save_every=options.save_every,
        evaluate_every=options.eval_every,
        parallel=training.parallel,
        gradient_checkpointing=training.gradient_checkpointing,
    )


def _fast_bfloat16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    capability = torch.backends.cpu.get_cpu_capability()
    return capability in ("AVX512", "AMX") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
