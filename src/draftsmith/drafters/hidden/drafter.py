"""The drafter around a `Network`: what EAGLE and its descendants do alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    RequestBatch,
    Signals,
    TrajectoryBatch,
    TreeShape,
)
from draftsmith.drafters.base import (
    STRUCTURE,
    TRAINING,
    Accepted,
    Drafter,
    DraftState,
    LossWeights,
    TargetView,
    at_least,
)
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.checkpoint import (
    check_config,
    check_target,
    load_network,
    read_config,
    save_network,
    target_facts,
)
from draftsmith.drafters.hidden.network import Network, draft_config
from draftsmith.drafters.hidden.state import FeatureState, PairReader, new_state
from draftsmith.drafters.hidden.unroll import Rollout
from draftsmith.drafters.tree_growth import ChildSelection, grow
from draftsmith.targets.hf import loading


class FeatureDrafter(Drafter):
    """A small network over the target's hidden states. Subclasses name the network, and how it
    learns beyond one step."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        source: str = ""
        """Folder with the trained network."""
        proposal: Literal["greedy", "without_replacement", "sampled"] = "greedy"
        """Children in a static tree or chain: the top tokens, or draws. Dynamic trees take the top
        tokens."""
        noise: float = field(default=0.2, metadata=TRAINING)
        """Training: uniform noise on features, of this width times 512 / tokens of the text."""
        seed: int = field(default=0, metadata=STRUCTURE)
        """Keys the first weights of a network that is trained from nothing."""

        def __post_init__(self) -> None:
            at_least(0, noise=self.noise, seed=self.seed)

    config: Config
    signals = Signals(last_hidden=True)
    trains = True
    eval_steps = 5
    loss_weights = LossWeights(token=0.1, feature=1.0)
    takes_trees = True
    default_shape = TreeShape(widths=(10,) * 6, keep=59)
    """EAGLE-2's: five expansions behind the first level, 59 nodes and the root."""
    layer: LlamaConfig
    """Measures of the network: the target's, or those of its folder."""
    network_class: ClassVar[type[Network]]
    keeps_steps: bool = True
    """Training: all that a step computes stays in memory for the backward pass."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.network: Network | None = None
        self._borrowed: list[TargetView] = []  # a list: modules in it do not join this one's tree

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
        """Borrow embedding and head; read the network, or without a source make a random one.

        Raises:
            BackendError: the folder cannot be read, or was made for another target or kind.
        """
        self._borrowed = [target]
        if self.network is not None:  # bound before: what was learnt stays
            return
        source = Path(self.config.source)
        if self.config.source:
            check_target(source, target_facts(target, self.signals))
        self.layer = self.network_config(target)
        if self.config.source:
            self.layer = read_config(source)
            check_config(self.layer, target, source)
        with torch.random.fork_rng(devices=[]), loading(f"the drafter in {source}"):
            torch.manual_seed(self.config.seed)
            network = self.network_class(self.layer)
        self.network = network.to(dtype=target.dtype, device=target.device)
        if self.config.source:
            load_network(self.network, source, target)

    def network_config(self, target: TargetView) -> LlamaConfig:
        """The configuration of an untrained network for this target."""
        return draft_config(target.config)

    def save(self, folder: Path, *, kind: str) -> None:
        """Write the network, in the layout of the released checkpoints."""
        assert self.network is not None
        save_network(
            self.network,
            self.layer,
            folder,
            kind=kind,
            options=self.config,
            target=target_facts(self.target, self.signals),
        )

    # ------------------------------------------------------------------ drafting

    def start(self, request: RequestBatch) -> DraftState:
        longest = max(len(row) for row in request.tokens) + request.max_new_tokens
        return new_state(
            request.tokens,
            self.target,
            self.layer,
            self._signal_width(),
            longest + self.default_shape.num_nodes,
        )

    def propose(
        self, state: DraftState, shape: TreeShape, sampler: Sampler, noise: Noise
    ) -> DraftTree:
        assert isinstance(state, FeatureState) and self.network is not None
        if state.is_blank:
            return DraftTree.empty(len(state.known))
        reader = PairReader(self.network, self.target, state)
        tree = grow(
            reader, shape, ChildSelection.from_state(state, self.config.proposal, sampler, noise)
        )
        state.cache.rollback()
        return tree

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert isinstance(state, FeatureState)
        state.advance(accepted)
        return state

    def _signal_width(self) -> int:
        return int(self.target.config.hidden_size)

    # ------------------------------------------------------------------ training

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        assert self.network is not None
        now = self._begin(batch) if carry is None else carry
        return unroll.advance(self.network, self.target, batch, now, keep=self.keeps_steps)

    def _begin(self, batch: TrajectoryBatch) -> Rollout:
        return unroll.begin(batch, self.config.noise if self.training else 0.0)

    def head(self) -> Callable[[Tensor], Tensor]:
        network, target = self.network, self.target
        assert network is not None
        return lambda hidden: network.logits(hidden, target)
