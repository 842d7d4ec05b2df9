"""Pretraining: text files -> a small causal language model, ready to draft.

OUT/work/       tokenizer/, checkpoints/: what an interrupted run continues from
OUT/            the finished model, loadable with transformers; run.json is written last

Of examples with a prompt and a completion only the completion is learnt, and none is cut.
"""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.config import as_dict
from draftsmith.data import text
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill import tokenizer_training
from draftsmith.distill.batches import (
    BatchSource,
    EvaluationBlocks,
    EvaluationSource,
    PackedBlocks,
    Phases,
    Prefetched,
    TrainingExample,
    TrajectoryBlocks,
    blocks_per_step,
)
from draftsmith.distill.callbacks import usual_callbacks
from draftsmith.distill.checkpoint import finished_folder, model_ending, save_model
from draftsmith.distill.config import PretrainConfig
from draftsmith.distill.distributed import (
    check_parts,
    check_pass,
    device_memory,
    precision_of,
    start_accelerator,
)
from draftsmith.distill.evaluation import Evaluation
from draftsmith.distill.initial_model import build_student, student_config, subclone
from draftsmith.distill.model_sizes import check_memory
from draftsmith.distill.objectives.distillation import CrossEntropy
from draftsmith.distill.trainer import Trainer, trainer_config
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import InputError
from draftsmith.provenance import Run

_log = logging.getLogger(__name__)


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
    longest = training.longest
    blocks = f"blocks of {longest} tokens (--batch-tokens {training.batch_tokens})"
    check_parts(training, training.batch_tokens // longest, blocks)
    check_pass(training)
    accelerator = start_accelerator(options)
    parts = accelerator.num_processes if training.parallel == "sharded" else 1
    check_memory(options.model, device_memory(accelerator.device), parts)
    with accelerator.main_process_first():  # it trains the tokenizer, the others read it
        data = read_data(options, work)
    steps_per_epoch = max(1.0, data.facts["train_tokens"] // training.batch_tokens)
    if data.paired:
        steps_per_epoch = example_blocks(options, data, training.block_length, 0).steps_per_epoch
    schedule = trainer_config(options, steps_per_epoch, precision_of(accelerator))
    source = make_source(options, data, schedule.steps)  # in front of the model: it refuses
    held = make_held_out(data, longest)
    config = student_config(
        options.model,
        vocab_size=data.vocab_size,
        end_id=data.end_id,
        pad_id=data.pad_id,
        context=longest,
    )
    model = build_student(config, options.seed)
    if options.model.init.startswith("subclone:"):
        tokens = None if data.subset is None else torch.from_numpy(data.subset.ids).long()
        subclone(options.model.init.removeprefix("subclone:"), model, tokens)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _log.info(
        f"{parameters / 1e6:.2f} M parameters, {data.facts['train_tokens'] / 1e6:.2f} M tokens per "
        f"epoch, {schedule.steps} steps of {training.batch_tokens} tokens"
    )
    measured = Evaluation(batches=held, objective=CrossEntropy())
    trainer = Trainer(
        drafter=Independent.learner(model),
        objective=CrossEntropy(),
        source=source,
        config=schedule,
        folder=work,
        identity={
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
            "precision": precision_of(accelerator),
            "seed": options.seed,
        },
        evaluation=measured if data.held else None,
        callbacks=usual_callbacks(options, accelerator, "pretrain"),
        accelerator=accelerator,
    )
    report = trainer.train()
    # a model of its own, because `model` may be in parts by now
    finished = build_student(copy.deepcopy(model.config), options.seed)
    trainer.copy_into(Independent.learner(finished))
    loss, predicted = report.evaluation.get("loss"), report.evaluation.get("tokens")
    bits = None
    # a completion that a block cuts is not predicted to its end
    whole = not data.paired or predicted == sum(len(one.trajectory.tokens) for one in data.held)
    if loss is not None and predicted and data.subset is None and whole:
        # for all held-out tokens, end tokens included, over the UTF-8 bytes of the text
        bits = loss * predicted / math.log(2) / data.facts["held_out_bytes"]
    results = {
        "parameters": parameters,
        **report.results(),
        "data": data.facts,
        "held_out_loss": loss,
        "held_out_tokens": predicted,
        "bits_per_byte": bits,
        "attend_across_documents": options.data.attend_across_documents and not data.paired,
    }
    if accelerator.is_main_process:
        subset = None
        if data.subset is not None:
            ids = torch.from_numpy(data.subset.ids).long()
            subset = VocabularySubset(ids, data.subset.unknown)
        readme = _readme(results) + model_ending(subset)
        with finished_folder(out, record, results, readme) as folder:
            save_model(folder, finished, data.tokenizer, subset, options.save_dtype)
        shutil.rmtree(work, ignore_errors=True)
    accelerator.wait_for_everyone()
    _log.info(f"wrote {out}" + (f": {bits:.4f} bits per byte on held-out text" if bits else ""))
    return PretrainResult(
        out=str(out),
        parameters=parameters,
        steps=report.steps,
        tokens=report.tokens,
        loss=loss,
        bits_per_byte=bits,
    )


def _readme(results: Mapping[str, Any]) -> str:
    """The README of the model."""
    parts = [
        "# A model trained by `draftsmith pretrain`",
        f"{results['parameters']:,} parameters, {results['tokens']:,} tokens seen in "
        f"{results['steps']:,} steps. `run.json` says how it was made.",
    ]
    if results["bits_per_byte"] is not None:
        parts.append(f"Held-out text: {results['bits_per_byte']:.4f} bits per byte.")
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenised text, its vocabulary and its facts for the record."""

    tokenizer: Any
    paired: bool
    """The text is prompts with completions."""
    train: list[Any]
    """Token arrays of documents, or a `TrainingExample` of each pair."""
    held: list[Any]
    vocab_size: int
    """Size of the student's vocabulary."""
    end_id: int
    pad_id: int
    subset: tokenizer_training.Subset | None
    """When the student's vocabulary is reduced."""
    stand_in: int
    """What a token outside the vocabulary is fed as."""
    facts: dict[str, Any]


def read_data(options: PretrainConfig, work: Path) -> Data:
    """Find, read and tokenise the text; train a tokenizer when no target gives one."""
    chosen, size = options.data, options.model.vocab_subset
    found = text.find_files(chosen.text, chosen.include, chosen.exclude)
    files = [file for file in found if text.is_utf8(file)]
    unreadable = len(found) - len(files)
    if unreadable:
        _log.info(f"left out {unreadable} files that are not UTF-8 text")
    held_files: list[text.TextFile] = []
    if chosen.eval_text:
        held_files = text.find_files(chosen.eval_text, chosen.include, chosen.exclude)
        evaluated = {file.path.resolve() for file in held_files}
        files = [file for file in files if file.path.resolve() not in evaluated]
    elif chosen.hold_out:
        files, held_files = text.hold_out(files, chosen.hold_out)
    if not files:
        raise InputError("no training text is left; check --text, --include and --hold-out")
    train_sha256 = text.digest(files)
    tokenizer, tokenizer_sha256 = open_tokenizer(options, files, train_sha256, work)
    paired = text.are_examples(files)
    if paired and size is not None:
        raise InputError(
            "--vocab-subset needs plain text; these files hold prompts and completions"
        )
    read = encode_pairs if paired else encode_documents
    (train, train_bytes), (held, held_bytes) = read(tokenizer, files), read(tokenizer, held_files)
    vocab_size, end_id = len(tokenizer), tokenizer.eos_token_id
    pad_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    subset, outside = None, 0
    if size is not None:
        counts = tokenizer_training.token_counts(train, vocab_size)
        always = {end_id, *tokenizer.all_special_ids}
        subset = tokenizer_training.choose_subset(counts, size, always)
        outside = int(counts.sum() - counts[subset.ids].sum())
        place = {int(token): index for index, token in enumerate(subset.ids)}
        end_id, pad_id = place[end_id], place.get(pad_id, place[end_id])
        train, held = (
            list(tokenizer_training.into_subset(documents, subset.ids, vocab_size))
            for documents in (train, held)
        )
        vocab_size = len(subset.ids)
    lengths = (
        (len(one.trajectory.prompt) + len(one.trajectory.tokens) for one in train)
        if paired
        else (len(document) + 1 for document in train)
    )
    return Data(
        tokenizer=tokenizer,
        paired=paired,
        train=train,
        held=held,
        vocab_size=vocab_size,
        end_id=end_id,
        pad_id=pad_id,
        subset=subset,
        stand_in=0 if subset is None else subset.unknown,
        facts={
            "files": len(files),
            "left_out_not_utf8": unreadable,
            "documents": len(train),
            "train_bytes": train_bytes,
            "train_tokens": sum(lengths),
            "tokens_outside_vocabulary": outside,
            "tokenizer_sha256": tokenizer_sha256,
            "train_sha256": train_sha256,
            "held_out_files": [file.name for file in held_files],
            "held_out_bytes": held_bytes,
            "held_out_sha256": text.digest(held_files),
        },
    )


def open_tokenizer(
    options: PretrainConfig, files: list[text.TextFile], train_sha256: str, work: Path
) -> tuple[Any, str]:
    """The target's tokenizer or one of our own, and its digest.

    Our own is trained once: again only when options or text are others and no step was saved yet.
    """
    model, training, folder = options.model, options.training, work / "tokenizer"
    if model.tokenizer is not None:
        tokenizer: Any = tokenizer_training.load_tokenizer(model.tokenizer)
        return tokenizer, tokenizer_training.sha256(tokenizer, Path(model.tokenizer))
    context = model.context or training.long_block_length or training.block_length
    origin = {"vocab_size": model.vocab_size, "train_sha256": train_sha256, "context": context}
    # behind a checkpoint any is right: the trainer compares what the run was begun with
    resumed = checkpoints.latest(work / "checkpoints") is not None
    if not tokenizer_training.is_kept(folder, None if resumed else origin):
        _log.info(f"training a byte-level BPE of {model.vocab_size} tokens")
        tokenizer = tokenizer_training.train_bpe(text.texts(files), model.vocab_size, context)
        tokenizer_training.keep(tokenizer, folder, origin)
    tokenizer = tokenizer_training.kept(folder)
    return tokenizer, tokenizer_training.sha256(tokenizer, folder)


def make_source(options: PretrainConfig, data: Data, steps: int) -> BatchSource:
    """Packed blocks; with --long-block-length a last phase of long ones, in an order of its own."""
    training = options.training

    def packed(length: int, seed: int) -> BatchSource:
        if data.paired:
            return example_blocks(options, data, length, seed)
        return PackedBlocks(
            data.train,
            end_id=data.end_id,
            length=length,
            batch_tokens=training.batch_tokens,
            seed=seed,
            attend_across=options.data.attend_across_documents,
            stand_in=data.stand_in,
        )

    longest = training.long_block_length
    if longest is not None:
        blocks_per_step(training.batch_tokens, longest, "--long-block-length")  # refuses
    first = packed(training.block_length, options.seed)
    if longest is None:
        return Prefetched(first)
    second = packed(longest, options.seed + 2**32)
    second_from = round(steps * (1 - training.long_share))
    return Prefetched(Phases(first=first, second=second, second_from=second_from))


def example_blocks(options: PretrainConfig, data: Data, length: int, seed: int) -> TrajectoryBlocks:
    """Prompts with completions in blocks. Raises InputError where blocks do not fill a batch."""
    blocks = blocks_per_step(options.training.batch_tokens, length)
    return TrajectoryBlocks(
        data.train, end_id=data.end_id, length=length, batch_blocks=blocks, seed=seed
    )


def make_held_out(data: Data, length: int) -> EvaluationSource:
    """The held-out text in blocks."""
    rows, end_id = max(1, 8192 // length), data.end_id
    if data.paired and data.held:
        return TrajectoryBlocks(
            data.held, end_id=end_id, length=length, batch_blocks=rows, seed=None
        )
    return EvaluationBlocks(
        data.held, end_id=end_id, length=length, batch_blocks=rows, stand_in=data.stand_in
    )


def encode_documents(tokenizer: Any, files: list[text.TextFile]) -> tuple[list[Any], int]:
    """Token arrays of plain text, and its number of UTF-8 bytes."""
    return tokenizer_training.encode(tokenizer, text.documents(files))


def encode_pairs(tokenizer: Any, files: list[text.TextFile]) -> tuple[list[Any], int]:
    """Examples, each ended by the end token, and the number of UTF-8 bytes of the completions."""
    pairs = list(text.examples(files))
    prompts, _ = tokenizer_training.encode(tokenizer, (prompt for prompt, _ in pairs))
    completions, size = tokenizer_training.encode(tokenizer, (answer for _, answer in pairs))
    made = [
        Trajectory(
            prompt_id=str(number),
            forcing="gold",
            prompt=tuple(prompt.tolist()),
            tokens=(*completion.tolist(), tokenizer.eos_token_id),
            score=0.0,
        )
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    return [TrainingExample(trajectory=one) for one in made], size
