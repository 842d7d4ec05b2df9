"""What is not drafted from, and what is not shown: failures, other words, thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.live_cases import a_target, a_translator, from_scratch

from draftsmith.errors import BackendError
from draftsmith.live.config import LiveConfig
from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.translator import InFlightUpdate
from draftsmith.targets.hf import HFTarget


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return a_target()


@pytest.fixture(scope="module")
def endless() -> HFTarget:
    """Token 0 alone ends a text, so that outputs can be written down by hand."""
    return a_target(ends=0)


def decoded(source: str, tokens: tuple[int, ...]) -> InFlightUpdate:
    """An update whose output is these tokens."""
    return InFlightUpdate(
        source=source, final=False, prompt=(1,), draft=(), bias=0.0, max_new_tokens=99,
        tokens=list(tokens), offered=[0], seconds=0.1, first_seconds=0.1, done=True, ended=True,
    )  # fmt: skip


@pytest.mark.parametrize("fails", [1, 2])
@pytest.mark.parametrize("error", [BackendError("NaN"), RuntimeError("no memory")])
def test_behind_a_failure_all_is_read_again_without_a_draft(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch, fails: int, error: Exception
) -> None:
    """Once: what fails twice is an error, and the translation goes on from what it had."""
    translator = a_translator(target, bias=0.5)
    shown = translator.update("the cat sat")
    assert shown is not None and shown.output
    left, drafts, inner = fails, [], translator.engine.steps
    asked: list[InFlightUpdate] = []

    def failing(updates: list[InFlightUpdate], *given: Any) -> Iterator[None]:
        nonlocal left
        (update,) = updates
        drafts.append(update.draft)
        asked.append(update)
        left -= 1
        if left >= 0:
            raise error
        return inner(updates, *given)

    monkeypatch.setattr(translator.engine, "steps", failing)
    if fails == 2:
        with pytest.raises(type(error)):
            translator.update("the cat sat on")
        assert translator.last is shown
        return
    update = translator.update("the cat sat on")
    assert drafts == [shown.output, ()]
    assert update is not None and update.drafted == 0 and update.restarts == 1
    assert update.fed >= len(asked[1].prompt)
    assert update.output == from_scratch(target, list(asked[1].prompt), asked[1].max_new_tokens)
    again = translator.update("the cat sat on the")
    assert again is not None and again.drafted > 0 and again.restarts == 0
    assert report([update, again], CHARACTERS).restarts == 1


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ("the cat sat on", "the cat sat on the mat", 1.0),
        ("the cat sat o", "the cat sat on", 1.0),
        ("the cat sat on", "a dog sat on", 1 / 3),
        ("the cat sat on", "\u0432\u0441\u0435 \u043a\u043e\u0448\u043a\u0438", 0.0),
        ("the the cat", "the dog", 1 / 2),
        ("the the cat", "see the the", 1.0),
        ("the", "\u6211\u559c\u6b22", 1.0),  # it may be a word that was being written
        ("\u6211\u559c\u6b22", "\u6211\u559c\u6b22\u732b", 1.0),
    ],
)
def test_a_draft_for_other_words_can_be_dropped(
    endless: HFTarget, before: str, after: str, share: float
) -> None:
    translator = a_translator(endless)
    translator.finish(decoded(before, (5, 6)))
    for least in (0.0, 0.3, 0.4, 0.6, 1.0):
        translator.config = LiveConfig(min_common=least)
        assert bool(translator.begin(after, final=False).draft) == (share >= least)


def test_a_closing_full_stop_can_be_left_out_of_the_draft(endless: HFTarget) -> None:
    """Only the last token is left out; what is shown stays."""
    dot, comma = (endless.tokenizer.encode(sign)[0] for sign in ".,")
    translator = a_translator(endless, trim_full_stop=True)
    for tokens, draft in (
        ((5, 6, dot), (5, 6)), ((5, dot, 6), (5, dot, 6)), ((5, comma), (5, comma)), ((dot,), ()),
    ):  # fmt: skip
        update = translator.finish(decoded("the cat sat on", tokens))
        assert update.shown == endless.tokenizer.decode(tokens)
        assert translator.begin("the cat sat on the", final=False).draft == draft


def test_thoughts_are_not_shown_and_are_no_answer(endless: HFTarget) -> None:
    def said(*texts: str) -> tuple[int, ...]:
        return tuple(token for text in texts for token in endless.tokenizer.encode(text))

    outputs = {
        "the cat": (
            said("<think>", "\nadd </thin", "left\n</think>", "\n\n", "def add"),
            "def add",
        ),
        "the cat sat": (said("<think>", "left and right"), "def add"),  # no answer: text stays
        "the cat sat on": (said("<think>\n\n</think>", "\n\n"), "def add"),
        "the cat sat on the": (said("<thinking"), "<thinking"),
        "the cat sat on the mat": (said("so <think>a</think>"), "so <think>a</think>"),
    }
    translator = a_translator(endless, bias=0.5)
    for source, (tokens, text) in outputs.items():
        update = translator.finish(decoded(source, tokens))
        assert update.shown == update.full == text
        assert update.degenerate == (source in ("the cat sat", "the cat sat on"))
    assert translator.begin("the", final=False).draft == tokens
