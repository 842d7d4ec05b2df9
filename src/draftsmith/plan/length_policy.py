"""Length policies: how deep to draft next, from the past of a row and of rows before it.

They look at the past only, never at the coming noise, so they do not change the law.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, zip_longest

from draftsmith.core.rows import counted
from draftsmith.core.types import LengthPolicy, RowStats, StepCount

LONGEST_AUTO = 16
"""The deepest draft that a policy may choose by measured costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLength(LengthPolicy):
    """Draft two tokens more after a draft that was accepted whole, one less after any other.

    The rule of transformers' `num_assistant_tokens_schedule="heuristic"`.
    """

    first: int = 5
    """Length of a row's first draft, and of the next after a step that had nothing to draft."""
    shortest: int = 1
    longest: int = 15

    @property
    def max_length(self) -> int:
        return self.longest

    def length(self, stats: RowStats) -> int:
        if not stats.last_offered:
            return self.first
        grown = stats.last_offered + (2 if stats.last_accepted == stats.last_offered else -1)
        return min(max(grown, self.shortest), self.longest)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a step by the depth of its chain or tree; index 0: no draft, plain decoding."""

    target_D: tuple[float, ...]
    """The target's forward over the root and the draft."""
    draft_D: tuple[float, ...]
    """The drafter's work."""
    in_vain: float
    """Seconds of a step that was to draft and found nothing to."""
    other_D: tuple[float, ...] = ()
    """All else: verifying, and what the loop does between its parts; empty: nothing."""

    def __post_init__(self) -> None:
        if len(self.target_D) != len(self.draft_D) or len(self.target_D) < 2:
            raise ValueError(
                "costs are given for drafts of 0, 1, ... tokens, of target and drafter alike: got "
                f"{len(self.target_D)} and {len(self.draft_D)} values"
            )
        if len(self.other_D) not in (0, len(self.target_D)):
            raise ValueError(f"other_D has {len(self.other_D)} of {len(self.target_D)} values")
        target = (*self.target_D, self.in_vain)
        besides = (*self.draft_D, *self.other_D)
        if not (min(target) > 0 <= min(besides) and sum((*target, *besides)) < math.inf):
            raise ValueError(
                "target_D and in_vain must be finite and positive, draft_D and other_D finite and "
                f"not negative, got {self}"
            )

    @property
    def longest(self) -> int:
        return len(self.target_D) - 1

    def seconds(self, length: int) -> float:
        return self.seconds_D[length]

    @cached_property
    def seconds_D(self) -> tuple[float, ...]:
        """Seconds of whole steps, by depth."""
        other_D = self.other_D or (0.0,) * len(self.target_D)
        return tuple(map(sum, zip(self.target_D, self.draft_D, other_D, strict=True)))

    @cached_property
    def least_D(self) -> tuple[float, ...]:
        """Seconds of the cheapest step that is so deep or deeper."""
        return tuple(accumulate(self.seconds_D[::-1], min))[::-1]


_PRIOR, _RISE = 0.6, 3.0
_FIRST, _DEEPER, _FOUND, _OTHERS = 1.5, 3.0, 8.0, 12.0
_COMMON, _TRUST, _HOPE = 30.0, 2.0, 1.5
_GROWTH, _ROOM, _KNOWN = 2, 4, 0.3
_FADE = 0.9
_DOUBT, _SURPRISE = 0.99, 4.0
_TRIAL, _BEST, _TRIED = 8, 0.95, 2
_REST, _LONGER, _LONGEST = 4, 0.4, 16  # steps that an idle row rests: at first, a share, at most
_HELD, _ENDED = 2, 4  # steps that a decision holds: of short drafts, and where the last one ended
_YOUNG, _SHORT = 8, 3  # steps of a row before any holds; tokens of a short draft
_WHOLE = 4.0  # places behind which no draft had ended, before any is seen
# Chosen, with the memory in `rows`, with benchmarks/planner/constants.py: least loss against the
# best fixed length of each case, over acceptance met in real texts and over synthetic processes
# (equal rates, easy and hard passages, rates by depth, changes, drafts that are useless or seldom
# found), at the costs of CPUs and GPUs; _COMMON, _TRUST, _HOPE, _DOUBT and _SURPRISE on real texts,
# twelve at a time, and on texts that are unlike those before them. The first rows must be hopeful:
# who never tries, or gives up for good after bad luck, loses all, a try of a useless drafter less
# than a step. Finding nothing is forgiven for long: some drafters find only what they were asked to
# seek. By simulation of batches (LOG.md, 2026-11-28): _TRIED, and
_AHEAD = 1.04  # times plain decoding a batch drafts for: its rows then end one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What earlier rows met, from first to last step; with every row the older ones fade."""

    asked: float = 0.0
    """Steps that were to draft."""
    asked_on: float = 0.0
    """This and the next three: see `RowStats`."""
    ended: float = 0.0
    asked_on_kept: float = 0.0
    ended_kept: float = 0.0
    tried_D: tuple[float, ...] = ()
    """Drafts with a token at place d and all before it accepted; at the first: all drafts."""
    kept_D: tuple[float, ...] = ()
    """Those of them whose token there was accepted too."""
    lead: float = 0.0
    """Lead of the common forecast over a row's own, in squared errors: log odds that it is the
    better one."""

    @property
    def found(self) -> float:
        """The number of steps that had something to draft."""
        return sum(self.tried_D[:1])

    def times(self, share: float) -> Experience:
        """Scale the counts by a weight."""
        return Experience(
            asked=share * self.asked,
            asked_on=share * self.asked_on,
            ended=share * self.ended,
            asked_on_kept=share * self.asked_on_kept,
            ended_kept=share * self.ended_kept,
            tried_D=tuple([share * tried for tried in self.tried_D]),
            kept_D=tuple([share * kept for kept in self.kept_D]),
            lead=share * self.lead,
        )


@dataclass(kw_only=True, slots=True)
class _Promise:
    """What a draft promises in a row, in the words of `CostAware`."""

    found: float
    """h: how often there is a draft."""
    goes_on: float
    """1 - e."""
    goes_on_kept: float
    """1 - e'."""
    reached: float
    """(1 - e)^(n-1): how often a draft has an n-th token; n is 0 before the first `deepen`."""
    survival: float
    """s_n: how often it is accepted."""
    tokens: float = 0.0
    """s_1 + ... + s_n: those that are accepted."""

    def deepen(self, rate: float) -> None:
        """Add a token that is accepted at this rate, given those before it."""
        self.survival *= self.goes_on_kept * rate
        self.tokens += self.survival
        self.reached *= self.goes_on


@dataclass(frozen=True, kw_only=True)
class CostAware(LengthPolicy):
    """Draft as deep as gives most tokens per second by measured costs and past acceptance; not at
    all where that is best.

        pace      (1 + h (s_1 + ... + s_n)) / ((1 - h) t(in vain) + h t(l_n)); of rows that are
                  decoded together the numerator is summed up, and in the denominator h is how
                  often any has a draft, l_n the length of the longest
        found     h = (found_now + 8 H) / (asked_now + 8)              steps with a draft at all
                  H = (found + 8) / (asked + 8), from the rows before
        survival  s_1 = r_1, s_d = s_(d-1) (1 - e') r_d
        length    l_n = 1 + (1 - e) + ... + (1 - e)^(n-1)
        end       e = ended / (asked to go on + 4) of the row and those before: how often a draft
                  ends behind a token of its own; e' behind accepted tokens alone
        usual     u_d: kept_d / tried_d of the rows before, behind 12 trials at 0.6 (d = 1), or 3
        own       o_d: of the row, lately, behind 1.5 to 3 trials at u_1 (d = 1), or 3
        common    c_d: of the row, lately, behind 30 trials at u_d (d = 1: and 1.5 standard errors)
        rate      r_d = (1 - s) o_d + s c_d           s: how surely the common forecast is better

    What the rows before met counts 0.99 times as much with every step that is not to draft, until a
    draft fails at once: an idle row tries again (the forecasts are judged without this). It
    decides again after four steps, later after 0.4 times as many as it has been idle, 16 at most.
    Behind its first eight steps a row decides at every fourth one where its last draft ended before
    the depth that was chosen, or found nothing, and at every second where it drafts at most three
    tokens: a forecast takes 3 % of a small model's step. s shrinks where the row's first tokens
    look unlike `usual` (by a log-likelihood ratio above 4): a row that is unlike all others goes by
    itself. Where no depth pays at these rates and no row has told otherwise, the first drafts hope
    for rates of 0.95, until a batch was offered eight tokens, each row two: a dear drafter is
    tried, too. A batch drafts where that is 4 % faster: its rows then get ahead of each other and
    end one by one, and those left decode no more cheaply.

    Of `usual` and `own`, each depth is drawn towards what the one before it suggests (as if behind
    2 + d trials one more succeeded), since deep places are seen seldom; upwards, since a draft that
    got that far is one of the easy ones. Where texts have easy and hard passages, the row's own
    past tells more; where every token is as hard as any other, it is noise: the forecast that was
    nearer to what the rows before met gets the more weight. The common one is hopeful at the first
    depth, since who stops drafting learns no more. Whether to draft is decided by the best depth of
    all; the draft then grows to at most twice the depth that is known, and four.
    """

    costs: StepCosts
    past: Experience = Experience()

    @property
    def max_length(self) -> int:
        return self.costs.longest

    def rest(self, pause: int) -> int:
        return min(max(_REST, int(_LONGER * pause)), _LONGEST)

    def keeps(self, steps: int, last: StepCount) -> bool:
        """See `LengthPolicy`."""
        ended = last.offered < last.asked
        held = _ENDED if ended else _HELD if last.asked <= _SHORT else 1
        return last.asked > 0 and steps > _YOUNG and steps % held > 0

    def length(self, stats: RowStats) -> int:
        return self.together([stats])

    def together(self, stats: Sequence[RowStats]) -> int:
        """See `LengthPolicy`: that of most tokens per second of the batch. A step in which one row
        drafts lasts nearly as long as one in which all do, so either all do or none."""
        now = self.doubting(sum([row.idle for row in stats]) / len(stats))
        # rows are alike that have not drafted yet
        alike = Counter(stats) if len(stats) > 1 else {stats[0]: 1}
        chosen = now.best_depth(alike, [now.rates(row) for row in alike])
        left = _TRIAL - sum([row.offered for row in stats])
        fresh = now.past.found < 1.0 and not any(row.idle for row in stats)
        if not chosen and left > 0 and fresh:
            chosen = now.best_depth(alike, [[_BEST] * self.max_length] * len(alike))
            chosen = min(chosen, max(-(-left // len(stats)), _TRIED))
        known = max([sum([tried > _KNOWN for tried in row.tried_D]) for row in stats])
        return min(chosen, _GROWTH * known + _ROOM)

    def doubting(self, idle: float) -> CostAware:
        """Discount the past by so many idle steps."""
        return replace(self, past=self.past.times(_DOUBT**idle)) if idle else self

    def best_depth(self, rows: Mapping[RowStats, int], rates: Sequence[Iterable[float]]) -> int:
        """Return the depth with most tokens per second of these rows together; 0: draft nothing.

        Args:
            rows: how many have these statistics.
            rates: of such rows.
        """
        seconds_D, least_D, deepest = self.costs.seconds_D, self.costs.least_D, self.max_length
        promises = [(self._promise(row), count) for row, count in rows.items()]
        found = 1.0 - math.prod([(1.0 - row.found) ** count for row, count in promises])  # in any
        idle, together = (1.0 - found) * self.costs.in_vain, sum(rows.values())
        ahead = _AHEAD if together > 1 else 1.0
        chosen, best, length = 0, ahead * together / seconds_D[0], 0.0
        for depth, rate_B in enumerate(zip(*rates, strict=True), start=1):
            tokens = most = 0.0
            ended = 1.0
            for (row, count), rate in zip(promises, rate_B, strict=True):
                row.deepen(rate)
                ended *= (1.0 - row.found * row.reached) ** count
                tokens += count * (1.0 + row.found * row.tokens)
                # if all that is deeper were accepted, and cost nothing more
                deeper = row.tokens + row.survival * (deepest - depth)
                most += count * (1.0 + row.found * deeper)
            length += (1.0 - ended) / found
            below = int(length)
            step = seconds_D[below]
            if below < length:
                step += (length - below) * (seconds_D[below + 1] - step)
            pace = tokens / (idle + found * step)
            if pace > best:
                chosen, best = depth, pace
            elif most < best * (idle + found * least_D[below]):
                break
        return chosen

    def _promise(self, stats: RowStats) -> _Promise:
        past = self.past
        usual = (past.found + _FOUND) / (past.asked + _FOUND)
        found = (stats.found + _FOUND * usual) / (stats.asked + _FOUND)
        on = stats.asked_on + past.asked_on + _WHOLE
        on_kept = stats.asked_on_kept + past.asked_on_kept + _WHOLE
        return _Promise(
            found=found,
            goes_on=(goes_on := 1.0 - (stats.ended + past.ended) / on),
            goes_on_kept=(kept := 1.0 - (stats.ended_kept + past.ended_kept) / on_kept),
            reached=1.0 / goes_on,
            survival=1.0 / kept,
        )

    def rates(self, stats: RowStats) -> Iterator[float]:
        """Forecast acceptance by depth, given that all before it is accepted."""
        share = 0.5 + 0.5 * math.tanh(self.past.lead / 2.0) if self.past.asked else 0.0
        share *= math.exp(-max(0.0, self.surprise(stats) - _SURPRISE))
        for own, common in self.forecasts(stats):
            yield own + share * (common - own)

    def forecasts(self, stats: RowStats) -> Iterator[tuple[float, float]]:
        """Forecast rates by depth: by the row's own past, and by what is common to rows."""
        others = self.past.found / (self.past.found + _OTHERS)
        expected, weight = self.usual[0], _FIRST * (1.0 + others)
        error = math.sqrt(expected * (1.0 - expected) / (self.past.found + _OTHERS))
        hope, seen = min(_HOPE * error, 1.0 - expected), len(stats.tried_D)
        for d, usual in enumerate(self.usual):
            tried, kept = (stats.tried_D[d], stats.kept_D[d]) if d < seen else (0.0, 0.0)
            own = (kept + weight * expected) / (tried + weight)
            yield own, (kept + _COMMON * (usual + hope)) / (tried + _COMMON)
            expected, weight, hope = _deeper(own, d), _DEEPER, 0.0

    @cached_property
    def usual(self) -> tuple[float, ...]:
        """The rates by depth in the rows before, which begin at a guess."""
        past, out = self.past, list[float]()
        expected, weight, seen = _PRIOR, _OTHERS, len(self.past.tried_D)
        for d in range(self.max_length):
            tried, kept = (past.tried_D[d], past.kept_D[d]) if d < seen else (0.0, 0.0)
            out.append((kept + weight * expected) / (tried + weight))
            expected, weight = _deeper(out[-1], d), _DEEPER
        return tuple(out)

    def surprise(self, stats: RowStats) -> float:
        """Measure how little the row's first tokens agree with the forecast: a log-likelihood
        ratio."""
        if not stats.tried_D:
            return 0.0
        tried, kept, rate = stats.tried_D[0], stats.kept_D[0], self.usual[0]
        missed, out = tried - kept, 0.0
        if kept > 0.0:
            out += kept * math.log(kept / (tried * rate))
        if missed > 0.0:
            out += missed * math.log(missed / (tried * (1.0 - rate)))
        return out

    def after(self, row: Sequence[StepCount]) -> CostAware:
        """Return the policy updated with a row that is decoded no further."""
        if not row:  # it was given up in its first step
            return self
        past, longest, stats = self.past, self.costs.longest, RowStats()
        tried_D, kept_D, lead = [0.0] * longest, [0.0] * longest, 0.0
        begin = 0  # of the steps that are not counted yet
        for number, step in enumerate(row):
            if step.asked == 0:
                continue
            stats, begin = counted(stats, row[begin:number]), number
            reached = min(step.accepted + 1, step.offered, longest)
            for d, (own, common) in enumerate(islice(self.forecasts(stats), reached)):
                kept = float(d < step.accepted)
                tried_D[d] += 1.0
                kept_D[d] += kept
                lead += (own - kept) ** 2 - (common - kept) ** 2
        drafts = [step for step in row if step.asked]
        ends = [(0, 0, 0, 0), *(step.ends() for step in drafts)]  # also where none drafted
        asked_on, ended, asked_on_kept, ended_kept = map(sum, zip(*ends, strict=True))
        return replace(
            self,
            past=Experience(
                asked=_FADE * past.asked + len(drafts),
                asked_on=_FADE * past.asked_on + asked_on,
                ended=_FADE * past.ended + ended,
                asked_on_kept=_FADE * past.asked_on_kept + asked_on_kept,
                ended_kept=_FADE * past.ended_kept + ended_kept,
                tried_D=_faded_sum(past.tried_D, tried_D),
                kept_D=_faded_sum(past.kept_D, kept_D),
                lead=_FADE * past.lead + _TRUST * lead if past.asked else 0.0,
            ),
        )


class Learning(LengthPolicy):
    """A controller that begins every text with the experience of the texts before it.

    It goes by what has been emitted, so the law stays, as long as no request id comes again with
    the same seed: then it would know of draws that are to come. A drawn text depends on the texts
    before it, and on those decoded side by side with it. Not for several threads at once.
    """

    def __init__(self, policy: CostAware) -> None:
        self.policy = policy

    @property
    def max_length(self) -> int:
        return self.policy.max_length

    def rest(self, pause: int) -> int:
        return self.policy.rest(pause)

    def length(self, stats: RowStats) -> int:
        return self.policy.length(stats)

    def together(self, stats: Sequence[RowStats]) -> int:
        return self.policy.together(stats)

    def keeps(self, steps: int, last: StepCount) -> bool:
        return self.policy.keeps(steps, last)

    def learn(self, rows: Sequence[Sequence[StepCount]]) -> None:
        for row in rows:
            self.policy = self.policy.after(row)


def _deeper(rate: float, d: int) -> float:
    """What this rate at depth d suggests of the next."""
    return (rate * (_RISE + d) + 1.0) / (_RISE + d + 1.0)


def _faded_sum(before_D: Sequence[float], new_D: Sequence[float]) -> tuple[float, ...]:
    """Sums over as many depths as are new; `before` may have been fewer."""
    return tuple(
        _FADE * before + new
        for before, new in zip_longest(before_D[: len(new_D)], new_D, fillvalue=0.0)
    )
