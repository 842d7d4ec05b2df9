"""Speed-ups by the clock: all arms interleaved in one process, as `draftsmith bench` does."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation import Evaluation

from draftsmith.bench.records import BASELINE, DrafterMetrics, drafter_metrics
from draftsmith.bench.run import Bench, BenchPlan, make_items
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.hf import HFTarget


def by_the_clock(
    target: HFTarget, arms: Sequence[Arm], exam: Evaluation, temperature: float, *, repeats: int
) -> tuple[DrafterMetrics, ...]:
    """Time plain decoding and these arms on the evaluation's prompts. The machine must be idle."""
    bench = Bench(
        BenchPlan(
            target=target,
            arms=(Arm(name=BASELINE, drafter=NoDrafter()), *arms),
            items=make_items(exam.read(), target, exam.max_new_tokens),
            samplers=(Sampler(temperature=temperature),),
            max_new_tokens=exam.max_new_tokens,
            repeats=repeats,
            with_transformers=False,
        )
    )
    bench.prepare()
    return drafter_metrics([record for round_ in bench.records() for record in round_])
