"""What to ask: a text to continue or a chat, and how a tokenizer sees it.

A prompt is read from a record of a prompt file, whatever its author called the fields. A record's
first field of these makes the prompt; the rest of the table is optional:

    messages        [{"role", "content"}]              conversations   ShareGPT: [{"from", "value"}]
    turns           user turns, one after the other    prompt          plain text (or messages)
    question        one user turn                      instruction     one user turn, with `input`
    text            plain text
    reference       text(s) a good answer matches (where a chat has several turns and the list as
                    many items: one for each turn); also answer, canonical_solution, output
    language, tag (also category), id (also question_id, task_id, prompt_id)

A plain prompt is continued as it stands. The others are chats: rendered by the tokenizer's chat
template where it has one. So a file says itself what it holds, and whoever reads it (`generate`,
`bench`, `tune`, `collect`) asks the same. A text that is given by itself is a chat of one turn,
unless it is to be continued `raw`: see `text_prompts`.

A chat that ends with an answer is replayed: its first user turn is the prompt, its later user turns
follow in `turns`, and its answers are what each is expected to get.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from draftsmith.config import check_whole, require
from draftsmith.errors import InputError, nearest

_log = logging.getLogger(__name__)

MINI = "Translate to {language}: {source}\n"
"""What the shipped translation model was trained with."""
SOURCE = "{source}"


def filled(text: str, *, language: str, source: str) -> str:
    """A prompt's text with these in their places; what they hold themselves stays as it is."""
    values = {"language": language, "source": source}
    return re.sub(r"\{(language|source)\}", lambda found: values[found[1]], text)


def check_prompt(text: str, name: str) -> None:
    """Raise `InputError` unless a source has one place in this text."""
    if text.count(SOURCE) != 1:
        raise InputError(f"{name} must hold {SOURCE} once, got {text!r}")


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
    """For a chat, what the file answers to each turn from the first on; fewer where its messages do
    not take turns (tools speak, somebody speaks twice)."""
    reference: tuple[str, ...] = ()
    """Texts that a good answer to the first turn matches."""
    language: str | None = None
    tag: str | None = None

    @property
    def is_chat(self) -> bool:
        return self.text is None

    @property
    def asked(self) -> str:
        """The text, or what the user says before the first answer."""
        if self.text is not None:
            return self.text
        said = [message.content for message in self.messages if message.role == "user"]
        return said[-1] if said else ""

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

    def render(self, tokenizer: Any, answers: Sequence[str] = ()) -> str:
        """The text that the model sees, special tokens of a chat template included."""
        if self.text is not None:
            return self.text
        chat = self.conversation(answers)
        if not has_chat_template(tokenizer):
            return "\n\n".join(message.content for message in chat)
        return render_chat(tokenizer, chat)

    def token_ids(self, tokenizer: Any, answers: Sequence[str] = ()) -> tuple[int, ...]:
        """`render` as tokens; a chat template has written its own special tokens already."""
        templated = self.is_chat and has_chat_template(tokenizer)
        text = self.render(tokenizer, answers)
        check_whole(text, f"prompt {self.id}")
        return tuple(tokenizer.encode(text, add_special_tokens=not templated))


_TEMPLATE_ADDS = 1 << 20
"""Characters that a chat template may add to a chat, beside some for each of its own, ..."""
_TEMPLATE_SECONDS = 1.0
"""... and how long it may compute, beside as long for each million characters of the chat."""


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer brings a chat template, as those of instruct models do."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(
    tokenizer: Any, chat: Sequence[Message], variables: Mapping[str, object] | None = None
) -> str:
    """The chat by the model's template, up to where the answer begins; `variables`: what the
    template may ask for.

    Raises:
        InputError: the template is broken, or refuses this chat; its file is named.
    """
    turns = [{"role": message.role, "content": message.content} for message in chat]
    said = sum(len(message.content) for message in chat)
    try:
        _refuse_powers(tokenizer.chat_template)
        with _computing_at_most(_TEMPLATE_SECONDS * (1 + said / 1e6)):
            text = str(
                tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True, **(variables or {})
                )
            )
    except Exception as error:  # a template is a program, and fails as it likes
        line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{_template_file(tokenizer)}{line}: the chat template cannot write this chat: {reason}"
        ) from error
    require(
        len(text) <= _TEMPLATE_ADDS + 8 * said,
        f"{_template_file(tokenizer)}: the chat template makes {len(text):,} characters of a chat "
        f"of {said:,}",
    )
    return text


def _refuse_powers(templates: str | Mapping[str, str]) -> None:
    """Raise ValueError for a template (or several, by name) that raises to a power: the 10^9 digits
    of one number are one step, which no tracer comes between. Products take as many steps."""
    for template in [templates] if isinstance(templates, str) else templates.values():
        if _has_power(template):
            raise ValueError("it raises to a power, which may never end")


@functools.lru_cache(maxsize=16)
def _has_power(template: str) -> bool:
    """Whether ** stands behind a value; in a call it stands behind a bracket or a comma."""
    from jinja2 import Environment

    signs = [sign for _, *sign in Environment().lex(template) if sign[0] != "whitespace"]
    return any(
        sign == ["operator", "**"] and before[1] not in ("(", ",")
        for before, sign in pairwise(signs)
    )


@contextlib.contextmanager
def _computing_at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the template that computes for longer: its loops may have no end, and
    nothing but a tracer (which debuggers use, too) gets a word in between."""
    end = time.thread_time() + seconds

    def check(frame: FrameType, *_: object) -> Callable[..., Any] | None:
        if time.thread_time() > end:
            raise TimeoutError(f"it computes for more than {seconds:.0f} s")
        return check if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _template_file(tokenizer: Any) -> str:
    name = str(getattr(tokenizer, "name_or_path", ""))
    files = [Path(name) / file for file in ("chat_template.jinja", "tokenizer_config.json")]
    return next((str(file) for file in files if file.is_file()), name)


_PROMPT_FIELDS = (
    "messages",
    "conversations",
    "turns",
    "prompt",
    "question",
    "instruction",
    "text",
)
_REFERENCE_FIELDS = ("reference", "answer", "canonical_solution", "output")
_TAG_FIELDS = ("tag", "category")
_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"} | {
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}


def read_record(record: object, number: str, where: str, keep_empty: bool) -> Prompt:
    """The prompt that this JSON value asks for; `number` names it if it has no id.

    Raises:
        InputError: naming `where`, and the field if one is at fault.
    """
    if not isinstance(record, Mapping):
        raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}")
    name = next((name for name in _PROMPT_FIELDS if record.get(name) is not None), None)
    if name is None:
        found = ", ".join(map(str, record)) or "none"
        known = ", ".join(_PROMPT_FIELDS)
        raise InputError(f"{where}: no prompt in the fields {found}; a prompt is one of {known}")
    value, field = record[name], f"{where}: field {name!r}"
    text: str | None = None
    messages: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    items = _references(record, where)
    if name in ("messages", "conversations") or (name == "prompt" and isinstance(value, list)):
        messages, turns, answers = _replay(_chat(value, field), field)
    elif name == "turns":
        first, *later = _texts(value, field)
        messages, turns = (Message(role="user", content=first),), tuple(later)
    elif name in ("prompt", "text"):
        empty = keep_empty and isinstance(value, str) and not value.strip()
        text = "" if empty else _text(value, field)
    else:
        question = _text(value, field)
        extra = _input(record, where) if name == "instruction" else ""
        content = f"{question}\n\n{extra}" if extra else question
        messages = (Message(role="user", content=content),)
    reference = tuple(text for item in items for text in item)
    if turns and len(items) == len(turns) + 1 and all(items):  # MT-bench: one for each turn
        answers, reference = tuple(item[0] for item in items), items[0]
    return Prompt(
        id=_label(record, _ID_FIELDS, where) or number,
        text=text,
        messages=messages,
        turns=turns,
        answers=answers,
        reference=reference or answers[:1],
        language=_label(record, ("language",), where),
        tag=_label(record, _TAG_FIELDS, where),
    )


def _chat(value: object, field: str) -> list[Message]:
    if not isinstance(value, list):
        raise InputError(f"{field}: expected a list of messages, got {type(value).__name__}")
    chat = []
    for index, item in enumerate(value, start=1):
        place = f"{field}, message {index}"
        if not isinstance(item, Mapping):
            raise InputError(f"{place}: expected an object with role and content")
        role = item.get("role", item.get("from"))
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise InputError(f"{place}: unknown role {role!r}{nearest(str(role), _ROLES)}")
        role = _ROLES[role.lower()]
        content = item.get("content", item.get("value"))
        if isinstance(content, list):  # content parts: [{"type": "text", "text": "..."}]
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) < len(parts):
                raise InputError(f"{place}: only text can be used, not images or sound")
            content = "".join(texts)
        # An empty system or assistant message is odd but harmless; an empty question is neither.
        if not isinstance(content, str) or (role == "user" and not content.strip()):
            raise InputError(f"{place}: expected text, got {_short(content)}")
        chat.append(Message(role=role, content=content))
    return chat


def _replay(
    chat: list[Message], field: str
) -> tuple[tuple[Message, ...], tuple[str, ...], tuple[str, ...]]:
    """(messages, later turns, answers): see the module's last paragraph."""
    first = next((i for i, message in enumerate(chat) if message.role == "user"), None)
    if first is None:
        raise InputError(f"{field}: no message of the user, so there is nothing to answer")
    if chat[-1].role != "assistant":
        return tuple(chat), (), ()
    # system user assistant user assistant      messages: system user      turns: the second user
    # An answer before the first question (ShareGPT has such fragments) answers nothing: left out.
    opening = [message for message in chat[:first] if message.role == "system"]
    later = tuple(message.content for message in chat[first + 1 :] if message.role == "user")
    pairs = zip(chat[first::2], chat[first + 1 :: 2], strict=False)
    in_turn = takewhile(lambda pair: [m.role for m in pair] == ["user", "assistant"], pairs)
    return (*opening, chat[first]), later, tuple(said.content for _, said in in_turn)


def _input(record: Mapping[str, Any], where: str) -> str:
    """The material that an instruction works on (Alpaca's `input`, Self-Instruct's instances)."""
    value = record.get("input")
    if value is None:
        value = _instance(record).get("input")
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: field 'input': expected text, got {_short(value)}")
    return value


def _references(record: Mapping[str, Any], where: str) -> list[tuple[str, ...]]:
    """Each item of the field: a text, or (some have them) a list of texts that are as good."""
    for name in _REFERENCE_FIELDS:
        value = record.get(name)
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        found = [tuple(item) if isinstance(item, list) else (item,) for item in items]
        if all(isinstance(text, str) for some in found for text in some):
            return found
        if name == "reference":  # the other names may mean something else
            raise InputError(f"{where}: field {name!r}: expected text or a list of texts")
    output = _instance(record).get("output")
    return [(output,)] if isinstance(output, str) and output else []


def _instance(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of Self-Instruct's instances; an empty one if there is none."""
    instances = record.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    return first if isinstance(first, Mapping) else {}


def _label(record: Mapping[str, Any], names: Sequence[str], where: str) -> str | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
        if value is not None and value != "":
            raise InputError(f"{where}: field {name!r}: expected text, got {_short(value)}")
    return None


def _texts(value: object, field: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{field}: expected a list of user turns, got {_short(value)}")
    return [_text(item, f"{field}, turn {index}") for index, item in enumerate(value, start=1)]


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{field}: expected text, got {_short(value)}")
    if not value.strip():
        raise InputError(f"{field}: the prompt is empty")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def text_prompts(texts: Sequence[str], *, raw: bool) -> tuple[Prompt, ...]:
    """Make prompts of texts: each is the one turn of a chat. A tokenizer without a chat template
    sees the text alone, and continues it.

    Args:
        raw: the texts are continued as they stand, also where there is a template.

    Raises:
        InputError: a text is empty or holds half a character.
    """
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise InputError(f"prompt {number} is empty: give some text to continue")
        check_whole(text, f"prompt {number}")
    return tuple(
        text_prompt(text, id=str(number), raw=raw) for number, text in enumerate(texts, start=1)
    )


def text_prompt(text: str, *, id: str, raw: bool) -> Prompt:
    """One of `text_prompts`, unchecked."""
    if raw:
        return Prompt(id=id, text=text)
    return Prompt(id=id, messages=(Message(role="user", content=text),))


def note_plain(prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Log that a chat model is about to continue plain prompts of a file: texts that nobody put as
    a question, whose figures are seldom those that are wanted."""
    plain = sum(not prompt.is_chat for prompt in prompts)
    if plain and has_chat_template(tokenizer):
        _log.info(
            "%d of %d prompts are plain text, which is continued as it stands; to ask it through "
            'the chat template, write {"question": ...} or {"turns": [...]} per line',
            plain,
            len(prompts),
        )
