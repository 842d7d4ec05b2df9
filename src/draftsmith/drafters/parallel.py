"""`parallel`: all tokens of a draft in one forward (the family of DFlash, arXiv 2602.06036).

    tokens     x0   x1   x2   x3        the target was fed x0 x1 x2; x3 is the new root
    pairs      f0x1 f1x2 f2x3           W [f ; e(x)]: keys and values only, which stay in the cache
    places                  m1 m2 m3    begin as the last pair and a mask of their own; their laws
                                        are those of x4, x5, x6

f are the target's states. The places of a block look at all pairs and, without a causal mask, at
each other; their keys and values are never kept. In DFlash a block begins as the last token and
masks that are all alike, and learns by attention what is said there: to begin as the last pair, as
EAGLE does, takes far fewer steps (LOG.md, 2026-11-26).

The Markov term, an addition of low rank to the logits by the token before, is all that a law knows
of what was drafted before it. With it or without, it is the law that drafts are drawn from. A block
is always drafted whole, however short the draft may be: its places see each other, and a row's
draft would otherwise depend on how deep its neighbours go.

Training draws anchors from all over the texts. Each is the last known token of a block:

    text      a b c d e f g h        sees:  m1 m2 m3    pairs that end in b, c
    anchors       c     f                   m1 m2 m3    pairs that end in b, c, d, e, f

Shape letters: B rows, A anchors, P places of a block, T time, S width of signals, H hidden, D width
of an attention head, F nodes, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.config import require
from draftsmith.core.attention import attend_fused
from draftsmith.core.cache import Block, lay_out
from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import to_device
from draftsmith.core.types import DraftPrediction, DraftTree, Signals, TrajectoryBatch, TreeShape
from draftsmith.drafters.base import (
    STRUCTURE,
    TRAINING,
    DraftState,
    LossWeights,
    TargetView,
    at_least,
)
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.eagle3 import fused_layers
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.compiled import LayerEngine, unfit_layers
from draftsmith.drafters.hidden.drafter import FeatureDrafter, FeatureState
from draftsmith.drafters.hidden.network import (
    Attend,
    Attention,
    BorrowedHead,
    ConcatLinear,
    RMSNorm,
    SwiGLU,
)
from draftsmith.drafters.tree_growth import Chain, MakesDraws, Reader
from draftsmith.targets import base as targets
from draftsmith.targets.native.bindings import Fusion, Places
from draftsmith.targets.native.engine import Draws, Engine, uneven
from draftsmith.targets.threads import engine_threads

KeysAndValues = tuple[Tensor, Tensor]
AttendIn = Callable[[int], Attend]
"""The attention of a layer, by its number."""


class BlockLayer(nn.Module):
    """A decoder layer with a norm before each part."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, hidden)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class ParallelNetwork(BorrowedHead):
    """Pairs, masks, layers, and what leads from the last of them to the target's head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = ConcatLinear((config.num_states + 1) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.masks = nn.Parameter(torch.randn(config.block_size - 1, hidden))
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        # a norm's weights grow by the learning rate per step, too slowly to reach the scale that
        # the target's head is used to; a matrix does
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.rank = config.markov_rank
        if self.rank:
            self.markov_in = nn.Linear(hidden, self.rank, bias=False)
            size = getattr(config, "draft_vocab_size", None) or config.vocab_size
            self.markov_out = nn.Linear(self.rank, size, bias=False)

    def context(self, pairs_BTH: Tensor, positions_BT: Tensor) -> list[KeysAndValues]:
        """Keys and values of pairs, layer by layer."""
        normed = self.hidden_norm(pairs_BTH)
        cos_sin = self.rotary(positions_BT, normed)
        return [layer.self_attn.keys_and_values(normed, cos_sin) for layer in self._layers]

    def forward(self, last_BAH: Tensor, positions_BAP: Tensor, attend_in: AttendIn) -> Tensor:
        """[B, A, P, H]: states that predict the tokens of blocks, from the last pair before each
        and the positions of their places."""
        x = (last_BAH[:, :, None] + self.masks).flatten(1, 2)
        cos_sin = self.rotary(positions_BAP.flatten(1), x)
        for number, layer in enumerate(self._layers):
            x = layer(x, cos_sin, attend_in(number))
        states: Tensor = self.out(self.norm(x))
        return states.unflatten(1, positions_BAP.shape[1:])

    @property
    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def before(self, embedded: Tensor) -> Tensor:
        """[.., R]: what the Markov term reads of the token before."""
        out: Tensor = self.markov_in(embedded)
        return out

    def added(self, before: Tensor) -> Tensor:
        """[.., Vd]: what the Markov term adds to the logits."""
        out: Tensor = self.markov_out(before)
        return out

    def own_logits(self, predict: Tensor, target: TargetView) -> Tensor:
        """`predict`: states, with a Markov term what that reads beside them."""
        if not self.rank:
            return super().own_logits(predict, target)
        states, before = predict.split((predict.shape[-1] - self.rank, self.rank), dim=-1)
        return super().own_logits(states, target) + self.added(before)

    def state_logits(self, states: Tensor, target: TargetView) -> Tensor:
        """[.., Vd]: without the Markov term."""
        return super().own_logits(states, target)


_PLACES = 64
"""The most places of a block in the compiled engine (`CHUNK` of engine.cpp): they pass a layer
together."""


class BlockEngine(LayerEngine):
    """Runs pairs and blocks (a `DraftEngine`)."""

    def __init__(
        self, network: ParallelNetwork, target: TargetView, engine: Engine, form: str
    ) -> None:
        super().__init__(network, target, engine, form)
        hidden, self._count = network.config.hidden_size, len(network.masks)
        # the engine's pairs are [e ; f]
        fc = nn.Linear(network.fc.in_features, hidden, bias=False, device="meta")
        fc.weight = nn.Parameter(network.fc.weight.detach().roll(hidden, dims=1), False)
        places = Places(
            count=self._count,
            masks=self._vector(network.masks),
            out=self._packed([network.out]),
        )
        if network.rank:
            places.before = self._packed([network.markov_in])
            places.added = self._packed([network.markov_out])
        self._open_layers(
            [self._layer(layer) for layer in network.layers],
            network.norm,
            fusion=Fusion(fc=self._packed([fc]), norm=self._norm(network.hidden_norm)),
            places=places,
        )

    @classmethod
    def why_not(cls, network: ParallelNetwork, form: str) -> str | None:
        if len(network.masks) > _PLACES:
            return f"its blocks have {len(network.masks)} drafts, more than {_PLACES}"
        return unfit_layers(network, form) or uneven(form, {"Markov term": network.rank})

    def keep(self, tokens_BP: np.ndarray, block: Block, feature_BPS: Tensor) -> None:
        """Write keys and values of these pairs to the block's cache."""
        call, held = self._call(tokens_BP, block, 1, feature_BPS)
        if not self._lib.c.ds_block(self._at, ctypes.byref(call), None):
            raise self._unknown(tokens_BP)
        del held

    def draft(
        self,
        tokens_BP: np.ndarray,
        block: Block,
        feature_BPS: Tensor,
        *,
        limit: int | None,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """Keep and commit these pairs, and draft a block behind the last of each row.

        Args:
            limit: the length of the context; positions beyond it stand still at its end.
            depth_B: how many tokens are chosen in each row; None: none.
            draws, confidence: see `Runner.chain`.

        Returns:
            (logits [B, P, Vd], of the places that are chosen from with what the tokens before add;
            [B, S] rows of the head that were chosen; [B] tokens of each row).
        """
        cache, rows, count = block.cache, len(tokens_BP), self._count
        cache.commit(block.pending_B)
        depth_BP = np.arange(count)[None].repeat(rows, 0)
        staged = cache.stage(depth_BP, np.ones((rows, count, count), dtype=bool))
        if limit is not None:
            block.stop_at(limit - 1)
            staged.stop_at(limit - 1)
        call, held = self._call(tokens_BP, block, 1, feature_BPS, room=count)
        logits_BPV = torch.zeros((rows, count, self._head_rows))
        call.logits = logits_BPV.data_ptr()
        count_B = np.zeros(rows, dtype=np.int64) if depth_B is None else depth_B.astype(np.int64)
        chosen_BN = torch.zeros((rows, int(count_B.max())), dtype=torch.int64)
        chain, also_held = self._chain(
            staged, chosen_BN, count_B, self.token_of_D, draws, confidence
        )
        if not self._lib.c.ds_block(self._at, ctypes.byref(call), ctypes.byref(chain)):
            raise self._unknown(tokens_BP)
        del held, also_held
        return logits_BPV[..., : self.model.head.rows], chosen_BN, count_B

    def added(self, tokens_BF: Tensor) -> Tensor:
        """[B, F, Vd]: what the Markov term adds behind these tokens."""
        tokens_BF = tokens_BF.contiguous()
        out_BFV = torch.empty((*tokens_BF.shape, self._head_rows))
        threads = engine_threads()
        if not self._lib.c.ds_added(
            self._at, tokens_BF.data_ptr(), tokens_BF.numel(), threads, out_BFV.data_ptr()
        ):
            raise self._unknown(tokens_BF)
        return out_BFV[..., : self.model.head.rows]


class BlockReader:
    """Drafts a block at once; a tree's levels then read the laws of its places (a `Reader`).

    Args:
        count: places of a block.
        engine: runs the network; None: PyTorch does.
    """

    def __init__(
        self,
        network: ParallelNetwork,
        target: TargetView,
        state: FeatureState,
        count: int,
        engine: BlockEngine | None = None,
    ) -> None:
        self._network, self._target, self._state, self._count = network, target, state, count
        self._engine = engine
        ids_D = network.target_ids if engine is None else engine.token_of_D
        self.columns = Columns(target.vocab_size, ids_D)
        self._own_BPD = torch.empty(0)
        self._depth = 0

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """See `Reader`."""
        engine = self._engine
        if engine is None:
            return None
        tokens_BP, feature_BPS, block = self._pending()
        logits_BPD, chosen_BN, count_B = engine.draft(
            tokens_BP,
            block,
            feature_BPS,
            limit=self._target.max_length,
            depth_B=depth_B,
            draws=None if draws is None else draws(int(depth_B.max())),
            confidence=confidence,
        )
        made = max(int(count_B.max()), 1)
        return Chain(
            tokens_BN=self.columns.tokens(chosen_BN[:, :made]),
            logits_BND=None if draws is None else logits_BPD[:, :made],
            count_B=count_B,
        )

    def root(self) -> Tensor:
        tokens_BP, feature_BPS, block = self._pending()
        if self._engine is not None:
            self._own_BPD, _, _ = self._engine.draft(
                tokens_BP, block, feature_BPS, limit=self._target.max_length
            )
        else:
            pairs_BPH = self._keep(tokens_BP, feature_BPS, block)
            self._state.cache.commit(block.pending_B)
            states_BPH = self._read_block(pairs_BPH[:, -1])
            self._own_BPD = self._network.state_logits(states_BPH, self._target)
        return self._laws(torch.tensor([row[-1:] for row in self._state.known]))[:, 0]

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        self._depth += 1
        return self._laws(tokens_BF)

    def _laws(self, before_BF: Tensor) -> Tensor:
        """[B, F, D]: of this depth, behind each of these tokens."""
        network = self._network
        own_BFD = self._own_BPD[:, self._depth, None]
        if network.rank and self._engine is not None:
            own_BFD = own_BFD + self._engine.added(before_BF)
        elif network.rank:
            embedded = self._target.embed(to_device(before_BF, own_BFD.device))
            own_BFD = own_BFD + network.added(network.before(embedded))
        return own_BFD

    def _pending(self) -> tuple[np.ndarray, Tensor, Block]:
        """The last settled pairs that are not kept yet: tokens, states, where they are staged; what
        lies before them is kept."""
        state = self._state
        cache, pairs_B = state.cache, state.features.lengths_B
        while True:
            # the last pair is read again where nothing is new: places begin as it
            start_B = np.minimum(cache.lengths_B, np.maximum(pairs_B - 1, 0))
            cache.rewind(start_B)
            end_B = np.minimum(pairs_B, start_B + targets.CHUNK)
            ends = zip(state.known, start_B.tolist(), end_B.tolist(), strict=True)
            tokens_BP, block = lay_out(
                cache, [row[first + 1 : end + 1] for row, first, end in ends]
            )
            feature_BPS = state.features.right_aligned(start_B, end_B)
            if (end_B == pairs_B).all():
                return tokens_BP, feature_BPS, block
            if self._engine is not None:
                self._engine.keep(tokens_BP, block, feature_BPS)
            else:
                self._keep(tokens_BP, feature_BPS, block)
            cache.commit(block.pending_B)

    def _keep(self, tokens_BP: np.ndarray, feature_BPS: Tensor, block: Block) -> Tensor:
        """[B, P, H]: these pairs, whose keys and values are written."""
        network, device = self._network, self._target.device
        embedded_BPH = self._target.embed(to_device(torch.from_numpy(tokens_BP), device))
        pairs_BPH: Tensor = network.fc(feature_BPS, embedded_BPH)
        for number, (keys, values) in enumerate(
            network.context(pairs_BPH, block.positions(device))
        ):
            block.cache.extend(block, number, keys, values)
        return pairs_BPH

    def _read_block(self, last_BH: Tensor) -> Tensor:
        """[B, P, H]. What it stages is the caller's to roll back."""
        target, cache = self._target, self._state.cache
        rows, count = len(last_BH), self._count
        depth_BP = np.arange(count)[None].repeat(rows, 0)
        block = cache.stage(depth_BP, np.ones((rows, count, count), dtype=bool))
        if target.max_length is not None:
            block.stop_at(target.max_length - 1)

        def attend_in(number: int) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys, values = cache.extend(block, number, k, v)
                mask = block.mask(None, q.dtype)
                return attend_fused(q, keys, values, mask, scale=q.shape[-1] ** -0.5)

            return attend

        positions_BAP = block.positions(target.device)[:, None]
        states: Tensor = self._network(last_BH[:, None], positions_BAP, attend_in)
        return states[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """All blocks of a training batch; the next step says what predicts place `step` + 1."""

    step: int
    states_BAPH: Tensor
    anchor_BA: Tensor
    """Places in the batch, no two alike."""
    counts_BA: Tensor
    """Whether there is such an anchor: a row may have fewer."""


GROUP = 64
"""Anchors whose blocks are computed together: attention looks at the keys of all of them."""


class Parallel(FeatureDrafter):
    """A block of drafts in one forward."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        block: int = field(default=8, metadata=STRUCTURE)
        """Training: tokens of a block; the first is the last known one, the others are drafts."""
        layers: int = field(default=2, metadata=STRUCTURE)
        """Training: decoder layers."""
        states: Literal["last", "layers"] = field(default="last", metadata=STRUCTURE)
        """Training: what is read of the target, its last states or those of the three layers that
        eagle3 reads."""
        markov: int = field(default=128, metadata=STRUCTURE)
        """Training: rank of an addition to the logits by the token before; 0: none."""
        spacing: int = field(default=4, metadata=TRAINING)
        """Training: a block begins at one of so many places, drawn anew in every step."""
        decay: float = field(default=0.8, metadata=TRAINING)
        """Training: each place of a block counts this much of the one before."""
        noise: float = field(default=0.0, metadata=TRAINING)
        """Training: none, as published."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(2, block=self.block, most=MOST_NODES)
            at_least(1, layers=self.layers, most=_MOST_LAYERS)
            at_least(1, spacing=self.spacing)
            at_least(0, markov=self.markov, most=_MOST_RANK)
            at_least(0, decay=self.decay)
            require(
                self.length < self.block,
                f"drafter option length={self.length}: a block of {self.block} drafts at most "
                f"{self.block - 1} tokens; ask for no more",
            )

    config: Config
    network_class = ParallelNetwork
    engine_class = BlockEngine
    measures = ("num_hidden_layers", "block_size", "num_states", "markov_rank")
    eval_steps = None
    loss_weights = LossWeights()

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.longest = self.config.block - 1
        if not self.config.length:
            self.default_shape = TreeShape.chain(self.longest)

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer, own = super().network_config(target), self.config
        layer.num_hidden_layers, layer.block_size = own.layers, own.block
        layer.num_states, layer.markov_rank = self._num_states, own.markov
        return layer

    @property
    def _num_states(self) -> int:
        return 1 if self.config.states == "last" else 3

    def _signals_for(self, target: TargetView) -> Signals:
        if self.config.states == "last":
            return super()._signals_for(target)
        return Signals(layers=fused_layers(int(target.config.num_hidden_layers)))

    def _signal_width(self) -> int:
        return self._num_states * super()._signal_width()

    # ------------------------------------------------------------------ drafting

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        return super().propose(state, shape.clip(self.num_steps), depth_B, sampler, noise)

    def _reader(self, state: FeatureState) -> Reader:
        return BlockReader(
            self.network, self.target, state, self.num_steps, self._engine_of_request
        )

    # ------------------------------------------------------------------ training

    def forward(
        self, batch: TrajectoryBatch, carry: Blocks | None
    ) -> tuple[DraftPrediction, Blocks]:
        now = self._blocks(batch) if carry is None else carry
        network, step, anchor_BA = self.network, now.step, now.anchor_BA
        predict_BAH = now.states_BAPH[:, :, step]
        if network.rank:
            before_BA = batch.tokens_ahead(step).gather(1, anchor_BA)
            with torch.no_grad():
                embedded_BAH = self.target.embed(before_BA)
            predict_BAH = torch.cat([predict_BAH, network.before(embedded_BAH)], dim=-1)
        rows, width = predict_BAH.shape[0], predict_BAH.shape[2]
        hidden_BTH = predict_BAH.new_zeros(rows, batch.tokens_BT.shape[1], width)
        mask_BT = torch.zeros_like(batch.tokens_BT, dtype=torch.bool)
        prediction = DraftPrediction(
            hidden_BTH=hidden_BTH.scatter(
                1, anchor_BA[..., None].expand_as(predict_BAH), predict_BAH
            ),
            mask_BT=mask_BT.scatter(1, anchor_BA, now.counts_BA),
            ahead=1 + step,
            weight=self.config.decay**step,
            narrow=self._narrow_head(),
        )
        return prediction, replace(now, step=step + 1)

    def _blocks(self, batch: TrajectoryBatch) -> Blocks:
        signals_BTS = unroll.begin(batch, self.config.noise if self.training else 0.0).feature_BTH
        with torch.no_grad():
            embedded_BTH = self.target.embed(batch.tokens_ahead(1))
        pairs_BTH = self.network.fc(signals_BTS, embedded_BTH)
        context = self.network.context(pairs_BTH, batch.positions_BT)
        anchor_BA, counts_BA = self._anchors(batch)
        states = [
            self._read(batch, pairs_BTH, context, some) for some in anchor_BA.split(GROUP, dim=1)
        ]
        return Blocks(
            step=0, states_BAPH=torch.cat(states, dim=1), anchor_BA=anchor_BA, counts_BA=counts_BA
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

    def _read(
        self,
        batch: TrajectoryBatch,
        pairs_BTH: Tensor,
        context: list[KeysAndValues],
        anchor_BA: Tensor,
    ) -> Tensor:
        """[B, A, P, H]: the blocks of these anchors."""
        count, device = self.num_steps, anchor_BA.device
        start_BA1 = batch.positions_BT.gather(1, anchor_BA)[..., None]
        positions_BAP = start_BA1 + torch.arange(count, device=device)
        # the pair that ends in an anchor stands one place before it
        last_BA1 = (anchor_BA - 1).clamp(min=0)[..., None]
        last_BAH = pairs_BTH.gather(1, last_BA1.expand(-1, -1, pairs_BTH.shape[2]))
        # a text's places stand side by side, so it begins where positions are 0
        place_T = torch.arange(batch.tokens_BT.shape[1], device=device)
        sees_BAT = (place_T >= anchor_BA[..., None] - start_BA1) & (place_T < anchor_BA[..., None])
        itself_AA = torch.eye(anchor_BA.shape[1], dtype=torch.bool, device=device)
        own_BAC = itself_AA.repeat_interleave(count, 1).expand(len(anchor_BA), -1, -1)
        sees = torch.cat([sees_BAT, own_BAC], dim=2).repeat_interleave(count, 1)[:, None]

        def attend_in(number: int) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                groups = q.shape[1] // k.shape[1]
                pairs = zip(context[number], (k, v), strict=True)
                keys, values = (
                    torch.cat(pair, dim=2).repeat_interleave(groups, 1) for pair in pairs
                )
                return F.scaled_dot_product_attention(q, keys, values, sees)

            return attend

        states: Tensor = self.network(last_BAH, positions_BAP, attend_in)
        return states


_MOST_LAYERS, _MOST_RANK = 16, 4096
DRAFTER = Parallel
