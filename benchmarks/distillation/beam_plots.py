"""Two pictures of the DistillBeam study in which every run is a dot, and all have as many.

    python benchmarks/distillation/beam_plots.py        # again, from the scores that are kept

`objectives`: each divergence after the same nine collections of texts, and the mean of the nine.
`forcing`: each divergence, and labels, after one run on each of three kinds of text. The general
pictures of a comparison show the best setting of each, of unequal numbers of settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Never

from beam_parts import SOFT, WIDTHS
from evaluation import Scores
from matplotlib.figure import Figure
from writing import interval

from draftsmith.plots import GREY, Plot

RESULTS = Path(__file__).resolve().parents[1] / "results"
ONE = ("gold", "greedy", "draws-1")
SEVERAL = tuple(f"beams-{width}" for width in WIDTHS), ("draws-4", "draws-16")
GROUPS: dict[str, tuple[str, ...]] = {
    "one text per prompt": ONE,
    "2 to 16 beams": SEVERAL[0],
    "4 and 16 samples": SEVERAL[1],
}
NAMES = {"gold": "gold", "greedy": "greedy", "draws-1": "1 sample"}
COLOURS = ("#0072B2", "#E69F00", "#009E73")
TOY = (
    "Toy models (models/mini-ende, 9.5 M parameters), one seed, 96 prompts; mean of chains of 5 "
    "and 8 at T = 0 and 1.\nWhiskers: 95 % over prompts, of each run alone: the claims compare "
    "runs on the same prompts, which is far more exact."
)


def save_pictures(marks: Mapping[str, Scores], steps: int, folder: Path) -> None:
    """Draw both where all their runs are known; `marks` by the name of the run."""
    names = [_run(store, one, steps) for one in SOFT for some in GROUPS.values() for store in some]
    names += [_run(store, "sft", steps) for store in ONE]
    if not all(name in marks for name in names):
        return
    for plot in _plots(marks, steps):
        plot.draw().save(folder)


def _plots(marks: Mapping[str, Scores], steps: int) -> tuple[Plot[[], Never], ...]:
    return (
        Plot(
            name="objectives",
            title="Divergences, each after the same nine collections",
            caption=f"Dots: runs; black: mean of the nine. {TOY}. The axis does not begin at 0.",
            figure=partial(_objectives, marks, steps),
        ),
        Plot(
            name="forcing",
            title="Kinds of text, one run of each",
            caption=f"{TOY}. The axis does not begin at 0.",
            figure=partial(_forcing, marks, steps),
        ),
    )


def _run(store: str, objective: str, steps: int) -> str:
    return f"{store}-{objective}-{steps}-s0"


def _objectives(marks: Mapping[str, Scores], steps: int) -> Figure:
    figure, axis = _panel(marks, SOFT)
    for place, objective in enumerate(SOFT):
        own: list[Scores] = []
        for group, (name, stores) in enumerate(GROUPS.items()):
            some = [marks[_run(store, objective, steps)] for store in stores]
            shift = 0.18 * (group - 1)
            heights = [one.mean_tau for one in some]
            label = name if not place else None
            axis.scatter([place + shift] * len(some), heights, color=COLOURS[group], label=label)
            own += some
        _whisker(axis, place + 0.36, own, "black")
    return _done(figure, axis)


def _forcing(marks: Mapping[str, Scores], steps: int) -> Figure:
    objectives = (*SOFT, "sft")
    figure, axis = _panel(marks, objectives)
    for place, objective in enumerate(objectives):
        for kind, store in enumerate(ONE):
            label = NAMES[store] if not place else None
            own = [marks[_run(store, objective, steps)]]
            _whisker(axis, place + 0.22 * (kind - 1), own, COLOURS[kind], label)
    return _done(figure, axis)


def _panel(marks: Mapping[str, Scores], objectives: Sequence[str]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8.6, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.set_xticks(
        range(len(objectives)), ["labels" if one == "sft" else one for one in objectives]
    )
    axis.set_ylabel("tokens per step")
    axis.set_title(TOY, fontsize=7)
    if "undistilled" in marks:
        base = marks["undistilled"].mean_tau
        axis.axhline(base, color=GREY, linestyle="--", label="undistilled")
    return figure, axis


def _whisker(
    axis: Any, place: float, some: Sequence[Scores], colour: str, label: str | None = None
) -> None:
    """The mean of runs, and its interval over prompts: the runs are fixed, all are drawn."""
    ways = tuple(way for one in some for way in one.chains)
    mean, low, high = interval([replace(some[0], decoded=ways)])
    error = [[mean - low], [high - mean]]
    axis.errorbar([place], [mean], yerr=error, fmt="o", color=colour, capsize=2, label=label)


def _done(figure: Figure, axis: Any) -> Figure:
    axis.grid(axis="y", alpha=0.3)
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    return figure


def main() -> None:
    record = json.loads((RESULTS / "distillbeam.json").read_text(encoding="utf-8"))
    lines = (RESULTS / "distillbeam" / "marks.jsonl").read_text(encoding="utf-8").splitlines()
    marks = {
        line["run"]: Scores.from_json(line["marks"])
        for line in map(json.loads, lines)
        if (line["exam"], line["of"]) == (record["exam"], record["of"])
    }
    save_pictures(marks, record["steps"], RESULTS / "distillbeam" / "figures")


if __name__ == "__main__":
    main()
