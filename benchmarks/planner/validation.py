"""Do the scaling laws name the best draft? Five drafts of one family for models/mini-code/target.

    python benchmarks/planner/validation.py [--quick] [--work DIR]

1. train      five sizes (0.16 to 2.7 M parameters) on the same text, for the same tokens
2. observe    perplexity on held-out files and acceptance, as `draftsmith bench --perplexity` does
3. fit        acceptance against perplexity, in three forms (one target: the affine law has no B);
              each draft is predicted by the form that the other four give
4. predict    speed-up by N / M (the memory-bound model) and by measured costs, best draft lengths
5. time       time to first token and per token, as the paper's Table 6: means over prompts with
              95 % normal margins; and speed-up, interleaved with plain decoding. The fastest is
              tied with each draft whose speed over the same prompts cannot be told from its own

An interrupted run continues; what is timed wants an idle machine. About 45 minutes on two cores,
most of it training. Writes benchmarks/results/planner_validation.json and planner_validation/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from validation_measure import (
    BATCH_TOKENS,
    ROOT,
    SHAPES,
    TARGET,
    Amounts,
    kept_costs,
    latency,
    observe,
    open_arm,
    time_all,
    training,
)
from validation_pictures import save_pictures
from validation_predict import FORM, Draft, best_sizes, entry, laws, verdict, without

import mini_code
from draftsmith.bench.records import BASELINE, RunRecord, drafter_metrics
from draftsmith.bench.run import Item
from draftsmith.data.suites import held_out_prompts
from draftsmith.provenance import jsonable, machine_summary, versions, write_json_atomic
from draftsmith.targets.hf import load_target, quieten

FULL = Amounts(
    steps=1000,
    text="*.py",
    prompts=12,
    tokens=96,
    files=24,
    longest=9,
    repeats=3,
    rounds=15,
)
QUICK = Amounts(
    steps=4,
    text="email/*.py",
    prompts=2,
    tokens=8,
    files=2,
    longest=2,
    repeats=1,
    rounds=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--work", type=Path, help="left out: runs/planner-validation")
    given = parser.parse_args()
    name = "planner_validation" + ("_quick" if given.quick else "")
    work = given.work or ROOT / "runs" / name.replace("_", "-")
    out = work if given.quick else ROOT / "benchmarks" / "results"
    amounts = QUICK if given.quick else FULL
    if not (TARGET / "config.json").is_file():
        sys.exit("models/mini-code is absent")
    quieten()
    mini_code.train_missing(training(work, one, amounts) for one in SHAPES)
    rows = observe(work, [work / one for one in SHAPES], amounts)
    target = load_target(str(TARGET))
    arms = {one: open_arm(work / one, one, target) for one in SHAPES}
    prompts = held_out_prompts(amounts.prompts)
    items = tuple(
        Item(prompt=prompt.id, tokens=prompt.token_ids(target.tokenizer)) for prompt in prompts
    )
    costs = kept_costs(work, target, list(arms.values()), items, amounts)
    drafts = [
        Draft(
            name=one,
            params=float(row["draft_params"]),
            ppl=float(row["draft_ppl"]),
            alpha=float(row["alpha"]),
            predicted_alpha=without(rows, place),
            tokens_per_step=tuple(
                float(row[f"tokens_per_step_{n}"] or "nan") for n in range(1, amounts.longest + 1)
            ),
            costs=costs[one],
        )
        for place, (one, row) in enumerate(zip(SHAPES, rows, strict=True))
    ]
    target_params = float(rows[0]["target_params"])
    entries = [entry(one, row, target_params) for one, row in zip(drafts, rows, strict=True)]
    lengths = {
        one["name"]: {one[kind]["length"] for kind in ("by_parameters", "by_costs")}
        for one in entries
    }
    records = time_all(work, target, arms, lengths, items, amounts)
    speeds = {one.name: one for one in drafter_metrics(records)}
    for one in entries:
        one["measured"] = {
            str(length): timed(records, speeds, f"{one['name']}:{length}")
            for length in sorted(lengths[one["name"]])
        }
    record = {
        "target": {"name": "models/mini-code/target", "params": target_params}
        | {"ppl": float(rows[0]["target_ppl"]), "latency": latency(records, BASELINE)},
        "trained_tokens": amounts.steps * BATCH_TOKENS,
        "drafts": entries,
        "laws": laws(rows),
        "law_used": FORM,
        "optimum": best_sizes(drafts, target_params),
        "best_of_the_five": verdict(entries, records),
        "versions": versions(),
        "machine": machine_summary(),
    }
    write_json_atomic(out / f"{name}.json", record)
    save_pictures(jsonable(record), out / name)
    print(f"wrote {out / name}.json", file=sys.stderr)


def timed(records: Sequence[RunRecord], speeds: Mapping[str, Any], arm: str) -> dict[str, Any]:
    found = speeds[arm]
    ends = found.speedup_ci95
    return {
        "speedup": found.speedup,
        "speedup_ci95": None if ends is None else [ends.low, ends.high],
        "predicted_by_the_steps_taken": found.predicted_speedup,
        "tokens_per_step": found.tokens_per_step,
        "loop_share": found.loop_share,
        "tokens_per_step_outside_loops": found.decode_tokens_per_step_outside_loops,
        "latency": latency(records, arm),
    }


if __name__ == "__main__":
    main()
