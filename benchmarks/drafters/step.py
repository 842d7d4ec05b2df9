"""A training step of GRIFFIN, three forwards over one text (forward and backward, bfloat16):

    python benchmarks/drafters/step.py [--quick]

Our step, whose attention writes no T x T matrix, against the published one with right masks
(`square.py`); that both compute the same gradients is checked first. Times are medians of steps in
turn, in one process. Attention is all between queries, keys, values and their mixture, timed by
itself on tensors of the step's shapes. Peak memory is that of a process of its own: the highest
resident memory during the step, less what was resident before it. Linux only; the machine must be
idle otherwise. Writes benchmarks/results/drafters_step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.types import FullLogprobs, TrajectoryBatch
from draftsmith.distill.objectives.distillation import Distillation, Imitation
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hidden.unroll import attend_rollout
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.hf import EmbeddingAndHead

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distillation"))

from memory import resident

from drafters.square import SquareGriffin, attend_square

RESULT = Path(__file__).resolve().parents[1] / "results" / "drafters_step.json"
ATTENTION_BAR, TIME_BAR, MEMORY_BAR = 0.35, 0.8, 1 / 3
"""Attention's share of our step; our step's time and peak memory, of the published one's."""
FORWARDS = 3
STEPS: dict[str, type[Griffin]] = {"ours": Griffin, "published": SquareGriffin}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of the drafter and its text, and how often a step is timed."""

    places: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    rounds: int


FULL = Size(places=2048, hidden=1024, intermediate=2816, heads=16, vocab=4096, rounds=5)
QUICK = Size(places=512, hidden=256, intermediate=704, heads=4, vocab=512, rounds=2)
SMALL = Size(places=24, hidden=32, intermediate=64, heads=4, vocab=64, rounds=1)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One step."""

    step: str
    seconds: float
    attention_seconds: float
    peak_mib: float

    @property
    def attention_share(self) -> float:
        return self.attention_seconds / self.seconds


@dataclass(frozen=True, kw_only=True)
class Work:
    """A drafter and what it learns from."""

    drafter: Griffin
    batch: TrajectoryBatch
    objective: Imitation

    def run(self, *, autocast: bool = True) -> None:
        """One step, as the trainer does it; gradients are left on the weights."""
        self.drafter.zero_grad()
        kept: list[Tensor] = []
        carry = None
        for _ in range(self.drafter.num_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                prediction, carry = self.drafter(self.batch, carry)
                terms = self.objective.loss(prediction, self.batch, self.drafter.head())
            kept.append(terms.total / self.batch.tokens_BT.numel())
            if self.drafter.backward == "each":
                kept.pop().backward()
        if kept:
            torch.stack(kept).sum().backward()


def work(name: str, size: Size, *, noise: float = 0.2) -> Work:
    """The same drafter, text and target for each name."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=2,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=2 * size.places,
    )
    model = LlamaForCausalLM(config)
    target = EmbeddingAndHead(model, config, None)
    tokens_BT = torch.randint(0, size.vocab, (1, size.places))
    with torch.no_grad():
        features_BTH = model.model(tokens_BT).last_hidden_state
    batch = TrajectoryBatch(
        tokens_BT=tokens_BT,
        loss_mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        documents_BT=torch.zeros_like(tokens_BT),
        laws=FullLogprobs(hidden_NH=features_BTH[0], head=target.head),
        law_row_BT=torch.arange(-1, size.places - 1)[None],
        features_BTS=features_BTH,
    )
    cls = STEPS[name]
    # the mask would leave a random drafter nothing to learn after its first forward
    drafter = cls(cls.Config(num_forwards=FORWARDS, mask_top=0, noise=noise))
    drafter.bind(target)
    drafter.train().requires_grad_(True)
    weights = drafter.loss_weights
    objective = Imitation(
        token=Distillation(objective="kl"),
        token_weight=weights.token,
        feature_weight=weights.feature,
        top_weight=weights.top,
    )
    return Work(drafter=drafter, batch=batch, objective=objective)


def check() -> None:
    """Both steps leave the same gradients."""
    gradients = []
    for name in STEPS:
        one = work(name, SMALL, noise=0.0)
        one.run(autocast=False)
        gradients.append({key: weight.grad for key, weight in one.drafter.named_parameters()})
    ours, published = gradients
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, published[key], rtol=1e-3, atol=1e-6)


def attention(name: str, size: Size) -> Callable[[], None]:
    """Attention of all forwards of a step, there and back (ours there again: it is not kept)."""
    shape = (1, size.heads, size.places, size.hidden // size.heads)
    documents_BT = torch.zeros(1, size.places, dtype=torch.long)
    q, slope, *rest = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2 + 2 * FORWARDS))
    for one in (q, *rest):
        one.requires_grad_()

    def ours(keys: list[Tensor], values: list[Tensor]) -> Tensor:
        own, scale = (keys[1:], values[1:]), shape[-1] ** -0.5
        with torch.no_grad():
            attend_rollout(q, keys[0], values[0], *own, documents_BT, scale=scale)
        return attend_rollout(q, keys[0], values[0], *own, documents_BT, scale=scale)

    def published(keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return attend_square(q, keys, values, documents_BT)

    attend = {"ours": ours, "published": published}[name]

    def run() -> None:
        for step in range(1, FORWARDS + 1):
            attend(rest[:step], rest[FORWARDS : FORWARDS + step]).backward(slope)

    return run


def measure(size: Size) -> list[Figure]:
    steps = {name: work(name, size).run for name in STEPS}
    attentions = {name: attention(name, size) for name in STEPS}
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    shares: dict[str, list[float]] = {name: [] for name in STEPS}
    for number in range(size.rounds + 1):
        for name in STEPS:
            taken = seconds(steps[name]), seconds(attentions[name])
            if number:  # the first round warms up
                times[name].append(taken[0])
                shares[name].append(taken[1])
    return [
        Figure(
            step=name,
            seconds=statistics.median(times[name]),
            attention_seconds=statistics.median(shares[name]),
            peak_mib=in_own_process(name),
        )
        for name in STEPS
    ]


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_own_process(name: str) -> float:
    """Peak MiB of one step, from this script run again with the same size."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
    # glibc then returns all larger blocks at once: what is resident is what is in use
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    return float(json.loads(done.stdout))


def peak(name: str, size: Size) -> float:
    """MiB that one step needs beyond what is there before it."""
    work(name, SMALL).run()  # so that what libraries allocate once is not counted
    one = work(name, size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = resident("VmRSS")
    one.run()
    return (resident("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=STEPS, help="used by the script")
    given = parser.parse_args()
    size = QUICK if given.quick else FULL
    if given.measure:
        print(peak(given.measure, size))
        return
    check()
    ours, published = figures = measure(size)
    for one in figures:
        print(
            f"{one.step:10} {one.seconds:7.2f} s, attention {one.attention_share:.2f} of it, "
            f"peak {one.peak_mib:6.0f} MiB",
            flush=True,
        )
    of_time = ours.seconds / published.seconds
    of_memory = ours.peak_mib / published.peak_mib
    print(f"ours / published: {of_time:.2f} of the time, {of_memory:.2f} of the memory")
    met = {
        "attention": ours.attention_share <= ATTENTION_BAR,
        "time": of_time <= TIME_BAR,
        "memory": of_memory <= MEMORY_BAR,
    }
    write_json_atomic(
        given.out,
        {
            "quick": given.quick,
            "size": asdict(size) | {"forwards": FORWARDS, "dtype": "bfloat16 autocast"},
            "bars": {"attention": ATTENTION_BAR, "time": TIME_BAR, "memory": MEMORY_BAR},
            "met": met,
            "time": of_time,
            "memory": of_memory,
            "figures": [asdict(one) | {"attention_share": one.attention_share} for one in figures],
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "machine": machine_summary(),
        },
    )


if __name__ == "__main__":
    main()
