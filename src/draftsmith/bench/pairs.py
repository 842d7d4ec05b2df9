"""Perplexity and acceptance of pairs of target and draft model: what `draftsmith plan` reads.

Counting: chains are drafted and verified as in any decoding. Only whole drafts count. One that was
shorter than asked is no evidence about its length: where the room for text ends, where an accepted
end token stands inside it, where another tokenizer spells it with fewer tokens.

    draft of 4    accepted 2    1 1 0        tried 3, accepted 2
                  accepted 4    1 1 1 1      tried 4, accepted 4

Counts are kept by prompt: the tokens of one text are not independent, least of all where it is
decoded again at the next draft length.

Agreement on re-tokenised text is how the scaling-laws paper measured pairs with different
tokenizers: the target's text, cut by the draft's tokenizer, and at each token the probability that
the draft gives it. Nothing is verified: no decoder has this rate. A draft model with another
tokenizer has two lines: `decoded`, the rate of our own decoder, and `retokenised`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.bench.loops import in_loops
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, Generation, generate
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.types import DecodeStep, Signals, TreeShape
from draftsmith.data import text
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.config import cascade_parts, drafter_parts, kinds
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import InputError
from draftsmith.plan.acceptance import error, estimate, quantile
from draftsmith.plan.observations import LengthCount
from draftsmith.targets.base import CHUNK, Target

_log = logging.getLogger(__name__)

LENGTHS = tuple(range(1, 10))
"""The paper's draft lengths."""
RETOKENISED = "retokenised"
LONGEST = 2048
"""Tokens of a document that are read."""
_LOGITS = 1 << 24
"""Numbers that stand in memory at once."""
COUNTS = ("target", "draft", "prompt", "gamma", "accepted_length", "count")
"""Columns of counts.csv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A quotient of sums."""

    value: float
    moe: float | None
    """Half the 95 % interval; None: of one part alone nothing can be said."""


def ratio(parts: Sequence[tuple[float, float]]) -> Ratio:
    """Divide the sums of (amount, number of tokens) over documents; the numbers must not all be 0.

    What a document adds to both sums belongs together, and tokens of one document are not
    independent: documents are what is drawn (`plan.acceptance`). First order:

        R = sum s / sum m        what a document adds to its error: (s - R m) / sum m
    """
    total = math.fsum(number for _, number in parts)
    value = math.fsum(amount for amount, _ in parts) / total
    known = [part for part in parts if part[1]]
    count = len(known)
    if count < 2 or not math.isfinite(value):
        return Ratio(value=value, moe=None)
    added = np.array([(amount - value * number) / total for amount, number in known])
    return Ratio(value=value, moe=quantile(count) * error(added))


@dataclass(slots=True)
class LengthTrial:
    """All steps with drafts of one length."""

    gamma: int
    left_out: int = 0
    """Steps whose draft was not whole."""
    found: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Whole drafts by the number of the prompt and that of accepted tokens."""
    placed: list[tuple[int, int, int]] = field(default_factory=list, compare=False)
    """Each whole draft: prompt, where in its text it begins, accepted tokens."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of each prompt's text so far."""
    looped: int = 0
    """Tokens in repetition loops (`bench.loops`)."""
    outside: Counter[int] = field(default_factory=Counter)
    """Whole drafts that begin outside of loops, by accepted tokens."""

    def add(self, step: DecodeStep, numbers: range) -> None:
        """Count a step; `numbers`: the prompts of its rows."""
        for row, number in enumerate(numbers):
            if step.active[row] and step.offered_depth[row] == self.gamma:
                self.found[number, step.accepted[row]] += 1
                self.placed.append((number, self.lengths[number], step.accepted[row]))
            elif step.active[row]:
                self.left_out += 1
            self.lengths[number] += len(step.emitted[row])

    def see_loops(self, made: Sequence[Generation]) -> None:
        """Count loops; `made`: the texts of all prompts."""
        marks = [in_loops(one.token_ids) for one in made]
        self.looped = int(sum(mark.sum() for mark in marks))
        for number, place, accepted in self.placed:
            # where stop strings cut a text, its last draft may begin behind the cut
            if place < len(marks[number]) and not marks[number][place]:
                self.outside[accepted] += 1

    @property
    def counts(self) -> tuple[LengthCount, ...]:
        return tuple(
            LengthCount(gamma=self.gamma, accepted=accepted, count=count, prompt=str(number))
            for (number, accepted), count in sorted(self.found.items())
        )


def count_accepted(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    name: str = "",
) -> tuple[tuple[LengthTrial, ...], list[Generation]]:
    """Decode all prompts with chains of every length; return counts and the texts of the last.

    Each length has a seed of its own: with one for all, drawn texts would be nearly the same.
    `auto` is rejection here: a rate is of tokens that are judged each by itself, as `block` judges
    none. `name`: of the drafter, for the log.
    """
    rule = "rejection" if options.rule == "auto" else options.rule
    trials, made = [], []
    for gamma in lengths:
        _log.info("%s: drafts of %d", name, gamma)
        trial = LengthTrial(gamma=gamma)
        chain = replace(options, shape=TreeShape.chain(gamma), seed=options.seed + gamma, rule=rule)
        made = generate(target, drafter, prompts, chain, batch_size=batch_size, on_step=trial.add)
        trial.see_loops(made)
        trials.append(trial)
    return tuple(trials), made


def acceptance(trials: Sequence[LengthTrial]) -> Ratio | None:
    """Return accepted / tried, all lengths together; None: no draft was whole.

    The margin is the longer half of the interval over prompts, which is not symmetric.
    """
    counts = [count for trial in trials for count in trial.counts]
    if not counts:
        return None
    rate = estimate(counts).mle
    moe = None if rate.ci95 is None else max(abs(rate.alpha - end) for end in rate.ci95)
    return Ratio(value=rate.alpha, moe=moe)


@torch.inference_mode()
def agreement(
    draft: Target, target_tokenizer: Any, texts: Sequence[Generation], sampler: Sampler
) -> Ratio | None:
    """Return the draft's mean probability for its tokens in the target's texts, that is of drafting
    them: at temperature 0 the share of its first choices. None: there are no such tokens."""
    parts = []
    for one in texts:
        ids, places = _reread(draft, target_tokenizer, one)
        if not places:
            continue
        agreed = 0.0
        cache = draft.new_cache(1, len(ids))
        for first, logits_TV in read_along(draft, cache, ids[:-1]):
            # row t is behind ids[first + t]: it is about the token at first + t + 1
            rows = [place for place in places if 0 <= place - 1 - first < len(logits_TV)]
            if rows:
                behind = torch.tensor([place - 1 - first for place in rows])
                history = [
                    History(tokens=ids[:place], num_prompt=places[0])
                    for place in rows
                    if sampler.needs_history
                ]
                law = sampler.law(logits_TV[behind.to(logits_TV.device)], history)
                tokens = torch.tensor([ids[place] for place in rows])
                agreed += float(law.prob(tokens).double().sum())
        parts.append((agreed, float(len(places))))
    return ratio(parts) if parts else None


def parameters_of(model: Target) -> int | None:
    """Count the weights of a model, tied ones once; None: it is no network."""
    network = getattr(model, "model", None)
    if not isinstance(network, nn.Module):
        return None
    return sum(parameter.numel() for parameter in network.parameters())


def _reread(draft: Target, target_tokenizer: Any, made: Generation) -> tuple[list[int], list[int]]:
    """Cut the whole text into the draft's tokens; return them and which lie in the generated part.

    text         prompt prompt | generated generated
    draft ids    a   b     c   d   e    f    g            d straddles the edge: e, f, g count
    """
    known = list(made.prompt_tokens)
    edge = len(target_tokenizer.decode(known, skip_special_tokens=True))
    whole = target_tokenizer.decode([*known, *made.token_ids], skip_special_tokens=True)
    cut = draft.tokenizer(whole, return_offsets_mapping=True, verbose=False)
    ids: list[int] = cut["input_ids"][: draft.max_length]
    spans = cut["offset_mapping"]
    places = [i for i in range(1, len(ids)) if spans[i][0] >= edge and spans[i][1] > spans[i][0]]
    return ids, places


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """The perplexity of a model on documents."""

    value: float
    moe: float | None
    """Half the 95 % interval, over documents (first order); None: there was one only."""
    loss: float
    """Nats per token."""
    tokens: int
    """Predicted ones."""
    documents: int
    cut: int
    """Documents that were longer than what is read."""
    unread: int
    """Their tokens behind that."""
    longest: int
    """Tokens of a document that were read at most."""


def perplexity(
    model: Target, documents: Iterable[str], *, longest: int = LONGEST, piece: int | None = None
) -> Perplexity:
    """Measure the perplexity of a model on documents.

    Args:
        longest: tokens of a document to read; less where the model's context is shorter.
        piece: tokens per forward; None: as many as memory for their logits is worth.

    Raises:
        InputError: no document has two tokens, or the tokenizer is another model's.
    """
    longest = min(longest, model.max_length or longest)
    cache = model.new_cache(1, longest)
    parts: list[tuple[float, float]] = []
    cut = unread = 0
    for document in documents:
        ids = _token_ids(model, document)
        cut += len(ids) > longest
        unread += max(len(ids) - longest, 0)
        ids = ids[:longest]
        if len(ids) > 1:
            parts.append((_loss(model, cache, ids, piece), len(ids) - 1))
    if not parts:
        raise InputError(
            f"there is nothing to measure the perplexity of {model.name} on: no document has two "
            "tokens"
        )
    loss = ratio(parts)
    value = math.exp(loss.value) if loss.value < 700 else math.inf
    return Perplexity(
        value=value,
        moe=None if loss.moe is None else value * loss.moe,
        loss=loss.value,
        tokens=int(sum(number for _, number in parts)),
        documents=len(parts),
        cut=cut,
        unread=unread,
        longest=longest,
    )


def read_along(
    model: Target, cache: KVCache, ids: Sequence[int], piece: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first, logits_TV) by piece: row t holds the logits behind `ids[first + t]`.

    The logits of a long text over a large vocabulary would fill gigabytes: each piece is dropped
    before the next. What the cache held before is forgotten.
    """
    size = piece or max(1, min(CHUNK, _LOGITS // model.vocab_size))
    cache.rewind([0])
    for first in range(0, len(ids), size):
        part = list(ids[first : first + size])
        tokens_BT, block = lay_out(cache, [part])
        out = model.forward(torch.from_numpy(tokens_BT), block, len(part), Signals())
        cache.commit(np.array([len(part)]))
        yield first, out.logits_BNV[0]


@torch.inference_mode()
def _loss(model: Target, cache: KVCache, ids: Sequence[int], piece: int | None) -> float:
    """Return the nats of all tokens but the first."""
    total = 0.0
    for first, logits_TV in read_along(model, cache, ids[:-1], piece):
        wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        next_T = torch.tensor(ids[first + 1 : first + 1 + len(wide_TV)], device=wide_TV.device)
        nats_T = torch.nn.functional.cross_entropy(wide_TV, next_T, reduction="none")
        total += float(nats_T.double().sum())
    return total


def _token_ids(model: Target, document: str) -> list[int]:
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to read text with")
    ids: list[int] = model.tokenizer(document, verbose=False)["input_ids"]
    if max(ids, default=0) >= model.vocab_size:
        raise InputError(
            f"the tokenizer of {model.name} gives token {max(ids)}, outside the vocabulary of "
            f"{model.vocab_size}: tokenizer and model do not belong together"
        )
    return ids


# --------------------------------------------------------------------------- both, for a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A target with a draft model, measured."""

    name: str
    """The draft's name."""
    draft: Target
    perplexity: Perplexity
    trials: tuple[LengthTrial, ...]
    agreement: Ratio | None
    """On re-tokenised text; None for a draft with the target's tokenizer."""

    @property
    def rate(self) -> Ratio | None:
        """The decoded acceptance rate; None: no draft was whole."""
        return acceptance(self.trials)

    @property
    def loop_share(self) -> float | None:
        """The share of the tokens of all texts in repetition loops; None: there are none."""
        tokens = sum(trial.lengths.total() for trial in self.trials)
        return sum(trial.looped for trial in self.trials) / tokens if tokens else None

    @property
    def alpha_outside_loops(self) -> float | None:
        """The decoded rate of drafts that begin outside of loops; None: there are none."""
        accepted = refused = 0
        for trial in self.trials:
            accepted += sum(depth * count for depth, count in trial.outside.items())
            refused += sum(c for depth, c in trial.outside.items() if depth < trial.gamma)
        return accepted / (accepted + refused) if accepted + refused else None

    @property
    def steps(self) -> int:
        """The number of whole drafts, of all lengths."""
        return sum(trial.found.total() for trial in self.trials)

    @property
    def left_out(self) -> int:
        return sum(trial.left_out for trial in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A target and its draft models, measured on the same text and prompts."""

    target: Target
    perplexity: Perplexity
    """The target's perplexity."""
    pairs: tuple[Pair, ...]
    unquantised: Perplexity | None = None
    """That of its weights in their own number format; None: it computes in that one."""

    def rows(self, name: str, temperature: float) -> list[dict[str, Any]]:
        """The lines of observations.csv, one per pair and protocol; `name`: of the target.

        Raises:
            InputError: no draft model was measured to the end: there is nothing to write.
        """
        rows = []
        for pair in self.pairs:
            for protocol, alpha in (("decoded", pair.rate), (RETOKENISED, pair.agreement)):
                if alpha is None:
                    continue
                counts = [count for trial in pair.trials for count in trial.counts]
                found = estimate(counts) if protocol == "decoded" else None
                row: dict[str, Any] = {
                    "target": name,
                    "draft": pair.name,
                    "target_ppl": self.perplexity.value,
                    "draft_ppl": pair.perplexity.value,
                    "alpha": alpha.value,
                    "moe": alpha.moe,
                    "target_params": parameters_of(self.target),
                    "draft_params": parameters_of(pair.draft),
                    "alpha_least_squares": None if found is None else found.least_squares.alpha,
                    "target_ppl_moe": self.perplexity.moe,
                    "draft_ppl_moe": pair.perplexity.moe,
                    "temperature": temperature,
                    "protocol": protocol,
                    "loop_share": pair.loop_share,
                    "alpha_outside_loops": None if found is None else pair.alpha_outside_loops,
                }
                tokens = {} if found is None else found.tokens_per_step
                rows.append(
                    row | {f"tokens_per_step_{t.gamma}": tokens.get(t.gamma) for t in pair.trials}
                )
        if not rows:
            raise InputError(
                "no draft of any length was whole: give a larger --max-new-tokens, or shorter "
                "drafts"
            )
        return rows

    def counts(self, name: str) -> list[dict[str, Any]]:
        """The lines of counts.csv; `name`: of the target."""
        cells = [
            (name, pair.name, count.prompt, count.gamma, count.accepted, count.count)
            for pair in self.pairs
            for trial in pair.trials
            for count in trial.counts
        ]
        return [dict(zip(COUNTS, line, strict=True)) for line in cells]


def measure_pairs(
    target: Target,
    arms: Sequence[Arm],
    files: Sequence[text.TextFile],
    prompts: Sequence[Sequence[int]],
    decoding: DecodeOptions,
    lengths: Sequence[int],
    batch_size: int,
    unquantised: Target | None = None,
) -> Measured:
    """Measure perplexity on `files` and acceptance behind `prompts` (token ids) at each length.

    Args:
        unquantised: the target in its weights' own number format, to be read beside it.

    Raises:
        InputError: a draft model without a finite perplexity, or a draft longer than the context.
    """
    drafters = [_draft_model(arm) for arm in arms]
    if arms and target.max_length is not None and max(lengths) >= target.max_length:
        raise InputError(
            f"--draft-length: a draft of {max(lengths)} tokens does not fit into the context of "
            f"{target.name}, which has {target.max_length} positions"
        )
    _log.info("perplexity of %s: %d files", target.name, len(files))
    own = perplexity(target, text.documents(files))
    other = None
    if unquantised is not None:
        _log.info("perplexity of %s in %s", target.name, unquantised.dtype)
        other = perplexity(unquantised, text.documents(files))
    pairs = []
    for arm, (drafter, draft) in zip(arms, drafters, strict=True):
        _log.info("perplexity of %s", arm.name)
        theirs = perplexity(draft, text.documents(files))
        trials, made = count_accepted(
            target, drafter, prompts, decoding, lengths, batch_size=batch_size, name=arm.name
        )
        agreed = None
        if drafter.reads_text:
            agreed = agreement(draft, target.tokenizer, made, decoding.sampler)
        pairs.append(
            Pair(name=arm.name, draft=draft, perplexity=theirs, trials=trials, agreement=agreed)
        )
    return Measured(target=target, perplexity=own, pairs=tuple(pairs), unquantised=other)


def _draft_model(arm: Arm) -> tuple[Independent, Target]:
    """Return the drafter and the model behind it.

    Raises:
        InputError: it has no finite perplexity.
    """
    drafter = arm.drafter
    assert isinstance(drafter, Independent), "see refuse_others"
    if VocabularySubset.beside(drafter.config.source) is not None:
        raise InputError(
            f"--drafter {arm.name} knows only some of the target's tokens: the others have no "
            "probability, so its perplexity would be infinite"
        )
    assert drafter.draft_model is not None, "open_drafters has bound it"
    return drafter, drafter.draft_model


def refuse_others(names: Sequence[str]) -> None:
    """Refuse drafters that have no perplexity.

    Raises:
        InputError: a drafter that is no draft model, or several joined.
    """
    for name in names:
        if len(cascade_parts(name)) > 1:
            raise InputError(
                f"--drafter {name}: --perplexity is for draft models, and this joins several "
                "drafters: name the draft model alone"
            )
        kind, _ = drafter_parts(name)
        if kind in kinds() and kind != "independent":
            raise InputError(
                f"--drafter {name}: --perplexity is for draft models, and {kind} is none: what it "
                "drafts hangs on the target or on the text, so it has no perplexity of its own"
            )


def text_files(patterns: Sequence[str]) -> list[text.TextFile]:
    """Find the files that perplexity is measured on.

    Raises:
        InputError: a file that is not there, or none that is text.
    """
    found = text.find_files(patterns, flag="--perplexity")
    files = [file for file in found if text.is_utf8(file)]
    if not files:
        raise InputError(f"--perplexity {' '.join(patterns)}: none of these files is UTF-8 text")
    return files


def warnings(measured: Measured) -> list[str]:
    """Return warnings about how far the numbers can be used."""
    target, own, pairs = measured.target, measured.perplexity, measured.pairs
    notes = []
    reads = {target.name: own} | {pair.name: pair.perplexity for pair in pairs}
    for name, read in reads.items():
        if read.longest < LONGEST:
            notes.append(
                f"{name} has a context of {read.longest} tokens: documents were cut there, not at "
                f"{LONGEST}"
            )
    if own.unread > own.tokens:
        notes.append(
            f"most of the text was not read: {own.unread} of its tokens lie behind the first "
            f"{own.longest} of a document. A plain file is one document; a JSONL file has one per "
            "line (field `text`)"
        )
    if own.documents == 1:
        notes.append(
            "there is one document only, so perplexities have no margin: give several files, or a "
            "JSONL file with a document per line (field `text`)"
        )
    for pair in pairs:
        if pair.rate is None:
            notes.append(f"{pair.name}: no draft was whole, so there is no decoded rate")
        if pair.agreement is not None:
            notes.append(
                f"{pair.name} has another tokenizer: its perplexity is per token of its own, and "
                f"the row {RETOKENISED!r} is the paper's protocol, not the rate of a decoder"
            )
    return notes
