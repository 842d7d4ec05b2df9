"""`draftsmith plan fit`: the loss law of one's own training runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import finish, interval, say, show, show_values
from draftsmith.config import Leading, each_at_least
from draftsmith.core.config import check_seed
from draftsmith.provenance import start_run


@dataclass(frozen=True, kw_only=True)
class PlanFitOptions(VerbOptions):
    """Fit the loss law to your own training runs."""

    runs: Annotated[Path, Leading]
    """CSV with columns params, tokens, and loss (nats per token) or perplexity."""
    bootstrap: int = 200
    """Repeats for the intervals."""
    seed: int = 0
    """Keys the repeats."""
    out: Path | None = None
    """Write a figure to this folder."""

    def validate(self) -> None:
        super().validate()
        each_at_least(20, self, "bootstrap", most=100_000)
        check_seed(self.seed, "--seed")


@holds_out
def run(options: PlanFitOptions) -> dict[str, Any]:
    """Fit, print, draw."""
    from draftsmith.errors import naming
    from draftsmith.plan.fit import fit_loss
    from draftsmith.plan.observations import read_trained

    record = start_run("plan fit", options, seed=options.seed, out=options.out)
    models = read_trained(options.runs)
    with naming(options.runs):
        fit = fit_loss(models, bootstrap=options.bootstrap, seed=options.seed)
    found = asdict(fit)
    constants = found.pop("law")
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
    found = {**constants, **found, "loss": option}
    return finish(
        record, options.out, found, draw=lambda plots: [plots.losses.draw(models, fit.law)]
    )
