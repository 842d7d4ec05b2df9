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

How such a drafter learns: `hidden/blocks.py`.

Shape letters: B rows, A anchors, P places of a block, T time, S width of signals, H hidden, D width
of an attention head, F nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.attention import attend_fused
from draftsmith.core.cache import Block, KVCache, lay_out, right_aligned
from draftsmith.core.transfer import to_device
from draftsmith.core.types import DraftPrediction, Signals, TrajectoryBatch
from draftsmith.drafters.base import ADDED, STRUCTURE, TargetView, at_least
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.blocks import (
    BlockDrafter,
    BlockReader,
    Blocks,
    ConfidenceHead,
    KeysAndValues,
    blocks_behind,
)
from draftsmith.drafters.hidden.compiled import LayerEngine, unfit_layers
from draftsmith.drafters.hidden.drafter import FeatureState
from draftsmith.drafters.hidden.fused import fused_layers
from draftsmith.drafters.hidden.network import (
    Attend,
    AttendIn,
    BorrowedHead,
    ConcatLinear,
    PlainLayer,
    RMSNorm,
)
from draftsmith.drafters.tree_growth import Reader
from draftsmith.targets.native.bindings import Fusion, Places
from draftsmith.targets.native.engine import Draws, Engine, uneven
from draftsmith.targets.threads import engine_threads


class ParallelNetwork(BorrowedHead):
    """Pairs, masks, layers, and what leads from the last of them to the target's head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = ConcatLinear((config.num_states + 1) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.masks = nn.Parameter(torch.randn(config.block_size - 1, hidden))
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        # a norm's weights grow by the learning rate per step, too slowly to reach the scale that
        # the target's head is used to; a matrix does
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.rank = config.markov_rank
        if self.rank:
            self.markov_in = nn.Linear(hidden, self.rank, bias=False)
            size = getattr(config, "draft_vocab_size", None) or config.vocab_size
            self.markov_out = nn.Linear(self.rank, size, bias=False)
        # the last: other first weights are those of a network without it
        self.confidence = ConfidenceHead(hidden) if config.confidence_head else None

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
    def _layers(self) -> list[PlainLayer]:
        return [layer for layer in self.layers if isinstance(layer, PlainLayer)]

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


class ParallelEngine(LayerEngine):
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

    def draft(
        self,
        cache: KVCache,
        tokens_BP: np.ndarray,
        counts_B: np.ndarray,
        feature_BPS: Tensor,
        *,
        limit: int | None,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """Keep and commit these pairs, see `right_aligned`, and draft a block behind the last of
        each row; see `LayerEngine._block`. `limit`: the length of the context; positions beyond it
        stand still at its end."""
        count = self._count
        called = self._run(cache, tokens_BP, counts_B, feature_BPS, limit, room=count)
        every = all(counts_B.tolist())
        found = self._block(tokens_BP, called, count, every, depth_B, draws, confidence)
        cache.commit(counts_B)
        return found

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


class ParallelReader(BlockReader[ParallelEngine]):
    """Reads pairs, and places behind the last of them."""

    def __init__(
        self,
        network: ParallelNetwork,
        target: TargetView,
        state: FeatureState,
        count: int,
        engine: ParallelEngine | None = None,
    ) -> None:
        super().__init__(network, target, state, count, engine)
        self._network = network
        self._states_BPH = self._before_BF = torch.empty(0)

    def believed(self) -> Tensor:
        """[B] see `ChildSelection.believed`, by the confidence head."""
        head = self._network.confidence
        assert head is not None
        states_BH = self._states_BPH[:, self._depth]
        before_B = to_device(self._before_BF[:, 0], states_BH.device)
        logits_B: Tensor = head(states_BH, self._target.embed(before_B))
        return logits_B.double().sigmoid()

    def _laws(self, before_BF: Tensor) -> Tensor:
        self._before_BF = before_BF
        return super()._laws(before_BF)

    def _draft(
        self,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        assert self._engine is not None
        pending, feature_BPS = self._pending()
        return self._engine.draft(
            self._state.cache,
            *right_aligned(pending),
            feature_BPS,
            limit=self._target.max_length,
            depth_B=depth_B,
            draws=draws,
            confidence=confidence,
        )

    def _read(self) -> Tensor:
        pending, feature_BPS = self._pending()
        cache = self._state.cache
        tokens_BP, block = lay_out(cache, pending)
        pairs_BPH = self._keep(tokens_BP, feature_BPS, block)
        cache.commit(block.pending_B)
        self._states_BPH = self._read_block(pairs_BPH[:, -1])
        return self._network.state_logits(self._states_BPH, self._target)

    def _added(self, before_BF: Tensor) -> Tensor | None:
        network = self._network
        if not network.rank:
            return None
        if self._engine is not None:
            return self._engine.added(before_BF)
        embedded = self._target.embed(to_device(before_BF, self._own_BPD.device))
        return network.added(network.before(embedded))

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


class Parallel(BlockDrafter):
    """A block of drafts in one forward."""

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockDrafter.Config):
        states: Literal["last", "layers"] = field(default="last", metadata=STRUCTURE)
        """Training: what is read of the target, its last states or those of the three layers that
        eagle3 reads."""
        markov: int = field(default=128, metadata=STRUCTURE)
        """Training: rank of an addition to the logits by the token before; 0: none."""
        confidence_head: bool = field(default=False, metadata=STRUCTURE | ADDED)
        """Training: a small head learns how probable it is that the draft of a place is accepted;
        `confidence` then goes by it, not by the laws."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, markov=self.markov, most=_MOST_RANK)

    config: Config
    network_class = ParallelNetwork
    engine_class = ParallelEngine
    measures = (*BlockDrafter.measures, "num_states", "markov_rank", "confidence_head")

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer = super().network_config(target)
        layer.num_states, layer.markov_rank = self._num_states, self.config.markov
        layer.confidence_head = self.config.confidence_head
        return layer

    def _unfit(self) -> str | None:
        asked = self.config.confidence_head and self.config.confidence
        return "its confidence head, which ends its drafts, is not written there" if asked else None

    def _believed_by(self, reader: Reader) -> Callable[[], Tensor] | None:
        assert isinstance(reader, ParallelReader)
        return reader.believed if self.config.confidence_head else None

    @property
    def learns_acceptance(self) -> bool:
        return self.config.confidence_head

    @property
    def _num_states(self) -> int:
        return 1 if self.config.states == "last" else 3

    def _signals_for(self, target: TargetView) -> Signals:
        if self.config.states == "last":
            return super()._signals_for(target)
        return Signals(layers=fused_layers(int(target.config.num_hidden_layers)))

    def _signal_width(self) -> int:
        return self._num_states * super()._signal_width()

    def _reader(self, state: FeatureState, depth: int) -> Reader:
        """A block is read whole, however short the draft may be: its places see each other."""
        return ParallelReader(
            self.network, self.target, state, self.num_steps, self._engine_of_request
        )

    # ------------------------------------------------------------------ training

    def _prediction(self, batch: TrajectoryBatch, now: Blocks) -> DraftPrediction:
        network, states_BAH = self.network, now.states_BAPH[:, :, now.step]
        if not network.rank and network.confidence is None:
            return self._at_anchors(batch, now, states_BAH)
        before_BA = batch.tokens_ahead(now.step).gather(1, now.anchor_BA)
        with torch.no_grad():
            embedded_BAH = self.target.embed(before_BA)
        predict_BAH = states_BAH
        if network.rank:
            predict_BAH = torch.cat([states_BAH, network.before(embedded_BAH)], dim=-1)
        prediction = self._at_anchors(batch, now, predict_BAH)
        if network.confidence is None:
            return prediction
        logits_BA = network.confidence(states_BAH, embedded_BAH)
        logits_BT = logits_BA.new_zeros(batch.tokens_BT.shape).scatter(1, now.anchor_BA, logits_BA)
        return replace(prediction, confidence_BT=logits_BT)

    def _blocks(self, batch: TrajectoryBatch) -> Blocks:
        signals_BTS = unroll.begin(batch, self.config.noise if self.training else 0.0).feature_BTH
        with torch.no_grad():
            embedded_BTH = self.target.embed(batch.tokens_ahead(1))
        pairs_BTH = self.network.fc(signals_BTS, embedded_BTH)
        context = self.network.context(pairs_BTH, batch.positions_BT)
        anchor_BA, counts_BA = self._anchors(batch)
        states_BAPH = self._group_by_group(
            lambda some_BA: self._read(batch, pairs_BTH, context, some_BA), anchor_BA
        )
        return Blocks(step=0, states_BAPH=states_BAPH, anchor_BA=anchor_BA, counts_BA=counts_BA)

    def _read(
        self,
        batch: TrajectoryBatch,
        pairs_BTH: Tensor,
        context: Sequence[KeysAndValues],
        anchor_BA: Tensor,
    ) -> Tensor:
        """[B, A, P, H]: the blocks of these anchors."""
        blocks = blocks_behind(batch, anchor_BA, self.num_steps, context, causal=False)
        # the pair that ends in an anchor stands one place before it
        last_BA1 = (anchor_BA - 1).clamp(min=0)[..., None]
        last_BAH = pairs_BTH.gather(1, last_BA1.expand(-1, -1, pairs_BTH.shape[2]))
        states: Tensor = self.network(last_BAH, blocks.positions_BAP, blocks.attend_in)
        return states


_MOST_RANK = 4096
DRAFTER = Parallel
