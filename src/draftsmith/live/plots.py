"""Tables and plots of a replay, in the layout of the paper (SSBD, arXiv 2509.21740)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from draftsmith.live.metrics import verification_cost
from draftsmith.live.replay import ReplayRow
from draftsmith.plots import legend_below, panel, plot

FULL = 0.5
"""From this bias on every drafted token is accepted."""
_COLUMNS = {
    "NE": ("ne", "{:.2f}"),
    "NE, words": ("ne_words", "{:.2f}"),
    "NE, tokens": ("ne_tokens", "{:.2f}"),
    "A/D": ("ad", "{:.1%}"),
    "A/O": ("ao", "{:.1%}"),
    "tokens/s": ("output_tps", "{:.0f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "c": ("cost", "{:.3f}"),
    "chrF": ("chrf", "{:.1f}"),
    "BLEU": ("bleu", "{:.1f}"),
}
"""Heading -> field of a row, and its form; where a row has `FIELD_low` and `FIELD_high`, the 95 %
interval stands behind the value."""


def named(row: ReplayRow) -> str:
    """Name a row in tables and plots."""
    if row.method == "ar":
        name = "re-translation"
    else:
        name = f"SSBD, bias {row.bias:g}"
    if row.mask_k:
        name += f", {row.mask_k} hidden" + (" and not drafted" if row.mask == "draft" else "")
    return name


def markdown(rows: Sequence[ReplayRow]) -> str:
    """Write the paper's tables 2 (with and without drafts), 3 (by bias) and 4 (by mask), as far as
    the rows go."""
    plain = [row for row in rows if row.method == "ar"]
    shown = [row for row in rows if row.method == "ssbd"]
    whole = [row for row in shown if not row.mask_k]
    kept = _bias(rows)
    parts = [
        ("Re-translation with and without drafts", [*plain, *(r for r in shown if r.bias == kept)]),
        ("By bias", [*(row for row in plain if not row.mask_k), *whole]),
        (f"By mask, bias {kept:g}", [row for row in shown if row.bias == kept]),
    ]
    return "\n".join(
        table(title, [(named(row), row) for row in some]) for title, some in parts if some
    )


def _bias(rows: Iterable[ReplayRow]) -> float:
    """Return the bias that is nearest to the paper's."""
    biases = (row.bias or 0.0 for row in rows if row.method == "ssbd")
    return min(biases, key=lambda bias: abs(bias - 0.2), default=0.0)


def pair_of(rows: Sequence[ReplayRow]) -> list[ReplayRow]:
    """Return the rows for the paper's table 2: nothing hidden, with and without drafts."""
    kept = _bias(rows)
    return [row for row in rows if not row.mask_k and (row.method == "ar" or row.bias == kept)]


def table(title: str, rows: Iterable[tuple[str, ReplayRow]]) -> str:
    """Write a table with one line per (name, row)."""
    lines = [f"## {title}", "", f"| setting | {' | '.join(_COLUMNS)} | all as AR |"]
    lines.append("|---" * (len(_COLUMNS) + 2) + "|")
    for name, row in rows:
        cost = None
        if row.speedup is not None and row.ao is not None:
            cost = verification_cost(row.speedup, row.ao)
        values = {**asdict(row), "cost": cost}
        cells = [_cell(values, field, form) for field, form in _COLUMNS.values()]
        same = {None: "", True: "yes", False: "no"}[row.identical_to_ar]
        lines.append(f"| {' | '.join([name, *cells, same])} |")
    return "\n".join([*lines, ""])


def _cell(values: Mapping[str, Any], field: str, form: str) -> str:
    if values[field] is None:
        return ""
    ends = values.get(f"{field}_low"), values.get(f"{field}_high")
    if None in ends:
        return form.format(values[field])
    return f"{form} ({form} to {form})".format(values[field], *ends)


@plot(name="flicker_quality", title="Flicker against quality")
def flicker(rows: Sequence[ReplayRow]) -> Figure | None:
    """Every setting; left and up is better. NE: what was erased per final piece."""
    if not any(row.chrf is not None and row.ne is not None for row in rows):
        return None
    figure, axis = panel(6.4, 4.2)
    groups: dict[tuple[str, int, str], list[ReplayRow]] = {}
    for row in rows:
        if row.chrf is not None and row.ne is not None:
            groups.setdefault((row.method, row.mask_k, row.mask), []).append(row)
    for (method, hidden, _), some in groups.items():
        points = sorted(some, key=lambda row: row.bias or 0.0)
        label = f"{'re-translation' if method == 'ar' else 'SSBD'}, {hidden} hidden"
        axis.plot(
            [row.ne or 0.0 for row in points],
            [row.chrf or 0.0 for row in points],
            marker="s" if method == "ar" else "o",
            linestyle="none" if method == "ar" else "-",
            label=label,
        )
        for row in points:
            if row.bias is not None and not hidden:
                at = (row.ne or 0.0, row.chrf or 0.0)
                axis.annotate(f"{row.bias:g}", at, textcoords="offset points", xytext=(4, 4))
    axis.set(xlabel="normalised erasure", ylabel="chrF of final texts")
    legend_below(figure, [axis], columns=2)
    return figure


@plot(name="speedup_bias", title="Speed-up against bias")
def speed(rows: Sequence[ReplayRow]) -> Figure | None:
    """Over re-translation without drafts, on the same prompts and cache."""
    if not any(row.bias is not None and row.speedup is not None for row in rows):
        return None
    figure, axis = panel(6.4, 3.6)
    whole = sorted(
        (row for row in rows if row.bias is not None and not row.mask_k),
        key=lambda row: row.bias or 0.0,
    )
    biases = [row.bias or 0.0 for row in whole]
    axis.plot(biases, [row.speedup or 0.0 for row in whole], marker="o", label="speed-up")
    axis.plot(biases, [row.ad or 0.0 for row in whole], marker="^", label="A/D")
    axis.plot(biases, [row.ao or 0.0 for row in whole], marker="v", label="A/O")
    axis.axvline(FULL, linestyle=":", linewidth=0.9, label="every draft stays")
    axis.set_xlabel("bias")
    axis.set_ylim(bottom=0)
    legend_below(figure, [axis])
    return figure


def save(rows: Sequence[ReplayRow], folder: Path) -> None:
    """Write the plots for which these rows hold something to show."""
    for one in (flicker, speed):
        image = one.draw(rows)
        if image is not None:
            image.save(folder)
