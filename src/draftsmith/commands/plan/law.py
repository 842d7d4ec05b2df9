"""`draftsmith plan law`: how the acceptance rate follows from perplexities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from draftsmith.commands._options import VerbOptions, holds_out, parse_numbers
from draftsmith.commands._tables import finish, interval, say, show, show_values
from draftsmith.config import Leading, Many, as_dict, field_types, require
from draftsmith.provenance import start_run

if TYPE_CHECKING:
    from draftsmith.plan.fit import AffineFit


@dataclass(frozen=True, kw_only=True)
class PlanLawOptions(VerbOptions):
    """Fit the acceptance rate as a law of perplexities, pooled and per target."""

    observations: Annotated[tuple[Path, ...], Leading]
    """CSV with columns target, draft, target_ppl, draft_ppl, alpha (moe is drawn if it is there),
    or folders of `bench --perplexity`, which has one for each target; all are taken together."""
    protocol: str | None = None
    """Where a pair was measured in several ways: which one (decoded or retokenised)."""
    fixed_effects: bool = False
    """Fit a constant per target, too: what drafts do within a target."""
    predict: Many = ()
    """Draft and target perplexity, such as 18.4,11.7: predict this pair, with intervals."""
    out: Path | None = None
    """Write law.json and figures to this folder."""

    def pairs(self) -> tuple[tuple[float, float], ...]:
        """`predict` as numbers."""
        found = []
        for text in self.predict:
            draft, target = parse_numbers(text, "--predict", "DRAFT_PPL,TARGET_PPL") or (0.0, 0.0)
            good = min(draft, target) >= 1 and max(draft, target) <= 1e9
            require(good, f"--predict: perplexities are 1 or more, at most 1e9, got {text!r}")
            found.append((draft, target))
        return tuple(found)

    def validate(self) -> None:
        super().validate()
        require(bool(self.observations), "--observations must name at least one file")
        self.pairs()


@holds_out
def run(options: PlanLawOptions) -> dict[str, Any]:
    """Fit, print, draw."""
    from draftsmith.errors import naming
    from draftsmith.plan.fit import AffineFit, affine_law, per_target
    from draftsmith.plan.observations import read_observations
    from draftsmith.plan.optimum import NAMES

    record = start_run("plan law", options, out=options.out)
    observations = [
        one for path in options.observations for one in read_observations(path, options.protocol)
    ]
    curves, warnings = per_target(observations)
    pairs = {(one.target, one.target_ppl) for one in observations}
    fit = None
    if len(pairs) == 1 and len(observations) > len(NAMES) and curves and not options.predict:
        ((target, ppl),) = pairs
        lacking = (
            f"all rows are of {target} with a perplexity of {ppl:g}: B cannot be told from C; "
            "there is no law, only curves for this target; measure another one, too"
        )
        warnings = (lacking, *warnings)
    else:
        with naming(*options.observations):
            fit = affine_law(observations, fixed_effects=options.fixed_effects, at=options.pairs())
        warnings = (*fit.warnings, *warnings)
        _show(fit)
    rows = [
        (target, form, *found.params, found.mse, found.r2)
        for target, forms in curves.items()
        for form, found in forms.items()
        if found is not None
    ]
    if rows:
        show("Against draft perplexity", ("target", "curve", "p1", "p2", "MSE", "R2"), rows)
    if fit is not None and fit.predictions:
        show(
            "Predicted",
            ("draft ppl", "target ppl", "alpha", "95 % of the law", "95 % of a new pair"),
            [
                (one.draft_ppl, one.target_ppl, one.alpha, interval(one.ci95), interval(one.pi95))
                for one in fit.predictions
            ],
        )
    say(warnings)
    # where there is no law, its keys are null
    law = dict.fromkeys(field_types(AffineFit)) if fit is None else as_dict(fit)
    return finish(
        record,
        options.out,
        {**law, "per_target": curves, "warnings": warnings},
        name="law.json",
        draw=lambda plots: [
            None if fit is None else plots.plane.draw(observations, fit),
            plots.acceptance_curves.draw(observations, curves),
        ],
    )


def _show(fit: AffineFit) -> None:
    show(
        f"alpha = A draft perplexity + B target perplexity + C, {fit.n} pairs",
        ("", "estimate", "95 %", *(f"error, {kind}" for kind in fit.errors)),
        [
            (
                name,
                getattr(fit, name),
                interval(ends),
                *(errors.se[name] for errors in fit.errors.values()),
            )
            for name, ends in fit.ci95.items()
        ],
    )
    values: dict[str, str | float | None] = {"R2": fit.r2, "MSE": fit.mse}
    if fit.fixed_effects is not None:
        values["A with a constant per target"] = fit.fixed_effects.A
        values["its 95 %"] = interval(fit.fixed_effects.errors.ci95["A"])
        values["R2 with a constant per target"] = fit.fixed_effects.r2
    show_values("", values)
