"""What `validation.py` predicts: acceptance by a law of the others, speed-up by two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.bench.records import RunRecord, bootstrap_interval, paired_paces, weighted_speedup
from draftsmith.core.speedup import tokens_per_step
from draftsmith.plan.fit import FORMS, fit_form
from draftsmith.plan.length_policy import StepCosts

FORM = "logarithmic"
"""The form of the scaling laws that predict; the other forms are reported, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A draft with what was measured of it."""

    name: str
    params: float
    ppl: float
    alpha: float
    predicted_alpha: float | None
    """By the law of the other drafts; None: it could not be fitted."""
    tokens_per_step: tuple[float, ...]
    """Counted, for drafts of 1, 2, ... tokens."""
    costs: StepCosts

    def by_parameters(self, alpha: float, length: int, target_params: float) -> float:
        """The memory-bound model: a pass costs its parameters."""
        tau = float(tokens_per_step(alpha, length))
        return tau / (1 + length * self.params / target_params)

    def by_costs(self, alpha: float, length: int) -> float:
        tau = float(tokens_per_step(alpha, length))
        return tau * self.costs.seconds(0) / self.costs.seconds(length)


def laws(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """All forms through all drafts."""
    x, alpha = _columns(rows)
    return {form: fit_form(form, x, alpha) for form in FORMS}


def without(rows: Sequence[Mapping[str, str]], place: int) -> float | None:
    """Acceptance of one draft by the law of the others."""
    x, alpha = _columns(rows)
    others = np.arange(len(rows)) != place
    fit = fit_form(FORM, x[others], alpha[others])
    return None if fit is None else float(FORMS[FORM](x[place : place + 1], *fit.params)[0])


def best_sizes(drafts: Sequence[Draft], target_params: float) -> dict[str, Any]:
    """Where each model has its optimum, among the five and between them.

    Between them ln perplexity is linear in ln N, and seconds are linear in N.
    """
    logs = np.log([one.params for one in drafts])
    grid = np.linspace(logs[0], logs[-1], 401)
    ppl = np.exp(np.interp(grid, logs, np.log([one.ppl for one in drafts])))
    fit = fit_form(FORM, *(np.array([getattr(d, k) for d in drafts]) for k in ("ppl", "alpha")))
    if fit is None:
        return {}
    alpha = np.clip(FORMS[FORM](ppl, *fit.params), 0.0, 1.0)
    sizes = np.exp(grid)
    params = np.array([one.params for one in drafts])
    curves: dict[str, list[Any]] = {"parameters": [], "costs": []}
    for length in range(1, len(drafts[0].tokens_per_step) + 1):
        tau = tokens_per_step(alpha, length)
        seconds = [one.costs.seconds(length) / one.costs.seconds(0) for one in drafts]
        curves["parameters"].append(tau / (1 + length * sizes / target_params))
        curves["costs"].append(tau / np.interp(sizes, params, seconds))
    out = {}
    for name, found in curves.items():
        best, place = map(int, np.unravel_index(np.argmax(found), np.shape(found)))
        out[name] = {
            "params": float(sizes[place]),
            "length": best + 1,
            "speedup": float(found[best][place]),
            "at_the_edge": place in (0, len(grid) - 1),
        }
    return out


def entry(draft: Draft, row: Mapping[str, str], target_params: float) -> dict[str, Any]:
    """Measured, and predicted by both models at the law's acceptance."""
    alpha = draft.alpha if draft.predicted_alpha is None else draft.predicted_alpha
    alpha = min(max(alpha, 0.0), 1.0)
    lengths = range(1, len(draft.tokens_per_step) + 1)
    by_parameters = [draft.by_parameters(alpha, n, target_params) for n in lengths]
    by_costs = [draft.by_costs(alpha, n) for n in lengths]
    return {
        "name": draft.name,
        "params": draft.params,
        "ppl": draft.ppl,
        "ppl_moe": float(row["draft_ppl_moe"] or "nan"),
        "alpha": draft.alpha,
        "alpha_moe": float(row["moe"] or "nan"),
        "alpha_least_squares": float(row["alpha_least_squares"] or "nan"),
        "alpha_by_the_others": draft.predicted_alpha,
        "tokens_per_step": draft.tokens_per_step,
        "cost_by_parameters": draft.params / target_params,
        "cost_measured": draft.costs.draft_D[1]
        / (draft.costs.target_D[0] + draft.costs.draft_D[0]),
        "step_seconds": [draft.costs.seconds(n) for n in (0, *lengths)],
        "by_parameters": _best(by_parameters),
        "by_costs": _best(by_costs),
    }


def verdict(entries: Sequence[dict[str, Any]], records: Sequence[RunRecord] = ()) -> dict[str, Any]:
    """Which draft each model and the clock like best, and where the models part.

    The fastest is tied with every draft that its speed cannot be told from: by the ratio of both
    over the same prompts where there are records, else by intervals that overlap.
    """

    def first(value: Any) -> str:
        return str(max(entries, key=value)["name"])

    def fastest(one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = one["measured"]
        return max(found.items(), key=lambda item: float(item[1]["speedup"]))

    arms = {one["name"]: fastest(one) for one in entries}
    best = max(arms, key=lambda name: arms[name][1]["speedup"])
    faster = {
        name: _faster(records, f"{best}:{arms[best][0]}", f"{name}:{length}")
        for name, (length, _) in arms.items()
        if name != best
    }
    tied = [
        name
        for name, ratio in faster.items()
        if (_overlap(arms[best][1], arms[name][1]) if ratio is None else ratio["ci95"][0] <= 1)
    ]
    return {
        "by_parameters": first(lambda one: one["by_parameters"]["speedup"]),
        "by_costs": first(lambda one: one["by_costs"]["speedup"]),
        "by_the_clock": best,
        "tied_by_the_clock": tied,
        "faster_than": faster,
        "by_time_per_token": str(
            min(
                entries,
                key=lambda one: min(
                    length["latency"]["tpot"][0] for length in one["measured"].values()
                ),
            )["name"]
        ),
        "disagree_on_the_length": [
            one["name"]
            for one in entries
            if one["by_parameters"]["length"] != one["by_costs"]["length"]
        ],
        "disagree_on_whether_it_pays": [
            one["name"]
            for one in entries
            if (one["by_parameters"]["speedup"] > 1) != (one["by_costs"]["speedup"] > 1)
        ],
    }


def _faster(records: Sequence[RunRecord], best: str, other: str) -> dict[str, Any] | None:
    """How much faster the one is than the other over the same prompts; None: not recorded."""
    paces = paired_paces(
        *([one for one in records if one.drafter == name] for name in (other, best))
    )
    ratio, ends = weighted_speedup(paces), bootstrap_interval(paces)
    return None if ratio is None or ends is None else {"ratio": ratio, "ci95": list(ends)}


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two speed-ups cannot be told apart; true where one has no interval."""
    if one["speedup_ci95"] is None or other["speedup_ci95"] is None:
        return True
    (low, high), (least, most) = one["speedup_ci95"], other["speedup_ci95"]
    return bool(low <= most and least <= high)


def _columns(rows: Sequence[Mapping[str, str]]) -> tuple[Any, Any]:
    ppl, alpha = (np.array([float(row[name]) for row in rows]) for name in ("draft_ppl", "alpha"))
    return ppl, alpha


def _best(values: Sequence[float]) -> dict[str, Any]:
    length = int(np.argmax(values)) + 1
    return {"length": length, "speedup": values[length - 1], "by_length": list(values)}
