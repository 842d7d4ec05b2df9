"""Caches hold what plain decoding would hold: after every step, after a stop inside a block, after
a consumer that went away, and in the drafter as well."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, DraftTree, RequestBatch, Signals, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.targets.base import Target
from draftsmith.targets.hf import HFTarget

from .cases import DRAFTERS, TREE, Case, by_case_in_brief
from .following import Following
from .test_greedy import models, predictions_for, prompts_of
from .test_rows import PROMPTS, predicted
from .toys import dense

CLOSE = 1e-10
"""float64: other batch shapes round differently, in the last digits."""
TEXT_CASES = [case for case in DRAFTERS if not case.tabular_only]
by_case = by_case_in_brief(DRAFTERS)
by_text_case = by_case_in_brief(TEXT_CASES)
SHAPE = TreeShape(widths=(2, 2, 1))
LENGTHS = (1, 4, 11)


@lru_cache(maxsize=1024)  # lossless drafters say the same texts
def prefilled(target: Target, tokens: tuple[int, ...]) -> list[Tensor]:
    """What a fresh cache holds after these tokens, fed in one forward."""
    cache = target.new_cache(1, len(tokens) + 1)
    fed, block = lay_out(cache, [list(tokens)])
    target.forward(torch.from_numpy(fed), block, 1, Signals())
    cache.commit(np.array([len(tokens)]))
    return cache.contents(0)


def assert_same_cache(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape, (
            f"{what}: {one.shape[2]} columns instead of {other.shape[2]}"
        )
        error = float((one - other).abs().max()) if one.numel() else 0.0
        assert error < CLOSE, f"{what}: columns differ by {error:.3g}"


def check_prefill(target: Target, session: Session, what: str) -> None:
    assert session.cache is not None and session.tokens is not None
    for b, tokens in enumerate(session.tokens):
        assert session.cache.lengths_B[b] == len(tokens)
        assert_same_cache(
            session.cache.contents(b), prefilled(target, tuple(tokens)), f"{what}, row {b}"
        )


@pytest.mark.every(2)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@by_text_case
def test_cache_equals_a_fresh_prefill_after_every_step(case: Case, temperature: float) -> None:
    m, prompts = models(), prompts_of(LENGTHS)
    texts = [m.reference.text(prompt, 20) for prompt in prompts]
    drafter, session = case.build(m.related), Session()
    drafter.bind(m.target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=14, shape=SHAPE
    )
    known = [list(prompt) for prompt in prompts]
    for number, step in enumerate(
        decode(
            m.target,
            drafter,
            prompts,
            options,
            session=session,
            predictions=predictions_for(case, texts),
        )
    ):
        for text, new in zip(known, step.emitted, strict=True):
            text.extend(new)
        # the last token of a row is not in the cache yet: it is the next root
        assert session.tokens == [text[:-1] for text in known]
        check_prefill(m.target, session, f"{case}, step {number}")


@by_text_case
def test_a_stop_inside_a_block_leaves_the_cache_as_if_never_drafted(case: Case) -> None:
    """End tokens fall on every place of a block; then the cache is that of plain decoding."""
    m, prompts = models(), prompts_of(LENGTHS)
    texts = [m.reference.text(prompt, 20) for prompt in prompts]
    plain = next(case for case in DRAFTERS if case.kind == "none")
    for place in (3, 4, 5, 6):
        ends = frozenset(text[place] for text in texts)
        target = HFTarget(copy.deepcopy(m.target.model), end_ids=ends)
        draft = HFTarget(copy.deepcopy(m.related.model), end_ids=ends)
        held: list[KVCache] = []
        for one, guesses in ((plain, []), (case, predictions_for(case, texts))):
            drafter, session = one.build(draft), Session()
            drafter.bind(target)
            options = DecodeOptions(max_new_tokens=20, shape=SHAPE)
            steps = list(
                decode(target, drafter, prompts, options, session=session, predictions=guesses)
            )
            assert "stop" in {reason for step in steps for reason in step.finish}
            assert session.cache is not None and session.cache.staged == 0
            held.append(session.cache)
        for b in range(len(prompts)):
            assert_same_cache(
                held[1].contents(b), held[0].contents(b), f"{case}, stop at {place}, row {b}"
            )


@pytest.mark.every(3)
@pytest.mark.parametrize("steps", [1, 2, 3])
@by_text_case
def test_a_consumer_that_goes_away_can_come_back(case: Case, steps: int) -> None:
    """The generator is closed after some steps; the session then goes on to the same text."""
    m, prompts = models(), prompts_of(LENGTHS)
    expected = [m.reference.text(prompt, 20) for prompt in prompts]
    guesses = predictions_for(case, expected)
    drafter, session = case.build(m.related), Session()
    drafter.bind(m.target)
    options = DecodeOptions(max_new_tokens=20, shape=SHAPE)
    texts: list[list[int]] = [[] for _ in prompts]
    running = decode(m.target, drafter, prompts, options, session=session, predictions=guesses)
    for _ in range(steps):
        for text, new in zip(texts, next(running).emitted, strict=True):
            text.extend(new)
    running.close()
    assert session.cache is not None and session.cache.staged == 0
    check_prefill(m.target, session, f"{case}, closed after {steps} steps")
    longer = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    for step in decode(m.target, drafter, longer, options, session=session):
        for text, new in zip(texts, step.emitted, strict=True):
            text.extend(new)
    for text, wanted in zip(texts, expected, strict=True):
        count = min(len(text), len(wanted))
        assert count >= 20 and text[:count] == wanted[:count]


class Interrupted(Exception):
    """Stands for Ctrl-C, a time limit, a lost device."""


@pytest.mark.every(2)
@pytest.mark.parametrize("where", ["forward", "advance"])
@by_text_case
def test_an_interrupted_step_leaves_the_session_usable(
    case: Case, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step: when keys are written, or when the target's cache has moved on already
    and the drafter has not. Whatever the session keeps then must be whole."""
    m, prompts = models(), prompts_of(LENGTHS)
    expected = [m.reference.text(prompt, 12) for prompt in prompts]
    target = HFTarget(copy.deepcopy(m.target.model), end_ids=frozenset())
    drafter, session = case.build(m.related), Session()
    drafter.bind(target)
    options = DecodeOptions(max_new_tokens=12, shape=SHAPE)
    guesses = predictions_for(case, expected)
    running = decode(target, drafter, prompts, options, session=session, predictions=guesses)
    next(running)
    owner: object = target if where == "forward" else drafter
    intact = getattr(owner, where)

    def broken(*args: object) -> None:
        intact(*args)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, broken)
        with pytest.raises(Interrupted):
            next(running)
    if session.cache is not None:
        check_prefill(m.target, session, f"{case}, interrupted")
    texts: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, options, session=session, predictions=guesses):
        for text, new in zip(texts, step.emitted, strict=True):
            text.extend(new)
    assert texts == expected


def count_children(parents: list[int]) -> Iterable[int]:
    """How many children each node of a row has that has any, the root included."""
    return Counter(parent for parent in parents if parent != PADDING).values()


class Watched(Following):
    """Compares each proposal with that of a drafter that starts anew, and with the bounds that the
    drafter gives for it."""

    def __init__(self, inner: Drafter, case: Case) -> None:
        super().__init__(inner)
        self.case = case
        self.compared = 0

    def look(
        self,
        tree: DraftTree,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> None:
        assert tree.num_nodes <= self.inner.max_nodes(shape), f"{self.case}: more nodes"
        widest = max(
            (n for row in tree.parents_BN.tolist() for n in count_children(row)), default=0
        )
        assert widest <= self.inner.widest(shape), f"{self.case}: {widest} children"
        fresh = self.inner.start(
            RequestBatch(
                tokens=self.known, request_ids=tuple(range(len(self.known))), max_new_tokens=9
            )
        )
        again = self.inner.propose(fresh, shape, depth_B, sampler, noise)
        assert torch.equal(tree.parents_BN, again.parents_BN), f"{self.case}: other tree shapes"
        real = tree.parents_BN >= -1
        assert torch.equal(tree.tokens_BN[real], again.tokens_BN[real]), (
            f"{self.case} proposes {tree.tokens_BN.tolist()}, afresh {again.tokens_BN.tolist()}"
        )
        if tree.q is not None and again.q is not None:
            error = float((tree.q.probs() - again.q.probs()).abs().max())
            assert error < CLOSE, f"{self.case} reports laws that are off by {error:.3g}"
        self.compared += 1


FORGETFUL = [c for c in DRAFTERS if not c.remembers and not c.uses_predictions and c.drafts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", FORGETFUL, ids=str)
def test_drafts_depend_on_the_rows_tokens_alone(case: Case, temperature: float) -> None:
    """What a drafter carries from step to step (a cache, an index) is what it would compute afresh:
    rejected drafts leave no trace. Rows end at different steps and leave the batch."""
    watched = Watched(case.build(dense(1, end_ids=frozenset({4}))), case)
    target = dense(0, end_ids=frozenset({4}))
    watched.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=12, shape=TREE, seed=2
    )
    for _ in decode(target, watched, PROMPTS, options, predictions=predicted(case, PROMPTS)):
        pass
    assert watched.compared > 3


@pytest.mark.parametrize("case", [case for case in FORGETFUL if not case.tabular_only], ids=str)
def test_drafts_of_transformers_depend_on_the_rows_tokens_alone(case: Case) -> None:
    m = models()
    watched = Watched(case.build(m.related), case)
    watched.bind(m.target)
    options = DecodeOptions(
        sampler=Sampler(temperature=0.8), max_new_tokens=12, shape=SHAPE, seed=2
    )
    for _ in decode(m.target, watched, prompts_of(LENGTHS), options):
        pass
    assert watched.compared > 3
