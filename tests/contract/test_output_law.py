"""The joint law of the emitted tokens is the target's: exact enumeration, end to end.

Every branch of every draw runs through `decode()`: drafter, tree, masks, cache, processors, rule,
stopping. No statistics: the total variation between two exactly computed laws is rounding.
"""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.config import kinds
from draftsmith.plan.length_policy import AdaptiveLength

from .cases import CASES, CHAIN, DRAFTERS, LOSSLESS_RULES, TREE, Case, by_case_in_brief
from .checking import check, models, support
from .reference_drafters import Sampled
from .toys import NUM_NEW, PROMPTS, SETTINGS, dense, sparse

by_case = by_case_in_brief(CASES)
by_rule = pytest.mark.parametrize("rule", LOSSLESS_RULES)


def options_for(setting: str, rule: str) -> DecodeOptions:
    return DecodeOptions(sampler=SETTINGS[setting], max_new_tokens=NUM_NEW, rule=rule)


def test_every_drafter_has_a_case() -> None:
    missing = sorted(set(kinds()) - {case.kind for case in CASES})
    assert not missing, f"tests/contract/cases.py says nothing of {missing}"


BRIEF = ("greedy", "plain", "counts", "all")
"""Enough for every edit, and where a run is costly and says little more: the suite's own drafters,
and sampled drafts under `match`, which draws from the target whatever was drafted. The other
settings with rejection are those of `test_emitted_law_with_wider_support`, on richer targets."""
ALIKE = """
    prompt_lookup-earliest lookahead lookahead-unseeded prediction prediction-then-prompt_lookup
    eagle3-dynamic hass-dynamic fspad-dynamic griffin-dynamic griffin-greedy medusa
    unrolled-dynamic
""".split()
"""Settings change laws, and these drafts have none: they are judged as those of prompt lookup and
EAGLE are, which have all settings."""


@pytest.mark.parametrize(
    ("case", "rule", "setting"),
    [
        pytest.param(case, rule, setting, marks=() if setting in BRIEF else pytest.mark.full)
        for case in CASES
        for rule in LOSSLESS_RULES
        for setting in SETTINGS
        if setting in BRIEF
        or not (
            case.kind == "reference" or case.draws or rule == "rejection" or case.label in ALIKE
        )
    ],
    ids=str,
)
@pytest.mark.every(5)
def test_emitted_law_is_the_targets_law(case: Case, rule: str, setting: str) -> None:
    target, draft_model = models(case)
    found = check(case, target, draft_model, options_for(setting, rule))
    if case.drafts and setting == "plain":
        assert 0 < found.accepted < found.offered, (
            f"{case} had {found.accepted} of {found.offered} drafted tokens accepted over all "
            "branches: this run shows nothing about acceptance or rejection"
        )


@by_rule
@by_case_in_brief(DRAFTERS)
def test_emitted_law_in_a_batch_of_one(case: Case, rule: str) -> None:
    options = dataclasses.replace(options_for("cool", rule), shape=CHAIN)
    check(case, sparse(2, 0), sparse(2, 1), options, PROMPTS[1:], batch=1)


@by_rule
@by_case
def test_emitted_law_with_an_end_token(case: Case, rule: str) -> None:
    """Sequences end at token 5, also in the middle of a draft, and never go on behind it."""
    target = sparse(support(case), 0, end_ids=frozenset({5}))
    _, draft_model = models(case)
    check(case, target, draft_model, options_for("top_k", rule))


@by_rule
@by_case
def test_emitted_law_at_the_end_of_the_context(case: Case, rule: str) -> None:
    """Rows end where the target knows no further position: after 3 tokens and after 2."""
    target = sparse(support(case), 0, max_length=7)
    _, draft_model = models(case)
    check(case, target, draft_model, options_for("top_k", rule), ((3, 1, 4, 2), PROMPTS[1]))


@by_rule
@by_case
def test_emitted_law_with_static_shapes(case: Case, rule: str) -> None:
    target, draft_model = models(case)
    options = dataclasses.replace(options_for("min_p", rule), static_shapes=True)
    check(case, target, draft_model, options)


BROAD = {
    "two of five": (TreeShape(widths=(2,)), 5, 2),
    "three of four": (TreeShape(widths=(3,)), 4, 2),
    "more children than tokens": (TreeShape(widths=(4,)), 3, 2),
    "two by two": (TreeShape(widths=(2, 2)), 2, 3),
}


@pytest.mark.parametrize("broad", BROAD)
@pytest.mark.parametrize("case", [case for case in CASES if case.shape is TREE], ids=str)
@pytest.mark.every(3)
def test_emitted_law_with_broad_trees(case: Case, broad: str) -> None:
    """Several siblings in a row are rejected, and the residual of the residual is drawn from."""
    shape, keep, num_new = BROAD[broad]
    options = DecodeOptions(
        sampler=SETTINGS["cool"], max_new_tokens=num_new, rule="rejection", shape=shape
    )
    check(case, sparse(keep, 0), sparse(keep, 1), options)


@pytest.mark.every(2)
@by_rule
@by_case
def test_emitted_law_with_adaptive_length(case: Case, rule: str) -> None:
    """A policy that looks at the row's past: longer after an acceptance."""
    target, draft_model = models(case)
    policy = AdaptiveLength(first=1, longest=2)
    options = dataclasses.replace(options_for("cool", rule), policy=policy)
    check(case, target, draft_model, options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        (case, setting)
        for case in CASES
        for setting in SETTINGS
        if setting in BRIEF or case.label not in ALIKE
    ],
    ids=str,
)
def test_emitted_law_with_wider_support(case: Case, setting: str) -> None:
    """Sampled trees with 3 possible tokens per context, sampled chains with 5, others with all.
    With rejection: `match` draws from the target whatever was drafted."""
    keep = 8 if not case.draws else 5 if case.shape.is_chain else 3
    check(case, sparse(keep, 0), sparse(keep, 1), options_for(setting, "rejection"))


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_emitted_law_of_sampled_chains_over_the_whole_vocabulary(temperature: float) -> None:
    case = next(case for case in CASES if case.label == "reference-sampled")
    sampler = Sampler(temperature=temperature)
    options = DecodeOptions(sampler=sampler, max_new_tokens=NUM_NEW, rule="rejection", shape=CHAIN)
    check(case, dense(0), dense(1), options, PROMPTS[1:])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.remembers and c.draws and c.shape.is_chain], ids=str
)
def test_emitted_law_of_chains_behind_hidden_states(case: Case, rule: str) -> None:
    """The first step has no states to draft from, so that three tokens leave room for one draft:
    of four, two may be drafted, also where a chain ends by what its first token said."""
    options = dataclasses.replace(options_for("plain", rule), max_new_tokens=4)
    found = check(case, sparse(2, 0), sparse(2, 1), options, PROMPTS[1:])
    assert 0 < found.accepted < found.offered


@pytest.mark.full
@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape(widths=(1, 2)), TREE], ids=str)
def test_emitted_law_of_four_tokens(shape: TreeShape) -> None:
    case = Case(kind="reference", label="reference", build=Sampled, shape=shape)
    options = DecodeOptions(sampler=Sampler(temperature=1.0), max_new_tokens=4, rule="rejection")
    check(case, sparse(2, 0), sparse(2, 1), options)
