"""What "Speculative Decoding Scaling Laws" measured and printed, as far as it ships."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from draftsmith.errors import InputError
from draftsmith.plan.observations import (
    DATA,
    CsvRow,
    Observation,
    read_observations,
    read_rows,
)
from draftsmith.plan.optimum import SizingProblem, TokenBudget
from draftsmith.plan.sizing import optimal_params

VALIDATED = "OPT-13B"
"""The target whose latencies are in Table 6."""


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
