"""Decoding speed of this checkout against another one, on the shipped models:

    git worktree add ../before COMMIT && python benchmarks/checkouts.py ../before [--rounds 15]

One worker process per checkout loads the models once; the workers take turns (A B, B A, ...), so
that a machine that changes its pace changes it for both. A figure is the median over rounds of the
ratio of the two times of a round; its interval is a bootstrap over rounds. Texts must be equal.
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if options.before is None or not (options.before / "src" / "draftsmith").is_dir():
        parser.error("name the folder of a checkout that has src/draftsmith")
    workers = {"now": Worker(HERE), "before": Worker(options.before.resolve())}
    rng = np.random.default_rng(0)
    for case in CASES:
        ratios = []
        for number in range(-2, options.rounds):  # two rounds of warm-up
            order = list(workers) if number % 2 else list(workers)[::-1]
            taken = {name: workers[name].run(case) for name in order}
            if taken["now"][1] != taken["before"][1]:
                raise SystemExit(f"{case}: the checkouts wrote different texts")
            if number >= 0:
                ratios.append(taken["before"][0] / taken["now"][0])
        draws = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        print(f"{case}: {np.median(ratios):.3f} of the speed before ({low:.3f} to {high:.3f})")
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
