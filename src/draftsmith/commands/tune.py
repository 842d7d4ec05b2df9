"""`draftsmith tune`: which drafter, and which length or tree, pays on this machine; or that none
does; and with how many threads.

OUT/tune.json     all figures, and what to do;   OUT/figures/   the same to look at
OUT/run.json      how it was made; written last
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith.bench.config import TuneConfig
from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import show
from draftsmith.commands.generate import GenerateOptions
from draftsmith.config import to_argv
from draftsmith.data.prompts import note_plain
from draftsmith.data.suites import load_suite
from draftsmith.provenance import (
    jsonable,
    machine_summary,
    portable_text,
    start_run,
    versions,
    write_json_atomic,
)

if TYPE_CHECKING:
    from draftsmith.bench.tuner import Candidate, Measurement, Tuner, Tuning
    from draftsmith.targets.hf import HFTarget


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TuneConfig, VerbOptions):
    """Find the best drafter, length or tree for this machine, or that none pays."""


@holds_out
def run(options: TuneOptions) -> dict[str, Any]:
    """Measure, decode, rank; everything goes to `options.out`."""
    from draftsmith.bench.plots import save_tuning_plots
    from draftsmith.bench.tuner import advice, batch_advice, evidence

    record = start_run("tune", options, seed=options.sampling.seed, out=options.out)
    tuner = open_tuner(options)
    tuning = tuner.tune()
    console = Console(highlight=False)
    sentences = {
        "sentence": advice(tuning.winner),
        "evidence": evidence(tuning.winner, len(tuning.candidates)),
        "batches": batch_advice(tuning.by_batch),
        "threads": "" if tuning.threads is None else tuning.threads.sentence(),
    }
    command = paste(options, tuning.winner)
    content = payload(options, tuner.target, tuning, sentences, command)
    write_json_atomic(options.out / "tune.json", content)
    save_tuning_plots(tuning, options.out / "figures")
    record.write(options.out, results=content["recommendation"])
    show_ranking(tuning)
    if len(tuning.by_batch) > 1:
        show(
            "By batch size, over plain decoding of as many rows",
            ("rows", "drafter", "draft", "speed-up"),
            [
                (str(one.rows), *_names(one.measurement), f"{one.speedup:.2f}")
                for one in tuning.batches
            ],
        )
    for sentence in filter(None, [*sentences.values(), command]):
        console.print(sentence, soft_wrap=True, markup=False)
    return content


def open_tuner(options: TuneOptions) -> Tuner:
    """Load the target, the drafters and the prompts."""
    from draftsmith.bench.arms import check_predictions, open_drafters
    from draftsmith.bench.tuner import Tuner
    from draftsmith.core.generation import encode, prediction
    from draftsmith.core.sampling import Sampler
    from draftsmith.targets.hf import open_model

    prompts = load_suite(options.suite, limit=options.limit)
    target = open_model(options.model)
    sampler = Sampler.from_params(options.sampling.params(options.temperature))
    longest = replace(options.drafting, draft_length="auto")
    arms = open_drafters(options.drafters(), longest, target)
    check_predictions(prompts, arms)
    note_plain(prompts, target.tokenizer)
    ids = [encode(prompt, target) for prompt in prompts]
    expected = [prediction(prompt, target) for prompt in prompts]
    return Tuner(options, target, arms, sampler, ids, expected)


def paste(options: TuneOptions, winner: Candidate) -> str | None:
    """Return a command line that decodes with the winner; None when nothing pays."""
    if winner.speedup <= 1.0:
        return None
    name, alone = winner.measurement.drafter, len(options.drafters()) == 1
    drafting = replace(
        options.drafting,
        drafter_option=options.drafting.assignments(name, alone=alone),
        draft_proposal=None,  # among the winner's flags, if it has one
    )
    shared = ("model", "max_new_tokens", "temperature", "sampling")
    asked = GenerateOptions(
        drafter=name,
        prompts=Path(options.suite),
        drafting=drafting,
        **{field: getattr(options, field) for field in shared},
    )
    return shlex.join(["draftsmith", "generate", *to_argv(asked), *winner.measurement.flags])


def payload(
    options: TuneOptions,
    target: HFTarget,
    tuning: Tuning,
    sentences: Mapping[str, str],
    command: str | None,
) -> dict[str, Any]:
    """Return the content of tune.json."""
    from draftsmith.bench.tuner import rates

    by_length = sorted(tuning.candidates, key=lambda one: one.measurement.length or 0)
    longest = {one.measurement.way: one.measurement for one in by_length}
    content = {
        "target": portable_text(options.model.target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "temperature": options.temperature,
        "plain_tokens_per_second_by_costs": tuning.plain_tokens_per_second,
        "recommendation": {
            "speculate": tuning.winner.speedup > 1.0,
            **sentences,
            "command": None if command is None else portable_text(command),
        },
        "candidates": [_entry(one) for one in tuning.candidates],
        "acceptance_by_depth": {
            portable_text(name): rates(measurement.by_depth)
            for name, measurement in longest.items()
        },
        "step_seconds": {portable_text(name): costs for name, costs in tuning.costs.items()},
        "threads": None
        if tuning.threads is None
        else {"best": tuning.threads.best, "seconds_by_width": tuning.threads.seconds},
        "batches": [
            {"rows": one.rows, **_shape(one.measurement), "speedup": one.speedup}
            for one in tuning.batches
        ],
        "machine": machine_summary(),
        "versions": versions(),
    }
    plain: dict[str, Any] = jsonable(content)
    return plain


def _entry(one: Candidate) -> dict[str, Any]:
    return {
        **_shape(one.measurement),
        "length": one.measurement.length,
        "tokens_per_step": one.measurement.tokens_per_step,
        "prompts": len(one.measurement.prompts),
        "speedup": one.speedup,
        "low": one.low,
        "high": one.high,
        "tokens_per_second_by_costs": one.tokens_per_second,
    }


def _shape(measurement: Measurement) -> dict[str, Any]:
    return {
        "drafter": portable_text(measurement.drafter),
        "shape": measurement.shape,
        "flags": measurement.flags,
    }


def _names(measurement: Measurement) -> tuple[str, str]:
    from draftsmith.bench.records import short_name

    return short_name(measurement.drafter), measurement.label


def show_ranking(tuning: Tuning) -> None:
    """Print all that was tried, the fastest first."""
    rows = [
        (
            *_names(one.measurement),
            f"{one.measurement.tokens_per_step:.2f}",
            f"{one.tokens_per_second:.0f}",
            f"{one.speedup:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
        )
        for one in tuning.candidates
    ]
    plain = ("none", "", "1.00", f"{tuning.plain_tokens_per_second:.0f}", "1.00", "")
    show(
        "Predicted from measured costs and real acceptance; tokens/s: of forwards and drafts alone",
        ("drafter", "draft", "tokens/step", "tokens/s", "speed-up", "95 % interval"),
        [*rows, plain],
    )
