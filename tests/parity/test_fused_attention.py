"""The fused attention against its readable twin, for every shape that takes its own way."""

from __future__ import annotations

import pytest
import torch

from draftsmith.core.attention import attend_fused, attend_reference

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (16, 8)])
def test_fused_attention_equals_the_written_out_one(
    dtype: torch.dtype, tokens: int, heads: int, shared: int, width: int, value_width: int
) -> None:
    """Three rows with masks of their own; queries come transposed, keys as a view of a store."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(3, tokens, heads, width, generator=generator).transpose(1, 2).to(dtype)
    key = torch.randn(3, shared, 64, width, generator=generator).to(dtype)[:, :, :48]
    value = torch.randn(3, shared, 64, value_width, generator=generator).to(dtype)[:, :, :48]
    seen = torch.rand(3, 1, tokens, 48, generator=generator) < 0.4
    seen[..., 0] = True
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    fused = attend_fused(query, key, value, mask, scale=0.3)
    written = attend_reference(query, key, value, mask, scale=0.3)
    assert fused.shape == written.shape == (3, heads, tokens, value_width)
    torch.testing.assert_close(fused, written, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_a_masked_column_has_no_weight_at_all() -> None:
    """Whatever stands in unused columns of the cache must not leak, not even by a rounding."""
    query, key = torch.ones(1, 2, 1, 8), torch.zeros(1, 1, 16, 8)
    value = torch.zeros(1, 1, 16, 8)
    value[..., 3:, :] = 1e30
    mask = torch.zeros(1, 1, 1, 16)
    mask[..., 3:] = torch.finfo(torch.float32).min
    for attend in (attend_fused, attend_reference):
        assert float(attend(query, key, value, mask, scale=1.0).abs().max()) == 0.0
