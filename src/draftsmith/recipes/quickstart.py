"""`draftsmith quickstart`: the main job on the models that ship with the project, offline.

    show       one text, as it is decoded
    compare    ways to continue real code: plainly, by prompt lookup, by lookahead, by a draft model
    collect    what the target says to code that the models were trained on
    distil     the draft model learns from it
    gain       the draft model before and after, on code that no model was trained on

OUT/report.html, summary.json, figures/, records.jsonl   as `bench` writes them; run.json is last
OUT/distilled/store, draft                               as `collect` and `distill` write them
OUT/distilled/prompts.jsonl, records.jsonl               what was asked; before and after, measured
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from draftsmith.bench.arms import Arm
from draftsmith.bench.page import write_report
from draftsmith.bench.records import BASELINE
from draftsmith.bench.report import (
    Report,
    losslessness_sentences,
    speed_sentences,
    summary,
    terminal_table,
)
from draftsmith.bench.runner import Bench, BenchPlan
from draftsmith.decode import DecodeOptions, decode
from draftsmith.drafters.none import NoDrafter
from draftsmith.options import QuickstartOptions
from draftsmith.provenance import Run, jsonable, start_run, write_json_atomic
from draftsmith.recipes import _before_after as before_after
from draftsmith.recipes import bench as bench_recipe
from draftsmith.recipes._amount import settle_amount
from draftsmith.recipes._busy import warn_if_busy
from draftsmith.recipes._outcome import Outcome
from draftsmith.recipes._scene import (
    Scene,
    choose_threads,
    clear,
    open_draft,
    set_scene,
)
from draftsmith.recipes._short_distillation import Collected, Distilled, collect, distil
from draftsmith.recipes._stdlib_prompts import training_prompts
from draftsmith.recipes._streaming import DRAFTED, Stream

# What may take how long, in seconds. Loading, warming up, cost tables, the texts for alpha and the
# report come on top; the whole should stay under four minutes on two cores.
COMPARE_SECONDS = 50.0
"""The measured rounds of the first comparison."""
COLLECT_SECONDS = 22.0
"""Its trial included."""
DISTIL_SECONDS = 60.0
"""Its trial and evaluations included."""
GAIN_SECONDS = 35.0
"""The measured rounds of before and after; less where the parts before took longer:"""
WHOLE_SECONDS = 220.0
"""By then the last measurement should end."""
SHORTEST_GAIN_SECONDS = 10.0
"""But it is never shorter than this."""

NUM_PROMPTS = 12
"""Held-out ones: as many as fit are decoded; alpha is computed on texts of all."""
COLLECTED_TOKENS = 128
"""Longest text that is learnt from."""

NEXT = (
    "draftsmith collect --target Qwen/Qwen3-4B --prompts prompts.jsonl --samples 2 "
    "--temperatures 0,1 --out runs/my-store",
    "draftsmith distill --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B --store runs/my-store "
    "--out drafts/mine",
    "draftsmith bench --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B,drafts/mine,prompt_lookup "
    "--suite held-out.jsonl --temperature 0,0.8 --out runs/my-bench",
)


def run(options: QuickstartOptions) -> dict[str, Any]:
    """Show, compare, collect, distil, measure the gain; everything goes to `options.out`."""
    record = start_run("quickstart", options, seed=options.seed)
    warn_if_busy()
    scene = set_scene(options, NUM_PROMPTS)
    clear(options.out)  # all that can be missing is there
    choose_threads(scene)
    show(scene)
    comparison = compare(scene, record)
    collected = collect_texts(scene)
    distilled = distil_draft(scene, collected)
    outcome = measure_gain(scene, record, collected, distilled)
    tell(scene, outcome)
    return finish(scene, record, comparison, outcome)


# --------------------------------------------------------------------------- the parts


def show(scene: Scene) -> None:
    """Decode one prompt in front of the reader."""
    target, console, item = scene.target, scene.console, scene.items[0]
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
    decode_options = scene.draft.adapt(
        DecodeOptions(max_new_tokens=scene.options.max_new_tokens, seed=scene.options.seed)
    )
    steps = tokens = 0
    for step in decode(target, scene.draft.drafter, [item.tokens], decode_options):
        stream.add(step.emitted[0], step.accepted[0])
        steps += 1
        tokens += len(step.emitted[0])
    stream.finish()
    console.print(f"\n{tokens} tokens in {steps} forwards of the target\n", style="dim")


def compare(scene: Scene, record: Run) -> Report:
    """All ways to decode, interleaved."""
    say_part(scene, "Compared: drafters without a model, and the draft model that is shipped")
    plan = make_plan(scene, (*scene.rivals, scene.draft))
    report = measure(scene, plan, COMPARE_SECONDS, scene.options.out, record)
    scene.console.print(terminal_table(report))
    for sentence in [*speed_sentences(report), *losslessness_sentences(report)]:
        scene.console.print(sentence, soft_wrap=True, markup=False)
    return report


def collect_texts(scene: Scene) -> Collected:
    """What the target says to code that it was trained on: what is measured stays held out."""
    say_part(
        scene,
        "Collected: what the target says, and its laws: how probable it finds every next token",
    )
    return collect(
        scene.target,
        scene.source,
        training_prompts(),
        scene.folder,
        temperatures=tuple(dict.fromkeys(scene.options.temperatures())),
        seconds=COLLECT_SECONDS,
        max_new_tokens=min(COLLECTED_TOKENS, scene.options.max_new_tokens),
        seed=scene.options.seed,
        console=scene.console,
    )


def distil_draft(scene: Scene, collected: Collected) -> Distilled:
    """A copy of the shipped draft model learns from it."""
    say_part(scene, "Distilled: the draft model learns to say what the target says")
    return distil(
        scene.source,
        str(scene.models / "draft"),
        collected,
        scene.folder,
        seconds=DISTIL_SECONDS,
        seed=scene.options.seed,
        console=scene.console,
    )


def measure_gain(scene: Scene, record: Run, collected: Collected, distilled: Distilled) -> Outcome:
    """The draft model before and after, side by side."""
    say_part(scene, "Before and after")
    shipped = scene.models / "draft"
    texts = before_after.target_texts(
        scene.target,
        scene.items,
        scene.samplers,
        max_new_tokens=scene.options.max_new_tokens,
        seed=scene.options.seed,
    )
    before = before_after.alphas(scene.target, shipped, texts)
    after = before_after.alphas(scene.target, distilled.draft, texts)
    arms = (
        replace(scene.draft, name=before_after.BEFORE),
        replace(open_draft(distilled.draft, scene.target), name=before_after.AFTER),
    )
    plan = replace(make_plan(scene, arms), with_transformers=False, cost_rounds=0)
    left = WHOLE_SECONDS - (time.monotonic() - scene.began)
    seconds = max(SHORTEST_GAIN_SECONDS, min(GAIN_SECONDS, left))
    report = measure(scene, plan, seconds, scene.folder, record)
    # what holds of any measurement was said below the first one
    above_0 = tuple(entry for entry in report.records if entry.temperature > 0)
    known = losslessness_sentences(replace(report, records=above_0))
    return Outcome(
        draft=str(shipped),
        collected=collected,
        distilled=distilled,
        changes=before_after.find_changes(report.records, before, after),
        prompts=report.num_prompts,
        texts=len(scene.items),
        equality=tuple(said for said in losslessness_sentences(report) if said not in known),
    )


def tell(scene: Scene, outcome: Outcome) -> None:
    """What the distillation brought."""
    scene.console.print(outcome.table())
    scene.console.print(Text(outcome.sentence, style="bold"), soft_wrap=True)
    for sentence in (outcome.method, *outcome.equality):
        scene.console.print(sentence, soft_wrap=True, markup=False)


def finish(scene: Scene, record: Run, comparison: Report, outcome: Outcome) -> dict[str, Any]:
    """Write page, figures and, last, run.json; say what comes next."""
    out, console = scene.options.out, scene.console
    report = replace(comparison, sections=(outcome.section,))
    write_report(report, out)
    distillation = outcome.payload()
    content: dict[str, Any] = jsonable({**summary(report), "distillation": distillation})
    write_json_atomic(out / "summary.json", content)
    results = {"records": len(report.records), "distillation": distillation}
    record.write(out, results=results)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True, markup=False)
    console.print(f"({time.monotonic() - scene.began:.0f} s in all)\n", style="dim")
    console.print(Text("Next, with your own models and prompts:", style="bold"))
    for command in NEXT:
        console.print(f"  {command}", soft_wrap=True, markup=False)
    return content


def say_part(scene: Scene, title: str) -> None:
    scene.console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)


# --------------------------------------------------------------------------- measuring


def make_plan(scene: Scene, arms: tuple[Arm, ...]) -> BenchPlan:
    """Plain decoding and these arms on all prompts; what does not fit the time is cut later."""
    return BenchPlan(
        target=scene.target,
        arms=(Arm(name=BASELINE, drafter=NoDrafter()), *arms),
        items=scene.items,
        samplers=scene.samplers,
        max_new_tokens=scene.options.max_new_tokens,
        seed=scene.options.seed,
    )


def measure(scene: Scene, plan: BenchPlan, seconds: float, out: Path, record: Run) -> Report:
    """Run the rounds that fit; their records go to `out/records.jsonl`."""
    bench = Bench(plan)
    settle_amount(bench, seconds, scene.console)
    made = bench_recipe.measure(bench, out)
    return bench_recipe.make_report(bench, made, scene.source, record)
