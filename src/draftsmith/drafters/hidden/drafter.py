"""Drafters over the target's hidden states: what EAGLE and its descendants do alike.

The network reads pairs. Pair t is (f_t, x_{t+1}), the target's state at t and the token behind it;
it gives a state like f_{t+1}, from which the head predicts x_{t+2}:

    tokens      x0   x1   x2   x3          the target was fed x0 x1 x2; x3 is the new root
    features    f0   f1   f2
    pairs       f0x1 f1x2 f2x3             -> children of the root, and the state to go on with
    next depth            g3n0             g3: the network's own state in place of f3

Pairs of settled tokens stay in the drafter's cache; those of the tree are dropped and, where they
were accepted, read again with the target's own features at the next step.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.attention import attend_fused
from draftsmith.core.cache import Block, KVCache, KVSpec, lay_out, right_aligned
from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import to_device
from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    NarrowHead,
    RequestBatch,
    Signals,
    TrajectoryBatch,
    TreeShape,
)
from draftsmith.drafters.base import (
    ADDED,
    COST,
    READING,
    STRUCTURE,
    TRAINING,
    Accepted,
    Drafter,
    DraftState,
    LossWeights,
    TargetView,
    TextState,
    at_least,
)
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.checkpoint import (
    WEIGHTS,
    check_bound,
    check_config,
    check_target,
    check_tensors,
    manifest_of,
    read_config,
    read_tensors,
    save_network,
    target_facts,
)
from draftsmith.drafters.hidden.compiled import DraftEngine, PairEngine, in_engine
from draftsmith.drafters.hidden.network import (
    Network,
    PairNetwork,
    draft_config,
    version_of,
)
from draftsmith.drafters.tree_growth import (
    COLDEST,
    HOTTEST,
    Chain,
    ChildSelection,
    MakesDraws,
    Reader,
    drawing,
    grow,
)
from draftsmith.errors import InputError
from draftsmith.targets import base as targets
from draftsmith.targets.config import Weights, check_weights
from draftsmith.targets.hf import loading
from draftsmith.targets.native.engine import engine_of

_log = logging.getLogger(__name__)


class Features:
    """The target's features of every token that it was fed, row by row, in one growing buffer.

    New ones are stored when any are read: a row that drafts nothing for long should not pay for it
    at every step, nor when a neighbour ends.
    """

    def __init__(self, num_rows: int, width: int, like: TargetView) -> None:
        self.lengths_B = np.zeros(num_rows, dtype=np.int64)
        self._store_BTS = torch.zeros((num_rows, 0, width), dtype=like.dtype, device=like.device)
        self._new = [_NotStored(range(num_rows))]
        """The last is of the rows that there are now; `lengths_B` counts them all."""

    def append(self, signals_BTS: Tensor, columns: Sequence[Sequence[int]]) -> None:
        """Add these columns of each row."""
        self._new[-1].steps.append((signals_BTS, columns))
        self.lengths_B = self.lengths_B + np.array([len(row) for row in columns], dtype=np.int64)

    def _stored(self) -> Tensor:
        """All that there are, [B, T, S]."""
        if any(one.steps for one in self._new):
            with torch.inference_mode():  # as while decoding, also where rows are taken or rewound
                ends = self.lengths_B.tolist()
                self._reserve(max(ends))
                for b, end in enumerate(ends):
                    if pieces := [piece for one in self._new for piece in one.of(b)]:
                        new_NS = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                        self._store_BTS[b, end - len(new_NS) : end] = new_NS
            self._new = [_NotStored(range(len(self.lengths_B)))]
        return self._store_BTS

    def _reserve(self, length: int) -> None:
        rows, have, width = self._store_BTS.shape
        if length > have:
            bigger = self._store_BTS.new_zeros((rows, max(length, 2 * have), width))
            bigger[:, :have] = self._store_BTS
            self._store_BTS = bigger

    def right_aligned(self, start_B: np.ndarray, end_B: np.ndarray) -> Tensor:
        """[B, P, S]: each row's features from `start` to `end`, filled up on the left."""
        store_BTS = self._stored()
        starts, ends = start_B.tolist(), end_B.tolist()
        if len(set(starts)) == len(set(ends)) == 1:
            return store_BTS[:, starts[0] : ends[0]]
        counts = end_B - start_B
        width = int(counts.max())
        index_BP = np.maximum(end_B[:, None] - width + np.arange(width)[None], 0)
        rows = torch.arange(len(counts), device=store_BTS.device)[:, None]
        return store_BTS[rows, to_device(index_BP, store_BTS.device)]

    def rewind(self, lengths_B: np.ndarray) -> None:
        self._stored()
        self.lengths_B = np.minimum(self.lengths_B, lengths_B)

    def take(self, rows: Sequence[int]) -> None:
        if any(2 * len(rows) <= one.num_rows for one in self._new):
            self._stored()  # not to keep what is of rows that ended
        index = to_device(torch.tensor(list(rows)), self._store_BTS.device)
        self._store_BTS = self._store_BTS.index_select(0, index)
        self.lengths_B = self.lengths_B[np.asarray(rows, dtype=np.int64)]
        for one in self._new:
            one.rows = [one.rows[b] for b in rows]
        self._new.append(_NotStored(range(len(rows))))


@dataclass
class _NotStored:
    """Features of steps between which no row was taken."""

    rows: Sequence[int]
    """Which of the rows that there were each one is now."""
    steps: list[tuple[Tensor, Sequence[Sequence[int]]]] = field(default_factory=list)
    """Signals, and the columns of each row that there was."""

    @property
    def num_rows(self) -> int:
        """How many there were; 0: of no step."""
        return len(self.steps[0][0]) if self.steps else 0

    def of(self, b: int) -> Iterator[Tensor]:
        """Those of a row, [N, S] each."""
        row = self.rows[b]
        for signals_BTS, columns in self.steps:
            if columns[row]:
                yield _columns(signals_BTS[row], columns[row])


def _columns(signals_TS: Tensor, columns: Sequence[int]) -> Tensor:
    first, count = columns[0], len(columns)
    if list(columns) == list(range(first, first + count)):  # side by side
        return signals_TS.narrow(0, first, count)
    return signals_TS[to_device(np.array(columns), signals_TS.device)]


@dataclass
class FeatureState(TextState):
    """The drafter's cache of pairs, the target's features and the known tokens.

    cache.lengths_B <= features.lengths_B < len(known): pairs read, features had, tokens known.
    """

    cache: KVCache
    features: Features

    def pairs(self, start_B: np.ndarray, end_B: np.ndarray) -> tuple[list[list[int]], Tensor]:
        """The pairs of each row from `start` to `end`: their tokens, and [B, P, S] their features,
        filled up on the left."""
        ends = zip(self.known, start_B.tolist(), end_B.tolist(), strict=True)
        tokens = [row[first + 1 : end + 1] for row, first, end in ends]
        return tokens, self.features.right_aligned(start_B, end_B)

    def take(self, rows: Sequence[int]) -> FeatureState:
        self.cache.take(rows)
        self.features.take(rows)
        return super().take(rows)

    def rewind(self, tokens: Sequence[Sequence[int]]) -> FeatureState:
        # the target keeps all but the last token of the common part, and feeds the others again
        common = np.array(
            [
                min(common_prefix(old, new), len(new) - 1)
                for old, new in zip(self.known, tokens, strict=True)
            ]
        )
        self.features.rewind(common)
        # the pair of the last kept feature ends in a token that may be another now
        pairs = np.maximum(self.features.lengths_B - 1, 0)
        self.cache.rewind(np.minimum(self.cache.lengths_B, pairs))
        return super().rewind(tokens)

    def advance(self, accepted: Accepted) -> None:
        """Take in the features of what was fed and kept: pending tokens, then the accepted path."""
        signals_BTS = accepted.out.signals_BTS
        assert signals_BTS is not None
        first_node = signals_BTS.shape[1] - accepted.tree.num_nodes
        kept: Sequence[Sequence[int]] = ((),) * len(self.known)
        if accepted.tree.num_nodes:  # else it rests, which is to cost little
            nums = accepted.verdict.num_accepted_B.tolist()
            paths = accepted.verdict.path_BD.tolist()
            kept = [
                [first_node + node for node in path[:num]]
                for path, num in zip(paths, nums, strict=True)
            ]
        columns: list[Sequence[int]] = []
        for known, pending, emitted, path in zip(
            self.known, accepted.pending, accepted.emitted, kept, strict=True
        ):
            fed = range(first_node - len(pending), first_node)
            # a row that was done before is fed nothing
            columns.append(([*fed, *path] if path else fed) if emitted else ())
            known.extend(emitted)
        self.features.append(signals_BTS, columns)


class PairReader:
    """Reads settled pairs and then a draft tree, level by level (a `Reader`).

    Args:
        engine: runs the network; None: PyTorch does.
    """

    def __init__(
        self,
        network: PairNetwork,
        target: TargetView,
        state: FeatureState,
        engine: PairEngine | None = None,
    ) -> None:
        self._network, self._target, self._state = network, target, state
        self._engine = engine
        own = Columns(target.vocab_size, network.target_ids) if engine is None else engine.columns
        self.columns = own
        self._above_BTH = torch.empty(0)
        self._depth = 0

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """See `Reader`."""
        engine = self._engine
        if engine is None:
            return None
        pending, feature_BPS = self._pending()
        tokens_BN, law_BND, count_B = engine.chain(
            self._state.cache,
            *right_aligned(pending),
            depth_B,
            most=engine.model.head.rows,
            limit=self._target.max_length,
            feature_BPS=feature_BPS,
            token_of_D=engine.token_of_D,
            draws=None if draws is None else draws(int(depth_B.max())),
            confidence=confidence,
        )
        return Chain(tokens_BN=tokens_BN, law_BND=law_BND, count_B=count_B)

    def root(self) -> Tensor:
        pending, feature_BPS = self._pending()
        tokens_BP, block = lay_out(self._state.cache, pending)
        predict, regress = self._read(torch.from_numpy(tokens_BP), feature_BPS, block, keep=1)
        self._state.cache.commit(block.pending_B)
        self._above_BTH = regress[:, -1:]
        return predict[:, -1]

    def _pending(self) -> tuple[list[list[int]], Tensor]:
        """Tokens and states of the last settled pairs that are not read yet; what lies before them
        is read."""
        cache, pairs_B = self._state.cache, self._state.features.lengths_B
        # every row reads at least its last pair, because the root's state is not kept
        cache.rewind(np.minimum(cache.lengths_B, np.maximum(pairs_B - 1, 0)))
        while (beyond_B := pairs_B - cache.lengths_B - targets.CHUNK).max() > 0:
            piece_B = np.minimum(np.maximum(beyond_B, 0), targets.CHUNK)
            pending, feature_BPS = self._state.pairs(cache.lengths_B, cache.lengths_B + piece_B)
            tokens_BP, block = lay_out(cache, pending)
            self._read(torch.from_numpy(tokens_BP), feature_BPS, block, keep=1)
            cache.commit(block.pending_B)
        return self._state.pairs(cache.lengths_B, pairs_B)

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        depth_BF = np.full(tokens_BF.shape, self._depth, dtype=np.int64)
        self._depth += 1
        block = self._state.cache.stage(depth_BF, see_BFC)
        index = to_device(above_BF, self._above_BTH.device)[..., None]
        feature_BFH = self._above_BTH.gather(1, index.expand(-1, -1, self._above_BTH.shape[2]))
        logits_BFD, self._above_BTH = self._read(
            tokens_BF, feature_BFH, block, keep=tokens_BF.shape[1]
        )
        return logits_BFD

    def _read(
        self, tokens_BT: Tensor, feature_BTS: Tensor, block: Block, *, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, keep, D] behind the last pairs, and the states of all to go on with."""
        if self._target.max_length is not None:
            block.stop_at(self._target.max_length - 1)
        if self._engine is not None:
            out = self._engine.forward(
                tokens_BT, block, keep, Signals(last_hidden=True), feature_BTS
            )
            assert out.signals_BTS is not None
            return out.logits_BNV, out.signals_BTS
        device = feature_BTS.device

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = block.cache.extend(block, 0, k, v)
            mask = block.mask(None, q.dtype)
            return attend_fused(q, keys, values, mask, scale=q.shape[-1] ** -0.5)

        embedded = self._target.embed(to_device(tokens_BT, device))
        predict, regress = self._network(embedded, feature_BTS, block.positions(device), attend)
        return self._network.own_logits(predict[:, -keep:], self._target), regress


def layer_spec(layer: LlamaConfig, target: TargetView) -> KVSpec:
    """What the cache of draft layers stores where PyTorch runs them."""
    shape = (layer.num_key_value_heads, layer.head_dim, layer.head_dim)
    layers = (shape,) * layer.num_hidden_layers
    return KVSpec(layers=layers, dtype=target.dtype, device=target.device)


def new_state(
    known: Sequence[Sequence[int]],
    target: TargetView,
    spec: KVSpec,
    width: int,
    capacity: int,
) -> FeatureState:
    """A blank state. `spec`: of the draft layer's cache; `width`: of the target's features."""
    rows = [list(row) for row in known]
    return FeatureState(
        cache=KVCache(spec, len(rows), capacity),
        features=Features(len(rows), width, target),
        known=rows,
        num_prompt=[len(row) for row in rows],
    )


class TrainedDrafter(Drafter):
    """A drafter with weights of its own over the target's hidden states: how it is bound to a
    target and saved."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        source: str = ""
        """Folder with the trained network."""
        pickled: bool = field(default=False, metadata=READING)
        """Read a released .bin or .pt where the folder has no safetensors: its tensors; code in it
        is not run."""
        draft_vocab: int = field(default=0, metadata=STRUCTURE | ADDED)
        """Training: knows so many tokens, those that answers hold most often; 0: all."""
        length: int = field(default=0, metadata=ADDED)
        """Chains of so many tokens, unless the caller gives a shape of its own; 0: the published
        tree."""
        weights: Weights = field(default="auto", metadata=READING)
        """Format that the compiled engine computes the network in: no output depends on it. auto:
        int4 beside a target in 4 or 8 bits, int8 beside one in bfloat16, else the target's."""

        def __post_init__(self) -> None:
            at_least(0, length=self.length, most=MOST_NODES)
            check_weights(self.weights)

    config: Any
    engine_class: ClassVar[type[DraftEngine]]
    """What runs the network beside a target in the compiled engine."""
    signals = Signals(last_hidden=True)
    trains = True
    takes_trees = True
    weights_file: ClassVar[str] = WEIGHTS

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        if self.config.length:
            self.default_shape = TreeShape.chain(self.config.length)
        self.network: Any = None
        self._facts: dict[str, Any] = {}
        self._borrowed: list[TargetView] = []  # a list: modules in it do not join this one's tree
        self._compiled: tuple[Any, Any] | None = None

    @property
    def bound_to(self) -> TargetView | None:
        return self._borrowed[0] if self._borrowed else None

    @property
    def target(self) -> TargetView:
        """What `bind` borrowed.

        Raises:
            InputError: `bind` was not called.
        """
        if not self._borrowed:
            raise self.unbound()
        return self._borrowed[0]

    def bind(self, target: TargetView) -> None:
        """Borrow embedding and head; read the network, or without a source make a new one.

        Raises:
            BackendError: the folder cannot be read, or was made for another target or kind.
            InputError: it is bound to another target already.
        """
        if self._borrowed and self._borrowed[0] is target:
            return
        signals = self._signals_for(target)
        facts = target_facts(target, signals)
        if self.network is not None:  # bound before: the weights stay
            check_bound(self, self._facts, facts)
        else:
            source, stored = Path(self.config.source), None
            if self.config.source:
                check_target(source, facts)
                stored = read_tensors(source, pickled=self.config.pickled)
                # the sizes in config.json may be absurd: compared before memory is asked for
                with torch.device("meta"):
                    outline = self._make_network(target, stored)
                stored = check_tensors(stored, outline, source, target)
            network = self._make_network(target, stored)
            network.to(dtype=target.dtype, device=target.device)
            if stored is not None:
                network.load_state_dict(stored)
                self.trained_length = manifest_of(source).get("trained_length")
            self.network, self._facts, self.signals = network, facts, signals
        self._borrowed = [target]

    def _signals_for(self, target: TargetView) -> Signals:
        """What it reads of this target."""
        return self.signals_of(target.config)

    @abc.abstractmethod
    def _saved_config(self) -> LlamaConfig:
        """The measures of the network, for its folder."""

    @abc.abstractmethod
    def _make_network(self, target: TargetView, stored: Mapping[str, Tensor] | None) -> nn.Module:
        """The network for this target, or of the measures in the folder with these tensors."""

    def _draft_vocab(self, target: TargetView) -> int:
        """How many tokens an untrained network is to know."""
        known, own = target.vocab_size, self.config.draft_vocab
        if not 0 <= own <= known:
            raise InputError(f"draft_vocab must lie between 0 (all) and {known}, got {own}")
        return own or known

    @property
    def draft_ids(self) -> Tensor | None:
        every = self.target.vocab_size
        ids_D: Tensor | None = self.network.target_ids
        return None if ids_D is None or len(ids_D) == every else ids_D

    @property
    def wants_token_counts(self) -> bool:
        return not self.config.source and self.draft_ids is not None

    def choose_vocabulary(self, counts_V: Tensor | None) -> None:
        """Unless it was loaded: the most frequent tokens, of equal ones the lower ids."""
        ids_D = self.network.target_ids
        if self.config.source or ids_D is None:
            return
        size = len(ids_D)
        if size == self.target.vocab_size:
            counts_V = torch.zeros(size)
        if counts_V is None:
            raise InputError(
                "draft_vocab keeps the tokens that answers hold most often, which is not known "
                "before they are drawn: learn from a --store, or leave it out"
            )
        order_V = torch.argsort(counts_V, descending=True, stable=True)
        chosen_D = order_V[:size].sort().values.to(ids_D.device)
        self.network.d2t.copy_(chosen_D - torch.arange(size, device=ids_D.device))

    def _engine(self) -> Any:
        """The network in the compiled engine, made again where its weights have changed (by an
        optimiser or by new tensors; what is written to `.data` is not seen). None: PyTorch runs
        it."""
        network, weights = self.network, self.config.weights
        made_of = (self.target, *map(version_of, (*network.parameters(), *network.buffers())))
        if self._compiled is None or self._compiled[0] != made_of:
            runs, unfit = self.engine_class, self._unfit()
            self._compiled = (made_of, in_engine(runs, network, self.target, weights, unfit))
        return self._compiled[1]

    def _unfit(self) -> str | None:
        """Why its options want PyTorch, whatever the engine knows of its network; None: they do
        not."""
        return None

    @property
    def _engine_of_request(self) -> Any:
        """As it was when the request began."""
        return None if self._compiled is None else self._compiled[1]

    @property
    def wants_threads(self) -> bool:
        return self._engine_of_request is None

    def resume(self, state: DraftState, request: RequestBatch) -> DraftState:
        self._engine()
        return super().resume(state, request)

    def save(self, folder: Path, *, kind: str) -> None:
        """Write the network, in the layout of the released checkpoints."""
        save_network(
            self.network,
            self._saved_config(),
            folder,
            kind=kind,
            options=self.config,
            target=self._facts,
            weights=self.weights_file,
            trained_length=self.trained_length,
        )


class FeatureDrafter(TrainedDrafter):
    """A small network over the target's hidden states. Subclasses name the network, and how it
    learns beyond one step."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TrainedDrafter.Config):
        proposal: Literal["greedy", "without_replacement", "sampled"] = "greedy"
        """Children in a static tree or chain: the top tokens, or draws. Dynamic trees take the top
        tokens."""
        noise: float = field(default=0.2, metadata=TRAINING)
        """Training: uniform noise on features, of this width times 512 / tokens of the text."""
        seed: int = field(default=0, metadata=STRUCTURE)
        """Keys the first weights of a network that is trained from nothing."""
        confidence: float = field(default=0.0, metadata=ADDED)
        """A chain ends behind the token that makes it less probable than this; 0: never before its
        length. Trees take no notice."""
        draw_length: int | Literal["auto"] = field(default=0, metadata=ADDED)
        """A chain of draws ends behind so many tokens, whatever its confidence, also where a longer
        one is asked for: how probable a draw was says little about whether it is accepted. 0: as
        length and confidence say. auto: three beside a target that the compiled engine runs in
        bfloat16 with AVX-512, where more tokens cost a forward least, else two."""
        draft_temperature: float = field(default=1.0, metadata=ADDED)
        """Draws are made at so many times the text's temperature, and verified as such. What learnt
        from a target spreads its law wider: a little below 1 more of its draws are accepted."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, noise=self.noise, seed=self.seed)
            at_least(0, confidence=self.confidence, most=1)
            if self.draw_length != "auto":
                at_least(0, draw_length=self.draw_length, most=MOST_NODES)
            at_least(COLDEST, draft_temperature=self.draft_temperature, most=HOTTEST)

    config: Config
    eval_steps: int | None = 5
    loss_weights = LossWeights(token=0.1, feature=1.0)
    default_shape = TreeShape(widths=(10,) * 6, keep=59)
    """EAGLE-2's: five expansions behind the first level, 59 nodes and the root."""
    layer: LlamaConfig
    """Measures of the network: the target's, or those of its folder."""
    network_class: type[Network]
    engine_class: ClassVar[type[DraftEngine]] = PairEngine
    measures: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    """Keys of its configuration that its options or its kind say, not its folder."""
    keeps_steps: bool = True
    """Training: all that a step computes stays in memory for the backward pass."""
    _warned: bool = False
    """Whether it was said that a text is longer than those that it has learnt from."""

    def _make_network(self, target: TargetView, stored: Mapping[str, Tensor] | None) -> Network:
        layer, source = self.network_config(target), Path(self.config.source)
        if stored is not None:
            layer = read_config(source, {one: getattr(layer, one) for one in self.measures})
            check_config(layer, target, source)
        with torch.random.fork_rng(devices=[]), loading(f"the drafter in {source}"):
            torch.manual_seed(self.config.seed)
            network = self.network_class(layer)
        self.layer = layer
        return network

    def _saved_config(self) -> LlamaConfig:
        return self.layer

    def network_config(self, target: TargetView) -> LlamaConfig:
        """The configuration of an untrained network for this target."""
        layer = draft_config(target.config)
        if self.config.draft_vocab:
            layer.draft_vocab_size = self._draft_vocab(target)
        return layer

    # ------------------------------------------------------------------ drafting

    def start(self, request: RequestBatch) -> DraftState:
        longest = max(len(row) for row in request.tokens) + request.max_new_tokens
        engine = self._engine()
        return new_state(
            request.tokens,
            self.target,
            layer_spec(self.layer, self.target) if engine is None else engine.spec,
            self._signal_width(),
            longest + self.default_shape.num_nodes,
        )

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, FeatureState)
        # before the target's first forward a row has nothing to draft from
        if not all(state.features.lengths_B.tolist()):
            depth_B = np.where(state.features.lengths_B > 0, depth_B, 0)
        if not any(depth_B.tolist()):
            return DraftTree.empty(len(state.known))
        if self.trained_length is not None and not self._warned:
            self._warn_beyond(self.trained_length, state)
        how = ChildSelection(
            self.config.proposal,
            drawing(sampler, self.config.draft_temperature),
            noise,
            state,
            confidence=self.config.confidence,
            draw_length=self.draw_length,
            rated=self.rates_nodes,
        )
        reader = self._reader(state, shape.depth)
        tree = grow(reader, shape, depth_B, replace(how, believed=self._believed_by(reader)))
        state.cache.rollback()
        return tree

    def _warn_beyond(self, length: int, state: FeatureState) -> None:
        """Warn, once, where a text has more tokens than those that this has learnt from."""
        if max(map(len, state.known)) <= length:
            return
        self._warned = True
        _log.warning(
            "%s was trained on texts of at most %d tokens; behind position %d its drafts may be "
            "refused more often (what is generated stays the same): train it on longer texts with "
            "distill --block-length",
            self.config.source or f"this {type(self).__name__}",
            length,
            length,
        )

    @property
    def draw_length(self) -> int:
        """What `auto` says was measured with the shipped layer (LOG.md, 2026-11-29).

        Raises:
            InputError: that goes by the target, and `bind` was not called.
        """
        own = self.config.draw_length
        if own != "auto":
            return own
        engine = engine_of(self.target)
        if engine is None or engine.form != "bfloat16":
            return 2
        return 3 if engine.instructions.startswith("avx512") else 2

    def longest_draw(self, shape: TreeShape) -> int:
        return min(shape.depth, self.draw_length or shape.depth)

    def _believed_by(self, reader: Reader) -> Callable[[], Tensor] | None:
        """See `ChildSelection.believed`, of what this one reads."""
        return None

    def _reader(self, state: FeatureState, depth: int) -> Reader:
        """What drafts below the last known tokens, no deeper than this."""
        return PairReader(self.network, self.target, state, self._engine_of_request)

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert isinstance(state, FeatureState)
        state.advance(accepted)
        return state

    def _signal_width(self) -> int:
        return int(self.target.config.hidden_size)

    # ------------------------------------------------------------------ training

    def forward(
        self, batch: TrajectoryBatch, carry: unroll.Rollout | None
    ) -> tuple[DraftPrediction, unroll.Rollout]:
        now = self._begin(batch) if carry is None else carry
        network, target = self.network, self.target
        prediction, after = unroll.advance(network, target, batch, now, keep=self.keeps_steps)
        return replace(prediction, narrow=self._narrow_head()), after

    def _begin(self, batch: TrajectoryBatch) -> unroll.Rollout:
        return unroll.begin(batch, self.config.noise if self.training else 0.0)

    def head(self) -> Callable[[Tensor], Tensor]:
        network, target = self.network, self.target
        return lambda hidden: network.logits(hidden, target)

    def _narrow_head(self) -> NarrowHead | None:
        network, target, ids_D = self.network, self.target, self.draft_ids
        if ids_D is None:
            return None
        return NarrowHead(ids_D=ids_D, head=lambda one: network.own_logits(one, target))


class ChainDrafter(FeatureDrafter):
    """A drafter that learns several drafts in a row: forwards of a text, each of which reads the
    states of the one before."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        num_forwards: int = field(default=3, metadata=TRAINING)
        """Training: drafts in a row that are trained."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, num_forwards=self.num_forwards)

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards


class AlignedDrafter(ChainDrafter):
    """A drafter that learns to draft from its own states (HASS and GRIFFIN): each forward takes the
    states of the one before as given.

        forward    reads                  attends to, with gradient      gives
        1          the target's states    keys of 1                      g1
        2          g1, detached           keys of 1, 2                   g2
        3          g2, detached           keys of 1, 2, 3                g3

    In the released code each forward makes all keys again and goes backward by itself, which adds
    gradients up (`gradients=sum`). Here keys are made once, all losses go backward together, and
    what a forward computed on the way to it is computed again: a graph of all forwards would take
    their sum in memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ChainDrafter.Config):
        attention: Literal["exact", "official"] = field(default="exact", metadata=TRAINING)
        """Training: `exact` is what decoding computes; `official` leaks weight to places that are
        not seen, as the released code does, for parity with its curves. Held-out figures are
        always exact."""
        gradients: Literal["mean", "sum"] = field(default="mean", metadata=TRAINING)
        """Training: of all forwards, their mean, or their sum as published. AdamW takes the same
        step by either; what is clipped differs."""
        recompute: bool = field(default=True, metadata=COST)
        """Training: what a forward computed is computed again on the way back, so that the graph of
        one forward is in memory at a time. Without it: the same gradients, faster."""

    config: Config
    official_from: ClassVar[int] = 1
    """The least number of forwards with which the released code leaks."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.keeps_steps = self.num_steps == 1 or not self.config.recompute

    def _begin(self, batch: TrajectoryBatch) -> unroll.Rollout:
        asked = self.config.attention == "official" and self.num_steps >= self.official_from
        return replace(super()._begin(batch), official=asked and self.training)

    def forward(
        self, batch: TrajectoryBatch, carry: unroll.Rollout | None
    ) -> tuple[DraftPrediction, unroll.Rollout]:
        prediction, after = super().forward(batch, carry)
        if self.config.gradients == "sum":  # all forwards share one normalisation
            prediction = replace(prediction, weight=float(self.num_steps))
        return prediction, replace(after, feature_BTH=after.feature_BTH.detach())
