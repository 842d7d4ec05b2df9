"""`draftsmith plan optimum`: the draft size worth training for a target."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftsmith.commands._plan_verbs import PlanOptimumOptions
from draftsmith.commands._tables import (
    extrapolated,
    interval,
    laws_of,
    say,
    say_written,
    show_values,
)
from draftsmith.plan.optimum import SizingProblem, TokenBudget
from draftsmith.plan.sizing import Draft, Sizing, best_draft, draft_of
from draftsmith.provenance import jsonable, start_run


def run(options: PlanOptimumOptions) -> dict[str, Any]:
    """Solve, print, draw."""
    record = start_run("plan optimum", options)
    target_params, target_tokens, draft_tokens, draft_params = options.sizes()
    law, loss = laws_of(options.laws)
    setting = SizingProblem(
        target_params=target_params,
        target_tokens=target_tokens,
        budget=TokenBudget(amount=draft_tokens, name="--draft-tokens"),
        law=law,
        loss=loss,
        cost_floor=options.cost_floor or 0.0,
    )
    sizing = best_draft(setting, integer=options.integer)
    draft = None
    if draft_params is not None:
        draft = draft_of(
            setting, draft_params, cost_ratio=options.cost_ratio, integer=options.integer
        )
    said = [*sizing.warnings, *_doubts(setting, draft)]
    payload = _payload(setting, sizing, draft, said, integer=options.integer)
    if options.out is not None:
        from draftsmith.plan import plots

        # at a measured cost a draft is not on the curve
        available = (draft.params,) if draft and options.cost_ratio is None else ()
        plots.save([plots.optimum.draw(setting, sizing, available)], options.out)
        record.write(options.out, results=payload)
    _show(sizing, draft)
    say(said)
    say_written(options.out)
    return payload


def _payload(
    setting: SizingProblem, sizing: Sizing, draft: Draft | None, said: list[str], *, integer: bool
) -> dict[str, Any]:
    best = sizing.best
    payload: dict[str, Any] = {
        "n_opt": None if best is None else best.params,
        "ratio": None if best is None else best.ratio,
        "alpha": None if best is None else best.alpha,
        "gamma": 0.0 if best is None else best.gamma,
        "throughput": 1 / (2 * setting.target_params) if best is None else best.throughput,
        "speedup": 1.0 if best is None else best.speedup,
        "ci95": sizing.ci95,
        "se": sizing.se,
        "sensitivity": sizing.sensitivity,
        "draft": None,
        "warnings": said,
    }
    if draft is not None:
        distance = None if best is None else abs(draft.params - best.params) / setting.target_params
        payload["draft"] = {**asdict(draft), "distance": distance}
    for entry in (payload, payload["draft"]):
        if integer and entry is not None:
            entry["gamma"] = round(entry["gamma"])
    plain: dict[str, Any] = jsonable(payload)
    return plain


def _doubts(setting: SizingProblem, draft: Draft | None) -> list[str]:
    said = extrapolated(setting.law, setting.target_params)
    if draft is not None and draft.gamma == 0:
        said.append(f"a draft of {draft.params:.4g} parameters does not make decoding faster")
    return said


def _show(sizing: Sizing, draft: Draft | None) -> None:
    if sizing.best is not None:
        values = _values(sizing.best)
        values["95 % of N*"] = interval(sizing.ci95)
        if sizing.sensitivity is not None:
            values["d ln N* / d ln A, B, C"] = ", ".join(
                f"{value:.3f}" for value in sizing.sensitivity.values()
            )
        show_values("The best draft", values)
    if draft is not None:
        show_values("The given draft", _values(draft))


def _values(draft: Draft) -> dict[str, str | float | None]:
    return {
        "parameters N": f"{draft.params:.6g} (1 / {1 / draft.ratio:.0f} of the target)",
        "acceptance rate": draft.alpha,
        "draft length": draft.gamma,
        "predicted speed-up": draft.speedup,
        "throughput (tokens per unit of memory-bound time)": draft.throughput,
    }
