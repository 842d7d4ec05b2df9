"""The published stages of GRIFFIN and HASS, and drafters with one forward that learn as long.

    python benchmarks/griffin_table/stages.py --drafters runs/again --stores runs/again \\
        --out runs/stages

Both papers begin with a layer that knows no top-10 term and go on with it and with more forwards.
A token with three forwards takes about three times as long as one with a single forward, so the
controls, which go on with one forward, learn more tokens: as many as take the same time. What they
begin as has not taken equally long.

    griffin, 1 forward --+-- 2 forwards, top-10 0.5 --- 3 forwards, top-10 0.5
                         +-- 1 forward                                          control
    eagle ---------------+-- hass, 3 forwards --------- hass, 3 forwards, top-10 1
                         +-- 1 forward                                          control
    fspad ------------------ 1 forward                                          control
    griffin ---------------- 3 forwards                      no stages: 3 forwards from the first
    hass ------------------- 3 forwards                                          step on

Those in the left column are of benchmarks/smollm2/train.py, except GRIFFIN with one forward, which
this program trains for 512 steps with that one's losses (and a warm-up of ten). What is compared
is what order.py compares: chains below every position of texts that the target decoded greedily
from MT-bench, HumanEval and GSM8K. The same command again does what is missing.

    OUT/exam             the texts
    OUT/runs/NAME        a stage
    OUT/table.md, results.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.provenance import read_json
from griffin_table import order
from smollm2.train import VOCABULARY

COSTS = {
    ("eagle", 1): 0.7,
    ("fspad", 1): 1.0,
    ("griffin", 1): 1.1,
    ("griffin", 2): 2.1,
    ("griffin", 3): 3.1,
    ("hass", 3): 2.1,
}
"""Time of a training step by kind and forwards, in that of FSPAD: one core of a Xeon with AVX-512,
steps of 4,096 tokens, nothing else running (1.98 s)."""
FIRST = 512
"""Steps of a training from nothing; --drafters are expected to have as many of as many tokens."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training, and what it goes on from."""

    name: str
    kind: str
    forwards: int = 1
    top: float = 0.0
    begun: str = ""
    """A stage, or a kind of --drafters; empty: nothing."""
    share: float = 1.0
    """How much of the time that all go on for."""

    def steps(self, units: float) -> int:
        """How many fit into this stage's share of the time, which is in steps of FSPAD."""
        if not self.begun:
            return FIRST
        return max(1, round(units * self.share / COSTS[self.kind, self.forwards]))


SECOND = COSTS["griffin", 2] / (COSTS["griffin", 2] + COSTS["griffin", 3])
"""Share of GRIFFIN's second stage: as many steps as the third."""
STAGES = (
    Stage(name="griffin-one", kind="griffin"),
    Stage(
        name="griffin-two", kind="griffin", forwards=2, top=0.5, begun="griffin-one", share=SECOND
    ),
    Stage(
        name="griffin-three",
        kind="griffin",
        forwards=3,
        top=0.5,
        begun="griffin-two",
        share=1 - SECOND,
    ),
    Stage(name="griffin-control", kind="griffin", begun="griffin-one"),
    Stage(name="fspad-control", kind="fspad", begun="fspad"),
    Stage(name="hass-one", kind="hass", forwards=3, begun="eagle", share=0.8),
    Stage(name="hass-two", kind="hass", forwards=3, top=1.0, begun="hass-one", share=0.2),
    Stage(name="eagle-control", kind="eagle", begun="eagle"),
    Stage(name="griffin-whole", kind="griffin", forwards=3, begun="griffin"),
    Stage(name="hass-whole", kind="hass", forwards=3, begun="hass"),
)


class Work(order.Work):
    """Everything in OUT."""

    kept = (*order.KEPT, "first_rate")

    recorded = (*order.Work.recorded, "first_rate")

    def run(self) -> None:
        options = self.options
        for stage in STAGES:
            setting = order.Setting(
                shows="", kind=stage.kind, forwards=stage.forwards, top=stage.top
            )
            words = [*self.drafter(stage), "--decay-share", "0.35", "--seed", "1"]
            rate = options.learning_rate if stage.begun else options.first_rate
            self.learn(stage.name, setting, words, stage.steps(options.steps), rate)

    def drafter(self, stage: Stage) -> list[str]:
        """Options of `distill` for what a stage begins as."""
        if not stage.begun:
            return ["--drafter", stage.kind, *VOCABULARY]
        earlier = any(one.name == stage.begun for one in STAGES)
        folder = self.out / "runs" / stage.begun
        begun = folder if earlier else order.trained(self.options, stage.begun)
        return ["--drafter", f"{stage.kind}:{self.as_kind(stage.kind, begun)}"]

    def rows(self) -> list[dict[str, Any]]:
        runs = [(one, self.out / "runs" / one.name / "run.json") for one in STAGES]
        return [row(one, read_json(path, "run")) for one, path in runs if path.exists()]


def row(stage: Stage, run: Mapping[str, Any]) -> dict[str, Any]:
    """One stage as a row of results.json."""
    results = run["results"]
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "forwards": stage.forwards,
        "top_weight": stage.top,
        "begun": stage.begun,
        "steps": results["steps"],
        "tokens": results["tokens"],
        "time": round(results["steps"] * COSTS[stage.kind, stage.forwards], 1),
        "before": order.figures(results["held_out_before"]),
        "after": order.figures(results["held_out"]),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| stage | goes on from | forwards | top-10 weight | trained tokens | time "
        "| tokens per step before | after | draft right after, by depth |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in rows:
        right = " ".join(f"{share:.3f}" for share in one["after"]["accuracies"])
        lines.append(
            f"| {one['stage']} | {one['begun'] or 'nothing'} | {one['forwards']} "
            f"| {one['top_weight']:g} | {one['tokens'] / 1e6:.2f} M | {one['time']:.0f} "
            f"| {one['before']['tokens_per_step']:.3f} | {one['after']['tokens_per_step']:.3f} "
            f"| {right} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    said = "how long each goes on, in steps of FSPAD"
    parser = order.parser_of(__doc__, steps=330, batch_tokens=4096, said=said)
    parser.add_argument(
        "--first-rate", type=float, default=2e-3, help="of GRIFFIN with one forward"
    )
    own = {stage.name for stage in STAGES}
    options = order.checked(parser, sorted({stage.begun for stage in STAGES if stage.begun} - own))
    work = Work(options)
    if not options.report:
        work.run()
    work.report(table)


if __name__ == "__main__":
    main()
