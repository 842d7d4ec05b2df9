"""What the paper of DistillBeam says, and what the study's runs say to it.

A claim is about one change in many settings, such as every divergence. Its ratio is one of mean
tokens per step over these settings, with the change and without; the interval is over prompts, the
same for all, and holds no noise of training. Where a single run stands against several (labels
against every divergence) all depends on that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from beam_parts import (
    AT_EQUAL_COST,
    MORE,
    SOFT,
    WIDTHS,
    at_equal_cost,
    at_temperature,
    costs_are_known,
    length,
    longer,
    mixed,
    scored,
    tails,
    with_whole_laws,
)
from evaluation import Scores
from lab import Lab
from study import Run
from writing import Difference, difference, saved


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That these runs are better than those, each than the one at its place."""

    says: str
    better: tuple[Run, ...]
    worse: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return (*self.better, *self.worse)


def claims(lab: Lab) -> list[Claim]:
    """The paper's, in its order, and ours: of what it leaves open."""

    def soft(run: Callable[[str], Run]) -> tuple[Run, ...]:
        return tuple(map(run, SOFT))

    def on(store: str) -> tuple[Run, ...]:
        return soft(lambda objective: lab.run(store, objective))

    def softened(temperature: float) -> tuple[Run, ...]:
        return soft(lambda objective: at_temperature(lab, objective, temperature))

    def hard(store: str) -> tuple[Run, ...]:
        return (lab.run(store, "sft"),)

    cut, whole = softened(1.0), soft(lambda objective: with_whole_laws(lab, objective))
    found = [
        Claim(says="teacher at temperature 1 over 0.7", better=cut, worse=softened(0.7)),
        Claim(says="teacher at temperature 1 over 2", better=cut, worse=softened(2.0)),
        Claim(says="whole laws as good as top-50, within 0.5 %", better=whole, worse=cut),
        Claim(says="drawn texts over gold", better=on("draws-1"), worse=on("gold")),
        Claim(says="drawn texts over greedy", better=on("draws-1"), worse=on("greedy")),
        Claim(says="drawn labels over gold", better=hard("draws-1"), worse=hard("gold")),
        Claim(says="drawn labels over greedy", better=hard("draws-1"), worse=hard("greedy")),
        Claim(
            says="laws over labels, drawn texts",
            better=on("draws-1"),
            worse=hard("draws-1") * len(SOFT),
        ),
    ]
    found += [
        Claim(says=f"{width} beams over one", better=on(f"beams-{width}"), worse=on("greedy"))
        for width in WIDTHS
    ]
    eight = tuple(lab.run("beams-8", one) for one in SOFT if one != "rkl")
    found.append(
        Claim(
            says="reverse KL with 8 beams over other divergences with 8",
            better=(lab.run("beams-8", "rkl"),) * len(eight),
            worse=eight,
        )
    )
    found += [
        Claim(says=f"(ours) {n} draws over {says}", better=on(f"draws-{n}"), worse=on(other))
        for n in (4, 16)
        for says, other in (("one", "draws-1"), (f"{n} beams", f"beams-{n}"))
    ]
    return found + ours(lab)


def ours(lab: Lab) -> list[Claim]:
    """About what the paper leaves open."""
    found = [
        Claim(
            says="(ours) whole laws over top-50 with the rest as one cell",
            better=tuple(with_whole_laws(lab, one) for one in SOFT),
            worse=tuple(lab.run("gold", one) for one in SOFT),
        )
    ]
    aggregated = ("kl", "rkl")
    apart = tuple(lab.run("beams-8", one) for one in aggregated)
    found += [
        Claim(
            says=f"(ours) {says} over each beam its own laws, alike",
            better=tuple(map(partial(taught, lab), aggregated)),
            worse=apart,
        )
        for says, taught in (("mixture of laws", mixed), ("weights by score", scored))
    ]
    long, many = longer(lab), MORE * lab.amounts.prompts
    found += [
        Claim(
            says=f"(ours) {MORE} times the prompts over {says}, LK, long",
            better=(long.run(f"draws-1@{many}", "lk"),),
            worse=(long.run(store, "lk"),),
        )
        for says, store in (
            ("none more", "draws-1"),
            (f"{MORE} draws of each", f"draws-{MORE}"),
            (f"{MORE} beams of each", f"beams-{MORE}"),
        )
    ]
    found += [
        Claim(
            says=f"(ours) {MORE} {kind} of each prompt over one draw, LK, long",
            better=(long.run(f"{kind}-{MORE}", "lk"),),
            worse=(long.run("draws-1", "lk"),),
        )
        for kind in ("draws", "beams")
    ]
    few_lk, several_lk, few_sft, several_sft, few_whole, several_whole = length(lab)
    found += [
        Claim(says=f"(ours) {says}, very long", better=(better,), worse=(worse,))
        for says, better, worse in (
            (f"{MORE} draws of each prompt over one draw, LK", several_lk, few_lk),
            (f"{MORE} draws of each prompt over one draw, labels", several_sft, few_sft),
            ("LK over labels, one draw", few_lk, few_sft),
            (f"LK over labels, {MORE} draws", several_lk, several_sft),
            (f"LK of one draw over labels of {MORE}", few_lk, several_sft),
            ("LK, whole laws over top-50 with the rest as one cell", several_whole, several_lk),
            (f"{MORE} draws of each prompt over one, LK, whole laws", several_whole, few_whole),
        )
    ]
    if costs_are_known(lab):
        auto, *others = at_equal_cost(lab)
        found += [
            Claim(says=f"(ours) auto over {name}, equal cost", better=(auto,), worse=(other,))
            for name, other in zip(AT_EQUAL_COST[1:], others, strict=True)
        ]
    return found


def judged(some: Iterable[Claim], marks: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """Those of which every run is known, by its name: {says, ratio, low, high, of (so many
    settings), higher (in so many of them), prompts, rejections_saved}."""
    return [_judged(one, marks) for one in some if all(run.name in marks for run in one.runs)]


def _judged(claim: Claim, marks: Mapping[str, Scores]) -> dict[str, Any]:
    first = [marks[run.name] for run in claim.better]
    second = [marks[run.name] for run in claim.worse]
    found = difference("", [_together(first)], "", [_together(second)])
    pairs = zip(first, second, strict=True)
    return {
        "says": claim.says,
        "ratio": round(found.ratio, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "of": len(first),
        "higher": sum(one.mean_tau > other.mean_tau for one, other in pairs),
        "prompts": found.prompts,
        "rejections_saved": saved(first, second),
    }


def _together(some: Sequence[Scores]) -> Scores:
    """One exam in more ways: settings are fixed, where seeds would be drawn anew."""
    return replace(some[0], decoded=tuple(way for one in some for way in one.chains))


def of_tails(lab: Lab) -> list[Difference]:
    """What lies outside of the kept tokens and the readings of TVD++, over the usual one of each
    divergence, pooled over seeds; of those that are known."""
    groups: dict[tuple[str, str], list[Scores]] = {}
    for one in lab.known(tails(lab), lab.exam).values():
        assert one.run.options is not None and one.run.label is not None
        key = one.run.options.objective.objective, one.run.label
        groups.setdefault(key, []).append(one.marks)
    usual: dict[str, str] = {}
    made = []
    for (objective, label), marks in groups.items():
        first = usual.setdefault(objective, label)  # each divergence begins with its default
        if label != first:
            made.append(difference(label, marks, first, groups[objective, first]))
    return made


def as_table(found: Iterable[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Claims of the paper, and the runs",
        "",
        "Tokens per step, means of chains of 5 and 8 at temperatures 0 and 1. Ratio: of the means "
        "over all settings (divergences, unless one or labels are named), with the change and "
        "without; 95 % intervals over prompts; one seed. Rejections saved: "
        "(alpha - alpha without) / (1 - alpha without), of mean expected acceptances at "
        "temperature 1.",
        "",
        "| claim | ratio | settings in which it is higher | rejections saved |",
        "| --- | --- | --- | ---: |",
    ]
    lines += [
        f"| {one['says']} | {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f}) "
        f"| {one['higher']} of {one['of']} | {100 * one['rejections_saved']['1']:.1f} % |"
        for one in found
    ]
    return "\n".join(lines) + "\n"
