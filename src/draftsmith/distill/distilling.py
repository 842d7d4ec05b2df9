"""Distillation: a draft model, or a network over hidden states, learns the laws of a target.

OUT/work/       checkpoints/: what an interrupted run continues from
OUT/            the drafter with the best held-out figure; run.json is written last
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.config import as_dict, each_unused
from draftsmith.distill import datasets, tokenizer_training
from draftsmith.distill.batches import close
from draftsmith.distill.callbacks import usual_callbacks
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.datasets import online_data, stored_data
from draftsmith.distill.distributed import Precision, precision_of, start_accelerator
from draftsmith.distill.objectives.distillation import Distillation
from draftsmith.distill.students import DrawingCopy, Student, open_student, weights_digest
from draftsmith.distill.trainer import Trainer, trainer_config
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.drafters.config import drafter_parts, kinds
from draftsmith.errors import InputError
from draftsmith.provenance import Run, portable_text, recorded
from draftsmith.targets.base import VocabLimitedTarget
from draftsmith.targets.hf import HFTarget, load_target

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DistillResult:
    """What a run made."""

    out: str
    steps: int
    tokens: int
    best_step: int | None
    acceptance_before: float | None
    """Expected acceptance at temperature 1 on `measured_on`; None without any text."""
    acceptance: float | None
    figure: str
    """What the best weights were chosen by: `tokens_per_step` is that of chains along given texts
    (`evaluation.Chains`), not of decoding."""
    measured_on: str
    """Which texts these are."""
    before: float | None
    after: float | None

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def distil(options: DistillConfig, record: Run) -> DistillResult:
    """Train, or continue training, in `options.out/work`, and write the drafter to `options.out`.

    Raises:
        InputError: the stores, the student or a checkpoint cannot be used.
    """
    known = tokens_before(options.drafter)
    student, data, trainer = prepare(options)
    accelerator = trainer.accelerator
    if (outside := student.share_outside_vocabulary) is not None:
        _log.info(f"{100 * outside:.2f} % of the answers' tokens lie outside the draft vocabulary")
    figure, before, where = student.figure, trainer.evaluate(), measured_on(options)
    if figure in before:
        _log.info(f"{figure} before, on {where}: {before[figure]:.4f}")
    _log.info(f"{trainer.config.steps} steps")
    report = trainer.train()
    finished = student.fresh_copy()  # the trained one may be in parts
    finished.set_token_counts(data.count_tokens)
    if report.best is None:
        after = report.evaluation
        trainer.copy_into(finished.learner)
    else:
        after = report.best.values
        trainer.copy_best_into(finished.learner)
    best_step = None if report.best is None else report.best.step
    # full logprobs that are cut to be learnt are measured as they are
    measured_k = data.facts.get("evaluation_top_k", data.facts["top_k"])
    results = {
        **{name: value for name, value in as_dict(options.objective).items() if name in _NAMED},
        "seed": options.seed,
        "target": portable_text(options.target),
        **report.results(),
        "tokens_before": known,
        "alpha": _acceptance(after),
        "alpha_before": _acceptance(before),
        "alpha_is_lower_bound": options.reads_logprobs and measured_k is not None,
        "best_step": best_step,
        **student.facts(after),
        "held_out": after,
        "held_out_before": before,
        **data.facts,
    }
    if accelerator.is_main_process:
        finished.write(options, record, results, _readme(results, where))
        shutil.rmtree(options.out / "work", ignore_errors=True)
    accelerator.wait_for_everyone()
    change, better = "", True
    if figure in before and figure in after:
        better = after[figure] > before[figure]  # all figures are better when they are larger
        change = f": {figure} on {where} {before[figure]:.4f} -> {after[figure]:.4f}"
    _log.info(f"wrote {options.out}{change}")
    if not better:
        _log.info(
            "this drafter is no better than it was: keep the one you had, and try a lower "
            "--learning-rate, a longer --duration or more prompts"
        )
    return DistillResult(
        out=str(options.out),
        steps=report.steps,
        tokens=report.tokens,
        best_step=best_step,
        acceptance_before=_acceptance(before),
        acceptance=_acceptance(after),
        figure=figure,
        measured_on=where,
        before=before.get(figure),
        after=after.get(figure),
    )


def prepare(options: DistillConfig) -> tuple[Student, datasets.TrainingData, Trainer]:
    """What learns, what it learns from, and the training loop in front of its first step.

    Raises:
        InputError: the stores or the student cannot be used.
    """
    token = Distillation(**vars(options.objective))  # refuses an objective's options, too
    if token.record.hard:  # it reads tokens alone
        each_unused("logprobs (--objective kl, ..)", options, "top_k", "text_logprobs")
    datasets.check_batch(options)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    student = open_student(options, tokenizer)
    student.objective(token)  # refuses what means nothing to it, before all stores are read
    drawing = student.drawing_copy() if options.on_policy else None

    def refresh() -> None:
        """Let the copy that draws continuations take over the weights of this moment."""
        assert drawing is not None
        trainer.copy_into(drawing.learner)

    accelerator = start_accelerator(options)
    precision = precision_of(accelerator)
    data = training_data(options, tokenizer, student, precision, drawing, refresh)
    top_k = data.facts["top_k"]
    if top_k is not None and token.tail == "bucket" and token.teacher_temperature != 1:
        raise InputError(
            f"laws that were cut to {top_k} tokens do not tell how much lies outside at "
            f"--teacher-temperature {token.teacher_temperature:g}: give --tail renormalise or "
            "floor, or learn full logprobs (--laws teacher without --top-k)"
        )
    student.set_token_counts(data.count_tokens)
    trainer = make_trainer(options, student, data, accelerator)
    return student, data, trainer


def time_step(options: DistillConfig, steps: int = 3) -> float:
    """Seconds of a training step on this machine: the mean of a few behind a first one. Nothing of
    them is kept, and nothing is written.

    Raises:
        InputError: the stores or the student cannot be used.
    """
    _, data, trainer = prepare(options)
    try:
        trainer.one_step()
        began = perf_counter()
        for _ in range(steps):
            trainer.one_step()
        return (perf_counter() - began) / steps
    finally:
        close(data.source)


def tokens_before(drafter: str) -> int | None:
    """How many tokens the weights that a training begins with have learnt from, by the run.json of
    their folder: in its training and in those before it. 0: new weights; None: nothing says.

    All steps of a training count, also those behind the weights that were kept as the best. What
    the folder does not know of trainings before its own counts as 0.
    """
    kind, source = drafter_parts(drafter)
    if source is None and kind in kinds():
        return 0
    path = Path(source or drafter, "run.json")
    counts = [recorded(path, "results", name) for name in ("tokens", "tokens_before")]
    own, before = (found if type(found) is int else None for found in counts)
    return None if own is None else own + (before or 0)


_NAMED = ("objective", "teacher_temperature", "tail")
"""Fields of the objective that run.json repeats among its results."""


def measured_on(options: DistillConfig) -> str:
    """Which texts choose the weights. Those of prompts that the target was trained on flatter a
    drafter that reads the target's states."""
    if options.evaluate:
        return f"texts of {', '.join(folder.resolve().name for folder in options.evaluate)}"
    return "texts of held-out prompts" if options.online else "held-out texts of the store"


def _acceptance(values: dict[str, float]) -> float | None:
    """Return the acceptance of the first draft; None: nothing was held out."""
    return values.get("acceptance", values.get("acceptance_1"))


def training_data(
    options: DistillConfig,
    tokenizer: Any,
    student: Student,
    precision: Precision,
    drawing: DrawingCopy | None = None,
    refresh: Callable[[], None] | None = None,
) -> datasets.TrainingData:
    """What is learnt from; the target is loaded only when its laws are wanted now.

    Args:
        precision: the run's arithmetic.
        drawing: a copy of the student for --on-policy, which `refresh` brings up to date.

    Raises:
        InputError: it cannot be learnt from, or not by this student.
    """
    vocab_size = tokenizer_training.text_config(options.target).vocab_size
    if options.top_k > vocab_size:
        raise InputError(f"--top-k {options.top_k}: the target has {vocab_size} tokens")
    ends = student.target_ends() if options.laws == "states" else None
    teacher = digest = None
    if options.loads_target:
        teacher, digest = load_teacher(options.target, precision)
    signals = student.learner.signals
    if not options.online:
        data = stored_data(
            options, tokenizer, vocab_size, teacher, signals, ends, student.vocab_size
        )
    else:
        assert teacher is not None
        known = min(teacher.vocab_size, student.vocab_size or teacher.vocab_size)
        draws = VocabLimitedTarget(teacher, known)
        own = None
        if drawing is not None:
            own = TransformersBackend(VocabLimitedTarget(drawing.target, known))
        data = online_data(options, tokenizer, teacher, signals, draws, own, refresh)
    student.check(data)
    return replace(data, teacher=digest)


def load_teacher(name: str, precision: Precision) -> tuple[HFTarget, str]:
    """A target in memory and the digest of its weights as they are stored. It computes in its own
    number format, but on a processor not in half precision where the run computes in float32:
    there that is faster (six times, with AVX2 alone)."""
    teacher = load_target(name, compile=False)
    digest = weights_digest(teacher.model.state_dict())
    half = teacher.dtype in (torch.bfloat16, torch.float16)
    if half and teacher.device.type == "cpu" and precision == "float32":
        teacher = load_target(name, dtype="float32", compile=False)
    return teacher, digest


def make_trainer(
    options: DistillConfig,
    student: Student,
    data: datasets.TrainingData,
    accelerator: Accelerator,
) -> Trainer:
    """The one training loop, set up for these options."""
    training, chosen = options.training, options.objective
    held, forcing = data.held_out, data.facts.get("evaluation_forcing", data.facts["forcing"])
    evaluation = None if held is None else student.evaluation(held, forcing)
    identity = {
        "data": data.facts["data"],
        **student.identity,
        "teacher": data.teacher,
        "objective": as_dict(chosen),
        "multi": [
            options.aggregate,
            options.beam_weights,
            options.score_temperature,
            options.beams,
        ],
        "laws": [options.laws, options.online],
        "top_k": options.top_k or None,  # None as in runs of versions without this option
        "text_logprobs": options.text_logprobs or None,
        "online": [options.on_policy, options.prompts_per_step, options.max_new_tokens],
        "text": [datasets.text_digest(options), options.text_share],
        "batch": [training.batch_tokens, training.block_length, training.gradient_accumulation],
        "rate": [training.learning_rate, training.min_learning_rate, training.warmup],
        "schedule": [training.schedule, training.decay_share],
        "optimizer": [*training.betas, training.weight_decay],
        "clip": [training.clip_norm, training.clip_value],
        # as in runs of versions that held prompts out of the stores alone
        "hold_out": data.facts["evaluation_data"] if options.evaluate else options.hold_out,
        # which shards were left out as damaged, the digest of the data says
        "fitting": {
            "long_texts": options.fitting.long_texts,
            "one_per_block": options.fitting.one_per_block,
        },
        "precision": precision_of(accelerator),
        "seed": options.seed,
    }
    return Trainer(
        drafter=student.learner,
        objective=student.objective(Distillation(**vars(options.objective))),
        source=data.source,
        config=trainer_config(options, data.steps_per_epoch, precision_of(accelerator)),
        folder=options.out / "work",
        identity=identity,
        evaluation=evaluation,
        callbacks=usual_callbacks(options, accelerator, "distill"),
        accelerator=accelerator,
    )


def _readme(results: dict[str, Any], where: str) -> str:
    bound = None
    if results["alpha_is_lower_bound"]:
        bound = results.get("evaluation_top_k", results["top_k"])
    parts = [
        "# A drafter distilled by `draftsmith distill`",
        f"Objective {results['objective']}, {results['steps']:,} steps. `run.json` says how it was "
        "made.",
    ]
    if results["alpha"] is not None:
        parts.append(
            f"Expected acceptance of the first draft at temperature 1 on {where}: "
            f"{results['alpha_before']:.4f} before, {results['alpha']:.4f} after"
            + ("." if bound is None else f" (lower bounds: laws were cut to {bound} tokens).")
        )
    return "\n\n".join(parts) + "\n"
