"""The layer of a drafter over hidden states, run by the C++ extension beside its target.

A step of such a drafter is a fraction of a millisecond of arithmetic, less than Python needs to ask
for it: a chain of its most probable tokens is one call (`Runner.chain`).
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.drafters.base import TargetView
from draftsmith.drafters.hidden.network import FusionNetwork, Network
from draftsmith.targets.config import Weights
from draftsmith.targets.native.engine import STATIC_ROPE, Engine, Runner, unfit
from draftsmith.targets.native.library import Fusion, Layer, Matrix, Model


class PairEngine(Runner):
    """Runs the pairs of a network whose head and embedding are the target's.

    Args:
        network: its weights are copied.
        engine: of the target, whose embedding is read where it lies.
        form: one of the formats of `weights.py`.
    """

    def __init__(self, network: FusionNetwork, target: TargetView, engine: Engine, form: str):
        super().__init__(form, network.rotary.module)
        self._target_engine = engine  # whose memory holds the embedding
        layer, config = network.layers[0], network.config
        self._layers = (Layer * 1)(self._layer(layer))
        parts = network.fc.parts()
        fusion = Fusion(norm=self._norm(parts.norm), both=self._norm(parts.both))
        for name in ("fc", "gate", "up", "down"):
            linear = getattr(parts, name)
            setattr(fusion, name, Matrix() if linear is None else self._packed([linear]))
        ids_D = network.target_ids
        self.token_of_V = None if ids_D is None else ids_D.cpu().contiguous()
        """Ids of the draft vocabulary's tokens; None: all of them."""
        weight = target.head_weight().detach()
        rows, width = weight.shape
        head = torch.nn.Linear(width, rows, bias=False, device="meta")
        head.weight = torch.nn.Parameter(weight if ids_D is None else weight[ids_D], False)
        self._open(
            Model(
                layers=1,
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                width=config.head_dim,
                mlp=config.intermediate_size,
                halves=layer.halves,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                layer=self._layers,
                norm_out=None,
                embedding=engine.model.embedding,
                head=self._packed([head]),
                fusion=fusion,
            )
        )

    def _norm(self, module: Any) -> int | None:
        return None if module is None else self._vector(module.weight)


def pair_engine(network: Network, target: TargetView, weights: Weights) -> PairEngine | None:
    """The network as the extension runs it; None: PyTorch does, as the target or the network is
    not one for it."""
    engine: Engine | None = getattr(target, "compiled", None)
    if engine is None or not isinstance(network, FusionNetwork) or not network.compiles:
        return None
    form = {"auto": "int8" if engine.quantised else engine.form, "bf16": "bfloat16"}
    named = form.get(weights, weights)
    config = network.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE or unfit(config, config.head_dim, named):
        return None
    return PairEngine(network, target, engine, named)
