"""Which drafts pay on a machine: shapes are really decoded, and priced by a measured cost table.

    speed-up       tokens * t(plain) / sum over steps of t(step)
    its interval   prompts and rounds of the cost table drawn anew, 95 %

Candidates are drafters with drafts of many shapes. They are decoded, not extrapolated from
acceptance by depth: behind a rejection, where the steps of long drafts begin, texts are harder than
in the middle of an easy passage.

In a batch a step lasts as long as its widest row wants. Of B rows, taken as independent of each
other, the widest is at most w with probability F(w) ** B, where F is the share of the steps of one
row that are no wider:

    widths of a row   1 1 9 9   (nothing to draft in half of its steps)    mean of one row     5
    widest of two     1 9 9 9                                              mean of two rows    7
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binomtest

from draftsmith.bench.arms import proposal_of, time_decode
from draftsmith.bench.config import TuneConfig
from draftsmith.bench.costs import (
    ROUNDS,
    CostMeter,
    CostTable,
    Workload,
    clipped_arms,
    cost_file,
    doubling,
    measure_all,
)
from draftsmith.bench.threads import ThreadCosts, tune_threads
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, DraftCounts
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import loaded_frozen
from draftsmith.core.types import TreeShape
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.registry import option_keys
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.provenance import load_of_others, warn_if_busy
from draftsmith.targets.hf import HFTarget

_log = logging.getLogger(__name__)

TREES = ("2,1", "2,1,1,1", "3,2,1", "4,2,1,1", "4,2,2,1")
"""4, 8, 15, 28 and 44 nodes."""
DRAWS = 400
OTHER_WAY = {"greedy": ("sampled", ", drawn"), "sampled": ("greedy", ", top tokens")}
"""Above temperature 0 chains are also tried with the proposal that is not the drafter's own."""


@dataclass(frozen=True, kw_only=True)
class CandidateShape:
    """A drafter with drafts of one shape."""

    arm: Arm
    """Its name is that of its cost curve."""
    drafter: str
    """As the user spelt it."""
    shape: str
    """In words."""
    flags: tuple[str, ...]
    """What asks for it on a command line, the drafter apart."""
    length: int | None = None
    """Length of a chain that is always that long; None: a tree, or a length that changes."""
    words: str = ""
    """The end of `shape`: how tokens are chosen, where not in the drafter's own way."""

    @property
    def way(self) -> str:
        """The drafter, and how it chooses tokens: what has costs and rates of its own."""
        return f"{self.drafter}{self.words}"

    @property
    def depth(self) -> int | None:
        """Depth of the chain or tree; None: it changes."""
        return self.arm.used_shape.depth if self.arm.policy is None else None

    @property
    def label(self) -> str:
        """The name in tables."""
        is_chain = self.arm.used_shape.is_chain
        return f"auto{self.words}" if self.depth is None and is_chain else self.shape

    @property
    def is_graded(self) -> bool:
        """Whether a command line asks for this tree, and the width of a step tells its depth: cuts
        of a dynamic tree are as wide as the whole, and a cost curve goes by the width."""
        return "--draft-tree" in self.flags and not self.arm.used_shape.is_dynamic

    def controlled(self, costs: StepCosts) -> CandidateShape:
        """Return the candidate shape whose depth is chosen step by step, at these costs."""
        is_chain = self.arm.used_shape.is_chain
        return CandidateShape(
            arm=replace(self.arm, policy=Learning(CostAware(costs=costs))),
            drafter=self.drafter,
            shape=f"as many tokens as pay{self.words}"
            if is_chain
            else f"as deep as pays in {self.shape}",
            flags=("--draft-length", "auto", *self.flags),
            words=self.words,
        )


@dataclass(frozen=True, kw_only=True)
class Measurement(CandidateShape):
    """A shape, decoded for real. Lists go over prompts."""

    temperature: float
    tokens_P: tuple[int, ...]
    """Emitted behind the prompt's step; 0: the text ended with it."""
    widths_P: tuple[Mapping[int, int], ...]
    """Tokens fed in a step -> number of such steps."""
    by_depth: tuple[tuple[int, int], ...]
    """(times offered behind accepted tokens, times accepted), by depth."""

    @property
    def prompts(self) -> tuple[int, ...]:
        """The indices of prompts that gave a step to measure."""
        return tuple(place for place, widths in enumerate(self.widths_P) if widths)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens_P) / sum(sum(widths.values()) for widths in self.widths_P)

    def speedup(
        self, table: CostTable, *, rows: int = 1, picks: Sequence[int] | None = None
    ) -> float:
        """Return the speed-up over plain decoding of as many rows.

        Args:
            table: costs of a step of the whole batch.
            picks: prompts (with repeats); None: each one once.

        Raises:
            ValueError: these prompts gave no step.
        """
        chosen = range(len(self.tokens_P)) if picks is None else picks
        tokens = sum(self.tokens_P[p] for p in chosen)
        widths = sorted({width for widths in self.widths_P for width in widths})
        steps_W = np.array([sum(self.widths_P[p].get(w, 0) for p in chosen) for w in widths])
        steps = int(steps_W.sum())
        if not steps:
            raise ValueError("there is no step to measure speed by")
        own = self.arm.name, self.temperature
        seconds_W = [table.target_seconds(w) + table.draft_seconds(*own, w) for w in widths]
        widest_W = np.diff((np.cumsum(steps_W) / steps) ** rows, prepend=0.0)
        return float(tokens * table.target_seconds(1) / (steps * (widest_W @ seconds_W)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A measurement with its estimated speed-up."""

    measurement: Measurement
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    """Per row, by the cost table: of forwards and drafts alone. Choosing among logits, which plain
    decoding does too, comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchEstimate:
    """The best draft of a drafter in batches of so many rows."""

    rows: int
    measurement: Measurement
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The result of tuning."""

    candidates: tuple[Candidate, ...]
    """The fastest first."""
    costs: dict[str, StepCosts]
    """Step costs by drafter, for one row."""
    batches: tuple[BatchEstimate, ...]
    plain_tokens_per_second: float
    """Pace of plain decoding, by the cost table."""
    threads: ThreadCosts | None = None
    """None: there was nothing to choose."""

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]

    @property
    def by_batch(self) -> dict[int, float]:
        """The best speed-up of each batch size."""
        found: dict[int, float] = {}
        for one in self.batches:
            found[one.rows] = max(one.speedup, found.get(one.rows, 0.0))
        return found


def estimate_candidate(
    measurement: Measurement, table: CostTable, draws: Sequence[CostTable], seed: int = 0
) -> Candidate:
    """Estimate the speed-up of a measurement; `draws`: tables of resampled rounds."""
    rng = np.random.default_rng(seed)
    prompts = measurement.prompts
    found = [
        measurement.speedup(draw, picks=rng.choice(prompts, size=len(prompts)).tolist())
        for draw in draws
    ]
    value = measurement.speedup(table)
    low, high = np.quantile(found, [0.025, 0.975]) if found else (value, value)
    return Candidate(
        measurement=measurement,
        speedup=value,
        low=float(low),
        high=float(high),
        tokens_per_second=value / table.target_seconds(1),
    )


def advice(winner: Candidate) -> str:
    """Recommend in a sentence what to do."""
    measurement = winner.measurement
    what = f"{measurement.shape} with {measurement.drafter}"
    promise = f"{winner.speedup:.2f}x ({winner.low:.2f} to {winner.high:.2f})"
    if winner.speedup <= 1.0:
        return f"do not speculate: the best would be {promise}, {what}"
    what = f"draft {what}: {promise}"
    if winner.low <= 1.0:
        return f"it is not certain that drafting pays; at best {what}"
    return what


def evidence(winner: Candidate, tried: int) -> str:
    """Qualify the estimate in a sentence; empty: nothing is claimed. `tried`: drafts that were
    compared."""
    prompts = len(winner.measurement.prompts)
    if prompts == 1:
        return (
            "one prompt was measured: the interval is that of the measured costs alone, and says "
            "nothing of other prompts"
        )
    if winner.speedup <= 1.0:
        return ""
    return (
        f"it is the best of {tried} drafts on the very {prompts} prompts that it was chosen by: "
        "others may gain a little less"
    )


def batch_advice(speedups: Mapping[int, float]) -> str:
    """Name the batch sizes at which drafting pays; `speedups`: the best of each batch size. Empty
    where single rows are all that was asked for: `advice` covers it."""
    sizes = sorted(speedups)
    if sizes == [1]:
        return ""
    paying = [size for size in sizes if speedups[size] > 1.0]
    if not paying:
        return f"drafting pays at no batch size tried ({', '.join(map(str, sizes))})"
    losing = [size for size in sizes if size not in paying]
    if not losing:
        return f"drafting pays up to {sizes[-1]} rows, the most tried"
    if losing[0] > paying[-1]:
        return f"from {losing[0]} rows on drafting no longer pays"
    here, there = (", ".join(map(str, some)) for some in (paying, losing))
    return f"drafting pays at batch size {here}, but not at {there}"


def rates(by_depth: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return acceptance by depth, given that all before was accepted, with Wilson's 95 % intervals;
    depths that were never tried are left out."""
    out = []
    for tried, kept in by_depth:
        if tried:
            low, high = binomtest(kept, tried).proportion_ci(method="wilson")
            own = {"rate": kept / tried, "low": float(low), "high": float(high)}
            out.append({"tried": tried, "kept": kept, **own})
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateDrafter:
    """A drafter, and the trees that it can draft."""

    name: str
    chain: Arm
    """As long as it may be."""
    flags: tuple[str, ...]
    """What else asks for its chains on a command line."""
    trees: tuple[CandidateShape, ...]
    words: str = ""
    """As those of a `CandidateShape`."""
    draw_length: int = 0
    """The drafter ends chains behind so many tokens by itself; 0: it does not."""

    @property
    def way(self) -> str:
        """As that of a `CandidateShape`."""
        return f"{self.name}{self.words}"

    @property
    def lengths(self) -> tuple[int, ...]:
        depth = self.chain.used_shape.depth
        return doubling(min(depth, self.draw_length or depth))

    @property
    def graded(self) -> tuple[Arm, ...]:
        """Return the arms whose costs are measured by depth: those that `controlled` may take."""
        return (self.chain, *(tree.arm for tree in self.trees if tree.is_graded))

    def entries(self, lengths: Sequence[int]) -> tuple[CandidateShape, ...]:
        """Return the candidate shapes for chains of these lengths."""
        return tuple(
            CandidateShape(
                arm=arm,
                drafter=self.name,
                shape=("1 token" if length == 1 else f"{length} tokens") + self.words,
                flags=("--draft-length", str(length), *self.flags),
                length=length,
                words=self.words,
            )
            for length, arm in zip(lengths, clipped_arms(self.chain, lengths), strict=True)
        )

    def controlled(
        self, costs: Mapping[str, StepCosts], tree: CandidateShape | None
    ) -> tuple[CandidateShape, ...]:
        """Return the shapes whose depth is chosen step by step: chains, and this tree.

        Args:
            costs: by the name of an arm.
        """
        chain = CandidateShape(
            arm=self.chain, drafter=self.name, shape="", flags=self.flags, words=self.words
        )
        some = (chain,) if tree is None else (chain, tree)
        return tuple(one.controlled(costs[one.arm.name]) for one in some)


def candidates_of(
    names: Sequence[str],
    arms: Sequence[Arm],
    options: DraftingConfig,
    longest: int,
    temperature: float,
) -> tuple[CandidateDrafter, ...]:
    """Give each drafter chains of at most `longest` tokens, and its trees; and, where it draws and
    nobody said how, chains that are drawn in the other way; and, where its draws have a length of
    their own that nobody gave, chains of draws without it, which its confidence may end."""
    candidates = []
    for name, arm in zip(names, arms, strict=True):
        depth = min(longest, arm.drafter.longest or longest)
        proposal = options.draft_proposal if proposal_of(arm.drafter) else None
        chain = replace(arm, shape=TreeShape.chain(depth))
        own = option_keys(options.assignments(name, alone=len(names) == 1))
        ways = [_Way(arm=chain, flags=_proposal_flags(proposal))]
        other = OTHER_WAY.get(proposal_of(arm.drafter) or "")
        if temperature > 0 and other is not None and proposal is None and "proposal" not in own:
            ways.append(ways[0].changed(other[1], _proposal_flags(other[0]), proposal=other[0]))
        if temperature > 0 and "draw_length" not in own:
            ways += [
                way.changed(", draw_length=0", ("--drafter-option", "draw_length=0"), draw_length=0)
                for way in ways
                if 0 < way.draw_length < depth
            ]
        trees = _trees(name, arm, proposal) if arm.drafter.takes_trees else ()
        candidates += [
            CandidateDrafter(
                name=name,
                chain=way.arm,
                flags=way.flags,
                trees=() if number else trees,
                words=way.words,
                draw_length=way.draw_length if temperature > 0 else 0,
            )
            for number, way in enumerate(ways)
        ]
    return tuple(candidates)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a drafter chooses the tokens of its chains."""

    arm: Arm
    flags: tuple[str, ...]
    words: str = ""

    @property
    def draw_length(self) -> int:
        """Above temperature 0, that of a `CandidateDrafter`."""
        drawn = proposal_of(self.arm.drafter) not in (None, "greedy")
        return self.arm.drafter.draw_length if drawn else 0

    def changed(self, words: str, flags: tuple[str, ...], **options: object) -> _Way:
        """Return the same with other options of the drafter; its costs are its own."""
        arm = replace(_twin(self.arm, **options), name=f"{self.arm.name}{words}")
        return _Way(arm=arm, flags=(*self.flags, *flags), words=f"{self.words}{words}")


def _twin(arm: Arm, **options: object) -> Arm:
    """The arm with a drafter that has other options and shares its weights."""
    drafter = copy.copy(arm.drafter)
    drafter.config = replace(arm.drafter.config, **options)
    return replace(arm, drafter=drafter)


def _trees(name: str, arm: Arm, proposal: str | None) -> tuple[CandidateShape, ...]:
    """Return trees, drawn in the way that is best verified unless the user chose one."""
    if proposal is None and proposal_of(arm.drafter):
        proposal = "without_replacement"
        arm = _twin(arm, proposal=proposal)
    chosen = _proposal_flags(proposal)
    trees: list[tuple[str, TreeShape, tuple[str, ...]]] = []
    for text in TREES:
        shape = TreeShape(widths=tuple(int(width) for width in text.split(",")))
        if shape.depth <= (arm.drafter.longest or shape.depth):
            trees.append((f"a tree {text}", shape, ("--draft-tree", text, *chosen)))
    usual = arm.drafter.default_shape
    if not usual.is_chain:
        what = f"its own tree of {usual.num_nodes} nodes"
        trees.append((what, usual, () if usual.is_dynamic else chosen))
    return tuple(
        CandidateShape(
            # a curve of its own: what drafting costs is no matter of the width alone
            arm=replace(arm, name=f"{arm.name}, {what}", shape=shape),
            drafter=name,
            shape=what,
            flags=flags,
        )
        for what, shape, flags in trees
    )


def _proposal_flags(proposal: str | None) -> tuple[str, ...]:
    return () if proposal is None else ("--draft-proposal", proposal)


def between(length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return untried lengths halfway to the tried neighbours."""
    below = [other for other in lengths if 0 < other < length][-1:]
    above = [other for other in lengths if other > length][:1]
    return tuple(sorted({(length + other) // 2 for other in (*below, *above)} - set(lengths)))


class Tuner:
    """Compare drafters, lengths and trees on one target.

    `arms`: a bound drafter for each of `config.drafters()`. `prompts`: token ids; `predictions`:
    what is expected behind each, as token ids, for drafters that read it.
    """

    def __init__(
        self,
        config: TuneConfig,
        target: HFTarget,
        arms: Sequence[Arm],
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        predictions: Sequence[Sequence[int]],
    ) -> None:
        self._config, self.target, self._sampler = config, target, sampler
        self._candidates = candidates_of(
            config.drafters(), arms, config.drafting, config.longest, sampler.temperature
        )
        self._prompts, self._predictions = prompts, predictions
        self._decoding = DecodeOptions(
            sampler=sampler,
            max_new_tokens=config.max_new_tokens,
            rule=config.drafting.used_rule,
            allow_lossy=config.drafting.is_lossy(),
            seed=config.sampling.seed,
        )

    @loaded_frozen()
    def tune(self) -> Tuning:
        """Measure costs, decode with every shape, predict."""
        warn_if_busy()
        # before all else, which is then measured with as many
        threads = tune_threads(self.target, self._workload(1).text(1 << 40))
        meter, costs = self._measure(1)
        rng = np.random.default_rng(self._config.sampling.seed)
        table, draws = meter.table(), [meter.redrawn(rng) for _ in range(DRAWS)]
        measurements = [
            measurement
            for candidate in self._candidates
            for measurement in self._try_all(candidate, costs, table)
        ]
        candidates = [estimate_candidate(one, table, draws) for one in measurements]
        return Tuning(
            candidates=tuple(sorted(candidates, key=lambda one: one.speedup, reverse=True)),
            costs={one.way: costs[one.chain.name] for one in self._candidates},
            batches=self._batches(measurements, table),
            plain_tokens_per_second=1 / table.target_seconds(1),
            threads=threads,
        )

    def _workload(self, rows: int) -> Workload:
        return Workload(
            prompts=self._prompts,
            max_new_tokens=self._config.max_new_tokens,
            predictions=self._predictions,
            rows=rows,
        )

    def _measure(self, rows: int) -> tuple[CostMeter, dict[str, StepCosts]]:
        """Measure costs with so many rows, and those by depth, by the name of an arm, which
        --draft-length auto will find in the cache."""
        _log.info("measuring what steps cost with %d row%s", rows, "s" if rows > 1 else "")
        workload = self._workload(rows)
        arms = [arm for candidate in self._candidates for arm in candidate.graded]
        whole = [
            tree.arm
            for candidate in self._candidates
            for tree in candidate.trees
            if not tree.is_graded
        ]
        others = load_of_others() is not None
        meter, costs = measure_all(self.target, arms, self._sampler, workload, ROUNDS, whole)
        for arm in arms:
            file = cost_file(self.target, arm, self._sampler, workload)
            file.store(costs[arm.name], beside_others=others)
        return meter, costs

    def _try_all(
        self, candidate: CandidateDrafter, costs: Mapping[str, StepCosts], table: CostTable
    ) -> list[Measurement]:
        """Try chains of doubling lengths, then around the best of them; trees; auto, for chains and
        for the best tree whose costs are known by depth.

        Raises:
            InputError: no prompt gave a step to measure.
        """
        chains = self._decode_all(candidate.entries(candidate.lengths))
        if not chains:
            raise InputError(
                f"--suite {self._config.suite}: no prompt gave a step to measure, since each text "
                "ended in the step of its prompt; give prompts with longer texts, or a larger "
                "--max-new-tokens."
            )
        best = max(chains, key=lambda one: one.speedup(table))
        assert best.length is not None
        nearby = self._decode_all(candidate.entries(between(best.length, candidate.lengths)))
        trees = self._decode_all(candidate.trees)
        auto = candidate.controlled(costs, _best_tree(trees, table))
        return [*chains, *nearby, *trees, *self._decode_all(auto)]

    def _decode_all(self, entries: Iterable[CandidateShape]) -> list[Measurement]:
        """Decode with all; drop those that finished every text in the step of its prompt."""
        return [measurement for entry in entries if (measurement := self._try(entry)).prompts]

    def _try(self, entry: CandidateShape) -> Measurement:
        """Decode every prompt once."""
        _log.info("decoding with %s, %s", entry.drafter, entry.shape)
        tokens, widths, counts = [], [], DraftCounts()
        texts = zip(self._prompts, self._predictions, strict=True)
        for number, (prompt, expected) in enumerate(texts):
            run = time_decode(
                self.target, entry.arm, [prompt], self._decoding, [number], [expected]
            )
            assert run.counts is not None
            tokens.append(run.decode_tokens[0])
            widths.append(Counter(run.widths))
            counts = counts + run.counts[0]
        return Measurement(
            **vars(entry),
            temperature=self._sampler.temperature,
            tokens_P=tuple(tokens),
            widths_P=tuple(widths),
            by_depth=tuple(counts.by_position),
        )

    def _batches(
        self, measurements: Sequence[Measurement], table: CostTable
    ) -> tuple[BatchEstimate, ...]:
        """Find the best draft of each drafter at each batch size."""
        found = []
        for rows in self._config.sizes():
            priced, own = table, list(measurements)
            if rows > 1:
                meter, costs = self._measure(rows)
                priced = meter.table()
                own = [one for one in measurements if one.depth is not None]
                for candidate in self._candidates:
                    trees = [
                        one
                        for one in own
                        if candidate.trees and one.drafter == candidate.name and not one.length
                    ]
                    # a controller goes by what steps of such a batch cost
                    tree = _best_tree(trees, priced, rows)
                    own += self._decode_all(candidate.controlled(costs, tree))
            for name in dict.fromkeys(candidate.name for candidate in self._candidates):
                speedups = {
                    one.speedup(priced, rows=rows): one
                    for one in reversed(own)
                    if one.drafter == name
                }
                best = max(speedups)
                found.append(BatchEstimate(rows=rows, measurement=speedups[best], speedup=best))
        return tuple(found)


def _best_tree(trees: Sequence[Measurement], table: CostTable, rows: int = 1) -> Measurement | None:
    """Return the fastest of these whose costs are known by depth; None: there is none."""
    graded = [one for one in trees if one.is_graded]
    return max(graded, key=lambda one: one.speedup(table, rows=rows), default=None)
