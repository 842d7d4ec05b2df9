"""`suffix`: drafts against the plain definition; what is remembered, and for how long."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, RequestBatch, TreeShape
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.suffix import MOST_PLACES, OwnText, PastTexts, Suffix, continuation
from draftsmith.drafters.vocabulary import vocabulary_sha256
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
configs = st.builds(
    lambda low, more, factor, least: Suffix.Config(
        min_match=low, max_match=low + more, factor=factor, min_probability=least
    ),
    st.integers(1, 2),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


def by_definition(text: list[int], past: list[list[int]], config: Suffix.Config) -> list[int]:
    """Look at every place of every text for every length of the match."""
    for length in range(min(config.max_match, len(text)), config.min_match - 1, -1):
        match = text[-length:]
        places = [
            (one, end)
            for one in [*past, text]  # the latest last
            for end in range(length, len(one))
            if one[end - length : end] == match
        ]
        if not places:
            continue
        draft: list[int] = []
        share = 1.0
        while len(draft) < max(int(config.factor * length), 1):
            alive = [
                (one, end)
                for one, end in places
                if one[end : end + len(draft)] == draft and end + len(draft) < len(one)
            ]
            counts = Counter(one[end + len(draft)] for one, end in reversed(alive))
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            share *= count / len(alive)
            if share < config.min_probability:
                break
            draft.append(token)
        return draft
    return []


def drafted(text: list[int], past: list[list[int]], config: Suffix.Config) -> list[int]:
    return rated(text, past, config)[0]


def rated(
    text: list[int], past: list[list[int]], config: Suffix.Config
) -> tuple[list[int], list[float]]:
    memory = PastTexts(config.min_match, 10_000)
    for one in past:
        memory.add(one)
    own = OwnText(config.min_match, text[:1])
    own.extend(text[1:])
    return continuation(own.tokens, memory, own, config, 64)


@settings(deadline=None, max_examples=300)
@given(texts, st.lists(texts, max_size=3), configs)
def test_drafts_are_what_the_definition_says(
    text: list[int], past: list[list[int]], config: Suffix.Config
) -> None:
    assert drafted(text, past, config) == by_definition(text, past, config)


def test_the_longest_match_decides_and_bounds_the_draft() -> None:
    text = [1, 2, 3, 9, 8, 7, 6, 5, 0, 2, 3, 4, 0, 1, 2, 3]
    config = Suffix.Config()
    assert drafted(text, [], config) == [9, 8, 7], "'1 2 3' stands once, '2 3' twice"
    assert drafted(text, [], Suffix.Config(factor=2)) == [9, 8, 7, 6, 5, 0]
    assert drafted(text, [], Suffix.Config(max_match=2)) == [4, 0], "of equals the later"


def test_what_follows_at_most_places_is_drafted_while_it_is_probable() -> None:
    past = [[1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 4, 4]]
    assert drafted([0, 1, 2], past, Suffix.Config(min_probability=0.3)) == [5, 7]
    assert drafted([0, 1, 2], past, Suffix.Config(min_probability=0.5)) == [5]
    assert drafted([0, 1, 2], past, Suffix.Config(min_probability=0.8)) == []
    assert rated([0, 1, 2], past, Suffix.Config(min_probability=0.3)) == ([5, 7], [2 / 3, 1 / 2])


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, max_size=12), st.integers(0, 60))
def test_the_memory_holds_the_latest_texts_and_no_more_tokens_than_it_may(
    some: list[list[int]], memory: int
) -> None:
    past = PastTexts(2, memory)
    for text in some:
        past.add(text)
        assert past.size <= memory
    whole = [text[max(len(text) - memory, 0) :] for text in some]
    kept: list[list[int]] = []
    for text in reversed([text for text in whole if len(text) > 2]):
        if sum(map(len, kept)) + len(text) > memory:
            break
        kept.insert(0, text)
    found = Counter(
        (run, tuple(text), place)
        for run in {(a, b) for a in range(3) for b in range(3)}
        for text, place in past.places(run)
    )
    assert found == Counter(
        (tuple(text[end - 2 : end]), tuple(text), end)
        for text in kept
        for end in range(2, len(text))
    )


def test_a_run_that_is_frequent_in_the_text_hides_no_past_text() -> None:
    """So many places of each are looked at, the latest ones."""
    text = [*[1, 2, 3] * (MOST_PLACES + 1), 7, 1, 2]
    past = [[9, 7, 1, 2, 5, 6], *[[4, 1, 2, 4]] * (MOST_PLACES - 1)]
    assert drafted(text, past, Suffix.Config()) == [5, 6]
    assert drafted(text, [*past, [4, 1, 2, 4]], Suffix.Config(max_match=2)) == [3, 1]
    assert drafted(text, [*past, [4, 1, 2, 4]], Suffix.Config()) != [5, 6], "one place too many"


def target() -> TabularTarget:
    return TabularTarget(vocab_size=12, seed=3)


def outputs(drafter: Suffix, prompts: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """(text of the first row, steps)."""
    model = target()
    drafter.bind(model)
    text: list[int] = []
    steps = 0
    options = DecodeOptions(max_new_tokens=40, ignore_end=True)
    for step in decode(model, drafter, prompts, options):
        text += step.emitted[0]
        steps += 1
    return text, steps


def test_a_request_is_remembered_only_where_that_is_asked() -> None:
    prompt = [[1, 2, 3, 4]]
    plain = outputs(Suffix(), prompt)
    forgetful, mindful = Suffix(), Suffix(Suffix.Config(memory=1000))
    for drafter in (forgetful, mindful):
        assert outputs(drafter, prompt) == plain
    gc.collect()
    assert outputs(forgetful, prompt) == plain and forgetful.past.size == 0
    again = outputs(mindful, prompt)
    assert again[0] == plain[0]
    assert again[1] <= plain[1] / 2, "the second run of a request has seen it all"


def test_rows_that_are_still_decoded_are_not_remembered() -> None:
    """What a row drafts never depends on a neighbour of its batch, or on a stream that is open."""
    model, drafter = target(), Suffix(Suffix.Config(memory=1000))
    drafter.bind(model)
    options = DecodeOptions(max_new_tokens=20, ignore_end=True)
    stream = decode(model, drafter, [[1, 2, 3, 4], [1, 2, 3, 4]], options)
    for _ in range(5):
        next(stream)
    drafter.start(RequestBatch(tokens=[[1]], request_ids=(0,), max_new_tokens=4))
    assert drafter.past.size == 0
    stream.close()
    del stream
    gc.collect()
    drafter.start(RequestBatch(tokens=[[1]], request_ids=(0,), max_new_tokens=4))
    assert drafter.past.size > 0


def test_turns_of_a_session_are_remembered_once() -> None:
    model, drafter = target(), Suffix(Suffix.Config(memory=1000))
    drafter.bind(model)
    session, text = Session(), [1, 2, 3, 4]
    options = DecodeOptions(max_new_tokens=6, ignore_end=True)
    for _ in range(3):
        for step in decode(model, drafter, [text], options, session=session):
            text = [*text, *step.emitted[0]]
        text = [*text, 5, 6]
    session.clear()
    gc.collect()
    drafter.start(RequestBatch(tokens=[[1]], request_ids=(0,), max_new_tokens=4))
    assert drafter.past.size == len(text) - 2, "the last question was never fed"


def test_turns_of_a_chat_that_is_written_anew_are_remembered_once_they_are_gone() -> None:
    """A chat template may write earlier turns otherwise than they were read: the row begins anew
    behind what is common, and no other request begins in between."""
    model, options = target(), DecodeOptions(max_new_tokens=6, ignore_end=True)
    steps: dict[int, int] = {}
    for memory in (0, 1000):
        drafter, session = Suffix(Suffix.Config(memory=memory)), Session()
        drafter.bind(model)
        steps[memory] = 0
        for turn in range(4):
            prompt = [1, 2, turn, 3, 4]
            steps[memory] += sum(
                1 for _ in decode(model, drafter, [prompt], options, session=session)
            )
            assert drafter.past.size == (11 * turn if memory else 0)
            assert len(drafter._open) == bool(memory), "texts of rows that are gone are kept"
    assert steps[1000] < steps[0], "the turns before were not drafted from"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_memory_changes_no_text_under_match(temperature: float) -> None:
    model = tiny_target(48, seed=2)
    drafter = Suffix(Suffix.Config(memory=500, min_match=1))
    drafter.bind(model)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=24, ignore_end=True
    )
    for seed in range(3):
        prompts = [[1, 2, 3], [seed, 5, 6, 7, 8]]
        texts = []
        for one in (NoDrafter(), drafter):
            rows: list[list[int]] = [[], []]
            for step in decode(model, one, prompts, options):
                for row, new in zip(rows, step.emitted, strict=True):
                    row += new
            texts.append(rows)
        assert texts[0] == texts[1]


def test_a_memory_is_saved_and_read(tmp_path: Path) -> None:
    drafter = Suffix(Suffix.Config(memory=1000))
    drafter.bind(target())
    drafter.past.add([1, 2, 3, 4])
    drafter.past.add([5, 6, 7])
    drafter.past.save(tmp_path / "texts.json")
    again = load_drafter("suffix", ["memory=1000", f"saved={tmp_path / 'texts.json'}"])
    assert isinstance(again, Suffix)
    again.bind(target())
    again.bind(target())
    assert again.past.size == 7
    tree = again.propose(
        again.start(RequestBatch(tokens=[[0, 5, 6]], request_ids=(0,), max_new_tokens=4)),
        TreeShape.chain(3),
        np.array([3]),
        Sampler(),
        Noise(0, (0,), [3]),
    )
    assert tree.tokens_BN[0][tree.parents_BN[0] != PADDING].tolist() == [7]


def test_a_saved_memory_is_of_one_tokenizer(tmp_path: Path) -> None:
    """Ids of another one would be in range and mean other tokens. Where either side does not say
    which tokens it has, as in files of earlier versions, ids in range are read."""
    path = tmp_path / "texts.json"
    model, other = (tiny_target(8, seed=3) for _ in range(2))
    model.tokenizer, other.tokenizer = Listed("abcdefgh"), Listed("abcdefhg")
    drafter = Suffix(Suffix.Config(memory=100))
    drafter.bind(model)
    drafter.past.add([1, 2, 3, 4])
    drafter.past.save(path)

    def size(target: HFTarget) -> int:
        again = Suffix(Suffix.Config(memory=100, saved=str(path)))
        again.bind(target)
        return again.past.size

    assert size(model) == 4
    with pytest.raises(InputError, match=r"another tokenizer .*: give the target that"):
        size(other)
    assert size(tiny_target(8, seed=3)) == 4, "a target without a tokenizer cannot tell"
    content = json.loads(path.read_text())
    for damaged in (7, "", []):
        path.write_text(json.dumps(content | {"vocabulary_sha256": damaged}))
        with pytest.raises(InputError, match="another tokenizer"):
            size(model)
    for old in ({"texts": content["texts"]}, content | {"vocabulary_sha256": None}):
        path.write_text(json.dumps(old))
        assert size(model) == size(other) == 4


def test_what_is_saved_again_says_which_tokenizer_it_was_read_with(tmp_path: Path) -> None:
    """A file without a digest, taken over by a memory that has one."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text('{"texts": [[1, 2, 3]]}')
    model = tiny_target(8, seed=3)
    model.tokenizer = Listed("abcdefgh")
    drafter = Suffix(Suffix.Config(memory=100, saved=str(first)))
    drafter.bind(model)
    drafter.past.save(second)
    assert json.loads(second.read_text()) == {
        "texts": [[1, 2, 3]],
        "vocabulary_sha256": vocabulary_sha256(model.tokenizer),
    }


class Listed:
    """A tokenizer as far as its list of tokens."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: at for at, letter in enumerate(self._letters)}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ('{"texts": [[1, 2, 3], [1, 99]]}', ["memory=9"], "text 1: not a list of token ids"),
        ('{"texts": [[1, 2, true]]}', ["memory=9"], "text 0: not a list of token ids"),
        ('{"texts": 5}', ["memory=9"], "holds no list"),
        ("[[1, 2]]", ["memory=9"], "holds no list"),
        ("[" * 100_000, ["memory=9"], "brackets"),
        ('{"texts": [[1, 2, 3], [4, 5, 6]]}', ["memory=5"], "has 6 tokens, more than memory=5"),
        ('{"texts": [[1, 2, 3]]}', [], "memory=TOKENS"),
        (None, ["memory=9"], "cannot read"),
    ],
)
def test_bad_memories_are_refused(
    tmp_path: Path, lines: str | None, options: list[str], message: str
) -> None:
    path = tmp_path / "texts.json"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(InputError, match=message):
        load_drafter("suffix", [*options, f"saved={path}"]).bind(target())


def test_a_memory_is_of_one_tokenizer() -> None:
    """What it saves says whose ids it holds."""
    model, other = (tiny_target(8, seed=3) for _ in range(2))
    model.tokenizer, other.tokenizer = Listed("abcdefgh"), Listed("abcdefhg")
    drafter = Suffix(Suffix.Config(memory=100))
    drafter.bind(model)
    with pytest.raises(InputError, match="remembers texts of a target with another tokenizer"):
        drafter.bind(other)
    other.tokenizer = Listed("abcdefgh")
    drafter.bind(other)
    Suffix().bind(model)


def test_a_memory_is_of_one_vocabulary() -> None:
    """It would draft tokens that a smaller target lacks."""
    drafter, small = Suffix(Suffix.Config(memory=1000)), TabularTarget(vocab_size=6, seed=3)
    outputs(drafter, [[1, 2, 3, 4]])
    drafter.bind(TabularTarget(vocab_size=12, seed=4))
    with pytest.raises(InputError, match="remembers texts of a target with 12 tokens"):
        drafter.bind(small)
    forgetful = Suffix()
    outputs(forgetful, [[1, 2, 3, 4]])
    forgetful.bind(small)


def test_a_memory_that_could_not_be_read_is_read_whole_the_next_time(tmp_path: Path) -> None:
    corpus, saved = tmp_path / "corpus.txt", tmp_path / "texts.json"
    corpus.write_text("abcd")
    drafter = Suffix(Suffix.Config(memory=100, corpus=str(corpus), saved=str(saved)))
    model = WithTokenizer(vocab_size=12, seed=3)
    with pytest.raises(InputError, match="cannot read"):
        drafter.bind(model)
    saved.write_text('{"texts": [[1, 2, 3]]}')
    drafter.bind(model)
    assert drafter.past.size == 4 + 3


class WithTokenizer(TabularTarget):
    """A target whose tokenizer counts letters from `a`, also those that it does not know."""

    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) - ord("a") for letter in text]

    tokenizer: Any = Letters()


def test_a_corpus_with_tokens_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("abcdz")
    drafter = load_drafter("suffix", ["memory=9", f"corpus={tmp_path / 'corpus.txt'}"])
    with pytest.raises(InputError, match=r"token 25 for .*, outside the vocabulary of 12"):
        drafter.bind(WithTokenizer(vocab_size=12, seed=3))


@pytest.mark.parametrize("name", ["corpus", "saved"])
def test_the_memory_does_not_begin_with_a_device(name: str) -> None:
    drafter = load_drafter("suffix", ["memory=9", f"{name}=/dev/null"])
    with pytest.raises(InputError, match="/dev/null is a device and no file"):
        drafter.bind(WithTokenizer(vocab_size=12, seed=3))


def test_a_corpus_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("some words")
    drafter = load_drafter("suffix", ["memory=9", f"corpus={tmp_path / 'corpus.txt'}"])
    with pytest.raises(InputError, match="no tokenizer"):
        drafter.bind(target())


@pytest.mark.parametrize(
    "option",
    [
        "min_match=0",
        "max_match=1",
        "factor=-1",
        "factor=nan",
        "min_probability=2",
        "memory=-1",
        "length=0",
    ],
)
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=option.partition("=")[0]):
        load_drafter("suffix", [option])
