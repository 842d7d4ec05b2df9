"""Peak memory of one distillation step (forward and backward), all logits at once and in chunks:

    python benchmarks/distillation/memory.py [--places 2048] [--vocab 128256] [--hidden 64]

Every figure comes from a process of its own: the highest resident memory during the step, less what
was resident before it. The machine need not be idle. Linux only. The table is printed and written
to benchmarks/results/distillation_memory.json. The dense steps need up to 11 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    TeacherLogprobs,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.distill.objectives.distillation import CELLS, Distillation
from draftsmith.provenance import machine_summary, versions, write_json_atomic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dense_objectives import dense_distillation

RESULT = Path(__file__).resolve().parents[1] / "results" / "distillation_memory.json"
KEPT = 50
CASES = {
    "kl, 50 kept, renormalise": ("kept", Distillation(objective="kl", tail="renormalise")),
    "rkl, 50 kept, bucket": ("kept", Distillation(objective="rkl")),
    "kl, whole laws": ("whole", Distillation(objective="kl")),
    "rkl, whole laws": ("whole", Distillation(objective="rkl")),
    "tvdpp, whole laws": ("whole", Distillation(objective="tvdpp")),
}
"""jsd is left out: all logits at once, it needs 13 GiB (whole laws) or 16 GiB (kept)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a training step."""

    places: int
    vocab: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table, MiB beyond what was there before the step."""

    case: str
    dense_mib: float
    at_once_mib: float
    """Our own formulas with a budget that takes all places in one chunk."""
    chunked_mib: float

    @property
    def share(self) -> float:
        return self.chunked_mib / self.dense_mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--cells", type=int, default=CELLS, help="budget of a chunk")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "HOW"), help="used by the script")
    chosen = parser.parse_args()
    sizes = Sizes(places=chosen.places, vocab=chosen.vocab, hidden=chosen.hidden)
    if chosen.measure:
        case, how = chosen.measure
        print(measure(case, how, sizes, chosen.cells))
        return
    figures = []
    print(f"{'':28}{'dense':>9}{'at once':>9}{'chunked':>9}  MiB, chunked / dense", flush=True)
    for case in CASES:
        dense, at_once, chunked = (
            in_own_process(case, how) for how in ("dense", "at once", "chunked")
        )
        figure = Figure(case=case, dense_mib=dense, at_once_mib=at_once, chunked_mib=chunked)
        figures.append(figure)
        print(f"{case:28}{dense:9.0f}{at_once:9.0f}{chunked:9.0f}  {figure.share:.3f}", flush=True)
    value = {
        "step": asdict(sizes) | {"kept": KEPT, "cells": chosen.cells, "dtype": "float32"},
        "figures": [asdict(figure) | {"share": figure.share} for figure in figures],
        "versions": versions(),
        "machine": machine_summary(),
    }
    write_json_atomic(RESULT, value)


def in_own_process(case: str, how: str) -> float:
    """MiB, from this script run again with the same sizes."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", case, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case}, {how}: exit code {done.returncode}\n{done.stderr}")
    return float(json.loads(done.stdout))


def measure(case: str, how: str, sizes: Sizes, cells: int) -> float:
    """MiB that one step needs beyond what is there before it."""
    kind, objective = CASES[case]
    budgets = {"dense": cells, "at once": sizes.places * sizes.vocab, "chunked": cells}
    objective = replace(objective, cells=budgets[how])
    # A small step first, so that what libraries allocate once is not counted.
    step(objective, kind, replace(sizes, places=3, vocab=max(64, KEPT)), dense=how == "dense")()
    run = step(objective, kind, sizes, dense=how == "dense")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / 1024


def step(objective: Distillation, kind: str, sizes: Sizes, *, dense: bool):
    """A step that is ready to run: states, head and laws exist."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    time = sizes.places + 1  # the last token predicts nothing
    hidden = randn(1, time, sizes.hidden).requires_grad_()
    weight = randn(sizes.vocab, sizes.hidden).requires_grad_()
    batch = TrajectoryBatch(
        tokens_BT=torch.randint(0, sizes.vocab, (1, time), generator=generator),
        loss_mask_BT=torch.ones(1, time, dtype=torch.bool),
        laws=laws(kind, sizes, generator),
        law_row_BT=torch.arange(-1, sizes.places)[None],
    )
    prediction = DraftPrediction(
        hidden_BTH=hidden, mask_BT=torch.ones(1, time, dtype=torch.bool), ahead=1
    )

    def run() -> None:
        if dense:
            terms = dense_distillation(objective, prediction, batch, lambda h: h @ weight.T)
        else:
            terms = objective.loss(prediction, batch, lambda h: h @ weight.T)
        assert terms.weight == sizes.places
        terms.total.backward()

    return run


def laws(kind: str, sizes: Sizes, generator: torch.Generator) -> TeacherLogprobs:
    """The teacher's laws: states and a head, or the most probable tokens with 95 % of the mass."""
    if kind == "whole":
        weight = torch.randn(sizes.vocab, sizes.hidden, generator=generator)
        states = torch.randn(sizes.places, sizes.hidden, generator=generator)
        return FullLogprobs(hidden_NH=states, head=lambda h: h @ weight.T)
    starts = torch.randint(0, sizes.vocab - KEPT + 1, (sizes.places, 1), generator=generator)
    scores = torch.randn(sizes.places, KEPT, generator=generator)
    return TopLogprobs(
        ids_NK=starts + torch.arange(KEPT),
        log_p_NK=torch.log_softmax(scores, -1) + torch.tensor(0.95).log(),
    )


def resident(field: str) -> int:
    """KiB of this process: VmRSS now, VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
