"""`prediction`: following an expected continuation, losing it, and finding it again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, RequestBatch, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget, tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

A, B, C, D, E, F, G, X, Y = range(9)


def draft_after(
    prediction: Sequence[int],
    output: Sequence[int],
    *,
    config: PredictionDrafter.Config | None = None,
    length: int = 99,
) -> tuple[list[int], set[int]]:
    """(what is drafted once `output` has followed the prompt, its origins)"""
    drafter = PredictionDrafter(config)
    prompt = [20, 21]
    request = RequestBatch(
        tokens=[prompt], request_ids=(0,), max_new_tokens=99, predictions=[prediction]
    )
    state = drafter.start(request).rewind([[*prompt, *output]])
    noise = Noise(0, [0], [len(prompt) + len(output)])
    tree = drafter.propose(state, TreeShape.chain(length), np.array([length]), Sampler(), noise)
    assert tree.origin_BN is not None
    kept = tree.parents_BN[0] != PADDING
    return tree.tokens_BN[0][kept].tolist(), set(tree.origin_BN[0][kept].tolist())


def test_the_drawing() -> None:
    assert draft_after([A, B, C, D, E, F, G], [A, B, X, D]) == ([E, F, G], {1})


@pytest.mark.parametrize(
    ("output", "drafted", "origins"),
    [
        ([], [A, B, C, D, E, F], {0}),
        ([A, B], [C, D, E, F], {0}),
        ([A, B, X], [], set()),  # lost: nothing to go by
        ([A, X, C], [D, E, F], {1}),  # replaced
        ([A, X, B], [C, D, E, F], {1}),  # inserted
        ([A, C], [D, E, F], {1}),  # left out
        ([A, X, C, D, Y, F], [], set()),  # found twice, and used up
        ([A, B, C, D, E, F], [], set()),  # all used
        ([A, B, C, D, E, F, A], [], set()),  # and not found again in the used part
    ],
)
def test_where_the_draft_comes_from(
    output: list[int], drafted: list[int], origins: set[int]
) -> None:
    assert draft_after([A, B, C, D, E, F], output) == (drafted, origins)


def test_a_chance_match_far_ahead_does_not_use_up_what_lies_between() -> None:
    prediction = [A, B, C, D, E, X, G]
    assert draft_after(prediction, [A, X]) == ([G], {1})
    assert draft_after(prediction, [A, X, C]) == ([D, E, X, G], {1})


def test_the_longest_ngram_decides_then_the_nearest_place() -> None:
    prediction = [A, C, D, B, C, E, B, C, F]
    assert draft_after(prediction, [X, C])[0] == [D, B, C, E, B, C, F]
    assert draft_after(prediction, [X, B, C])[0] == [E, B, C, F]


def test_without_resync_a_divergence_ends_it() -> None:
    config = PredictionDrafter.Config(resync=False)
    assert draft_after([A, B, C], [A], config=config) == ([B, C], {0})
    assert draft_after([A, B, C], [X, B], config=config) == ([], set())


def test_min_ngram_waits_for_more_evidence() -> None:
    config = PredictionDrafter.Config(min_ngram=2)
    assert draft_after([A, B, C, D, E], [A, X, C], config=config) == ([], set())
    assert draft_after([A, B, C, D, E], [A, X, C, D], config=config) == ([E], {1})


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 2),
    st.integers(0, 2),
)
def test_the_place_is_what_a_search_through_the_prediction_finds(
    prediction: list[int], output: list[int], low: int, more: int
) -> None:
    config = PredictionDrafter.Config(min_ngram=low, max_ngram=low + more)
    place: int | None = 0
    used = 0
    text = [20, 21]
    for token in output:
        text.append(token)
        if place is not None and prediction[place : place + 1] == [token]:
            place += 1
            used = place
            continue
        found = [
            (-n, start + n)
            for n in range(low, min(low + more, len(text)) + 1)
            for start in range(used, len(prediction) - n + 1)
            if prediction[start : start + n] == text[-n:]
        ]
        place = min(found)[1] if found else None
    expected = [] if place is None else prediction[place:]
    assert draft_after(prediction, output, config=config)[0] == expected


def test_options_and_predictions_are_checked() -> None:
    drafter = load_drafter("prediction", ["length=4", "resync=false"])
    assert drafter.config == PredictionDrafter.Config(length=4, resync=False)
    assert drafter.default_shape == TreeShape.chain(4)
    with pytest.raises(InputError, match="min_ngram"):
        PredictionDrafter.Config(min_ngram=0)
    with pytest.raises(InputError, match="length"):
        PredictionDrafter.Config(length=0)
    target = TabularTarget(8)
    with pytest.raises(InputError, match=r"2 prompts.*predictions"):
        run(target, drafter, [[1], [2]], predictions=[[1]])
    with pytest.raises(InputError, match="Prediction 0 holds token 8"):
        run(target, drafter, [[1]], predictions=[[1, 8]])


# ------------------------------------------------------------------ through the decoding loop

PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 5, 6])


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    predictions: Sequence[Sequence[int]] = (),
    temperature: float = 0.0,
    ids: Sequence[int] | None = None,
    session: Session | None = None,
    max_new_tokens: int = 40,
) -> tuple[list[list[int]], list[int]]:
    """(generated tokens per row, origin of every accepted token)"""
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=max_new_tokens, seed=7
    )
    out: list[list[int]] = [[] for _ in prompts]
    origins: list[int] = []
    for step in decode(
        target,
        drafter,
        prompts,
        options,
        request_ids=ids,
        predictions=predictions,
        session=session,
    ):
        for row, new, sources in zip(out, step.emitted, step.origins, strict=True):
            row.extend(new)
            origins.extend(sources)
    return out, origins


TARGETS = [
    TabularTarget(8, scale=4.0),
    TabularTarget(8, scale=4.0, end_ids=frozenset({0})),
    TabularTarget(8, scale=4.0, max_length=24),
    tiny_target(),
]


def damaged(text: list[int], vocab_size: int) -> list[int]:
    """A prediction with one token replaced, one left out, one put in, and a longer end."""
    other = [(token + 1) % vocab_size for token in text]
    return [*text[:6], other[6], *text[7:15], *text[16:24], *other[24:25], *text[24:], 1, 2, 3]


@pytest.mark.parametrize("target", TARGETS, ids=["plain", "end", "context", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["right", "damaged", "short", "wrong", "one row only", "none"])
@pytest.mark.every(5)
def test_text_is_that_of_plain_decoding_in_ragged_batches_and_alone(
    target: Target, temperature: float, kind: str
) -> None:
    plain, _ = run(target, NoDrafter(), PROMPTS, temperature=temperature)
    predictions: list[list[int]] = {
        "right": plain,
        "damaged": [damaged(row + [1] * 30, target.vocab_size) for row in plain],
        "short": [row[:5] for row in plain],
        "wrong": [[3, 1, 3, 1, 5] * 9 for _ in plain],
        "one row only": [[], plain[1], []],
        "none": [],
    }[kind]
    drafter = PredictionDrafter()
    batch, _ = run(target, drafter, PROMPTS, predictions=predictions, temperature=temperature)
    assert batch == plain
    for number, prompt in enumerate(PROMPTS):
        alone, _ = run(
            target,
            drafter,
            [prompt],
            predictions=predictions[number : number + 1],
            temperature=temperature,
            ids=[number],
        )
        assert alone == [plain[number]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_right_prediction_is_accepted_whole_and_a_damaged_one_in_pieces(
    temperature: float,
) -> None:
    target = tiny_target()
    plain, _ = run(target, NoDrafter(), PROMPTS[:1], temperature=temperature)
    drafter = load_drafter("prediction", ["length=7"])
    _, origins = run(target, drafter, PROMPTS[:1], predictions=plain, temperature=temperature)
    assert origins == [0] * 35, "40 tokens in 5 steps of 7 drafted and 1 of the target's own"
    _, origins = run(
        target,
        drafter,
        PROMPTS[:1],
        predictions=[damaged(plain[0], 64)],
        temperature=temperature,
    )
    assert origins.count(0) == 6, "the six tokens before the first damage, in the first draft"
    assert origins.count(1) >= 18
    assert sorted(origins) == origins


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_takes_a_new_prediction_with_each_call(temperature: float) -> None:
    """The re-translation pattern: the source changes, the last output is the prediction."""
    target = tiny_target()
    session, drafter = Session(), PredictionDrafter()
    last: list[list[int]] = [[], []]
    for sources in ([[1, 2], [3]], [[1, 2, 4], [3, 9]], [[1, 5, 4, 6], [3, 9]]):
        plain, _ = run(target, NoDrafter(), sources, temperature=temperature, max_new_tokens=12)
        ours, origins = run(
            target,
            drafter,
            sources,
            predictions=last,
            temperature=temperature,
            session=session,
            max_new_tokens=12,
        )
        assert ours == plain
        if sources[1] == [3, 9] and last[1] == plain[1]:
            assert origins.count(0) >= 11, "the row whose source did not change is drafted whole"
        last = plain


def test_a_session_without_new_predictions_follows_the_old_ones() -> None:
    target = tiny_target()
    whole, _ = run(target, NoDrafter(), [[1, 2]], max_new_tokens=30)
    session, drafter = Session(), PredictionDrafter()
    first, _ = run(target, drafter, [[1, 2]], predictions=whole, session=session, max_new_tokens=10)
    assert first == [whole[0][:10]]
    second, origins = run(target, drafter, [[1, 2, *first[0]]], session=session, max_new_tokens=20)
    assert second == [whole[0][10:]]
    assert origins == [0] * len(origins)
    assert len(origins) >= 18
    other, origins = run(target, drafter, [[7]], session=session, max_new_tokens=10)
    assert other == run(target, NoDrafter(), [[7]], max_new_tokens=10)[0]
    assert origins == [], "another prompt has no prediction"
