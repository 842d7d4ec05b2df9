"""Expected acceptance of a measurement's draft models, computed without any draw.

The output of plain decoding is drawn from the target's own distribution at that temperature. So the
probabilities of both models along it give the acceptance rate of decoding (`distill.acceptance`)
and DistillBeam's sequence-level rate (eq. 10). The closed formulas predict tokens per step and
speed-ups from it (eq. 11 and 12).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.pairs import parameters_of
from draftsmith.bench.records import short_name
from draftsmith.bench.run import BaselineOutput, Bench
from draftsmith.bench.summary import Section, number, times
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.speedup import memory_bound_speedup
from draftsmith.core.types import Proposal
from draftsmith.core.verify_step import make_rule
from draftsmith.distill.acceptance import AcceptanceReport, measure_acceptance
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.targets.base import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """The expected acceptance of one draft model at one temperature."""

    drafter: str
    """As in the records."""
    temperature: float
    acceptance: AcceptanceReport
    gamma: int | None
    """Length of its chains; None for trees and varying lengths, which no closed formula covers."""
    cost_ratio: float | None
    """Cost of a draft forward / of a target forward; None: not known."""
    memory_bound_speedup: float | None
    """The speed-up of the predicted tokens per step (Direct Alignment's MBSU)."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        found = self.acceptance.results(self.gamma, self.cost_ratio)
        return {**found, "memory_bound_speedup": self.memory_bound_speedup}


def expectations(bench: Bench) -> tuple[Expectation, ...]:
    """Compute the expectations of arms that draw from a language model and accept by its q: of
    others the overlap of the laws is not what is accepted. They are those of rejection; `block`
    accepts more."""
    return tuple(
        found
        for arm in bench.plan.arms
        for sampler in bench.plan.samplers
        if (found := _expectation(bench, arm, sampler)) is not None
    )


def _expectation(bench: Bench, arm: Arm, sampler: Sampler) -> Expectation | None:
    drafter, target = arm.drafter, bench.plan.target
    found = drafter.drawn_from(sampler)
    rule = make_rule(bench.plan.rule, Proposal.SAMPLED)
    # p against q is the overlap; without draws all lossless rules accept the same
    by_overlap = rule.needs_q or (sampler.temperature == 0 and not rule.lossy)
    if found is None or not by_overlap:
        return None
    draft, ids = found
    texts = list(_texts(bench.baseline_outputs(sampler), target, draft))
    if not any(text.tokens for text in texts):
        return None
    shape = arm.used_shape
    gamma = shape.depth if shape.is_chain and shape.depth and arm.policy is None else None
    acceptance = measure_acceptance(
        target, draft, texts, sampler, batch_size=bench.plan.batch_size, vocabularies=ids
    )
    tau = acceptance.results(gamma)["tau_predicted"]
    sizes = [size for model in (draft, target) if (size := parameters_of(model)) is not None]
    bound = memory_bound_speedup(tau, gamma, *sizes) if gamma and len(sizes) == 2 else None
    return Expectation(
        drafter=arm.name,
        temperature=sampler.temperature,
        acceptance=acceptance,
        gamma=gamma,
        cost_ratio=None if gamma is None else _cost_ratio(bench, arm.name, sampler, gamma),
        memory_bound_speedup=None if bound is None else float(bound),
    )


def _texts(outputs: list[BaselineOutput], target: Target, draft: Target) -> Iterator[Trajectory]:
    """Yield the texts that both models can read to their last token but one."""
    contexts = [model.max_length for model in (target, draft) if model.max_length is not None]
    for one in outputs:
        if len(one.item.tokens) + len(one.tokens) - 1 <= min(contexts, default=math.inf):
            yield Trajectory(
                prompt_id=f"{one.item.prompt}, turn {one.item.turn}",
                forcing="sample",
                prompt=one.item.tokens,
                tokens=one.tokens,
                score=math.nan,  # not used
                language=one.item.language,
                tag=one.item.tag,
            )


def _cost_ratio(bench: Bench, name: str, sampler: Sampler, gamma: int) -> float | None:
    """Return the cost of a draft forward / a target forward by the cost table; None without one."""
    if bench.costs is None:
        return None
    drafting = bench.costs.draft_seconds(name, sampler.temperature, 1 + gamma)
    return drafting / gamma / bench.costs.target_seconds(1)


def as_section(found: tuple[Expectation, ...]) -> Section:
    """Lay the expectations out for the page, by language and tag where prompts have any."""
    return Section(
        title="Expected acceptance of draft models",
        sentences=(
            "The probability that a drafted token is accepted, sum min(p, q), averaged over the "
            "output of plain decoding; no draw is in it. Tokens per step and speed-ups follow by "
            "closed formulas for chains, as if it were the same at every place and each token were "
            "judged by itself.",
        ),
        columns=(
            *("temperature", "draft model", "per token", "per text (eq. 10)"),
            *("tokens per step (eq. 11)", "speed-up (eq. 12)", "memory-bound speed-up"),
        ),
        rows=tuple(row for one in found for row in _rows(one)),
    )


def _rows(one: Expectation) -> Iterator[tuple[str, ...]]:
    known = one.metrics()
    temperature, name = f"{one.temperature:g}", short_name(one.drafter)
    yield (
        temperature,
        name,
        f"{known['alpha']:.3f}",
        f"{known['alpha_sequence']:.3f}",
        number(known["tau_predicted"]),
        times(known["speedup_predicted"]),
        times(known["memory_bound_speedup"]),
    )
    for kind in ("by_language", "by_tag"):
        for part, share in known[kind].items():
            tau = number(share["tau_predicted"])
            yield (temperature, f"{name}, {part}", f"{share['alpha']:.3f}", "", tau, "", "")
