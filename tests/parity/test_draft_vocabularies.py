"""Drafting over the columns of a draft vocabulary against drafting over all tokens, where those
that the drafter does not know have -inf: the same trees from the same laws, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, DraftTree, Proposal, TreeShape
from draftsmith.drafters import independent, medusa
from draftsmith.drafters.base import Drafter, TextState
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden import drafter as over_features
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.p_eagle import PEagle
from draftsmith.drafters.parallel import Parallel
from draftsmith.drafters.tree_growth import Chain, ChildSelection, Reader, grow
from draftsmith.drafters.unrolled import Unrolled
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.toy import tiny_target

V, OWN, H = 2000, 300, 128
PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7] * 12]
NETWORKS: dict[str, type[Any]] = {
    "eagle": Eagle,
    "hass": Hass,
    "fspad": Fspad,
    "griffin": Griffin,
    "eagle3": Eagle3,
    "p_eagle": PEagle,
    "parallel": Parallel,
    "medusa": Medusa,
    "unrolled": Unrolled,
}
READERS = ("hass", "parallel", "medusa", "subset", "mixed subset")
"""A drafter of each way to logits."""
SHAPES = {
    "chain": TreeShape.chain(4),
    "fixed": TreeShape(widths=(4, 2, 1)),
    "dynamic": TreeShape(widths=(6,) * 3, keep=24),
}
SAMPLERS = {
    "T=0": Sampler(),
    "T=0, options": Sampler(
        repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=((3, 4.0), (500, 9.0))
    ),
    "T=0.8": Sampler(temperature=0.8),
    "top-k": Sampler(temperature=1.0, top_k=40),
    "top-p": Sampler(temperature=0.7, top_p=0.8),
    "min-p": Sampler(temperature=1.3, min_p=0.1),
    "options": Sampler(
        temperature=0.9, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 4.0),)
    ),
}


class OverAllTokens:
    """A reader whose logits are widened before anything is looked for in them."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._own = reader, reader.columns
        self.columns = Columns(self._own.vocab_size)

    def root(self) -> Tensor:
        return self._own.widened(self._reader.root())

    def level(self, *given: Any) -> Tensor:
        return self._own.widened(self._reader.level(*given))

    def chain(self, *given: Any) -> Chain | None:
        found = self._reader.chain(*given)
        if found is None or found.law_BND is None:
            return found
        return replace(found, law_BND=self._own.widened(found.law_BND).clamp(min=0))


@lru_cache(maxsize=4)
def a_target(vocab: int, seed: int, *, compiles: bool) -> HFTarget:
    """Shared by the tests: none changes it."""
    model = tiny_target(vocab, seed=seed, hidden=H, dtype=torch.float32).model
    return HFTarget(model, compile=compiles, end_ids=frozenset())


def a_drafter(kind: str, folder: Path, proposal: str, *, compiles: bool) -> Drafter:
    """With random weights of a size at which every part of it matters."""
    if kind in NETWORKS:
        cls = NETWORKS[kind]
        options = {} if kind == "medusa" else {"proposal": proposal}
        drafter = cls(cls.Config(draft_vocab=OWN, **options))
        drafter.bind(a_target(V, 3, compiles=compiles))
        counts_V = torch.arange(V, dtype=torch.float32).remainder(7)
        counts_V[PROMPTS[2][0]] = 9.0
        drafter.choose_vocabulary(counts_V)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in drafter.network.parameters():
                one.add_(torch.randn(one.shape, generator=draw) * (0.1 if one.dim() > 1 else 0.3))
        return drafter
    ids_D = torch.arange(OWN) * 3
    if kind == "mixed subset":
        ids_D = ids_D[torch.randperm(OWN, generator=torch.Generator().manual_seed(0))]
    save_file({"d2t": ids_D, "unknown": torch.tensor([0])}, folder / "draft_vocab.safetensors")
    return Independent(
        Independent.Config(source=str(folder), proposal=proposal),
        model=a_target(OWN, 8, compiles=compiles),
    )


def trees_of(
    drafter: Drafter,
    target: HFTarget,
    shape: TreeShape,
    sampler: Sampler,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    wide: bool,
) -> tuple[list[DraftTree], list[list[int]]]:
    """All drafts of a ragged batch, and its texts."""
    drafter.bind(target)
    trees: list[DraftTree] = []
    texts: list[list[int]] = [[] for _ in PROMPTS]

    def recorded(reader: Reader, *given: Any) -> DraftTree:
        trees.append(grow(OverAllTokens(reader) if wide else reader, *given))
        return trees[-1]

    with monkeypatch.context() as patch:
        for module in (over_features, medusa, independent):
            patch.setattr(module, "grow", recorded)
        options = DecodeOptions(sampler=sampler, max_new_tokens=8, seed=3, shape=shape, rule=rule)
        for step in decode(target, drafter, PROMPTS, options):
            for text, emitted in zip(texts, step.emitted, strict=True):
                text += emitted
    return trees, texts


def assert_equal(one: DraftTree, other: DraftTree, *, drawn_chain: bool = False) -> None:
    assert one.proposal is other.proposal
    assert torch.equal(one.parents_BN, other.parents_BN)
    there = one.parents_BN != PADDING
    assert torch.equal(one.tokens_BN[there], other.tokens_BN[there])
    assert one.fed_BN is not None and other.fed_BN is not None
    assert torch.equal(one.fed_BN, other.fed_BN)
    assert (one.q is None) == (other.q is None) == (one.proposal is Proposal.OPAQUE)
    if one.q is None or other.q is None:
        return
    assert one.q_rows_BN is not None and other.q_rows_BN is not None
    assert torch.equal(one.q_rows_BN, other.q_rows_BN)
    if drawn_chain:  # its laws are made over the draft vocabulary, whose sums round otherwise
        torch.testing.assert_close(one.q.probs(), other.q.probs(), rtol=1e-6, atol=1e-9)
        return
    assert torch.equal(one.q.probs(), other.q.probs())
    one_N = one.q.take(one.q_rows_BN[there]).prob(one.tokens_BN[there])
    other_N = other.q.take(other.q_rows_BN[there]).prob(other.tokens_BN[there])
    assert torch.equal(one_N, other_N)


def check(
    kind: str,
    shape: str,
    sampler: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    compiles: bool,
    proposal: str,
    rule: str = "rejection",
) -> list[DraftTree]:
    target = a_target(V, 3, compiles=compiles)
    drafter = a_drafter(kind, folder, proposal, compiles=compiles)
    ways = [
        trees_of(drafter, target, SHAPES[shape], SAMPLERS[sampler], rule, monkeypatch, wide=wide)
        for wide in (False, True)
    ]
    (trees, texts), (others, same) = ways
    assert texts == same
    assert len(trees) == len(others) > 2
    for one, other in zip(trees, others, strict=True):
        drawn_chain = compiles and shape == "chain" and proposal == "sampled" and sampler == "T=0.8"
        assert_equal(one, other, drawn_chain=drawn_chain)
    assert len(torch.cat([one.tokens_BN.flatten() for one in trees]).unique()) > 5
    return trees


COMPILES = compiler() is not None


@pytest.mark.parametrize("compiles", [True, False] if COMPILES else [False])
@pytest.mark.parametrize("sampler", ["T=0", "T=0, options"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.every(5)
def test_the_best_tokens_are_those_of_all_tokens(
    kind: str,
    shape: str,
    sampler: str,
    compiles: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(kind, shape, sampler, tmp_path, monkeypatch, compiles=compiles, proposal="greedy")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [one for one in NETWORKS if one not in READERS])
def test_every_network_drafts_the_best_of_all_tokens(
    kind: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(kind, shape, "T=0", tmp_path, monkeypatch, compiles=COMPILES, proposal="greedy")


@pytest.mark.parametrize(
    ("proposal", "shape", "rule"),
    [
        ("sampled", "chain", "block"),
        ("sampled", "fixed", "traversal"),
        ("without_replacement", "fixed", "rejection"),
    ],
)
@pytest.mark.parametrize("sampler", list(SAMPLERS)[2:])
@pytest.mark.parametrize("kind", [one for one in READERS if one != "medusa"])
@pytest.mark.every(5)
def test_draws_and_their_laws_are_those_of_all_tokens(
    kind: str,
    shape: str,
    sampler: str,
    proposal: str,
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[str, Any] = {"compiles": COMPILES, "proposal": proposal, "rule": rule}
    trees = check(kind, shape, sampler, tmp_path, monkeypatch, **how)
    widths = {one.q.probs_RK.shape[1] for one in trees if one.q is not None}
    assert widths and (kind == "mixed subset" or max(widths) <= OWN)


class Tied:
    """A reader of logits that are whole numbers, of every third token."""

    def __init__(self, count: int) -> None:
        self.columns = Columns(3 * count, torch.arange(count) * 3)
        self._draw = torch.Generator().manual_seed(1)

    def _logits(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.columns.count, generator=self._draw).round()

    def root(self) -> Tensor:
        return self._logits(2)

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        return self._logits(*tokens_BF.shape)

    def chain(self, depth_B: object, draws: object, confidence: float) -> None:
        return None


def drafted(reader: Any, shape: TreeShape, sampler: Sampler | None = None) -> DraftTree:
    known: Sequence[Sequence[int]] = [[1, 2], [3, 4]]
    texts = TextState(known=[list(one) for one in known], num_prompt=[2, 2])
    how = ChildSelection("greedy", sampler or Sampler(), Noise(0, [0, 1], [2, 2]), texts)
    return grow(reader, shape, np.full(2, shape.depth), how)


@pytest.mark.parametrize("count", [40, 500])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_equal_tokens_the_lowest_are_drafted(shape: str, count: int) -> None:
    tree = drafted(Tied(count), SHAPES[shape])
    assert_equal(tree, drafted(OverAllTokens(Tied(count)), SHAPES[shape]))
    root_BD, ids = Tied(count).root(), Tied(count).columns
    best_BD = ids.tokens(root_BD.sort(dim=-1, descending=True, stable=True).indices)
    for b in range(2):
        first = tree.tokens_BN[b][tree.parents_BN[b] == -1].tolist()
        assert first == best_BD[b, : len(first)].tolist()


def test_a_tree_wider_than_the_draft_vocabulary_is_filled_with_others() -> None:
    """As before the drafter had one: the target has enough tokens, if this drafter does not."""
    shape = TreeShape(widths=(4, 1))
    tree = drafted(Tied(3), shape)
    assert_equal(tree, drafted(OverAllTokens(Tied(3)), shape))
    assert tree.tokens_BN[0, :3].remainder(3).tolist() == [0, 0, 0]
    dynamic = drafted(Tied(3), TreeShape(widths=(4, 4), keep=12))
    assert (dynamic.tokens_BN % 3 == 0).all()


def test_a_bias_names_tokens_and_not_columns() -> None:
    biased = Sampler(logit_bias=((9, 100.0),))
    tree = drafted(Tied(40), TreeShape.chain(1), biased)
    assert tree.tokens_BN.tolist() == [[9], [9]]
