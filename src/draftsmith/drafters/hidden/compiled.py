"""Drafters over hidden states, run by the C++ extension beside their target.

Which class runs a drafter's network, the drafter says (`TrainedDrafter.engine_class`). `PairEngine`
is for pairs. A step of such a layer is a fraction of a millisecond of arithmetic, less than Python
needs to ask for it: a chain, of its most probable tokens or of draws, is one call (`Runner.chain`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.core.cache import KVCache
from draftsmith.drafters.base import TargetView
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.hidden.network import Network
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.config import Weights
from draftsmith.targets.native.bindings import Call, Fusion, Layer, Matrix, Model
from draftsmith.targets.native.engine import (
    STATIC_ROPE,
    Draws,
    Engine,
    Runner,
    engine_of,
    too_large,
    unfit,
)

_log = logging.getLogger(__name__)


class DraftEngine(Protocol):
    """What runs the network of a drafter."""

    def __init__(self, network: Any, target: TargetView, engine: Engine, form: str) -> None:
        """
        Args:
            network: its weights are copied.
            engine: of the target, whose embedding and head may be read where they lie.
            form: one of the formats of `weights.py`.
        """

    @classmethod
    def why_not(cls, network: Any, form: str) -> str | None:
        """Why it does not run this network; None: it does."""
        ...


class LayerEngine(Runner):
    """Runs layers over pairs of the target's states and embeddings; subclasses bring the parts."""

    token_of_D: Tensor | None
    """Ids of the draft vocabulary's tokens; None: all of them."""
    columns: Columns
    """The tokens that its logits are of."""

    def __init__(self, network: Network, target: TargetView, engine: Engine, form: str) -> None:
        super().__init__(form, network.rotary.module)
        self._config, self._target, self._target_engine = network.config, target, engine
        ids_D = network.target_ids
        self.token_of_D = None if ids_D is None else ids_D.cpu().contiguous()
        self.columns = Columns(target.vocab_size, self.token_of_D)

    def _open_layers(
        self,
        layers: Sequence[Layer],
        norm: nn.Module | None,
        head: nn.Linear | None = None,
        **parts: Any,
    ) -> None:
        """The last step of making it. `norm`: before the head; `head`: None for the target's, over
        the draft vocabulary; `parts`: of `Model`."""
        config, engine, ids_D = self._config, self._target_engine, self.token_of_D
        packed = engine.model.head  # where it lies
        if head is not None:
            packed = self._packed([head])
        elif ids_D is not None:
            rows = nn.Linear(config.hidden_size, len(ids_D), bias=False, device="meta")
            rows.weight = nn.Parameter(self._target.head_weight().detach()[ids_D], False)
            packed = self._packed([rows])
        self._layers = (Layer * len(layers))(*layers)
        self._open(
            Model(
                **{"halves": 1, **parts},
                layers=len(layers),
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                width=config.head_dim,
                mlp=config.intermediate_size,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                layer=self._layers,
                norm_out=self._norm(norm),
                embedding=engine.model.embedding,  # where it lies, too
                head=packed,
            )
        )

    def keep(
        self, cache: KVCache, tokens_BP: np.ndarray, counts_B: np.ndarray, feature_BPS: Tensor
    ) -> None:
        """Keep and commit keys and values of these pairs, see `right_aligned`."""
        call, held = self._run(cache, tokens_BP, counts_B, feature_BPS, None, keep=0)
        if not self._lib.c.ds_block(self._at, ctypes.byref(call), None):
            raise self._unknown(tokens_BP)
        cache.commit(counts_B)
        del held

    def _block(
        self,
        tokens_BP: np.ndarray,
        called: tuple[Call, list[Any]],
        count: int,
        every: bool,
        depth_B: np.ndarray | None,
        draws: Draws | None,
        confidence: float,
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """Make this call of these tokens, and draft a block behind the last pair of each row.

        Args:
            count: its laws.
            every: each row has a pair.
            depth_B: how many tokens are chosen in each row; None: none.
            draws, confidence: see `Runner.chain`.

        Returns:
            ([B, P, Vd] logits, with what the tokens before add at the places that were chosen from,
            and with `draws` probabilities there; [B, N] tokens that were chosen; [B] tokens of each
            row).
        """
        rows, (call, held) = len(tokens_BP), called
        room = torch.empty if every else torch.zeros  # of a row without pairs nothing is written
        logits_BPV = room((rows, count, self._head_rows))
        call.logits = logits_BPV.data_ptr()
        count_B = np.zeros(rows, dtype=np.int64) if depth_B is None else depth_B.astype(np.int64)
        chosen_BN = torch.zeros((rows, int(count_B.max())), dtype=torch.int64)
        chain, also_held = self._chain(chosen_BN, count_B, self.token_of_D, draws, confidence)
        if not self._lib.c.ds_block(self._at, ctypes.byref(call), ctypes.byref(chain)):
            raise self._unknown(tokens_BP)
        del held, also_held
        return logits_BPV[..., : self.model.head.rows], chosen_BN, count_B

    def _norm(self, module: Any) -> int | None:
        return None if module is None else self._vector(module.weight)


class PairEngine(LayerEngine):
    """Runs the pairs of a network (a `DraftEngine`)."""

    def __init__(self, network: Network, target: TargetView, engine: Engine, form: str) -> None:
        super().__init__(network, target, engine, form)
        parts = network.compilable()
        assert parts is not None
        given = parts.fusion
        layers = [self._layer(layer) for layer in parts.layers]
        norms = {name: self._norm(getattr(given, name)) for name in ("norm", "both", "beside")}
        fusion = Fusion(**norms, unknown=self._vector(given.unknown))
        if given.beside is not None:
            layers[0].norm_in = None  # it is that of the tokens alone
        for name in ("fc", "gate", "up", "down"):
            linear = getattr(given, name)
            setattr(fusion, name, Matrix() if linear is None else self._packed([linear]))
        self._open_layers(layers, parts.norm, parts.head, halves=parts.halves, fusion=fusion)

    @classmethod
    def why_not(cls, network: Network, form: str) -> str | None:
        if network.compilable() is None:
            return "its kind of network is not written there"
        return unfit_layers(network, form)


def unfit_layers(network: Network, form: str) -> str | None:
    """Why layers of its measures cannot be run; None: they can."""
    config = network.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"its rotary embedding ({rope}) changes with the length of the text"
    return unfit(config, config.head_dim, form)


E = TypeVar("E", bound=DraftEngine)


def in_engine(
    runs: type[E],
    network: nn.Module,
    target: TargetView,
    weights: Weights,
    unfit: str | None = None,
) -> E | None:
    """The network as the extension runs it; None: PyTorch does, as the target or the network is
    not one for it.

    Args:
        unfit: why the drafter has no use for it; None: it has.

    Raises:
        UnsupportedModel: a format of weights was asked for that only the extension computes in.
    """
    engine = engine_of(target)
    why: str | None = "the target does not run there"
    if engine is not None:
        for form in _forms(weights, engine):
            why = unfit or runs.why_not(network, form) or too_large(network, form)
            if why is None:
                return runs(network, target, engine, form)
    if weights != "auto":
        raise UnsupportedModel(
            f"drafter option weights={weights}: this drafter is not run by the compiled engine, "
            f"since {why}; leave the option out"
        )
    if engine is not None:
        _say(why)
    return None


def _forms(weights: Weights, engine: Engine) -> tuple[str, ...]:
    """The formats to try, the first first: with fewer bits than the target's as many drafts are
    accepted, and a draft costs less."""
    if weights != "auto":
        return ("bfloat16" if weights == "bf16" else weights,)
    if engine.quantised:
        return ("int4",)
    return ("int8", "bfloat16") if engine.form == "bfloat16" else (engine.form,)


@functools.cache
def _say(why: str | None) -> None:
    """Once, however often weights change."""
    _log.warning("the drafter is not compiled, PyTorch runs it: %s", why)
