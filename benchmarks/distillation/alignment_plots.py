"""The pictures of the Direct Alignment study."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Never

from matplotlib.figure import Figure

from draftsmith.bench.compare.model import Pooled
from draftsmith.plots import GREY, Plot

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
BASE = "undistilled"
_STEPS = re.compile(r"^(?P<setting>.+)-(?P<steps>\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A setting on a task with drafts of gamma tokens."""

    task: str
    name: str
    """Ends with the number of steps, except for the undistilled draft."""
    gamma: int
    tau: Pooled
    memory_bound_speedup: float

    @property
    def setting(self) -> str:
        found = _STEPS.match(self.name)
        return found["setting"] if found else self.name

    @property
    def steps(self) -> int:
        found = _STEPS.match(self.name)
        return int(found["steps"]) if found else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "setting": self.setting,
            "steps": self.steps,
            "gamma": self.gamma,
            "tau": round(self.tau.mean, 4),
            "tau_half": None if self.tau.half is None else round(self.tau.half, 4),
            "seeds": self.tau.count,
            "memory_bound_speedup": round(self.memory_bound_speedup, 4),
        }


def save_pictures(bars: Sequence[Bar], steps: int, folder: Path) -> None:
    """Bars of the memory-bound speed-up, tau after so many steps, what each choice is worth."""
    full = [bar for bar in bars if bar.steps in (0, steps)]
    plots: tuple[Plot[[], Never], ...] = (
        Plot(
            name="memory_bound",
            title="Memory-bound speed-up",
            caption="tau / (c gamma + 1), c = parameters of the draft / of the target.",
            figure=partial(_speedups, full),
        ),
        Plot(
            name="steps",
            title="Tokens per step after so many steps",
            caption="gamma = 3; the line is the undistilled draft.",
            figure=partial(_steps, bars),
        ),
        Plot(
            name="choices",
            title="What each choice is worth",
            caption="Tokens per step, gamma = 3, by task.",
            figure=partial(_choices, full),
        ),
    )
    for plot in plots:
        plot.draw().save(folder)


def _tasks(bars: Sequence[Bar]) -> list[str]:
    return list(dict.fromkeys(bar.task for bar in bars))


def _names(bars: Sequence[Bar]) -> list[str]:
    return list(dict.fromkeys(bar.setting for bar in bars))


def _plain(bars: Sequence[Bar]) -> list[Bar]:
    """Losses alone: a setting that nothing else was changed in has the shortest name."""
    names = _names(bars)
    plain = [n for n in names if not any(n != m and n.startswith(f"{m}-") for m in names)]
    plain += [n for n in names if n == "tvdpp-uniform"]
    return [bar for bar in bars if bar.setting in plain]


def _grouped(axis: Any, bars: Sequence[Bar], value: str) -> None:
    """Groups of bars by task, one colour per setting."""
    names, tasks = _names(bars), _tasks(bars)
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        own = {bar.task: bar for bar in bars if bar.setting == name}
        places = [t + (n - (len(names) - 1) / 2) * width for t in range(len(tasks))]
        heights = [_value(own.get(task), value) for task in tasks]
        errors = [_half(own.get(task), value) for task in tasks]
        colour = GREY if name == BASE else COLOURS[(n - 1) % len(COLOURS)]
        axis.bar(places, heights, width, yerr=errors, color=colour, label=name)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_ylim(bottom=1.0)


def _value(bar: Bar | None, value: str) -> float:
    if bar is None:
        return float("nan")
    return bar.tau.mean if value == "tau" else bar.memory_bound_speedup


def _half(bar: Bar | None, value: str) -> float:
    return 0.0 if bar is None or value != "tau" or bar.tau.half is None else bar.tau.half


def _speedups(bars: Sequence[Bar]) -> Figure:
    gammas = sorted({bar.gamma for bar in bars})
    figure = Figure(figsize=(8.6, 3.2 * len(gammas)), layout="constrained")
    axes = figure.subplots(len(gammas), 1, sharex=True, squeeze=False)[:, 0]
    for axis, gamma in zip(axes, gammas, strict=True):
        _grouped(axis, _plain([bar for bar in bars if bar.gamma == gamma]), "memory_bound_speedup")
        axis.set_title(f"gamma = {gamma}")
        axis.set_ylabel("memory-bound speed-up")
    axes[0].legend(ncols=3, fontsize=8)
    return figure


def _steps(bars: Sequence[Bar]) -> Figure:
    shown = _plain([bar for bar in bars if bar.gamma == min(b.gamma for b in bars)])
    tasks = _tasks(shown)
    figure = Figure(figsize=(3.2 * len(tasks), 3.4), layout="constrained")
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        own = [bar for bar in shown if bar.task == task]
        for n, name in enumerate(name for name in _names(own) if name != BASE):
            line = sorted((bar.steps, bar.tau.mean) for bar in own if bar.setting == name)
            axis.plot(*zip(*line, strict=True), marker="o", color=COLOURS[n], label=name)
        for bar in own:
            if bar.setting == BASE:
                axis.axhline(bar.tau.mean, color=GREY, linestyle="--", label=BASE)
        axis.set_title(task)
        axis.set_xlabel("optimiser steps")
        axis.set_ylabel("tokens per step")
    figure.axes[0].legend(fontsize=8)
    return figure


def _choices(bars: Sequence[Bar]) -> Figure:
    shown = [bar for bar in bars if bar.gamma == min(b.gamma for b in bars)]
    names = _names(shown)
    figure = Figure(figsize=(8.6, 0.9 + 0.34 * len(names)), layout="constrained")
    tasks = _tasks(shown)
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        own = {bar.setting: bar for bar in shown if bar.task == task}
        base = own.get(BASE)
        values = [_value(own.get(name), "tau") for name in names]
        colours = [GREY if name == BASE else COLOURS[0] for name in names]
        axis.barh(names, values, color=colours)
        if base is not None:
            axis.axvline(base.tau.mean, color=GREY, linestyle="--")
        axis.set_xlim(left=1.0)
        axis.set_title(task)
        axis.invert_yaxis() if axis is axes[0] else None
    return figure
