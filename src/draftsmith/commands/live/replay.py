"""`draftsmith live replay`: one stream under many settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from rich.console import Console
from rich.markdown import Markdown

from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import write_csv
from draftsmith.config import Leading, at_least, parse_list, require, unused
from draftsmith.core.config import check_bias
from draftsmith.data.jsonl import read_records, write_objects
from draftsmith.errors import InputError
from draftsmith.live.config import PromptConfig, RedraftConfig
from draftsmith.live.records import Hypothesis, UpdateRecord, write_lines
from draftsmith.provenance import refuse_file, start_run, write_json_atomic, write_text_atomic
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.live.replay import ReplayRow, ReplayRun
    from draftsmith.live.translator import LiveTranslator


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
        at_least(1, "--limit", self.limit)
        if "ssbd" not in self.methods():
            unused("--bias", self.bias, "0.2", "ssbd in --compare")
            unused("--mask", self.mask, "display", "ssbd in --compare")
            for name, value in vars(RedraftConfig()).items():
                if name != "max_ratio":
                    flag = f"--{name.replace('_', '-')}"
                    unused(flag, getattr(self.redraft, name), value, "ssbd in --compare")


Line = tuple[float, float, str]
"""Begin and end in seconds, and the text."""
SECONDS = 1.0
"""Seconds between updates of a stream without times."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The JSON object."""

    rows: tuple[ReplayRow, ...]
    signature: str
    """What the erasure counts."""
    updates: int
    degenerate: dict[str, int]
    """Per setting, outputs that are empty or did not end; the other metrics include them."""

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: LiveReplayOptions) -> ReplayResult:
    """Replay, and write everything to `options.out`."""
    from draftsmith.live import plots
    from draftsmith.live.metrics import check_installed, flores_pieces
    from draftsmith.live.replay import Method, maker, replay, settings, table
    from draftsmith.targets.hf import open_model

    refuse_file(options.out)
    stream = read_stream(options.stream, options.limit)
    has_references = any(one.reference for one in stream)
    if has_references:
        check_installed()  # fail before hours of decoding
    record = start_run("live replay", options)
    target = open_model(options.model)
    methods = [known for known in get_args(Method) if known in options.methods()]
    wanted = settings(methods, options.biases(), options.masks(), options.mask)
    make = maker(target, options.prompt, options.redraft)
    check_fits(stream, make(wanted[0]), options.stream)
    made = list(replay(stream, wanted, make, _progress).values())
    pieces = flores_pieces()
    rows = table(made, pieces, target_language=options.prompt.language if has_references else None)
    result = ReplayResult(
        rows=tuple(rows),
        signature=f"erasure:{pieces.name}",
        updates=len(made[0].records),
        degenerate={
            one.setting.name: sum(record.degenerate for record in one.records) for one in made
        },
    )
    facts = {"language": options.prompt.language, "target": options.model.target}
    write(options.out, made, result, stream, facts)
    payload = result.json_payload()
    write_json_atomic(options.out / "run.json", record.record(results=payload))
    console = Console(highlight=False)
    console.print(Markdown(plots.markdown(rows)))
    console.print(notes(result), markup=False, soft_wrap=True)
    console.print(f"wrote {options.out}", markup=False, soft_wrap=True)
    return result


def read_stream(path: Path, limit: int | None) -> list[Hypothesis]:
    """Read the first segments of a stream.

    Raises:
        InputError: the stream cannot be read, is empty, or is not in order.
    """
    stream = list(read_records(path, Hypothesis))
    if not stream:
        raise InputError(f"{path} holds no updates")
    for before, after in pairwise(stream):
        if after.seg < before.seg:
            sentence = f"segment {after.seg} comes back after {before.seg}"
        elif after.seg == before.seg and before.final:
            sentence = f"segment {after.seg} goes on after its final update"
        elif after.seg == before.seg and after.rev <= before.rev:
            sentence = f"segment {after.seg} has revision {after.rev} after {before.rev}"
        else:
            continue
        raise InputError(f"{path}: {sentence}; segments and revisions ascend")
    kept = set(list(dict.fromkeys(one.seg for one in stream))[:limit])
    return [one for one in stream if one.seg in kept]


def check_fits(stream: Sequence[Hypothesis], translator: LiveTranslator, path: Path) -> None:
    """Raise InputError for a source that cannot be translated, before hours of decoding."""
    for one in stream:
        try:
            source = translator.wanted(one.text)
            if source is not None:
                translator.begin(source, final=one.final)
        except InputError as error:
            where = f"{path}: segment {one.seg} revision {one.rev}"
            raise InputError(f"{where}: {error}; leave this segment out of the stream") from None


def write(
    folder: Path,
    made: Sequence[ReplayRun],
    result: ReplayResult,
    stream: Sequence[Hypothesis],
    facts: dict[str, str],
) -> None:
    """Tables, pictures, and per setting records, a log of stable delays and subtitles."""
    from draftsmith.live import plots
    from draftsmith.live.latency import simuleval_lines
    from draftsmith.live.metrics import units_of
    from draftsmith.live.replay import ReplayRow

    folder.mkdir(parents=True, exist_ok=True)
    rows = result.rows
    write_json_atomic(folder / "table.json", {**facts, **result.json_payload()})
    columns = [field.name for field in fields(ReplayRow)]
    write_csv(folder / "table.csv", columns, (asdict(row).values() for row in rows))
    tables = f"{plots.markdown(rows)}\n{notes(result)}\n"
    write_text_atomic(folder / "tables.md", tables)
    plots.save(rows, folder)
    times = clock(stream)
    for one in made:
        own = folder / one.setting.name
        own.mkdir(exist_ok=True)
        write_lines(own / "records.jsonl", one.records)
        lines = simuleval_lines(one.records, target=units_of(facts["language"]))
        write_objects(own / "instances.log", lines)
        write_subtitles(own, "subtitles", displayed(one.records, times))


def notes(result: ReplayResult) -> str:
    """Return the notes below the tables."""
    odd = ", ".join(f"{name} {count}" for name, count in result.degenerate.items() if count)
    return (
        f"NE counts: {result.signature}. c: cost of drafts, in decoding steps per output token.\n"
        f"Empty outputs and outputs that did not end, of {result.updates} per setting: "
        f"{odd or 'none'}; what was shown before stays, their tokens and seconds count."
    )


def clock(stream: Sequence[Hypothesis]) -> dict[tuple[int, int], float]:
    """Return the arrival of each update in seconds: one per second in a stream without times.

    An update with an earlier time than its predecessor gets the predecessor's.
    """
    times: dict[tuple[int, int], float] = {}
    now = -SECONDS
    for one in stream:
        now = now + SECONDS if one.time is None else max(now, one.time)
        times[one.seg, one.rev] = now
    return times


def displayed(records: Sequence[UpdateRecord], times: dict[tuple[int, int], float]) -> list[Line]:
    """Return every state of the display, with its begin and end."""
    begins = [times[one.seg, one.rev] for one in records]
    ends = [*begins[1:], begins[-1] + SECONDS] if begins else []
    return [
        (begin, end, one.shown)
        for begin, end, one in zip(begins, ends, records, strict=True)
        if one.shown
    ]


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


def _progress(done: int, of: int) -> None:
    if done == of or done % 10 == 0:
        print(f"replayed {done} of {of} segments", file=sys.stderr, flush=True)
