"""The tables of "Speculative Decoding Scaling Laws", recomputed beside what the paper prints.

`paper_table` builds one; `pairs`, `optima` and `latencies` give the measurements behind them.

Tables 1 and 2 are measurements and are shown as they are. Of all others the printed values ship
with draftsmith; a residual is the printed value minus ours. Titles and notes are in
`data/tables.json`; a note may name values, which its table computes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import groupby

import numpy as np

from draftsmith.config import parse_count
from draftsmith.errors import InputError
from draftsmith.plan.fit import Named, NamedRange, affine_law, per_target
from draftsmith.plan.observations import DATA, Observation, read_observations
from draftsmith.plan.optimum import SizingProblem, TokenBudget, best_draft, optimal_params
from draftsmith.plan.sweep import GRIDS, sweep
from draftsmith.provenance import read_json

Cell = str | float | None
Row = Mapping[str, Cell]
"""Cells by the names of their columns."""
SEARCH_NOISE = 1e-7
"""Relative: printed N* come from a search without derivatives."""
FIT_NOISE = 2e-6
"""Margins of the power law hang on the last step of its search."""
NEW_TOKENS = 250
"""Per prompt, in the paper's latency runs (Table 6)."""
VALIDATED = "OPT-13B"
"""The target whose latencies are in Table 6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """A table with the printed values as text and the recomputed ones as numbers."""

    number: int
    title: str
    rows: Sequence[Row]
    """A mapping per row, all with the same columns."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedOptimum:
    """A row of Table 5."""

    target: str
    family: str
    """Model family of the drafts."""
    setting: SizingProblem
    """With the sizes that it was computed with."""
    as_printed: SizingProblem
    """With the sizes that are printed, of which two are not those."""
    n_opt: str
    throughput: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyPoint:
    """A row of Table 6: seconds with 95 % margins."""

    draft: str
    family: str
    params: float
    distance: float
    """|N - N*| / M, recomputed."""
    seconds: dict[str, tuple[float, float]]
    """ttft, ttot, tpot: value and margin."""


def paper_table(number: int) -> PaperTable:
    """Build one of the paper's nine tables.

    Raises:
        InputError: there is no such table, or statsmodels is needed and not installed.
    """
    if number not in TABLES:
        raise InputError(f"the paper has tables 1 to 9, not {number}")
    rows, values = TABLES[number]()
    text = read_json(DATA / "tables.json", "texts")[str(number)]
    notes = tuple(note.format(**values) for note in text["notes"])
    return PaperTable(number=number, title=text["title"], rows=rows, notes=notes)


def pairs(table: int | None = None, *, own_perplexities: bool = False) -> list[Observation]:
    """Return the 130 measured pairs (or those of Table 1 or 2).

    The two tables swap the perplexities of Qwen2.5-32B and Qwen2.5-72B. Table 3 was computed with
    those of Table 2 in all rows, which is what this gives; `own_perplexities` keeps each table's.
    """
    tables = [row["table"] for row in _rows("acceptance")]
    found = list(zip(read_observations(DATA / "acceptance.csv"), tables, strict=True))
    second = {pair.target: pair.target_ppl for pair, of in found if of == "2"}
    return [
        pair if own_perplexities else replace(pair, target_ppl=second[pair.target])
        for pair, of in found
        if table is None or of == str(table)
    ]


def optima() -> list[PrintedOptimum]:
    """Return the rows of Table 5: 13 targets with drafts of three families."""
    return [
        PrintedOptimum(
            target=row["target"],
            family=row["family"],
            setting=_problem(row),
            as_printed=_problem(row, "_printed"),
            n_opt=row["n_opt"],
            throughput=row["throughput"],
        )
        for row in printed(5)
    ]


def latencies() -> list[LatencyPoint]:
    """Return Table 6, its distances recomputed."""
    settings = {row.family: row.setting for row in optima() if row.target == VALIDATED}
    best = {family: optimal_params(setting) for family, setting in settings.items()}
    return [
        LatencyPoint(
            draft=row["draft"],
            family=(family := row["family"]),
            params=(params := float(row["params"])),
            distance=abs(params - best[family]) / settings[family].target_params,
            seconds={
                name: (float(row[name]), float(row[f"{name}_moe"]))
                for name in ("ttft", "ttot", "tpot")
            },
        )
        for row in printed(6)
    ]


def printed(table: int) -> list[dict[str, str]]:
    """Return the printed values of one of the tables 3 to 9."""
    return _rows(f"table_{table}")


def agrees(text: str, value: float) -> bool:
    """Check whether `value`, rounded to the digits of the printed `text`, is what was printed."""
    wanted = Decimal(text)
    return Decimal(repr(float(value))).quantize(wanted) == wanted


def residual(text: str, value: float) -> float:
    """Return the printed value minus ours."""
    return float(Decimal(text) - Decimal(repr(float(value))))


# --------------------------------------------------------------------------- the nine tables

Made = tuple[Sequence[Row], Mapping[str, float | str]]
"""Rows, and what the notes say of them."""
_PARTS = ("param", "moe", "low", "high")


def _measured(number: int) -> Made:
    columns = ("target", "target_ppl", "draft", "draft_ppl", "alpha", "moe")
    measured = pairs(number, own_perplexities=True)
    return [{name: getattr(pair, name) for name in columns} for pair in measured], {}


def _affine() -> Made:
    fit = affine_law(pairs(), fixed_effects=True)
    found = {"mse": fit.mse, "r2": fit.r2} | {f"{name} se": se for name, se in fit.se.items()}
    found |= _spreads({name: getattr(fit, name) for name in fit.se}, fit.moe, fit.ci95)
    clustered, within = fit.errors["cluster_target"].se["B"], fit.fixed_effects
    assert within is not None  # asked for above
    times = clustered / fit.se["B"]
    values = {"clustered": clustered, "times": times, "within": within.r2, "r2": fit.r2}
    rows, tally = _beside(3, found)
    return rows, values | tally


def _curves() -> Made:
    fits = per_target(pairs())[0]
    rows: list[Row] = []
    compared: list[tuple[str, float]] = []
    for row in printed(4):
        target, form = row.pop("target"), row.pop("form")
        fit = fits[target][form]
        assert fit is not None  # 13 targets of ten drafts each
        ours = {"mse": fit.mse, "r2": fit.r2}
        for place, (value, margin, ends) in enumerate(
            zip(fit.params, fit.moe, fit.ci95, strict=True), start=1
        ):
            for part, number in zip(_PARTS, (value, margin, *ends), strict=True):
                ours[f"{part}_{place}"] = number
        found = {name: ours[name] for name in row}
        beside = [(text, found[name]) for name, text in row.items()]
        worst = max((residual(*one) for one in beside), key=abs)
        agree = _yes(abs(worst) <= FIT_NOISE)
        rows.append({"target": target, "form": form, **found, "residual": worst, "agrees": agree})
        compared += beside
    return rows, _tally(compared)


def _optima() -> Made:
    rows: list[Row] = []
    noise, misprinted = [], []
    for row in optima():
        best = best_draft(row.setting).best
        assert best is not None
        missed = residual(row.n_opt, best.params)
        noise.append(abs(missed / best.params))
        same = agrees(row.throughput, best.throughput) and noise[-1] < SEARCH_NOISE
        rows.append(
            {
                "target": row.target,
                "family": row.family,
                "n_opt printed": row.n_opt,
                "n_opt": best.params,
                "residual": missed,
                "relative residual": missed / best.params,
                "throughput printed": row.throughput,
                "throughput": best.throughput,
                "throughput residual": residual(row.throughput, best.throughput),
                "agrees": _yes(same),
                "alpha": best.alpha,
                "gamma": best.gamma,
                "speedup": best.speedup,
                "M / N*": 1 / best.ratio,
            }
        )
        if row.as_printed != row.setting:
            misprinted.append(abs(float(row.n_opt) / optimal_params(row.as_printed) - 1))
    values = {"search": max(noise), "least": min(misprinted), "most": max(misprinted)}
    return rows, values


def _latencies() -> Made:
    records: list[Row] = []
    points = latencies()
    for point, row in zip(points, printed(6), strict=True):
        tpot = point.seconds["ttot"][0] / NEW_TOKENS
        same = agrees(row["distance"], point.distance) and agrees(row["tpot"], tpot)
        records.append(
            {
                "draft": point.draft,
                "family": point.family,
                "distance printed": row["distance"],
                "distance": point.distance,
                "tpot printed": row["tpot"],
                "tpot": tpot,
                "agrees": _yes(same),
                **{name: float(row[name]) for name in ("ttft", "ttft_moe", "ttot", "ttot_moe")},
            }
        )
    return records, {"exceptions": "; ".join(_not_rising(points))}


def _ranges() -> Made:
    used = GRIDS["paper"]
    tokens = ((used.least_tokens, used.most_tokens), used.token_counts)
    points = f"{used.draft_points_ratio} (Table 8), {used.draft_points_size} (Table 9)"
    ranges: dict[str, tuple[tuple[float, float], object]] = {
        "N": (used.draft_params, points),
        "M": (used.target_params, used.targets),
        "D": tokens,
        "D'": tokens,
    }
    return [
        {
            "parameter": (name := row["parameter"]),
            "role": row["role"],
            "range printed": row["printed_range"],
            "points printed": row["printed_points"],
            "range": "{:g} to {:g}".format(*ranges[name][0]),
            "points": str(ranges[name][1]),
        }
        for row in printed(7)
    ], {}


def _ratio_rule() -> Made:
    fit = sweep("paper").table8
    found = _spreads(fit.estimates, fit.moe, fit.ci95)
    return _beside(8, found | {"r2": fit.r2, "r2_adj": fit.r2_adj, "n": float(fit.n)})


def _size_rule() -> Made:
    found = sweep("paper")
    rule, power = found.table9, found.power_law
    values = {"factor": power.factor, "exponent": power.exponent, "r2_power": power.r2}
    quantities = {**_spreads(rule.estimates, rule.moe, rule.ci95), "r2": rule.r2}
    rows, tally = _beside(9, quantities)
    return rows, {**values, **tally, "times": 1 / rule.estimates["mu"], "r2": rule.r2}


TABLES: dict[int, Callable[[], Made]] = {
    1: partial(_measured, 1),
    2: partial(_measured, 2),
    3: _affine,
    4: _curves,
    5: _optima,
    6: _latencies,
    7: _ranges,
    8: _ratio_rule,
    9: _size_rule,
}


# --------------------------------------------------------------------------- inside


def _rows(name: str) -> list[dict[str, str]]:
    """Read one of the files that ship."""
    return list(csv.DictReader((DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()))


def _problem(row: Mapping[str, str], which: str = "") -> SizingProblem:
    """Read the sizes of a row of Table 5: those it was computed with, or those `_printed`."""
    M, target_tokens, draft_tokens = (
        parse_count(row[name], name)
        for name in ("target_params", f"target_tokens{which}", f"draft_tokens{which}")
    )
    budget = TokenBudget(amount=draft_tokens)
    return SizingProblem(target_params=M, target_tokens=target_tokens, budget=budget)


def _beside(table: int, found: Mapping[str, float]) -> tuple[list[Row], dict[str, float]]:
    """Set the printed values of a table beside the recomputed ones of the same names."""
    rows: list[Row] = []
    compared = []
    for row in printed(table):
        text, value = row["printed"], found[row["quantity"]]
        rows.append(
            {
                **row,
                "recomputed": value,
                "residual": residual(text, value),
                "agrees": _yes(agrees(text, value)),
            }
        )
        compared.append((text, value))
    return rows, _tally(compared)


def _tally(compared: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Count the printed values, and those that are ours to the last digit."""
    return {"compared": len(compared), "exact": sum(agrees(*one) for one in compared)}


def _spreads(estimates: Named, moe: Named, ci95: NamedRange) -> Named:
    """Return each estimate with its margin and the ends of its interval."""
    return {
        f"{name}{part}": number
        for name, value in estimates.items()
        for part, number in zip(
            ("", " moe", " low", " high"), (value, moe[name], *ci95[name]), strict=True
        )
    }


def _not_rising(points: Sequence[LatencyPoint]) -> Iterable[str]:
    for family, own in groupby(points, key=lambda point: point.family):
        rising = sorted(own, key=lambda point: point.distance)
        for name in ("ttft", "ttot", "tpot"):
            if np.any(np.diff([point.seconds[name][0] for point in rising]) < 0):
                yield f"{name} of {family}"


def _yes(good: bool) -> str:
    return "yes" if good else "no"
