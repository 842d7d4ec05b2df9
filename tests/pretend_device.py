"""A device that is not there: tensors that say they are elsewhere, and a count of looks at them.

`Elsewhere` wraps an ordinary tensor and reports the device `meta`. Inside `PretendDevice` every
operation runs on the wrapped tensors, with these differences, which are those of a real device:

* numbers come to the host only by an operation that is counted in `waits`: a copy to the CPU, a
  look at a single number, or an operation whose result has as many rows as the numbers say;
* uploads that wait for the device (copies from the CPU without `non_blocking`) are in `uploads`;
* a tensor of the host takes part in no operation with one from elsewhere, single numbers and
  indices excepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
HOST = torch.device("cpu")


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def tolist(self) -> list[Any]:
        return self.cpu().tolist()  # what tensors of a device do

    def __repr__(self, **_: Any) -> str:
        return f"elsewhere({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Makes `meta` a device that computes, and counts."""

    SIZED_BY_NUMBERS = ("nonzero", "masked_select", "unique", "bincount", "repeat_interleave")
    LOOKS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose")
    MIX = ("index", "index_put", "index_put_", "_index_put_impl_", "copy_")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.uploads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_has_compatible_shallow_copy_type":  # `Module.to`: a new parameter, please
            return False
        leaves = tree_leaves((args, kwargs))
        devices = [one for one in leaves if isinstance(one, torch.device)]
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        there = any(isinstance(one, Elsewhere) for one in tensors)
        result_there = devices[0].type == DEVICE.type if devices else there
        self._count(func, name, args, kwargs, tensors, there, result_there)
        out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if not result_there or (name == "copy_" and not isinstance(args[0], Elsewhere)):
            return out
        return tree_map(lambda one: Elsewhere(one) if isinstance(one, Tensor) else one, out)

    def _count(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        there: bool,
        result_there: bool,
    ) -> None:
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        if there and not result_there:
            self.waits.append(f"{name} to the host")
        elif name == "copy_" and there:
            from_there = isinstance(args[1], Elsewhere)
            if isinstance(args[0], Elsewhere) != from_there:
                (self.waits if from_there else self.uploads).append(name)
        elif there and name in self.LOOKS:
            self.waits.append(name)
        elif there and name.startswith(self.SIZED_BY_NUMBERS):
            sized = name != "repeat_interleave" or isinstance(given.get("repeats"), Tensor)
            if sized and given.get("output_size") is None:
                self.waits.append(name)
        elif there and name.startswith(("index", "index_put")) and "indices" in given:
            masks = [one for one in given["indices"] if one is not None and one.dtype == torch.bool]
            if masks:
                self.waits.append(f"{name} by a mask")
        elif result_there and not there and tensors and not given.get("non_blocking"):
            self.uploads.append(name)
        mixed = there and any(not isinstance(one, Elsewhere) and one.dim() for one in tensors)
        assert not mixed or name in self.MIX, f"{name} of tensors from two devices"


def _inside(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.inner
    return HOST if isinstance(value, torch.device) else value


def send(module: nn.Module) -> None:
    """Move the weights of a module to the pretended device."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None and not isinstance(weight, Elsewhere):
                there = Elsewhere(weight.detach())
                part._parameters[name] = nn.Parameter(there, requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and not isinstance(buffer, Elsewhere):
                part._buffers[name] = Elsewhere(buffer)
