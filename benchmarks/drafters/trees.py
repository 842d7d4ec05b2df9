"""What a draft tree of 59 nodes and its root costs beside the target's forward of these 60 tokens:

    python benchmarks/drafters/trees.py [--only building,verifying] [--quick]

building    growing the tree and choosing its best nodes, from logits that are there already (the
            drafter's own forwards are not counted); beside a target of 110 M, 32,000 tokens
verifying   the walk down the tree, at temperature 0 and at temperature 1 with top-p 0.9; beside a
            target of the shapes of Llama 3 8B, 128,256 tokens. Two of its layers are run: their
            mean counts 32 times, all the rest once. The walk goes as deep as the tree: seven laws.

Medians of rounds in turn, in one process, bfloat16. The machine must be idle otherwise. Writes
benchmarks/results/drafters_trees.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.bench.costs import ForwardProbe
from draftsmith.core.law import Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import ROOT, DraftTree, Proposal, TreeShape
from draftsmith.core.verify_step import make_rule, verify_step
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.tree_growth import grow_dynamic
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.hf import HFTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core import Figure, line
from models import llama_8b_part, llama_110m, random_prompts

RESULT = Path(__file__).resolve().parents[1] / "results" / "drafters_trees.json"
SHAPE = TreeShape(widths=(10,) * 6, keep=59)
BUILDING_BAR, VERIFYING_BAR = 0.10, 0.05
"""Shares of the target's forward that building and verifying a tree may cost."""
LAYERS, ALL_LAYERS = 2, 32
CONTEXT = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to measure."""

    rounds: int
    repeats: int
    """How often a short operation is timed in a round."""


FULL = Size(rounds=15, repeats=5)
QUICK = Size(rounds=2, repeats=2)


class Recorded:
    """A drafter whose logits are there already (a `Reader`); as many as its head would give."""

    def __init__(self, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        widths = (1, *SHAPE.widths[:-1])
        self._levels = [
            (4 * torch.randn((1, width, vocab), generator=generator)).bfloat16() for width in widths
        ]
        self._next = 0
        self.columns = Columns(vocab)

    def chain(self, depth_B: object, draws: object, confidence: float) -> None:
        return None

    def root(self) -> Tensor:
        self._next = 1
        return self._levels[0][:, 0]

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        self._next += 1
        return self._levels[self._next - 1]


def building(size: Size) -> list[Figure]:
    target = llama_110m()
    (context,) = random_prompts(1, CONTEXT, target.vocab_size)
    probe = ForwardProbe(target, context, 1 + SHAPE.num_nodes)
    reader = Recorded(target.vocab_size)
    work = {
        "building": lambda: seconds(lambda: grow_dynamic(reader, SHAPE, np.array([SHAPE.depth]))),
        "tree": lambda: probe.seconds(1 + SHAPE.num_nodes),
        "token": lambda: probe.seconds(1),
    }
    found = medians(work, size)
    return [
        Figure(
            what="growing a tree and choosing 59 nodes", value=1e3 * found["building"], unit="ms"
        ),
        Figure(what="110 M target: forward of 60 tokens", value=1e3 * found["tree"], unit="ms"),
        Figure(
            what="building, of the forward that the tree is verified by",
            value=found["building"] / found["tree"],
            bar=BUILDING_BAR,
            at_most=True,
        ),
        Figure(what="110 M target: forward of 1 token", value=1e3 * found["token"], unit="ms"),
        Figure(
            what="building, of the forward of one token", value=found["building"] / found["token"]
        ),
    ]


def verifying(size: Size) -> list[Figure]:
    target = llama_8b_part(LAYERS)
    (context,) = random_prompts(1, CONTEXT, target.vocab_size)
    clock = LayerClock(target)
    probe = ForwardProbe(target, context, 1 + SHAPE.num_nodes)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1 + SHAPE.num_nodes, target.vocab_size)
    logits_BNV = (4 * torch.randn(shape, generator=generator)).bfloat16()
    samplers = {
        "temperature 0": Sampler(),
        "temperature 1, top-p 0.9": Sampler(temperature=1.0, top_p=0.9),
    }
    work: dict[str, Callable[[], float]] = {
        "forward": lambda: clock.scaled(probe.seconds(1 + SHAPE.num_nodes))
    }
    for name, sampler in samplers.items():
        work[name] = verification(logits_BNV, sampler)
    found = medians(work, size)
    out = [
        Figure(
            what=f"8 B target: forward of 60 tokens ({LAYERS} layers measured, {ALL_LAYERS} "
            "counted)",
            value=1e3 * found["forward"],
            unit="ms",
        )
    ]
    for name in samplers:
        out += [
            Figure(what=f"verifying 59 nodes, {name}", value=1e3 * found[name], unit="ms"),
            Figure(
                what="the same, of the forward",
                value=found[name] / found["forward"],
                bar=VERIFYING_BAR,
                at_most=True,
            ),
        ]
    return out


class LayerClock:
    """Tells the layers' part in a forward from the rest."""

    def __init__(self, target: HFTarget) -> None:
        self._spent = self._began = 0.0
        layers = target.model.model.layers
        layers[0].register_forward_pre_hook(self._begin)
        layers[-1].register_forward_hook(self._end)
        self._count = len(layers)

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._spent = time.perf_counter() - self._began

    def scaled(self, whole: float) -> float:
        """Seconds of the latest forward, which took `whole`, had it had all layers."""
        return whole + (ALL_LAYERS / self._count - 1) * self._spent


def verification(logits_BNV: Tensor, sampler: Sampler) -> Callable[[], float]:
    """Seconds of verifying a tree one of whose paths is accepted to its end."""
    noise = Noise(0, [0], [CONTEXT])
    depth, count = SHAPE.depth, SHAPE.num_nodes
    spine = [ROOT, *range(depth)]
    parents = [*spine[:-1], *(spine[n % depth] for n in range(count - depth))]
    tokens = []
    for place, node in enumerate(spine[:-1]):
        law = sampler.law(logits_BNV[0, node + 1][None])
        tokens.append(int(law.draw(noise, np.array([0]), place, Purpose.TARGET)[0]))
    generator = torch.Generator().manual_seed(1)
    others = torch.randint(0, logits_BNV.shape[2], (count - depth,), generator=generator)
    tree = DraftTree(
        tokens_BN=torch.tensor([[*tokens, *others.tolist()]]),
        parents_BN=torch.tensor([parents]),
        proposal=Proposal.OPAQUE,
    )
    rule = make_rule("auto", tree.proposal)

    def run() -> None:
        _, verdict = verify_step(tree, logits_BNV, sampler, [], rule, noise, widest=SHAPE.widest)
        assert int(verdict.num_accepted_B[0]) == depth

    return lambda: seconds(run)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        run()
    return time.perf_counter() - began


def medians(work: dict[str, Callable[[], float]], size: Size) -> dict[str, float]:
    """Each in turn, round after round; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(size.rounds + 1):
        for name, run in work.items():
            some = [run() for _ in range(size.repeats)]
            taken[name] += some if number else []
    return {name: statistics.median(values) for name, values in taken.items()}


PARTS: dict[str, Callable[[Size], list[Figure]]] = {"building": building, "verifying": verifying}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    content: dict[str, Any] = {"parts": {}}
    if given.out.exists():
        content = json.loads(given.out.read_text())
    for name in names:
        found = PARTS[name](QUICK if given.quick else FULL)
        figures = [asdict(figure) | {"met": figure.met} for figure in found]
        content["parts"][name] = {
            "quick": given.quick,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "machine": machine_summary(),
            "figures": figures,
        }
        write_json_atomic(given.out, content)
        for figure in figures:
            print(line(figure), flush=True)


if __name__ == "__main__":
    main()
