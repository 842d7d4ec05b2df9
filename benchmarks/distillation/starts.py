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
from beam_parts import MORE, longer
from distillbeam import laboratory
from evaluation import Evaluation, loop_shares
from lab import Lab
from study import Run
from writing import as_row, difference, places, plain, write_study

import mini_ende
from draftsmith.data.text import TextConfig
from mini_code import train_missing

STEPS = (150, 600)
"""Steps of pre-training; the shipped draft model has 3,000."""
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
    full = mini_ende.draft(folder, TextConfig(text=(train,), eval_text=(held_out,)))
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


def gains(lab: Lab, one: Start, exam: Evaluation, workers: int) -> dict[str, Any]:
    """The drafts of a start, how many more tokens per step each objective gave, and how many more
    the laws gave than the drawn tokens alone."""
    done = lab.examine([one.before, *one.after.values()], exam, workers)
    before, *reached = done
    after = dict(zip(one.after, reached, strict=True))
    ratios = [
        difference(objective, [now.marks], "before", [before.marks])
        for objective, now in after.items()
    ]
    hard, soft = (after[objective].marks for objective in OBJECTIVES)
    ratios.append(difference(OBJECTIVES[1], [soft], OBJECTIVES[0], [hard]))
    for gain in ratios:
        spread = f"{gain.low - 1:+.1%} to {gain.high - 1:+.1%}"
        print(
            f"{one.pretraining} of pre-training, tau {before.marks.mean_tau:.3f}: "
            f"{gain.better} over {gain.worse} {gain.ratio - 1:+.1%} ({spread})",
            file=sys.stderr,
        )
    return {
        "pretraining": one.pretraining,
        "before": as_row(before),
        "after": [as_row(now) for now in after.values()],
        "gains": plain(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ende.ROOT / "runs" / "distillbeam")
    parser.add_argument("--models", type=Path, default=ende.MODELS, help="target/ and draft/")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=ende.ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    work, out = places(given.work, given.out, quick=given.quick)
    lab = laboratory(given.models, work, out / "distillbeam_starts", quick=given.quick)
    exam = replace(lab.final_exam, tree=())
    amounts = {
        "prompts": MORE * lab.amounts.prompts,
        "exam_prompts": lab.amounts.final_prompts,
        "steps": longer(lab).amounts.steps,
        "seeds": 1,
        "exam": exam.key,
        "loop_share": loop_shares(exam),
        "of": lab.kept.of,
    }
    made = []
    for one in starts(lab, QUICK_STEPS if given.quick else STEPS):
        made.append(gains(lab, one, exam, given.workers))
        write_study(out, "distillbeam_starts", [], {**amounts, "starts": made})


if __name__ == "__main__":
    main()
