"""Linear layers with weights laid out for the processor: bfloat16 on CPUs.

oneDNN multiplies a bfloat16 weight in its own blocked layout about twice as fast as in the plain
one, for the one to nine tokens of a decoding step; the sums are the same, bit for bit. The plain
weight stays (it may be tied, and transformers' own code reads it), so packing costs its size again.

Twin: `torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIMIT_BYTES = 2 << 30
"""Models whose weights come to more are left alone: the copy would be felt."""
_STEP = 4
"""Tokens per forward that the layout is chosen for."""


class Packed(nn.Module):
    """Stands in for the forward of one linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _STEP)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self._weight, self._bias, "none", [], ""
        )
        return out


class PackedLinears:
    """The packed twins of a model's linear layers, to be switched on and off together.

    Empty where packing does not apply: another device or dtype, a processor without bfloat16
    arithmetic, or more than `LIMIT_BYTES` of weights.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if type(m) is nn.Linear and _fits(m)]
        size = sum(m.weight.numel() * m.weight.element_size() for m in layers)
        usable = torch.backends.mkldnn.is_available() and (
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        with torch.no_grad():
            self._pairs = (
                [(layer, Packed(layer)) for layer in layers]
                if usable and size <= LIMIT_BYTES
                else []
            )

    def use(self, on: bool) -> None:
        """Route the layers through their packed twins, or back through the plain weights."""
        for layer, packed in self._pairs:
            if on:
                layer.forward = packed.forward  # type: ignore[method-assign]
            else:
                layer.__dict__.pop("forward", None)

    def __len__(self) -> int:
        return len(self._pairs)


def _fits(layer: nn.Linear) -> bool:
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.bfloat16
