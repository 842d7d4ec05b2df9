"""What a distillation learns from: texts of trajectory stores, or drawn while it trains.

A damaged shard of a store stops the run, or (`--on-bad-shard skip`) is left out as a whole:

shard 0   good       its texts, logprobs and hidden states
shard 1   damaged    nothing of it, however far it could be read
shard 2   good       ..
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.transfer import no_garbage_collection
from draftsmith.core.types import Signals, TrajectoryBatch
from draftsmith.data import text as _text
from draftsmith.data.prompts import note_plain
from draftsmith.data.suites import load_prompts
from draftsmith.distill import tokenizer_training
from draftsmith.distill.batches import (
    BatchSource,
    EvaluationSource,
    FromStates,
    InLoop,
    PackedBlocks,
    Prefetched,
    TextRows,
    TrainingExample,
    TrajectoryBlocks,
    assemble,
    blocks_per_step,
    fits,
    keyed_rng,
    pack,
)
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.distributed import check_parts, check_pass
from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.collect import TransformersBackend, why_not
from draftsmith.distill.trajectories.readers import ByteCache, ShardReader, StoredText
from draftsmith.distill.trajectories.requests import check_stored_features, feature_width, refuse
from draftsmith.distill.trajectories.store import Shard, Skipped, TrajectoryStore, revision_of
from draftsmith.distill.trajectories.types import (
    Backend,
    CollectRequest,
    CollectSettings,
    TopK,
    Trajectory,
)
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import digest, portable_text, recorded
from draftsmith.targets.base import Target
from draftsmith.targets.hf import EmbeddingAndHead, HFTarget

_log = logging.getLogger(__name__)

EVALUATION_BLOCKS = 8
"""Blocks of a held-out batch."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a distillation."""

    source: BatchSource
    held_out: EvaluationSource | None
    steps_per_epoch: float
    longest: int
    """Tokens of the longest text that is trained on, as far as a block goes."""
    furthest: int
    """An upper bound of the same for all texts that are read, held-out and plain ones too."""
    facts: dict[str, Any]
    """What run.json says about the data; `data` in it decides whether a run may be resumed."""
    teacher: str | None = None
    """Digest of the weights of a target in memory."""
    count_tokens: Callable[[], Tensor] | None = None
    """Counts how often the answers hold each token, [V]; None: they are still to be drawn."""
    highest: int | None = None
    """Token of all texts that are read, plain ones excepted; None: they are still to be drawn."""


# --------------------------------------------------------------------------- texts of one prompt


Aggregate = Literal["per_beam", "mixture"]
Weights = Literal["uniform", "score"]
SharesOf = Callable[[Sequence[Trajectory | StoredText]], Sequence[float]]
"""What each of some trajectories of one prompt counts beside the others; their sum is 1."""
Shares = list[tuple[TrainingExample, float]]
"""Texts, and what each counts beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multi:
    """How the trajectories of a prompt are put together: DistillBeam's two ways.

    per_beam   (Algorithm 2) every beam keeps its own logprobs; q = p is the optimum.
    mixture    (Eq. 7) at answer position t all beams imitate the mean of theirs, although their
           prefixes differ: no distribution of the teacher is the optimum then.

    A beam that has ended is not part of a mixture any more.

    t            0    1    2    3
    beam 0       a    b    #
    beam 1       a    c    d    #          position 2: mean of two; position 3: beam 1's own
    """

    aggregate: Aggregate = "per_beam"
    weights: Weights = "uniform"
    """uniform: 1/N each; score: softmax(score / score_temperature) over the prompt's beams."""
    score_temperature: float = 1.0
    most: int | None = None
    """Use only the best so many of each prompt: beams as their search ranks them, other texts by
    their log-probability."""

    def apply(
        self, documents: Iterable[TrainingExample], cache: ByteCache | None = None
    ) -> list[TrainingExample]:
        """All with new weights: a prompt counts as much as another, whatever its number of beams,
        and the mean weight of a counted token is 1.

        `cache`: mixtures are computed when a batch asks, and kept there; None: at once.
        """
        shares = self.share(documents, cache)
        tokens = sum(one.trajectory.answer_length for one, _ in shares)
        total = sum(share * one.trajectory.answer_length for one, share in shares)
        return weighted(shares, tokens / total if total else 1.0)

    def share(self, documents: Iterable[TrainingExample], cache: ByteCache | None = None) -> Shares:
        """All, and what each counts; the sum over a prompt is 1 and depends on no other prompt."""
        groups: dict[str, list[TrainingExample]] = {}
        for document in documents:
            groups.setdefault(document.trajectory.prompt_id, []).append(document)
        out: Shares = []
        for group in groups.values():
            ordered = sorted(_best(group, self.most), key=_place) if len(group) > 1 else group
            shares = self.shares_of([document.trajectory for document in ordered])
            if self.aggregate == "mixture":
                ordered = mixed(ordered, self.shares_of, cache)
            out += zip(ordered, shares, strict=True)
        return out

    def shares_of(self, group: Sequence[Trajectory | StoredText]) -> list[float]:
        """What each of these counts beside the others; their sum is 1."""
        if self.weights == "uniform":
            return [1.0 / len(group)] * len(group)
        best = max(trajectory.score for trajectory in group)
        raw = [math.exp((t.score - best) / self.score_temperature) for t in group]
        return [value / sum(raw) for value in raw]


def weighted(shares: Shares, factor: float) -> list[TrainingExample]:
    """Each text with its share times the factor as its weight."""
    return [  # `replace` takes nearly twice as long, and a store may hold millions of texts
        TrainingExample(
            trajectory=one.trajectory, weight=share * factor, mixed_logprobs=one.mixed_logprobs
        )
        for one, share in shares
    ]


def mixed(
    group: Sequence[TrainingExample], shares_of: SharesOf, cache: ByteCache | None = None
) -> list[TrainingExample]:
    """The same texts, each position with the mean of the logprobs of all that have a token there.

    `cache`: means are computed when a batch asks, and kept there; None: at once.
    Raises InputError when a text has no logprobs.
    """
    means = Mixture(group=tuple(group), shares_of=shares_of)
    tops = means.compute() if cache is None else ()

    def mean(place: int) -> TopK:
        return tops[place] if cache is None else cache.get(means, means.rounded)[place]

    return [replace(one, mixed_logprobs=partial(mean, place)) for place, one in enumerate(group)]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Mixture:
    """The texts of one prompt, whose logprobs are averaged position by position.

    `shares_of` is asked at each position about those that have a token there: beside a beam that
    has ended their shares may be too small for a float, and have no sum to be divided by.
    """

    group: tuple[TrainingExample, ...]
    shares_of: SharesOf

    def __post_init__(self) -> None:
        if any(getattr(one.trajectory, "has_logprobs", True) == 0 for one in self.group):
            raise self._lacking()

    def compute(self) -> list[TopK]:
        """The mean logprobs of each text. Raises InputError when one has none, BackendError."""
        laws = [top for document in self.group if (top := document.top()) is not None]
        if len(laws) < len(self.group):
            raise self._lacking()
        means = []
        for t in range(max(len(law) for law in laws)):
            live = [place for place, law in enumerate(laws) if t < len(law)]
            shares = self.shares_of([self.group[place].trajectory for place in live])
            means.append(_mean([laws[place] for place in live], shares, t))
        return [_together(means[: len(law)], law.vocab_size) for law in laws]

    def rounded(self) -> tuple[list[TopK], int]:
        """As `compute`, rounded as stores round, and the bytes of all: runs that were begun when
        means were kept on disk go on exactly."""
        means = []
        for top in self.compute():
            assert top.vocab_size is not None, "stored logprobs have one"
            means.append(shards.decode(shards.encode(top, top.vocab_size)))
        return means, sum(top.ids_NK.nbytes + top.log_p_NK.nbytes for top in means)

    def _lacking(self) -> InputError:
        return InputError("--aggregate mixture needs a store with logprobs; collect with --top-k")


def _best(group: Sequence[TrainingExample], most: int | None) -> Sequence[TrainingExample]:
    """The best texts of a prompt: beams in the order of their search, which may have a length
    penalty; of samples, and beside these, those with the highest log-probability."""
    if most is None or most >= len(group):
        return group
    searched = all(document.trajectory.forcing == "beam" for document in group)

    def rank(document: TrainingExample) -> tuple[float, float, int, float]:
        index = document.trajectory.index if searched else 0
        return index, -document.trajectory.score, *_place(document)

    return sorted(group, key=rank)[:most]


def _place(document: TrainingExample) -> tuple[int, float]:
    """Where a text stands among those of its prompt, whatever its number."""
    return document.trajectory.index, document.trajectory.temperature or 0.0


def _mean(laws: Sequence[TopK], shares: Sequence[float], t: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids ascending, log of the mean) at answer position t, which all of them have."""
    ids = np.concatenate([law.ids_NK[t] for law in laws])
    mass = np.concatenate(
        [np.exp(law.log_p_NK[t]) * share for law, share in zip(laws, shares, strict=True)]
    )
    kept = mass > 0
    union, place = np.unique(ids[kept], return_inverse=True)
    sums = np.bincount(place, weights=mass[kept], minlength=len(union))
    return union, np.log(sums)


def _together(rows: Sequence[tuple[np.ndarray, np.ndarray]], vocab_size: int | None) -> TopK:
    """Rows of different widths; what a narrow one lacks is filled with probability 0."""
    width = max(len(ids) for ids, _ in rows)
    ids_NK = np.zeros((len(rows), width), np.int32)
    log_p_NK = np.full((len(rows), width), -np.inf, np.float32)
    for row, (ids, log_p) in enumerate(rows):
        ids_NK[row, : len(ids)] = ids
        log_p_NK[row, : len(ids)] = log_p
    return TopK(ids_NK=ids_NK, log_p_NK=log_p_NK, vocab_size=vocab_size)


# --------------------------------------------------------------------------- drawn while training


class Online:
    """Continuations of the step's prompts, drawn when they are needed (DistillBeam, Algorithm 2;
    on-policy: DistillSpec). Prompts come in an order keyed by (seed, epoch).

    Args:
        teacher: draws continuations as `settings` say.
        student: draws single samples at temperature 1 for the on-policy share of prompts; its
            weights are brought up to date by `refresh` before.
        on_policy: share of a step's prompts that the student continues.
    """

    def __init__(
        self,
        requests: Sequence[CollectRequest],
        *,
        teacher: Backend,
        settings: CollectSettings,
        multi: Multi,
        end_id: int,
        length: int,
        prompts_per_step: int,
        seed: int,
        student: Backend | None = None,
        refresh: Callable[[], None] | None = None,
        on_policy: float = 0.0,
    ) -> None:
        if on_policy and student is None:
            raise ValueError("on-policy continuations need the student")
        self.requests, self.teacher, self.student = requests, teacher, student
        self.settings, self.multi, self.refresh = settings, multi, refresh
        self.end_id, self.length, self.seed = end_id, length, seed
        self.prompts_per_step, self.on_policy = prompts_per_step, on_policy

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Continue this part's prompts of the step; InputError if there are none. Neither the texts
        nor their weights depend on the number of parts."""
        mine = list(enumerate(self._numbers(step)))[part::parts]
        if not mine:
            raise InputError(f"{self.prompts_per_step} prompts per step do not fill {parts} parts")
        seeded = replace(self.settings, seed=int(keyed_rng(self.seed, step).integers(2**62)))
        own = self._own(step)
        if own and self.refresh is not None:
            self.refresh()  # by every part: weights in parts are gathered together
        theirs = [self.requests[i] for place, i in mine if place not in own]
        shares = self._drawn(self.teacher, theirs, seeded)
        ours = [self.requests[i] for place, i in mine if place in own]
        if ours and self.student is not None:
            plain = replace(
                seeded, forcing="sample", temperatures=(1.0,), samples=1, top_p=1.0, top_k=1
            )
            shares = [*self._drawn(self.student, ours, plain), *shares]
        texts = weighted(shares, self._texts_per_prompt(len(own)))
        return assemble(pack(texts, self.length), self.length, self.end_id)

    def _drawn(
        self, backend: Backend, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> Shares:
        """Continuations with their shares; a prompt that comes twice in a step counts twice."""
        if not requests:
            return []
        made = backend.collect(requests, settings)
        times = Counter(request.prompt_id for request in requests)
        shares = self.multi.share(
            TrainingExample(trajectory=one).without_logprobs() for one in made
        )
        return [(one, share * times[one.trajectory.prompt_id]) for one, share in shares]

    def _texts_per_prompt(self, own: int) -> float:
        """Mean over the whole step, of which the student continues `own` prompts. Shares times this
        have the mean 1, exactly so if beams are equally long: plain text beside them has 1 too."""
        asked = self.settings
        each = asked.samples * len(asked.temperatures) * asked.most_beams  # what is unused is 1
        return (own + (self.prompts_per_step - own) * each) / self.prompts_per_step

    def _own(self, step: int) -> set[int]:
        """Places of the step's prompts that the student continues; over many steps their share is
        `on_policy` exactly, however few prompts a step has."""
        per_step, share = self.prompts_per_step, self.on_policy
        many = int((step + 1) * per_step * share) - int(step * per_step * share)
        return set(keyed_rng(self.seed, step, 1 << 40).permutation(per_step)[:many].tolist())

    def _numbers(self, step: int) -> list[int]:
        """The step's prompts: a walk through one permutation after the other."""
        first = step * self.prompts_per_step
        out = []
        for index in range(first, first + self.prompts_per_step):
            epoch, place = divmod(index, len(self.requests))
            out.append(int(keyed_rng(self.seed, -1 - epoch).permutation(len(self.requests))[place]))
        return out


# --------------------------------------------------------------------------- what options ask for


def prompt_key(tokens: Sequence[int]) -> str:
    """Names a prompt by its tokens."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


def held_out(keys: Iterable[str], share: float) -> set[str]:
    """The prompts to hold out: by their key alone, so that the choice never depends on the others;
    but one at least, of two or more."""
    known = sorted(set(keys))
    chosen = {key for key in known if int(key[:16], 16) < share * 2**64}
    return chosen or set(known[:1] if share and len(known) > 1 else [])


def text_digest(options: DistillConfig) -> str | None:
    """Return a digest of the content of --text; None without any."""
    return _text.digest(_text.find_files(options.text)) if options.text else None


def _with_text(options: DistillConfig, tokenizer: Any, source: BatchSource) -> BatchSource:
    """Pre-training text below the rows of `source`, when --text names some."""
    if not options.text:
        return source
    files = _text.find_files(options.text)
    documents, _ = tokenizer_training.encode(tokenizer, _text.documents(files))
    length = options.training.block_length
    text = PackedBlocks(
        documents,
        end_id=tokenizer.eos_token_id,
        length=length,
        batch_tokens=text_blocks(options) * length,
        seed=options.seed,
        attend_across=False,
    )
    return TextRows(first=source, text=text)


def source_of(
    options: DistillConfig,
    tokenizer: Any,
    source: BatchSource,
    teacher: HFTarget | None,
    signals: Signals,
    *,
    prefetch: bool,
    ends: EmbeddingAndHead | None = None,
    known: int | None = None,
) -> BatchSource:
    """Add --text and a teacher in memory, or the head of one, where they are given.

    For a drafter that reads hidden states the teacher computes those of the text too, and with them
    its logprobs. `prefetch`: the rows of `source` depend on the step alone, so a thread may
    assemble them in advance; what the teacher computes is never computed in advance. `known`:
    entries of the teacher's head that the drafter's has, too; None: all.
    """

    def ahead(source: BatchSource) -> BatchSource:
        return Prefetched(source) if prefetch else source

    top_k = options.top_k
    if ends is not None:
        width = ends.config.hidden_size
        return FromStates(source=ahead(source), head=ends.head, width=width, top_k=top_k)
    if teacher is None:
        return ahead(_with_text(options, tokenizer, source))
    if signals == Signals() and not options.text_logprobs:
        learnt = InLoop(source=ahead(source), teacher=teacher, top_k=top_k, known=known)
        return _with_text(options, tokenizer, learnt)
    both = ahead(_with_text(options, tokenizer, source))
    return InLoop(source=both, teacher=teacher, signals=signals, top_k=top_k, known=known)


def held_out_batches(
    options: DistillConfig,
    tokenizer: Any,
    answers: Sequence[TrainingExample],
    teacher: HFTarget | None,
    signals: Signals,
    ends: EmbeddingAndHead | None = None,
) -> EvaluationSource | None:
    """Read each of these answers once, with whole logprobs of a teacher in memory, or of its head.
    None: no answers."""
    if not answers:
        return None
    blocks = TrajectoryBlocks(
        answers,
        end_id=tokenizer.eos_token_id,
        length=options.training.block_length,
        batch_blocks=EVALUATION_BLOCKS,
        seed=None,
    )
    if ends is not None:
        return FromStates(source=blocks, head=ends.head, width=ends.config.hidden_size)
    if teacher is None:
        return blocks
    return InLoop(source=blocks, teacher=teacher, signals=signals)


def multi_of(options: DistillConfig, most: int | None) -> Multi:
    """How trajectories of one prompt count; only the best `most` of them."""
    return Multi(
        aggregate=options.aggregate,
        weights=options.beam_weights,
        score_temperature=options.score_temperature,
        most=most,
    )


def batch_blocks(options: DistillConfig) -> int:
    """How many blocks a batch has. Raises InputError where they do not fill it."""
    return blocks_per_step(options.training.batch_tokens, options.training.block_length)


def check_batch(options: DistillConfig) -> None:
    """InputError for a batch that cannot be put together, divided or held in memory; nothing is
    loaded for this."""
    training, text = options.training, text_blocks(options)
    if options.online:
        prompts = options.prompts_per_step
        check_parts(training, prompts, "prompts (--prompts-per-step)")  # any part may have no text
        return
    share = f", less --text-share {options.text_share:g}" if text else ""
    blocks = f"--batch-tokens {training.batch_tokens} / --block-length {training.block_length}"
    check_parts(training, batch_blocks(options) - text, f"blocks ({blocks}{share})")
    check_pass(training)


def text_blocks(options: DistillConfig) -> int:
    """How many blocks of a batch are --text.

    Raises:
        InputError: none, or all of them.
    """
    if not options.text:
        return 0
    share, blocks = options.text_share, batch_blocks(options)
    text = round(blocks * share)
    if not 0 < text < blocks:
        raise InputError(
            f"--text-share {share:g} of {blocks} blocks per batch leaves less than one block for "
            f"the {'answers' if text else 'text'}: give more --batch-tokens, a smaller "
            "--block-length or another share"
        )
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTexts:
    """The texts of a store that a run is trained on."""

    store: TrajectoryStore
    good: tuple[Shard, ...]
    """The shards that are read."""
    bad: tuple[int, ...]
    """Numbers of the shards that are damaged."""
    documents: tuple[TrainingExample, ...]

    def checksum(self) -> str:
        """Digest of everything in the good shards, by the checksums that they name."""
        return digest([[file.name, file.sha256] for one in self.good for file in one.files])


def read_shards(
    store: TrajectoryStore, cache: ByteCache, width: int, on_bad: Literal["stop", "skip"]
) -> StoredTexts:
    """List all texts that are not empty; their content is read, and checked, when a batch asks.

    Args:
        cache: receives decoded row groups.
        width: of the hidden states that are wanted; 0: none.
        on_bad: what to do about a damaged shard. With `skip` all shards are read and checked now,
            because batches depend on which of them are good.

    Raises:
        BackendError: a shard is damaged as far as its size, its JSON file and its index tell.
    """
    good: list[Shard] = []
    bad: list[int] = []
    documents: list[TrainingExample] = []
    hint = " (--on-bad-shard skip leaves it out)"
    for number in store.shards():
        try:
            reader = store.reader(number, cache, width, hint if on_bad == "stop" else "")
            texts = reader.texts()
            if on_bad == "skip":
                reader.check()
                for text in texts if width else ():
                    text.states(text.prompt_length + text.answer_length)
        except BackendError as error:
            if on_bad == "stop":
                message = str(error)
                raise BackendError(message.removesuffix(hint) + hint) from error
            _log.info(f"left out a shard: {error}")
            bad.append(number)
            continue
        good.append(reader.facts)
        documents += [TrainingExample(trajectory=text) for text in texts]
    return StoredTexts(store=store, good=tuple(good), bad=tuple(bad), documents=tuple(documents))


def warn_unfinished(store: TrajectoryStore) -> None:
    """Log a warning where `collect` has not ended, or shards that it wrote have gone since.

    There is none for a store that was filled from Python: only who fills it knows when it is full.
    """
    if "shard_size" not in store.header.settings:  # which `collect` puts there
        return
    there, written = len(store.shards()), _written(store)
    if written is None:
        what = (
            "has no run.json of `collect`, which writes it last: the collection has not ended, or "
            "that file was not copied"
        )
    elif there < written:
        what = f"lacks {written - there} of the {written} shards that its collection ended with"
    else:
        return
    _log.info(
        f"warning: {store.folder} {what}; the {there} shards that are there are used, and "
        "the same `collect` command again does what is missing"
    )


def _written(store: TrajectoryStore) -> int | None:
    """How many shards there were when `collect` ended, which may since be at work again; None: it
    has not, or nothing tells."""
    found = recorded(store.folder / "run.json", "results", "shards")
    return found if type(found) is int else None


@no_garbage_collection()
def stored_data(
    options: DistillConfig,
    tokenizer: Any,
    vocab_size: int,
    teacher: HFTarget | None,
    signals: Signals,
    ends: EmbeddingAndHead | None = None,
    in_both: int | None = None,
) -> TrainingData:
    """Trajectories of stores; with a teacher in memory, its whole laws in place of theirs.

    Args:
        vocab_size: the target's.
        ends: its head makes whole laws of stored hidden states, in place of the stored ones.
        in_both: entries of the teacher's head that the drafter's has, too; None: all.
        signals: what the drafter reads of the target: the teacher computes it, or else the stores
            hold just this.

    Raises:
        InputError: a store is of another target, holds other hidden states, or nothing to learn.
        BackendError: a shard is damaged, and --on-bad-shard skip is not given.
    """
    folders = (*options.store, *options.evaluate)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError(
            "--store names one store twice"
            if not options.evaluate
            else "--store and --evaluate name one store twice"
        )
    stores = [TrajectoryStore.open(folder) for folder in folders]
    # as a store of this folder has it, and as one of the hub model of which it is a copy
    tokenizers = (
        tokenizer_training.sha256(tokenizer, Path(options.target)),
        tokenizer_training.content_sha256(tokenizer),
    )
    revision = revision_of(options.target)
    for store in stores:
        store.check_teacher(options.target, revision, tokenizers, vocab_size)
        warn_unfinished(store)
    width, cache = 0, ByteCache()
    if teacher is None:
        check_stored_features(stores, signals, with_text=bool(options.text))
        width = feature_width(signals, tokenizer_training.text_config(options.target))
    read = [read_shards(store, cache, width, options.fitting.on_bad_shard) for store in stores]
    found, asked = read[: len(options.store)], read[len(options.store) :]
    every = _documents(found)
    bad = sum(len(one.bad) for one in read)
    length = options.training.block_length
    begun, known = _that_fit(every, options)
    if options.evaluate:
        _, held = _that_fit(_documents(asked), options)
        chosen = {one.trajectory.prompt_id for one in held}
    else:
        chosen = held_out([one.trajectory.prompt_id for one in known], options.hold_out)
        held = [one for one in known if one.trajectory.prompt_id in chosen]
    kept = [one for one in known if one.trajectory.prompt_id not in chosen]
    if options.evaluate and len(kept) < len(known):
        _log.info(
            f"left out {len(known) - len(kept)} texts of --store: --evaluate has their prompts, too"
        )
    if teacher is not None or ends is not None:
        kept = [one.without_logprobs() for one in kept]
        held = [one.without_logprobs() for one in held]
    if not kept:
        flag = "--evaluate" if options.evaluate else "--hold-out"
        raise InputError(f"{flag} leaves no prompt to learn from")
    documents = multi_of(options, options.beams).apply(kept, cache)
    learnt = stored_texts(documents)
    blocks = TrajectoryBlocks(
        documents,
        end_id=tokenizer.eos_token_id,
        length=length,
        batch_blocks=batch_blocks(options) - text_blocks(options),
        seed=options.seed,
        one_per_block=options.fitting.one_per_block,
    )
    cut = sum(not fits(one, length) for one in (*learnt, *(one.trajectory for one in held)))
    for done, count, what in (
        ("left out", len(every) - len(begun), "texts: the prompt alone fills"),
        ("left out", len(begun) - len(known), "texts: longer than"),
        ("cut", cut, "answers: longer than what the prompt leaves of"),
    ):
        if count:
            _log.info(f"{done} {count} {what} --block-length {length}")
    summaries = [one.store.summary(one.good) for one in found]
    top_k = _least_kept((one.store for one in found), vocab_size)
    read_texts = stored_texts([*known, *held])
    return TrainingData(
        source=source_of(
            options, tokenizer, blocks, teacher, signals, prefetch=True, ends=ends, known=in_both
        ),
        held_out=held_out_batches(options, tokenizer, held, teacher, signals, ends),
        steps_per_epoch=blocks.steps_per_epoch,
        longest=_longest(learnt, length),
        furthest=length if options.text else _longest(read_texts, length),
        count_tokens=partial(_counts, learnt, vocab_size),
        highest=max(text.highest for text in read_texts),
        facts={
            "data": [one.checksum() for one in found],
            "stores": [portable_text(str(folder)) for folder in options.store],
            "forcing": "+".join(sorted({t.forcing for t in learnt})),
            "beams": max(Counter(text.prompt_id for text in learnt).values()),
            "top_k": top_k if options.reads_logprobs else options.top_k or None,
            "bad_shards": bad,
            "trajectories": len(learnt),
            "too_long": len(every) - len(known),
            "cut": cut,
            "prompts": len({t.prompt_id for t in learnt}),
            "held_out_prompts": len(chosen),
            **(_evaluation_facts(options, asked, held, vocab_size) if asked else {}),
            "answer_tokens": sum(t.answer_length for t in learnt),
            "store_bytes": sum(summary.bytes for summary in summaries),
            "store_bytes_per_token": [summary.bytes_per_token for summary in summaries],
        },
    )


def _documents(found: Iterable[StoredTexts]) -> list[TrainingExample]:
    """The documents of some stores. Raises InputError where there is none."""
    some = list(found)
    documents = [document for one in some for document in one.documents]
    if not documents:
        bad = sum(len(one.bad) for one in some)
        left = f" ({bad} damaged shards were left out)" if bad else ""
        names = ", ".join(str(one.store.folder) for one in some)
        raise InputError(f"no trajectory in {names}{left}")
    return documents


def _that_fit(
    every: list[TrainingExample], options: DistillConfig
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """Documents whose prompt leaves room in a block, and those of them that --long-texts keeps."""
    length = options.training.block_length
    begun = [one for one in every if one.trajectory.prompt_length < length] or every
    if options.fitting.long_texts != "drop":
        return begun, begun
    known = [one for one in begun if fits(one.trajectory, length)]
    if not known:
        raise InputError(
            f"every text is longer than --block-length {length}, and --long-texts drop leaves "
            "these out: give a larger one"
        )
    return begun, known


def _least_kept(stores: Iterable[TrajectoryStore], vocab_size: int) -> int | None:
    """How many logprobs of a place these stores have kept, the fewest; None: all."""
    kept = {store.header.top_k for store in stores}
    return None if kept <= {None, vocab_size} else min(k for k in kept if k is not None)


def _evaluation_facts(
    options: DistillConfig,
    asked: Sequence[StoredTexts],
    held: Iterable[TrainingExample],
    vocab_size: int,
) -> dict[str, Any]:
    """What the texts of --evaluate are: of which stores, how they were made and kept."""
    return {
        "evaluated_on": [portable_text(str(folder)) for folder in options.evaluate],
        "evaluation_data": [one.checksum() for one in asked],
        "evaluation_forcing": "+".join(sorted({text.forcing for text in stored_texts(held)})),
        "evaluation_top_k": _least_kept((one.store for one in asked), vocab_size),
    }


def stored_texts(documents: Iterable[TrainingExample]) -> list[StoredText]:
    """The texts of documents that all come from stores."""
    texts = [document.trajectory for document in documents]
    return [text for text in texts if isinstance(text, StoredText)]


def _longest(texts: Iterable[StoredText], length: int) -> int:
    """Tokens of the longest, as far as a block of this length goes."""
    return min(max(text.prompt_length + text.answer_length for text in texts), length)


def _counts(texts: Iterable[StoredText], vocab_size: int) -> Tensor:
    """[V]: how often the answers hold each token. Raises BackendError for a damaged shard."""
    rows: dict[ShardReader, list[int]] = {}
    for text in texts:
        rows.setdefault(text.shard, []).append(text.row)
    counts = np.zeros(vocab_size, np.int64)
    for shard, chosen in rows.items():
        every, lengths = shard.all_tokens("tokens")
        wanted = np.zeros(len(lengths), bool)
        wanted[chosen] = True
        answers = every[np.repeat(wanted, lengths)]
        if answers.max() >= vocab_size or answers.min() < 0:
            shard.check()
        counts += np.bincount(answers, minlength=vocab_size)
    return torch.from_numpy(counts)


def online_data(
    options: DistillConfig,
    tokenizer: Any,
    teacher: HFTarget,
    signals: Signals,
    draws: Target,
    student: TransformersBackend | None,
    refresh: Callable[[], None] | None,
) -> TrainingData:
    """Prompts that the teacher (partly the student) continues step by step.

    Args:
        signals: what the drafter reads of the teacher.
        draws: a target that draws as the teacher, of tokens that the student has, too.
        student: draws the on-policy share, of tokens that the teacher has, too.
        refresh: brings that one's weights up to date.
    """
    assert options.prompts is not None
    prompts = load_prompts(options.prompts, keep_empty=True)
    note_plain(prompts, tokenizer)
    encoded = [prompt.token_ids(tokenizer) if prompt.text != "" else () for prompt in prompts]
    length, most = options.training.block_length, options.max_new_tokens
    reasons = [_why_not(ids, draws, length) for ids in encoded]
    bad = [
        Skipped(prompt_id=prompt.id, reason=why)
        for prompt, why in zip(prompts, reasons, strict=True)
        if why is not None
    ]
    refuse(options.bad_prompts, bad)
    skipped = Counter(one.reason for one in bad)
    for reason, count in skipped.items():
        _log.info(f"left out {count} prompts: {reason}")
    # named by what they are, so that a prompt that comes twice is not learnt and held out
    fitting = {prompt_key(x): x for x, why in zip(encoded, reasons, strict=True) if why is None}
    requests = [CollectRequest(prompt_id=key, prompt=ids) for key, ids in fitting.items()]
    chosen = held_out(fitting, options.hold_out)
    kept = [r for r in requests if r.prompt_id not in chosen]
    held = [r for r in requests if r.prompt_id in chosen]
    if not requests:
        raise InputError(
            f"no prompt of {options.prompts} can be continued and used: {', '.join(skipped)}"
        )
    if not kept:
        raise InputError("--hold-out leaves no prompt to learn from")
    tight = sum(len(request.prompt) + most > length for request in requests)
    if tight:
        _log.info(
            f"{tight} prompts leave less than --max-new-tokens {most} of --block-length {length}: "
            "a longer answer is used up to there"
        )
    settings = CollectSettings(
        forcing="sample" if options.beams is None else "beam",
        beams=options.beams or 1,
        max_new_tokens=most,
        top_k=1,  # whole laws come from the forward over the packed block
    )
    backend = TransformersBackend(draws)
    drawn = Online(
        kept,
        teacher=backend,
        settings=settings,
        multi=multi_of(options, None),
        end_id=tokenizer.eos_token_id,
        length=length,
        prompts_per_step=options.prompts_per_step,
        seed=options.seed,
        student=student,
        refresh=refresh,
        on_policy=options.on_policy,
    )
    samples = replace(settings, forcing="sample", seed=options.seed)
    answers = backend.collect(held, samples) if held else []
    return TrainingData(
        source=source_of(
            options, tokenizer, drawn, teacher, signals, prefetch=False, known=draws.vocab_size
        ),
        held_out=held_out_batches(
            options,
            tokenizer,
            [TrainingExample(trajectory=answer) for answer in answers],
            teacher,
            signals,
        ),
        steps_per_epoch=len(kept) / options.prompts_per_step,
        longest=length,  # as far as is known before they are drawn
        furthest=length if options.text else min(length, max(map(len, fitting.values())) + most),
        facts={
            "data": [digest([[r.prompt_id, r.prompt] for r in kept])],
            "forcing": settings.forcing,
            "beams": options.beams or 1,
            "on_policy": options.on_policy,
            "top_k": options.top_k or None,
            "prompts": len(kept),
            "skipped": dict(skipped),
            "tight": tight,
            "held_out_prompts": len(held),
        },
    )


def _why_not(prompt: Sequence[int], draws: Target, length: int) -> str | None:
    """Why nothing is learnt behind a prompt; None: something is."""
    bad = why_not(prompt, context=draws.max_length, vocab_size=draws.vocab_size)
    if bad is None and len(prompt) >= length:
        return f"the prompt alone fills --block-length {length}"
    return bad
