"""Closed formulas of speculative decoding. Pure arithmetic: no tensors, no models.

alpha: probability that a drafted token is accepted given that its predecessors were.
gamma: number of drafted tokens per step. tau: tokens per step, correction or bonus included.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens_per_step(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma+1)) / (1 - alpha): i.i.d. acceptance (Leviathan et al. 2023, Eq. 1)."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}.")
    if gamma < 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}.")
    if alpha == 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def tokens_per_step_by_position(acceptance: Sequence[float]) -> float:
    """tau from conditional acceptance rates by position: 1 + a1 + a1 a2 + ..."""
    tau, survive = 1.0, 1.0
    for rate in acceptance:
        survive *= rate
        tau += survive
    return tau


def predicted_speedup(
    tau: float, target_seconds_one: float, draft_seconds: float, target_seconds_block: float
) -> float:
    """tau * t_target(1) / (t_draft + t_target(n)): speed-up over autoregressive decoding.

    Args:
        tau: tokens per step.
        target_seconds_one: seconds of a target forward of one token.
        draft_seconds: seconds of drafting per step.
        target_seconds_block: seconds of a target forward of the whole block.
    """
    return tau * target_seconds_one / (draft_seconds + target_seconds_block)


def memory_bound_speedup(tau: float, cost_ratio: float, gamma: int) -> float:
    """tau / (c gamma + 1), c = draft / target parameters (MBSU of Direct Alignment, mended)."""
    return tau / (cost_ratio * gamma + 1)
