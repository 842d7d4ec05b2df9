"""Prompts for translation: constant words, the source, and what starts the answer.

    mini-ende      Translate to German: This is an exam.\\n
    instruction    any text with {source}, and {language} if it likes
    chat           the model's own template around an instruction

Special tokens such as <|im_end|> in a template are encoded as such. In a source they are text: a
special token that is spelt out there is encoded letter by letter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

from draftsmith.config import check_text
from draftsmith.data.prompts import MINI, Message, check_prompt, filled, render_chat
from draftsmith.errors import InputError
from draftsmith.live.config import PromptConfig

INSTRUCTION = (
    "Translate the following text into {language}. Answer with the translation alone.\n\n{source}"
)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Encloses the numbers of outside texts while a template is rendered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """Turns a source into prompt tokens, for one model and language."""

    tokenizer: Any
    language: str
    text: str = MINI
    """Contains {source}, and optionally {language}."""
    chat: bool = False
    """The text is the user message of the model's chat template."""

    @classmethod
    def of(cls, config: PromptConfig, tokenizer: Any) -> Template:
        """Make the template that the configuration selects.

        Raises:
            InputError: `chat` is selected and the model has no chat template.
        """
        chats = bool(getattr(tokenizer, "chat_template", None))
        chat = config.template == "chat" or (config.template == "auto" and chats)
        named = {
            "auto": INSTRUCTION if chats else MINI,
            "chat": INSTRUCTION,
            "mini": MINI,
            "instruction": f"{INSTRUCTION}\n\n",
        }
        text = named.get(config.template, config.template)
        return cls(tokenizer=tokenizer, language=config.language.strip(), text=text, chat=chat)

    def __post_init__(self) -> None:
        check_prompt(self.text, "a template")
        if self.chat and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("the model has no chat template: give a plain one")

    def encode(self, source: str, context: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Return the prompt's tokens; `context`: (source, translation) pairs of earlier segments.

        rendered   Translate to 0: 1 \\n      0 .. n: marks, one per text from outside

        Raises:
            InputError: the source is not valid Unicode.
        """
        for text in (source, *(side for pair in context for side in pair)):
            check_text(text, "the text")
        outside: list[str] = []

        def mark(text: str) -> str:
            outside.append(text)
            return f"{_MARK}{len(outside) - 1}{_MARK}"

        def question(text: str) -> str:
            return filled(self.text, language=mark(self.language), source=mark(text))

        turns = [(question(text), mark(answer)) for text, answer in context]
        if self.chat:
            return self._encoded(self._chat(turns, question(source)), outside)
        pairs = [f"{asked}{answer}\n" for asked, answer in turns]
        ids = self._encoded("".join([*pairs, question(source)]), outside)
        return [*self._begins(), *ids]

    def _begins(self) -> list[int]:
        """Return the tokens that the tokenizer puts before every text."""
        first = getattr(self.tokenizer, "bos_token_id", None)
        return [first] if first is not None and self.tokenizer.encode("")[:1] == [first] else []

    def _chat(self, turns: Sequence[tuple[str, str]], last: str) -> str:
        """Render the turns with the model's chat template."""
        messages = []
        for question, answer in turns:
            messages.append(Message(role="user", content=question))
            messages.append(Message(role="assistant", content=answer))
        messages.append(Message(role="user", content=last))
        return render_chat(self.tokenizer, messages, {"enable_thinking": False})

    def _encoded(self, rendered: str, outside: Sequence[str]) -> list[int]:
        """Encode one text as in training, but split special tokens that came from outside."""
        text, spans = "", []
        for number, piece in enumerate(rendered.split(_MARK)):
            inner = outside[int(piece)] if number % 2 else piece
            if number % 2:
                spans.append((len(text), len(text) + len(inner)))
            text += inner
        places = sorted({0, *self._spelt(text, spans), len(text)})
        pieces = [text[begin:end] for begin, end in pairwise(places)]
        if not pieces:
            return []
        # in one call: a source may spell thousands of special tokens
        encoded = self.tokenizer(pieces, add_special_tokens=False)["input_ids"]
        return list(chain.from_iterable(encoded))

    def _spelt(self, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Yield a position inside each added token that overlaps one of the spans."""
        added = [token for token in self.tokenizer.get_added_vocab() if token in text]
        if not added:
            return
        longest = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        for found in re.finditer(f"(?=({longest}))", text):  # they may overlap
            begin, end = found.span(1)
            for first, _ in spans[bisect_right(spans, begin, key=itemgetter(1)) :]:
                if first >= end:
                    break
                yield max(begin + 1, first)
