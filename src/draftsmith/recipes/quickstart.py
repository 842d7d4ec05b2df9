"""`draftsmith quickstart`: the main job on the models that ship with the project, offline.

Continues real code plainly, by prompt lookup, by lookahead and with the shipped draft model, shows
one text as it is decoded, and writes a report.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from draftsmith.bench.arms import Arm
from draftsmith.bench.costs import ForwardProbe
from draftsmith.bench.records import BASELINE
from draftsmith.bench.report import summary, terminal_table
from draftsmith.bench.runner import Bench, BenchPlan, Item
from draftsmith.decode import DecodeOptions, decode
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.law import Sampler
from draftsmith.option_groups import DraftingOptions, ModelOptions
from draftsmith.options import QuickstartOptions
from draftsmith.provenance import start_run
from draftsmith.recipes import bench as bench_recipe
from draftsmith.recipes._drafting import encode, open_drafters, open_target
from draftsmith.recipes._stdlib_prompts import held_out_prompts
from draftsmith.recipes._streaming import DRAFTED, Stream
from draftsmith.targets._base import Target

SMALL = Path("models/mini-code")
_ROOT = Path(__file__).resolve().parents[3]
"""Of a checkout; for a wheel, some folder that holds no such models."""
NUM_PROMPTS = 8
FEWEST_PROMPTS = 3
FEWEST_TOKENS = 24
FEWEST_REPEATED = 4
"""Fewer prompts than this are not worth repeating."""
MOST_REPEATS = 3
MEASURE_SECONDS = 100.0
"""What the measured rounds may take; loading, warming up, the cost table and the report come on
top, and all of it should stay under three minutes on two cores."""
NEXT = (
    "draftsmith bench --target Qwen/Qwen3-0.6B --drafter prompt_lookup,lookahead "
    "--suite prompts.jsonl --temperature 0,0.8 --out runs/my-bench"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much to measure."""

    prompts: int
    repeats: int
    tokens: int
    """New ones for each prompt."""


def run(options: QuickstartOptions) -> dict[str, Any]:
    """Show and measure; everything goes to `options.out`."""
    began = time.monotonic()
    record = start_run("quickstart", options, seed=options.seed)
    console = Console(highlight=False)
    models = find_models(options.models)
    _check_out(options.out)
    prompts = held_out_prompts(options.limit or NUM_PROMPTS)
    folder = str(models / "target")
    target = open_target(ModelOptions(target=folder))
    names = ("prompt_lookup", "lookahead", f"independent:{models / 'draft'}")
    arms = open_drafters(names, DraftingOptions(), target)
    plan = BenchPlan(
        target=target,
        arms=(Arm(name=BASELINE, drafter=NoDrafter()), *arms),
        items=tuple(Item(prompt=p.id, tokens=encode(p, target)) for p in prompts),
        samplers=tuple(Sampler(temperature=t) for t in options.temperatures()),
        max_new_tokens=options.max_new_tokens,
        repeats=MOST_REPEATS,
        seed=options.seed,
    )
    _clear(options.out)
    choose_threads(target, plan.items[0].tokens, console)
    show(target, arms[-1], plan.items[0], options, console)
    bench = Bench(plan)
    bench.on_prepared = lambda spent: _settle_amount(bench, spent, console)
    made = bench_recipe.measure(bench, options.out)
    report = bench_recipe.finish(bench, made, folder, options.out, record)
    console.print(terminal_table(report))
    bench_recipe.say_results(report, console, options.out)
    console.print(f"({time.monotonic() - began:.0f} s in all)\n", style="dim")
    console.print(Text("Next, with your own model and prompts:", style="bold"))
    console.print(f"  {NEXT}", soft_wrap=True, markup=False)
    return summary(report)


def find_models(given: Path | None) -> Path:
    """The folder with `target` and `draft`.

    Raises:
        BackendError: it is not where it should be.
    """
    places = [given] if given is not None else [_ROOT / SMALL, SMALL]
    for place in places:
        if (place / "target" / "config.json").is_file() and (place / "draft").is_dir():
            here = Path.cwd()
            return place.relative_to(here) if place.is_relative_to(here) else place
    if given is not None:
        raise BackendError(f"--models {given} has no folders target and draft with models.")
    raise BackendError(
        "The small models are not here: they are in the folder models/mini-code of draftsmith's "
        "repository; run this from a checkout, or give the folder by --models."
    )


def _check_out(out: Path) -> None:
    """InputError when `out` is a file or holds another verb's measurement."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder.")
    if not (out / "records.jsonl").exists():
        return
    try:
        verb = json.loads((out / "run.json").read_text(encoding="utf-8"))["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = "quickstart"  # interrupted: it never came to its run.json
    if verb != "quickstart":
        raise InputError(f"--out {out} holds a measurement by `draftsmith {verb}`; give another.")


def _clear(out: Path) -> None:
    """Make room for a new quickstart, once all it needs is loaded."""
    for name in ("run.json", "records.jsonl"):
        (out / name).unlink(missing_ok=True)


def choose_threads(target: Target, tokens: tuple[int, ...], console: Console) -> None:
    """Use one thread where several are slower: beside other programs they wait for each other."""
    many = torch.get_num_threads()
    if many == 1 or target.device.type != "cpu":
        return
    probe = ForwardProbe(target, tokens, 1)
    seconds = {}
    for threads in (many, 1):
        torch.set_num_threads(threads)
        seconds[threads] = statistics.median([probe.seconds(1) for _ in range(9)])
    if seconds[1] > 0.8 * seconds[many]:
        torch.set_num_threads(many)
        return
    console.print(f"One thread is faster than {many} here: using one.", style="dim")


def choose_amount(seconds_per_round: float, prompts: int, tokens: int) -> Amount:
    """Three repeats of as many prompts as fit into the time, so that a median can drop a stall of
    the machine; else one repeat of as many as fit; on the slowest machines shorter texts too."""
    rounds = int(MEASURE_SECONDS / max(seconds_per_round, 1e-9))
    if rounds >= MOST_REPEATS * min(prompts, FEWEST_REPEATED):
        fitting = min(prompts, rounds // MOST_REPEATS)
        return Amount(prompts=fitting, repeats=MOST_REPEATS, tokens=tokens)
    fewest = min(prompts, FEWEST_PROMPTS)
    if rounds >= fewest:
        return Amount(prompts=min(prompts, rounds), repeats=1, tokens=tokens)
    share = MEASURE_SECONDS / (seconds_per_round * fewest)
    return Amount(
        prompts=fewest, repeats=1, tokens=min(tokens, max(FEWEST_TOKENS, int(share * tokens)))
    )


def _settle_amount(bench: Bench, spent: float, console: Console) -> None:
    """After the warm-up it is known how long a prompt takes: print the plan."""
    plan = bench.plan
    amount = choose_amount(spent, len(plan.items), plan.max_new_tokens)
    bench.plan = replace(
        plan,
        items=plan.items[: amount.prompts],
        repeats=amount.repeats,
        max_new_tokens=amount.tokens,
    )
    share = amount.tokens / plan.max_new_tokens
    temperatures = " and ".join(f"{sampler.temperature:g}" for sampler in plan.samplers)
    often = {1: "once", 2: "twice"}.get(amount.repeats, f"{amount.repeats} times")
    console.print(
        f"Measuring {len(plan.arm_names(plan.samplers[0]))} ways to continue {amount.prompts} "
        f"prompts by {amount.tokens} tokens at temperature {temperatures}, {often}, interleaved: "
        f"about {spent * amount.prompts * amount.repeats * share:.0f} s.",
        soft_wrap=True,
    )


def show(
    target: Target, arm: Arm, item: Item, options: QuickstartOptions, console: Console
) -> None:
    """Decode one prompt in front of the reader."""
    console.print(
        Text.assemble(
            ("Python's own code, continued. ", "bold"),
            ("Coloured", DRAFTED),
            f" tokens were drafted by a model of one layer and accepted by {target.name};"
            " the text is the target's own.\n",
        )
    )
    prompt = target.tokenizer.decode(list(item.tokens), skip_special_tokens=True)
    console.print(Text("".join(prompt.splitlines(keepends=True)[-6:]), style="dim"), end="")
    stream = Stream(target.tokenizer, console)
    decode_options = arm.adapt(
        DecodeOptions(max_new_tokens=options.max_new_tokens, seed=options.seed)
    )
    steps = tokens = 0
    for step in decode(target, arm.drafter, [item.tokens], decode_options):
        stream.add(step.emitted[0], step.accepted[0])
        steps += 1
        tokens += len(step.emitted[0])
    stream.finish()
    console.print(f"\n{tokens} tokens in {steps} forwards of the target\n", style="dim")
