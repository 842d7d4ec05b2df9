"""Matrices as the C++ extension reads them: in panels of sixteen rows (drawn in matrix.hpp).

| format     | weights                                         | activations                 |
|------------|-------------------------------------------------|-----------------------------|
| `float32`  | as they are                                     | float32                     |
| `bfloat16` | as they are                                     | float32                     |
| `w8a8`     | 8 bits, a scale per 128 or fewer (`wide_group`) | 8 bits, the same groups     |
| `int8`     | 8 bits, a scale per 32 columns (GGUF's Q8_0)    | 8 bits, a scale per 32      |
| `int4`     | 4 bits, scale and least value per 32 (Q4_1)     | 8 bits, a scale per 32      |
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.targets.native.bindings import Library, Matrix, NotBuilt, library

LANES = 16
GROUP = 32
FORMATS = ("float32", "bfloat16", "int8", "int4")
"""By their numbers in matrix.hpp."""


class Memory:
    """Numbers in the extension's pages."""

    def __init__(self, library: Library, values: Tensor | np.ndarray) -> None:
        if isinstance(values, Tensor):
            values = values.detach().contiguous()
            source = values.data_ptr()
        else:
            source = values.ctypes.data
        self.bytes = values.nbytes
        self._pages, self.at = library.room(self.bytes)
        ctypes.memmove(self.at, source, self.bytes)

    def whole(self) -> np.ndarray:
        """Its bytes, where they are; they live as long as this."""
        pointer = ctypes.cast(self.at, ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, shape=(self.bytes,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A matrix of whole numbers in groups of `GROUP` columns, w = scale * number + least.

    As in a GGUF file: its Q4_0, Q4_1 and Q8_0 give the very weights that the file holds.
    """

    numbers_RK: Tensor
    """int8 (8 bits, no `least`) or uint8 in 0..15 (4 bits)."""
    scale_RG: Tensor
    least_RG: Tensor | None = None

    def take(self, rows: Tensor | slice) -> Blocks:
        """These rows, in this order."""
        least = None if self.least_RG is None else self.least_RG[rows]
        return Blocks(
            numbers_RK=self.numbers_RK[rows], scale_RG=self.scale_RG[rows], least_RG=least
        )

    def whole(self) -> Tensor:
        """The weights [R, K] in float32."""
        rows, cols = self.numbers_RK.shape
        values = self.numbers_RK.view(rows, -1, GROUP).float() * self.scale_RG.float()[..., None]
        if self.least_RG is not None:
            values = values + self.least_RG.float()[..., None]
        return values.reshape(rows, cols)


class PackedMatrix:
    """One matrix [R, K] in the extension's memory."""

    def __init__(
        self,
        library: Library,
        form: str,
        shape: tuple[int, int],
        group: int,
        parts: Mapping[str, Tensor | np.ndarray],
        bias_R: Tensor | None = None,
    ) -> None:
        self.format, self.shape, self.group = form, shape, group
        if bias_R is not None:
            parts = {**parts, "bias": padded(bias_R.float())}
        self._parts = {name: Memory(library, values) for name, values in parts.items()}
        self.bytes = sum(memory.bytes for memory in self._parts.values())
        self.c = Matrix(
            format=FORMATS.index(form),
            rows=shape[0],
            cols=shape[1],
            group=group,
            **{name: memory.at for name, memory in self._parts.items()},
        )

    def parts(self) -> dict[str, np.ndarray]:
        """The bytes of each array, where they are."""
        return {name: memory.whole() for name, memory in self._parts.items()}


def pack(
    library: Library, weight_RK: Tensor, form: str, bias_R: Tensor | None = None
) -> PackedMatrix:
    """A matrix of floats in one of the formats of the table above."""
    rows, cols = weight_RK.shape
    if form in ("float32", "bfloat16"):
        data = panels(weight_RK.to(getattr(torch, form)), 2 if form == "bfloat16" else 1)
        return PackedMatrix(library, form, (rows, cols), 0, {"data": data}, bias_R)
    if form == "int4":
        return pack_blocks(library, quantise_int4(weight_RK), bias_R)
    assert form in ("int8", "w8a8"), form
    return _pack_int8(
        library, *quantise_int8(weight_RK, wide_group(cols) if form == "w8a8" else GROUP), bias_R
    )


def pack_blocks(library: Library, blocks: Blocks, bias_R: Tensor | None = None) -> PackedMatrix:
    """A matrix that is in blocks already."""
    if blocks.least_RG is None:
        return _pack_int8(library, blocks.numbers_RK, blocks.scale_RG.float(), bias_R)
    rows, cols = blocks.numbers_RK.shape
    # a byte: column j in its low half, column j + 4 in its high half
    pairs = panels(blocks.numbers_RK, 8).unflatten(-1, (2, 4))
    data = pairs[..., 0, :] | (pairs[..., 1, :] << 4)
    scales = torch.stack([columns(blocks.scale_RG.half()), columns(blocks.least_RG.half())], 2)
    parts = {"data": data, "scales": scales}
    return PackedMatrix(library, "int4", (rows, cols), GROUP, parts, bias_R)


def _pack_int8(
    library: Library, numbers_RK: Tensor, scale_RG: Tensor, bias_R: Tensor | None
) -> PackedMatrix:
    rows, cols = numbers_RK.shape
    group = cols // scale_RG.shape[1]
    sums_RG = numbers_RK.view(rows, -1, group).sum(-1, dtype=torch.int32)
    parts = {
        "data": panels(numbers_RK, 4),
        "scales": columns(scale_RG.float()),
        "sums": columns(sums_RG),
    }
    return PackedMatrix(library, "int8", (rows, cols), group, parts, bias_R)


def wide_group(cols: int) -> int:
    """Columns that share a scale in w8a8: the most of 128 that divide a row. (One scale for a row
    and a token, the format's usual form, costs SmolLM2 four percent of perplexity.)"""
    return next((n for n in (128, 96, 64) if cols % n == 0), GROUP)


def quantise_int8(weight_RK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Numbers in -127..127 [R, K] and scales [R, K / group]; to the nearest, ties to even."""
    grouped = weight_RK.float().unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    numbers = (grouped / scale.clamp(min=1e-30)).round().to(torch.int8)
    return numbers.flatten(1), scale.squeeze(-1)


def quantise_int4(weight_RK: Tensor) -> Blocks:
    """Sixteen steps between the least and the largest of each group, as GGUF's Q4_1."""
    grouped = weight_RK.float().unflatten(1, (-1, GROUP))
    least, most = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = ((most - least) / 15).half()
    least = least.half()
    numbers = ((grouped - least.float()) / scale.float().clamp(min=1e-30)).round().clamp(0, 15)
    return Blocks(
        numbers_RK=numbers.to(torch.uint8).flatten(1),
        scale_RG=scale.squeeze(-1),
        least_RG=least.squeeze(-1),
    )


def padded(values: Tensor) -> Tensor:
    """With zeros behind the last row, to a multiple of `LANES` rows."""
    missing = -len(values) % LANES
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


def panels(weight_RK: Tensor, step: int) -> Tensor:
    """[R, K] -> [panels, K / step, LANES, step]."""
    whole = padded(weight_RK)
    return whole.view(len(whole) // LANES, LANES, -1, step).transpose(1, 2).contiguous()


def columns(scale_RG: Tensor) -> Tensor:
    """[R, G] -> [panels, G, LANES]."""
    whole = padded(scale_RG)
    return whole.view(len(whole) // LANES, LANES, -1).transpose(1, 2).contiguous()


def multiply(library: Library, packed: PackedMatrix, x_TK: np.ndarray) -> np.ndarray:
    """x [T, K] -> [T, R] in float32."""
    x_TK = np.ascontiguousarray(x_TK, dtype=np.float32)
    rows = packed.shape[0]
    out = np.empty((len(x_TK), -(-rows // LANES) * LANES), dtype=np.float32)
    library.c.ds_multiply(
        ctypes.byref(packed.c), x_TK.ctypes.data, len(x_TK), ctypes.c_void_p(out.ctypes.data)
    )
    return out[:, :rows]


def usable_library() -> Library:
    """The extension, built where that has not been done.

    Raises:
        NotBuilt: it cannot be built, or its products are wrong on this processor.
    """
    found = library()
    if not products_are_exact(found):
        raise NotBuilt(f"its integer products are not exact here ({found.instructions})")
    return found


@functools.cache
def products_are_exact(library: Library) -> bool:
    """Whether integer products are exact where they are largest: at +-127 an instruction that adds
    two products in 16 bits and cuts them off would not be."""
    cols = 2 * GROUP
    signs = 1 - 2 * (torch.arange(LANES * cols).view(LANES, cols) % 3 == 0).to(torch.int8)
    x = np.full((1, cols), 127.0, dtype=np.float32)
    ones = torch.ones(LANES, cols // GROUP)
    eight = Blocks(numbers_RK=127 * signs, scale_RG=ones.half())
    four = Blocks(
        numbers_RK=torch.full((LANES, cols), 15, dtype=torch.uint8),
        scale_RG=ones.half(),
        least_RG=0 * ones.half(),
    )
    return all(
        np.array_equal(multiply(library, pack_blocks(library, blocks), x)[0], 127.0 * whole)
        for blocks in (eight, four)
        for whole in [blocks.whole().sum(1).numpy()]
    )
