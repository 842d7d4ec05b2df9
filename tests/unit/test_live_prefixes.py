"""Training pairs for live translation: prefixes are in proportion, and never empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import InputError
from draftsmith.live.streams import prefix_pairs

SIDES = st.text(alphabet="ab ü\u3042", min_size=1, max_size=30).filter(str.strip)
SHARES = st.sampled_from([0.0, 0.2, 0.5, 0.75])


def split(
    result: list[tuple[str, str]], pairs: list[tuple[str, str]]
) -> list[list[tuple[str, str]]]:
    """The prefixes that follow each of the pairs, which must all be there in their order."""
    groups: list[list[tuple[str, str]]] = []
    for pair in result:
        if len(groups) < len(pairs) and pair == pairs[len(groups)]:
            groups.append([])
        else:
            groups[-1].append(pair)
    assert len(groups) == len(pairs)
    return groups


def test_a_pair_of_even_words_is_cut_at_the_same_place_on_both_sides() -> None:
    pairs = [("a b c d e", "A B C D E")] * 40
    prefixes = [one for group in split(prefix_pairs(pairs, 0.5, 0), pairs) for one in group]
    assert {source for source, _ in prefixes} == {"a", "a b", "a b c", "a b c d"}
    assert all(target == source.upper() for source, target in prefixes)


def test_proportions_are_rounded_down_but_never_to_nothing() -> None:
    pairs = [("a b c d", "X Y Z")] * 40
    prefixes = {one for group in split(prefix_pairs(pairs, 0.5, 1), pairs) for one in group}
    assert prefixes == {("a", "X"), ("a b", "X"), ("a b c", "X Y")}


def test_languages_without_spaces_are_cut_by_characters() -> None:
    pairs = [("the exam was hard", "考试很难")] * 30
    result = prefix_pairs(pairs, 0.5, 0, target_unit="char")
    assert set(result) - set(pairs) == {
        ("the", "考"),
        ("the exam", "考试"),
        ("the exam was", "考试很"),
    }


def test_white_space_inside_a_prefix_stays() -> None:
    pairs = [("a  b\tc", "x  y z")] * 30
    assert set(prefix_pairs(pairs, 0.5, 0)) - set(pairs) == {("a", "x"), ("a  b", "x  y")}


@given(st.lists(st.tuples(SIDES, SIDES), max_size=6), SHARES, st.integers(0, 5))
def test_prefixes_are_proper_and_have_words_on_both_sides(
    pairs: list[tuple[str, str]], share: float, seed: int
) -> None:
    assert prefix_pairs(pairs, share, seed) == prefix_pairs(pairs, share, seed)
    for number, (source, target) in enumerate(pairs):
        alone = prefix_pairs(pairs[: number + 1], share, seed)
        mine = alone[len(prefix_pairs(pairs[:number], share, seed)) :]
        assert mine[0] == (source, target)
        for said, translated in mine[1:]:
            assert source.startswith(said) and len(said.split()) < len(source.split())
            assert target.startswith(translated)
            assert said.split() and translated.split()
            assert len(translated.split()) == max(
                1, int(len(target.split()) * len(said.split()) / len(source.split()) + 1e-9)
            )


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_prefixes_make_the_share_asked_for(share: float) -> None:
    pairs = [("a b c d", "w x y z")] * 2000
    result = prefix_pairs(pairs, share, 3)
    # At 0.2 a prefix comes with chance 0.25: 500 +- 19 of about 2500, so 0.04 is beyond five
    # standard deviations; the other shares leave nothing to chance.
    assert (len(result) - len(pairs)) / len(result) == pytest.approx(
        share, abs=0.04 if share == 0.2 else 1e-9
    )


def test_one_word_has_no_prefix() -> None:
    assert prefix_pairs([("Run!", "Lauf schnell!")], 0.9, 0) == [("Run!", "Lauf schnell!")]


def test_the_seed_decides_the_cuts() -> None:
    pairs = [("a b c d e f g h", "A B C D E F G H")] * 10
    assert prefix_pairs(pairs, 0.5, 0) != prefix_pairs(pairs, 0.5, 1)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", "b"), ("c", " ")], "target of pair 2 is empty"),
        ([("", "b")], "source of pair 1 is empty"),
    ],
)
def test_what_cannot_be_used_is_refused(pairs: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prefix_pairs(pairs, 0.5, 0)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_out_of_its_range_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="--prefixes must lie in"):
        prefix_pairs([("a", "b")], share, 0)
