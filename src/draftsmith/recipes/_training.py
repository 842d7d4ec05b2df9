"""What `pretrain` and `distill` share: arithmetic, trackers, the trainer's settings."""

from __future__ import annotations

from typing import Literal

import torch
from accelerate import Accelerator

from draftsmith.distill.settings import TrainerConfig, make_accelerator, read_deepspeed
from draftsmith.option_groups import ScheduleOptions
from draftsmith.options import DistillOptions, PretrainOptions

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
    options: PretrainOptions | DistillOptions, training: ScheduleOptions
) -> Accelerator:
    """Devices, processes, mixed precision, trackers and DeepSpeed for this run."""
    names = trackers(options.report_to)
    return make_accelerator(
        precision(options.dtype),
        names,
        options.out if names else None,
        deepspeed=read_deepspeed(trainer_config(options, training, steps=1)),  # of any length
    )


def trainer_config(
    options: PretrainOptions | DistillOptions, training: ScheduleOptions, steps: int
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
        precision=precision(options.dtype),
        seed=options.seed,
        save_every=options.save_every,
        evaluate_every=options.eval_every,
        parallel=training.parallel,
        gradient_checkpointing=training.gradient_checkpointing,
        deepspeed=training.deepspeed,
    )


def _fast_bfloat16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    capability = torch.backends.cpu.get_cpu_capability()
    return capability in ("AVX512", "AMX") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
