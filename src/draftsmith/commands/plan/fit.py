"""`draftsmith plan fit`: the loss law of one's own training runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftsmith.commands._plan_verbs import PlanFitOptions
from draftsmith.commands._tables import interval, say, say_written, show, show_values
from draftsmith.plan.fit import fit_loss
from draftsmith.plan.observations import naming, read_trained
from draftsmith.provenance import jsonable, start_run


def run(options: PlanFitOptions) -> dict[str, Any]:
    """Fit, print, draw."""
    record = start_run("plan fit", options, seed=options.seed)
    models = read_trained(options.runs)
    with naming(options.runs):
        fit = fit_loss(models, bootstrap=options.bootstrap, seed=options.seed)
    constants = asdict(fit.law)
    option = ",".join(f"{value:.6g}" for value in constants.values())
    show(
        f"L(N, D) = E + A / N^nu + B / D^delta, {fit.n} runs",
        ("", "estimate", "error", "95 %"),
        [
            (name, value, fit.se[name], interval(fit.ci95[name]))
            for name, value in constants.items()
        ],
    )
    show_values("", {"R2 of ln L": fit.r2_log, "RMSE of ln L": fit.rmse_log})
    say(fit.warnings)
    say([f"--loss {option}"], "for `plan optimum`")
    payload: dict[str, Any] = jsonable(
        {
            **constants,
            "se": fit.se,
            "ci95": fit.ci95,
            "rmse_log": fit.rmse_log,
            "r2_log": fit.r2_log,
            "n": fit.n,
            "loss": option,
            "warnings": fit.warnings,
        }
    )
    if options.out is not None:
        from draftsmith.plan import plots

        plots.save([plots.losses.draw(models, fit.law)], options.out)
        record.write(options.out, results=payload)
    say_written(options.out)
    return payload
