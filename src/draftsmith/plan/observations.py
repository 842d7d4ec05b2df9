"""Reading measurements (CSV files with a header) and what the planner wrote (JSON).

Errors name the file, and the row and column or the key.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import parse_count
from draftsmith.errors import InputError, nearest

DATA = Path(__file__).parent / "data"
"""The paper's measurements and printed values."""
_MOST = 2**53
"""Largest whole number: beyond it float64 has gaps."""
_MOST_GAMMA = 10_000
_MOST_PERPLEXITY = 1e9
_SEPARATORS = {";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The measured acceptance rate of one pair of models."""

    target: str
    draft: str
    target_ppl: float
    """Perplexity, exp of nats per token."""
    draft_ppl: float
    alpha: float
    moe: float | None = None
    """95 % margin of alpha; None: not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The size, data and loss of one training run."""

    params: float
    tokens: float
    loss: float
    """Nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCount:
    """The number of steps with `gamma` drafted tokens of which exactly `accepted` were accepted."""

    gamma: int
    accepted: int
    count: int
    prompt: str | None = None
    """The prompt whose continuation had these steps; None: not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvRow:
    """One line of a file."""

    path: Path
    number: int
    """1 is the first below the header."""
    line: int
    """Line number in the file, for editors."""
    values: dict[str, str]

    def text(self, column: str) -> str:
        value = self.values[column].strip()
        if not value:
            raise self.wrong(column, "there is no value")
        return value

    def number_of(self, column: str) -> float:
        """Read a finite number."""
        text = self.text(column)
        try:
            if "_" in text or not text.isascii():  # which float takes
                raise ValueError
            value = float(text)
        except ValueError:
            raise self.wrong(column, f"expected a number, got {text!r}") from None
        if not math.isfinite(value):
            raise self.wrong(column, f"expected a finite number, got {text!r}")
        return value

    def number_where(self, column: str, good: Callable[[float], bool], want: str) -> float:
        value = self.number_of(column)
        if not good(value):
            raise self.wrong(column, f"must be {want}, got {value:g}")
        return value

    def whole_of(self, column: str, *, least: int, most: int = _MOST) -> int:
        value = self.number_where(column, lambda number: number >= least, f"{least} or more")
        if value > most:
            raise self.wrong(column, f"must be {most} or less, got {value:g}")
        if value != int(value):
            raise self.wrong(column, f"expected a whole number, got {self.text(column)!r}")
        return int(value)

    def count_of(self, column: str) -> float:
        """Read parameters or tokens, with or without a unit."""
        return parse_count(self.text(column), self.place(column))

    def place(self, column: str) -> str:
        return f"{self.path}, row {self.number} (line {self.line}), column {column!r}"

    def wrong(self, column: str, what: str) -> InputError:
        return InputError(f"{self.place(column)}: {what}")


def of_bench(path: Path, name: str) -> Path:
    """Return the file, or the one of this name in the folder of a bench.

    Raises:
        InputError: a folder without it.
    """
    if not path.is_dir():
        return path
    if not (path / name).is_file():
        raise InputError(f"{path} holds no {name}: `draftsmith bench --perplexity` writes it")
    return path / name


def read_rows(path: Path, columns: Sequence[str]) -> list[CsvRow]:
    """Read the rows of a CSV file that has at least these columns; others are kept, too.

    Raises:
        InputError: the file is missing, empty, not text, lacks a column, has one twice, or a row
            has more or fewer values than the header.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(path, csv.reader(file, strict=True), columns))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from None
    if not rows:
        raise InputError(f"{path} holds no rows below its header")
    return rows


def _rows(path: Path, lines: Any, columns: Sequence[str]) -> Iterator[CsvRow]:
    filled = (values for values in lines if any(value.strip() for value in values))
    header = [name.strip() for name in next(filled, [])]
    if not header:
        raise InputError(f"{path} is empty: it needs the columns {', '.join(columns)}")
    missing = [name for name in columns if name not in header]
    if missing:
        for separator, name in _SEPARATORS.items():
            if len(header) == 1 and separator in header[0]:
                raise InputError(f"{path} has {name} between its columns: it takes commas")
        hint = nearest(missing[0], header).replace("known", "found")
        raise InputError(f"{path} has no column {missing[0]!r}{hint}")
    twice = [name for name in columns if header.count(name) > 1]
    if twice:
        raise InputError(f"{path} has the column {twice[0]!r} twice")
    for number, values in enumerate(filled, start=1):
        line = lines.line_num
        if len(values) != len(header):
            raise InputError(
                f"{path}, row {number} (line {line}) has {len(values)} values, the header has "
                f"{len(header)} columns"
            )
        named = dict(zip(header, values, strict=True))
        yield CsvRow(path=path, number=number, line=line, values=named)


def read_observations(path: Path, protocol: str | None = None) -> tuple[Observation, ...]:
    """Read columns target, draft, target_ppl, draft_ppl, alpha, and `moe` where there is one.

    A pair that was measured in several ways (column `protocol`) has a row for each: `protocol` says
    which one is taken. The folder of a bench stands for its file.
    """
    path = of_bench(path, "observations.csv")
    rows = read_rows(path, ("target", "draft", "target_ppl", "draft_ppl", "alpha"))
    return tuple(
        Observation(
            target=row.text("target"),
            draft=row.text("draft"),
            target_ppl=_perplexity(row, "target_ppl"),
            draft_ppl=_perplexity(row, "draft_ppl"),
            alpha=row.number_where("alpha", lambda rate: 0 < rate < 1, "above 0 and below 1"),
            moe=_margin(row),
        )
        for row in _one_per_pair(path, rows, protocol)
    )


def read_trained(path: Path) -> tuple[TrainedModel, ...]:
    """Read columns params and tokens (with or without K, M, B, T), and loss (nats) or
    perplexity."""
    rows = read_rows(path, ("params", "tokens"))
    kinds = [name for name in ("loss", "perplexity") if name in rows[0].values]
    if len(kinds) != 1:
        what = "both a column 'loss' and one" if kinds else "neither a column 'loss' nor one"
        raise InputError(f"{path} has {what} 'perplexity': it takes one of them")
    losses: dict[str, Callable[[CsvRow], float]] = {
        "loss": lambda row: row.number_where("loss", lambda loss: loss > 0, "above 0"),
        "perplexity": lambda row: math.log(
            row.number_where("perplexity", lambda value: value > 1, "above 1")
        ),
    }
    return tuple(
        TrainedModel(
            params=row.count_of("params"), tokens=row.count_of("tokens"), loss=losses[kinds[0]](row)
        )
        for row in rows
    )


def read_counts(path: Path, draft: str | None = None) -> tuple[LengthCount, ...]:
    """Read a histogram: gamma, accepted_length (without the target's own token) and count.

    Where there are columns `target` and `draft`, it must be of one pair: `draft` says of which. A
    column `prompt` groups the steps of one text. The folder of a bench stands for its file.
    """
    path = of_bench(path, "counts.csv")
    found = []
    for row in _of_one_pair(path, read_rows(path, ("gamma", "accepted_length", "count")), draft):
        gamma = row.whole_of("gamma", least=1, most=_MOST_GAMMA)
        accepted = row.whole_of("accepted_length", least=0)
        if accepted > gamma:
            raise row.wrong(
                "accepted_length",
                f"{accepted} tokens of a draft of {gamma} cannot be accepted (the target's own "
                "token does not count)",
            )
        found.append(
            LengthCount(
                gamma=gamma,
                accepted=accepted,
                count=row.whole_of("count", least=0),
                prompt=row.text("prompt") if "prompt" in row.values else None,
            )
        )
    if not any(one.count for one in found):
        raise InputError(f"{path}: all counts are 0")
    return tuple(found)


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file. Raises InputError, which calls it `what`."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the {what} {path}: {reason}") from None


@contextlib.contextmanager
def naming(*paths: Path) -> Iterator[None]:
    """Name the files in an InputError from inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{', '.join(map(str, paths))}: {error}") from None


def perplexity_warnings(observations: Sequence[Observation]) -> tuple[str, ...]:
    """Warn about each model that has several perplexities."""
    found: dict[str, set[float]] = {}
    for one in observations:
        found.setdefault(one.target, set()).add(one.target_ppl)
        found.setdefault(one.draft, set()).add(one.draft_ppl)
    return tuple(
        f"{model} has {len(values)} perplexities ({', '.join(map(str, sorted(values)))}): each row "
        "is taken as it stands"
        for model, values in found.items()
        if len(values) > 1
    )


def repeat_warnings(observations: Sequence[Observation]) -> tuple[str, ...]:
    """Warn if pairs have several rows."""
    counts = Counter((one.draft, one.target) for one in observations)
    twice = [pair for pair, count in counts.items() if count > 1]
    if not twice:
        return ()
    draft, target = twice[0]
    return (
        f"{len(twice)} pair{'s have' if len(twice) > 1 else ' has'} several rows ({draft} with "
        f"{target}, for one): each counts as a measurement of its own, and copies make the errors "
        "too small",
    )


def _one_per_pair(path: Path, rows: Sequence[CsvRow], protocol: str | None) -> list[CsvRow]:
    ways: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        ways.setdefault((row.text("target"), row.text("draft")), set()).add(
            _optional(row, "protocol")
        )
    known = set().union(*ways.values()) - {""}
    if protocol is not None and protocol not in known:
        hint = nearest(protocol, known) if known else ": no row says its protocol"
        raise InputError(f"{path} has no row of --protocol {protocol}{hint}")
    kept = []
    for row in rows:
        target, draft = row.text("target"), row.text("draft")
        mine = ways[target, draft]
        if len(mine) > 1 and protocol not in mine:
            raise InputError(
                f"{path} has {draft} with {target} under several protocols "
                f"({', '.join(sorted(mine))}): choose one by --protocol"
            )
        if len(mine) == 1 or _optional(row, "protocol") == protocol:
            kept.append(row)
    return kept


def _of_one_pair(path: Path, rows: Sequence[CsvRow], draft: str | None) -> list[CsvRow]:
    known = dict.fromkeys(_optional(row, "draft") for row in rows)
    if draft is not None:
        rows = [row for row in rows if _optional(row, "draft") == draft]
        if not rows:
            hint = nearest(draft, known) if any(known) else ": no row says its draft"
            raise InputError(f"{path}: there is no --draft {draft}{hint}")
    pairs = dict.fromkeys((_optional(row, "target"), _optional(row, "draft")) for row in rows)
    if len(pairs) > 1:
        how = "give a file for each target" if draft is not None else "choose one by --draft"
        listed = ", ".join(f"{draft} with {target}" for target, draft in pairs)
        raise InputError(f"{path} holds counts of {len(pairs)} pairs ({listed}): {how}")
    return list(rows)


def _optional(row: CsvRow, column: str) -> str:
    """Return the text of an optional column."""
    return row.values.get(column, "").strip()


def _perplexity(row: CsvRow, column: str) -> float:
    value = row.number_where(column, lambda value: value >= 1, "1 or more")
    if value > _MOST_PERPLEXITY:
        raise row.wrong(column, f"must be {_MOST_PERPLEXITY:g} or less, got {value:g}")
    return value


def _margin(row: CsvRow) -> float | None:
    if not row.values.get("moe", "").strip():
        return None
    return row.number_where("moe", lambda margin: margin >= 0, "0 or more")
