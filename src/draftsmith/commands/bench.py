"""`draftsmith bench`: measure drafters against plain decoding, interleaved in one process.

OUT/records.jsonl    a line per prompt, drafter, temperature and repeat, as they are measured
OUT/summary.json     the figures;   OUT/report.html, OUT/figures/   the same to look at
OUT/run.json         how it was made; once all is measured: until then there is OUT/.begun.json, and
                     the next measurement in this folder replaces an unfinished one

Expected acceptance joins summary and page after that.

With --perplexity, what `draftsmith plan` reads is measured in place of speed:

OUT/observations.csv   a line per pair: perplexities and acceptance rate with margins
OUT/counts.csv         a line per pair, prompt, draft length and accepted length: how many steps
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.bench.config import BenchConfig
from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import say, say_written, show, write_csv
from draftsmith.data.prompts import note_plain
from draftsmith.data.suites import load_suite
from draftsmith.errors import InputError
from draftsmith.provenance import (
    Run,
    append_jsonl,
    jsonable,
    portable_text,
    refuse_others,
    start_run,
    warn_if_busy,
)

if TYPE_CHECKING:
    from draftsmith.bench.pairs import Measured
    from draftsmith.bench.records import RunRecord
    from draftsmith.bench.run import Bench
    from draftsmith.bench.summary import BenchReport


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchConfig, VerbOptions):
    """Measure drafters against plain decoding, interleaved in one process."""


@holds_out
def run(options: BenchOptions) -> dict[str, Any]:
    """Measure, and write everything to `options.out`."""
    from draftsmith.bench import summary as results
    from draftsmith.bench.arms import check_predictions, open_drafters
    from draftsmith.bench.costs import Workload, costs_in, with_controllers
    from draftsmith.bench.expected import as_section, expectations
    from draftsmith.bench.records import BASELINE, TRANSFORMERS
    from draftsmith.bench.run import Bench, BenchPlan, make_items
    from draftsmith.core.generation import Arm
    from draftsmith.core.sampling import Sampler
    from draftsmith.drafters.none import NoDrafter
    from draftsmith.targets.hf import open_target

    record = start_run("bench", options, seed=options.sampling.seed)
    left = unfinished(options.out)
    if left:
        _notes().print(f"--out {options.out} holds an unfinished measurement: it will be replaced")
    if options.perplexity:
        return observe(options, record, left)
    prompts = load_suite(options.suite, limit=options.limit)
    names = options.drafters()
    if TRANSFORMERS in names:
        raise InputError(f"--drafter {TRANSFORMERS}: it is measured anyway; leave it out.")
    target = open_target(options.model, quiet=True)
    arms = open_drafters(names, options.drafting, target)
    check_predictions(prompts, arms)
    note_plain(prompts, target.tokenizer)
    items = make_items(prompts, target, options.max_new_tokens)
    samplers = tuple(
        Sampler.from_params(options.sampling.params(t)) for t in options.temperatures()
    )
    warn_if_busy()
    workload = Workload(
        prompts=[item.tokens for item in items],
        max_new_tokens=options.max_new_tokens,
        predictions=[item.prediction for item in items],
        rows=min(options.batch_size, len(items)),
    )
    # one controller for all temperatures: drawing costs a little more than not drawing
    dearest = max(samplers, key=lambda sampler: sampler.temperature)
    arms = with_controllers(arms, options.drafting, target, dearest, workload)
    plan = BenchPlan(
        target=target,
        arms=(Arm(name=BASELINE, drafter=NoDrafter()), *(a for a in arms if a.name != BASELINE)),
        items=items,
        samplers=samplers,
        max_new_tokens=options.max_new_tokens,
        rule=options.drafting.used_rule,
        lossy=options.drafting.is_lossy(),
        batch_size=options.batch_size,
        repeats=options.repeats,
        warmup=options.warmup,
        seed=options.sampling.seed,
        with_transformers=options.hf_baseline,
        run=record.id,
    )

    def replacing(_: float) -> BenchPlan:
        remove(left)
        record.begin(options.out)
        return plan

    bench = Bench(plan, on_prepared=replacing)
    made = measure(bench, options.out)
    report = make_report(bench, made, options.model.target, record, options.limit)
    results.write_report(report, options.out)
    facts = {"records": len(made), "step_seconds": costs_in(arms)}
    record.write(options.out, results=facts)
    console = Console(highlight=False)
    console.print(results.terminal_table(report))
    with _notes().status("scoring the output of plain decoding, for expected acceptance"):
        found = expectations(bench)  # last: what was measured is safe by now
    if found:
        expected = {(one.drafter, one.temperature): one.metrics() for one in found}
        report = replace(report, expected=expected, sections=(as_section(found),))
        results.write_report(report, options.out)
    sentences = [
        *results.prompt_sentences(report),
        *results.speed_sentences(report),
        *results.source_sentences(report),
        *results.losslessness_sentences(report),
    ]
    for sentence in (*sentences, f"report: {options.out / 'report.html'}"):
        console.print(sentence, soft_wrap=True, markup=False)
    return results.summary(report)


def _notes() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


_FILES = ("summary.json", "report.html", "records.jsonl", "observations.csv", "counts.csv")


def unfinished(out: Path) -> list[Path]:
    """Return what a stopped or killed measurement left in `out`.

    Raises:
        InputError: `out` holds a finished run (times of two processes must not be mixed), or
            figures that no `bench` wrote.
    """
    refuse_others(out, "bench", _FILES)
    if (out / "run.json").exists():
        raise InputError(
            f"--out {out} already holds the results of `draftsmith bench`; choose another folder "
            "or delete it."
        )
    return [out / name for name in _FILES if (out / name).exists()]


def remove(left: Sequence[Path]) -> None:
    """Remove what was left unfinished: there is something to take its place."""
    for path in left:
        path.unlink()


def measure(bench: Bench, out: Path) -> tuple[RunRecord, ...]:
    """Run the rounds with a progress line on stderr; records are written as they come.

    An interruption leaves what was measured, and says so. Whether the machine is busy is for the
    caller to ask first (`warn_if_busy`): a moment later the load is our own.
    """
    path, notes = out / "records.jsonl", _notes()
    made: list[RunRecord] = []
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    try:
        with progress:
            task = progress.add_task("warming up", total=bench.plan.num_records)
            bench.prepare(lambda text: progress.update(task, description=text))
            total = bench.plan.num_records
            progress.update(task, description="measuring", total=total)
            last_note = time.monotonic()
            for lines in bench.records():
                append_jsonl(path, *lines)
                made.extend(lines)
                progress.update(task, completed=len(made))
                if progress.disable and time.monotonic() - last_note > 30:
                    last_note = time.monotonic()
                    notes.print(f"{len(made)} of {total} measured")
    except KeyboardInterrupt:
        if made:
            notes.print(
                f"stopped after {len(made)} of {total} measurements; they are in {path} until the "
                "next measurement into this folder"
            )
        raise
    return tuple(made)


def make_report(
    bench: Bench,
    made: tuple[RunRecord, ...],
    target: str,
    record: Run,
    asked: int | None = None,
) -> BenchReport:
    """Gather what was measured and how; `target`: its name or folder, `asked`: how many prompts."""
    from draftsmith.bench.summary import BenchReport

    facts = record.record()
    return BenchReport(
        target=portable_text(target),
        dtype=str(bench.plan.target.dtype).removeprefix("torch."),
        engine=getattr(bench.plan.target, "engine", None),
        exact=getattr(bench.plan.target, "exact", False),
        quantised=getattr(bench.plan.target, "quantised", False),
        records=made,
        run=record.id,
        command=facts["command"],
        versions=facts["versions"],
        machine=facts["machine"],
        max_new_tokens=bench.plan.max_new_tokens,
        asked=asked,
        costs=bench.costs,
    )


# --------------------------------------------------------------------------- bench --perplexity


def observe(options: BenchOptions, record: Run, left: Sequence[Path]) -> dict[str, Any]:
    """Measure every pair, and write both files to `options.out` in place of what is `left`."""
    from draftsmith.bench import pairs
    from draftsmith.bench.arms import open_drafters
    from draftsmith.bench.records import BASELINE
    from draftsmith.bench.run import make_items
    from draftsmith.bench.summary import short_of_prompts
    from draftsmith.core.decode import DecodeOptions
    from draftsmith.core.sampling import Sampler
    from draftsmith.targets.hf import open_model

    names = [name for name in options.drafters() if name != BASELINE]
    pairs.refuse_others(names)
    files = pairs.text_files(options.perplexity)
    prompts = load_suite(options.suite, limit=options.limit)
    target = open_model(options.model)
    unshaped = replace(options.drafting, draft_length=None)
    arms = open_drafters(names, unshaped, target) if names else ()
    note_plain(prompts, target.tokenizer)
    temperature = options.temperatures()[0]
    decoding = DecodeOptions(
        sampler=Sampler.from_params(options.sampling.params(temperature)),
        max_new_tokens=options.max_new_tokens,
        rule=options.drafting.rule,
        seed=options.sampling.seed,
    )
    items = [item.tokens for item in make_items(prompts, target, options.max_new_tokens)]
    lengths = options.drafting.lengths() or pairs.LENGTHS
    plain = target.unquantised() if target.quantised else None
    found = pairs.measure_pairs(
        target, arms, files, items, decoding, lengths, options.batch_size, plain
    )
    name = portable_text(options.model.target)
    rows = found.rows(name, temperature) if arms else []
    remove(left)
    record.begin(options.out)
    for file, lines in (("counts.csv", found.counts(name)), ("observations.csv", rows)):
        if lines:
            write_csv(options.out / file, list(lines[0]), [list(line.values()) for line in lines])
    remarks = [*short_of_prompts(len(prompts), options.limit), *pairs.warnings(found)]
    payload: dict[str, Any] = jsonable(
        {
            "target": name,
            "temperature": temperature,
            "prompts": len(prompts),
            "prompts_asked": options.limit,
            "perplexity": {name: found.perplexity}
            | {pair.name: pair.perplexity for pair in found.pairs},
            "weights": target.engine,
            "perplexity_unquantised": found.unquantised,
            "observations": rows,
            "steps": {pair.name: pair.steps for pair in found.pairs},
            "steps_left_out": {pair.name: pair.left_out for pair in found.pairs},
            "warnings": remarks,
        }
    )
    record.write(options.out, results=payload)
    show_pairs(found, name, rows)
    say(remarks)
    say_written(options.out)
    return payload


def show_pairs(found: Measured, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the target's perplexity, the table of pairs, and how many drafts were counted."""
    from draftsmith.bench.summary import percent

    own, plain = found.perplexity, found.unquantised
    documents = "1 document" if own.documents == 1 else f"{own.documents} documents"
    title = (
        f"{name}: perplexity {_with_margin(own.value, own.moe)} over {own.tokens} tokens of "
        f"{documents}, {own.cut} of them cut"
    )
    if plain is not None:
        more = 100 * (own.value / plain.value - 1)
        title += f"; with its weights unquantised {plain.value:.5g}, so these cost {more:+.2f} %"
    if not rows:
        say([title])
        return
    show(
        title,
        ("draft", "perplexity", "acceptance rate", "least squares", "protocol", "outside loops"),
        [
            (
                row["draft"],
                _with_margin(row["draft_ppl"], row["draft_ppl_moe"]),
                _with_margin(row["alpha"], row["moe"]),
                row["alpha_least_squares"],
                row["protocol"],
                percent(row["alpha_outside_loops"]),
            )
            for row in rows
        ],
    )
    for pair in found.pairs:
        lengths = [trial.gamma for trial in pair.trials]
        say(
            [
                f"{pair.steps} whole drafts of {lengths[0]} to {lengths[-1]} tokens counted; "
                f"{pair.left_out} steps left out, whose draft was shorter; "
                f"{percent(pair.loop_share)} of the tokens in repetition loops"
            ],
            pair.name,
        )


def _with_margin(value: float, moe: float | None) -> str:
    return f"{value:.5g}" + ("" if moe is None else f" +- {moe:.2g}")
