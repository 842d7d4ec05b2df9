"""What is not drafted from, and what is not shown: failures, other words, thoughts."""

from __future__ import annotations

import pytest
from tests.live_cases import a_target, a_translator, from_scratch

from draftsmith.core.decode import Session
from draftsmith.errors import BackendError
from draftsmith.live.engine import Job, Outcome
from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.translator import LiveConfig
from draftsmith.targets.hf import HFTarget


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return a_target()


def an_outcome(tokens: tuple[int, ...]) -> Outcome:
    return Outcome(
        tokens=tokens, whole=True, drafted=0, accepted=0, redrafted=0, reaccepted=0,
        forwards=1, fed=1, seconds=0.1, first_seconds=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("fails", [1, 2])
@pytest.mark.parametrize("error", [BackendError("NaN"), RuntimeError("no memory")])
def test_behind_a_failure_all_is_read_again_without_a_draft(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch, fails: int, error: Exception
) -> None:
    """Once: what fails twice is an error, and the translation goes on from what it had."""
    translator = a_translator(target, bias=0.5)
    shown = translator.update("the cat sat")
    assert shown is not None and shown.tokens
    left, jobs, inner = fails, [], translator.engine.run

    def failing(job: Job, session: Session) -> Outcome:
        nonlocal left
        jobs.append(job)
        left -= 1
        if left >= 0:
            raise error
        return inner(job, session)

    monkeypatch.setattr(translator.engine, "run", failing)
    if fails == 2:
        with pytest.raises(type(error)):
            translator.update("the cat sat on")
        assert translator.last is shown
        return
    update = translator.update("the cat sat on")
    assert [job.draft for job in jobs] == [shown.tokens, ()]
    assert update is not None and update.record.drafted == 0 and update.record.restarts == 1
    assert update.record.fed >= len(jobs[1].prompt)
    assert update.tokens == from_scratch(target, list(jobs[1].prompt), jobs[1].max_new_tokens)
    again = translator.update("the cat sat on the")
    assert again is not None and again.record.drafted > 0 and again.record.restarts == 0
    assert report([update.record, again.record], CHARACTERS).restarts == 1


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
    target: HFTarget, before: str, after: str, share: float
) -> None:
    translator = a_translator(target)
    translator.take_in(before, an_outcome((5, 6)), final=False)
    for least in (0.0, 0.3, 0.4, 0.6, 1.0):
        translator.config = LiveConfig(min_common=least)
        assert bool(translator.job(after, final=False).draft) == (share >= least)


def test_a_closing_full_stop_can_be_left_out_of_the_draft(target: HFTarget) -> None:
    """Of the last token alone; what is shown stays."""
    dot, comma = (target.tokenizer.encode(sign)[0] for sign in ".,")
    translator = a_translator(target, trim_full_stop=True)
    for tokens, draft in (
        ((5, 6, dot), (5, 6)), ((5, dot, 6), (5, dot, 6)), ((5, comma), (5, comma)), ((dot,), ()),
    ):  # fmt: skip
        update = translator.take_in("the cat sat on", an_outcome(tokens), final=False)
        assert update.text == target.tokenizer.decode(tokens)
        assert translator.job("the cat sat on the", final=False).draft == draft


def test_thoughts_are_not_shown_and_are_no_answer(target: HFTarget) -> None:
    def said(*texts: str) -> tuple[int, ...]:
        return tuple(token for text in texts for token in target.tokenizer.encode(text))

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
    translator = a_translator(target, bias=0.5)
    for source, (tokens, text) in outputs.items():
        update = translator.take_in(source, an_outcome(tokens), final=False)
        assert update.text == update.record.full == text
        assert update.record.degenerate == (source in ("the cat sat", "the cat sat on"))
    assert translator.job("the", final=False).draft == tokens
