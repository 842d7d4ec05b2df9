"""Where the batches of a distillation come from. Each is a function of the optimiser step, so that
a resumed run sees what an uninterrupted one would have seen.

    TrajectoryBlocks     a store's trajectories, packed; laws from the store
    TextRows             pre-training text beside them (9:1 in Direct Alignment)
    Online               continuations drawn on the fly by the teacher or, partly, by the student
    InLoop               any of them, with whole laws and hidden signals from a teacher in memory

Many trajectories of one prompt: how they are weighed, and DistillBeam's two readings.

per_beam   (Algorithm 2) every beam keeps its own laws; q = p is the optimum.
mixture    (Eq. 7) at answer position t all beams imitate the mean of their laws, although their
           prefixes differ: no law of the teacher's is the optimum then.

A beam that has ended is not part of a mixture any more.

    t            0    1    2    3
    beam 0       a    b    #
    beam 1       a    c    d    #          position 2: mean of two laws; position 3: beam 1's own
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from draftsmith.core.types import FullLaws, Signals, TrajectoryBatch
from draftsmith.distill.batches import BatchSource, Block, TrainingExample, assemble, pack
from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.readers import ByteCache, StoredText
from draftsmith.distill.trajectories.types import (
    Backend,
    CollectRequest,
    CollectSettings,
    TopK,
    Trajectory,
)
from draftsmith.drafters.independent import causal_forward
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget, causal_head


class TrajectoryBlocks:
    """Blocks of whole documents; packed once in an order keyed by the seed, then shuffled for
    every epoch.

    Args:
        batch_blocks: blocks of one optimiser step, over all processes.
        keep_laws: False: the laws of the trajectories are left out (they are learnt as texts, or a
            teacher in the loop says its own).
        one_per_block: documents do not share blocks.

    Raises:
        InputError: nothing can be learnt from the documents.
    """

    def __init__(
        self,
        documents: Sequence[TrainingExample],
        *,
        end_id: int,
        length: int,
        batch_blocks: int,
        seed: int,
        keep_laws: bool = True,
        one_per_block: bool = False,
    ) -> None:
        order = _rng(seed, 0).permutation(len(documents))
        shuffled = [documents[i] for i in order]
        if not keep_laws:
            shuffled = [document.without_laws() for document in shuffled]
        self.blocks: list[Block] = pack(shuffled, length, one_per_block=one_per_block)
        self.end_id, self.length, self.seed = end_id, length, seed
        self.batch_blocks = batch_blocks
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @property
    def num_batches(self) -> int:
        """Batches of one epoch; the last may be smaller (for evaluation)."""
        return -(-len(self.blocks) // self.batch_blocks)

    @property
    def steps_per_epoch(self) -> float:
        return len(self.blocks) / self.batch_blocks

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Rows `part, part + parts, ...` of the step's blocks; InputError if there are none."""
        first = step * self.batch_blocks
        chosen = [self._block(first + row) for row in range(self.batch_blocks)[part::parts]]
        if not chosen:
            raise InputError(f"{self.batch_blocks} blocks per batch do not fill {parts} parts")
        return assemble(chosen, self.length, self.end_id)

    def _block(self, index: int) -> Block:
        epoch, place = divmod(index, len(self.blocks))
        if epoch != self._epoch:
            self._order = _rng(self.seed, 1 + epoch).permutation(len(self.blocks))
            self._epoch = epoch
        return self.blocks[self._order[place]]


class HeldOutBlocks:
    """Every block once, in order: for evaluation."""

    def __init__(
        self, documents: Sequence[TrainingExample], *, end_id: int, length: int, batch_blocks: int
    ) -> None:
        self.blocks = pack(documents, length)
        self.end_id, self.length, self.batch_blocks = end_id, length, batch_blocks

    @property
    def num_batches(self) -> int:
        return -(-len(self.blocks) // self.batch_blocks)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """The step-th batch; parts are for several processes."""
        first = step * self.batch_blocks
        chosen = self.blocks[first : first + self.batch_blocks][part::parts]
        return assemble(chosen, self.length, self.end_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """A source with rows of plain text below its own, in which every token is learnt. Where the
    drafter reads hidden signals, a teacher says them of both: `InLoop` around this."""

    first: BatchSource
    text: BatchSource

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """Part `part` of both: of `first` only what it needs (a row may cost a generation).

        rows of 3 parts    first 0 3 | 1 4 | 2      text 2 | 1 | 0 3      later parts have fewer
        """
        ours = self.first.batch(step, part, parts)
        text = self.text.batch(step, 0, 1)  # all: blocks cost nothing, and may not fill the parts
        rows = torch.arange(len(text.tokens_BT))[parts - 1 - part :: parts]
        return _below(ours, _rows(text, rows))


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

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """Continue this part's prompts of the step; InputError if there are none. Neither the texts
        nor their weights depend on the number of parts."""
        mine = list(enumerate(self._numbers(step)))[part::parts]
        if not mine:
            raise InputError(f"{self.prompts_per_step} prompts per step do not fill {parts} parts")
        seeded = replace(self.settings, seed=int(_rng(self.seed, step).integers(2**62)))
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
        texts = scaled(shares, self._texts_per_prompt(len(own)))
        return assemble(pack(texts, self.length), self.length, self.end_id)

    def _drawn(
        self, backend: Backend, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[TrainingExample]:
        """Continuations with their shares; a prompt that comes twice in a step counts twice."""
        if not requests:
            return []
        made = backend.collect(requests, settings)
        times = Counter(request.prompt_id for request in requests)
        shares = self.multi.share(TrainingExample(trajectory=one).without_laws() for one in made)
        return [replace(s, weight=s.weight * times[s.trajectory.prompt_id]) for s in shares]

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
        return set(_rng(self.seed, step, 1 << 40).permutation(per_step)[:many].tolist())

    def _numbers(self, step: int) -> list[int]:
        """The step's prompts: a walk through one permutation after the other."""
        first = step * self.prompts_per_step
        out = []
        for index in range(first, first + self.prompts_per_step):
            epoch, place = divmod(index, len(self.requests))
            out.append(int(_rng(self.seed, -1 - epoch).permutation(len(self.requests))[place]))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class InLoop:
    """Batches of another source with a teacher's whole laws and hidden signals."""

    source: BatchSource
    teacher: HFTarget
    signals: Signals = field(default_factory=Signals)

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """The source's batch; every counted token has a law."""
        return taught(self.source.batch(step, part, parts), self.teacher, self.signals)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutInLoop:
    """Held-out batches with a teacher's whole laws and hidden signals."""

    source: HeldOutBlocks
    teacher: HFTarget
    signals: Signals = field(default_factory=Signals)

    @property
    def num_batches(self) -> int:
        return self.source.num_batches

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """The source's batch; every counted token has a law."""
        return taught(self.source.batch(step, part, parts), self.teacher, self.signals)


def taught(batch: TrajectoryBatch, teacher: HFTarget, signals: Signals) -> TrajectoryBatch:
    """The batch with whole laws and, where `signals` asks for any, hidden signals as decoding gives
    them (in float32), by one forward of the teacher over the same blocks.

    Raises:
        InputError: the teacher has no such signals.
    """
    device = teacher.device
    with torch.no_grad(), teacher.native() as model, teacher.capture(signals) as captured:
        fed = replace(
            batch,
            tokens_BT=batch.tokens_BT.to(device),
            documents_BT=None if batch.documents_BT is None else batch.documents_BT.to(device),
        )
        hidden_BTH = causal_forward(model, fed).hidden_BTH
    wanted_BT = batch.mask_ahead(1)
    row_BT = torch.full_like(batch.tokens_BT, -1)
    # the law of place t + 1 is said at place t
    row_BT[:, 1:][wanted_BT[:, :-1]] = torch.arange(int(wanted_BT.sum()))
    laws = FullLaws(hidden_NH=hidden_BTH[wanted_BT.to(device)], head=causal_head(teacher.model))
    said_BTS = captured.signals_BTS
    features_BTS = batch.features_BTS if said_BTS is None else said_BTS.float()
    return replace(batch, laws=laws, law_row_BT=row_BT, features_BTS=features_BTS)


def _below(ours: TrajectoryBatch, text: TrajectoryBatch) -> TrajectoryBatch:
    """Rows of text below ours; they have no laws and count fully.

    Raises:
        InputError: ours have features, the text has none.
    """
    shape = text.tokens_BT.shape
    if (ours.features_BTS is None) != (text.features_BTS is None):
        raise InputError(
            "rows of plain text have no hidden states, the trajectories beside them do: let a "
            "target in memory say those of both"
        )

    def joined(a: torch.Tensor | None, b: torch.Tensor | None, fill: float) -> torch.Tensor | None:
        if a is None and b is None:
            return None
        left = torch.full(ours.tokens_BT.shape, fill) if a is None else a
        right = torch.full(shape, fill, dtype=left.dtype) if b is None else b
        return torch.cat([left, right.to(left.dtype)])

    tokens = torch.cat([ours.tokens_BT, text.tokens_BT])
    return TrajectoryBatch(
        tokens_BT=tokens,
        loss_mask_BT=torch.cat([ours.loss_mask_BT, text.loss_mask_BT]),
        documents_BT=joined(ours.documents_BT, text.documents_BT, 0),
        laws=ours.laws,
        law_row_BT=joined(ours.law_row_BT, None, -1),
        weights_BT=joined(ours.weights_BT, None, 1.0),
        features_BTS=joined(ours.features_BTS, text.features_BTS, 0),
    )


def _rows(batch: TrajectoryBatch, rows: torch.Tensor) -> TrajectoryBatch:
    """Some rows of a batch; the laws stay as they are."""

    def some(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[rows]

    return replace(
        batch,
        tokens_BT=batch.tokens_BT[rows],
        loss_mask_BT=batch.loss_mask_BT[rows],
        documents_BT=some(batch.documents_BT),
        law_row_BT=some(batch.law_row_BT),
        weights_BT=some(batch.weights_BT),
        features_BTS=some(batch.features_BTS),
    )


def _rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([value % 2**63 for value in key]))


Aggregate = Literal["per_beam", "mixture"]
Weights = Literal["uniform", "score"]
SharesOf = Callable[[Sequence[Trajectory | StoredText]], Sequence[float]]
"""What each of some trajectories of one prompt counts beside the others; their sum is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multi:
    """How the trajectories of a prompt are put together."""

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
        out = self.share(documents, cache)
        tokens = sum(item.trajectory.answer_length for item in out)
        total = sum(item.weight * item.trajectory.answer_length for item in out)
        return scaled(out, tokens / total if total else 1.0)

    def share(
        self, documents: Iterable[TrainingExample], cache: ByteCache | None = None
    ) -> list[TrainingExample]:
        """All with weights whose sum over a prompt is 1: they depend on no other prompt."""
        groups: dict[str, list[TrainingExample]] = {}
        for document in documents:
            groups.setdefault(document.trajectory.prompt_id, []).append(document)
        out: list[TrainingExample] = []
        for group in groups.values():
            ordered = sorted(_best(group, self.most), key=_place) if len(group) > 1 else group
            shares = self.shares_of([document.trajectory for document in ordered])
            if self.aggregate == "mixture":
                ordered = mixed(ordered, self.shares_of, cache)
            out += [
                TrainingExample(trajectory=document.trajectory, weight=share, laws=document.laws)
                for document, share in zip(ordered, shares, strict=True)
            ]
        return out

    def shares_of(self, group: Sequence[Trajectory | StoredText]) -> list[float]:
        """What each of these counts beside the others; their sum is 1."""
        if self.weights == "uniform":
            return [1.0 / len(group)] * len(group)
        best = max(trajectory.score for trajectory in group)
        raw = [math.exp((t.score - best) / self.score_temperature) for t in group]
        return [value / sum(raw) for value in raw]


def scaled(documents: Iterable[TrainingExample], factor: float) -> list[TrainingExample]:
    """All weights times the factor."""
    return [
        TrainingExample(trajectory=one.trajectory, weight=one.weight * factor, laws=one.laws)
        for one in documents
    ]


def mixed(
    group: Sequence[TrainingExample], shares_of: SharesOf, cache: ByteCache | None = None
) -> list[TrainingExample]:
    """The same texts, each position with the mean of the logprobs of all that have a token there.

    `cache`: means are computed when a batch asks, and kept there; None: at once.
    Raises InputError when a text has no logprobs.
    """
    means = Mixture(group=tuple(group), shares_of=shares_of)
    if cache is None:
        out = []
        for document, top in zip(group, means.compute(), strict=True):
            assert isinstance(document.trajectory, Trajectory), "stored texts come with a cache"
            out.append(replace(document, trajectory=replace(document.trajectory, top=top)))
        return out
    return [
        replace(document, laws=_StoredMean(mixture=means, place=place, cache=cache))
        for place, document in enumerate(group)
    ]


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

    def _lacking(self) -> InputError:
        return InputError("--aggregate mixture needs a store with laws; collect with --top-k")


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class _StoredMean:
    """The mean logprobs of one text of a mixture."""

    mixture: Mixture
    place: int
    cache: ByteCache

    def read(self) -> TopK:
        return self.cache.get(self.mixture, self._computed)[self.place]

    def _computed(self) -> tuple[list[TopK], int]:
        # rounded as stores round them: runs that begun when means were kept on disk go on exactly
        means = []
        for top in self.mixture.compute():
            assert top.vocab_size is not None, "stored logprobs have one"
            means.append(shards.decode(shards.encode(top, top.vocab_size)))
        return means, sum(top.ids_NK.nbytes + top.log_p_NK.nbytes for top in means)


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
