"""What distilling gives a draft model, by what it had learnt before:

    python benchmarks/distillation/starts.py [--workers 2]

Draft models like the one of `models/mini-ende`, pre-trained for a twentieth, a fifth and all of its
steps, learn from the same answers of the target (four draws of every prompt), from its laws and, as
a control that has seen as much, from the drawn tokens alone. A paper that reports a gain of 31 %
starts from a draft of general purpose; the shipped one is already a translator. One seed.

Continues when interrupted. Writes benchmarks/results/distillbeam_starts.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ende
from distillbeam import MORE, facts, laboratory, longer
from exam import Exam
from lab import Lab
from study import Run, collect, examine
from writing import as_row, difference, places, plain, write_study

from draftsmith.option_groups import TextOptions
from draftsmith.recipes import mini_ende
from draftsmith.recipes.mini_code import train_missing

STEPS = (150, 600)
"""Of the shipped draft model's 3,000 of pre-training."""
QUICK_STEPS = (2, 4)
OBJECTIVES = ("sft", "lk")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A draft model, and what it becomes by each objective."""

    pretraining: str
    """Its steps of pre-training."""
    before: Run
    after: dict[str, Run]


def starts(lab: Lab, steps: Sequence[int]) -> list[Start]:
    """From the least trained to the shipped one."""
    young = [(f"{count}steps", young_draft(lab, count)) for count in steps]
    record = json.loads((Path(lab.models.draft) / "run.json").read_text(encoding="utf-8"))
    shipped = (record["options"]["training"]["duration"], lab.models.draft)
    return [start(lab, *one) for one in (*young, shipped)]


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


def start(lab: Lab, pretraining: str, draft: str) -> Start:
    def after(objective: str) -> Run:
        run = longer(lab).run(store(lab), objective)
        assert run.options is not None
        name = f"start-{pretraining}-{objective}"
        options = replace(run.options, drafter=draft, out=lab.work / "runs" / name / "draft")
        return replace(run, name=name, options=options, label=name)

    return Start(
        pretraining=pretraining,
        before=Run(name=f"start-{pretraining}", given=draft),
        after={objective: after(objective) for objective in OBJECTIVES},
    )


def store(lab: Lab) -> str:
    return f"draws-4@{MORE * lab.amounts.prompts}"


def gains(lab: Lab, found: Sequence[Start], exam: Exam, workers: int) -> list[dict[str, Any]]:
    """Of every start: its drafts, and how many more tokens per step each objective gave."""
    collect([lab.store(store(lab))], workers)
    runs = [run for one in found for run in (one.before, *one.after.values())]
    done = {one.run.name: one for one in examine(runs, exam, lab.work, workers)}
    made = []
    for one in found:
        before = done[one.before.name]
        after = {objective: done[run.name] for objective, run in one.after.items()}
        ratios = [
            difference(objective, [reached.marks], "before", [before.marks])
            for objective, reached in after.items()
        ]
        for gain in ratios:
            spread = f"{gain.low - 1:+.1%} to {gain.high - 1:+.1%}"
            print(
                f"{one.pretraining} of pre-training, tau {before.marks.mean_tau:.3f}: "
                f"{gain.better} {gain.ratio - 1:+.1%} ({spread})",
                file=sys.stderr,
            )
        made.append(
            {
                "pretraining": one.pretraining,
                "before": as_row(before),
                "after": [as_row(reached) for reached in after.values()],
                "gains": plain(ratios),
            }
        )
    return made


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
    exam = replace(lab.final_exam, tree=())
    made = gains(lab, starts(lab, QUICK_STEPS if given.quick else STEPS), exam, given.workers)
    amounts = {
        "prompts": MORE * lab.amounts.prompts,
        "exam_prompts": lab.amounts.final_prompts,
        "steps": longer(lab).amounts.steps,
        "seeds": 1,
        "exam": exam.key,
        "learn": facts(lab)["learn"],
    }
    write_study(out, "distillbeam_starts", [], {**amounts, "starts": made})


if __name__ == "__main__":
    main()
