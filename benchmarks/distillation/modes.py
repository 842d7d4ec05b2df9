"""Distilling from a store, with the target's laws beside it, and online: which is how fast?

    python benchmarks/distillation/modes.py [--quick]

The same draft model learns from the same prompts in each way, one optimiser step of each in turn in
one process; a figure is answer tokens learnt per second, a ratio is taken within a round. Learning
from a store must be at least twice as fast as online. The machine must be idle otherwise. Writes
benchmarks/results/distillation_modes.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from draftsmith.commands import collect
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.core.types import TrajectoryBatch
from draftsmith.data.suites import training_prompts
from draftsmith.distill import distilling
from draftsmith.distill.batches import BatchSource
from draftsmith.distill.config import ScheduleConfig
from draftsmith.distill.distributed import precision_of, start_accelerator, training_folder
from draftsmith.distill.students import open_student
from draftsmith.distill.tokenizer_training import load_tokenizer
from draftsmith.distill.trainer import Trainer
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import quieten

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are shared

from models import MINI_CODE

RESULT = Path(__file__).resolve().parents[1] / "results" / "distillation_modes.json"
BAR = 2.0
"""A store must be this many times as fast as online."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to measure."""

    rounds: int
    prompts: int
    tokens: int
    prompts_per_step: int


FULL = Size(rounds=15, prompts=192, tokens=96, prompts_per_step=12)
QUICK = Size(rounds=2, prompts=8, tokens=8, prompts_per_step=2)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One way to learn."""

    way: str
    tokens_per_second: float
    """Median over rounds of the answer tokens of a step / its seconds."""
    times_online: float
    low: float
    high: float


class Counting:
    """A source that remembers how many tokens its last batch had to learn."""

    def __init__(self, source: BatchSource) -> None:
        self.source, self.tokens = source, 0

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        batch = self.source.batch(step, part, parts)
        self.tokens = int(batch.mask_ahead(1).sum())
        return batch


def write_prompts(path: Path, size: Size) -> None:
    lines = [
        json.dumps({"id": prompt.id, "prompt": prompt.text})
        for prompt in islice(training_prompts(), size.prompts)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ways(folder: Path, prompts: Path, size: Size) -> dict[str, DistillOptions]:
    """The same distillation, three times."""
    target = str(MINI_CODE / "target")
    store = CollectOptions(
        model=ModelConfig(target=target),
        prompts=prompts,
        out=folder / "store",
        samples=1,
        max_new_tokens=size.tokens,
        batch_size=32,
    )
    collect.run(store)
    stored = DistillOptions(
        target=target,
        drafter=str(MINI_CODE / "draft"),
        store=(store.out,),
        training=ScheduleConfig(duration="1000steps", block_length=1024, batch_tokens=2048),
        out=folder / "draft",
    )
    online = replace(
        stored,
        store=(),
        online=True,
        out=folder / "online",
        prompts=prompts,
        prompts_per_step=size.prompts_per_step,
        max_new_tokens=size.tokens,
    )
    return {
        "store": stored,
        "store, target's laws": replace(stored, laws="teacher", out=folder / "taught"),
        "online": online,
    }


def make_trainer(options: DistillOptions) -> tuple[Trainer, Counting]:
    tokenizer = load_tokenizer(options.target)
    student = open_student(options, tokenizer)
    accelerator = start_accelerator(options)
    data = distilling.training_data(options, tokenizer, student, precision_of(accelerator))
    counting = Counting(data.source)
    data = replace(data, source=counting)
    return distilling.make_trainer(options, student, data, accelerator), counting


def measure(folder: Path, size: Size, out: ExitStack) -> list[Figure]:
    """`out` closes the runs' working folders."""
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, size)
    trainers = {}
    for name, options in ways(folder, prompts, size).items():
        out.enter_context(training_folder(options.out))
        trainers[name] = make_trainer(options)
    paces: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(size.rounds + 1):
        for name, (trainer, counting) in trainers.items():
            began = time.perf_counter()
            trainer.one_step()
            pace = counting.tokens / (time.perf_counter() - began)
            if number:  # the first round warms up
                paces[name].append(pace)
    return [
        Figure(
            way=name,
            tokens_per_second=statistics.median(own),
            times_online=statistics.median(ratios := _ratios(own, paces["online"])),
            low=min(ratios),
            high=max(ratios),
        )
        for name, own in paces.items()
    ]


def _ratios(own: list[float], online: list[float]) -> list[float]:
    return [one / other for one, other in zip(own, online, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    size = QUICK if given.quick else FULL
    quieten()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as out:
        figures = measure(Path(folder), size, out)
    for one in figures:
        print(
            f"{one.way}: {one.tokens_per_second:,.0f} answer tokens/s, "
            f"{one.times_online:.2f}x online ({one.low:.2f} to {one.high:.2f})",
            flush=True,
        )
    stored = next(one for one in figures if one.way == "store")
    write_json_atomic(
        given.out,
        {
            "quick": given.quick,
            "size": asdict(size),
            "bar": BAR,
            "met": stored.times_online >= BAR,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "machine": machine_summary(),
            "figures": [asdict(one) for one in figures],
        },
    )


if __name__ == "__main__":
    main()
