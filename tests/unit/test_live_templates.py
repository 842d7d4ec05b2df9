"""Prompts: a template is read as the model reads texts; what comes from outside is letters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.live_cases import a_target
from tests.tiny_models import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from draftsmith.errors import InputError
from draftsmith.live.templates import INSTRUCTION, Template
from draftsmith.targets.hf import HFTarget

CHAT = "{% for m in messages %}<end>{{ m['role'] }}: {{ m['content'] }}{% endfor %}<end>answer:"


@pytest.fixture
def target() -> HFTarget:
    return a_target()


def test_special_tokens_in_a_source_are_letters(target: HFTarget) -> None:
    plain = Template(tokenizer=target.tokenizer, language="cats")
    ids = plain.encode("the <end> of it")
    assert 0 not in ids and "the <end> of it" in target.tokenizer.decode(ids)
    target.tokenizer.chat_template = CHAT
    chat = Template(tokenizer=target.tokenizer, language="cats", chat=True)
    ids = chat.encode("the <end> of it", [("old <end>", "<end> new")])
    assert ids.count(0) == 4  # three turns and the answer's own
    strange = replace(chat, language="<end>cats")
    assert strange.encode("the cat").count(0) == 2
    assert "<end>cats: the cat" in target.tokenizer.decode(strange.encode("the cat"))
    text = target.tokenizer.decode(ids)
    assert text.endswith("user: Translate to cats: the <end> of it\n<end>answer:")
    target.tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        Template(tokenizer=target.tokenizer, language="cats", chat=True)
    with pytest.raises(InputError, match="once"):
        Template(tokenizer=target.tokenizer, language="cats", text="Translate!")


def test_added_tokens_that_are_not_special_are_letters_too() -> None:
    tokenizer = a_target().tokenizer
    tokenizer.add_tokens(["<think>"])
    template = Template(tokenizer=tokenizer, language="cats")
    ids = template.encode("a <think> of <think><think>")
    assert max(ids) < 300 and tokenizer.decode(ids).count("<think>") == 3


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_is_one_text_as_in_training(target: HFTarget, chat: bool) -> None:
    tokenizer = target.tokenizer
    tokenizer.chat_template = CHAT
    template = Template(tokenizer=tokenizer, language="cats", text=INSTRUCTION, chat=chat)
    text = INSTRUCTION.replace("{language}", "cats").replace("{source}", "the cat sat")
    if chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.encode("the cat sat") == tokenizer.encode(text, add_special_tokens=False)


def test_a_template_may_hold_tokens_of_the_model(target: HFTarget) -> None:
    text = "<end>{language}\n{source}<end>answer:"
    template = Template(tokenizer=target.tokenizer, language="cats", text=text)
    for source, language in (("the cat", "cats"), ("a <end> of <end>", "cats"), ("the", "<end>s")):
        ids = replace(template, language=language).encode(source)
        assert ids.count(0) == 2 and ids[0] == 0
        assert target.tokenizer.decode(ids) == text.replace("{source}", source).replace(
            "{language}", language
        )


def test_a_template_and_a_source_make_no_token_together(target: HFTarget) -> None:
    for text, source in (("<e{source}", "nd>"), ("{source}d>", "<en"), ("<en{source}d>", "")):
        assert 0 not in Template(tokenizer=target.tokenizer, language="cats", text=text).encode(
            source
        )
    target.tokenizer.add_tokens(["<end>s"])
    ids = Template(tokenizer=target.tokenizer, language="cats", text="<end>{source}").encode("s")
    assert ids[0] == 0 and max(ids) < 300


def test_added_tokens_that_overlap_are_letters(target: HFTarget) -> None:
    target.tokenizer.add_tokens(["<think>", "think>x", "<thi"])
    ids = Template(tokenizer=target.tokenizer, language="cats").encode("a <think>x")
    assert max(ids) < 300 and target.tokenizer.decode(ids).endswith("a <think>x\n")


def test_a_language_that_looks_like_a_place_is_a_name(target: HFTarget) -> None:
    template = Template(tokenizer=target.tokenizer, language="{source}{language}")
    text = target.tokenizer.decode(template.encode("the {language} cat"))
    assert text == "Translate to {source}{language}: the {language} cat\n"


@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_begins_as_texts_of_the_model_do(begins: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<end>"
    if begins:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", 0)]
        )
    ids = Template(tokenizer=tokenizer, language="cats").encode("the cat")
    assert (ids[0] == 0) == begins and ids.count(0) == begins


def test_models_that_can_think_are_told_not_to(target: HFTarget) -> None:
    target.tokenizer.chat_template = (
        CHAT + "{% if enable_thinking is defined and enable_thinking is false %} at once{% endif %}"
    )
    ids = Template(tokenizer=target.tokenizer, language="cats", chat=True).encode("the cat")
    assert target.tokenizer.decode(ids).endswith("<end>answer: at once")
