"""Forwards of one fixed shape, for bit-equal logits from transformers' own code.

Products of matrices sum in another order when their shapes differ, so the logits of a token depend
on how many tokens are fed beside it. Here whatever is asked for (a prompt, a batch, a tree) becomes
forwards of one row and N tokens:

    asked for, N = 4     a b c d e f             fed    a b c d | e f r n0 | n1 s . .
                         r n0 n1 (a tree)
                         s       (a row)         . is padding: what it gives is dropped

Linear layers, norms and the rotary embedding see N tokens always. Attention goes branch by branch,
keys in the order of their positions (see `Branch`), N queries and whole pieces of keys at a time
(`KEYS`). Two things then remain that no shape can promise, so a target tries them when it is loaded
(`gives_equal_bits`): that a kernel gives a token the same bits in each of the N places, and that
keys which are masked behind the text contribute exactly nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import Block, Branch, KVCache, lay_out
from draftsmith.core.transfer import to_device, to_host
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.targets.base import Target

KEYS = 512
"""PyTorch's attention on a CPU takes so many keys at once. Views are multiples of it: where a
shorter last piece is followed by more keys, some processors (AVX2) sum it in another order."""

Forward = Callable[[Tensor, Block, int, Signals], TargetOutput]


class FixedWidth:
    """Runs a target's forwards in pieces of one row and `width` tokens.

    Args:
        forward: the target's own.
        width: N.
        whole: the model needs its logits of all tokens, also where nobody asks for them.
    """

    def __init__(self, forward: Forward, width: int, *, whole: bool) -> None:
        self._forward, self.width, self._whole = forward, width, whole

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        """Logits and signals as the target's own forward gives them; zeros for padding."""
        asked = _Asked.of(block)
        rows, width = tokens_BT.shape
        logits_BNV: Tensor | None = None
        signals_BTS: Tensor | None = None
        for first in range(0, len(asked.row_F), self.width):
            piece = slice(first, first + self.width)
            row, token = asked.row_F[piece], asked.token_F[piece]
            kept = token >= width - keep
            # the head, too, always sees N tokens or none
            logits = self.width if self._whole or kept.any() else 1
            out = self._forward(*self._piece(tokens_BT, block, asked, row, token), logits, signals)
            if logits_BNV is None:
                logits_BNV = out.logits_BNV.new_zeros(rows, keep, out.logits_BNV.shape[-1])
            if kept.any():
                where = np.flatnonzero(kept)
                logits_BNV[row[where], token[where] - (width - keep)] = out.logits_BNV[0, where]
            if out.signals_BTS is not None:
                if signals_BTS is None:
                    signals_BTS = out.signals_BTS.new_zeros(rows, width, out.signals_BTS.shape[-1])
                signals_BTS[row, token] = out.signals_BTS[0, : len(row)]
        assert logits_BNV is not None, "no token was fed"
        return TargetOutput(logits_BNV=logits_BNV, signals_BTS=signals_BTS)

    def _piece(
        self, tokens_BT: Tensor, block: Block, asked: _Asked, row: np.ndarray, token: np.ndarray
    ) -> tuple[Tensor, Block]:
        """Tokens and block of a forward of these tokens, and of padding up to the width."""
        device = tokens_BT.device
        padding = self.width - len(row)
        tokens_1N = torch.zeros((1, self.width), dtype=tokens_BT.dtype, device=device)
        tokens_1N[0, : len(row)] = tokens_BT[row, token]
        positions_N = np.pad(asked.positions_BT[row, token], (0, padding))
        # padding goes to a column that no row uses in this view
        slots_N = np.pad(asked.columns_BT[row, token], (0, padding), constant_values=block.view - 1)
        rows_N = np.pad(row, (0, padding))
        return tokens_1N, Block(
            cache=block.cache,
            positions_BT=positions_N[None],
            slots_BT=slots_N[None],
            view=block.view,
            lengths_B=block.lengths_B,
            columns_BC=block.columns_BC,
            staged_at=block.staged_at,
            see_BTC=block.see_BTC,
            branches=tuple(self._branches(block, asked, row, token, device)),
            _index=(to_device(rows_N[None], device), to_device(slots_N[None], device)),
        )

    def _branches(
        self,
        block: Block,
        asked: _Asked,
        row: np.ndarray,
        token: np.ndarray,
        device: torch.device,
    ) -> Sequence[Branch]:
        """As few texts as hold all of these tokens: each of them up to a token that no later one
        follows."""
        out: list[Branch] = []
        left = np.ones(len(row), dtype=bool)
        for leaf in range(len(row) - 1, -1, -1):
            if not left[leaf]:
                continue
            own, start = int(row[leaf]), int(block.lengths_B[row[leaf]])
            sees_C = asked.see_BTC[own, token[leaf]]
            staged = asked.staged - asked.see_BTC.shape[1]  # columns of earlier forwards
            on = left & (row == own) & sees_C[staged + token]
            left &= ~on
            path = block.columns_BC[own, sees_C]
            end = start + len(path)
            order_S = None
            if (path != np.arange(start, end)).any():
                order = np.arange(block.view)
                order[start:end] = path
                order_S = to_device(order, device)
            last_T = np.zeros(self.width, dtype=np.int64)
            last_T[: len(row)][on] = asked.last_BT[own, token[on]]
            tokens = to_device(np.flatnonzero(on), device)
            out.append(Branch(row=own, tokens=tokens, last_T=last_T, order_S=order_S))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The tokens of a block on the host, those that are padding left out."""

    row_F: np.ndarray
    token_F: np.ndarray
    positions_BT: np.ndarray
    columns_BT: np.ndarray
    see_BTC: np.ndarray
    last_BT: np.ndarray
    """The place of each token in its own text."""
    staged: int

    @classmethod
    def of(cls, block: Block) -> _Asked:
        see_BTC: Any = block.see_BTC
        positions_BT: Any = block.positions_BT
        if isinstance(see_BTC, Tensor):
            (see_BTC,) = to_host(see_BTC)
        if isinstance(positions_BT, Tensor):
            (positions_BT,) = to_host(positions_BT)
        see_BTC = see_BTC.astype(bool)
        width, staged = see_BTC.shape[1:]
        last_BT = block.lengths_B[:, None] + see_BTC.sum(-1) - 1
        # padding in front of a short row sees nothing; nodes that pad a tree stand at its root
        real_BT = see_BTC.any(-1) & (positions_BT >= last_BT)
        row_F, token_F = np.nonzero(real_BT)
        return cls(
            row_F=row_F,
            token_F=token_F,
            positions_BT=positions_BT,
            columns_BT=block.columns_BC[:, staged - width :],
            see_BTC=see_BTC,
            last_BT=last_BT,
            staged=staged,
        )


def has_experts(config: Any) -> bool:
    """Its tokens take turns at experts, which multiply as many at once as chose them."""
    named = (value for key, value in config.to_dict().items() if key.endswith("experts"))
    return any(isinstance(value, int) and value > 1 for value in named)


def gives_equal_bits(target: Target, ids: Sequence[int], width: int) -> bool:
    """Whether these tokens get the same logits as one text, and as a path through a tree, each at
    another place of a forward, beside other tokens and in front of a longer cache. Behind random
    keys: a short text would not show in which order a kernel sums.

        one text    a b c d                               places 0 1 2 3, as few columns as hold it
        a tree      a b, then  c -+- x                    c and d at places 0 and 2, 1,024 more
                                  `- d
    """
    known = _KNOWN if target.max_length is None else min(_KNOWN, target.max_length - len(ids))
    count = min(max(width // 2, 2), len(ids))
    start = len(ids) - count
    cache = _filled(target, known, len(ids))
    tokens, block = lay_out(cache, [ids])
    plain_NV = target.forward(torch.from_numpy(tokens), block, len(ids), Signals()).logits_BNV[0]
    cache = _filled(target, known, len(ids) + count + 2 * KEYS)
    if start:
        tokens, block = lay_out(cache, [ids[:start]])
        target.forward(torch.from_numpy(tokens), block, 1, Signals())
        cache.commit(np.array([start]))
    nodes, parents = [], []
    for depth, token in enumerate(ids[start + 1 :]):
        nodes += [ids[0], token]
        parents += [2 * depth - 1] * 2
    tree = np.array([nodes], dtype=np.int64), np.array([parents], dtype=np.int64)
    tokens, block = lay_out(cache, [ids[start : start + 1]], *tree)
    block.view = cache.capacity
    keep = 1 + len(nodes)
    tree_NV = target.forward(torch.from_numpy(tokens), block, keep, Signals()).logits_BNV[0]
    return torch.equal(plain_NV[start:], tree_NV[::2])


_KNOWN = 700
"""Columns of random keys, no multiple of what kernels take at once."""


def _filled(target: Target, known: int, more: int) -> KVCache:
    """A cache of a row with this many columns of random keys and values, always the same."""
    cache = target.new_cache(1, known + more)
    draw = torch.Generator().manual_seed(0)
    kept = [
        torch.randn((layers, heads, known, width), generator=draw)
        for layers, _, heads, _, width in (place.shape for place in cache.places())
    ]
    cache.fill(0, [one.to(cache.spec.device, cache.spec.dtype) for one in kept])
    return cache
