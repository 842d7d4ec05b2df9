"""Decoding speed of this checkout against another one, on the shipped models:

    git worktree add ../before COMMIT && python benchmarks/checkouts.py ../before [--pairs 8]

One worker process per checkout loads the models once; the two take turns (A B, B A, ...), so that a
machine that changes its pace changes it for both. One process is faster than another of the same
code by several per cent for as long as it lives (where its weights lie in memory), so there are
several pairs of processes, and each checkout is started first in half of them. A figure is the mean
over pairs of the median ratio of a round's two times, with its t interval of 95 % over the pairs.
Texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

HERE = Path(__file__).resolve().parents[1]
PROMPTS = (
    "def parse(text):\n    lines = text.splitlines()\n    for line in lines:\n",
    "class Node:\n    def __init__(self, left, right):\n        self.left = left\n",
)
GERMAN = "The committee has decided to postpone the meeting until next week.\n"
CASES = {
    "mini-code, plain": ("mini-code", "none", PROMPTS),
    "mini-code, draft model": ("mini-code", "independent", PROMPTS),
    "mini-ende, plain": ("mini-ende", "none", (GERMAN,)),
    "mini-ende, draft model": ("mini-ende", "independent", (GERMAN,)),
}
NEW_TOKENS = 96


def work() -> None:
    """Read the name of a case per line, decode it, write seconds and tokens as JSON."""
    import torch

    import draftsmith

    torch.set_num_threads(1)
    loaded: dict[str, Any] = {}
    for line in sys.stdin:
        model, kind, texts = CASES[line.strip()]
        if line not in loaded:
            target = draftsmith.load_target(str(HERE / f"models/{model}/target"), dtype="float32")
            source = kind if kind == "none" else f"{kind}:{HERE / f'models/{model}/draft'}"
            drafter = draftsmith.load_drafter(source)
            drafter.bind(target)
            loaded[line] = target, drafter
        target, drafter = loaded[line]
        ids = [tuple(target.tokenizer.encode(text)) for text in texts]
        options = draftsmith.DecodeOptions(max_new_tokens=NEW_TOKENS)
        start = time.perf_counter()
        made = [draftsmith.generate(target, drafter, [one], options)[0] for one in ids]
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, [list(one.token_ids) for one in made]]), flush=True)


class Worker:
    """A process that decodes with the package of one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: str) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; its error stands above")
        seconds, tokens = json.loads(line)
        return seconds, tokens

    def close(self) -> None:
        self._process.communicate("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=8, help="times that both decode each text")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all of them")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if options.before is None or not (options.before / "src" / "draftsmith").is_dir():
        parser.error("name the folder of a checkout that has src/draftsmith")
    if options.pairs < 2 or options.pairs % 2 or options.rounds < 2 or options.rounds % 2:
        parser.error("--pairs and --rounds must be even, so that each checkout is first in half")
    found: dict[str, list[float]] = {case: [] for case in options.case or CASES}
    places = [("now", HERE), ("before", options.before.resolve())]
    for pair in range(options.pairs):
        workers = {name: Worker(path) for name, path in (places if pair % 2 else places[::-1])}
        try:
            for case, ratios in found.items():
                ratios.append(compare(workers, case, options.rounds))
        finally:
            for worker in workers.values():
                worker.close()
    for case, ratios in found.items():
        mean, error = np.mean(ratios), scipy.stats.sem(ratios)
        low, high = scipy.stats.t.interval(0.95, len(ratios) - 1, mean, error)
        print(f"{case}: {mean:.3f} of the speed before ({low:.3f} to {high:.3f})")


def compare(workers: dict[str, Worker], case: str, rounds: int) -> float:
    """The median ratio of a round's two times."""
    ratios = []
    for number in range(-2, rounds):  # two rounds of warm-up
        order = list(workers) if number % 2 else list(workers)[::-1]
        taken = {name: workers[name].run(case) for name in order}
        if taken["now"][1] != taken["before"][1]:
            raise SystemExit(f"{case}: the checkouts wrote different texts")
        if number >= 0:
            ratios.append(taken["before"][0] / taken["now"][0])
    return float(np.median(ratios))


if __name__ == "__main__":
    main()
