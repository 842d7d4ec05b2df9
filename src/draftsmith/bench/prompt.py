"""What to ask: a text to continue or a chat, and how a tokenizer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftsmith.errors import InputError


class ChatTokenizer(Protocol):
    """What rendering needs of a transformers tokenizer."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One utterance of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to ask: a plain `text` to continue, or a chat: `messages`, then further `turns`."""

    id: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    """The chat up to and including the first user turn that is to be answered."""
    turns: tuple[str, ...] = ()
    """Further user turns, each asked after the answer to the one before."""
    answers: tuple[str, ...] = ()
    """Of a chat, what the file answers to each turn from the first on; fewer where its messages do
    not take turns (tools speak, somebody speaks twice)."""
    reference: tuple[str, ...] = ()
    """Texts that a good answer to the first turn matches."""
    language: str | None = None
    tag: str | None = None

    @property
    def is_chat(self) -> bool:
        return self.text is None

    def expected(self, turn: int) -> tuple[str, ...]:
        """What a good answer to this turn matches, 0 the first; nothing where nobody knows."""
        return self.answers[turn : turn + 1] if turn else self.reference

    def conversation(self, answers: Sequence[str] = ()) -> tuple[Message, ...]:
        """The chat after these answers: one answer more, one turn of `turns` more."""
        if len(answers) > len(self.turns):
            raise InputError(
                f"prompt {self.id}: {len(answers)} answers leave no turn to ask; "
                f"it has {len(self.turns) + 1}"
            )
        chat = list(self.messages)
        for answer, turn in zip(answers, self.turns, strict=False):
            chat += [Message(role="assistant", content=answer), Message(role="user", content=turn)]
        return tuple(chat)

    def render(self, tokenizer: ChatTokenizer, answers: Sequence[str] = ()) -> str:
        """The text that the model sees, special tokens of a chat template included."""
        if self.text is not None:
            return self.text
        chat = self.conversation(answers)
        if not tokenizer.chat_template:
            return "\n\n".join(message.content for message in chat)
        return str(
            tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in chat],
                tokenize=False,
                add_generation_prompt=True,
            )
        )

    def token_ids(self, tokenizer: ChatTokenizer, answers: Sequence[str] = ()) -> tuple[int, ...]:
        """`render` as tokens; a chat template has written its own special tokens already."""
        templated = self.is_chat and bool(tokenizer.chat_template)
        text = self.render(tokenizer, answers)
        return tuple(tokenizer.encode(text, add_special_tokens=not templated))
