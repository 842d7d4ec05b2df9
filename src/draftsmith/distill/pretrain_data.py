"""What `pretrain` learns from: text files -> tokens -> blocks, and the held-out ones.

Examples with a prompt and a completion: only the completion is learnt, and none is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.data import text
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill import tokenizer_training
from draftsmith.distill.batches import (
    BatchSource,
    EvaluationBlocks,
    PackedBlocks,
    Phases,
    Tokens,
    TrainingExample,
)
from draftsmith.distill.config import PretrainConfig
from draftsmith.distill.evaluation import Evaluation, EvaluationSource
from draftsmith.distill.objectives.base import CrossEntropy
from draftsmith.distill.sources import HeldOutBlocks, TrajectoryBlocks
from draftsmith.distill.trainer import TrainReport
from draftsmith.distill.training import say
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenised text and what is to be said about it."""

    tokenizer: Any
    train: list[Tokens]
    held: list[Tokens]
    examples: list[TrainingExample]
    """In place of `train`: prompts with completions."""
    held_examples: list[TrainingExample]
    held_bytes: int
    vocab_size: int
    """Size of the student's vocabulary."""
    end_id: int
    pad_id: int
    subset: tokenizer_training.Subset | None
    """When the student's vocabulary is reduced."""
    facts: dict[str, Any]

    @property
    def stand_in(self) -> int:
        """What a token outside the vocabulary is fed as."""
        return 0 if self.subset is None else self.subset.unknown


def read_data(options: PretrainConfig, work: Path) -> Data:
    """Find, read and tokenise the text; train a tokenizer when no target gives one."""
    chosen = options.data
    found = text.find_files(chosen.text, chosen.include, chosen.exclude)
    files = [file for file in found if text.is_utf8(file)]
    unreadable = len(found) - len(files)
    if unreadable:
        say(f"left out {unreadable} files that are not UTF-8 text")
    held: list[text.TextFile] = []
    if chosen.eval_text:
        held = text.find_files(chosen.eval_text, chosen.include, chosen.exclude)
        evaluated = {file.path.resolve() for file in held}
        files = [file for file in files if file.path.resolve() not in evaluated]
    elif chosen.hold_out:
        files, held = text.hold_out(files, chosen.hold_out)
    if not files:
        raise InputError("no training text is left; check --text, --include and --hold-out")
    train_sha256 = text.digest(files)
    tokenizer, tokenizer_sha256 = open_tokenizer(options, files, train_sha256, work)
    paired = text.are_examples(files)
    if paired and options.model.vocab_subset is not None:
        raise InputError(
            "--vocab-subset needs plain text; these files hold prompts and completions"
        )
    train_tokens: list[Tokens] = []
    held_tokens: list[Tokens] = []
    pairs: list[TrainingExample] = []
    held_pairs: list[TrainingExample] = []
    if paired:
        pairs, train_bytes = encode(tokenizer, text.examples(files))
        held_pairs, held_bytes = encode(tokenizer, text.examples(held))
    else:
        train_tokens, train_bytes = tokenizer_training.encode(tokenizer, text.documents(files))
        held_tokens, held_bytes = tokenizer_training.encode(tokenizer, text.documents(held))
    vocab_size = len(tokenizer)
    end_id = tokenizer.eos_token_id
    pad_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    subset, outside = None, 0
    if options.model.vocab_subset is not None:
        counts = tokenizer_training.token_counts(train_tokens, vocab_size)
        always = {end_id, *tokenizer.all_special_ids}
        subset = tokenizer_training.choose_subset(counts, options.model.vocab_subset, always)
        outside = int(counts.sum() - counts[subset.ids].sum())
        place = {int(token): index for index, token in enumerate(subset.ids)}
        end_id, pad_id = place[end_id], place.get(pad_id, place[end_id])
        train_tokens = list(tokenizer_training.into_subset(train_tokens, subset.ids, vocab_size))
        held_tokens = list(tokenizer_training.into_subset(held_tokens, subset.ids, vocab_size))
        vocab_size = len(subset.ids)
    return Data(
        tokenizer=tokenizer,
        train=train_tokens,
        held=held_tokens,
        examples=pairs,
        held_examples=held_pairs,
        held_bytes=held_bytes,
        vocab_size=vocab_size,
        end_id=end_id,
        pad_id=pad_id,
        subset=subset,
        facts={
            "files": len(files),
            "left_out_not_utf8": unreadable,
            "documents": len(train_tokens) + len(pairs),
            "train_bytes": train_bytes,
            "train_tokens": sum(len(document) + 1 for document in train_tokens) + num_tokens(pairs),
            "tokens_outside_vocabulary": outside,
            "tokenizer_sha256": tokenizer_sha256,
            "train_sha256": train_sha256,
            "held_out_files": [file.name for file in held],
            "held_out_bytes": held_bytes,
            "held_out_sha256": text.digest(held),
        },
    )


def open_tokenizer(
    options: PretrainConfig, files: list[text.TextFile], train_sha256: str, work: Path
) -> tuple[Any, str]:
    """The target's tokenizer or one of our own, and its digest.

    Our own is trained once: again only when options or text are others and no step was saved yet.
    """
    if options.model.tokenizer is not None:
        tokenizer: Any = tokenizer_training.load_tokenizer(options.model.tokenizer)
        return tokenizer, tokenizer_training.sha256(tokenizer, Path(options.model.tokenizer))
    training = options.training
    longest = training.long_block_length or training.block_length
    context = options.model.context or longest
    origin = {
        "vocab_size": options.model.vocab_size,
        "train_sha256": train_sha256,
        "context": context,
    }
    folder = work / "tokenizer"
    # behind a checkpoint any is right: the trainer compares what the run was begun with
    resumed = checkpoints.latest(work / "checkpoints") is not None
    if not tokenizer_training.is_kept(folder, None if resumed else origin):
        say(f"training a byte-level BPE of {options.model.vocab_size} tokens")
        texts = text.texts(files)
        tokenizer = tokenizer_training.train_bpe(texts, options.model.vocab_size, context)
        tokenizer_training.keep(tokenizer, folder, origin)
    tokenizer = tokenizer_training.kept(folder)
    return tokenizer, tokenizer_training.sha256(tokenizer, folder)


def make_source(options: PretrainConfig, data: Data, steps: int) -> BatchSource:
    """Packed blocks; with --long-block-length a last phase of long ones, in an order of its own."""
    training = options.training

    def packed(length: int, seed: int) -> BatchSource:
        if data.examples:
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

    first = packed(training.block_length, options.seed)
    if training.long_block_length is None:
        return first
    second = packed(training.long_block_length, options.seed + 2**32)
    return Phases(first=first, second=second, second_from=round(steps * (1 - training.long_share)))


def example_blocks(options: PretrainConfig, data: Data, length: int, seed: int) -> TrajectoryBlocks:
    """Prompts with completions in blocks. Raises InputError where blocks do not fill a batch."""
    blocks, rest = divmod(options.training.batch_tokens, length)
    if rest or not blocks:
        raise InputError(
            f"--batch-tokens {options.training.batch_tokens} must be a multiple of the block "
            f"length {length}"
        )
    return TrajectoryBlocks(
        data.examples, end_id=data.end_id, length=length, batch_blocks=blocks, seed=seed
    )


def counted_all(report: TrainReport, data: Data) -> bool:
    """Whether all held-out tokens were predicted: a completion that a block cuts is not."""
    wanted = sum(len(item.trajectory.tokens) for item in data.held_examples)
    return not data.held_examples or report.evaluation.get("tokens") == wanted


def make_held_out(data: Data, length: int) -> EvaluationSource | None:
    """The held-out text in blocks, or None where nothing was held out."""
    batch_blocks = max(1, 8192 // length)
    if data.held_examples:
        return HeldOutBlocks(
            data.held_examples, end_id=data.end_id, length=length, batch_blocks=batch_blocks
        )
    if not data.held:
        return None
    return EvaluationBlocks(
        data.held,
        end_id=data.end_id,
        length=length,
        batch_blocks=batch_blocks,
        stand_in=data.stand_in,
    )


def held_out_loss(batches: EvaluationSource) -> Evaluation:
    return Evaluation(batches=batches, objective=CrossEntropy(), weight_name="tokens")


BATCH = 512


def encode(
    tokenizer: Any, examples: Iterable[tuple[str, str]]
) -> tuple[list[TrainingExample], int]:
    """Documents, each ended by the end token, and the number of UTF-8 bytes of the completions."""
    out: list[TrainingExample] = []
    size = 0
    source = iter(examples)
    while group := list(islice(source, BATCH)):
        size += sum(len(completion.encode()) for _, completion in group)
        prompts, completions = (
            tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            for texts in zip(*group, strict=True)
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            trajectory = Trajectory(
                prompt_id=str(len(out)),
                forcing="gold",
                prompt=tuple(prompt),
                tokens=(*completion, tokenizer.eos_token_id),
                score=0.0,
            )
            out.append(TrainingExample(trajectory=trajectory))
    return out, size


def num_tokens(documents: Sequence[TrainingExample]) -> int:
    """Count the tokens of prompts and completions."""
    return sum(len(d.trajectory.prompt) + len(d.trajectory.tokens) for d in documents)
