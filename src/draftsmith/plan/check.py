"""What `plan ladder` predicted, beside what was measured later.

Predictions are for drafts as they are pre-trained: the acceptance law is one of perplexities, and a
distilled draft is accepted more than its perplexity says. Both are set beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.plan.ladder import Estimate

QUANTITIES = ("alpha", "tau", "speedup")
_BY_LENGTH = ("tau", "speedup")
"""Those that hold for one draft length."""
_NO_NAMES = {"/", "..", "...", "~"}
PREDICTED_KIND = "pretrained"
"""The kind of draft that predictions are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one draft size."""

    size: str
    params: float
    gamma: int
    """Draft length that `tau` and `speedup` are for."""
    drafts: dict[str, str]
    """Folders by kind."""
    estimates: dict[str, Estimate]
    """By quantity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One figure of one draft."""

    draft: str
    quantity: str
    temperature: float | None
    value: Estimate
    source: str
    """The file that it comes from."""
    gamma: int | None = None
    """Draft length; None: of several, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A figure, predicted and measured."""

    size: str
    params: float
    kind: str
    quantity: str
    temperature: float | None
    predicted: Estimate
    measured: Estimate
    inside: bool | None
    """The measured value lies in the predicted interval; None: there is none."""
    source: str


def read_predictions(path: Path) -> tuple[Prediction, ...]:
    """The rungs of a ladder.json.

    Raises:
        InputError: the file, or one of its rungs, cannot be used; the key is named.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the predictions {path}: {reason}") from None
    rungs = content.get("rungs") if isinstance(content, dict) else None
    if not isinstance(rungs, list) or not rungs:
        raise InputError(f"{path} holds no 'rungs': expected what `plan ladder` writes")
    return tuple(
        _prediction(values, f"{path}, rung {number}") for number, values in enumerate(rungs, 1)
    )


def compare(
    predictions: Sequence[Prediction], found: Iterable[Measured]
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """What was measured of predicted drafts, and a sentence for what could not be compared.

    The first figure of a draft counts, so better sources come first.

    Raises:
        InputError: a measured draft may be several predicted ones, or a predicted one several
            measured ones.
    """
    out: dict[tuple[str, str, float | None], Comparison] = {}
    said = []
    places = {folder: (one, kind) for one in predictions for kind, folder in one.drafts.items()}
    seen: dict[str, str] = {}
    for measured in found:
        name = _folder_of(measured.draft, places)
        if name is None:
            continue
        first = seen.setdefault(name, measured.draft)
        if not _may_be(first, measured.draft):
            raise InputError(
                f"{first} and {measured.draft} may both be the predicted draft {name}: give "
                "--records of one of them"
            )
        prediction, kind = places[name]
        if measured.quantity in _BY_LENGTH and measured.gamma != prediction.gamma:
            if measured.quantity == "speedup":
                drafted = "no fixed number of" if measured.gamma is None else measured.gamma
                said.append(
                    f"{measured.source}: {name} drafted {drafted} tokens, predictions are for "
                    f"{prediction.gamma}: its speed-up is left out"
                )
            continue
        predicted = prediction.estimates[measured.quantity]
        out.setdefault(
            (name, measured.quantity, measured.temperature),
            Comparison(
                size=prediction.size,
                params=prediction.params,
                kind=kind,
                quantity=measured.quantity,
                temperature=measured.temperature,
                predicted=predicted,
                measured=measured.value,
                inside=predicted.holds(measured.value.value),
                source=measured.source,
            ),
        )
    order = {quantity: place for place, quantity in enumerate(QUANTITIES)}
    rows = sorted(out.values(), key=lambda row: (row.kind != PREDICTED_KIND, row.params))
    rows.sort(key=lambda row: order[row.quantity])
    return tuple(rows), tuple(said)


def _folder_of(draft: str, folders: Iterable[str]) -> str | None:
    """The predicted draft that this measured one is."""
    found = [folder for folder in folders if _may_be(draft, folder)]
    if len(found) > 1:
        raise InputError(
            f"{draft} may be any of the predicted drafts {', '.join(found)}: its folder is not said"
        )
    return found[0] if found else None


def _may_be(one: str, other: str) -> bool:
    """Two folders are the same as far as both say where they are: records name a folder from where
    the bench ran, and may leave out what is above it."""
    pairs = zip(_parts(one), _parts(other), strict=False)
    return all(mine == theirs for mine, theirs in pairs)


def _parts(folder: str) -> list[str]:
    """From the last one up, as far as they are names."""
    parts = reversed(Path(folder.removeprefix("independent:")).parts)
    return list(takewhile(lambda part: part not in _NO_NAMES, parts))


def _prediction(values: object, where: str) -> Prediction:
    if not isinstance(values, dict):
        raise InputError(f"{where} must be an object")
    drafts = values.get("drafts")
    if not isinstance(drafts, dict) or not all(isinstance(one, str) for one in drafts.values()):
        raise InputError(f"{where}: 'drafts' must give a folder for each kind of draft")
    return Prediction(
        size=str(values.get("size")),
        params=_number(values.get("params"), "params", where),
        gamma=round(_number(values.get("gamma"), "gamma", where)),
        drafts=drafts,
        estimates={name: _estimate(values.get(name), name, where) for name in QUANTITIES},
    )


def _estimate(values: object, name: str, where: str) -> Estimate:
    if not isinstance(values, dict):
        raise InputError(f"{where}: {name!r} must have a 'value', and 'low' and 'high' or null")
    low, high = (
        None if values.get(end) is None else _number(values[end], f"{name}.{end}", where)
        for end in ("low", "high")
    )
    return Estimate(value=_number(values.get("value"), f"{name}.value", where), low=low, high=high)


def _number(value: Any, name: str, where: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and math.isfinite(value)):
        raise InputError(f"{where}: {name!r} must be a finite number, got {value!r}")
    return float(value)
