"""Start-up of `distill` on a large store: time to the first step, and anonymous memory.

    python benchmarks/distillation/large_store.py make SOURCE OUT --gigabytes 20
    python benchmarks/distillation/large_store.py measure TARGET SMALL LARGE

`make` replicates the rows of a store that `collect` wrote; every copy has prompts of its own. The
rows go through the real codec and the real writer. `measure` runs `distill` on both stores in
processes of their own, up to the end of the first step. The small store shows what the model, the
optimiser and the libraries take: memory is reported above that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import Trajectory

CHILD = """
import json, re, sys, time
from pathlib import Path
begun = float(sys.argv[1])
from draftsmith import cli
from draftsmith.distill import trainer
step = trainer.Trainer.one_step

def first(self):
    begins = time.time()
    report = step(self)
    anonymous = int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    found = {"start_s": begins - begun, "first_step_s": time.time() - begun,
             "anonymous_mb": anonymous / 1024, "loss": report.loss}
    print(json.dumps(found), flush=True)
    raise KeyboardInterrupt

trainer.Trainer.one_step = first
cli.main(sys.argv[2:])
"""


def varied(text: Trajectory, copy: int) -> Trajectory:
    """The same text behind another prompt: the first tokens spell the number of the copy."""
    prompt = list(text.prompt)
    for place in range(min(len(prompt), 3)):
        prompt[place] = (prompt[place] + copy // 64**place) % 64
    return replace(text, prompt=tuple(prompt))


def make(source: Path, out: Path, size: float) -> None:
    """Fill `out` with copies of the rows of `source` until its files have this many bytes."""
    old = TrajectoryStore.open(source)
    texts = list(old.trajectories())
    new = TrajectoryStore.create(out, old.header)
    written = sum(path.stat().st_size for path in out.iterdir())
    for number in count(len(new.shards())):
        if written >= size:
            return
        shard = new.write(number, [varied(text, number) for text in texts])
        written += sum(file.bytes for file in shard.files)


def started(target: str, store: Path, drafter: str, block: int, batch: int) -> dict[str, float]:
    """Run `distill` up to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        script = "import time; exec(compile(CHILD, 'child', 'exec'))".replace("CHILD", repr(CHILD))
        words = f"distill --target {target} --drafter {drafter} --store {store} --hold-out 0"
        sizes = f"--block-length {block} --batch-tokens {batch} --duration 100steps --warmup 0"
        now = subprocess.run(["date", "+%s.%N"], capture_output=True, text=True, check=True).stdout
        out = f"--out {folder}/out --dtype float32"
        command = [sys.executable, "-c", script, now.strip(), *f"{words} {sizes} {out}".split()]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    raise SystemExit(f"distill did not reach its first step:\n{ran.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make")
    making.add_argument("source", type=Path)
    making.add_argument("out", type=Path)
    making.add_argument("--gigabytes", type=float, default=20.0)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("target")
    measuring.add_argument("small", type=Path)
    measuring.add_argument("large", type=Path)
    measuring.add_argument("--drafter", default="griffin")
    measuring.add_argument("--block-length", type=int, default=256)
    measuring.add_argument("--batch-tokens", type=int, default=2048)
    chosen = parser.parse_args()
    if chosen.verb == "make":
        make(chosen.source, chosen.out, chosen.gigabytes * 1e9)
        return
    sizes = (chosen.drafter, chosen.block_length, chosen.batch_tokens)
    small, large = (started(chosen.target, x, *sizes) for x in (chosen.small, chosen.large))
    above = large["anonymous_mb"] - small["anonymous_mb"]
    print(json.dumps({"small": small, "large": large, "anonymous_mb_above_small": above}, indent=2))


if __name__ == "__main__":
    main()
