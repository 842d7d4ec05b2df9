"""The loss of a trained model from its size and its data: L(N, D) = E + A / N^nu + B / D^delta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossLaw:
    """Hoffmann et al. 2022 (arXiv 2203.15556), eq. 2; the constants are those of Besiroglu et al.
    2024 (arXiv 2404.10102). Losses are in nats per token.

    The scaling-laws paper prints eq. 7 and 8 with the powers in the denominator *and* negative;
    this is the form that its results were computed with.
    """

    E: float = 1.8172
    """The irreducible loss."""
    A: float = 482.01
    nu: float = 0.3478
    B: float = 2085.43
    delta: float = 0.3658

    @classmethod
    def of(cls, values: tuple[float, ...]) -> LossLaw:
        """Build the law from E, A, nu, B, delta in this order."""
        E, A, nu, B, delta = values
        return cls(E=E, A=A, nu=nu, B=B, delta=delta)

    def __post_init__(self) -> None:
        values = {"E": self.E, "A": self.A, "nu": self.nu, "B": self.B, "delta": self.delta}
        for name, value in values.items():
            if not (np.isfinite(value) and value >= 0):
                raise InputError(f"{name} of the loss law must be 0 or more, got {value}")

    def loss(self, params: ArrayLike, tokens: ArrayLike) -> Floats:
        """Return nats per token of a model with so many parameters, trained on so many tokens."""
        N, D = np.asarray(params, np.float64), np.asarray(tokens, np.float64)
        return np.asarray(self.E + self.A * N**-self.nu + self.B * D**-self.delta)

    def perplexity(self, params: ArrayLike, tokens: ArrayLike) -> Floats:
        """Return exp of the loss (eq. 7 and 8); inf where that overflows."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self.loss(params, tokens)))

    def slope(self, params: ArrayLike) -> Floats:
        """Return dL / d ln N at the same data: what a model gains from being larger."""
        return np.asarray(-self.nu * self.A * np.asarray(params, np.float64) ** -self.nu)

    def data_slope(self, tokens: ArrayLike) -> Floats:
        """Return dL / d ln D: what a model gains from more data."""
        return np.asarray(-self.delta * self.B * np.asarray(tokens, np.float64) ** -self.delta)
