"""`draftsmith distill`: a draft model learns to say what a target says.

OUT/work/       checkpoints/: what an interrupted run continues from
OUT/            the draft model with the best held-out acceptance; run.json is written last
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from draftsmith.config import as_dict
from draftsmith.distill.callbacks import Callback, MetricsFile, ProgressBar, Trackers
from draftsmith.distill.collect import TransformersBackend
from draftsmith.distill.distillation import Acceptance, Distillation
from draftsmith.distill.evaluation import Evaluation
from draftsmith.distill.trainer import Trainer, TrainReport
from draftsmith.drafters._vocabulary import Subset, same_tokens
from draftsmith.drafters.independent import Independent
from draftsmith.errors import InputError
from draftsmith.options import DistillOptions
from draftsmith.provenance import Run, portable_text, start_run
from draftsmith.recipes import _lessons, _tokens
from draftsmith.recipes._drafting import quieten
from draftsmith.recipes._finish import write_model
from draftsmith.recipes._training import (
    precision,
    start_accelerator,
    text_config,
    trackers,
    trainer_config,
    work_folder,
)
from draftsmith.targets.hf import HFTarget, load_model, load_target
from draftsmith.units import Duration


@dataclass(frozen=True, kw_only=True)
class DistillResult:
    """What a run made."""

    out: str
    steps: int
    tokens: int
    best_step: int | None
    acceptance_before: float | None
    """Expected acceptance at temperature 1 on held-out prompts; None without any."""
    acceptance: float | None

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: DistillOptions) -> DistillResult:
    """Train, or continue training, and write the draft model to `options.out`."""
    out = options.out
    if (out / "run.json").exists():
        raise InputError(f"--out {out} already holds a finished model; choose another folder")
    record = start_run("distill", options, seed=options.seed)
    quieten()
    with work_folder(out):
        return train(options, record)


def train(options: DistillOptions, record: Run) -> DistillResult:
    """Everything behind the first checks."""
    out = options.out
    tokenizer = _tokens.load_tokenizer(options.target)
    model = open_student(options.drafter, tokenizer)
    twin = Twin(model, tokenizer) if options.on_policy else None
    lesson = make_lesson(options, tokenizer, twin)
    drafter = weights_digest(model)
    check_tail(options, lesson)
    steps = Duration.parse(options.training.duration).steps(
        tokens_per_step=options.training.batch_tokens, steps_per_epoch=lesson.steps_per_epoch
    )
    accelerator = start_accelerator(options, options.training)
    trainer = make_trainer(options, model, lesson, drafter, steps, accelerator)
    if twin is not None:
        twin.trainer = trainer
    before = trainer.evaluate().get("acceptance")
    if before is not None:
        _say(f"held-out acceptance before: {before:.4f}")
    _say(f"{trainer.config.steps} steps")
    report = trainer.train()
    after = report.evaluation.get("acceptance")
    if report.best_step is not None:
        trainer.load_best()
        after = report.best_value
    results = _results(options, lesson, report, before, after)
    finished = open_student(options.drafter, tokenizer)  # the trained one may be in parts
    trainer.copy_into(Independent.learner(finished))
    if accelerator.is_main_process:
        _finish(options, finished, tokenizer, record, results)
    accelerator.wait_for_everyone()
    said = "" if after is None or before is None else f": acceptance {before:.4f} -> {after:.4f}"
    _say(f"wrote {out}{said}")
    return DistillResult(
        out=str(out),
        steps=report.steps,
        tokens=report.tokens,
        best_step=report.best_step,
        acceptance_before=before,
        acceptance=after,
    )


def open_student(source: str, tokenizer: Any) -> PreTrainedModel:
    """The draft model in float32, ready to learn.

    Raises:
        InputError: it has other tokens than the target.
    """
    if Subset.beside(source) is not None:
        raise InputError(
            f"{source} knows only a subset of the target's tokens; laws are over all of them: "
            "distil a draft model with the whole vocabulary"
        )
    if not same_tokens(_tokens.load_tokenizer(source), tokenizer):
        raise InputError(
            f"{source} has another tokenizer than the target: its tokens cannot imitate the "
            "target's laws; pretrain one with --tokenizer TARGET"
        )
    model: PreTrainedModel = load_model(source, dtype="float32")
    return model.train().requires_grad_(True)


def check_tail(options: DistillOptions, lesson: _lessons.Lesson) -> None:
    """InputError for a treatment of cut laws that has no meaning at the teacher's temperature."""
    chosen, top_k = options.objective, lesson.facts["top_k"]
    if top_k is not None and chosen.tail == "bucket" and chosen.teacher_temperature != 1:
        raise InputError(
            f"laws that were cut to {top_k} tokens do not tell how much lies outside at "
            f"--teacher-temperature {chosen.teacher_temperature:g}: give --tail renormalise or "
            "floor, or --laws teacher"
        )


class Twin:
    """A copy of the student that draws continuations while the student learns."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.target = HFTarget(copy.deepcopy(model), tokenizer, name="the draft model")
        self.trainer: Trainer | None = None

    def refresh(self) -> None:
        """Take over the student's weights of this moment."""
        if self.trainer is not None:
            self.trainer.copy_into(Independent.learner(self.target.model))


def make_lesson(options: DistillOptions, tokenizer: Any, twin: Twin | None) -> _lessons.Lesson:
    """What is learnt from; the target is loaded only when its laws are wanted now."""
    in_memory = options.online or options.laws == "teacher"
    teacher = load_target(options.target) if in_memory else None
    digest = None if teacher is None else weights_digest(teacher.model)
    if not options.online:
        vocab_size = text_config(options.target).vocab_size
        lesson = _lessons.from_store(options, tokenizer, vocab_size, teacher)
        return replace(lesson, teacher=digest)
    assert teacher is not None
    student = None if twin is None else TransformersBackend(twin.target)
    refresh = None if twin is None else twin.refresh
    lesson = _lessons.online(options, tokenizer, teacher, student, refresh)
    return replace(lesson, teacher=digest)


def weights_digest(model: PreTrainedModel) -> str:
    """Of all weights, by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def make_trainer(
    options: DistillOptions,
    model: PreTrainedModel,
    lesson: _lessons.Lesson,
    drafter: str,
    steps: int,
    accelerator: Accelerator,
) -> Trainer:
    """The one training loop, set up for these options. `drafter`: digest of the first weights."""
    training, chosen = options.training, options.objective
    config = trainer_config(options, training, steps)
    evaluations = []
    if lesson.held_out is not None:
        evaluations.append(
            Evaluation(
                batches=lesson.held_out,
                objective=Acceptance(),
                name="acceptance",
                better="larger",
                chooses=True,
                weight_name="tokens",
            )
        )
    callbacks: list[Callback] = [ProgressBar(), MetricsFile(options.out / "metrics.jsonl")]
    if trackers(options.report_to):
        accelerator.init_trackers("distill")
        callbacks.append(Trackers(accelerator))
    identity = {
        "data": lesson.facts["data"],
        "drafter": drafter,
        "teacher": lesson.teacher,
        "objective": as_dict(chosen),
        "multi": [
            options.aggregate,
            options.beam_weights,
            options.score_temperature,
            options.beams,
        ],
        "laws": [options.laws, options.online],
        "online": [options.on_policy, options.prompts_per_step, options.max_new_tokens],
        "text": [_lessons.text_digest(options), options.text_share],
        "batch": [training.batch_tokens, training.block_length, training.gradient_accumulation],
        "rate": [training.learning_rate, training.min_learning_rate, training.warmup],
        "schedule": [training.schedule, training.decay_share],
        "optimizer": [*training.betas, training.weight_decay, training.clip_norm],
        "hold_out": options.hold_out,
        "precision": precision(options.dtype),
        "seed": options.seed,
    }
    return Trainer(
        drafter=Independent.learner(model),
        objective=Distillation(
            divergence=chosen.objective,
            temperature=chosen.teacher_temperature,
            tail=chosen.tail,
            beta=chosen.beta,
            reading=chosen.reading,
        ),
        source=lesson.source,
        config=config,
        folder=options.out / "work",
        identity=identity,
        evaluations=evaluations,
        callbacks=callbacks,
        accelerator=accelerator,
    )


def _results(
    options: DistillOptions,
    lesson: _lessons.Lesson,
    report: TrainReport,
    before: float | None,
    after: float | None,
) -> dict[str, Any]:
    chosen = options.objective
    return {
        "objective": chosen.objective,
        "teacher_temperature": chosen.teacher_temperature,
        "tail": chosen.tail,
        "seed": options.seed,
        "target": portable_text(options.target),
        "decoding_temperature": 1.0,
        "steps": report.steps,
        "skipped_steps": report.skipped,
        "tokens": report.tokens,
        "alpha": after,
        "alpha_before": before,
        "alpha_is_lower_bound": lesson.facts["top_k"] is not None,
        "best_step": report.best_step,
        "held_out_tokens": report.evaluation.get("tokens"),
        "training_loss": [[step, round(loss, 4)] for step, loss in report.losses],
        **lesson.facts,
    }


def _finish(
    options: DistillOptions,
    model: PreTrainedModel,
    tokenizer: Any,
    record: Run,
    results: dict[str, Any],
) -> None:
    bound = results["top_k"]
    lines = [
        "# A draft model distilled by `draftsmith distill`",
        "",
        f"Objective {results['objective']}, {results['steps']:,} steps. `run.json` says how it was "
        "made.",
        "",
    ]
    if results["alpha"] is not None:
        lines += [
            "Expected acceptance on held-out prompts at temperature 1: "
            f"{results['alpha_before']:.4f} before, {results['alpha']:.4f} after"
            + ("." if bound is None else f" (lower bounds: laws were cut to {bound} tokens)."),
            "",
        ]
    dtype = getattr(torch, options.save_dtype)
    write_model(options.out, model, tokenizer, None, dtype, record, results, "\n".join(lines))
    shutil.rmtree(options.out / "work", ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
