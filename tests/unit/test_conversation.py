"""`Conversation`: a chat over a session answers as a chat that is asked afresh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import CHAT, NO_SYSTEM, save_pair, tiny_model, tiny_tokenizer

from draftsmith import Conversation, DecodeStep, Generator, SamplingParams
from draftsmith.core.conversation import Turn
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={0: -100.0})
ASKED = ("the cat sat on the mat", "def add(left, right):", "and the dog?")


def make_target(template: str | None = CHAT, *, context: int = 512) -> HFTarget:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return HFTarget(tiny_model(context=context).double(), tokenizer, end_ids=frozenset({0}))


@pytest.fixture
def generator() -> Generator:
    return Generator(make_target())


def chat_of(turns: list[Turn], text: str, system: str | None = None) -> list[dict[str, str]]:
    chat = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        chat.append({"role": "user", "content": turn.user})
        chat.append({"role": "assistant", "content": turn.text})
    return [*chat, {"role": "user", "content": text}]


def afresh(conversation: Conversation, text: str) -> tuple[int, ...]:
    """What a generator that knows nothing of the session says next."""
    chat = chat_of(conversation.turns, text, conversation.system)
    (made,) = Generator(make_target()).generate([chat], GREEDY)
    return made.token_ids


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "lookahead", "independent"])
def test_a_session_answers_as_a_chat_that_is_asked_afresh(drafter: str, tmp_path: Path) -> None:
    if drafter == "independent":
        save_pair(tmp_path)
        drafter = f"independent:{tmp_path / 'draft'}"
    conversation = Conversation(Generator(make_target(), drafter), GREEDY, system="be brief")
    for number, text in enumerate(ASKED):
        expected = afresh(conversation, text)
        turn = conversation.ask(text)
        assert turn.token_ids == expected
        assert (turn.user, turn.finish_reason) == (text, "length")
        # the turns before are not computed again
        assert (turn.cached_tokens > 0) == (number > 0)
        assert turn.cached_tokens < turn.prompt_tokens
    assert [turn.user for turn in conversation.turns] == list(ASKED)
    assert len({turn.cached_tokens for turn in conversation.turns}) == len(ASKED), "it grows"


def test_undo_reset_and_another_system_text(generator: Generator) -> None:
    conversation = Conversation(generator, GREEDY)
    with pytest.raises(InputError, match="no turn to take back"):
        conversation.undo()
    first, second = (conversation.ask(text) for text in ASKED[:2])
    assert conversation.undo() is second
    expected = afresh(conversation, ASKED[2])
    assert conversation.ask(ASKED[2]).token_ids == expected
    conversation.set_system("be brief")
    expected = afresh(conversation, ASKED[1])
    assert conversation.ask(ASKED[1]).token_ids == expected != second.token_ids
    conversation.reset()
    assert conversation.turns == [] and conversation.system == "be brief"
    conversation.set_system(None)
    assert conversation.ask(ASKED[0]).token_ids == first.token_ids


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_went(generator: Generator) -> None:
    conversation, seen = Conversation(generator, GREEDY), []
    whole = conversation.ask(ASKED[0])
    conversation.undo()
    cut = conversation.ask(ASKED[0], on_step=seen.append, stop=lambda: len(seen) == 3)
    assert cut.finish_reason == "interrupted" and cut.token_ids == whole.token_ids[:3]
    assert conversation.turns == [cut] and cut.metrics.emitted == cut.metrics.steps == 3
    expected = afresh(conversation, ASKED[1])
    turn = conversation.ask(ASKED[1])
    assert turn.token_ids == expected and turn.cached_tokens > 0


def test_an_interrupt_inside_a_step_keeps_the_conversation(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, steps = Conversation(generator, GREEDY), 0
    forward = generator.target.forward

    def interrupted(*words: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == wanted:
            raise KeyboardInterrupt
        return forward(*words)

    monkeypatch.setattr(generator.target, "forward", interrupted)
    wanted = 1  # before the first token: question and answer are forgotten
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(ASKED[0])
    assert conversation.turns == []
    steps, wanted = 0, 5
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(ASKED[0])
    (kept,) = conversation.turns
    assert kept.finish_reason == "interrupted" and len(kept.token_ids) == 4
    expected = afresh(conversation, ASKED[1])
    assert conversation.ask(ASKED[1]).token_ids == expected


def test_an_error_of_the_caller_is_no_answer(generator: Generator) -> None:
    conversation = Conversation(generator, GREEDY)

    def fail(_: DecodeStep) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        conversation.ask(ASKED[0], on_step=fail)
    assert conversation.turns == []
    assert conversation.ask(ASKED[0]).token_ids == afresh(Conversation(generator), ASKED[0])


def test_the_oldest_turns_go_when_the_context_is_full(caplog: pytest.LogCaptureFixture) -> None:
    conversation = Conversation(Generator(make_target(context=128)), GREEDY, system="be brief")
    dropped = 0
    with caplog.at_level("INFO", logger="draftsmith"):
        for number in range(8):
            before = list(conversation.turns)
            turn = conversation.ask(f"the cat {number}")
            assert turn.finish_reason == "length", "there is room for the whole answer"
            assert conversation.turns == [*before[turn.dropped_turns :], turn]
            written = generator_text(conversation, turn)
            assert written.startswith("<system> be brief\n<user> ")
            assert written.endswith(f"<user> the cat {number}\n<assistant>")
            dropped += turn.dropped_turns
    assert dropped > 0
    assert any("oldest 1 of" in message for message in caplog.messages)


def generator_text(conversation: Conversation, turn: Turn) -> str:
    """The chat that this turn was asked with; its length is what the turn says."""
    tokenizer = make_target().tokenizer
    chat = chat_of(conversation.turns[:-1], turn.user, conversation.system)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert len(tokenizer.encode(text)) == turn.prompt_tokens
    return str(text)


def test_a_turn_that_fits_alone_may_use_the_rest_of_the_context() -> None:
    target = make_target(context=64)
    long = dataclasses.replace(GREEDY, max_tokens=None)
    conversation = Conversation(Generator(target), long)
    tokenizer = target.tokenizer
    text = "the cat "
    while len(tokenizer.encode(f"<user> {text}the \n<assistant>")) < 60:
        text += "the "
    turn = conversation.ask(text)
    assert turn.finish_reason == "context" and turn.prompt_tokens + len(turn.token_ids) == 64


def test_what_cannot_be_asked_leaves_the_conversation_as_it_was() -> None:
    conversation = Conversation(Generator(make_target(context=128)), GREEDY)
    first = conversation.ask(ASKED[0])
    for text, said in {
        "": "empty",
        " \n\t": "empty",
        "caf\udce9": "lone surrogate",
        "a\0b": "NUL",
        "x y z " * 100: r"this turn has \d+ tokens, but .* context of 128",
    }.items():
        with pytest.raises(InputError, match=said):
            conversation.ask(text)
        assert conversation.turns == [first]
    wrong: Any = [{"role": "user", "content": ASKED[1]}]
    with pytest.raises(InputError, match="the turn must be a text"):
        conversation.ask(wrong)
    assert conversation.ask(ASKED[1]).cached_tokens > 0


def test_a_target_that_is_no_chat_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"has no chat template.* use `generate`"):
        Conversation(Generator(make_target(None)))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NO_SYSTEM + CHAT, "no system role"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
    ],
)
def test_a_template_that_takes_no_system_text_is_refused_and_chats_without_one(
    template: str, said: str
) -> None:
    generator = Generator(make_target(template))
    with pytest.raises(InputError, match=said):
        Conversation(generator, GREEDY, system="be brief")
    conversation = Conversation(generator, GREEDY)
    with pytest.raises(InputError, match=said):
        conversation.set_system("be brief")
    assert conversation.system is None
    assert conversation.ask(ASKED[0]).token_ids


@pytest.mark.parametrize("text", ["", " ", "a\0b", "caf\udce9", 5, b"brief"])
def test_a_system_text_is_a_text(generator: Generator, text: Any) -> None:
    with pytest.raises(InputError, match="the system text"):
        Conversation(generator, GREEDY, system=text)


def test_several_answers_to_a_turn_are_refused(generator: Generator) -> None:
    with pytest.raises(InputError, match="n=2"):
        Conversation(generator, SamplingParams(n=2))


def test_a_seed_repeats_a_conversation_and_a_turn_asked_again_is_drawn_anew() -> None:
    params = SamplingParams(max_tokens=16, seed=3)

    def talk() -> list[tuple[int, ...]]:
        conversation = Conversation(Generator(make_target(), "prompt_lookup"), params)
        answers = [conversation.ask(ASKED[0]).token_ids]
        conversation.undo()
        return [*answers, conversation.ask(ASKED[0]).token_ids]

    first, again = talk()
    assert first != again, "16 draws from laws that are far from certain"
    assert talk() == [first, again]
