"""The layer of a drafter over hidden states, run by the C++ extension beside its target.

A step of such a drafter is a fraction of a millisecond of arithmetic, less than Python needs to ask
for it: a chain, of its most probable tokens or of draws, is one call (`Runner.chain`).
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.drafters.base import TargetView
from draftsmith.drafters.hidden.network import Compilable, Network
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.config import Weights
from draftsmith.targets.native.engine import (
    STATIC_ROPE,
    Engine,
    Runner,
    engine_of,
    too_large,
    unfit,
)
from draftsmith.targets.native.library import Fusion, Layer, Matrix, Model


class PairEngine(Runner):
    """Runs the pairs of a network whose embedding is the target's.

    Args:
        network: its weights are copied.
        parts: of it.
        engine: of the target, whose embedding is read where it lies.
        form: one of the formats of `weights.py`.
    """

    def __init__(
        self, network: Network, parts: Compilable, target: TargetView, engine: Engine, form: str
    ):
        super().__init__(form, network.rotary.module)
        self._target_engine = engine  # whose memory holds the embedding
        config, given = network.config, parts.fusion
        layer = self._layer(parts.layer)
        norms = {name: self._norm(getattr(given, name)) for name in ("norm", "both", "beside")}
        fusion = Fusion(**norms)
        if given.beside is not None:
            layer.norm_in = None  # it is that of the tokens alone
        for name in ("fc", "gate", "up", "down"):
            linear = getattr(given, name)
            setattr(fusion, name, Matrix() if linear is None else self._packed([linear]))
        self._layers = (Layer * 1)(layer)
        ids_D = network.target_ids
        self.token_of_D = None if ids_D is None else ids_D.cpu().contiguous()
        """Ids of the draft vocabulary's tokens; None: all of them."""
        head = engine.model.head  # where it lies, too
        if parts.head is not None:
            head = self._packed([parts.head])
        elif ids_D is not None:
            rows = torch.nn.Linear(config.hidden_size, len(ids_D), bias=False, device="meta")
            rows.weight = torch.nn.Parameter(target.head_weight().detach()[ids_D], False)
            head = self._packed([rows])
        self._open(
            Model(
                layers=1,
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                width=config.head_dim,
                mlp=config.intermediate_size,
                halves=parts.halves,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                layer=self._layers,
                norm_out=self._norm(parts.norm),
                embedding=engine.model.embedding,
                head=head,
                fusion=fusion,
            )
        )

    def _norm(self, module: Any) -> int | None:
        return None if module is None else self._vector(module.weight)


def pair_engine(network: Network, target: TargetView, weights: Weights) -> PairEngine | None:
    """The network as the extension runs it; None: PyTorch does, as the target or the network is
    not one for it.

    Raises:
        UnsupportedModel: a format of weights was asked for that only the extension computes in.
    """
    engine = engine_of(target)
    why: str | None = "the target does not run there"
    if engine is not None:
        form = {"auto": "int4" if engine.quantised else engine.form, "bf16": "bfloat16"}
        named = form.get(weights, weights)
        parts = network.compilable()
        why = _why_not(network, parts, named)
        if why is None:
            assert parts is not None
            return PairEngine(network, parts, target, engine, named)
    if weights != "auto":
        raise UnsupportedModel(
            f"drafter option weights={weights}: this drafter is not run by the compiled engine, "
            f"since {why}; leave the option out"
        )
    return None


def _why_not(network: Network, parts: Compilable | None, form: str) -> str | None:
    if parts is None:
        return "its kind of network is not written there"
    config = network.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"its rotary embedding ({rope}) changes with the length of the text"
    return unfit(config, config.head_dim, form) or too_large(network, form)
