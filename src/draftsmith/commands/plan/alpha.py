"""`draftsmith plan alpha`: the acceptance rate of a pair, from counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import finish, interval, say, show, show_values
from draftsmith.config import Leading
from draftsmith.provenance import start_run


@dataclass(frozen=True, kw_only=True)
class PlanAlphaOptions(VerbOptions):
    """Estimate the acceptance rate of a pair from counts, and test whether it is one rate."""

    counts: Annotated[Path, Leading]
    """CSV with columns gamma, accepted_length (without the target's own token) and count, or the
    folder of a `bench --perplexity`; intervals go by prompt where there is a column of that name.
    """
    draft: str | None = None
    """The draft model to estimate, where the file has several."""
    out: Path | None = None
    """Write a figure to this folder."""


@holds_out
def run(options: PlanAlphaOptions) -> dict[str, Any]:
    """Estimate, print, draw."""
    from draftsmith.plan.acceptance import estimate
    from draftsmith.plan.observations import read_counts

    record = start_run("plan alpha", options, out=options.out)
    found = estimate(read_counts(options.counts, options.draft))
    rates = {"least squares": found.least_squares, "maximum likelihood": found.mle}
    show(
        "Acceptance rate",
        ("estimate", "alpha", "error", "95 %"),
        [(name, rate.alpha, rate.se, interval(rate.ci95)) for name, rate in rates.items()],
    )
    show_values("p-value of one rate everywhere", {"p": found.iid_p_value})
    show(
        "Measured tokens per step, the target's own included",
        ("draft length", "tokens"),
        found.tokens_per_step.items(),
    )
    depths = enumerate(found.by_depth, start=1)
    show("Accepted, given that all before were", ("depth", "rate"), depths)
    say(found.warnings)
    return finish(record, options.out, found, draw=lambda plots: [plots.acceptance.draw(found)])
