"""Chi-square with the real keyed noise: what enumeration assumes of it, independence, is tested.

False alarms: see `statistics.py`; all seeds are fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.law import Noise, Purpose, Rows
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.targets.toy import TabularTarget

from .cases import CASES, CHAIN, LOSSLESS_RULES, TREE, Case
from .oracle import exact_law, joint_law
from .statistics import FastSampled, Plain, assert_law, chi_square, emitted
from .toys import PROMPTS, dense

V_NARROW = 16


def check_narrow(rule: str, num_trials: int, *, shape: TreeShape = CHAIN) -> float:
    """Draft = -target, where most drafts are rejected and shared noise shows most: the law of each
    token, and of pairs of neighbours. Returns the share of drafts that were accepted."""
    target = Plain(V_NARROW, seed=3)
    drafter = FastSampled(Plain(V_NARROW, seed=3, negated=True))
    sampler = Sampler(temperature=1.0)
    options = DecodeOptions(sampler=sampler, max_new_tokens=3, rule=rule, shape=shape, seed=11)
    tokens, share = emitted(target, drafter, options, num_trials, batch=8192)
    probs_V = exact_law(target.table_CV[0].numpy(), sampler, [], 0)
    for place in range(3):
        seen = np.bincount(tokens[:, place], minlength=V_NARROW)
        assert_law(seen, probs_V, f"rule {rule}, token {place}")
    for place in range(2):
        pairs = np.bincount(
            tokens[:, place] * V_NARROW + tokens[:, place + 1], minlength=V_NARROW**2
        )
        both = np.outer(probs_V, probs_V).ravel()
        assert_law(pairs, both, f"rule {rule}, tokens {place} and {place + 1}")
    return share


def check_wide(
    vocab: int, num_trials: int, temperature: float, shape: TreeShape, rule: str, *, wide: bool
) -> None:
    """Draft and target are different random laws over a large vocabulary, position by position."""
    target, sampler = Plain(vocab, seed=5, wide=wide), Sampler(temperature=temperature)
    drafter = FastSampled(Plain(vocab, seed=6, wide=wide))
    options = DecodeOptions(sampler=sampler, max_new_tokens=3, rule=rule, shape=shape, seed=12)
    tokens, _ = emitted(target, drafter, options, num_trials, batch=256)
    probs_V = exact_law(target.table_CV[0].numpy(), sampler, [], 0)
    for place in range(3):
        seen = np.bincount(tokens[:, place], minlength=vocab)
        assert_law(seen, probs_V, f"V={vocab}, T={temperature}, {shape.widths}, token {place}")


@pytest.mark.parametrize("rule", LOSSLESS_RULES)
def test_adversarial_draft_keeps_the_law(rule: str) -> None:
    share = check_narrow(rule, 8_192)
    assert share < 0.4, f"{share:.0%} of the drafts were accepted: this is not adversarial"


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "shape"), [("match", CHAIN), ("rejection", CHAIN), ("rejection", TREE)], ids=str
)
def test_adversarial_draft_keeps_the_law_in_120_000_trials(rule: str, shape: TreeShape) -> None:
    check_narrow(rule, 120_000, shape=shape)


def test_law_over_a_large_vocabulary() -> None:
    check_wide(4_096, 2_048, 1.0, TreeShape.chain(1), "rejection", wide=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("temperature", "shape", "wide"),
    [
        (0.6, TreeShape.chain(1), False),
        (1.0, TreeShape.chain(3), False),
        (1.0, TreeShape.chain(3), True),
        (1.0, TREE, False),
    ],
    ids=lambda value: str(getattr(value, "widths", value)),
)
def test_law_over_4096_tokens_in_40_960_trials(
    temperature: float, shape: TreeShape, wide: bool
) -> None:
    check_wide(4_096, 40_960, temperature, shape, "rejection", wide=wide)


def check_every_token(cases: Sequence[Case], num_trials: int) -> None:
    """All continuations of three tokens at once (512 bins), for a target with context: with
    rejection, in trials that these cases share."""
    target, sampler = dense(0), Sampler(temperature=0.8, top_p=0.95)
    prompt, seen = PROMPTS[1], np.zeros(512, dtype=np.int64)
    for seed, case in enumerate(cases, 13):
        options = DecodeOptions(
            sampler=sampler, max_new_tokens=3, rule="rejection", shape=case.shape, seed=seed
        )
        tokens, _ = emitted(
            target,
            case.build(dense(1)),
            options,
            num_trials // len(cases),
            batch=1024,
            prompt=prompt,
        )
        seen += np.bincount(tokens @ np.array([64, 8, 1]), minlength=512)
    expected = joint_law(target, sampler, prompt, 3)
    codes = list(np.ndindex(8, 8, 8))
    probs = np.array([expected.get(code, 0.0) for code in codes])
    assert_law(seen, probs, " and ".join(map(str, cases)))


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "independent"], ids=str)
def test_sampled_continuations_of_draft_models(case: Case) -> None:
    check_every_token([case], 2_048)


CERTAIN = itertools.groupby((case for case in CASES if not case.draws), lambda case: case.kind)
GROUPS = [*([case] for case in CASES if case.draws), *(list(cases) for _, cases in CERTAIN)]
"""Drafts that are certain draw no noise: those of one kind are judged together."""


@pytest.mark.full
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: "+".join(map(str, cases)))
def test_sampled_continuations_of_every_drafter(cases: list[Case]) -> None:
    """With rejection; `match` gives the text of plain decoding (test_rows.py), which is `none`."""
    check_every_token(cases, 24_576)


def test_shared_noise_is_caught_by_the_adversarial_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that this test exists for: drafter, acceptance and residual share one number."""
    intact = Noise.uniform

    def shared(
        self: Noise, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0
    ) -> np.ndarray:
        return intact(self, rows, depth, Purpose.TARGET, lane)

    monkeypatch.setattr(Noise, "uniform", shared)
    with pytest.raises(AssertionError, match="chi-square"):
        check_narrow("rejection", 8_192)


def test_neighbouring_positions_that_share_noise_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intact = Noise.uniform

    def frozen(
        self: Noise, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0
    ) -> np.ndarray:
        return intact(self.at([0] * len(self.roots_B)), rows, 0, purpose, lane)

    monkeypatch.setattr(Noise, "uniform", frozen)
    with pytest.raises(AssertionError, match="chi-square"):
        check_narrow("match", 8_192)


def test_chi_square_of_a_known_table() -> None:
    """By hand: counts 30 50 20 for 1/4 1/2 1/4 of 100 give 1 + 0 + 1 = 2 with 2 degrees; four bins
    in which one is expected are merged into one of four, and that into its neighbour."""
    assert chi_square(np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25])) == (2.0, 2)
    merged, df = chi_square(
        np.array([48, 48, 4, 0, 0, 0]), np.array([0.48, 0.48, 0.01, 0.01, 0.01, 0.01])
    )
    assert (merged, df) == (0.0, 1)


def test_a_wrong_law_is_told_from_the_right_one() -> None:
    """A law that is off by 2 % of total variation fails at 120,000 trials."""
    rng = np.random.default_rng(0)
    target = TabularTarget(V_NARROW, order=0, seed=3)
    probs = exact_law(target.table_CV[0].numpy(), Sampler(temperature=1.0), [], 0)
    off = probs.copy()
    off[np.argsort(probs)[-2:]] += [-0.02, 0.02]
    assert_law(rng.multinomial(120_000, probs), probs, "right")
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(rng.multinomial(120_000, off), probs, "wrong")
