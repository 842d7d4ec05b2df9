"""The tables of "Speculative Decoding Scaling Laws", recomputed beside what the paper prints.

`paper_table` builds one; `pairs`, `optima` and `latencies` give the measurements behind them.

Tables 1 and 2 are measurements and are shown as they are. Printed values that ship with draftsmith
are those of Tables 3, 6, 7 and 9 and six rows of Table 5; Tables 4 and 8 are recomputed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

import numpy as np

from draftsmith.errors import InputError
from draftsmith.plan.fit import affine_law, per_target
from draftsmith.plan.observations import (
    DATA,
    CsvRow,
    Observation,
    read_observations,
    read_rows,
)
from draftsmith.plan.optimum import SizingProblem, TokenBudget, best_draft, optimal_params
from draftsmith.plan.sweep import GRIDS, PooledFit, sweep

Cell = str | float | None
Row = Mapping[str, Cell]
"""Cells by the names of their columns."""
NEW_TOKENS = 250
"""Per prompt, in the paper's latency runs (Table 6)."""
VALIDATED = "OPT-13B"
"""The target whose latencies are in Table 6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """A table with the printed values as text and the recomputed ones as numbers."""

    number: int
    title: str
    records: tuple[Row, ...]
    """A mapping per row, all with the same columns."""
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.records[0])

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return [tuple(record.values()) for record in self.records]


def paper_table(number: int) -> PaperTable:
    """Build one of the paper's nine tables.

    Raises:
        InputError: there is no such table, or statsmodels is needed and not installed.
    """
    if number not in TABLES:
        raise InputError(f"the paper has tables 1 to 9, not {number}")
    return TABLES[number]()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedOptimum:
    """A row of Table 5."""

    target: str
    family: str
    """Model family of the drafts."""
    setting: SizingProblem
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


def pairs(table: int | None = None, *, own_perplexities: bool = False) -> list[Observation]:
    """Return the 130 measured pairs (or those of Table 1 or 2).

    The two tables swap the perplexities of Qwen2.5-32B and Qwen2.5-72B. Table 3 was computed with
    those of Table 2 in all rows, which is what this gives; `own_perplexities` keeps each table's.
    """
    path = DATA / "acceptance.csv"
    tables = [row.text("table") for row in read_rows(path, ("table",))]
    found = list(zip(read_observations(path), tables, strict=True))
    second = {pair.target: pair.target_ppl for pair, of in found if of == "2"}
    return [
        pair if own_perplexities else replace(pair, target_ppl=second[pair.target])
        for pair, of in found
        if table is None or of == str(table)
    ]


def optima() -> list[PrintedOptimum]:
    """Return the rows of Table 5 that ship."""
    return [
        PrintedOptimum(
            target=row.text("target"),
            family=row.text("family"),
            setting=SizingProblem(
                target_params=row.count_of("target_params"),
                target_tokens=row.count_of("target_tokens"),
                budget=TokenBudget(amount=row.count_of("draft_tokens")),
            ),
            n_opt=row.text("n_opt"),
            throughput=row.text("throughput"),
        )
        for row in read_rows(DATA / "table_5.csv", ("target", "family", "n_opt", "throughput"))
    ]


def latencies() -> list[LatencyPoint]:
    """Return Table 6, its distances recomputed."""
    settings = {row.family: row.setting for row in optima() if row.target == VALIDATED}
    best = {family: optimal_params(setting) for family, setting in settings.items()}
    found = []
    for row in printed(6):
        family, params = row.text("family"), row.number_of("params")
        found.append(
            LatencyPoint(
                draft=row.text("draft"),
                family=family,
                params=params,
                distance=abs(params - best[family]) / settings[family].target_params,
                seconds={
                    name: (row.number_of(name), row.number_of(f"{name}_moe"))
                    for name in ("ttft", "ttot", "tpot")
                },
            )
        )
    return found


def printed(table: int) -> list[CsvRow]:
    """Return the printed values of a table that ships them: 3, 5, 6, 7 or 9."""
    path = DATA / f"table_{table}.csv"
    if not path.exists():
        raise InputError(f"the printed values of Table {table} do not ship with draftsmith")
    return read_rows(path, ())


def agrees(text: str, value: float) -> bool:
    """Check whether `value`, rounded to the digits of the printed `text`, is what was printed."""
    wanted = Decimal(text)
    return Decimal(repr(float(value))).quantize(wanted) == wanted


# --------------------------------------------------------------------------- the nine tables


def _measured(number: int) -> PaperTable:
    columns = ("target", "target_ppl", "draft", "draft_ppl", "alpha", "moe")
    measured = pairs(number, own_perplexities=True)
    return PaperTable(
        number=number,
        title=f"Measured acceptance, {'OPT' if number == 1 else 'Qwen'} drafts",
        records=tuple({name: getattr(pair, name) for name in columns} for pair in measured),
        notes=(
            "The perplexities of Qwen2.5-32B and Qwen2.5-72B are swapped between Tables 1 and 2.",
        ),
    )


def _affine() -> PaperTable:
    fit = affine_law(pairs(), fixed_effects=True)
    classic, by_target = fit.errors["classic"], fit.errors["cluster_target"]
    found = {"mse": fit.mse, "r2": fit.r2}
    for name in ("A", "B", "C"):
        found |= _spread(name, getattr(fit, name), fit.moe[name], classic.ci95[name])
        found[f"{name} se"] = classic.se[name]
    within = fit.fixed_effects
    assert within is not None  # asked for above
    return PaperTable(
        number=3,
        title="alpha = A draft perplexity + B target perplexity + C",
        records=_beside(3, found),
        notes=(
            "Least squares over 130 pairs with the target perplexities of Table 2; t(127).",
            f"The rows of a target are not independent: clustered by target, the error of B is "
            f"{by_target.se['B']:.5f}, {by_target.se['B'] / classic.se['B']:.1f} times the "
            f"printed. With a constant per target R2 is {within.r2:.3f} instead of {fit.r2:.3f}.",
        ),
    )


def _curves() -> PaperTable:
    records: list[Row] = []
    for target, forms in per_target(pairs())[0].items():
        for form, fit in forms.items():
            if fit is None:
                continue
            record: dict[str, Cell] = {"target": target, "form": form}
            for place, (value, margin, ends) in enumerate(
                zip(fit.params, fit.moe, fit.ci95, strict=True), start=1
            ):
                parts = zip(("param", "moe", "low", "high"), (value, margin, *ends), strict=True)
                record |= {f"{part}_{place}": number for part, number in parts}
            records.append({**record, "mse": fit.mse, "r2": fit.r2})
    return PaperTable(
        number=4,
        title="alpha against draft perplexity, by target",
        records=tuple(records),
        notes=(
            "linear p1 x + p2; logarithmic p1 ln x + p2; power p1 x^p2, fitted in alpha itself. "
            "Margins are 95 %, t(8); MSE is SSR / 10.",
        ),
    )


def _optima() -> PaperTable:
    records: list[Row] = []
    for row in optima():
        best = best_draft(row.setting).best
        assert best is not None
        records.append(
            {
                "target": row.target,
                "family": row.family,
                "n_opt printed": row.n_opt,
                "n_opt": best.params,
                "relative difference": best.params / float(row.n_opt) - 1,
                "throughput printed": row.throughput,
                "throughput": best.throughput,
                "agrees": _yes(agrees(row.throughput, best.throughput)),
                "alpha": best.alpha,
                "gamma": best.gamma,
                "speedup": best.speedup,
                "M / N*": 1 / best.ratio,
            }
        )
    return PaperTable(
        number=5,
        title="The best draft size N*",
        records=tuple(records),
        notes=(
            "The printed N* carry the noise of a search without derivatives, about 1e-8. For the "
            "other rows give their sizes to `plan optimum`.",
            "The paper prints two sizes that it did not use: 3T tokens for the target Qwen1.5-14B "
            "(used: 4T), and 1.4T for Qwen2.5 drafts of LLaMa3-70B (used: 18T).",
        ),
    )


def _latencies() -> PaperTable:
    records: list[Row] = []
    points = latencies()
    for point, row in zip(points, printed(6), strict=True):
        per_token = point.seconds["ttot"][0] / NEW_TOKENS
        same = agrees(row.text("distance"), point.distance) and agrees(row.text("tpot"), per_token)
        record: dict[str, Cell] = {
            "draft": point.draft,
            "family": point.family,
            "distance printed": row.text("distance"),
            "distance": point.distance,
            "tpot printed": row.text("tpot"),
            "tpot": per_token,
            "agrees": _yes(same),
        }
        for name in ("ttft", "ttot"):
            record[name], record[f"{name}_moe"] = point.seconds[name]
        records.append(record)
    return PaperTable(
        number=6,
        title=f"Latency of {VALIDATED} against the distance from N*",
        records=tuple(records),
        notes=(
            f"distance: |N - N*| / M; tpot: ttot / {NEW_TOKENS} tokens; seconds, with 95 % "
            "margins.",
            "The paper says that latency rises with the distance. It does not for: "
            + "; ".join(_not_rising(points))
            + ". No Qwen draft near N* was measured.",
        ),
    )


def _ranges() -> PaperTable:
    used = GRIDS["paper"]
    tokens = (_range((used.least_tokens, used.most_tokens)), str(used.token_counts))
    points = f"{used.draft_points_ratio} (Table 8), {used.draft_points_size} (Table 9)"
    used_ranges = {
        "N": (_range(used.draft_params), points),
        "M": (_range(used.target_params), str(used.targets)),
        "D": tokens,
        "D'": tokens,
    }
    return PaperTable(
        number=7,
        title="The sizes that are pooled",
        records=tuple(
            {
                "parameter": row.text("parameter"),
                "role": row.text("role"),
                "range printed": row.text("printed_range"),
                "points printed": row.text("printed_points"),
                "range": used_ranges[row.text("parameter")][0],
                "points": used_ranges[row.text("parameter")][1],
            }
            for row in printed(7)
        ),
        notes=(
            "The printed ranges do not give Tables 8 and 9 (`plan sweep --grid printed`); the "
            "others do, to every printed digit.",
        ),
    )


def _ratio_rule() -> PaperTable:
    fit = sweep("paper").table8
    found = {**_quantities(fit), "r2_adj": fit.r2_adj, "n": float(fit.n)}
    return PaperTable(
        number=8,
        title="N* / M = mu + M0 / M + gamma ln D + gamma' ln D'",
        records=tuple({"quantity": name, "recomputed": value} for name, value in found.items()),
        notes=(
            "HC3 errors times 1.96. The optima are computed, not sampled: the intervals say how "
            "badly the rule fits, not how sure it is.",
        ),
    )


def _size_rule() -> PaperTable:
    found = sweep("paper")
    power = found.power_law
    return PaperTable(
        number=9,
        title="N* = mu M + M0",
        records=_beside(9, _quantities(found.table9)),
        notes=(
            f"mu is 1 / {1 / found.table9.estimates['mu']:.0f}, not the paper's 'about 200 times'.",
            f"N* = {power.factor:.3g} M^{power.exponent:.3f} fits better: R2 {power.r2:.4f}, not "
            f"{found.table9.r2:.4f}. N* / M has no limit.",
        ),
    )


TABLES: dict[int, Callable[[], PaperTable]] = {
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


def _beside(table: int, found: Mapping[str, float]) -> tuple[Row, ...]:
    """Set the printed values of a table beside the recomputed ones of the same names."""
    return tuple(
        {
            "quantity": row.text("quantity"),
            "printed": row.text("printed"),
            "recomputed": found[row.text("quantity")],
            "agrees": _yes(agrees(row.text("printed"), found[row.text("quantity")])),
        }
        for row in printed(table)
    )


def _quantities(fit: PooledFit) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in fit.estimates.items():
        found |= _spread(name, value, fit.moe[name], fit.ci95[name])
    return {**found, "r2": fit.r2}


def _spread(name: str, value: float, margin: float, ends: tuple[float, float]) -> dict[str, float]:
    low, high = ends
    return {name: value, f"{name} moe": margin, f"{name} low": low, f"{name} high": high}


def _not_rising(points: Sequence[LatencyPoint]) -> Iterable[str]:
    for family in dict.fromkeys(point.family for point in points):
        own = sorted((p for p in points if p.family == family), key=lambda point: point.distance)
        for name in ("ttft", "ttot", "tpot"):
            if np.any(np.diff([point.seconds[name][0] for point in own]) < 0):
                yield f"{name} of {family}"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g} to {ends[1]:g}"


def _yes(good: bool) -> str:
    return "yes" if good else "no"
