"""Shared by the `live` verbs: translators, subtitles, and the joined table of several replays.

The joined table has several languages and targets, like table 2 of SSBD (arXiv 2509.21740).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from draftsmith.config import from_dict
from draftsmith.core.config import bias_warning
from draftsmith.data.languages import find
from draftsmith.data.prompts import MINI
from draftsmith.errors import InputError
from draftsmith.live.config import DisplayConfig, LiveConfig, PromptConfig, RedraftConfig
from draftsmith.live.metrics import CHARACTERS, WORDS, Pieces
from draftsmith.live.plots import named, pair_of, table
from draftsmith.live.replay import ReplayRow, ReplaySetting
from draftsmith.live.templates import INSTRUCTION, Template
from draftsmith.live.translator import LiveTranslator, Update
from draftsmith.provenance import write_text_atomic
from draftsmith.targets.hf import HFTarget

_UNSPACED = frozenset(
    ("thai", "th", "tha", "lao", "lo", "khmer", "km", "khm", "burmese", "my", "mya")
)
_UNSPACED_SCRIPTS = frozenset(("Han", "Japanese"))


def make_template(options: PromptConfig, target: HFTarget) -> Template:
    """Make the template that the configuration selects.

    Raises:
        InputError: `chat` is selected and the model has no chat template.
    """
    chats = bool(getattr(target.tokenizer, "chat_template", None))
    chat = options.template == "chat" or (options.template == "auto" and chats)
    named = {
        "auto": INSTRUCTION if chats else MINI,
        "chat": INSTRUCTION,
        "mini": MINI,
        "instruction": f"{INSTRUCTION}\n\n",
    }
    text = named.get(options.template, options.template)
    language = options.language.strip()
    return Template(tokenizer=target.tokenizer, language=language, text=text, chat=chat)


def maker(
    target: HFTarget,
    prompt: PromptConfig,
    redraft: RedraftConfig,
    display: DisplayConfig | None = None,
) -> Callable[[ReplaySetting], LiveTranslator]:
    """Return a function that makes a translator per setting; all share the target.

    `display`: what is hidden beside the setting's mask.
    """
    template = make_template(prompt, target)
    display = display or DisplayConfig()

    def make(setting: ReplaySetting) -> LiveTranslator:
        drafts = setting.method == "ssbd"
        values = vars(redraft) | ({} if drafts else {"resync": 0, "then": None})
        config = LiveConfig(
            **values,
            redraft=drafts,
            bias=setting.bias or 0.0,
            trim_draft=setting.mask_k if setting.mask == "draft" else 0,
            context=prompt.context,
            display=replace(display, mask_k=setting.mask_k),
        )
        return LiveTranslator(target, template, config)

    return make


def units_of(language: str) -> Pieces:
    """Return the units in which texts of this language (a name or code) are counted."""
    known = find(language)
    if known is not None:
        return CHARACTERS if known.script in _UNSPACED_SCRIPTS else WORDS
    first = language.strip().lower().replace("_", "-").split("-")[0]
    return CHARACTERS if first in _UNSPACED else WORDS


def warn(*biases: float | None) -> None:
    """Print a note about a large bias on stderr."""
    sentence = bias_warning(*biases)
    if sentence is not None:
        print(f"note: {sentence}", file=sys.stderr, flush=True)


def coloured(update: Update) -> Text:
    """Format the displayed text; the part that may still change is dim."""
    text = Text(update.text[: update.stable])
    text.append(update.text[update.stable :], style="" if update.final else "dim")
    return text


Line = tuple[float, float, str]
"""Begin and end in seconds, and the text."""


def subtitles(lines: Sequence[Line], *, kind: str) -> str:
    """Format lines as SRT or VTT."""
    comma = "," if kind == "srt" else "."

    def stamp(seconds: float) -> str:
        minutes, rest = divmod(int(seconds * 1000 + 0.5), 60_000)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:02}:{minutes:02}:{rest // 1000:02}{comma}{rest % 1000:03}"

    blocks = ["WEBVTT\n"] if kind == "vtt" else []
    for number, (begin, end, text) in enumerate(lines, 1):
        body = " ".join(text.split()).replace("-->", "->")
        if kind == "vtt":
            body = body.replace("&", "&amp;").replace("<", "&lt;")
        blocks.append(f"{number}\n{stamp(begin)} --> {stamp(end)}\n{body}\n")
    return "\n".join(blocks)


def write_subtitles(folder: Path, name: str, lines: Sequence[Line]) -> None:
    """Write NAME.srt and NAME.vtt."""
    for kind in ("srt", "vtt"):
        write_text_atomic(folder / f"{name}.{kind}", subtitles(lines, kind=kind))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The rows of one `live replay`, without and with drafts."""

    language: str
    target: str
    signature: str
    rows: tuple[ReplayRow, ...]


@dataclass(frozen=True, kw_only=True)
class JoinedResult:
    """The JSON object for a folder of replays."""

    replays: tuple[Replay, ...]

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        rows = [
            (f"{one.language}, {one.target}: {named(row)}", row)
            for one in self.replays
            for row in one.rows
        ]
        title = "Re-translation with and without drafts, by language and target"
        return f"{table(title, rows)}\nNE counts: {self.replays[0].signature}\n"


def join(folder: Path) -> JoinedResult:
    """Join the replays in the subfolders of a folder.

    Raises:
        InputError: there are none, one cannot be read, or they count erasure differently.
    """
    replays = tuple(_read(path) for path in sorted(folder.glob("*/table.json")))
    if not replays:
        raise InputError(f"{folder} holds no folder of `live replay` (with a table.json)")
    if len({one.signature for one in replays}) > 1:
        names = ", ".join(sorted({one.signature for one in replays}))
        raise InputError(f"{folder}: replays that count NE alike can be joined, got {names}")
    return JoinedResult(replays=replays)


def _read(path: Path) -> Replay:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rows = [from_dict(ReplayRow, row, where=str(path)) for row in values["rows"]]
        told = {name: str(values[name]) for name in ("language", "target", "signature")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no table of `live replay`: {error!r}; make it again") from None
    return Replay(**told, rows=tuple(pair_of(rows)))
