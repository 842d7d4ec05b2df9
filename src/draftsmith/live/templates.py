"""Prompts of a translation: constant words first, then the source, then what asks for the answer.

    mini-ende      Translate to German: This is an exam.\\n
    instruction    any text with {source}, and {language} if it likes
    chat           the model's own template around an instruction

What comes from outside is text: a token of the template that is spelt out in a source, such as
<|im_end|>, is encoded letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import InputError
from draftsmith.live_options import MINI

INSTRUCTION = (
    "Translate the following text into {language}. Answer with the translation alone.\n\n{source}"
)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands around numbers of outside texts while a template is laid out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """How a source becomes tokens for one model and language."""

    tokenizer: Any
    language: str
    text: str = MINI
    """With {source} in it, and perhaps {language}."""
    chat: bool = False
    """The text is a user's message in the model's chat template."""

    def __post_init__(self) -> None:
        if self.text.count("{source}") != 1:
            raise InputError(f"a template holds {{source}} once, got {self.text!r}")
        if self.chat and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("the model has no chat template: give a plain one")

    def encode(self, source: str, context: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Token ids of the prompt; `context` are (source, translation) pairs of earlier segments.

        Raises:
            InputError: the source is not valid Unicode.
        """
        for text in (source, *(side for pair in context for side in pair)):
            check_text(text)
        if self.chat:
            return self._chat(source, context)
        pairs = [self._filled(said) + answer for said, answer in context]
        text = "".join(f"{pair}\n" for pair in pairs) + self._filled(source)
        return [*self._begins(), *self._letters(text)]  # one text, as in training

    def _filled(self, source: str) -> str:
        return self.text.replace("{language}", self.language).replace("{source}", source)

    def _begins(self) -> list[int]:
        """What the tokenizer puts before every text, such as a beginning of sequence."""
        first = getattr(self.tokenizer, "bos_token_id", None)
        return [first] if first is not None and self.tokenizer.encode("")[:1] == [first] else []

    def _chat(self, source: str, context: Sequence[tuple[str, str]]) -> list[int]:
        """The model's own turns, with what comes from outside put in as letters.

        rendered   <|user|> Translate 0. Hi <|end|> ...      0 .. n: marks, one per outside text
        """
        outside: list[str] = []

        def mark(text: str) -> str:
            outside.append(text)
            return f"{_MARK}{len(outside) - 1}{_MARK}"

        def turn(said: str) -> str:
            text = self.text.replace("{language}", mark(self.language))
            return text.replace("{source}", mark(said))

        messages = []
        for said, answer in context:
            messages.append({"role": "user", "content": turn(said)})
            messages.append({"role": "assistant", "content": mark(answer)})
        messages.append({"role": "user", "content": turn(source)})
        rendered: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        ids: list[int] = []
        for number, piece in enumerate(rendered.split(_MARK)):
            if number % 2:
                ids += self._letters(outside[int(piece)])
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _letters(self, text: str) -> list[int]:
        """Nothing in the text is an added token, special or not: each is cut behind its first
        letter."""
        added = self.tokenizer.get_added_vocab()
        pieces = [text]
        if any(token in text for token in added):
            pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
            pieces, start = [], 0
            for found in re.finditer(pattern, text):
                pieces.append(text[start : found.start() + 1])
                start = found.start() + 1
            pieces.append(text[start:])
        ids: list[int] = []
        for piece in filter(None, pieces):
            ids += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
        return ids


def check_text(text: str) -> None:
    """InputError for what no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds half a character (a lone surrogate): {error}") from None
    if "\0" in text:
        raise InputError("the text holds a NUL character")
