"""The figure of `plan check`: predicted and measured, by draft size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from draftsmith.bench.pictures import Plot
from draftsmith.plan.check import QUANTITIES, Comparison, Prediction
from draftsmith.recipes._plan_pictures import Drawing

_LABELS = {"alpha": "acceptance rate", "tau": "tokens per step", "speedup": "speed-up"}
_MARKERS = {"pretrained": "o", "distilled": "^"}
_DASHED = (0, (4, 3))


def predicted_measured(predictions: Sequence[Prediction], rows: Sequence[Comparison]) -> Drawing:
    plot = Plot(
        name="predicted_measured",
        title="Predicted and measured",
        caption="Bands are the 95 % intervals of the predictions, for drafts as they are "
        "pre-trained; whiskers are those of the measurements.",
    )
    return plot, partial(_panels, predictions, rows)


def _panels(predictions: Sequence[Prediction], rows: Sequence[Comparison]) -> Figure:
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axis, quantity in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES, strict=True):
        _predicted(axis, predictions, quantity)
        _measured(axis, [row for row in rows if row.quantity == quantity])
        axis.set_xscale("log")
        axis.set_xlabel("draft parameters N")
        axis.set_ylabel(_LABELS[quantity])
    ink = str(matplotlib.rcParams["text.color"])
    figure.axes[-1].axhline(1.0, color=ink, linewidth=0.9, linestyle=_DASHED)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _predicted(axis: Any, predictions: Sequence[Prediction], quantity: str) -> None:
    ordered = sorted(predictions, key=lambda one: one.params)
    sizes = [one.params for one in ordered]
    estimates = [one.estimates[quantity] for one in ordered]
    values = np.array([one.value for one in estimates])
    below, above = np.array([one.reach for one in estimates]).T
    axis.plot(sizes, values, marker=".", label="predicted")
    axis.fill_between(sizes, values - below, values + above, color="C0", alpha=0.2, linewidth=0)


def _measured(axis: Any, rows: Sequence[Comparison]) -> None:
    for place, (kind, marker) in enumerate(_MARKERS.items(), start=1):
        own = [row for row in rows if row.kind == kind]
        axis.errorbar(
            [row.params for row in own],
            [row.measured.value for row in own],
            yerr=np.array([row.measured.reach for row in own]).reshape(-1, 2).T,
            linestyle="none",
            marker=marker,
            color=f"C{place}",
            capsize=3,
            label=f"measured, {kind}",
        )
