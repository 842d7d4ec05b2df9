"""Moving numbers between host and device without waiting more often than one must.

Work is given to a device and runs there while the host goes on. Uploading small arrays does not
stop that; looking at a result does, so what a step wants to know comes down in one piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Upload without waiting for the device. (The driver has copied `values` when this returns.)"""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    # towards the host the same request would return before the numbers are there
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def to_host(*values: Tensor) -> list[np.ndarray]:
    """All of them in one transfer, the only place where the host waits. Integers and booleans come
    as int64, other numbers as float64."""
    words = torch.cat([_words(value).reshape(-1) for value in values]).cpu()
    parts = words.split([value.numel() for value in values])
    return [
        (part.view(torch.float64) if value.is_floating_point() else part)
        .numpy()
        .reshape(value.shape)
        for part, value in zip(parts, values, strict=True)
    ]


def _words(value: Tensor) -> Tensor:
    """As int64; the bits of other numbers."""
    if value.is_floating_point():
        return value.double().contiguous().view(torch.int64)
    return value.long()
