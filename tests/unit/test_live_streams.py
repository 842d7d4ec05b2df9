"""Streams made from whole sentences: lag prefixes, and recognisers that correct themselves."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import InputError
from draftsmith.live.records import Hypothesis
from draftsmith.live.streams import MOST_WRONG, lag_stream, make_stream

SENTENCES = st.text(alphabet="ab ü\u3042\u0301\t", min_size=1, max_size=30).filter(str.strip)
CORPUS = [
    "This is an example of self-speculative decoding.",
    "The longevity revolution gave everybody a second adult life.",
    "Run!",
    "We are living on average today thirty four years longer than our great grandparents did.",
]


def by_segment(stream: list[Hypothesis]) -> list[list[Hypothesis]]:
    return [list(group) for _, group in groupby(stream, key=lambda one: one.seg)]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("a", ["a"]),
        ("a b", ["a b"]),
        ("a b c", ["a b c"]),
        ("a b c d", ["a b c", "a b c d"]),
        ("a b c d e f", ["a b c", "a b c d e f"]),
        ("a b c d e f g", ["a b c", "a b c d e f", "a b c d e f g"]),
        (" a b c d  ", ["a b c", "a b c d"]),
        ("a  b\u00a0c\td", ["a  b\u00a0c", "a  b\u00a0c\td"]),
    ],
)
def test_lag_3_gives_every_third_word_and_the_whole_sentence_once(
    text: str, texts: list[str]
) -> None:
    stream = lag_stream(text, 5, 3, "r")
    assert [one.text for one in stream] == texts
    assert [one.rev for one in stream] == list(range(len(texts)))
    assert [one.final for one in stream] == [False] * (len(texts) - 1) + [True]
    assert {(one.seg, one.reference) for one in stream} == {(5, "r")}


def test_characters_are_those_that_readers_see() -> None:
    # An accent of its own, a family of three joined by two invisible characters, a space.
    text = "e\u0301ab \U0001f468\u200d\U0001f469\u200d\U0001f467c"
    assert [one.text for one in lag_stream(text, 0, 2, unit="char")] == [
        "e\u0301a",
        "e\u0301ab \U0001f468\u200d\U0001f469\u200d\U0001f467",
        text,
    ]


def test_a_language_without_spaces_grows_by_characters() -> None:
    stream = lag_stream("我们去公园吧。", 0, 3, unit="char")
    assert [one.text for one in stream] == ["我们去", "我们去公园吧", "我们去公园吧。"]
    assert [one.text for one in lag_stream("我们去公园吧。", 0, 3)] == ["我们去公园吧。"]


@given(
    st.lists(SENTENCES, min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["word", "char"]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.integers(0, 3),
)
def test_every_segment_ends_in_one_final_that_is_its_source(
    sources: list[str], lag: int, unit: str, rewrites: float, seed: int
) -> None:
    parts = by_segment(make_stream(sources, None, lag, unit, rewrites, seed))
    assert [part[0].seg for part in parts] == list(range(len(sources)))
    for part, source in zip(parts, sources, strict=True):
        assert [one.final for one in part] == [False] * (len(part) - 1) + [True]
        assert part[-1].text == source.strip()
        assert [one.rev for one in part] == list(range(len(part)))


def test_without_rewrites_every_hypothesis_begins_the_next_one() -> None:
    for part in by_segment(make_stream(CORPUS)):
        for one, following in pairwise(part):
            assert following.text.startswith(one.text)


def test_every_hypothesis_but_the_final_first_comes_wrong_when_all_are_rewritten() -> None:
    known = {word for sentence in CORPUS for word in sentence.split()}
    wrong_words: list[str] = []
    for seed in range(20):
        right = by_segment(make_stream(CORPUS, lag=2))
        both = by_segment(make_stream(CORPUS, lag=2, rewrites=1.0, seed=seed))
        for part, correct in zip(both, right, strict=True):
            assert [one.text for one in part[1::2]] == [one.text for one in correct[:-1]]
            assert part[-1].text == correct[-1].text
            for wrong, one in zip(part[:-1:2], correct[:-1], strict=True):
                heard, said = wrong.text.split(), one.text.split()
                same = next(i for i, word in enumerate(said) if heard[i : i + 1] != [word])
                assert len(said) - same <= MOST_WRONG
                for mine, theirs in zip(heard[same:], said[same:], strict=False):
                    assert mine != theirs
                    assert mine in known or theirs.startswith(mine)
                    wrong_words.append("replaced" if mine in known else "cut")
    assert set(wrong_words) == {"replaced", "cut"}


def test_the_chance_of_a_rewrite_is_the_one_asked_for() -> None:
    sources = ["one two three four five six seven eight nine ten"] * 200
    right = make_stream(sources, lag=1)
    extra = len(make_stream(sources, lag=1, rewrites=0.25)) - len(right)
    # 1800 draws at 0.25: 450, standard deviation 18.4; five of them, one false alarm in 10^6.
    assert abs(extra - 450) < 92


def test_a_segment_is_the_same_whatever_the_others_are() -> None:
    stream = by_segment(make_stream(CORPUS, rewrites=0.7, seed=4))
    others = ["Something else altogether, and longer than it was before, too.", *CORPUS[1:3], "Oh."]
    assert by_segment(make_stream(others, rewrites=0.7, seed=4))[1:3] == stream[1:3]
    assert by_segment(make_stream(CORPUS[:2], rewrites=0.7, seed=4)) == stream[:2]


def test_the_seed_decides_the_rewrites() -> None:
    assert make_stream(CORPUS, rewrites=0.5, seed=1) == make_stream(CORPUS, rewrites=0.5, seed=1)
    assert make_stream(CORPUS, rewrites=0.5, seed=1) != make_stream(CORPUS, rewrites=0.5, seed=2)


def test_every_hypothesis_carries_the_reference_of_its_segment() -> None:
    references = [f"Satz {i}" for i in range(len(CORPUS))]
    for one in make_stream(CORPUS, references, rewrites=1.0):
        assert one.reference == references[one.seg]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"references": ["x", "y"]}, "got 3 sources and 2 references"),
        ({"references": ["x", "y", " "]}, "reference line 3 is empty"),
        ({"sources": []}, "at least one source"),
        ({"sources": ["a", "", "c"]}, "source line 2 is empty"),
        ({"lag": 0}, "--lag must be at least 1"),
        ({"lag": -1}, "--lag must be at least 1"),
        ({"rewrites": 2.0}, "--rewrites must lie between 0 and 1"),
        ({"unit": "words"}, "unknown unit 'words'"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_stream(**{"sources": ["a", "b", "c"], **options})


def test_a_sentence_without_words_is_refused() -> None:
    with pytest.raises(InputError, match="segment 7"):
        lag_stream(" \t", 7, 3)
