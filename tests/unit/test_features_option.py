"""What `--features` asks for: words become signals, and drafters say theirs by themselves."""

from __future__ import annotations

import pytest
from tests.tiny_models import tiny_model
from transformers import LlamaConfig

from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.requests import (
    feature_width,
    parse_features,
    spell_features,
)
from draftsmith.drafters.config import kinds
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

CONFIG = LlamaConfig(num_hidden_layers=36, hidden_size=32)


@pytest.mark.parametrize("text", ["", "last", "3", "1,17,32", "32,1,last", "0,0,35"])
def test_words_and_signals_are_the_same_thing(text: str) -> None:
    signals = parse_features(text.split(",") if text else (), CONFIG)
    assert spell_features(signals) == text
    assert feature_width(signals, CONFIG) == 32 * len([word for word in text.split(",") if word])


def test_the_state_after_the_norm_comes_last_wherever_it_is_named() -> None:
    assert parse_features(("last", "5"), CONFIG) == Signals(layers=(5,), last_hidden=True)


@pytest.mark.parametrize(("layers", "fused"), [(36, (1, 17, 32)), (7, (1, 2, 3)), (4, (0, 1, 3))])
def test_nobody_needs_to_know_the_layers_of_eagle3(
    layers: int, fused: tuple[int, int, int]
) -> None:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=32)
    assert parse_features(("eagle3",), config) == Signals(layers=fused)


@pytest.mark.parametrize("words", [("-1",), ("1", "x"), ("griffin", "last"), ("36",), ("none",)])
def test_what_names_nothing_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        parse_features(words, CONFIG)


def test_a_drafter_says_before_it_is_bound_what_it_reads_then() -> None:
    target = HFTarget(tiny_model(), end_ids=frozenset({0}))
    reading = [
        kind for kind in kinds() if drafter_class(kind).signals_of(target.config) != Signals()
    ]
    known = {"eagle", "eagle3", "fspad", "griffin", "hass", "medusa", "p_eagle", "parallel"}
    assert known | {"unrolled"} <= set(reading)
    for kind in reading:
        drafter = drafter_class(kind)()
        drafter.bind(target)
        assert drafter.signals == drafter_class(kind).signals_of(target.config)
