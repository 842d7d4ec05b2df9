"""`draftsmith live replay`: one stream under many settings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from rich.console import Console
from rich.markdown import Markdown

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import write_csv
from draftsmith.config import Leading, at_least, each_at_least, parse_list, require, unused
from draftsmith.core.config import check_bias
from draftsmith.data.jsonl import read_records, write_objects
from draftsmith.errors import InputError, naming
from draftsmith.live.config import PromptConfig, RedraftConfig
from draftsmith.live.records import Hypothesis, UpdateRecord, segments, write_lines
from draftsmith.provenance import start_run, write_json_atomic, write_text_atomic
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.live.replay import Runs
    from draftsmith.live.translator import LiveTranslator

Parts: TypeAlias = "Sequence[Sequence[Hypothesis]]"
"""The segments of a stream."""


@dataclass(frozen=True, kw_only=True)
class LiveReplayOptions(VerbOptions):
    """Run a stream under many settings and compare flicker, quality and speed."""

    stream: Annotated[Path, Leading]
    """What `live make-stream` wrote, or a recording of the same form."""
    model: ModelConfig
    compare: str = "ar,ssbd"
    """ar: re-translation without drafts, the base of speed-ups. ssbd: with the last output."""
    bias: str = "0.2"
    """Biases of ssbd, separated by commas."""
    mask_k: str = "0"
    """Hidden tokens, separated by commas."""
    mask: Literal["display", "draft"] = "display"
    """display: only hide them. draft: leave them out of the draft, too."""
    limit: int | None = None
    """Use only the first segments."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)
    out: Path = Path("runs/replay")
    """Folder for tables, records, plots, subtitles and logs."""

    def methods(self) -> tuple[str, ...]:
        return parse_list(self.compare, str, name="--compare")

    def biases(self) -> tuple[float, ...]:
        return parse_list(self.bias, float, name="--bias")

    def masks(self) -> tuple[int, ...]:
        return parse_list(self.mask_k, int, name="--mask-k")

    def validate(self) -> None:
        super().validate()
        for method in self.methods():
            require(method in ("ar", "ssbd"), f"--compare knows ar and ssbd, got {method!r}")
        for bias in self.biases():
            check_bias(bias, "--bias")
        for hidden in self.masks():
            at_least(0, "--mask-k", hidden)
        each_at_least(1, self, "limit")
        if "ssbd" not in self.methods():
            unused("--bias", self.bias, "0.2", "ssbd in --compare")
            unused("--mask", self.mask, "display", "ssbd in --compare")
            for name, value in vars(RedraftConfig()).items():
                if name != "max_ratio":
                    flag = f"--{name.replace('_', '-')}"
                    unused(flag, getattr(self.redraft, name), value, "ssbd in --compare")


Cue = tuple[float, float, str]
"""Begin and end in seconds, and the text."""
SECONDS = 1.0
"""Seconds between updates of a stream without times."""


@holds_out
def run(options: LiveReplayOptions) -> dict[str, Any]:
    """Replay, and write everything to `options.out`."""
    from draftsmith.live import plots
    from draftsmith.live.metrics import Pieces, flores_pieces, sacrebleu_metrics
    from draftsmith.live.replay import Method, maker, replay, settings, table
    from draftsmith.targets.hf import open_model

    record = start_run("live replay", options, out=options.out)
    parts = read_stream(options.stream, options.limit)
    if any(one.reference for part in parts for one in part):
        sacrebleu_metrics()  # fail before hours of decoding
    target = open_model(options.model)
    methods = [known for known in get_args(Method) if known in options.methods()]
    wanted = settings(methods, options.biases(), options.masks(), options.mask)
    make = maker(target, options.prompt, options.redraft)
    check_fits(parts, make(wanted[0]), options.stream)
    made = replay(_with_progress(parts), wanted, make)
    pieces, language = flores_pieces(), options.prompt.language
    tokens = Pieces(
        name="token", split=lambda text: target.tokenizer.encode(text, add_special_tokens=False)
    )
    rows = table(made, pieces, tokens=tokens, target_language=language)
    result: dict[str, Any] = {
        "rows": [asdict(row) for row in rows],
        "signature": f"erasure:{pieces.name}",
        "updates": len(made[wanted[0]]),
        "degenerate": {
            one.name: sum(record.degenerate for record in records) for one, records in made.items()
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"language": language, "target": options.model.target}
    write_json_atomic(options.out / "table.json", {**facts, **result})
    cells = [row.values() for row in result["rows"]]
    write_csv(options.out / "table.csv", list(result["rows"][0]), cells)
    tables, below = plots.markdown(rows), notes(result)
    write_text_atomic(options.out / "tables.md", f"{tables}\n{below}\n")
    plots.save(rows, options.out)
    write_records(options.out, made, parts, language)
    record.write(options.out, results=result)
    console = Console(highlight=False)
    console.print(Markdown(tables))
    console.print(below, markup=False, soft_wrap=True)
    console.print(f"wrote {options.out}", markup=False, soft_wrap=True)
    return result


def read_stream(path: Path, limit: int | None) -> list[list[Hypothesis]]:
    """Read the first segments of a stream.

    Raises:
        InputError: the stream cannot be read, is empty, or is not in order.
    """
    hypotheses = list(read_records(path, Hypothesis))  # its errors name the file already
    with naming(path):
        parts = segments(hypotheses, repeats=False)
    require(bool(parts), f"{path} holds no updates")
    return parts[:limit]


def check_fits(parts: Parts, translator: LiveTranslator, path: Path) -> None:
    """Raise InputError for a source that cannot be translated, before hours of decoding."""
    for one in chain.from_iterable(parts):
        try:
            source = translator.wanted(one.text)
            if source is not None:
                translator.begin(source, final=one.final)
        except InputError as error:
            where = f"{path}: segment {one.seg} revision {one.rev}"
            raise InputError(f"{where}: {error}; leave this segment out of the stream") from None


_FILES = ("records.jsonl", "instances.log", "subtitles.srt", "subtitles.vtt")
"""What a setting has."""


def write_records(folder: Path, made: Runs, parts: Parts, language: str) -> None:
    """Write records, a log of stable delays and subtitles of each setting, in place of those of an
    earlier replay, whose settings may have been others."""
    from draftsmith.live.latency import simuleval_lines
    from draftsmith.live.metrics import units_of

    for earlier in [path.parent for path in folder.glob(f"*/{_FILES[1]}")]:
        for name in _FILES:
            (earlier / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds files of others
            earlier.rmdir()
    for setting, records in made.items():
        own = folder / setting.name
        own.mkdir(exist_ok=True)
        write_lines(own / "records.jsonl", records)
        lines = simuleval_lines(records, target=units_of(language))
        write_objects(own / "instances.log", lines)
        shown = cues(records, chain.from_iterable(parts))
        for kind in ("srt", "vtt"):
            write_text_atomic(own / f"subtitles.{kind}", subtitles(shown, kind=kind))


def notes(result: dict[str, Any]) -> str:
    """Return the notes below the tables."""
    odd = ", ".join(f"{name} {count}" for name, count in result["degenerate"].items() if count)
    return (
        f"NE counts: {result['signature']}. c: cost of drafts, in decoding steps per output token."
        f"\nEmpty outputs and outputs that did not end, of {result['updates']} per setting: "
        f"{odd or 'none'}; what was shown before stays, their tokens and seconds count."
    )


def cues(records: Sequence[UpdateRecord], stream: Iterable[Hypothesis]) -> list[Cue]:
    """Return every state of the display: from the arrival of its hypothesis to that of the next.

    A stream without times has one hypothesis per second; a time that is earlier than the one before
    counts as that one.
    """
    times: dict[tuple[int, int], float] = {}
    now = -SECONDS
    for one in stream:
        now = now + SECONDS if one.time is None else max(now, one.time)
        times[one.seg, one.rev] = now
    begins = [times[one.seg, one.rev] for one in records]
    ends = [*begins[1:], begins[-1] + SECONDS] if begins else []
    found = zip(begins, ends, (one.shown for one in records), strict=True)
    return [cue for cue in found if cue[2]]


def subtitles(shown: Sequence[Cue], *, kind: str) -> str:
    """Format cues as SRT or VTT."""
    comma = "," if kind == "srt" else "."

    def stamp(seconds: float) -> str:
        minutes, rest = divmod(int(seconds * 1000 + 0.5), 60_000)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:02}:{minutes:02}:{rest // 1000:02}{comma}{rest % 1000:03}"

    blocks = ["WEBVTT\n"] if kind == "vtt" else []
    for number, (begin, end, text) in enumerate(shown, 1):
        body = " ".join(text.split()).replace("-->", "->")
        if kind == "vtt":
            body = body.replace("&", "&amp;").replace("<", "&lt;")
        blocks.append(f"{number}\n{stamp(begin)} --> {stamp(end)}\n{body}\n")
    return "\n".join(blocks)


def _with_progress(parts: Parts) -> Iterator[Sequence[Hypothesis]]:
    """Yield the segments, and report on stderr how many have been replayed."""
    for done, part in enumerate(parts, 1):
        yield part
        if done == len(parts) or done % 10 == 0:
            print(f"replayed {done} of {len(parts)} segments", file=sys.stderr, flush=True)
