"""Draft sizes to train for a budget, and what to expect of each: N* / 2, N* and 2 N*.

`ladder` chooses the sizes: one that has a name is taken where it is near; else one is built.
`compare` sets what `plan ladder` predicted beside what was measured later. Predictions are for
drafts as they are pre-trained: the acceptance law is one of perplexities, and a distilled draft is
accepted more than its perplexity suggests. Both are compared with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, FiniteFloat

from draftsmith.core.speedup import tokens_per_step
from draftsmith.errors import InputError
from draftsmith.plan.observations import Margin, Number, part_of, read_rows, typed
from draftsmith.plan.optimum import Z95, SizingProblem, best_draft, no_rate, optimal_length, speedup
from draftsmith.provenance import read_json

NEAR = 1.3
"""A size within this factor of a wanted one stands for it."""
_STEPS = (0.5, 1.0, 2.0)
"""Sizes of the rungs, in N*."""
QUANTITIES = ("alpha", "tau", "speedup")
_NO_NAMES = {"/", "..", "...", "~"}
_TOKENS = re.compile(r"tokens_per_step_([1-9][0-9]{0,5})")
PREDICTED_KIND = "pretrained"
"""The kind of draft that predictions are for."""


Metric = Annotated[FiniteFloat, Field(ge=0, le=1e9)]
Size = Annotated[FiniteFloat, Field(gt=0, le=1e30)]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction with its 95 % interval; no ends: not known."""

    value: Metric
    low: Metric | None = None
    high: Metric | None = None

    def holds(self, measured: float) -> bool | None:
        """Check whether a value lies in the interval; None: there is none."""
        if self.low is None or self.high is None:
            return None
        return self.low <= measured <= self.high

    def text(self) -> str:
        """Format the value for tables."""
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A draft of one size, and what to expect of it."""

    size: str
    """What it is called."""
    params: Size
    tokens: FiniteFloat
    draft_ppl: FiniteFloat
    alpha: Estimate
    gamma: Annotated[int, Field(ge=1)]
    """Its best whole draft length, at least 1."""
    tau: Estimate
    """Tokens per step at this length."""
    speedup: Estimate
    """Below 1: the draft slows decoding down."""
    cost_ratio: FiniteFloat
    drafts: dict[str, str]
    """Folders by kind; none before the drafts are planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """The sizes to train."""

    best_params: float | None
    """N*. None: no draft pays."""
    ci95: tuple[float, float] | None
    """Interval of N*, from the covariance of A, B, C; symmetric in ln N*. None: not known."""
    rungs: tuple[Rung, ...]
    """From small to large: N* / 2, N* and 2 N*; where no draft pays, all sizes that have names."""
    recommended: int | None
    """The fastest of them; None: no draft pays."""
    warnings: tuple[str, ...]


def ladder(
    setting: SizingProblem, named: Mapping[str, float], build: Callable[[float], tuple[str, float]]
) -> Ladder:
    """Choose the rungs around N*.

    Args:
        named: sizes that have a name, in parameters.
        build: name and parameters of a draft of about so many parameters.

    Raises:
        InputError: there is no best size by these laws (see `best_draft`), or no size that can be
            built is smaller than the target and has an acceptance rate.
    """
    sizing = best_draft(setting)
    notes = list(sizing.warnings)
    if sizing.best is None:
        best, sizes = None, dict(named)
    else:
        best = sizing.best.params
        wanted = [step * best for step in _STEPS]
        found = [_near(named, size) or build(size) for size in wanted]
        sizes = dict(found)
        _, middle = found[1]
        if not _is_near(middle, best):
            notes.append(
                f"no draft of N* = {best:.4g} parameters can be built: the nearest has {middle:.4g}"
            )
    rungs = _rungs(setting, sizes, notes)
    fastest = max(range(len(rungs)), key=lambda place: rungs[place].speedup.value)
    pays = best is not None and rungs[fastest].speedup.value > 1
    if best is not None and not pays:
        notes.append("none of the drafts that can be built makes decoding faster: train none")
    return Ladder(
        best_params=best,
        ci95=sizing.ci95,
        rungs=rungs,
        recommended=fastest if pays else None,
        warnings=tuple(notes),
    )


def rung(setting: SizingProblem, size: str, params: float) -> Rung:
    """Predict a draft of this size, whose rate by the law must lie in (0, 1).

    The interval of alpha is for a pair that has not been measured: the errors of A, B and C, and
    how far pairs lie from the law. Those of tau and speed-up follow from it at the draft length.
    """
    alpha, ppl, law = float(setting.alpha(params)), float(setting.draft_ppl(params)), setting.law
    ratio = float(setting.cost(params)) / setting.target_params
    gamma = max(1, round(float(optimal_length(alpha, ratio, integer=True))))
    rates = np.array([alpha])
    if law.cov is not None and law.residual is not None:
        place = np.array([ppl, setting.target_ppl, 1.0])
        spread = float(np.sqrt(place @ np.asarray(law.cov) @ place + law.residual**2))
        rates = np.clip([alpha, alpha - Z95 * spread, alpha + Z95 * spread], 0.0, 1.0)
    return Rung(
        size=size,
        params=params,
        tokens=float(setting.budget.tokens(params)),
        draft_ppl=ppl,
        alpha=Estimate(*rates.tolist()),
        gamma=gamma,
        tau=Estimate(*tokens_per_step(rates, gamma).tolist()),
        speedup=Estimate(*speedup(rates, gamma, ratio).tolist()),
        cost_ratio=ratio,
        drafts={},
    )


# --------------------------------------------------------------------------- inside


def _near(named: Mapping[str, float], wanted: float) -> tuple[str, float] | None:
    """Return the nearest size with a name, if it is near."""
    name = min(named, key=lambda one: abs(math.log(named[one] / wanted)), default=None)
    return None if name is None or not _is_near(named[name], wanted) else (name, named[name])


def _is_near(params: float, wanted: float) -> bool:
    return abs(math.log(params / wanted)) <= math.log(NEAR)


def _rungs(
    setting: SizingProblem, sizes: Mapping[str, float], notes: list[str]
) -> tuple[Rung, ...]:
    """Build the rungs that can draft, from small to large; add warnings about others to `notes`."""
    lost = {name: why for name, params in sizes.items() if (why := _unfit(setting, params))}
    usable = sorted((name for name in sizes if name not in lost), key=sizes.__getitem__)
    if usable:
        left_out = "{} ({:.4g} parameters) is left out: {}"
        notes += [left_out.format(name, sizes[name], why) for name, why in lost.items()]
        return tuple(rung(setting, name, sizes[name]) for name in usable)
    M = setting.target_params
    small = np.array([params for params in sizes.values() if params < M])
    if len(small) and not np.any(setting.alpha(small) > 0):
        raise InputError(no_rate(setting, small))
    listed = ", ".join(f"{name} ({params:.3g})" for name, params in sizes.items())
    raise InputError(
        f"no draft that can be built is smaller than a target of {M:.4g} parameters and has an "
        f"acceptance rate between 0 and 1 by this law: tried {listed}; fit laws of your own with "
        "`plan law` and `plan fit`"
    )


def _unfit(setting: SizingProblem, params: float) -> str:
    """Explain why a size cannot draft; empty: it can."""
    if params >= setting.target_params:
        return "it is not smaller than the target"
    alpha = float(setting.alpha(params))
    return "" if 0 < alpha < 1 else f"the law gives it an acceptance of {alpha:.3g}"


# --------------------------------------------------------------------------- what was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one file says of one draft."""

    draft: str
    temperature: float | None
    values: dict[tuple[str, int | None], Estimate]
    """By quantity, and by the draft length that it holds for; None: of several, or not known."""
    source: str
    """The file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benched:
    """What a bench says of a drafter at a temperature, as its summary names it."""

    name: str
    temperature: Annotated[FiniteFloat, Field(ge=0)]
    alpha: Metric | None = None
    tokens_per_step: Metric | None = None
    speedup: Metric | None = None
    speedup_ci95: tuple[Metric, Metric] | None = None
    lossy_rule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observed:
    draft: str
    alpha: Annotated[Number, Field(ge=0, le=1)]
    moe: Margin | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RungComparison:
    """A metric, predicted and measured."""

    size: str
    params: float
    kind: str
    quantity: str
    temperature: float | None
    predicted: Estimate
    measured: Estimate
    inside: bool | None
    """The measured value lies in the predicted interval; None: there is none."""
    source: str


def read_predictions(path: Path) -> tuple[Rung, ...]:
    """Read the rungs of a ladder.json.

    Raises:
        InputError: the file, or one of its rungs, cannot be used; the key is named.
    """
    content = read_json(path, "predictions")
    rungs = content.get("rungs") if isinstance(content, dict) else None
    if not isinstance(rungs, list) or not rungs:
        raise InputError(f"{path} holds no 'rungs': expected what `plan ladder` writes")
    numbered = enumerate(rungs, start=1)
    return tuple(part_of(Rung, values, f"{path}, rung {number}") for number, values in numbered)


def read_rates(path: Path) -> Iterator[Measured]:
    """Read the acceptance and the tokens per step of whole drafts from an observations.csv."""
    for place, row in read_rows(path, ("target", "draft", "alpha")).items():
        if row.get("protocol", "decoded") != "decoded":
            continue
        one = typed(_Observed, place, row)
        rate = [one.alpha]
        if one.moe is not None:
            rate += [max(one.alpha - one.moe, 0.0), min(one.alpha + one.moe, 1.0)]
        values: dict[tuple[str, int | None], Estimate] = {("alpha", None): Estimate(*rate)}
        lengths = {name: int(by[1]) for name in row if (by := _TOKENS.fullmatch(name))}
        tokens = typed(dict[str, Number], place, {name: row[name] for name in lengths})
        values |= {("tau", lengths[name]): Estimate(value) for name, value in tokens.items()}
        source, temperature = str(path), one.temperature
        yield Measured(draft=one.draft, temperature=temperature, values=values, source=source)


def compare(
    predictions: Sequence[Rung], found: Iterable[Measured]
) -> tuple[tuple[RungComparison, ...], tuple[str, ...]]:
    """Compare what was measured with what was predicted; warn about what has no counterpart.

    The first value of a draft counts, so better sources come first.

    Raises:
        InputError: a measured draft may be several predicted ones, or a predicted one several
            measured ones.
    """
    out: dict[tuple[str, str, float | None], RungComparison] = {}
    notes = []
    places = {folder: (one, kind) for one in predictions for kind, folder in one.drafts.items()}
    seen: dict[str, str] = {}
    for measured in found:
        name = _folder_of(measured.draft, places)
        if name is None:
            continue
        first = seen.setdefault(name, measured.draft)
        if not _may_be(first, measured.draft):
            raise InputError(
                f"{first} and {measured.draft} may both be the predicted draft {name}: give "
                "--records of one of them"
            )
        prediction, kind = places[name]
        for (quantity, gamma), value in measured.values.items():
            if quantity != "alpha" and gamma != prediction.gamma:
                if quantity == "speedup":
                    drafted = "no fixed number of" if gamma is None else gamma
                    notes.append(
                        f"{measured.source}: {name} drafted {drafted} tokens, predictions are for "
                        f"{prediction.gamma}: its speed-up is left out"
                    )
                continue
            predicted: Estimate = getattr(prediction, quantity)
            row = RungComparison(
                size=prediction.size,
                params=prediction.params,
                kind=kind,
                quantity=quantity,
                temperature=measured.temperature,
                predicted=predicted,
                measured=value,
                inside=predicted.holds(value.value),
                source=measured.source,
            )
            out.setdefault((name, quantity, measured.temperature), row)
    rows = sorted(
        out.values(),
        key=lambda row: (QUANTITIES.index(row.quantity), row.kind != PREDICTED_KIND, row.params),
    )
    return tuple(rows), tuple(notes)


def _folder_of(draft: str, folders: Iterable[str]) -> str | None:
    """Find the predicted draft that a measured one is."""
    found = [folder for folder in folders if _may_be(draft, folder)]
    if len(found) > 1:
        raise InputError(
            f"{draft} may be any of the predicted drafts {', '.join(found)}: name its folder"
        )
    return found[0] if found else None


def _may_be(one: str, other: str) -> bool:
    """Check whether two folders may be the same: records name a folder from where
    the bench ran, and may leave out what is above it."""
    pairs = zip(_parts(one), _parts(other), strict=False)
    return all(mine == theirs for mine, theirs in pairs)


def _parts(folder: str) -> list[str]:
    """Return the parts of a path from the last one up, as far as they are names."""
    parts = reversed(Path(folder.removeprefix("independent:")).parts)
    return list(takewhile(lambda part: part not in _NO_NAMES, parts))
