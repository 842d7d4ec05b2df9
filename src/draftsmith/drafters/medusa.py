"""`medusa`: heads on the target's last state, one per place ahead (Medusa, arXiv 2401.10774).

    f_t -> head 0: x_{t+2}    head 1: x_{t+3}    ...      (the target's own head predicts x_{t+1})

Head k is a residual block, x + silu(W x + b), `layers` of them, and a linear layer of its own. The
blocks start as the identity and the linear layers as the target's head, so that every head begins
as the target's own law. Heads do not see what the others drafted: a tree of their best tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.config import require
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler, largest
from draftsmith.core.transfer import to_device
from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    NarrowHead,
    RequestBatch,
    TrajectoryBatch,
    TreeShape,
)
from draftsmith.drafters.base import (
    STRUCTURE,
    TRAINING,
    Accepted,
    DraftState,
    TargetView,
    TextState,
    at_least,
)
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.hidden.checkpoint import D2T, MEDUSA, T2D
from draftsmith.drafters.hidden.drafter import TrainedDrafter
from draftsmith.drafters.hidden.network import target_ids
from draftsmith.drafters.tree_growth import Chain, ChildSelection, MakesDraws, grow
from draftsmith.errors import BackendError
from draftsmith.targets.native.bindings import Matrix
from draftsmith.targets.native.engine import Engine, Matrices, uneven
from draftsmith.targets.native.weights import LANES
from draftsmith.targets.threads import engine_threads


class ResidualBlock(nn.Module):
    """x + silu(W x + b), W and b zero at first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.silu(self.linear(x))
        return out


class Heads(nn.ModuleList):
    """K heads; the names are those of the released checkpoints (`k.i.linear.weight`, `k.n.weight`
    behind n blocks), and `d2t` as EAGLE-3's."""

    d2t: Tensor | None
    """[Vd] int64: a draft id's distance to the target's id; None: it knows all."""

    def __init__(self, count: int, layers: int, weight_VH: Tensor, own: int) -> None:
        """`layers`: residual blocks per head; `weight_VH`: the target's head; `own`: tokens that
        the heads know."""
        vocab, hidden = weight_VH.shape
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(hidden) for _ in range(layers)),
                nn.Linear(hidden, own, bias=False),
            )
            for _ in range(count)
        )
        self.layers, self.vocab, self.hidden = layers, vocab, hidden
        self.register_buffer("d2t", torch.zeros(own, dtype=torch.long) if own < vocab else None)
        self.begin_as(weight_VH[:own])

    def begin_as(self, weight_DH: Tensor) -> None:
        """Let the linear layers be these rows of the target's head."""
        for k in range(len(self)):
            last = self._head(k)[-1]
            assert isinstance(last, nn.Linear)
            last.weight.data.copy_(weight_DH)

    @property
    def target_ids(self) -> Tensor | None:
        """[Vd]: the target's id of each draft id, upwards; None: they know all tokens."""
        return None if self.d2t is None else target_ids(self.d2t)

    @property
    def columns(self) -> Columns:
        """The tokens that their linear layers give logits of."""
        return Columns(self.vocab, self.target_ids)

    def states(self, k: int, feature: Tensor) -> Tensor:
        """[.., H]: behind the residual blocks of head k."""
        out: Tensor = self._head(k)[:-1](feature)
        return out

    def logits(self, k: int, states: Tensor) -> Tensor:
        """[.., V]: those of head k over the target's vocabulary."""
        return self.columns.widened(self.own_logits(k, states))

    def own_logits(self, k: int, states: Tensor) -> Tensor:
        """[.., Vd]: the linear layer of head k."""
        out: Tensor = self._head(k)[-1](states)
        return out

    def stages(self) -> Iterator[list[nn.Linear]]:
        """The matrices that read a state, of all heads: of each residual block, then the last."""
        for i in range(self.layers):
            blocks = [self._head(k)[i] for k in range(len(self))]
            yield [block.linear for block in blocks if isinstance(block, ResidualBlock)]
        last = [self._head(k)[-1] for k in range(len(self))]
        yield [linear for linear in last if isinstance(linear, nn.Linear)]

    def _head(self, k: int) -> nn.Sequential:
        head = self[k]
        assert isinstance(head, nn.Sequential)
        return head


class HeadEngine(Matrices):
    """Runs all heads in one pass over their weights (a `DraftEngine`)."""

    def __init__(self, network: Heads, target: TargetView, engine: Engine, form: str) -> None:
        super().__init__(form)
        packed = [self._packed([linear]) for stage in network.stages() for linear in stage]
        self._count, self._own = len(network), packed[-1].rows
        self._at = self._lib.c.ds_open_heads(
            (Matrix * len(packed))(*packed), len(network), network.layers
        )
        weakref.finalize(self, self._lib.c.ds_close_heads, self._at)

    @classmethod
    def why_not(cls, network: Heads, form: str) -> str | None:
        return uneven(form, {"hidden size": network.hidden})

    def logits(self, feature_BH: Tensor) -> Tensor:
        """[B, K, Vd] of all heads."""
        feature_BH = feature_BH.float().contiguous()
        rows, padded = len(feature_BH), -(-self._own // LANES) * LANES
        logits_BKV = torch.empty((rows, self._count, padded))
        self._lib.c.ds_heads(
            self._at,
            feature_BH.data_ptr(),
            rows,
            engine_threads(),
            logits_BKV.data_ptr(),
        )
        return logits_BKV[..., : self._own]


@dataclass
class _State(TextState):
    """The target's state behind the last token that it was fed, per row; None before any."""

    feature_BH: Tensor | None = None

    def take(self, rows: Sequence[int]) -> _State:
        if self.feature_BH is not None:
            index = to_device(torch.tensor(list(rows)), self.feature_BH.device)
            self.feature_BH = self.feature_BH[index]
        return super().take(rows)

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _State:
        self.feature_BH = None  # the next forward of the target gives a new one
        return super().rewind(tokens)


class _HeadReader:
    """Laws by depth alone: every node of a depth has the same (a `Reader`)."""

    def __init__(self, heads: Heads, feature_BH: Tensor, engine: HeadEngine | None) -> None:
        self._heads, self._feature_BH, self._depth = heads, feature_BH, 0
        self._engine = engine
        self.columns = heads.columns
        self._own_BKD = torch.empty(0) if engine is None else engine.logits(feature_BH)

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """See `Reader`: each head's best token."""
        if self._engine is None or draws is not None or confidence:
            return None
        scores_BND = self._own_BKD[:, : int(depth_B.max())]
        best_BN = largest(scores_BND.flatten(0, 1))[1].view(scores_BND.shape[:2])
        return Chain(tokens_BN=self.columns.tokens(best_BN), law_BND=None, count_B=depth_B)

    def root(self) -> Tensor:
        heads, k = self._heads, self._depth
        if self._engine is not None:
            return self._own_BKD[:, k]
        feature_BH = self._feature_BH.to(next(heads.parameters()).dtype)  # the engine's: float32
        return heads.own_logits(k, heads.states(k, feature_BH))

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        self._depth += 1
        return self.root()[:, None]


def stored_heads(names: Collection[str], folder: str) -> tuple[int, int]:
    """How many heads these tensors are of, and how many residual blocks each has.

    Raises:
        BackendError: they are something else.
    """
    names = set(names) - {D2T, T2D}
    places = [name.split(".") for name in names]
    numbered = [len(place) > 2 and (place[0] + place[1]).isdigit() for place in places]
    if not all(numbered) or not names:
        held = f" ({next(iter(names))}, ...)" if names else ""
        raise BackendError(f"The drafter in {folder} holds no Medusa heads{held}.")
    # counted, not the highest number: a gap is refused as what is lacking
    return len({place[0] for place in places}), len({place[1] for place in places}) - 1


_MOST_HEADS = 64
"""Heads, and residual blocks of a head: each has a matrix of the target's width squared."""


class Medusa(TrainedDrafter):
    """Medusa-1: heads on a frozen target."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TrainedDrafter.Config):
        heads: int = field(default=4, metadata=STRUCTURE)
        """Training: how many places ahead."""
        layers: int = field(default=1, metadata=STRUCTURE)
        """Training: residual blocks per head."""
        decay: float = field(default=0.8, metadata=TRAINING)
        """Training: each head counts this much of the one before."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, heads=self.heads, most=_MOST_HEADS)
            at_least(0, layers=self.layers, most=_MOST_HEADS)
            at_least(0, decay=self.decay)

    config: Config
    weights_file = MEDUSA
    engine_class = HeadEngine
    default_shape = TreeShape(widths=(8, 8, 8, 8), keep=48)

    def _make_network(self, target: TargetView, stored: Mapping[str, Tensor] | None) -> Heads:
        count, layers = self.config.heads, self.config.layers
        own = target.vocab_size
        if stored is None:
            own = self._draft_vocab(target)
        else:
            count, layers = stored_heads(stored, self.config.source)
            if D2T in stored:  # one of another target is refused for its ids
                own = min(len(stored[D2T]), own)
        length = self.config.length
        require(
            length <= count,
            f"drafter option length={length}: {count} heads draft at most {count} tokens; ask for "
            "no more",
        )
        self.num_steps = self.longest = count
        return Heads(count, layers, target.head_weight(), own)

    def choose_vocabulary(self, counts_V: Tensor | None) -> None:
        """As others, and the heads begin as the target's own rows."""
        super().choose_vocabulary(counts_V)
        ids_D = self.network.target_ids
        if not self.config.source and ids_D is not None:
            self.network.begin_as(self.target.head_weight().detach()[ids_D])

    def _saved_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.network.hidden,
            num_attention_heads=1,  # there is none; the usual number would have to divide the width
            vocab_size=self.network.vocab,
            medusa_num_heads=len(self.network),
            medusa_num_layers=self.network.layers,
            version="2",  # heads with linear layers of their own
            **({} if self.network.d2t is None else {"draft_vocab_size": len(self.network.d2t)}),
        )

    # ------------------------------------------------------------------ drafting

    def start(self, request: RequestBatch) -> DraftState:
        if self.network is None:
            raise self.unbound()
        self._engine()
        known = [list(row) for row in request.tokens]
        return _State(known=known, num_prompt=[len(row) for row in known])

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, _State)
        if state.feature_BH is None or not depth_B.any():
            return DraftTree.empty(len(state.known))
        reader = _HeadReader(self.network, state.feature_BH, self._engine_of_request)
        how = ChildSelection("greedy", sampler, noise, state, rated=self.rates_nodes)
        return grow(reader, shape.clip(len(self.network)), depth_B, how)

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert isinstance(state, _State)
        signals_BTS = accepted.out.signals_BTS
        assert signals_BTS is not None
        # the last token that was fed and kept: the root, or the end of the accepted path
        first_node = signals_BTS.shape[1] - accepted.tree.num_nodes
        path_BD = accepted.verdict.path_BD.numpy()
        num_B = accepted.verdict.num_accepted_B.numpy()
        last_B = np.full(len(num_B), first_node - 1)
        for b, num in enumerate(num_B.tolist()):
            if num:
                last_B[b] = first_node + path_BD[b, num - 1]
            state.known[b].extend(accepted.emitted[b])
        if (last_B == last_B[0]).all():  # one slice, which a row that drafts nothing pays for too
            state.feature_BH = signals_BTS[:, last_B[0]]
            return state
        rows = torch.arange(len(num_B), device=signals_BTS.device)
        state.feature_BH = signals_BTS[rows, to_device(last_B, signals_BTS.device)]
        return state

    # ------------------------------------------------------------------ training

    def forward(self, batch: TrajectoryBatch, carry: int | None) -> tuple[DraftPrediction, int]:
        assert batch.features_BTS is not None
        k = 0 if carry is None else carry
        network = self.network
        ids_D, narrow = network.target_ids, None
        if ids_D is not None:
            narrow = NarrowHead(ids_D=ids_D, head=lambda states: network.own_logits(k, states))
        prediction = DraftPrediction(
            hidden_BTH=network.states(k, batch.features_BTS),
            mask_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool),
            ahead=2 + k,
            weight=self.config.decay**k,
            head=lambda states: network.logits(k, states),
            narrow=narrow,
        )
        return prediction, k + 1

    def head(self) -> Callable[[Tensor], Tensor]:
        network = self.network
        return lambda states: network.logits(0, states)


DRAFTER = Medusa
