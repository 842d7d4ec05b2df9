"""Shared by the parity tests: random models that are worth comparing, and an exact oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

BuildPair = Callable[..., tuple[Any, Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _softmax_keeps_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' eager attention rounds its softmax to float32; an oracle must not."""
    real = F.softmax

    def softmax(x: torch.Tensor, dim: int | None = None, **options: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            options.pop("dtype", None)
        return real(x, dim, **options)

    monkeypatch.setattr(F, "softmax", softmax)


@pytest.fixture
def build_pair() -> BuildPair:
    """config -> (oracle with eager attention, the same model again), far from uniform."""

    def build(config: Any, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
        return _model(config, dtype), _model(config, dtype)

    return build


def _model(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        vector = parameter.ndim < 2
        scale = vector and ("weight" in name or "norm" in name)  # of a norm: near one
        parameter.data = 1 + 0.2 * noise if scale else 0.3 * noise
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(dtype).eval()
