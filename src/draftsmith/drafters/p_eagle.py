"""`p_eagle`: EAGLE-3's network with masked inputs, all depths in one forward (P-EAGLE, arXiv
2602.01469).

    tokens     x0   x1   x2   x3        the target was fed x0 x1 x2; x3 is the new root
    pairs      f0x1 f1x2 f2x3           f_t = fc [h_low ; h_middle ; h_high]; the last one's law is
                                        that of x4
    places                    hm   hm   an unknown state h and an unknown token m, the same at all
                                        places; their laws are those of x5, x6

Attention is causal: a place looks at all pairs, the places before it and itself. Keys and values of
pairs stay in the cache, those of places are never kept. Only the first law knows the last token by
its pair, and no law knows what was drafted before it; drafts are drawn from these laws, and these
laws are reported.

Training reads all pairs of a text once, which gives the first law everywhere, and the places behind
drawn anchors (`hidden/blocks.py`).

Shape letters: B rows, A anchors, P pairs or places, T time, S width of signals, H hidden, D draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.attention import attend_fused
from draftsmith.core.cache import Block, KVCache, lay_out, right_aligned
from draftsmith.core.transfer import to_device
from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import TargetView
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.blocks import (
    BlockDrafter,
    BlockReader,
    Blocks,
    KeysAndValues,
    blocks_behind,
)
from draftsmith.drafters.hidden.compiled import PairEngine
from draftsmith.drafters.hidden.drafter import FeatureState
from draftsmith.drafters.hidden.fused import FusedDrafter, FusedNetwork, WideLayer
from draftsmith.drafters.hidden.network import Attend, AttendIn, Compilable, PlainLayer
from draftsmith.drafters.tree_growth import Reader
from draftsmith.targets.native.engine import Draws


class PEagleNetwork(FusedNetwork):
    """Fusion, a wide layer and further ones, norm and head, and what stands for the unknown."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        # of an embedding's size: norms follow, and a small one turns sooner
        self.mask_embedding = nn.Parameter(0.02 * torch.randn(hidden))
        self.mask_hidden = nn.Parameter(torch.randn(3 * hidden))

    def _add_layers(self, config: LlamaConfig) -> None:
        others = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleList([WideLayer(config), *(PlainLayer(config) for _ in others)])

    def compilable(self) -> Compilable:
        first = self.layers[0]
        assert isinstance(first, WideLayer)
        return Compilable(
            layers=tuple(self.layers),
            fusion=first.parts(self.fc, unknown=self.mask_embedding),
            norm=self.norm,
            head=self.lm_head,
        )

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend_in: AttendIn
    ) -> Tensor:
        """[B, T, H]: states to predict from."""
        x = self.fc(feature_BTS)
        cos_sin = self.rotary(positions_BT, x)
        first, *others = self.layers
        x = first(embedded_BTH, x, cos_sin, attend_in(0))
        for number, layer in enumerate(others, 1):
            x = layer(x, cos_sin, attend_in(number))
        return x

    def embedded_places(self, rows: int, count: int) -> Tensor:
        """[rows, count, H] of unknown tokens."""
        return self.mask_embedding.expand(rows, count, -1)

    def place_features(self, rows: int, count: int) -> Tensor:
        """[rows, count, S] of unknown states."""
        return self.mask_hidden.expand(rows, count, -1)


class PEagleEngine(PairEngine):
    """Runs pairs, and unknown ones behind them (a `DraftEngine`)."""

    @property
    def unknown(self) -> int:
        """The token that is not known."""
        return int(self.model.embedding.rows)

    def draft(
        self,
        cache: KVCache,
        tokens_BP: np.ndarray,
        counts_B: np.ndarray,
        feature_BPS: Tensor,
        places: int,
        *,
        limit: int | None,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """Read these pairs, see `right_aligned`, the last `places` of which are unknown, and commit
        the others; see `_block`. `limit`: the length of the context; positions beyond it stand
        still at its end."""
        count = places + 1
        called = self._run(cache, tokens_BP, counts_B, feature_BPS, limit, keep=count)
        every = min(counts_B.tolist()) > places
        found = self._block(tokens_BP, called, count, every, depth_B, draws, confidence)
        cache.commit(counts_B - places)
        return found


class PEagleReader(BlockReader[PEagleEngine]):
    """Reads pairs and the places behind them in one forward."""

    def __init__(
        self,
        network: PEagleNetwork,
        target: TargetView,
        state: FeatureState,
        count: int,
        engine: PEagleEngine | None = None,
    ) -> None:
        """`count`: laws, the first of which is the last pair's."""
        super().__init__(network, target, state, count, engine)
        self._network = network

    def _draft(
        self,
        depth_B: np.ndarray | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        assert self._engine is not None
        pending, feature_BPS = self._with_places()
        unknown = [self._engine.unknown] * (self._count - 1)
        return self._engine.draft(
            self._state.cache,
            *right_aligned([[*row, *unknown] for row in pending]),
            feature_BPS,
            len(unknown),
            limit=self._target.max_length,
            depth_B=depth_B,
            draws=draws,
            confidence=confidence,
        )

    def _read(self) -> Tensor:
        pending, feature_BPS = self._with_places()
        rows, places = len(pending), self._count - 1
        tokens_BP, block = lay_out(
            self._state.cache,
            pending,
            np.zeros((rows, places), dtype=np.int64),
            np.arange(-1, places - 1)[None].repeat(rows, 0),
        )
        if self._target.max_length is not None:
            block.stop_at(self._target.max_length - 1)
        states_BPH = self._states(tokens_BP, feature_BPS, block, places)
        self._state.cache.commit(np.array([len(row) for row in pending]))
        return self._network.own_logits(states_BPH[:, -self._count :], self._target)

    def _with_places(self) -> tuple[list[list[int]], Tensor]:
        """Tokens of what is still to be kept; its states, and those of the places behind it."""
        pending, feature_BPS = self._pending()
        behind = self._network.place_features(len(pending), self._count - 1)
        return pending, torch.cat([feature_BPS, behind.to(feature_BPS.dtype)], dim=1)

    def _keep(self, tokens_BP: np.ndarray, feature_BPS: Tensor, block: Block) -> None:
        self._states(tokens_BP, feature_BPS, block, 0)

    def _states(
        self, tokens_BP: np.ndarray, feature_BPS: Tensor, block: Block, places: int
    ) -> Tensor:
        """[B, P, H], `places` unknown pairs at the end."""
        network, cache, device = self._network, block.cache, self._target.device
        rows, width = tokens_BP.shape
        known_BP = torch.from_numpy(tokens_BP[:, : width - places])
        embedded_BPH = self._target.embed(to_device(known_BP, device))
        embedded_BPH = torch.cat([embedded_BPH, network.embedded_places(rows, places)], dim=1)

        def attend_in(number: int) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys, values = cache.extend(block, number, k, v)
                mask = block.mask(None, q.dtype)
                return attend_fused(q, keys, values, mask, scale=q.shape[-1] ** -0.5)

            return attend

        states: Tensor = network(embedded_BPH, feature_BPS, block.positions(device), attend_in)
        return states


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksOfPairs(Blocks):
    """The places' states are those of the second law and further ones."""

    pairs_BTH: Tensor
    """The states of all pairs, which give the first."""


class PEagle(FusedDrafter, BlockDrafter):
    """P-EAGLE."""

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockDrafter.Config):
        """Those of drafters of blocks."""

    config: Config
    network_class = PEagleNetwork
    engine_class = PEagleEngine

    def _reader(self, state: FeatureState, depth: int) -> Reader:
        return PEagleReader(self.network, self.target, state, depth, self._engine_of_request)

    # ------------------------------------------------------------------ training

    def _prediction(self, batch: TrajectoryBatch, now: Blocks) -> DraftPrediction:
        if now.step:
            return self._at_anchors(batch, now, now.states_BAPH[:, :, now.step - 1])
        assert isinstance(now, BlocksOfPairs)
        # the pair that ends in a token stands one place before it
        return DraftPrediction(
            hidden_BTH=F.pad(now.pairs_BTH[:, :-1], (0, 0, 1, 0)),
            mask_BT=batch.positions_BT > 0,
            ahead=1,
        )

    def _blocks(self, batch: TrajectoryBatch) -> Blocks:
        signals_BTS = unroll.begin(batch, self.config.noise if self.training else 0.0).feature_BTH
        with torch.no_grad():
            embedded_BTH = self.target.embed(batch.tokens_ahead(1))
        context: list[KeysAndValues] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            context.append((k, v))
            keys, values = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
            scale = q.shape[-1] ** -0.5
            return unroll.attend_rollout(q, keys, values, (), (), batch.documents_BT, scale=scale)

        pairs_BTH = self.network(
            embedded_BTH, signals_BTS, batch.positions_BT, lambda number: attend
        )
        anchor_BA, counts_BA = self._anchors(batch)
        states_BAPH = self._group_by_group(
            lambda some_BA: self._read(batch, context, some_BA), anchor_BA
        )
        return BlocksOfPairs(
            step=0,
            pairs_BTH=pairs_BTH,
            states_BAPH=states_BAPH,
            anchor_BA=anchor_BA,
            counts_BA=counts_BA,
        )

    def _read(
        self, batch: TrajectoryBatch, context: list[KeysAndValues], anchor_BA: Tensor
    ) -> Tensor:
        """[B, A, P, H]: the places behind these anchors."""
        network, (rows, anchors), places = self.network, anchor_BA.shape, self.num_steps - 1
        blocks = blocks_behind(batch, anchor_BA, places, context, causal=True)
        states: Any = network(
            network.embedded_places(rows, anchors * places),
            network.place_features(rows, anchors * places),
            blocks.positions_BAP.flatten(1),
            blocks.attend_in,
        )
        out: Tensor = states.unflatten(1, (anchors, places))
        return out


DRAFTER = PEagle
