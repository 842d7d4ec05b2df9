"""What the paper of DistillBeam says, and what the study's runs say to it.

A claim is about one change in many settings, such as every divergence. Its ratio is one of mean
tokens per step over these settings, with the change and without; the interval is over prompts, the
same for all, and holds no noise of training. Where a single run stands against several (labels
against every divergence) all depends on that run.
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
    better: tuple[Run, ...]
    worse: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return (*self.better, *self.worse)


def claims(lab: Lab) -> list[Claim]:
    """The paper's, in its order, and two of ours."""

    def soft(run: Callable[[str], Run]) -> tuple[Run, ...]:
        return tuple(map(run, SOFT))

    def on(store: str) -> tuple[Run, ...]:
        return soft(lambda objective: lab.run(store, objective))

    def heated(heat: float) -> tuple[Run, ...]:
        return soft(lambda objective: at_heat(lab, objective, heat))

    def hard(store: str) -> tuple[Run, ...]:
        return (lab.run(store, "sft"),)

    cut, whole = heated(1.0), soft(lambda objective: with_whole_laws(lab, objective))
    found = [
        Claim(says="teacher at temperature 1 over 0.7", better=cut, worse=heated(0.7)),
        Claim(says="teacher at temperature 1 over 2", better=cut, worse=heated(2.0)),
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


def with_whole_laws(lab: Lab, objective: str) -> Run:
    """On gold texts, with all that the teacher says in place of the 50 best."""
    run = lab.run("gold", objective, change=GOLD, name="whole")
    assert run.options is not None
    return replace(run, options=replace(run.options, laws="teacher"))


def judged(some: Iterable[Claim], marks: Mapping[str, Marks]) -> list[dict[str, Any]]:
    """Those of which every run is known, by its name: {says, ratio, low, high, of (so many
    settings), higher (in so many of them)}."""
    return [_judged(one, marks) for one in some if all(run.name in marks for run in one.runs)]


def _judged(claim: Claim, marks: Mapping[str, Marks]) -> dict[str, Any]:
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
    }


def _together(some: Sequence[Marks]) -> Marks:
    """One exam in more ways: settings are fixed, where seeds would be drawn anew."""
    return replace(some[0], decoded=tuple(way for one in some for way in one.chains))


def as_table(found: Iterable[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Claims of the paper, and the runs",
        "",
        "Tokens per step, means of chains of 5 and 8 at temperatures 0 and 1. Ratio: of the means "
        "over all settings (divergences, or the one of labels), with the change and without; 95 % "
        "intervals over prompts; one seed.",
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
