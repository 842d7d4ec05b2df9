"""`draftsmith plan alpha`: the acceptance rate of a pair, from counts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftsmith.commands._plan_verbs import PlanAlphaOptions
from draftsmith.commands._tables import interval, say, say_written, show, show_values
from draftsmith.plan.acceptance import estimate
from draftsmith.plan.observations import read_counts
from draftsmith.provenance import jsonable, start_run


def run(options: PlanAlphaOptions) -> dict[str, Any]:
    """Estimate, print, draw."""
    record = start_run("plan alpha", options)
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
    payload: dict[str, Any] = jsonable(asdict(found))
    if options.out is not None:
        from draftsmith.plan import plots

        plots.save([plots.acceptance.draw(found)], options.out)
        record.write(options.out, results=payload)
    say_written(options.out)
    return payload
