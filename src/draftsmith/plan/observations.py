"""Reading measurements (CSV files with a header) and what the planner wrote (JSON).

A dataclass says which columns a row has and what they may hold; `typed` reads one row as such a
class. Errors name the file, and the row and column or the key.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from draftsmith.config import field_types, from_dict, parse_count
from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError, nearest
from draftsmith.provenance import refuse_device

T = TypeVar("T")
Rows = dict[str, dict[str, str]]
"""The values of each row by its place, which errors name."""

DATA = Path(__file__).parent / "data"
"""The paper's measurements and printed values."""
_SEPARATORS = {";": "semicolons", "\t": "tabs"}


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if "_" not in text and text.isascii():  # which float takes
            return float(text)
    raise ValueError(f"must be a number, got {text!r}")


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


def _whole(text: str) -> int:
    if not (value := _number(text)).is_integer():
        raise ValueError(f"must be a whole number, got {text!r}")
    return int(value)


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**53)]
"""Beyond 2^53 float64 has gaps."""
Count = Annotated[float, BeforeValidator(lambda text: parse_count(text, "it"))]
"""Parameters or tokens, with or without a unit."""
Perplexity = Annotated[Number, Field(ge=1, le=1e9)]
"""exp of nats per token."""
Margin = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The measured acceptance rate of one pair of models."""

    target: str
    draft: str
    target_ppl: Perplexity
    draft_ppl: Perplexity
    alpha: Annotated[Number, Field(gt=0, lt=1)]
    moe: Margin | None = None
    """95 % margin of alpha; None: not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The size, data and loss of one training run."""

    params: Count
    tokens: Count
    loss: Annotated[Number, Field(ge=1e-6, le=1e6)]
    """Nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByPerplexity(TrainedModel):
    loss: Annotated[Number, Field(gt=1, validation_alias="perplexity"), AfterValidator(math.log)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCount:
    """The number of steps with `gamma` drafted tokens of which exactly `accepted` were accepted."""

    gamma: Annotated[Whole, Field(ge=1, le=10_000)]
    accepted: Annotated[Whole, Field(validation_alias="accepted_length")]
    count: Whole
    prompt: str | None = None
    """The prompt whose continuation had these steps; None: not given."""

    def __post_init__(self) -> None:
        if self.accepted > self.gamma:
            raise InputError(
                f"accepted_length: {self.accepted} tokens of a draft of {self.gamma} cannot be "
                "accepted (the target's own token does not count)"
            )


def columns(items: Sequence[object], *names: str) -> Floats:
    """Return these attributes of all items, an array each."""
    return np.array([[getattr(one, name) for one in items] for name in names], np.float64)


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


def read_rows(path: Path, columns: Sequence[str]) -> Rows:
    """Read the rows of a CSV file that has at least these columns; others are kept, too.

    Raises:
        InputError: the file is missing, empty, not text, lacks a column, has one twice, or a row
            has more or fewer values than the header.
    """
    rows: Rows = {}
    refuse_device(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            filled = (values for values in lines if any(map(str.strip, values)))
            header = [name.strip() for name in next(filled, [])]
            _check_header(path, header, columns)
            for number, values in enumerate(filled, start=1):
                place = f"{path}, row {number} (line {lines.line_num})"
                if len(values) != len(header):
                    raise InputError(
                        f"{place} has {len(values)} values, the header has {len(header)} columns"
                    )
                rows[place] = dict(zip(header, map(str.strip, values), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from None
    if not rows:
        raise InputError(f"{path} holds no rows below its header")
    return rows


def _check_header(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    if not header:
        raise InputError(f"{path} is empty: it needs the columns {', '.join(columns)}")
    for name in columns:
        if header.count(name) > 1:
            raise InputError(f"{path} has the column {name!r} twice")
        if name not in header:
            for separator, kind in _SEPARATORS.items():
                if len(header) == 1 and separator in header[0]:
                    raise InputError(f"{path} has {kind} between its columns: it takes commas")
            hint = nearest(name, header).replace("known", "found")
            raise InputError(f"{path} has no column {name!r}{hint}")


@functools.cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def typed(kind: type[T], place: str, row: Mapping[str, str]) -> T:
    """Read a row as a dataclass, whose fields are the columns, or as a dictionary of one type.

    Raises:
        InputError: a value is missing or not what the column may hold.
    """
    given = {name: value for name, value in row.items() if value}
    try:
        found: T = _reader(cast(Any, kind)).validate_python(given)
    except ValidationError as error:
        wrong, *_ = error.errors()
        what = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if wrong["type"] == "missing":
            what = "there is no value"
        elif wrong["type"] != "value_error":
            what = f"{what}, got {row[str(wrong['loc'][0])]!r}"
        where = "".join(f", column {column!r}" for column in wrong["loc"])
        raise InputError(f"{place}{where}: {what}") from None
    return found


def read_observations(path: Path, protocol: str | None = None) -> tuple[Observation, ...]:
    """Read columns target, draft, target_ppl, draft_ppl, alpha, and `moe` where there is one.

    A pair that was measured in several ways (column `protocol`) has a row for each: `protocol` says
    which one is taken. The folder of a bench stands for its file.
    """
    path = of_bench(path, "observations.csv")
    rows = read_rows(path, ("target", "draft", "target_ppl", "draft_ppl", "alpha"))
    ways: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows.values():
        ways[_pair(row)].add(row.get("protocol", ""))
    known = set().union(*ways.values()) - {""}
    if protocol is not None and protocol not in known:
        hint = nearest(protocol, known) if known else ": no row says its protocol"
        raise InputError(f"{path} has no row of --protocol {protocol}{hint}")
    for (target, draft), own in ways.items():
        if len(own) > 1 and protocol not in own:
            raise InputError(
                f"{path} has {draft} with {target} under several protocols "
                f"({', '.join(sorted(own))}): choose one by --protocol"
            )
    return tuple(
        typed(Observation, place, row)
        for place, row in rows.items()
        if len(ways[_pair(row)]) == 1 or row.get("protocol") == protocol
    )


def read_trained(path: Path) -> tuple[TrainedModel, ...]:
    """Read columns params and tokens (with or without K, M, B, T), and loss (nats) or
    perplexity."""
    rows = read_rows(path, ("params", "tokens"))
    ways = {"loss": TrainedModel, "perplexity": _ByPerplexity}
    given = [name for name in ways if name in next(iter(rows.values()))]
    if len(given) != 1:
        what = "both a column 'loss' and one" if given else "neither a column 'loss' nor one"
        raise InputError(f"{path} has {what} 'perplexity': it takes one of them")
    return tuple(typed(ways[given[0]], place, row) for place, row in rows.items())


def read_counts(path: Path, draft: str | None = None) -> tuple[LengthCount, ...]:
    """Read a histogram: gamma, accepted_length (without the target's own token) and count.

    Where there are columns `target` and `draft`, it must be of one pair: `draft` says of which. A
    column `prompt` groups the steps of one text. The folder of a bench stands for its file.
    """
    path = of_bench(path, "counts.csv")
    rows = read_rows(path, ("gamma", "accepted_length", "count"))
    if draft is not None:
        known = {row["draft"] for row in rows.values() if row.get("draft")}
        rows = {place: row for place, row in rows.items() if row.get("draft") == draft}
        if not rows:
            hint = nearest(draft, known) if known else ": no row says its draft"
            raise InputError(f"{path}: there is no --draft {draft}{hint}")
    pairs = dict.fromkeys(map(_pair, rows.values()))
    if len(pairs) > 1:
        how = "give a file for each target" if draft is not None else "choose one by --draft"
        listed = ", ".join(f"{draft} with {target}" for target, draft in pairs)
        raise InputError(f"{path} holds counts of {len(pairs)} pairs ({listed}): {how}")
    found = [typed(LengthCount, place, row) for place, row in rows.items()]
    nameless = [place for place, row in rows.items() if row.get("prompt") == ""]
    if nameless:
        raise InputError(f"{nameless[0]}, column 'prompt': there is no value")
    if not any(one.count for one in found):
        raise InputError(f"{path}: all counts are 0")
    return tuple(found)


def part_of(kind: type[T], values: object, where: str) -> T:
    """Build a dataclass from JSON values, which may hold more than its fields."""
    if isinstance(values, dict):
        values = {name: values[name] for name in field_types(kind) if name in values}
    return from_dict(kind, values, where=where)


def odd_rows(observations: Sequence[Observation]) -> Iterator[str]:
    """Yield warnings about each model that has several perplexities, and about pairs that have
    several rows."""
    found: dict[str, set[float]] = defaultdict(set)
    for one in observations:
        found[one.target].add(one.target_ppl)
        found[one.draft].add(one.draft_ppl)
    for model, values in found.items():
        if len(values) > 1:
            listed = ", ".join(map(str, sorted(values)))
            yield f"{model} has {len(values)} perplexities ({listed}): each row counts as it stands"
    pairs = Counter((one.draft, one.target) for one in observations)
    twice = [f"{draft} with {target}" for (draft, target), count in pairs.items() if count > 1]
    if twice:
        have = "pairs have" if len(twice) > 1 else "pair has"
        yield (
            f"{len(twice)} {have} several rows ({twice[0]}, for one): each counts as a measurement "
            "of its own, and copies make the errors too small"
        )


def _pair(row: Mapping[str, str]) -> tuple[str, str]:
    """Return target and draft; nothing where the row does not say them."""
    return row.get("target", ""), row.get("draft", "")
