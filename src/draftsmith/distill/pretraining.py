"""Pretraining: text files -> a small causal language model, ready to draft.

OUT/work/       tokenizer/, checkpoints/: what an interrupted run continues from
OUT/            the finished model, loadable with transformers; run.json is written last
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from draftsmith.config import Duration, as_dict
from draftsmith.distill.batches import BatchSource
from draftsmith.distill.callbacks import Callback, MetricsFile, ProgressBar, Trackers
from draftsmith.distill.config import PretrainConfig
from draftsmith.distill.evaluation import Evaluation
from draftsmith.distill.initial_model import build_student, student_config
from draftsmith.distill.objectives.base import CrossEntropy
from draftsmith.distill.pretrain_data import (
    Data,
    counted_all,
    example_blocks,
    held_out_loss,
    make_held_out,
    make_source,
    read_data,
)
from draftsmith.distill.save import bits_per_byte, readme, write_model
from draftsmith.distill.trainer import Trainer, TrainReport
from draftsmith.distill.training import (
    check_parts,
    precision,
    say,
    start_accelerator,
    trackers,
    trainer_config,
)
from draftsmith.drafters.independent import Independent
from draftsmith.provenance import Run


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """What a run made."""

    out: str
    parameters: int
    steps: int
    tokens: int
    loss: float | None
    """Nats per token on held-out text; None without any."""
    bits_per_byte: float | None

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def pretrain(options: PretrainConfig, record: Run) -> PretrainResult:
    """Train, or continue training, in `options.out/work`, and write the model to `options.out`.

    Raises:
        InputError: the text, the shape of the model or a checkpoint cannot be used.
    """
    out, work, training = options.out, options.out / "work", options.training
    longest = max(training.block_length, training.long_block_length or 0)
    blocks = f"blocks of {longest} tokens (--batch-tokens {training.batch_tokens})"
    check_parts(training, training.batch_tokens // longest, blocks)
    accelerator = start_accelerator(options, training)
    with accelerator.main_process_first():  # it trains the tokenizer, the others read it
        data = read_data(options, work)
    steps_per_epoch = max(1.0, data.facts["train_tokens"] // training.batch_tokens)
    if data.examples:
        steps_per_epoch = example_blocks(options, data, training.block_length, 0).steps_per_epoch
    steps = Duration.parse(training.duration).steps(
        tokens_per_step=training.batch_tokens, steps_per_epoch=steps_per_epoch
    )
    source = make_source(options, data, steps)
    held = make_held_out(data, longest)
    evaluations = [] if held is None else [held_out_loss(held)]
    model = make_model(options, data, longest)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{parameters / 1e6:.2f} M parameters, {data.facts['train_tokens'] / 1e6:.2f} M tokens per "
        f"epoch, {steps} steps of {training.batch_tokens} tokens"
    )
    report, finished = train(options, data, model, source, evaluations, steps, work, accelerator)
    bits = None
    if held and data.subset is None and counted_all(report, data):
        bits = bits_per_byte(report, data.held_bytes)
    results = {
        "parameters": parameters,
        "steps": report.steps,
        "skipped_steps": report.skipped,
        "tokens": report.tokens,
        "data": data.facts,
        "training_loss": [[step, round(loss, 4)] for step, loss in report.losses],
        "held_out_loss": report.evaluation.get("loss"),
        "held_out_tokens": report.evaluation.get("tokens"),
        "bits_per_byte": bits,
        "attend_across_documents": options.data.attend_across_documents and not data.examples,
    }
    if accelerator.is_main_process:
        write_model(
            out,
            finished,
            data.tokenizer,
            data.subset,
            getattr(torch, options.save_dtype),
            record,
            results,
            readme(results, data.subset),
        )
        shutil.rmtree(work, ignore_errors=True)
    accelerator.wait_for_everyone()
    result = PretrainResult(
        out=str(out),
        parameters=parameters,
        steps=report.steps,
        tokens=report.tokens,
        loss=report.evaluation.get("loss"),
        bits_per_byte=bits,
    )
    say(f"wrote {out}" + (f": {bits:.4f} bits per byte on held-out text" if bits else ""))
    return result


def make_model(options: PretrainConfig, data: Data, context: int) -> PreTrainedModel:
    """The student with its first weights, float32."""
    vocab_size = data.vocab_size
    config = student_config(
        options.model,
        vocab_size=vocab_size,
        end_id=data.end_id,
        pad_id=data.pad_id,
        context=context,
    )
    model = build_student(config, options.seed)
    if options.model.init.startswith("subclone:"):
        from draftsmith.distill.initial_model import subclone

        subset = None if data.subset is None else torch.from_numpy(data.subset.ids).long()
        subclone(options.model.init.removeprefix("subclone:"), model, subset)
    return model


def train(
    options: PretrainConfig,
    data: Data,
    model: PreTrainedModel,
    source: BatchSource,
    evaluations: list[Evaluation],
    steps: int,
    work: Path,
    accelerator: Accelerator,
) -> tuple[TrainReport, PreTrainedModel]:
    """The training loop with its callbacks; resumes from `work` when it holds a checkpoint.

    Returns the trained model as one of its own, because `model` may be in parts by then.
    """
    training = options.training
    config = trainer_config(options, training, steps)
    callbacks: list[Callback] = [ProgressBar(), MetricsFile(options.out / "metrics.jsonl")]
    if trackers(options.report_to):
        accelerator.init_trackers("pretrain")
        callbacks.append(Trackers(accelerator))
    identity = {
        "data": data.facts["train_sha256"],
        "tokenizer": data.facts["tokenizer_sha256"],
        "model": as_dict(options.model),
        "batch_tokens": training.batch_tokens,
        "block_length": training.block_length,
        "long_block_length": training.long_block_length,
        "attend_across_documents": options.data.attend_across_documents,
        "accumulation": training.gradient_accumulation,
        "learning_rate": [training.learning_rate, training.min_learning_rate, training.warmup],
        "schedule": [training.schedule, training.decay_share, training.long_share],
        "optimizer": [*training.betas, training.weight_decay],
        "clip": [training.clip_norm, training.clip_value],
        "precision": precision(options.dtype),
        "seed": options.seed,
    }
    trainer = Trainer(
        drafter=Independent.learner(model),
        objective=CrossEntropy(),
        source=source,
        config=config,
        folder=work,
        identity=identity,
        evaluations=evaluations,
        callbacks=callbacks,
        accelerator=accelerator,
    )
    report = trainer.train()
    finished = build_student(copy.deepcopy(model.config), options.seed)
    trainer.copy_into(Independent.learner(finished))
    return report, finished
