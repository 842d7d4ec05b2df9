"""Strict configuration: every wrong input is our own error, every right one round-trips."""

from __future__ import annotations

import contextlib
import enum
import math
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftsmith.config import (
    Duration,
    as_dict,
    from_dict,
    override,
    parse_bytes,
    parse_list,
)
from draftsmith.errors import InputError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    width: int
    kind: Literal["a", "b", 3] = "a"
    on: bool = False
    limit: int | None = None
    length: int | Literal["adaptive"] = 5
    betas: tuple[float, float] = (0.9, 0.95)
    layers: list[int] = field(default_factory=list)
    where: Path = Path("here")
    colour: Colour = Colour.RED
    table: dict[str, float] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    pair: tuple[str, int] = ("a", 1)
    switches: tuple[bool, ...] = ()
    note: str | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.width == 13:
            raise ValueError("width 13 brings bad luck")


GOOD: dict[str, Any] = {
    "width": 4,
    "kind": "b",
    "on": True,
    "limit": 2,
    "length": "adaptive",
    "betas": [0.8, 1],
    "layers": [1, 2],
    "where": "there",
    "colour": "blue",
    "table": {"x": 1},
    "levels": {"1": 2},
    "pair": ["b", 2],
    "switches": [True],
    "note": "n",
    "inner": {"rate": 1, "names": ["u", "v"]},
}


def test_as_dict_and_from_dict_are_inverse() -> None:
    options = from_dict(Outer, GOOD)
    assert options.inner == Inner(rate=1.0, names=("u", "v"))
    assert options.betas == (0.8, 1.0)
    assert options.where == Path("there")
    assert from_dict(Outer, as_dict(options)) == options


def test_values_may_be_python_objects_of_the_field() -> None:
    inner = Inner(rate=2.0, names=("u",))
    values = {"width": 1, "where": Path("a"), "colour": Colour.BLUE, "inner": inner, "layers": (1,)}
    made = from_dict(Outer, values)
    assert (made.where, made.colour, made.inner, made.layers) == (
        Path("a"),
        Colour.BLUE,
        inner,
        [1],
    )
    with pytest.raises(InputError, match="Outer cannot be used"):
        from_dict(Outer, {"width": object()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widht": 1}, "did you mean 'width'"),
        ({"width": "4"}, "option width: expected int, got '4'"),
        ({"width": True}, "expected int"),
        ({"width": 4.0}, "expected int"),
        ({"on": 1}, "expected bool"),
        ({"kind": "c"}, "one of a, b, 3"),
        ({"betas": [1.0]}, "expected 2 values, got 1"),
        ({"betas": [1.0, "x"]}, r"betas\[1\]"),
        ({"layers": "1,2"}, "expected"),
        ({"colour": "green"}, "expected Colour"),
        ({"note": 3}, "expected str or none"),
        ({"inner": {"rat": 1}}, "'rat' in inner; did you mean 'rate'"),
        ({"inner": 3}, "expected options of Inner in inner"),
        ({"width": 13}, "bad luck"),
        ({"width": np.int64(4)}, r"plain values, got np\.int64\(4\)"),
        ({"width": reduce(lambda inner, _: [inner], range(300), [])}, "Outer: .* too deep"),
        ({"note": "\ud800"}, "Outer: expected whole characters"),
        ({"inner": {"rate": 10**400}}, "option inner.rate: expected float, got 1000"),
        ({"where": "a\0b"}, "option where: expected Path"),
        ({"kind": 3.0}, "one of a, b, 3, got 3.0"),
        ({"kind": True}, "one of a, b, 3, got True"),
        ({"levels": {"x": 2}}, "option levels: expected int, got 'x'"),
        ({"levels": {1: "x"}}, r"option levels\.1: expected int, got 'x'"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_dict(Outer, GOOD | change)


def test_a_missing_required_option_is_named_with_its_file() -> None:
    with pytest.raises(InputError, match=r"'width'.*Outer.*x\.json"):
        from_dict(Outer, {}, where="x.json")


def test_override_parses_text_by_the_type_of_the_field() -> None:
    words = [
        "width=7",
        "on=yes",
        "limit=none",
        "length=adaptive",
        "betas=0.1,0.2",
        "layers=3,4",
        "colour=blue",
        "kind=3",
        "inner.rate=2",
        "inner.names=p,q",
        "note=none",
        "pair=c,3",
        "switches=yes,off",
    ]
    options = override(Outer(width=1), words)
    assert options.width == 7
    assert options.on is True
    assert options.limit is None
    assert options.length == "adaptive"
    assert options.betas == (0.1, 0.2)
    assert options.layers == [3, 4]
    assert options.colour is Colour.BLUE
    assert options.kind == 3
    assert options.inner == Inner(rate=2.0, names=("p", "q"))
    assert options.note is None
    assert options.pair == ("c", 3)
    assert options.switches == (True, False)


@dataclass(frozen=True)
class Interval:
    least: int = 2
    most: int = 9

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise InputError("most is below least")


@pytest.mark.parametrize("words", [["least=30", "most=40"], ["most=40", "least=30"]])
def test_options_that_need_each_other_come_in_any_order(words: list[str]) -> None:
    assert override(Interval(), words) == Interval(30, 40)
    with pytest.raises(InputError, match="most is below least"):
        override(Interval(), ["least=30"])


@dataclass(frozen=True)
class MayLack:
    inner: Inner | None = field(default_factory=Inner)


def test_options_of_what_was_left_out_are_refused() -> None:
    with pytest.raises(InputError, match="'inner' has no options of its own"):
        override(MayLack(), ["inner=none", "inner.rate=3"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("width", "expected key=value"),
        ("=3", "expected key=value"),
        ("wdth=3", "did you mean 'width'"),
        ("inner.rte=3", "did you mean 'rate'"),
        ("width.x=3", "has no options of its own"),
        ("width=three", "expected int"),
        ("on=perhaps", "expected bool"),
        ("inner=3", "expected options of Inner"),
        ("layers=1,x", r"option layers\[1\]: expected int, got 'x'"),
        ("pair=a", "option pair: expected 2 values, got 1"),
    ],
)
def test_a_wrong_override_is_named(word: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(Outer(width=1), [word])


@pytest.mark.parametrize("text", ["1e3MB", "1e-3GB", "1e999GB", "5.GB", "0", "GB", "5XB"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--size.*size.*500MB"):
        parse_bytes(text, "--size")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\u017fteps", "like 2000steps"),
        ("5STEPS", "like 2000steps"),
        ("5.steps", "like 2000steps"),
        ("1e3steps", "like 2000steps"),
        ("0steps", "above 0"),
        (f"5{'0' * 400}steps", "and finite"),
    ],
)
def test_a_text_that_is_no_duration_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--duration.*{message}"):
        Duration.parse(text)


def test_comma_lists() -> None:
    assert parse_list("0, 0.8", float, name="--temperature") == (0.0, 0.8)
    for text in ("", ",", "1,,2", "a"):
        with pytest.raises(InputError, match="--temperature"):
            parse_list(text, float, name="--temperature")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted(GOOD)) | st.text(max_size=8)
FUZZ = settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.dictionaries(NAMES, JSON, max_size=4), JSON)
@example({"table": {"\n": None}}, None)
def test_any_mutation_of_a_dictionary_works_or_is_our_error(
    change: dict[str, Any], inner: object
) -> None:
    for values in (GOOD | change, {**GOOD, "inner": inner}, inner):
        try:
            options = from_dict(Outer, values)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            again = as_dict(from_dict(Outer, as_dict(options)))
            assert repr(again) == repr(as_dict(options)), "the round trip changed a value"


@FUZZ
@given(NAMES, st.sampled_from(["", ".rate", ".names", ".x"]), st.text(max_size=12))
def test_any_override_works_or_is_our_error(name: str, tail: str, text: str) -> None:
    for word in (f"{name}{tail}={text}", text):
        with contextlib.suppress(InputError):
            assert isinstance(override(Outer(width=1), [word]), Outer)


@FUZZ
@given(st.text(max_size=10))
def test_any_list_works_or_is_our_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert all(isinstance(x, float) for x in parse_list(text, float, name="x"))


def test_numbers_that_are_not_finite_pass_through_for_validate_to_judge() -> None:
    assert math.isnan(override(Inner(), ["rate=nan"]).rate)
