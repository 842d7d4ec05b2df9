"""Prompts of a translation: constant words first, then the source, then what asks for the answer.

    mini-ende      Translate to German: This is an exam.\\n
    instruction    any text with {source}, and {language} if it likes
    chat           the model's own template around an instruction

What comes from outside is text: a token of the template that is spelt out in a source, such as
<|im_end|>, is encoded letter by letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import InputError
from draftsmith.live_options import MINI

INSTRUCTION = (
    "Translate the following text into {language}. Answer with the translation alone.\n\n{source}"
)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the source while a template is laid out."""


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
        before, after = self._around(context)
        if not self.chat:  # as one text, as in training: pieces may join at the seams
            return self._plain(before + source + after)
        return [*self._marked(before), *self._plain(source), *self._marked(after)]

    def _around(self, context: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """What stands before and behind the source."""
        text = self.text.replace("{language}", self.language)
        if not self.chat:
            pairs = [text.replace("{source}", said) + answer for said, answer in context]
            text = "".join(f"{pair}\n" for pair in pairs) + text
        else:
            turns = [(text.replace("{source}", said), answer) for said, answer in context]
            messages = [
                {"role": role, "content": content}
                for said, answer in turns
                for role, content in (("user", said), ("assistant", answer))
            ]
            last = {"role": "user", "content": text.replace("{source}", _MARK)}
            text = self.tokenizer.apply_chat_template(
                [*messages, last], tokenize=False, add_generation_prompt=True
            ).replace(_MARK, "{source}")
        before, _, after = text.rpartition("{source}")
        return before, after

    def _plain(self, text: str) -> list[int]:
        """Letters only: nothing in the text is a special token."""
        ids: list[int] = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids

    def _marked(self, text: str) -> list[int]:
        """With the template's own special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def check_text(text: str) -> None:
    """InputError for what no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds half a character (a lone surrogate): {error}") from None
    if "\0" in text:
        raise InputError("the text holds a NUL character")
