"""What distilling gives a draft model, by what it had learnt before:

    python benchmarks/distillation/starts.py [--workers 2]

Draft models like the one of `models/mini-ende`, pre-trained for a twentieth, a fifth and all of its
steps, learn from the same answers of the target (four draws of every prompt). A paper that reports
a gain of 31 % starts from a draft of general purpose; the shipped one is already a translator.
Continues when interrupted. Writes benchmarks/results/distillbeam_starts.json.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ende
from distillbeam import MANY, laboratory, longer
from exam import Exam
from lab import Lab
from study import Run, collect, examine
from writing import Difference, as_row, difference, places, plain, write_study

from draftsmith.option_groups import TextOptions
from draftsmith.recipes import mini_ende
from draftsmith.recipes.mini_code import train_missing

STEPS = (150, 600)
"""Of the shipped draft model's pre-training: a twentieth and a fifth."""
OBJECTIVE = "lk"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A draft model, and what it becomes."""

    pretraining: str
    """Its steps of pre-training."""
    before: Run
    after: Run


def starts(lab: Lab) -> list[Start]:
    """From the least trained to the shipped one."""
    shipped = mini_ende.draft(lab.models.folder, TextOptions(text=("",))).training.duration
    young = [(f"{steps}steps", young_draft(lab, steps)) for steps in STEPS]
    return [start(lab, *one) for one in (*young, (shipped, lab.models.draft))]


def young_draft(lab: Lab, steps: int) -> str:
    """The shipped draft model's recipe, cut short; its folder."""
    folder = lab.work / "starts"
    texts = mini_ende.write_examples(ende.DATA / "en-de.train.tsv.xz", folder / "examples")
    train, held_out = map(str, texts)
    full = mini_ende.draft(folder, TextOptions(text=(train,), eval_text=(held_out,)))
    options = replace(
        full,
        model=replace(full.model, tokenizer=lab.models.target),
        training=replace(full.training, duration=f"{steps}steps", warmup=max(1, steps // 20)),
        out=folder / f"draft-{steps}",
    )
    train_missing((options,))
    return str(options.out)


def store(lab: Lab) -> str:
    return f"draws-4@{MANY * lab.amounts.prompts}"


def start(lab: Lab, pretraining: str, draft: str) -> Start:
    run = longer(lab).run(store(lab), OBJECTIVE)
    assert run.options is not None
    name = f"start-{pretraining}"
    options = replace(run.options, drafter=draft, out=lab.work / "runs" / name / "draft")
    return Start(
        pretraining=pretraining,
        before=Run(name=f"{name}-before", given=draft),
        after=replace(run, name=name, options=options, label=name),
    )


def gains(lab: Lab, exam: Exam, workers: int) -> list[dict[str, Any]]:
    """Of every start: both drafts, and the ratio of their tokens per step."""
    found = starts(lab)
    collect([lab.store(store(lab))], workers)
    runs = [run for one in found for run in (one.before, one.after)]
    marked = iter(examine(runs, exam, lab.work, workers))
    made = []
    for one in found:
        before, after = next(marked), next(marked)
        gain = difference("after", [after.marks], "before", [before.marks])
        say(one.pretraining, before.marks.mean_tau, after.marks.mean_tau, gain)
        made.append(
            {
                "pretraining": one.pretraining,
                "before": as_row(before),
                "after": as_row(after),
                **plain([gain])[0],
            }
        )
    return made


def say(pretraining: str, before: float, after: float, gain: Difference) -> None:
    print(
        f"{pretraining} of pre-training: {before:.3f} -> {after:.3f} tokens per step, "
        f"{gain.ratio - 1:+.1%} ({gain.low - 1:+.1%} to {gain.high - 1:+.1%})",
        file=sys.stderr,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ende.ROOT / "runs" / "distillbeam")
    parser.add_argument("--models", type=Path, default=ende.MODELS, help="target/ and draft/")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=ende.ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    work, out = places(given.work, given.out, quick=given.quick)
    lab = laboratory(given.models, work, quick=given.quick)
    made = gains(lab, replace(lab.final_exam, tree=()), given.workers)
    write_study(out, "distillbeam_starts", [], {**asdict(lab.amounts), "starts": made})


if __name__ == "__main__":
    main()
