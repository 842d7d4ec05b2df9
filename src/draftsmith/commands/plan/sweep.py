"""`draftsmith plan sweep`: rules of thumb for the draft size, and how good they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.commands._options import LawsOptions, VerbOptions, holds_out
from draftsmith.commands._tables import (
    finish,
    interval,
    laws_of,
    say,
    show,
    show_values,
    with_spread,
    write_csv,
)
from draftsmith.provenance import start_run

if TYPE_CHECKING:
    from draftsmith.plan.sweep import PooledFit, Sweep


@dataclass(frozen=True, kw_only=True)
class PlanSweepOptions(VerbOptions):
    """Fit rules of thumb for the draft size to the optima of many settings."""

    grid: Literal["paper", "printed", "exact"] = "paper"
    """paper: what gives the paper's digits; printed: the ranges that it prints; exact: the first,
    with optima that are solved for."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    out: Path | None = None
    """Write the optima and figures to this folder."""


@holds_out
def run(options: PlanSweepOptions) -> dict[str, Any]:
    """Find the optima, fit, print, draw."""
    from draftsmith.plan.sweep import sweep

    record = start_run("plan sweep", options, out=options.out)
    law, loss = laws_of(options.laws)
    found = sweep(options.grid, law=law, loss=loss)
    if options.out is not None:
        columns = asdict(found.optima)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_csv(options.out / "optima.csv", list(columns), rows)
    _show(found)
    say(found.warnings)
    rules = {"table8": found.table8.payload(), "table9": found.table9.payload()}
    return finish(
        record,
        options.out,
        {**rules, "power_law": found.power_law, "warnings": found.warnings},
        draw=lambda plots: plots.pooled(found, with_spread(law, options.laws), loss),
    )


def _show(found: Sweep) -> None:
    _show_fit("N* / M = mu + M0 / M + gamma ln D + gamma' ln D' (Table 8)", found.table8)
    _show_fit("N* = mu M + M0 (Table 9)", found.table9)
    power = found.power_law
    show_values(
        "N* = factor M^exponent",
        {
            "factor": power.factor,
            "exponent": power.exponent,
            "95 % of the exponent": interval(power.ci95),
            "R2 in logarithms": power.r2_log,
            "R2": power.r2,
        },
    )
    if power.r2 > found.table9.r2:
        say(["the power law fits better than the line: N* / M has no limit"], "note")


def _show_fit(title: str, fit: PooledFit) -> None:
    rows = [(name, value, interval(fit.ci95[name])) for name, value in fit.estimates.items()]
    show(title, ("", "estimate", "95 %"), [*rows, ("R2", fit.r2, None)])
