"""Expected acceptance of a measurement's draft models: from plain decoding's texts, by no draw."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.tiny_models import tiny_model, tiny_tokenizer

from draftsmith.bench.compare.model import read_runs
from draftsmith.bench.expected import Expectation, as_section, expectations
from draftsmith.bench.records import BASELINE
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.speedup import memory_bound_speedup, predicted_speedup, tokens_per_step
from draftsmith.core.types import TreeShape
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.provenance import append_jsonl
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

NEW = 12
SAMPLERS = (Sampler(), Sampler(temperature=0.8))
UNTIMED = {"batch_size": 3, "warmup": 0, "repeats": 1}
"""For what does not depend on costs, which are measured of single prompts alone."""


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_model().double(), tiny_tokenizer(), end_ids=frozenset({0}))


@pytest.fixture(scope="module")
def draft() -> HFTarget:
    return tiny_target(300, seed=3)


def a_bench(
    target: HFTarget,
    model: HFTarget,
    folder: Path | None = None,
    proposal: Literal["sampled", "without_replacement", "greedy"] = "sampled",
    **changes: object,
) -> Bench:
    """Measured: plain decoding, a lookup, and this draft model as a chain and as a tree. `folder`:
    for the records."""
    lookup, drafter = (
        PromptLookup(),
        Independent(Independent.Config(proposal=proposal), model=model),
    )
    for one in (lookup, drafter):
        one.bind(target)
    plan = BenchPlan(
        target=target,
        arms=(
            Arm(name=BASELINE, drafter=NoDrafter()),
            Arm(name="prompt_lookup", drafter=lookup),
            Arm(name="independent:x", drafter=drafter, shape=TreeShape.chain(3)),
            Arm(name="independent:y", drafter=drafter, shape=TreeShape(widths=(2, 1))),
        ),
        items=tuple(
            Item(prompt=str(i), tokens=(7 + i, 8, 9, 7 + i, 8), tag="ab"[i % 2]) for i in range(3)
        ),
        samplers=SAMPLERS,
        max_new_tokens=NEW,
        repeats=2,
        cost_rounds=2,
        with_transformers=False,
    )
    bench = Bench(replace(plan, **changes))
    bench.prepare()
    made = [record for lines in bench.records() for record in lines]
    if folder is not None:
        append_jsonl(folder / "records.jsonl", *made)
    return bench


@pytest.fixture(scope="module")
def bench(target: HFTarget, draft: HFTarget) -> Bench:
    return a_bench(target, draft)


@torch.inference_mode()
def logits(target: HFTarget, ids_1T: torch.Tensor) -> torch.Tensor:
    """[T, V] of the bare model."""
    with target.native() as model:
        found: torch.Tensor = model(input_ids=ids_1T).logits[0]
        return found


def of(bench: Bench) -> dict[tuple[str, float], Expectation]:
    return {(one.drafter, one.temperature): one for one in expectations(bench)}


def test_draft_models_alone_have_an_expectation_at_each_temperature(bench: Bench) -> None:
    assert set(of(bench)) == {(f"independent:{n}", t) for n in "xy" for t in (0.0, 0.8)}


def test_at_temperature_0_it_is_the_share_of_equal_first_choices(
    bench: Bench, target: HFTarget, draft: HFTarget
) -> None:
    same = total = 0
    for one in bench.baseline_outputs(SAMPLERS[0]):
        ids = torch.tensor([[*one.item.tokens, *one.tokens]])
        first, second = (logits(model, ids).argmax(-1) for model in (target, draft))
        places = slice(len(one.item.tokens) - 1, -1)
        same += int((first[places] == second[places]).sum())
        total += len(one.tokens)
    report = of(bench)["independent:x", 0.0].acceptance
    assert report.tokens == total == 3 * NEW
    assert report.alpha == pytest.approx(same / total)


def test_above_it_every_repeat_is_a_text_and_alpha_the_overlap(
    bench: Bench, target: HFTarget, draft: HFTarget
) -> None:
    said = bench.baseline_outputs(SAMPLERS[1])
    assert len(said) == 6 and len({one.tokens for one in said}) > 3
    overlaps = []
    for one in said:
        ids = torch.tensor([[*one.item.tokens, *one.tokens]])
        p, q = ((logits(model, ids) / 0.8).softmax(-1) for model in (target, draft))
        overlaps.append(torch.minimum(p, q).sum(-1)[len(one.item.tokens) - 1 : -1])
    report = of(bench)["independent:x", 0.8].acceptance
    assert report.prompts == 3
    assert report.alpha == pytest.approx(float(torch.cat(overlaps).mean()))


def test_the_closed_formulas_are_those_of_the_chain(
    bench: Bench, target: HFTarget, draft: HFTarget
) -> None:
    one = of(bench)["independent:x", 0.8]
    found, costs = one.metrics(), bench.costs
    assert costs is not None and one.gamma == found["gamma"] == 3
    tau = float(tokens_per_step(one.acceptance.alpha, 3))
    assert found["tau_predicted"] == pytest.approx(tau)
    ratio = costs.draft_seconds("independent:x", 0.8, 4) / 3 / costs.target_seconds(1)
    assert found["speedup_predicted"] == pytest.approx(float(predicted_speedup(tau, 3, ratio)))
    sizes = [sum(p.numel() for p in model.model.parameters()) for model in (draft, target)]
    assert found["memory_bound_speedup"] == pytest.approx(
        float(memory_bound_speedup(tau, 3, *sizes))
    )
    assert {"a", "b"} == set(found["by_tag"]) and not found["by_language"]
    assert found["by_tag"]["b"]["tau_predicted"] == pytest.approx(
        float(tokens_per_step(found["by_tag"]["b"]["alpha"], 3))
    )


def test_no_formula_is_used_for_trees(bench: Bench) -> None:
    chain, tree = (of(bench)[f"independent:{name}", 0.8].metrics() for name in "xy")
    assert tree["alpha"] == chain["alpha"]
    for figure in ("gamma", "tau_predicted", "speedup_predicted", "memory_bound_speedup"):
        assert tree[figure] is None
    assert tree["by_tag"]["a"]["tau_predicted"] is None


def test_the_target_as_its_own_draft_is_accepted_always(target: HFTarget) -> None:
    found = of(a_bench(target, target, **UNTIMED))["independent:x", 0.8].metrics()
    assert found["alpha"] == pytest.approx(1.0)
    assert found["tau_predicted"] == pytest.approx(4.0)
    assert found["memory_bound_speedup"] == pytest.approx(1.0)  # four tokens for four forwards


@pytest.mark.parametrize(
    ("proposal", "rule", "temperatures"),
    [
        ("sampled", "rejection", (0.0, 0.8)),
        ("without_replacement", "auto", (0.0, 0.8)),
        ("greedy", "auto", (0.0,)),
        ("sampled", "match", (0.0,)),
    ],
)
@pytest.mark.every(3)
def test_it_is_of_what_is_accepted_alone(
    target: HFTarget,
    draft: HFTarget,
    proposal: Literal["sampled", "without_replacement", "greedy"],
    rule: str,
    temperatures: tuple[float, ...],
) -> None:
    """By rejection a drawn token has this rate. By `match` it is sum p q, and p of a token that is
    no draw; without draws every rule accepts an equal choice."""
    found = of(a_bench(target, draft, proposal=proposal, rule=rule, **UNTIMED))
    assert {heat for _, heat in found} == set(temperatures)


def test_by_rejection_it_is_what_is_counted(target: HFTarget) -> None:
    """The first drafted token of every step, of a draft model that knows something."""
    near = HFTarget(tiny_model().double(), tiny_tokenizer(), end_ids=frozenset({0}))
    with near.native() as model, torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=noise).to(weight)
    drafter = Independent(Independent.Config(), model=near)
    drafter.bind(target)
    arms = (
        Arm(name=BASELINE, drafter=NoDrafter()),
        Arm(name="one", drafter=drafter, shape=TreeShape.chain(1)),
    )
    samplers = (Sampler(temperature=0.8),)
    more = {"arms": arms, "samplers": samplers, "max_new_tokens": 100}
    bench = a_bench(target, near, **UNTIMED, **more)
    alpha = of(bench)["one", 0.8].acceptance.alpha
    counted = [r for lines in bench.records() for r in lines if r.drafter == "one"]
    accepted, offered = (sum(getattr(r, n) for r in counted) for n in ("accepted", "offered"))
    assert offered > 100 and 0.1 < alpha < 0.9
    # enough draws would settle it; here it is within four standard errors of these few
    assert abs(accepted / offered - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / offered)


def test_draws_at_a_temperature_of_their_own_have_one_without_draws_alone(
    target: HFTarget, draft: HFTarget
) -> None:
    cooled = Independent(Independent.Config(draft_temperature=0.8), model=draft)
    cooled.bind(target)
    arms = (
        Arm(name=BASELINE, drafter=NoDrafter()),
        Arm(name="one", drafter=cooled, shape=TreeShape.chain(1)),
    )
    assert {heat for _, heat in of(a_bench(target, draft, **UNTIMED, arms=arms))} == {0.0}


def test_lossy_rules_have_none(target: HFTarget, draft: HFTarget) -> None:
    assert not expectations(a_bench(target, draft, rule="typical", lossy=True, **UNTIMED))


def test_texts_that_the_draft_model_cannot_read_are_left_out(target: HFTarget) -> None:
    short = tiny_target(300, seed=3, max_length=5 + NEW - 2)
    assert not expectations(a_bench(target, short, **UNTIMED))
    fitting = tiny_target(300, seed=3, max_length=5 + NEW - 1)
    found = of(a_bench(target, fitting, **UNTIMED))
    assert found["independent:x", 0.0].acceptance.prompts == 3


def test_the_page_has_a_line_for_each_and_for_its_parts(bench: Bench) -> None:
    section = as_section(expectations(bench))
    assert [row[:2] for row in section.rows[:3]] == [
        ("0", "independent:x"),
        ("0", "independent:x, a"),
        ("0", "independent:x, b"),
    ]
    assert {len(row) for row in section.rows} == {len(section.columns)}


def test_a_comparison_reads_it_whole_and_by_tag(
    target: HFTarget, draft: HFTarget, tmp_path: Path
) -> None:
    bench = a_bench(target, draft, tmp_path, **UNTIMED)
    found = of(bench)["independent:x", 0.8].metrics()
    entry = {"name": "independent:x", "temperature": 0.8, "expected": found}
    (tmp_path / "summary.json").write_text(json.dumps({"target": "t", "drafters": [entry]}))
    runs = [run for run in read_runs([tmp_path]) if run.label == "independent:x"]
    expected = {(run.decoding_temperature, run.tag): run for run in runs}
    for tag, share in ((None, found), *found["by_tag"].items()):
        run = expected[0.8, tag]
        assert (run.alpha, run.tau_predicted) == (share["alpha"], share["tau_predicted"])
        assert run.tau is not None and expected[0.0, tag].alpha is None  # not among the entries
    (tmp_path / "records.jsonl").unlink()
    (run,) = read_runs([tmp_path])
    assert run.alpha == found["alpha"]
