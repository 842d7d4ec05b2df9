"""Packed linear layers give the bits of the plain ones, and stay out of the way elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.targets import hf
from draftsmith.targets.hf import PackedLinears
from draftsmith.targets.toy import tiny_target

if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    pytest.skip("this processor has no bfloat16 arithmetic", allow_module_level=True)


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(96, 160), nn.Linear(160, 64, bias=False), nn.Linear(64, 301)]
    return nn.Sequential(*parts).to(dtype)


@pytest.mark.parametrize("tokens", [1, 2, 5, 9, 16, 61, 300])
def test_packed_layers_give_the_bits_of_plain_ones(tokens: int) -> None:
    model = layers(torch.bfloat16)
    packed = PackedLinears(model)
    assert len(packed) == 3
    with torch.inference_mode():
        for layer in model:
            x = torch.randn(2, tokens, layer.in_features).bfloat16()
            packed.use(True)
            fast = layer(x)
            packed.use(False)
            plain = layer(x)
            assert torch.equal(plain, F.linear(x, layer.weight, layer.bias))
            scale = plain.abs().max()
            # the same sums; kernels for other shapes may order them otherwise in the last place
            assert (fast - plain).abs().max() <= 2**-7 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_formats_are_left_alone(dtype: torch.dtype) -> None:
    assert len(PackedLinears(layers(dtype))) == 0


def test_large_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "LIMIT_BYTES", 1000)
    assert len(PackedLinears(layers(torch.bfloat16))) == 0


def test_transformers_own_code_sees_the_plain_layers() -> None:
    target = tiny_target(64, dtype=torch.bfloat16)
    head = target.model.lm_head
    assert "forward" in head.__dict__
    with target.native():
        assert "forward" not in head.__dict__
    assert "forward" in head.__dict__
