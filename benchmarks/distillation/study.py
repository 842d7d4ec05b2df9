"""The runs of a study: collect once, distil and examine each, several at a time, resumably.

    WORK/stores/NAME/     trajectories of the target
    WORK/runs/NAME/       a distilled drafter; beside it its marks, cost.json and log.txt

Runs do not disturb each other (nothing is timed), so each gets one thread and they run side by
side. A first interrupt lets every run save; the command continues them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from evaluation import Evaluation, Scores, sit

from draftsmith.bench.compare.model import flattened
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.config import as_dict
from draftsmith.core.types import TreeShape
from draftsmith.distill.config import ScheduleConfig
from draftsmith.drafters.base import COST as COST_OPTIONS
from draftsmith.drafters.base import options_marked
from draftsmith.drafters.config import drafter_parts
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import InputError
from draftsmith.provenance import digest, jsonable, write_json_atomic

T = TypeVar("T")
COST = "cost.json"
PATHS = {"target", "model.target", "prompts", "out", "drafter", "store", "text"}
"""Options that records name by another way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A drafter: distilled as `options` say, or `given` as it stands (a kind or a folder)."""

    name: str
    options: DistillOptions | None = None
    given: str = ""
    tree: TreeShape | None = None
    """In which it is examined beside the exam's own shapes."""
    forcing: str | None = None
    beams: int | None = None
    label: str | None = None
    """What it is called where its setting says too little; None: by its setting."""

    @property
    def drafter(self) -> str:
        return self.given if self.options is None else str(self.options.out)

    @property
    def seed(self) -> int | None:
        return None if self.options is None else self.options.seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """A folder with `target` and `draft`."""

    folder: Path

    @property
    def target(self) -> str:
        return str(self.folder / "target")

    @property
    def draft(self) -> str:
        return str(self.folder / "draft")

    @property
    def base(self) -> Run:
        """The draft model as it stands."""
        return Run(name="undistilled", given=self.draft)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A run with its marks."""

    run: Run
    marks: Scores


def training(steps: int, *, block_length: int, batch_tokens: int, rate: float) -> ScheduleConfig:
    """AdamW without decay; a short warm-up, then a cosine to zero."""
    return ScheduleConfig(
        duration=f"{steps}steps",
        block_length=block_length,
        batch_tokens=batch_tokens,
        learning_rate=rate,
        min_learning_rate=0.0,
        warmup=max(1, steps // 20),
        schedule="cosine",
        betas=(0.9, 0.999),
        weight_decay=0.0,
    )


def collect(stores: Iterable[CollectOptions], workers: int) -> None:
    """Write the stores that are not there yet."""
    missing = [store for store in stores if not _is_done(store.out, store)]
    _each("collecting", _collect, missing, [store.out.name for store in missing], workers)


def train(runs: Sequence[Run], work: Path, workers: int) -> None:
    """Train what is not done yet, without an exam: others go on from these."""
    missing = [run for run in runs if not is_trained(run)]
    jobs = [(run, work) for run in missing]
    _each("training", _train, jobs, [run.name for run in missing], workers)


def examine(
    runs: Sequence[Run],
    exam: Evaluation,
    work: Path,
    workers: int,
    done: Callable[[Evaluated], None] = lambda _: None,
) -> list[Evaluated]:
    """Train and examine what is not done yet; all runs with their marks, in order. `done` hears of
    each as soon as it is."""
    short = exam.short()
    if short is not None:
        print(short, file=sys.stderr)
    ready = {run.name: is_trained(run) and _marks(run, exam, work).is_file() for run in runs}

    def read(run: Run) -> Evaluated:
        return Evaluated(run=run, marks=Scores.read(_marks(run, exam, work)))

    for run in runs:
        if ready[run.name]:
            done(read(run))
    missing = [run for run in runs if not ready[run.name]]
    jobs = [(run, exam, work) for run in missing]
    names = [run.name for run in missing]
    _each("training", _train_and_examine, jobs, names, workers, lambda job: done(read(job[0])))
    return [read(run) for run in runs]


# --------------------------------------------------------------------------- work


def _collect(store: CollectOptions) -> None:
    from draftsmith.commands import collect as recipe

    with _logged(store.out.with_suffix(".log")):
        recipe.run(store)


def _train(job: tuple[Run, Path]) -> None:
    run, work = job
    folder = work / "runs" / run.name
    if run.options is not None and not is_trained(run):
        from draftsmith.commands import distill as recipe

        with _logged(folder / "log.txt"), _costed(folder / COST):
            recipe.run(run.options)


def _train_and_examine(job: tuple[Run, Evaluation, Path]) -> None:
    run, exam, work = job
    _train((run, work))
    with _logged(work / "runs" / run.name / "log.txt"):
        marks = sit(exam, run.drafter, run.tree)
    write_json_atomic(_marks(run, exam, work), asdict(marks))


def is_trained(run: Run) -> bool:
    """Whether its drafter is there."""
    return run.options is None or _is_done(Path(run.drafter), run.options)


def _is_done(folder: Path, options: CollectOptions | DistillOptions) -> bool:
    """Whether it has been made, and by these options (files may have been named otherwise)."""
    path = folder / "run.json"
    if not path.is_file():
        return False
    before = _deciding(json.loads(path.read_text(encoding="utf-8"))["options"])
    now = deciding(options)
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise InputError(
                f"{folder} was made with {name} {before[name]}, and the study now has {now[name]}: "
                "remove the folder, or work in another one (--work)"
            )
    return True


def deciding(options: CollectOptions | DistillOptions) -> dict[str, Any]:
    """Names and values of what decides what comes of it; files aside, which may be named otherwise,
    and options of the drafter that change time and memory alone."""
    return _deciding(jsonable(as_dict(options)))


def _deciding(said: dict[str, Any]) -> dict[str, Any]:
    if said.get("drafter_option"):
        kind, _ = drafter_parts(str(said["drafter"]))
        free = options_marked(drafter_class(kind).Config, COST_OPTIONS)
        kept = [one for one in said["drafter_option"] if one.partition("=")[0] not in free]
        said = said | {"drafter_option": kept}
    return {name: value for name, value in flattened(said).items() if name not in PATHS}


@contextlib.contextmanager
def _costed(path: Path) -> Iterator[None]:
    """CPU seconds, added to those of earlier attempts at the same run."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cpu_seconds": 0.0}
    began = time.process_time()
    try:
        yield
    finally:
        spent = before["cpu_seconds"] + time.process_time() - began
        write_json_atomic(path, {"cpu_seconds": spent})


def _marks(run: Run, exam: Evaluation, work: Path) -> Path:
    """Every exam has marks of its own, and every tree."""
    tree = "" if run.tree is None else f"-{digest(asdict(run.tree))[:6]}"
    return work / "runs" / run.name / f"marks-{exam.key[:12]}{tree}.json"


def _each(
    what: str,
    job: Callable[[T], None],
    items: Sequence[T],
    names: Sequence[str],
    workers: int,
    done: Callable[[T], None] = lambda _: None,
) -> None:
    """Do all, side by side, and say how it goes."""
    if not items:
        return
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_alone) as pool:
        futures = {
            pool.submit(job, item): (item, name) for item, name in zip(items, names, strict=True)
        }
        try:
            for number, future in enumerate(as_completed(futures), 1):
                future.result()
                item, name = futures[future]
                done(item)
                spent = time.monotonic() - began
                left = spent / number * (len(items) - number)
                print(
                    f"{what} {number}/{len(items)}: {name}  ({left / 60:.0f} min left)",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _alone() -> None:
    """A worker has one thread: two that share a small model's work wait more than they work."""
    torch.set_num_threads(1)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What is said on stderr goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        print(f"-- process {os.getpid()}", file=log, flush=True)
        yield
