"""Prompts from files, whatever their authors called the fields.

    .jsonl .ndjson   one JSON object per line          .json   an array of objects (or JSONL)
    anything else    plain text, one prompt per line; blank lines separate and are skipped
    each of them also compressed as .gz or .xz

A record's first field of these makes the prompt; the rest of the table is optional:

    messages        [{"role", "content"}]              conversations   ShareGPT: [{"from", "value"}]
    turns           user turns, one after the other    prompt          plain text (or messages)
    question        one user turn                      instruction     one user turn, with `input`
    text            plain text
    reference       text(s) a good answer matches (where a chat has several turns and the list as
                    many items: one for each turn); also answer, canonical_solution, output
    language, tag (also category), id (also question_id, task_id, prompt_id)

A plain prompt is continued as it stands. The others are chats: rendered by the tokenizer's chat
template where it has one. A chat that ends with an answer is replayed: its first user turn is the
prompt, its later user turns follow in `turns`, and its answers are what each is expected to get.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from draftsmith.errors import InputError, nearest
from draftsmith.prompt_text import check_whole

PROMPT_FIELDS = (
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


def plain_prompts(texts: Sequence[str]) -> tuple[Prompt, ...]:
    """Prompts given on the command line: continued as they stand."""
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise InputError(f"prompt {number} is empty: give some text to continue")
        check_whole(text, f"prompt {number}")
    return tuple(Prompt(id=str(number), text=text) for number, text in enumerate(texts, start=1))


def load_suite(name: str | Path, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file, or of a built-in suite when no such file exists."""
    path = Path(name)
    if path.exists() or path.suffix:
        return load_prompts(path, limit=limit)
    built_in = built_in_suites()
    if str(name) not in built_in:
        what = f"file or built-in suite {str(name)!r}" if built_in else f"file {str(name)!r}"
        hint = nearest(str(name), built_in) if built_in else ""
        raise InputError(f"there is no prompt {what}{hint}")
    return load_prompts(built_in[str(name)], limit=limit)


def built_in_suites() -> dict[str, Path]:
    """The suites that are part of the package, by name."""
    folder = Path(str(resources.files("draftsmith.bench"))) / "prompts"
    return {path.name.split(".")[0]: path for path in sorted(folder.glob("*.jsonl*"))}


def load_prompts(
    path: Path | str, *, limit: int | None = None, keep_empty: bool = False
) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file. Errors name the file and the line.

    Ids are made unique (figures are kept by id): the second "a" is "a#2". `keep_empty`: a record
    with an empty `prompt` or `text` becomes a prompt of no text, for callers that count and skip.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    times: dict[str, int] = {}
    for prompt in _read(path, keep_empty):
        if limit is not None and len(prompts) >= limit:
            break
        label = prompt.id
        while label in times:
            times[prompt.id] += 1
            label = f"{prompt.id}#{times[prompt.id]}"
        times[label] = 1
        prompts.append(replace(prompt, id=label))
    if not prompts:
        raise InputError(f"{path}: no prompts in this file")
    return tuple(prompts)


# --------------------------------------------------------------------------- reading


def _read(path: Path, keep_empty: bool) -> Iterator[Prompt]:
    kind = next((s for s in reversed(path.suffixes) if s not in (".gz", ".xz")), "").lower()
    lines = _lines(path)
    if kind not in (".jsonl", ".ndjson", ".json"):
        for number, line in lines:
            if line.strip():
                yield Prompt(id=str(number), text=line)
        return
    if kind == ".json":
        numbered = list(lines)
        try:
            whole = json.loads("\n".join(line for _, line in numbered))
        except (ValueError, RecursionError):
            lines = iter(numbered)  # several objects: JSONL under another name
        else:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], start=1):
                yield _prompt(record, str(number), f"{path}, record {number}", keep_empty)
            return
    for number, line in lines:
        if line.strip():
            where = f"{path}, line {number}"
            yield _prompt(_parse(line, where), str(number), where, keep_empty)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; U+2028 and the like are text, not line ends."""
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in line:
                    raise InputError(f"{path}, line {number}: this is not a text file")
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: not UTF-8 text (byte {error.object[error.start]:#04x}); "
            "convert the file to UTF-8"
        ) from None
    except FileNotFoundError:
        raise InputError(f"prompt file {path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"prompt file {path} is a folder") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged or not a {path.suffix} file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read prompt file {path}: {error.strerror or error}") from None


def _open(path: Path) -> io.BufferedIOBase:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")
    return lzma.open(path, "rb") if suffix == ".xz" else path.open("rb")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON that can be read ({error})") from None


# --------------------------------------------------------------------------- records


def _prompt(record: object, number: str, where: str, keep_empty: bool) -> Prompt:
    if not isinstance(record, Mapping):
        raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}")
    name = next((name for name in PROMPT_FIELDS if record.get(name) is not None), None)
    if name is None:
        found = ", ".join(map(str, record)) or "none"
        known = ", ".join(PROMPT_FIELDS)
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
    made = Prompt(
        id=_label(record, _ID_FIELDS, where) or number,
        text=text,
        messages=messages,
        turns=turns,
        answers=answers,
        reference=reference or answers[:1],
        language=_label(record, ("language",), where),
        tag=_label(record, _TAG_FIELDS, where),
    )
    check_whole(json.dumps(asdict(made), ensure_ascii=False), where)
    return made


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
    instances = record.get("instances")
    if value is None and isinstance(instances, list) and instances:
        value = instances[0].get("input") if isinstance(instances[0], Mapping) else None
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
    instances = record.get("instances")
    if isinstance(instances, list) and instances and isinstance(instances[0], Mapping):
        output = instances[0].get("output")
        return [(output,)] if isinstance(output, str) and output else []
    return []


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
