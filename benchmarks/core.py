"""The figures of the decoding core, to be run on an otherwise idle machine:

    python benchmarks/core.py [--only autoregressive,always_right,efficiency,memory] [--quick]

Each part replaces its own section of benchmarks/results/core.json; core.md is written from that.
Everything compared is measured interleaved in this process; figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.arms import time_decode, time_generate
from draftsmith.bench.costs import ForwardProbe
from draftsmith.bench.records import BASELINE, DrafterMetrics, drafter_metrics
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm, generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.data.suites import held_out_prompts
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.provenance import (
    machine_summary,
    versions,
    write_json_atomic,
    write_text_atomic,
)
from draftsmith.targets.hf import HFTarget
from models import llama_110m, llama_draft, mini_code, random_llama, random_prompts

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    what: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    bar: float | None = None
    """What it must reach; None: for information."""
    at_most: bool = False
    """The bar is an upper one."""

    @property
    def met(self) -> bool | None:
        if self.bar is None or self.value is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to measure."""

    rounds: int
    tokens: int
    prompts: int
    long_run: int


FULL = Size(rounds=9, tokens=72, prompts=4, long_run=10_000)
QUICK = Size(rounds=2, tokens=18, prompts=2, long_run=2_000)
BLOCK = 9
"""A root and eight drafted tokens."""


# --------------------------------------------------------------------------- plain decoding


def autoregressive(size: Size) -> list[Figure]:
    """Our loop without drafts against transformers' generate, same weights, greedy."""
    out = []
    for name, target in (("mini-code", mini_code()), ("110 M bfloat16", llama_110m())):
        if target is None:
            print("models/mini-code is absent: left out", file=sys.stderr)
            continue
        if target.tokenizer is None:
            prompts = random_prompts(size.prompts, 128, target.vocab_size)
        else:
            texts = held_out_prompts(size.prompts)
            prompts = [prompt.token_ids(target.tokenizer) for prompt in texts]
        plan = BenchPlan(
            target=target,
            arms=(Arm(name=BASELINE, drafter=NoDrafter()),),
            items=tuple(Item(prompt=str(i), tokens=ids) for i, ids in enumerate(prompts)),
            samplers=(Sampler(),),
            max_new_tokens=size.tokens,
            repeats=max(2, size.rounds // 2),
            cost_rounds=2,
        )
        (plain, *_) = run_plan(plan)
        interval = plain.speedup_vs_transformers_ci95
        out.append(
            Figure(
                what=f"{name}: plain decoding, speed over transformers generate",
                value=plain.speedup_vs_transformers,
                unit="x",
                low=None if interval is None else interval.low,
                high=None if interval is None else interval.high,
                bar=1.0,
            )
        )
    return out


def run_plan(plan: BenchPlan) -> tuple[DrafterMetrics, ...]:
    bench = Bench(plan)
    bench.prepare()
    return drafter_metrics([record for lines in bench.records() for record in lines])


# --------------------------------------------------------------------------- perfect drafts


def always_right(size: Size) -> list[Figure]:
    """Eight drafted tokens, all accepted, against the ideal 9 t(1) / t(9)."""
    target = llama_110m()
    options = DecodeOptions(max_new_tokens=size.tokens // BLOCK * BLOCK)
    # behind its own greedy text a random model repeats itself, which prompt lookup can find
    seed_prompt = random_prompts(1, 32, target.vocab_size)[0]
    (start,) = generate(
        target, NoDrafter(), [seed_prompt], replace(options, max_new_tokens=3 * size.tokens)
    )
    prompt = (*seed_prompt, *start.token_ids)
    plain = Arm(name=BASELINE, drafter=NoDrafter())
    drafter = PredictionDrafter(PredictionDrafter.Config(length=BLOCK - 1))
    drafter.bind(target)
    arm = Arm(name="prediction", drafter=drafter, shape=TreeShape.chain(BLOCK - 1))
    text = settled_text(target, arm, prompt, options)
    probe = ForwardProbe(target, (*prompt, *text[: len(text) // 2]), BLOCK)
    t_one: list[float] = []
    t_block: list[float] = []
    pace_plain: list[float] = []
    pace_draft: list[float] = []
    pace_theirs: list[float] = []
    pace_lookup: list[float] = []
    for number in range(size.rounds + 1):
        ones = [probe.seconds(1) for _ in range(6)]
        blocks = [probe.seconds(BLOCK) for _ in range(6)]
        slow = time_decode(target, plain, [prompt], options, [0])
        fast = time_decode(target, arm, [prompt], options, [0], predictions=[text])
        theirs = time_generate(target, [prompt], Sampler(), options.max_new_tokens, 0)
        lookup = time_generate(
            target, [prompt], Sampler(), options.max_new_tokens, 0, prompt_lookup=BLOCK - 1
        )
        assert fast.counts is not None
        whole = fast.counts[0].steps * BLOCK == fast.counts[0].emitted
        assert whole, "a draft was rejected: these are not whole blocks"
        if number == 0:
            continue
        t_one += ones
        t_block += blocks
        pace_plain.append(slow.decode_seconds / slow.decode_tokens[0])
        pace_draft.append(fast.decode_seconds / fast.decode_tokens[0])
        pace_theirs.append(theirs.decode_seconds / theirs.decode_tokens[0])
        pace_lookup.append(lookup.decode_seconds / lookup.decode_tokens[0])
    median = statistics.median
    ideal = BLOCK * median(t_one) / median(t_block)
    ratios = [a / b for a, b in zip(pace_plain, pace_draft, strict=True)]
    measured = median(ratios)
    theirs_speedup = median([a / b for a, b in zip(pace_theirs, pace_lookup, strict=True)])
    return [
        Figure(what="ideal speed-up 9 t(1) / t(9)", value=ideal, unit="x"),
        Figure(what="t(1 token)", value=1e3 * median(t_one), unit="ms"),
        Figure(what="t(9 tokens)", value=1e3 * median(t_block), unit="ms"),
        Figure(
            what="drafts of 8 that are always right: speed-up",
            value=measured,
            unit="x",
            low=min(ratios),
            high=max(ratios),
        ),
        Figure(what="the same, of the ideal", value=measured / ideal, bar=0.85),
        Figure(
            what="transformers prompt lookup of 8 on repeating text: speed-up over its generate",
            value=theirs_speedup,
            unit="x",
        ),
        Figure(what="the same, of the ideal", value=theirs_speedup / ideal),
    ]


def settled_text(
    target: HFTarget, arm: Arm, prompt: Sequence[int], options: DecodeOptions
) -> tuple[int, ...]:
    """A greedy text that the target confirms block by block (near-ties may flip in bfloat16)."""
    (made,) = generate(target, NoDrafter(), [prompt], options)
    text = made.token_ids
    for _ in range(20):
        (again,) = generate(target, arm.drafter, [prompt], arm.adapt(options), predictions=[text])
        if again.token_ids == text:
            return text
        text = again.token_ids
    raise RuntimeError("the target's greedy text does not settle")


# --------------------------------------------------------------------------- efficiency


def efficiency(size: Size) -> list[Figure]:
    """Engine efficiency, and predicted beside measured speed-up, for every drafter."""
    target = llama_110m()
    draft = Independent(Independent.Config(), model=llama_draft())
    arms = [
        Arm(name=BASELINE, drafter=NoDrafter()),
        Arm(name="prompt_lookup", drafter=PromptLookup()),
        Arm(name="lookahead", drafter=Lookahead()),
        Arm(name="independent, chain of 5", drafter=draft),
        Arm(name="independent, tree of 60", drafter=draft, shape=TreeShape(widths=(4, 2, 2, 2))),
    ]
    for arm in arms:
        arm.drafter.bind(target)
    prompts = random_prompts(size.prompts, 96, target.vocab_size)
    items = tuple(
        # a text that repeats itself, so that looking things up finds something
        Item(prompt=str(i), tokens=(*ids[:32], *ids[:32], *ids[:32]))
        for i, ids in enumerate(prompts)
    )
    out = []
    for label, sampler in (
        ("greedy", Sampler()),
        ("temperature 0.8, top-k 50", Sampler(temperature=0.8, top_k=50)),
        ("temperature 0.8, top-p 0.9", Sampler(temperature=0.8, top_p=0.9)),
    ):
        plan = BenchPlan(
            target=target,
            arms=tuple(arms),
            items=items,
            samplers=(sampler,),
            max_new_tokens=max(size.tokens // 2, 9),
            repeats=(size.rounds + 1) // 2,  # five: a median that can drop stalls
            cost_rounds=4 * size.rounds,
            with_transformers=False,
        )
        for entry in run_plan(plan):
            out.append(
                Figure(
                    what=f"{entry.name}, {label}: engine efficiency",
                    value=entry.engine_efficiency,
                    bar=0.90,
                )
            )
            if entry.name != BASELINE and entry.speedup and entry.predicted_speedup:
                out.append(
                    Figure(
                        what=f"{entry.name}, {label}: measured / predicted speed-up, off 1 by",
                        value=abs(entry.speedup / entry.predicted_speedup - 1),
                        bar=0.10,
                        at_most=True,
                    )
                )
    return out


# --------------------------------------------------------------------------- memory


def memory(size: Size) -> list[Figure]:
    """Resident memory after a tenth of a long text and at its end."""
    target = random_llama(
        layers=2, hidden=64, intermediate=128, heads=4, vocab=1000, context=16_384
    )
    out = []
    for name, drafter in (("none", NoDrafter()), ("prompt_lookup", PromptLookup())):
        drafter.bind(target)
        options = DecodeOptions(max_new_tokens=size.long_run)
        prompt = random_prompts(1, 64, 1000)[0]
        cache = target.new_cache(1, 1)
        per_token = cache.spec.bytes_per_token()
        seen, early = 0, 0
        gc.collect()
        for step in decode(target, drafter, [prompt], options):
            seen += len(step.emitted[0])
            if not early and seen >= size.long_run // 10:
                gc.collect()
                early = resident_bytes()
        gc.collect()
        grown = resident_bytes() - early
        # pages of the preallocated cache become resident when they are first written
        allowed = per_token * size.long_run
        out.append(
            Figure(
                what=f"{name}: growth of memory from {size.long_run // 10:,} to "
                f"{size.long_run:,} tokens beyond the preallocated cache",
                value=max(grown - allowed, 0) / 2**20,
                unit="MiB",
                bar=8.0,
                at_most=True,
            )
        )
    return out


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("this system does not tell resident memory in /proc")


# --------------------------------------------------------------------------- results

PARTS: dict[str, Callable[[Size], list[Figure]]] = {
    "autoregressive": autoregressive,
    "always_right": always_right,
    "efficiency": efficiency,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of core.json and core.md")
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    path = given.out / "core.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    for name in names:
        began = time.monotonic()
        found = PARTS[name](QUICK if given.quick else FULL)
        content["parts"][name] = {
            "quick": given.quick,
            "seconds": round(time.monotonic() - began, 1),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "machine": machine_summary(),
            "figures": [{**asdict(figure), "met": figure.met} for figure in found],
        }
        write_json_atomic(path, content)
        write_text_atomic(given.out / "core.md", table(content))
        for figure in found:
            print(line(asdict(figure) | {"met": figure.met}), flush=True)


def table(content: dict[str, Any]) -> str:
    """All parts as one Markdown table."""
    rows = ["| what | measured | must reach | |", "|---|---:|---:|---|"]
    for name in PARTS:
        part = content["parts"].get(name)
        for figure in part["figures"] if part else ():
            rows.append(line(figure))
    return "\n".join(rows) + "\n"


def line(figure: dict[str, Any]) -> str:
    value, unit = figure["value"], figure["unit"]
    unit = unit if unit in ("", "x") else f" {unit}"
    shown = "" if value is None else f"{value:.2f}{unit}"
    if figure["low"] is not None:
        shown += f" ({figure['low']:.2f} to {figure['high']:.2f})"
    sign = "at most " if figure["at_most"] else ""
    bar = "" if figure["bar"] is None else f"{sign}{figure['bar']:g}{unit}"
    met = {None: "", True: "yes", False: "**no**"}[figure["met"]]
    return f"| {figure['what']} | {shown} | {bar} | {met} |"


if __name__ == "__main__":
    main()
