"""Laws: the only place where tokens are drawn and probabilities are read.

A `Law` both draws a token and reports its probability, so the two cannot disagree. Temperature 0 is
a point mass: greedy decoding is no special case. Samplers (`core/sampling.py`) turn logits into
laws.

Randomness is keyed, not sequential: a draw is a function of (seed, request id, position, purpose,
lane). A row therefore never depends on its neighbours in the batch, and the drafter's noise is
never the verifier's.

Shape letters: R rows of laws, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.transfer import to_device

Rows = np.ndarray
"""Row numbers [R], int64, on the host."""


class Purpose(enum.IntEnum):
    """What a draw is for; equal keys with different purposes give independent noise."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    DRAFTER_STATE = 4


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64 (Stafford's variant 13): avalanche of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FEW = 32
"""So many numbers are made one by one, in a fraction of the time that arrays take."""


def _mix_one(x: int) -> int:
    """As `_mix`."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


_WORD = 0xFFFFFFFFFFFFFFFF


class Noise:
    """The random numbers of one decoding step for B rows, keyed and stateless.

    Args:
        seed: of the run.
        request_ids: [B], what distinguishes one request from another.
        roots: [B], number of known tokens of each row: the position of the next one.
    """

    __slots__ = ("_base_B", "roots_B")

    def __init__(self, seed: int, request_ids: Sequence[int], roots: Sequence[int]) -> None:
        ids = np.asarray(request_ids, dtype=np.int64).astype(np.uint64)
        start = np.full(len(ids), int(seed) & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
        self._base_B = _mix(_mix(start + _GOLDEN) ^ (ids + _GOLDEN) * _GOLDEN)
        self.roots_B = np.asarray(roots, dtype=np.int64)

    def uniform(
        self, rows: Rows, depth: int | Rows, purpose: Purpose, lane: int | Rows = 0
    ) -> np.ndarray:
        """[R] float64 in [0, 1), for the token `depth` places after the root (the next one: 0)."""
        if len(rows) <= _FEW:
            return np.array(self._one_by_one(rows, depth, purpose, lane), dtype=np.float64)
        position = (self.roots_B[rows] + depth).astype(np.uint64)
        code = np.uint64(int(purpose)) << np.uint64(56)
        key = _mix(self._base_B[rows] + (position + np.uint64(1)) * _GOLDEN)
        lanes = np.asarray(lane, dtype=np.int64).astype(np.uint64)
        key = _mix(key ^ (code | (lanes + np.uint64(1))))
        return (key >> np.uint64(12)).astype(np.float64) * (1.0 / (1 << 52))

    def _one_by_one(
        self, rows: Rows, depth: int | Rows, purpose: Purpose, lane: int | Rows
    ) -> list[float]:
        """As `uniform`."""
        golden, code = int(_GOLDEN), int(purpose) << 56
        every: list[list[int]] = [
            one.tolist()
            for one in (
                self._base_B[rows],
                self.roots_B[rows],
                np.broadcast_to(depth, len(rows)),
                np.broadcast_to(lane, len(rows)),
            )
        ]
        found = []
        for base, root, deep, number in zip(*every, strict=True):
            key = _mix_one(base + (root + deep + 1) * golden & _WORD)
            key = _mix_one(key ^ (code | number + 1 & _WORD))
            found.append((key >> 12) * (1.0 / (1 << 52)))
        return found

    def categorical(
        self, weights_RK: Tensor, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0
    ) -> Tensor:
        """[R] column drawn with probability proportional to its weight, by inverting the CDF."""
        u_R = self.uniform(rows, depth, purpose, lane)
        return invert(weights_RK, to_device(u_R, weights_RK.device))

    def accept(self, prob_R: Tensor, rows: Rows, depth: int, lane: int | Rows = 0) -> np.ndarray:
        """[R] bool, True with probability `prob_R` (values above 1 count as 1)."""
        u = self.uniform(rows, depth, Purpose.ACCEPT, lane)
        return u < prob_R.double().cpu().numpy()

    def take(self, rows: Sequence[int]) -> Noise:
        out = object.__new__(Noise)
        index = np.asarray(rows, dtype=np.int64)
        out._base_B, out.roots_B = self._base_B[index], self.roots_B[index]
        return out

    def at(self, roots: Sequence[int]) -> Noise:
        """The same streams behind other roots (the next step)."""
        out = object.__new__(Noise)
        out._base_B, out.roots_B = self._base_B, np.asarray(roots, dtype=np.int64)
        return out


def invert(weights_RK: Tensor, u_R: Tensor) -> Tensor:
    """[R] column at which a share u of each row's weight lies to the left."""
    cdf_RK = weights_RK.double().cumsum(-1)
    # 52-bit u: u * total < total, so the search always ends at a column of positive weight
    threshold_R1 = (u_R * cdf_RK[:, -1])[:, None]
    column_R = torch.searchsorted(cdf_RK, threshold_R1, right=True)[:, 0]
    return column_R.clamp(max=weights_RK.shape[1] - 1)  # NaN: reported later, but no column


class Law:
    """R probability laws over V tokens, normalised, float32 or wider.

    Dense (`ids_RK` is None: column = token) or sparse (mass only on K listed tokens, in the order
    of their ids; a point mass is K = 1). A draw inverts the cumulative sum in id order, so it does
    not depend on which form a law has. Immutable.
    """

    __slots__ = ("ids_RK", "probs_RK", "vocab_size")

    def __init__(self, probs_RK: Tensor, vocab_size: int, ids_RK: Tensor | None = None) -> None:
        self.probs_RK, self.ids_RK, self.vocab_size = probs_RK, ids_RK, vocab_size

    @classmethod
    def point(cls, tokens_R: Tensor, vocab_size: int) -> Law:
        """All mass on one token per row."""
        ids = tokens_R.reshape(-1, 1)
        return cls(torch.ones(ids.shape, dtype=torch.float32, device=ids.device), vocab_size, ids)

    @classmethod
    def from_weights(cls, weights_RK: Tensor, vocab_size: int, ids_RK: Tensor | None = None) -> Law:
        """Normalise non-negative weights (each row must have some)."""
        return cls(weights_RK / weights_RK.sum(-1, keepdim=True), vocab_size, ids_RK)

    @classmethod
    def cat(cls, laws: Sequence[Law]) -> Law:
        """The rows of several laws over one vocabulary."""
        if len(laws) == 1:
            return laws[0]
        vocab = laws[0].vocab_size
        if any(law.ids_RK is None for law in laws):
            return cls(torch.cat([law.probs() for law in laws]), vocab)
        widest = max(law.probs_RK.shape[1] for law in laws)
        ids, probs = [], []
        for law in laws:  # fill up with token 0 at probability 0
            assert law.ids_RK is not None
            room = (0, widest - law.probs_RK.shape[1])
            ids.append(torch.nn.functional.pad(law.ids_RK, room))
            probs.append(torch.nn.functional.pad(law.probs_RK, room))
        return cls(torch.cat(probs), vocab, torch.cat(ids))

    @property
    def num_rows(self) -> int:
        return self.probs_RK.shape[0]

    def row(self, r: int) -> tuple[Tensor, Tensor | None]:
        """One law as it is kept: ([K] probabilities, [K] their ids; None: all of them)."""
        return self.probs_RK[r], None if self.ids_RK is None else self.ids_RK[r]

    def probs(self) -> Tensor:
        """[R, V]."""
        if self.ids_RK is None:
            return self.probs_RK
        dense = self.probs_RK.new_zeros((self.num_rows, self.vocab_size))
        return dense.scatter_add_(1, self.ids_RK, self.probs_RK)

    def prob(self, tokens_R: Tensor) -> Tensor:
        """[R], the probability of one token per row."""
        tokens = to_device(tokens_R, self.probs_RK.device)[:, None]
        if self.ids_RK is None:
            return self.probs_RK.gather(1, tokens)[:, 0]
        return (self.probs_RK * (self.ids_RK == tokens)).sum(-1)

    def entropy(self) -> Tensor:
        """[R], in nats."""
        each_RK: Tensor = torch.special.entr(self.probs_RK)
        return each_RK.sum(-1)

    def gap(self, tokens_R: Tensor) -> Tensor:
        """[R], how much less probable than the most probable token this one is."""
        return self.probs_RK.max(-1).values - self.prob(tokens_R)

    def mode(self) -> Law:
        """All mass on the most probable token of each row, the lowest id on a tie."""
        return Law.point(self._tokens(self.probs_RK.argmax(-1)), self.vocab_size)

    def draw(
        self, noise: Noise, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0
    ) -> Tensor:
        """[R] tokens, row r with the noise of batch row `rows[r]`."""
        if self.ids_RK is not None and self.ids_RK.shape[1] == 1:
            return self.ids_RK[:, 0]
        return self._tokens(noise.categorical(self.probs_RK, rows, depth, purpose, lane))

    def draw_with(self, u_R: Tensor) -> Tensor:
        """[R], the tokens that `draw` gives where these are its uniform numbers."""
        return self._tokens(invert(self.probs_RK, u_R))

    def _tokens(self, column_R: Tensor) -> Tensor:
        if self.ids_RK is None:
            return column_R
        return self.ids_RK.gather(1, column_R[:, None])[:, 0]

    def take(self, rows: Tensor | np.ndarray | Sequence[int]) -> Law:
        """Laws of these rows."""
        index = to_device(torch.as_tensor(rows), self.probs_RK.device)
        ids = None if self.ids_RK is None else self.ids_RK[index]
        return Law(self.probs_RK[index], self.vocab_size, ids)

    def where(self, mask_R: Tensor, other: Law) -> Law:
        """These laws where the mask is set, those of `other` (over the same ids) elsewhere."""
        probs = torch.where(mask_R[:, None], self.probs_RK, other.probs_RK)
        return Law(probs, self.vocab_size, self.ids_RK)

    def without(self, tokens_R: Tensor) -> Law:
        """The law given that the token is not this one. A row with no other mass stays as it is."""
        tokens = to_device(tokens_R, self.probs_RK.device)[:, None]
        if self.ids_RK is None:
            left = self.probs_RK.scatter(1, tokens, 0.0)
        else:
            left = self.probs_RK * (self.ids_RK != tokens)
        return self._renormalised(left)

    def residual(self, q: Law) -> Law:
        """norm(max(p - q, 0)): what is left after a rejection (Leviathan et al. 2023).

        Rows where nothing is left (p = q up to rounding, so that a rejection has probability 0)
        stay as they are.
        """
        return self._renormalised((self.probs_RK - self._beside(q)).clamp_(min=0.0))

    def excess(self, q: Law, share_R: Tensor) -> tuple[Law, Tensor]:
        """(norm(max(share p - q, 0)), [R] float64 the sum before it was normalised): as `residual`,
        for a share of p's mass."""
        share_R1 = to_device(share_R, self.probs_RK.device).to(self.probs_RK)[:, None]
        left_RK = (share_R1 * self.probs_RK - self._beside(q)).clamp_(min=0.0)
        return self._renormalised(left_RK), left_RK.sum(-1).double().cpu()

    def _beside(self, q: Law) -> Tensor:
        """q's probabilities of the tokens of these laws, on their device: those of an opaque draft
        begin on the host."""
        q_RV = to_device(q.probs(), self.probs_RK.device)
        return q_RV if self.ids_RK is None else q_RV.gather(1, self.ids_RK)

    def _renormalised(self, left_RK: Tensor) -> Law:
        mass_R1 = left_RK.sum(-1, keepdim=True)
        probs = torch.where(mass_R1 > 0, left_RK / mass_R1, self.probs_RK)
        return Law(probs, self.vocab_size, self.ids_RK)
