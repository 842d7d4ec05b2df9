"""The measurement: baseline and candidates interleaved in one process, after warm-up.

For each repeat, temperature and group of prompts one round runs every arm once; rounds rotate the
order, so that no arm always runs first or behind the same neighbour:

    round 0   none  prompt_lookup  lookahead  transformers
    round 1   prompt_lookup  lookahead  transformers  none
    ...

Repeats are the outermost loop: an interrupted measurement has all prompts before it has all
repeats. What is not decoding (comparing, scoring again, rounds of the cost table) happens between
the timed runs. What a length policy learns stays within one repeat and temperature: the warm-up has
drawn the very texts of the first repeat.

At temperature 0 texts are compared with plain decoding's. Exact arithmetic would give equal tokens.
Rounding depends on how many tokens a forward is fed, so near-ties can flip in any engine, and in
half precision they do. Two metrics keep the claim of equality honest:

* the *gap* at the first divergence: how far the target, decoding plainly in its own dtype, held its
  first choice above its second. It must lie under a *bound* that rounding explains;
* the *floor*: how often the target differs from itself when the same text is scored in chunks, as
  verification does. A drafter's rate of divergences must not exceed it.

Scores are the logits after penalties and bias, as plain decoding sees them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftsmith.bench.arms import TimedRun, supports, time_decode, time_generate
from draftsmith.bench.costs import CostMeter, CostTable, probed_arms, thin_out
from draftsmith.bench.loops import in_loops
from draftsmith.bench.records import (
    BASELINE,
    TRANSFORMERS,
    FirstDivergence,
    Floor,
    RunRecord,
    digest,
)
from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, encode, generate, pieces, prediction
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.transfer import loaded_frozen
from draftsmith.core.types import LengthPolicy, Signals
from draftsmith.data.prompts import Prompt
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.base import Target, feed_beginning
from draftsmith.targets.hf import HFTarget

FLOOR_WIDTHS = 3
"""Chunk sizes with which the target is compared to itself."""
_COST_ROUNDS = 24
COST_WINDOW = 8
"""A record's predicted costs are medians over so many latest rounds of the cost table."""
TAIL_TOKENS = 96
"""Tokens at a prompt's end, kept to show with the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A prompt (or a later turn of one) as tokens."""

    prompt: str
    """Id in its suite."""
    tokens: tuple[int, ...]
    turn: int = 0
    tag: str | None = None
    language: str | None = None
    prediction: tuple[int, ...] = ()
    """An expected continuation, for drafters that read one."""


def make_items(prompts: Sequence[Prompt], target: Target, max_new_tokens: int) -> tuple[Item, ...]:
    """Turn prompts into tokens. A later turn of a chat is asked behind the answers that plain
    greedy decoding gave, so that all drafters continue the same text."""
    options, items = DecodeOptions(max_new_tokens=max_new_tokens), []
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(len(prompt.turns) + 1):
            item = Item(
                prompt=prompt.id,
                tokens=encode(prompt, target, answers),
                turn=turn,
                tag=prompt.tag,
                language=prompt.language,
                prediction=prediction(prompt, target, turn),
            )
            items.append(item)
            if turn < len(prompt.turns):
                (made,) = generate(target, NoDrafter(), [item.tokens], options)
                answers.append(made.text or "")
    return tuple(items)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineOutput:
    """The output of plain decoding for a prompt."""

    item: Item
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to measure. `arms` begins with the baseline, whose drafter drafts nothing."""

    target: Target
    arms: tuple[Arm, ...]
    items: tuple[Item, ...]
    samplers: tuple[Sampler, ...]
    """One per temperature."""
    max_new_tokens: int
    rule: str = "auto"
    lossy: bool = False
    """The rule changes the law: drafted texts are then not compared with plain decoding's."""
    batch_size: int = 1
    repeats: int = 3
    warmup: int = 1
    """Unmeasured rounds per temperature, on the first group of prompts."""
    cost_rounds: int | None = None
    """Rounds of the cost table, spread over the measurement; None: 24, or as many as it has rounds
    of its own where these are fewer."""
    seed: int = 0
    with_transformers: bool = True
    run: str | None = None
    """Id of the run, which its records carry."""

    def __post_init__(self) -> None:
        assert self.arms[0].name == BASELINE, "the first arm is the baseline"

    @property
    def groups(self) -> tuple[range, ...]:
        """The item numbers that are decoded together."""
        starts = range(0, len(self.items), self.batch_size)
        return tuple(range(s, min(s + self.batch_size, len(self.items))) for s in starts)

    def decode_options(self, sampler: Sampler, seed: int) -> DecodeOptions:
        return DecodeOptions(
            sampler=sampler,
            max_new_tokens=self.max_new_tokens,
            rule=self.rule,
            allow_lossy=self.lossy,
            seed=seed,
        )

    def lossy_rule(self, arm: str) -> str | None:
        """Return the rule that verifies this arm's drafts, if the output law is not the
        target's."""
        return self.rule if self.lossy and arm not in (BASELINE, TRANSFORMERS) else None

    def arm_names(self, sampler: Sampler) -> tuple[str, ...]:
        """Return the arms that run at this law; transformers cannot draw from every one."""
        rival = self.with_transformers and isinstance(self.target, HFTarget) and supports(sampler)
        return (*(arm.name for arm in self.arms), *((TRANSFORMERS,) if rival else ()))

    @property
    def num_records(self) -> int:
        per_item = sum(len(self.arm_names(sampler)) for sampler in self.samplers)
        return self.repeats * len(self.items) * per_item


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of the measurement."""

    repeat: int
    sampler: Sampler
    group: int
    order: tuple[str, ...]


class Bench:
    """A measurement: `prepare` once, then iterate over `records`."""

    def __init__(
        self, plan: BenchPlan, *, on_prepared: Callable[[float], BenchPlan] | None = None
    ) -> None:
        """
        Args:
            on_prepared: called by `prepare` at its end with the seconds of one warm round; the plan
                that it returns is measured: the same with fewer items, repeats or tokens.
        """
        self.plan, self._on_prepared = plan, on_prepared
        self._meter: CostMeter | None = None
        self._plain: dict[int, tuple[int, ...]] = {}
        """Plain decoding's tokens at temperature 0, by item."""
        self._divergences: dict[tuple[int, str], FirstDivergence | None] = {}
        """By item and digest of the text."""
        self._policies: dict[tuple[str, Sampler, int | None], LengthPolicy | None] = {}
        self._widths: list[int] = []
        self._outputs: dict[Sampler, list[BaselineOutput]] = {}

    def rounds(self) -> Iterator[Round]:
        """Yield all rounds in their order."""
        plan = self.plan
        cells = itertools.product(range(plan.repeats), plan.samplers, range(len(plan.groups)))
        for number, (repeat, sampler, group) in enumerate(cells):
            names = plan.arm_names(sampler)
            shift = number % len(names)
            order = (*names[shift:], *names[:shift])
            yield Round(repeat=repeat, sampler=sampler, group=group, order=order)

    @loaded_frozen()
    def prepare(self, on_step: Callable[[str], None] | None = None) -> None:
        """Warm up and measure the cost table."""
        plan, spent = self.plan, 0.0
        say = on_step or (lambda text: None)
        for number in range(plan.warmup):
            spent = 0.0
            for sampler in plan.samplers:
                for name in plan.arm_names(sampler):
                    say(f"warming up {number + 1}/{plan.warmup}: {name}")
                    run = self._run(name, plan.groups[0], sampler, None)
                    spent += run.seconds
                    self._widths.extend(run.widths)
        if plan.batch_size == 1:
            say("measuring costs")
            self._meter = CostMeter(
                plan.target,
                [probed for arm in plan.arms for probed in probed_arms(arm)],
                plan.samplers,
                [(item.tokens, item.prediction) for item in plan.items],
                plan.decode_options(Sampler(), plan.seed),
                self._widths,
            )
            self._meter.measure(COST_WINDOW - 1)
        if self._on_prepared is not None:
            self.plan = self._on_prepared(spent)

    @property
    def costs(self) -> CostTable | None:
        """The cost table of the whole measurement so far; None before `prepare` and for batches."""
        return None if self._meter is None else self._meter.table()

    def baseline_outputs(self, sampler: Sampler) -> list[BaselineOutput]:
        """Return the outputs of plain decoding so far: one of each prompt at temperature 0, as many
        as there were repeats above."""
        return self._outputs.get(sampler, [])

    def records(self) -> Iterator[tuple[RunRecord, ...]]:
        """Run all rounds; yield the records of one round at a time."""
        with loaded_frozen():
            rounds = list(self.rounds())
            wanted = self.plan.cost_rounds
            if wanted is None:
                wanted = min(_COST_ROUNDS, len(rounds))
            for number, entry in enumerate(rounds):
                if self._meter is not None:
                    due = (number + 1) * wanted // len(rounds) - number * wanted // len(rounds)
                    self._meter.measure(due)
                yield self._round(entry)

    # ------------------------------------------------------------------ one round

    def _round(self, entry: Round) -> tuple[RunRecord, ...]:
        plan = self.plan
        rows = plan.groups[entry.group]
        costs = None if self._meter is None else self._meter.table(latest=COST_WINDOW)
        runs = {name: self._run(name, rows, entry.sampler, entry.repeat) for name in entry.order}
        greedy = entry.sampler.temperature == 0
        if entry.repeat == 0 or not greedy:
            plain = zip(rows, runs[BASELINE].tokens, strict=True)
            outputs = [BaselineOutput(item=plan.items[row], tokens=tokens) for row, tokens in plain]
            self._outputs.setdefault(entry.sampler, []).extend(outputs)
        if greedy and entry.repeat == 0:
            for run in runs.values():
                self._widths.extend(run.widths)
            self._plain.update(zip(rows, runs[BASELINE].tokens, strict=True))
        return tuple(
            self._record(entry, place, name, runs[name], b, row, costs)
            for place, name in enumerate(entry.order)
            for b, row in enumerate(rows)
        )

    def _run(self, name: str, rows: range, sampler: Sampler, repeat: int | None) -> TimedRun:
        """Run an arm on a group once; `repeat`: None in the warm-up."""
        plan = self.plan
        seed = plan.seed + (repeat or 0)
        prompts = [plan.items[row].tokens for row in rows]
        if name == TRANSFORMERS:
            assert isinstance(plan.target, HFTarget)
            return time_generate(plan.target, prompts, sampler, plan.max_new_tokens, seed)
        options = plan.decode_options(sampler, seed)
        arm = next(arm for arm in plan.arms if arm.name == name)
        policy = self._policies.setdefault((name, sampler, repeat), copy.copy(arm.policy))
        arm = replace(arm, policy=policy)
        predictions = [plan.items[row].prediction for row in rows]
        return time_decode(plan.target, arm, prompts, options, list(rows), predictions)

    @torch.inference_mode()
    def _compare(self, row: int, text: tuple[int, ...], sampler: Sampler) -> FirstDivergence | None:
        key = row, digest(text)
        if key not in self._divergences:
            prompt, plain = self.plan.items[row].tokens, self._plain[row]
            self._divergences[key] = find_divergence(self.plan.target, prompt, plain, text, sampler)
        return self._divergences[key]

    @torch.inference_mode()
    def _floor(self, row: int, plain: tuple[int, ...], sampler: Sampler) -> Floor:
        """Score plain decoding's text again in chunks as verification would."""
        chunks = thin_out([w for w in self._widths if w > 1] or [8], FLOOR_WIDTHS)
        prompt = self.plan.items[row].tokens
        return numerical_floor(self.plan.target, prompt, plain, sampler, chunks)

    def _record(
        self,
        entry: Round,
        place: int,
        name: str,
        run: TimedRun,
        b: int,
        row: int,
        table: CostTable | None,
    ) -> RunRecord:
        item, temperature = self.plan.items[row], entry.sampler.temperature
        divergence = floor = costs = text = tail = None
        lossy_rule = self.plan.lossy_rule(name)
        compared = temperature == 0 and lossy_rule is None
        if compared:
            divergence = self._compare(row, run.tokens[b], entry.sampler)
            if name == BASELINE and entry.repeat == 0:
                floor = self._floor(row, run.tokens[b], entry.sampler)
        counted: dict[str, Any] = {}
        if run.counts is not None:
            counts = run.counts[b]
            same = ("steps", "accepted", "offered", "proposed")
            counted = {field: getattr(counts, field) for field in same}
            counted["by_position"] = tuple(counts.by_position)
            counted["by_origin"] = {str(key): value for key, value in counts.by_origin.items()}
            counted["by_source"] = counts.by_source or None
            if table is not None:
                costs = table.predict(name, temperature, run.decode_tokens[b], run.widths)
        tokenizer = self.plan.target.tokenizer
        if entry.repeat == 0 and tokenizer is not None:
            text = pieces(tokenizer, run.tokens[b], run.drafted[b])
            tail = tokenizer.decode(list(item.tokens[-TAIL_TOKENS:]), skip_special_tokens=True)
        return RunRecord(
            prompt=item.prompt,
            run=self.plan.run,
            turn=item.turn,
            tag=item.tag,
            language=item.language,
            drafter=name,
            temperature=temperature,
            repeat=entry.repeat,
            seed=self.plan.seed + entry.repeat,
            place=place,
            group=entry.group,
            prompt_tokens=len(item.tokens),
            tokens=len(run.tokens[b]),
            decode_tokens=run.decode_tokens[b],
            decode_steps=None if run.decode_steps is None else run.decode_steps[b],
            loop_tokens=int(in_loops(run.tokens[b]).sum()),
            outside_loops=None if run.outside_loops is None else run.outside_loops[b],
            seconds_outside_loops=run.seconds_outside_loops,
            finish_reason=run.finish[b],
            seconds=run.seconds,
            prefill_seconds=run.prefill_seconds,
            decode_seconds=run.decode_seconds,
            phases=run.phases,
            costs=costs,
            digest=digest(run.tokens[b]),
            identical=divergence is None if compared else None,
            divergence=divergence,
            floor=floor,
            prompt_tail=tail,
            pieces=text,
            lossy_rule=lossy_rule,
            **counted,
        )


# --------------------------------------------------------------------------- equality


_ULPS = 8
"""Half precision: rounding errors of a few units in the last place of the largest logit add up."""
_BOUND = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Wider formats: the stated bounds of the losslessness claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The target's choice at one place."""

    token: int
    gap: float
    """Score of the first choice minus that of the second."""
    bound: float
    """See `near_tie_bound`."""


def near_tie_bound(dtype: torch.dtype, top_logit: float) -> float:
    """Return the largest gap that rounding may flip: 1e-3 in float32, 8 ulps in half precision."""
    least = _BOUND.get(dtype)
    if least is not None:
        return least
    exponent = math.floor(math.log2(abs(top_logit))) if top_logit else 0
    return _ULPS * torch.finfo(dtype).eps * 2.0**exponent


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index where two texts first differ, one of them ending included."""
    pairs = enumerate(itertools.zip_longest(left, right))
    return next((place for place, (a, b) in pairs if a != b), None)


def find_divergence(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    text: Sequence[int],
    sampler: Sampler,
) -> FirstDivergence | None:
    """Find where `text` leaves the `plain` continuation, and the target's gap there; None:
    nowhere."""
    at = first_difference(plain, text)
    if at is None:
        return None
    choice = choice_after(target, prompt, plain[:at], sampler)
    return FirstDivergence(at=at, gap=choice.gap, bound=choice.bound)


def choice_after(
    target: Target, prompt: Sequence[int], generated: Sequence[int], sampler: Sampler
) -> Choice:
    """Return the target's choice behind `prompt + generated`, fed as plain decoding feeds it.

    prompt in one forward, then each generated token in a forward of its own
    """
    *_, (choice,) = _choices(target, prompt, generated, 1, sampler)
    return choice


def numerical_floor(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    sampler: Sampler,
    widths: Sequence[int],
) -> Floor:
    """Score the plain text again in chunks of each width, and count where a choice flips.

    plain    t0 t1 t2 t3 t4          t0 came from the prompt's forward, as it did before
    chunks   [t0 t1] [t2 t3]         width 2: the choices behind t0 and t1 come from one forward
    choices    t1 t2   t3 t4         compared with what plain decoding chose
    """
    tokens = flips = 0
    largest: float | None = None
    for width in widths:
        chunks = _choices(target, prompt, plain[:-1], width, sampler)
        next(chunks)  # behind the prompt
        for choice, decoded in zip(itertools.chain.from_iterable(chunks), plain[1:], strict=False):
            tokens += 1
            if choice.token != decoded:
                # the rescored gap is the flipped side of the same near-tie
                largest = max(choice.gap, largest or 0.0)
                flips += 1
                break
    return Floor(tokens=tokens, flips=flips, largest_gap=largest)


def _choices(
    target: Target, prompt: Sequence[int], known: Sequence[int], width: int, sampler: Sampler
) -> Iterator[list[Choice]]:
    """Feed a prompt as in decoding, then the known tokens in chunks; yield the target's greedy
    choices: that behind the prompt, then those behind the tokens of each chunk."""
    cache = target.new_cache(1, len(prompt) + len(known) + 1)
    text = [*prompt, *known]
    # at temperature 1 and untruncated, differences of log-probabilities are those of scores
    scores = replace(sampler, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    (left,) = feed_beginning(target, cache, [prompt])
    chunks = [left, *(known[n : n + width] for n in range(0, len(known), width))]
    end = len(prompt) - len(left)
    for number, chunk in enumerate(chunks):
        keep = len(chunk) if number else 1
        fed, block = lay_out(cache, [chunk])
        logits_RV = target.forward(torch.from_numpy(fed), block, keep, Signals()).logits_BNV[0]
        cache.commit(np.array([len(chunk)]))
        end += len(chunk)
        histories = [
            History(tokens=text[:length], num_prompt=len(prompt))
            for length in range(end - keep + 1, end + 1)
        ]
        probs_RV = scores.law(logits_RV.double(), histories).probs()
        top = probs_RV.topk(2, dim=-1).values.log().tolist()
        bounds = [near_tie_bound(target.dtype, highest) for highest in logits_RV.amax(-1).tolist()]
        yield [
            Choice(token=token, gap=first - second, bound=bound)
            for token, (first, second), bound in zip(
                probs_RV.argmax(-1).tolist(), top, bounds, strict=True
            )
        ]
