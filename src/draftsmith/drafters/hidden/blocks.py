"""Drafters that draft a block of tokens in one forward, of which a tree's levels read the laws.

A block's laws hold at places behind the last pair of a text, which nothing is kept of. What a place
reads, and which of the others it looks at, is the drafter's own.

Training draws anchors from all over the texts. Each is the last known token of a block:

    text      a b c d e f g h        sees:  m1 m2 m3    pairs that end in b, c
    anchors       c     f                   m1 m2 m3    pairs that end in b, c, d, e, f

Shape letters: B rows, A anchors, P places of a block, C places of all blocks, T time, S width of
signals, H hidden, F nodes of a level, D draft vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.config import require
from draftsmith.core.cache import Block, KVCache, lay_out, right_aligned
from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftPrediction, DraftTree, TrajectoryBatch, TreeShape
from draftsmith.drafters.base import (
    STRUCTURE,
    TRAINING,
    DraftState,
    LossWeights,
    TargetView,
    at_least,
)
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.hidden.drafter import FeatureDrafter, FeatureState
from draftsmith.drafters.hidden.network import Attend, AttendIn, Network
from draftsmith.drafters.tree_growth import Chain, MakesDraws
from draftsmith.targets import base as targets
from draftsmith.targets.native.engine import Draws

KeysAndValues = tuple[Tensor, Tensor]


class BlockEngine(Protocol):
    """What runs the network of a drafter of blocks in the compiled engine."""

    columns: Columns

    def keep(
        self, cache: KVCache, tokens_BP: np.ndarray, counts_B: np.ndarray, feature_BPS: Tensor
    ) -> None:
        """Keep and commit keys and values of these pairs, see `right_aligned`."""


E = TypeVar("E", bound=BlockEngine)


class BlockReader(abc.ABC, Generic[E]):
    """Drafts a block at once; a tree's levels then read the laws of its places (a `Reader`).

    Args:
        count: places of a block.
        engine: runs the network; None: PyTorch does.
    """

    def __init__(
        self,
        network: Network,
        target: TargetView,
        state: FeatureState,
        count: int,
        engine: E | None = None,
    ) -> None:
        self._target, self._state, self._count = target, state, count
        self._engine = engine
        own = Columns(target.vocab_size, network.target_ids) if engine is None else engine.columns
        self.columns = own
        self._own_BPD = torch.empty(0)
        self._depth = 0

    @abc.abstractmethod
    def _keep(self, tokens_BP: np.ndarray, feature_BPS: Tensor, block: Block) -> Any:
        """Write keys and values of these pairs, by PyTorch."""

    @abc.abstractmethod
    def _read(self) -> Tensor:
        """[B, P, D] logits of a block's places, by PyTorch; pending pairs are committed."""

    @abc.abstractmethod
    def _draft(
        self,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """As `_read` by the engine; with `depth_B` also so many tokens of each row: ([B, P, D]
        logits, with `draws` probabilities at the places that were drawn from; [B, N] tokens that
        were chosen; [B] tokens of each row)."""

    def _added(self, before_BF: Tensor) -> Tensor | None:
        """[B, F, D]: what these tokens before add to logits; None: nothing."""
        return None

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """See `Reader`."""
        if self._engine is None:
            return None
        drawn = None if draws is None else draws(int(depth_B.max()))
        read_BPD, tokens_BN, count_B = self._draft(depth_B, drawn, confidence)
        made = max(int(count_B.max()), 1)
        return Chain(
            tokens_BN=tokens_BN[:, :made],
            law_BND=None if draws is None else read_BPD[:, :made],
            count_B=count_B,
        )

    def root(self) -> Tensor:
        self._own_BPD = self._read() if self._engine is None else self._draft()[0]
        return self._laws(torch.tensor([row[-1:] for row in self._state.known]))[:, 0]

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        self._depth += 1
        return self._laws(tokens_BF)

    def _laws(self, before_BF: Tensor) -> Tensor:
        """[B, F, D]: of this depth, behind each of these tokens; [B, 1, D] if all are alike."""
        own_BFD, added_BFD = self._own_BPD[:, self._depth, None], self._added(before_BF)
        return own_BFD if added_BFD is None else own_BFD + added_BFD

    def _pending(self) -> tuple[list[list[int]], Tensor]:
        """Tokens and states of the last settled pairs that are not kept yet; what lies before them
        is kept."""
        state = self._state
        cache, pairs_B = state.cache, state.features.lengths_B
        while True:
            # the last pair is read again where nothing is new: places stand behind it
            start_B = np.minimum(cache.lengths_B, np.maximum(pairs_B - 1, 0))
            cache.rewind(start_B)
            end_B = np.minimum(pairs_B, start_B + targets.CHUNK)
            pending, feature_BPS = state.pairs(start_B, end_B)
            if (end_B == pairs_B).all():
                return pending, feature_BPS
            if self._engine is not None:
                self._engine.keep(cache, *right_aligned(pending), feature_BPS)
                continue
            tokens_BP, block = lay_out(cache, pending)
            self._keep(tokens_BP, feature_BPS, block)
            cache.commit(block.pending_B)


class ConfidenceHead(nn.Module):
    """How probable it is that the draft of a place is accepted, if those before it were."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.state = nn.Linear(hidden, _WIDTH)
        self.before = nn.Linear(hidden, _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, 1)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """[..] logits, from states of places and embeddings of the tokens before them, [.., H]
        each. What a place drafts is not read: a draft that is dropped by it would not be a draw
        of its law any more. Nothing else learns by it."""
        # targets differ in the scale of both
        states, embedded = (F.rms_norm(x, x.shape[-1:]) for x in (states.detach(), embedded))
        out: Tensor = self.out(F.silu(self.state(states) + self.before(embedded)))
        return out.squeeze(-1)


_WIDTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """All blocks of a training batch before step `step`."""

    step: int
    states_BAPH: Tensor
    """What the places predict from."""
    anchor_BA: Tensor
    """Places in the batch, no two alike."""
    counts_BA: Tensor
    """Whether there is such an anchor: a row may have fewer."""


GROUP = 64
"""Anchors whose blocks are computed together: attention looks at the keys of all of them."""
MOST_LAYERS = 16


class BlockDrafter(FeatureDrafter):
    """A block of drafts in one forward. Subclasses compute the states of blocks."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        block: int = field(default=8, metadata=STRUCTURE)
        """Training: tokens of a block; the first is the last known one, the others are drafts."""
        layers: int = field(default=2, metadata=STRUCTURE)
        """Training: decoder layers."""
        spacing: int = field(default=4, metadata=TRAINING)
        """Training: a block begins at one of so many places, drawn anew in every step."""
        decay: float = field(default=0.8, metadata=TRAINING)
        """Training: each place of a block counts this much of the one before."""
        noise: float = field(default=0.0, metadata=TRAINING)
        """Training: none, as published."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(2, block=self.block, most=MOST_NODES)
            at_least(1, layers=self.layers, most=MOST_LAYERS)
            at_least(1, spacing=self.spacing)
            at_least(0, decay=self.decay)
            require(
                self.length < self.block,
                f"drafter option length={self.length}: a block of {self.block} drafts at most "
                f"{self.block - 1} tokens; ask for no more",
            )

    config: Config
    measures: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "block_size")
    eval_steps = None
    loss_weights = LossWeights()

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.longest = self.config.block - 1
        if not self.config.length:
            self.default_shape = TreeShape.chain(self.longest)

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer = super().network_config(target)
        layer.num_hidden_layers, layer.block_size = self.config.layers, self.config.block
        return layer

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        return super().propose(state, shape.clip(self.num_steps), depth_B, sampler, noise)

    # ------------------------------------------------------------------ training

    @abc.abstractmethod
    def _blocks(self, batch: TrajectoryBatch) -> Blocks:
        """The states of all blocks, before step 0."""

    @staticmethod
    def _group_by_group(read: Callable[[Tensor], Tensor], anchor_BA: Tensor) -> Tensor:
        """[B, A, P, H] of all anchors, some at a time."""
        return torch.cat([read(some) for some in anchor_BA.split(GROUP, dim=1)], dim=1)

    def _prediction(self, batch: TrajectoryBatch, now: Blocks) -> DraftPrediction:
        """What predicts the token of a block's next place."""
        return self._at_anchors(batch, now, now.states_BAPH[:, :, now.step])

    def forward(
        self, batch: TrajectoryBatch, carry: Blocks | None
    ) -> tuple[DraftPrediction, Blocks]:
        now = self._blocks(batch) if carry is None else carry
        prediction = replace(
            self._prediction(batch, now),
            weight=self.config.decay**now.step,
            narrow=self._narrow_head(),
        )
        return prediction, replace(now, step=now.step + 1)

    def _at_anchors(
        self, batch: TrajectoryBatch, now: Blocks, predict_BAH: Tensor
    ) -> DraftPrediction:
        rows, _, width = predict_BAH.shape
        anchor_BA = now.anchor_BA
        hidden_BTH = predict_BAH.new_zeros(rows, batch.tokens_BT.shape[1], width)
        mask_BT = torch.zeros_like(batch.tokens_BT, dtype=torch.bool)
        return DraftPrediction(
            hidden_BTH=hidden_BTH.scatter(
                1, anchor_BA[..., None].expand_as(predict_BAH), predict_BAH
            ),
            mask_BT=mask_BT.scatter(1, anchor_BA, now.counts_BA),
            ahead=1 + now.step,
        )

    def _anchors(self, batch: TrajectoryBatch) -> tuple[Tensor, Tensor]:
        """[B, A] places and whether they count: in training some, else all, that have a state of
        the target before them and a token to predict behind them."""
        able_BT = batch.mask_ahead(1) & (batch.positions_BT > 0)
        length = able_BT.shape[1]
        if not self.training:
            return torch.arange(length, device=able_BT.device).expand_as(able_BT), able_BT
        drawn_BT = torch.rand(able_BT.shape, device=able_BT.device).masked_fill(~able_BT, -1.0)
        drawn_BA, anchor_BA = drawn_BT.topk(-(-length // self.config.spacing), dim=1)
        return anchor_BA, drawn_BA >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksBehind:
    """Where the blocks of some anchors stand, and what they look at."""

    positions_BAP: Tensor
    attend_in: AttendIn


def blocks_behind(
    batch: TrajectoryBatch,
    anchor_BA: Tensor,
    count: int,
    context: Sequence[KeysAndValues],
    *,
    causal: bool,
) -> BlocksBehind:
    """Blocks of `count` places.

    Args:
        context: keys and values of all pairs, layer by layer.
        causal: a place looks at those before it, and at itself; else at all of its block.
    """
    device = anchor_BA.device
    start_BA1 = batch.positions_BT.gather(1, anchor_BA)[..., None]
    # a text's places stand side by side, so it begins where positions are 0
    place_T = torch.arange(batch.tokens_BT.shape[1], device=device)
    sees_BAT = (place_T >= anchor_BA[..., None] - start_BA1) & (place_T < anchor_BA[..., None])
    sees_BCT = sees_BAT.repeat_interleave(count, 1)
    itself_AA = torch.eye(anchor_BA.shape[1], dtype=torch.bool, device=device)
    within_PP = torch.ones(count, count, dtype=torch.bool, device=device)
    own_CC = torch.kron(itself_AA, within_PP.tril() if causal else within_PP)
    sees = torch.cat([sees_BCT, own_CC.expand(len(anchor_BA), -1, -1)], dim=2)[:, None]

    def attend_in(number: int) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[1] // k.shape[1]
            pairs = zip(context[number], (k, v), strict=True)
            keys, values = (torch.cat(pair, dim=2).repeat_interleave(groups, 1) for pair in pairs)
            return F.scaled_dot_product_attention(q, keys, values, sees)

        return attend

    return BlocksBehind(
        positions_BAP=start_BA1 + torch.arange(count, device=device), attend_in=attend_in
    )
