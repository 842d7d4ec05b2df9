"""`prompt_lookup`: the index against the plain definition, transformers and the author's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, RequestBatch, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import NgramIndex, PromptLookup
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget, tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
configs = st.builds(
    lambda low, more, length, match, clamp: PromptLookup.Config(
        min_ngram=low, max_ngram=low + more, length=length, match=match, clamp=clamp
    ),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(1, 6),
    st.sampled_from(["earliest", "latest"]),
    st.booleans(),
)


def by_definition(text: list[int], config: PromptLookup.Config) -> list[int]:
    """The quadratic definition: look at every place for every n."""
    for n in range(config.max_ngram, config.min_ngram - 1, -1):
        behind = [
            place + n
            for place in range(len(text) - n)  # the suffix itself stands at len(text) - n
            if text[place : place + n] == text[len(text) - n :] and len(text) > n
        ]
        whole = [start for start in behind if start + config.length <= len(text)]
        if whole:
            start = min(whole) if config.match == "earliest" else max(whole)
            return text[start : start + config.length]
        if behind and config.clamp:
            return text[min(behind) :]
    return []


@settings(deadline=None, max_examples=300)
@given(texts, configs, st.lists(st.integers(1, 7), max_size=12))
def test_the_growing_index_finds_what_the_quadratic_definition_finds(
    text: list[int], config: PromptLookup.Config, cuts: list[int]
) -> None:
    index, known = NgramIndex(config, text[:1]), 1
    for cut in [*cuts, len(text)]:
        index.extend(text[known : known + cut])
        known = len(index.tokens)
        assert index.continuation() == by_definition(text[:known], config)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 4), st.integers(1, 8))
def test_earliest_match_with_clamp_is_transformers_prompt_lookup(
    text: list[int], max_ngram: int, length: int
) -> None:
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=length, max_matching_ngram_size=max_ngram, max_length=10_000
    )
    ids, _ = theirs.get_candidates(torch.tensor([text]))
    config = PromptLookup.Config(max_ngram=max_ngram, length=length, match="earliest")
    assert NgramIndex(config, text).continuation() == ids[0, len(text) :].tolist()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 3), st.integers(4, 8))
def test_earliest_match_without_clamp_is_the_authors_procedure(
    text: list[int], max_ngram: int, length: int
) -> None:
    def authors() -> list[int]:
        for n in range(max_ngram, 0, -1):
            for place in range(len(text) - n + 1):
                start, end = place + n, place + n + length
                same = text[place : place + n] == text[-n:]
                if same and end <= len(text) and start < len(text) - n:
                    return text[start:end]
        return []

    config = PromptLookup.Config(max_ngram=max_ngram, length=length, match="earliest", clamp=False)
    assert NgramIndex(config, text).continuation() == authors()


@settings(deadline=None, max_examples=100)
@given(texts, texts, configs)
def test_a_rewound_index_is_that_of_the_new_text(
    text: list[int], other: list[int], config: PromptLookup.Config
) -> None:
    for new in (other, text + other, text[: len(text) // 2 + 1]):
        index = NgramIndex(config, text).rewound(new)
        assert index.tokens == new
        assert index.continuation() == NgramIndex(config, new).continuation()


def test_the_drawing() -> None:
    a, b, c, d, e, x, y = range(7)
    index = NgramIndex(PromptLookup.Config(length=4), [a, b, c, d, e, x, y, a, b, c])
    assert index.continuation() == [d, e, x, y]


def test_the_latest_match_leaves_room_for_a_whole_draft() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    latest = NgramIndex(PromptLookup.Config(length=5), text)
    assert latest.continuation() == [1, 2, 3, 1, 2], "the match just before gives only 1 2 3"


def propose(drafter: Drafter, text: list[int], shape: TreeShape) -> list[int]:
    state = drafter.start(RequestBatch(tokens=[text], request_ids=(0,), max_new_tokens=9))
    noise = Noise(0, [0], [len(text)])
    tree = drafter.propose(state, shape, np.array([shape.depth]), Sampler(), noise)
    kept = tree.parents_BN[0] != PADDING
    return tree.tokens_BN[0][kept].tolist()


def test_a_draft_is_no_deeper_than_the_shape_and_ends_with_an_end_token() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    drafter = PromptLookup()
    assert propose(drafter, text, drafter.default_shape) == [3, 4, 5, 6, 7, 1, 2]
    assert propose(drafter, text, TreeShape.chain(2)) == [3, 4]
    drafter.bind(TabularTarget(8, end_ids=frozenset({5})))
    assert propose(drafter, text, drafter.default_shape) == [3, 4, 5]


@settings(deadline=None, max_examples=200)
@given(texts, texts, configs, st.integers(1, 12))
def test_a_longer_shape_drafts_as_if_it_were_the_length(
    text: list[int], more: list[int], config: PromptLookup.Config, longer: int
) -> None:
    asked = config.length + longer
    ours = NgramIndex(config, text)
    if not (config.match == "earliest" and config.clamp):
        ours.continuation(asked)  # whatever the text was when more was first asked for
    ours.extend(more)
    theirs = NgramIndex(replace(config, length=asked), text + more)
    assert ours.continuation(asked) == theirs.continuation()


def test_a_shape_may_be_longer_than_the_length() -> None:
    text = [*range(1, 9), 1, 2]
    drafter = PromptLookup(PromptLookup.Config(length=2))
    assert propose(drafter, text, drafter.default_shape) == [3, 4]
    assert propose(drafter, text, TreeShape.chain(5)) == [3, 4, 5, 6, 7]
    assert propose(drafter, [1, 2] * 9, TreeShape.chain(12)) == [1, 2] * 6


def test_options_are_checked_and_settable_from_text() -> None:
    drafter = load_drafter("prompt_lookup", ["match=earliest", "clamp=false", "length=7"])
    assert drafter.config == PromptLookup.Config(match="earliest", clamp=False, length=7)
    assert drafter.default_shape == TreeShape.chain(7)
    with pytest.raises(InputError, match="min_ngram <= max_ngram"):
        PromptLookup.Config(min_ngram=4)
    with pytest.raises(InputError, match="length"):
        PromptLookup.Config(length=0)


# ------------------------------------------------------------------ through the decoding loop

PROMPTS = ([1, 2, 3, 1, 2], [4], [5, 6, 7, 5, 6, 7, 5, 6, 7, 5])


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    rule: str = "auto",
    ids: Sequence[int] | None = None,
    session: Session | None = None,
) -> tuple[list[list[int]], int]:
    """(generated tokens per row, drafted tokens accepted)"""
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=40, seed=7, rule=rule
    )
    out: list[list[int]] = [[] for _ in prompts]
    accepted = 0
    for step in decode(target, drafter, prompts, options, request_ids=ids, session=session):
        accepted += sum(step.accepted)
        for row, new in zip(out, step.emitted, strict=True):
            row.extend(new)
    return out, accepted


TARGETS = [
    TabularTarget(8, scale=4.0),
    TabularTarget(8, scale=4.0, end_ids=frozenset({0})),
    TabularTarget(8, scale=4.0, max_length=24),
    tiny_target(),
]


@pytest.mark.parametrize("target", TARGETS, ids=["plain", "end", "context", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.every(3)
def test_text_is_that_of_plain_decoding_in_ragged_batches_and_alone(
    target: Target, temperature: float, match: str
) -> None:
    drafter = load_drafter("prompt_lookup", [f"match={match}"])
    plain, _ = run(target, NoDrafter(), PROMPTS, temperature=temperature)
    batch, _ = run(target, drafter, PROMPTS, temperature=temperature)
    assert batch == plain
    for number, prompt in enumerate(PROMPTS):
        alone, _ = run(target, drafter, [prompt], temperature=temperature, ids=[number])
        assert alone == [plain[number]]


def test_a_repetitive_text_is_accepted_at_every_temperature() -> None:
    target = TabularTarget(8, order=1, scale=30.0)  # so peaked that it runs in a circle
    for rule in ("match", "rejection"):
        for temperature in (0.0, 0.5):
            _, accepted = run(target, PromptLookup(), PROMPTS, temperature=temperature, rule=rule)
            assert accepted > 60, (rule, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_goes_on_from_a_longer_a_cut_and_another_text(temperature: float) -> None:
    target = TabularTarget(8, scale=4.0, end_ids=frozenset({0}))
    session, drafter = Session(), PromptLookup()
    prompts = [list(prompt) for prompt in PROMPTS]
    for change in (
        lambda row: [*row, 3, 1, 2],
        lambda row: row[: len(row) // 2 + 1],
        lambda row: [6],
    ):
        plain, _ = run(target, NoDrafter(), prompts, temperature=temperature)
        ours, _ = run(target, drafter, prompts, temperature=temperature, session=session)
        assert ours == plain
        prompts = [change([*row, *new]) for row, new in zip(prompts, plain, strict=True)]
