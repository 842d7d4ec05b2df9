"""How fast trajectories are collected, to be run on an otherwise idle machine:

    python benchmarks/distillation/collecting.py [--quick]

Greedy texts and beams of four, with top-50 laws, in batches, against transformers' `generate` on
the same model, prompt by prompt and without laws. Both run interleaved in this process; seconds
are per token of all texts that come back; ratios are taken within a round. Writes
benchmarks/results/distillation_collecting.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.rows import until_end
from draftsmith.data.suites import held_out_prompts
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.hf import HFTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the models are shared

from models import llama_110m, mini_code, random_prompts

RESULTS = Path(__file__).resolve().parents[1] / "results"
BAR = 3.0
"""Collecting must be this many times as fast."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to measure."""

    rounds: int
    prompts: int
    tokens: int
    prompt_tokens: int
    """Length of each random prompt."""
    batch_size: int


FULL = Size(rounds=5, prompts=32, tokens=96, prompt_tokens=64, batch_size=32)
LARGE = replace(FULL, rounds=3, prompts=16, tokens=32)
"""For the larger model: `generate` takes a quarter of a minute for this."""
QUICK = Size(rounds=1, prompts=3, tokens=6, prompt_tokens=12, batch_size=8)
WAYS = {
    "greedy": CollectSettings(forcing="greedy"),
    "beams of 4": CollectSettings(forcing="beam", beams=4),
}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One side of one round."""

    seconds: float
    tokens: int
    texts: tuple[tuple[int, ...], ...]

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One model and one way."""

    model: str
    way: str
    speedup: float
    """Median over rounds of their seconds per token / ours."""
    low: float
    high: float
    bar: float
    met: bool
    ours_ms_per_token: float
    theirs_ms_per_token: float
    tokens: int
    """Tokens of all texts that we collected in a round."""
    same_texts: float
    """Share of texts that both sides found (half precision flips near-ties)."""
    teacher_forwards: int
    teacher_tokens: int


def ours(
    backend: TransformersBackend, prompts: list[tuple[int, ...]], settings: CollectSettings
) -> Pace:
    requests = [CollectRequest(prompt_id=str(i), prompt=p) for i, p in enumerate(prompts)]
    began = time.perf_counter()
    found = backend.collect(requests, settings)
    seconds = time.perf_counter() - began
    texts = tuple(one.tokens for one in found)
    return Pace(seconds=seconds, tokens=sum(map(len, texts)), texts=texts)


def theirs(target: HFTarget, prompts: list[tuple[int, ...]], settings: CollectSettings) -> Pace:
    """`generate`, one prompt at a time."""
    from transformers import GenerationConfig

    beams = settings.beams if settings.forcing == "beam" else 1
    assert isinstance(beams, int)
    searching: dict[str, Any] = {}
    if beams > 1:
        searching = {
            "num_beams": beams,
            "num_return_sequences": beams,
            "early_stopping": "never",
            "length_penalty": settings.length_penalty,
        }
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(target.end_ids) or None,
        pad_token_id=min(target.end_ids, default=0),
        **searching,
    )
    rows: list[list[int]] = []
    with target.native() as model, torch.inference_mode():
        began = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
            rows += out[:, len(prompt) :].tolist()
        seconds = time.perf_counter() - began
    texts = tuple(tuple(until_end(row, target.end_ids)) for row in rows)
    return Pace(seconds=seconds, tokens=sum(map(len, texts)), texts=texts)


def measure(
    name: str, target: HFTarget, prompts: list[tuple[int, ...]], size: Size
) -> list[Figure]:
    out = []
    for way, bare in WAYS.items():
        settings = CollectSettings(
            forcing=bare.forcing, beams=bare.beams, max_new_tokens=size.tokens, top_k=50
        )
        pairs: list[tuple[Pace, Pace]] = []
        for number in range(size.rounds + 1):
            backend = TransformersBackend(target, batch_size=size.batch_size)
            pair = (ours(backend, prompts, settings), theirs(target, prompts, settings))
            if number > 0 or size.rounds == 1:  # the first round is warm-up
                pairs.append(pair)
        ratios = [other.per_token / mine.per_token for mine, other in pairs]
        mine, other = pairs[-1]
        both = len(set(mine.texts) & set(other.texts)) / len(set(mine.texts))
        speedup = statistics.median(ratios)
        out.append(
            Figure(
                model=name,
                way=way,
                speedup=speedup,
                low=min(ratios),
                high=max(ratios),
                bar=BAR,
                met=speedup >= BAR,
                ours_ms_per_token=1e3 * statistics.median(p.per_token for p, _ in pairs),
                theirs_ms_per_token=1e3 * statistics.median(p.per_token for _, p in pairs),
                tokens=mine.tokens,
                same_texts=both,
                teacher_forwards=backend.cost.forwards,
                teacher_tokens=backend.cost.tokens,
            )
        )
    return out


def subjects(quick: bool) -> list[tuple[str, HFTarget, list[tuple[int, ...]], Size]]:
    """The shipped model on real code, and 110 M random weights on random tokens."""
    out = []
    size, other = (QUICK, QUICK) if quick else (FULL, LARGE)
    small = mini_code()
    if small is None:
        print("models/mini-code is absent: left out", file=sys.stderr)
    else:
        texts = [prompt.token_ids(small.tokenizer) for prompt in held_out_prompts(size.prompts)]
        out.append(("mini-code", small, [tuple(ids) for ids in texts], size))
    large = llama_110m()
    prompts = random_prompts(other.prompts, other.prompt_tokens, large.vocab_size)
    return [*out, ("110 M bfloat16", large, prompts, other)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the figures")
    given = parser.parse_args()
    began = time.monotonic()
    figures = []
    for name, target, prompts, size in subjects(given.quick):
        for figure in measure(name, target, prompts, size):
            figures.append(figure)
            print(
                f"{figure.model}, {figure.way}: {figure.speedup:.2f}x "
                f"({figure.low:.2f} to {figure.high:.2f}; must reach {figure.bar:g}x), "
                f"{100 * figure.same_texts:.0f} % of the texts are the same",
                flush=True,
            )
    write_json_atomic(
        given.out / "distillation_collecting.json",
        {
            "quick": given.quick,
            "sizes": [asdict(size) for size in ((QUICK,) if given.quick else (FULL, LARGE))],
            "seconds": round(time.monotonic() - began, 1),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "machine": machine_summary(),
            "figures": [asdict(figure) for figure in figures],
        },
    )


if __name__ == "__main__":
    main()
