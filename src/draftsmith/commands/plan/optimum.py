"""`draftsmith plan optimum`: the draft size worth training for a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.commands._options import LawsOptions, VerbOptions, holds_out
from draftsmith.commands._tables import extrapolated, finish, interval, laws_of, say, show_values
from draftsmith.config import parse_count, positive, require, unused
from draftsmith.provenance import start_run

if TYPE_CHECKING:
    from draftsmith.plan.optimum import Draft


@dataclass(frozen=True, kw_only=True)
class PlanOptimumOptions(VerbOptions):
    """Say which draft size is worth training for a target, and what it will give."""

    target_params: str
    """Parameters of the target: 1.3e10, 12853473280 or 13B (K, M, B, T)."""
    target_tokens: str
    """Tokens that the target was trained on, in the same forms."""
    draft_tokens: str
    """Tokens that the draft is to be trained on."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    integer: bool = False
    """Whole draft lengths only, as decoding has them."""
    draft_params: str | None = None
    """Say what a draft of this size gives, too."""
    cost_ratio: float | None = None
    """With --draft-params: measured seconds of one draft pass over those of one target pass, in
    place of the ratio of sizes."""
    cost_floor: float | None = None
    """Measured seconds of a pass of a small draft over those of a target pass: no size is taken to
    cost less than this."""
    out: Path | None = None
    """Write figures to this folder."""

    def validate(self) -> None:
        super().validate()
        target = parse_count(self.target_params, "--target-params")
        for name in ("target_tokens", "draft_tokens"):
            parse_count(getattr(self, name), f"--{name.replace('_', '-')}")
        if self.draft_params is None:
            unused("--cost-ratio", self.cost_ratio, None, "--draft-params")
        else:
            draft = parse_count(self.draft_params, "--draft-params")
            require(draft < target, f"--draft-params must be below --target-params, got {draft:g}")
        for name in ("cost_ratio", "cost_floor"):
            positive(f"--{name.replace('_', '-')}", getattr(self, name))


@holds_out
def run(options: PlanOptimumOptions) -> dict[str, Any]:
    """Solve, print, draw."""
    from draftsmith.plan.optimum import SizingProblem, TokenBudget, best_draft, draft_of

    record = start_run("plan optimum", options, out=options.out)
    law, loss = laws_of(options.laws)
    integer, M = options.integer, parse_count(options.target_params, "--target-params")
    tokens = parse_count(options.draft_tokens, "--draft-tokens")
    setting = SizingProblem(
        target_params=M,
        target_tokens=parse_count(options.target_tokens, "--target-tokens"),
        budget=TokenBudget(amount=tokens, name="--draft-tokens"),
        law=law,
        loss=loss,
        cost_floor=options.cost_floor or 0.0,
    )
    sizing = best_draft(setting, integer=integer)
    draft = None
    if options.draft_params is not None:
        params = parse_count(options.draft_params, "--draft-params")
        draft = draft_of(setting, params, cost_ratio=options.cost_ratio, integer=integer)
    warnings = [*sizing.warnings, *extrapolated(law, M)]
    if draft is not None and draft.gamma == 0:
        warnings.append(f"a draft of {draft.params:.4g} parameters does not make decoding faster")
    best = sizing.best
    if best is not None:
        values = _values(best)
        values["95 % of N*"] = interval(sizing.ci95)
        if sizing.sensitivity is not None:
            changes = (f"{value:.3f}" for value in sizing.sensitivity.values())
            values["d ln N* / d ln A, B, C"] = ", ".join(changes)
        show_values("The best draft", values)
    given = None
    if draft is not None:
        distance = None if best is None else abs(draft.params - best.params) / M
        given = {**asdict(draft), "distance": distance}
        show_values("The given draft", _values(draft))
    say(warnings)
    plain: dict[str, Any] = dict.fromkeys(("params", "ratio", "alpha"))
    plain |= {"gamma": 0 if integer else 0.0, "throughput": 1 / (2 * M), "speedup": 1.0}
    found = asdict(sizing)
    chosen = found.pop("best") or plain
    n_opt = chosen.pop("params")
    payload = {"n_opt": n_opt, **chosen, **found, "draft": given, "warnings": warnings}
    # at a measured cost a draft is not on the curve
    available = (draft.params,) if draft and options.cost_ratio is None else ()
    return finish(
        record,
        options.out,
        payload,
        draw=lambda plots: [plots.optimum.draw(setting, sizing, available)],
    )


def _values(draft: Draft) -> dict[str, str | float | None]:
    return {
        "parameters N": f"{draft.params:.6g} (1 / {1 / draft.ratio:.0f} of the target)",
        "acceptance rate": draft.alpha,
        "draft length": draft.gamma,
        "predicted speed-up": draft.speedup,
        "throughput (tokens per unit of memory-bound time)": draft.throughput,
    }
