"""What the paper of DistillBeam says, and what the study's runs say to it.

A claim is about a change that many settings share: every divergence, once with it and once without.
Ratios are of tokens per step, means over the settings; intervals are over prompts (the same for
all), so they hold no noise of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exam import Marks
from lab import Lab
from study import Run
from writing import difference

from draftsmith.option_groups import DivergenceOptions

SOFT = ("kl", "rkl", "jsd", "hellinger", "tvd", "tvdpp", "lk")
WIDTHS = (2, 4, 8, 16)
"""Beside these the greedy text, which is the one best beam."""
GOLD = DivergenceOptions(tail="renormalise")
"""The paper's treatment of cut laws; the only one with a meaning at every temperature."""
HEATS = (0.7, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That these runs are better than those, each than the one at its place."""

    says: str
    better: tuple[str, ...]
    worse: tuple[str, ...]


def claims(lab: Lab) -> list[Claim]:
    """The paper's, in its order, and two of ours."""

    def soft(run: Callable[[str], Run]) -> tuple[str, ...]:
        return tuple(run(objective).name for objective in SOFT)

    def on(store: str) -> tuple[str, ...]:
        return soft(lambda objective: lab.run(store, objective))

    def heated(heat: float) -> tuple[str, ...]:
        return soft(lambda objective: at_heat(lab, objective, heat))

    def hard(store: str) -> tuple[str, ...]:
        return (lab.run(store, "sft").name,)

    whole = soft(lambda objective: lab.run("gold", objective, change=GOLD, name="whole"))
    found = [
        Claim(says="teacher at temperature 1 over 0.7", better=heated(1.0), worse=heated(0.7)),
        Claim(says="teacher at temperature 1 over 2", better=heated(1.0), worse=heated(2.0)),
        Claim(says="whole laws over top-50 (within 0.5 %)", better=whole, worse=heated(1.0)),
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
    eight = tuple(lab.run("beams-8", one).name for one in SOFT if one != "rkl")
    found.append(
        Claim(
            says="reverse KL with 8 beams over other divergences with 8",
            better=(lab.run("beams-8", "rkl").name,) * len(eight),
            worse=eight,
        )
    )
    found += [
        Claim(
            says=f"(ours) {width} draws over {width} beams",
            better=on(f"draws-{width}"),
            worse=on(f"beams-{width}"),
        )
        for width in (4, 16)
    ]
    return found


def at_heat(lab: Lab, objective: str, heat: float) -> Run:
    """On gold texts, with a teacher at this temperature."""
    change = replace(GOLD, teacher_temperature=heat)
    return lab.run("gold", objective, change=change, name=f"t{heat:g}")


def judged(some: Iterable[Claim], marks: Mapping[str, Marks]) -> list[dict[str, Any]]:
    """Those of which every run is known: {says, ratio, low, high, of (so many settings), higher (in
    so many of them)}."""
    return [
        _judged(one, marks)
        for one in some
        if all(name in marks for name in (*one.better, *one.worse))
    ]


def _judged(claim: Claim, marks: Mapping[str, Marks]) -> dict[str, Any]:
    first = [marks[name] for name in claim.better]
    second = [marks[name] for name in claim.worse]
    found = difference("", [_together(first)], "", [_together(second)])
    pairs = zip(first, second, strict=True)
    return {
        "says": claim.says,
        "ratio": round(found.ratio, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "of": len(first),
        "higher": sum(one.mean_tau > other.mean_tau for one, other in pairs),
    }


def _together(some: Sequence[Marks]) -> Marks:
    """One exam in more ways: settings are fixed, where seeds would be drawn anew."""
    return replace(some[0], decoded=tuple(way for one in some for way in one.chains))


def as_table(found: Iterable[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Claims of the paper, and the runs",
        "",
        "Tokens per step, means of chains of 5 and 8 at temperatures 0 and 1. Ratio: mean over the "
        "divergences (or labels); 95 % intervals over prompts; one seed.",
        "",
        "| claim | ratio | settings in which it is higher |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {one['says']} | {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f}) "
        f"| {one['higher']} of {one['of']} |"
        for one in found
    ]
    return "\n".join(lines) + "\n"
