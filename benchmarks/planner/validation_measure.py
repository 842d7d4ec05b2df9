"""What is measured for `validation.py`: drafts trained and observed, costs of steps, latencies."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what the shipped models were made of

import mini_code
from draftsmith.bench import records as bench_records
from draftsmith.bench.costs import Workload, measure_all
from draftsmith.bench.records import BASELINE, RunRecord
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.commands import bench as bench_recipe
from draftsmith.commands.bench import BenchOptions
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import from_dict
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.data import text as _text
from draftsmith.data.suites import held_out_prompts
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.plan.length_policy import StepCosts
from draftsmith.plan.optimum import Z95
from draftsmith.provenance import append_jsonl, warn_if_busy, write_json_atomic, write_text_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "models" / "mini-code" / "target"
BATCH_TOKENS = 2048
SHAPES = {
    "h32": (1, 32, 88),
    "h64": (1, 64, 176),
    "h128": (2, 128, 352),
    "h192": (3, 192, 512),
    "h256": (4, 256, 704),
}
"""Heads, width, width of the feed-forward layers; all have two layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """How much of everything."""

    steps: int
    """Training steps of 2,048 tokens."""
    text: str
    """What is trained on, of the standard library."""
    prompts: int
    tokens: int
    files: int
    """Held-out ones that perplexity is measured on."""
    longest: int
    """Draft length."""
    repeats: int
    rounds: int
    """Rounds of the cost table."""


# --------------------------------------------------------------------------- train, observe


def training(work: Path, name: str, amounts: Amounts) -> PretrainOptions:
    """The draft that is shipped, in another size."""
    heads, hidden, intermediate = SHAPES[name]
    return PretrainOptions(
        data=replace(mini_code.text(), include=(amounts.text,)),
        model=ArchitectureConfig(
            tokenizer=str(TARGET),
            layers=2,
            heads=heads,
            kv_heads=1,
            hidden=hidden,
            intermediate=intermediate,
        ),
        training=ScheduleConfig(
            duration=f"{amounts.steps}steps",
            block_length=512,
            long_block_length=2048,
            long_share=0.1,
            batch_tokens=BATCH_TOKENS,
            learning_rate=3e-3,
            min_learning_rate=2e-5,
            warmup=min(60, amounts.steps),
            schedule="stable",
            decay_share=0.5,
        ),
        out=work / name,
        save_every=100,
    )


def observe(work: Path, drafts: Sequence[Path], amounts: Amounts) -> list[dict[str, str]]:
    """The lines of observations.csv."""
    out, suite = work / "observations", work / "suite.jsonl"
    if not (out / "run.json").is_file():
        prompts = held_out_prompts(amounts.prompts)
        lines = [json.dumps({"id": prompt.id, "prompt": prompt.text}) for prompt in prompts]
        write_text_atomic(suite, "".join(f"{line}\n" for line in lines))
        chosen = mini_code.text()
        files = _text.find_files(chosen.text, chosen.include, chosen.exclude)
        _, held = _text.hold_out(files, mini_code.LIBRARY_HELD_OUT)
        options = BenchOptions(
            model=ModelConfig(target=str(TARGET)),
            drafter=",".join(map(str, drafts)),
            suite=str(suite),
            max_new_tokens=amounts.tokens,
            temperature="0",
            perplexity=tuple(str(file.path) for file in held[: amounts.files]),
            drafting=DraftingConfig(draft_length=f"1..{amounts.longest}"),
            out=out,
        )
        options.validate()
        bench_recipe.run(options)
    with (out / "observations.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------- costs, time


def open_arm(folder: Path, name: str, target: HFTarget) -> Arm:
    drafter = Independent(Independent.Config(source=str(folder)))
    drafter.bind(target)
    return Arm(name=name, drafter=drafter, shape=TreeShape.chain(1))


def kept_costs(
    work: Path, target: HFTarget, arms: Sequence[Arm], items: Sequence[Item], amounts: Amounts
) -> dict[str, StepCosts]:
    path = work / "costs.json"
    if not path.is_file():
        warn_if_busy()
        write_json_atomic(path, measured_costs(target, arms, items, amounts))
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {name: from_dict(StepCosts, values) for name, values in kept.items()}


def measured_costs(
    target: HFTarget, arms: Sequence[Arm], items: Sequence[Item], amounts: Amounts
) -> dict[str, StepCosts]:
    """What a step costs by draft length, all drafts interleaved."""
    chains = [replace(arm, shape=TreeShape.chain(amounts.longest)) for arm in arms]
    workload = Workload(prompts=[item.tokens for item in items], max_new_tokens=amounts.tokens)
    _, costs = measure_all(target, chains, Sampler(), workload, amounts.rounds)
    return costs


def time_all(
    work: Path,
    target: HFTarget,
    arms: Mapping[str, Arm],
    lengths: Mapping[str, set[int]],
    items: tuple[Item, ...],
    amounts: Amounts,
) -> tuple[RunRecord, ...]:
    """Every draft at the lengths that either model likes best, and plain decoding."""
    done, path = work / "timed.json", work / "timed.jsonl"
    wanted = {name: sorted(some) for name, some in lengths.items()}
    if not done.is_file() or json.loads(done.read_text(encoding="utf-8")) != wanted:
        path.unlink(missing_ok=True)
        warn_if_busy()
        shaped = [
            Arm(name=f"{name}:{length}", drafter=arms[name].drafter, shape=TreeShape.chain(length))
            for name, some in wanted.items()
            for length in some
        ]
        bench = Bench(
            BenchPlan(
                target=target,
                arms=(Arm(name=BASELINE, drafter=NoDrafter()), *shaped),
                items=items,
                samplers=(Sampler(),),
                max_new_tokens=amounts.tokens,
                repeats=amounts.repeats,
                with_transformers=False,
            )
        )
        bench.prepare()
        for lines in bench.records():
            append_jsonl(path, *lines)
        write_json_atomic(done, wanted)
    return bench_records.read(path)


def latency(records: Sequence[RunRecord], name: str) -> dict[str, tuple[float, float]]:
    """Seconds with 95 % margins over prompts, repeats of a prompt averaged."""
    kinds = {
        "ttft": lambda one: one.prefill_seconds,
        "ttot": lambda one: one.seconds,
        "tpot": lambda one: one.seconds / one.tokens,
    }
    mine = [one for one in records if one.drafter == name]
    out = {}
    for kind, seconds in kinds.items():
        prompts: dict[str, list[float]] = {}
        for one in mine:
            prompts.setdefault(one.prompt, []).append(seconds(one))
        means = [statistics.fmean(values) for values in prompts.values()]
        spread = statistics.stdev(means) if len(means) > 1 else 0.0
        out[kind] = (statistics.fmean(means), Z95 * spread / math.sqrt(len(means)))
    return out
