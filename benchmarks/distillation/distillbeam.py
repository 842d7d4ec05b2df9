"""The study of DistillBeam, at the size of `models/mini-ende`, in the paper's order:

    python benchmarks/distillation/distillbeam.py                        # all, hours on two cores
    python benchmarks/distillation/distillbeam.py --only forcing,sft     # some parts

| part          | what varies                                                     | seeds |
|---------------|-----------------------------------------------------------------|-------|
| `rate`        | learning rates, for three objectives on drawn texts              | 1     |
| `temperature` | gold texts: teacher at 0.7, 1, 2, and whole laws, per divergence | 1     |
| `forcing`     | texts: gold, greedy, drawn, per divergence                       | 1     |
| `sft`         | hard labels on each of them                                      | 1     |
| `beams`       | 1, 2, 4, 8, 16 beams, per divergence                             | 1     |
| `draws`       | as many draws instead of beams (beyond the paper)                | 1     |
| `tails`       | what lies outside of the kept tokens; readings of TVD++          | 3     |
| `aggregate`   | each beam its own laws, their mixture, weights by score          | 1     |
| `auto`        | `--beams auto` and fixed widths at equal cost of the teacher     | 1     |
| `prompts`     | four times the prompts against four texts of each, long          | 1     |
| `length`      | eight times the steps, four times the prompts; laws and labels   | 1     |
| `best`        | the best of several trajectories, of one, of hard labels         | 3     |
| `speed`       | the best of them and the undistilled draft, by the clock         | 1     |

Runs have 3,000 prompts and 480 steps of 2,048 tokens, between five and six passes over one text of
each prompt; long ones have four times as many steps. `best` trains the best short run of each kind
as long as those of `length`, on as many prompts; the best of them and of `length` meet on fresh
prompts. The record follows from the marks in distillbeam/marks.jsonl: an interrupted study goes on
from these on any machine, part by part, and parts that are run later join it. Writes
benchmarks/results/distillbeam.json and distillbeam/ (marks, tables and figures).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import beam_plots
import ende
from beam_parts import LONGEST, MORE, PARTS, length, longer, planned
from beam_speed import is_measured, measure, measured
from claims import as_table, claims, judged, of_tails
from evaluation import Decoded, Scores, loop_shares
from lab import Amounts, Lab, keep, with_seed
from study import Evaluated, Models, Run
from writing import Pick, as_row, difference, figures, places, plain, ranked, write_study

from draftsmith.bench.compare.model import RunMetrics
from draftsmith.core.types import TreeShape
from draftsmith.provenance import write_text_atomic

RESULTS = Path(__file__).resolve().parents[1] / "results"
SEEDS = 3
FULL = Amounts(prompts=3000, exam_prompts=96, final_prompts=192, steps=480)
QUICK = Amounts(prompts=40, exam_prompts=8, final_prompts=8, steps=4)
CHOSEN_FROM = ("sft", "forcing", "beams", "draws")


# --------------------------------------------------------------------------- the best


def final(lab: Lab, workers: int) -> None:
    """The best of each kind after long training, with more seeds, on prompts that nothing was
    chosen by."""
    lab.examine(finalists(lab), lab.exam, workers)
    every = [run for some in compared_at_last(lab).values() for run in some]
    lab.examine(every, lab.final_exam, workers)


def timed(lab: Lab, workers: int) -> None:
    """The machine must be idle. The best draft is trained first where its marks alone are here."""
    best = compared_at_last(lab).get("several", [])[:1]
    if not best:
        raise SystemExit("--only speed needs to know the best draft: run --only best first")
    drafts = {run.name: run for run in (lab.models.base, *best)}
    if not is_measured(lab, drafts):
        lab.train(best, workers)
        measure(lab, drafts)


def finalists(lab: Lab) -> list[Run]:
    """The best short run of each kind, trained for long, beside those of `length`: short runs do
    not tell several texts of a prompt from one. Of more than four texts of so many prompts a long
    training would not read most even twice."""
    tried = {run.name: run for part in CHOSEN_FROM for run in PARTS[part](lab)}
    few = [run for run in tried.values() if (run.beams or 1) <= MORE]
    known = lab.known(few, lab.exam)
    return [*(at_length(lab, run) for run in best_of_kinds(known).values()), *length(lab)]


def compared_at_last(lab: Lab) -> dict[str, list[Run]]:
    """Seeds of the best finalist of each kind, and the draft that all began with; of those
    finalists that are known."""
    best = best_of_kinds(lab.known(finalists(lab), lab.exam))
    return {
        "undistilled": [lab.models.base],
        **{kind: [with_seed(run, seed) for seed in range(SEEDS)] for kind, run in best.items()},
    }


def best_of_kinds(known: Mapping[str, Evaluated]) -> dict[str, Run]:
    ordered = sorted(known.values(), key=lambda one: one.marks.mean_tau)
    return {kind_of(one.run): one.run for one in ordered}  # the last one stays


def kind_of(run: Run) -> str:
    """Learnt from several texts of a prompt, from one, or from hard labels."""
    assert run.options is not None
    if run.options.objective.objective == "sft":
        return "sft"
    return "several" if run.beams is not None and run.beams > 1 else "one"


def at_length(lab: Lab, run: Run) -> Run:
    """The same setting, trained for long on many prompts."""
    assert run.options is not None and run.name.endswith(f"-{lab.amounts.steps}-s0")
    steps = longer(lab, LONGEST).amounts.steps
    (store,) = run.options.store
    more = f"{store.name}@{MORE * lab.amounts.prompts}"
    words = run.name.removesuffix(f"-{lab.amounts.steps}-s0").removeprefix(store.name)
    name = f"{more}{words}-{steps}-s0"
    training = replace(run.options.training, duration=f"{steps}steps", warmup=max(1, steps // 20))
    options = replace(
        run.options,
        store=(store.with_name(more),),
        out=lab.work / "runs" / name / "draft",
        training=training,
        eval_every=max(1, steps // 4),
    )
    label = f"{run.options.objective.objective}, {more}, very long"
    return replace(run, name=name, options=options, label=label)


# --------------------------------------------------------------------------- the whole


def main() -> None:
    steps: dict[str, Callable[[Lab, int], object]] = {
        **{name: partial(sit_part, part) for name, part in PARTS.items()},
        "best": final,
        "speed": timed,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(steps), help="parts, by commas")
    parser.add_argument("--work", type=Path, default=ende.ROOT / "runs" / "distillbeam")
    parser.add_argument("--models", type=Path, default=ende.MODELS, help="target/ and draft/")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    chosen = given.only.split(",")
    unknown = set(chosen) - set(steps)
    if unknown:
        parser.error(f"--only knows {', '.join(steps)}; got {', '.join(sorted(unknown))}")
    work, out = places(given.work, given.out, quick=given.quick)
    lab = laboratory(given.models, work, out / "distillbeam", quick=given.quick)
    lab.cost_ratio()
    for part in chosen:
        steps[part](lab, given.workers)
        write(lab, out)


def sit_part(part: Callable[[Lab], list[Run]], lab: Lab, workers: int) -> None:
    lab.examine([lab.models.base, *part(lab)], lab.exam, workers)


def laboratory(models: Path, work: Path, record: Path, *, quick: bool) -> Lab:
    """Where the study works; its prompts are written once. `record`: where its marks are kept."""
    learn = ende.training_prompts(work / "learn.jsonl", MORE * FULL.prompts)
    ask = ende.exam_prompts(work / "ask.jsonl")
    both, amounts = Models(folder=models), QUICK if quick else FULL
    return Lab(
        models=both,
        work=work,
        learn=learn,
        ask=ask,
        amounts=amounts,
        kept=keep(record, work, both, (learn, ask), amounts.prompts),
    )


def write(lab: Lab, out: Path) -> None:
    """Figures and the answers to the study's questions, from all marks that are known."""
    known = lab.known([*planned(lab), *finalists(lab)], lab.exam)
    rows = [as_row(one) for one in known.values()]
    ratio = lab.cost_ratio()
    every = claims(lab)
    asked = lab.known([run for claim in every for run in claim.runs], lab.exam)
    claimed = judged(every, {name: one.marks for name, one in asked.items()})
    write_study(
        out,
        "distillbeam",
        compared(rows, ratio, lab),
        {
            **asdict(lab.amounts),
            "exam": lab.exam.key,
            "loop_share": loop_shares(lab.exam),
            "of": lab.kept.of,
            "cost_ratio": ratio,
            "runs": ranked(rows),
            **answers(lab),
            "speed": measured(lab),
            "claims": claimed,
            "tails": plain(of_tails(lab)),
        },
    )
    write_text_atomic(out / "distillbeam" / "claims.md", as_table(claimed))
    marks = {name: one.marks for name, one in {**known, **asked}.items()}
    beam_plots.save_pictures(marks, lab.amounts.steps, out / "distillbeam" / "figures")


def answers(lab: Lab) -> dict[str, Any]:
    """How the best of each kind compare, as soon as all are known."""
    asked = compared_at_last(lab)
    finals = {kind: list(lab.known(runs, lab.final_exam).values()) for kind, runs in asked.items()}
    if "several" not in finals or any(len(finals[kind]) < len(asked[kind]) for kind in asked):
        return {"best": {}, "differences": [], "tree_differences": []}
    marks = {kind: [one.marks for one in some] for kind, some in finals.items()}
    others = [kind for kind in marks if kind != "several"]

    def over(of: Pick) -> list[dict[str, Any]]:
        return plain(
            [difference("several", marks["several"], one, marks[one], of=of) for one in others]
        )

    return {
        "best": {kind: [as_row(one) for one in some] for kind, some in finals.items()},
        "differences": over(attrgetter("chains")),
        "tree_differences": over(trees),
    }


def trees(marks: Scores) -> list[Decoded]:
    return [one for one in marks.decoded if not one.shape.is_chain]


def compared(rows: Sequence[Mapping[str, Any]], cost_ratio: float, lab: Lab) -> list[RunMetrics]:
    """What stands in the comparison: runs of the usual steps and learning rate, and the draft that
    they began with, decoded with chains at temperature 1."""
    usual = (f"{lab.amounts.steps}steps", lab.learning_rate)
    short = [
        row
        for row in rows
        if "duration" not in row or (row["duration"], row["learning_rate"]) == usual
    ]
    shape = TreeShape.chain(8)
    measured = [
        figures(row, shape, 1.0, target="mini-ende", cost_ratio=cost_ratio) for row in short
    ]
    return [*measured, *(_as_beam(one) for one in measured if one.forcing == "greedy")]


def _as_beam(one: RunMetrics) -> RunMetrics:
    """The greedy text is the one best beam."""
    return replace(one, forcing="beam", label=f"{one.label}, as a beam")


if __name__ == "__main__":
    main()
