"""The preallocated key/value cache. Attention writes; the owner commits.

Every row is compact: column c of a row holds the token at position c. A forward first *stages* its
columns behind the committed ones; the owner then keeps a path of them, or none:

    committed        staged by one forward
    [a b c d]        [root  n0  n1  n2]          n0 and n2 accepted (path 0 2):
                      pending   nodes
    [a b c d root n0 n2]                         commit keeps the root and moves n2 next to n0

The key view that attention reads grows in buckets of 256 columns (512 where the width of forwards
is fixed), so shapes rarely change (and can be compiled); attending over the whole capacity would
cost more than the rest of a small forward.

Shape letters: B rows, T new tokens, C staged columns, S columns of the view, G stores, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.transfer import to_device
from draftsmith.core.trees import geometry
from draftsmith.errors import BackendError

BUCKET = 256
_REMEMBERED = 1 << 13
"""Layouts with more cells of what tokens see are not remembered: of prompts, of large batches."""
NO_NODES = np.zeros((1, 0), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSpec:
    """What one layer stores per token: [(heads, width of keys, width of values)] per layer."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device
    bucket: int | None = None
    """Columns that views and stores grow by; None: `BUCKET`."""

    def round_up(self, columns: int) -> int:
        """The next multiple of the bucket."""
        bucket = self.bucket or BUCKET
        return -(-columns // bucket) * bucket

    def bytes_per_token(self) -> int:
        return sum(h * (k + v) for h, k, v in self.layers) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One text among those that a forward of several texts goes on with, its keys in the order of
    their positions: a path of a tree lies scattered over the columns of its row.

    columns    committed a b c | r n0 n1 n2        path r n0 n2 of tokens 0 1 3 of the forward
    order_S              0 1 2 | 3  4  6  7 ...    what token 3 sees is now one run, as if nothing
    last_T               3  4  .  5                else had been drafted: positions 0 to 5
    """

    row: int
    tokens: Tensor
    """Which tokens of the forward are the branch's own."""
    last_T: np.ndarray
    """The last position that each token of the forward sees; 0 for those of other branches."""
    order_S: Tensor | None
    """The column of each position; None: column c holds position c."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, store_BHSD: Tensor) -> Tensor:
        """[1, H, S, D]: its keys or values by position."""
        own = store_BHSD[self.row : self.row + 1]
        return own if self.order_S is None else own.index_select(2, self.order_S)

    def mask(self, window: int | None, view: int, like: Tensor) -> Tensor:
        """[1, 1, T, S] as `Block.mask`, over positions."""
        key = (window, like.dtype)
        if key not in self._masks:
            position_S, last_T1 = np.arange(view), self.last_T[:, None]
            allowed = position_S <= last_T1
            if window is not None:
                allowed &= position_S > last_T1 - window
            mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(to_device(~allowed, like.device), torch.finfo(like.dtype).min)
            self._masks[key] = mask[None, None]
        return self._masks[key]


@dataclass(kw_only=True, slots=True)
class Block:
    """The columns of one forward: where they are written, what they see, where they stand."""

    cache: KVCache
    positions_BT: np.ndarray | Tensor
    slots_BT: np.ndarray | int
    """Column of each new token, or the first one when all rows write the same run."""
    view: int
    lengths_B: np.ndarray
    """Columns of each row that were committed before: all new tokens see them."""
    columns_BC: np.ndarray
    """Columns of all that is staged."""
    staged_at: tuple[np.ndarray | Tensor, ...]
    """The positions of what is staged, a part per forward: column c stands at position c only where
    it is committed."""
    see_BTC: np.ndarray | Tensor
    """Which staged columns each new token sees."""
    eager: bool = False
    branches: tuple[Branch, ...] = ()
    """Attention goes branch by branch; none: all rows together, each over its columns."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _index: tuple[Tensor, Tensor] | None = None

    def positions(self, device: torch.device) -> Tensor:
        return to_device(self.positions_BT, device)

    @property
    def pending_B(self) -> np.ndarray:
        """[B] how many tokens each row is fed, of a block of pending tokens alone."""
        counts_B: np.ndarray = np.asarray(self.see_BTC)[:, -1].sum(-1)
        return counts_B

    def stop_at(self, last: int) -> None:
        """Positions beyond this one stand still there."""
        self.positions_BT = self.positions_BT.clip(max=last)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, T, S] additive, finite minimum where unseen; built once per window and step.

        A window counts positions, not columns: key k is seen from q when pos_q - pos_k < window.
        """
        key = (window, dtype)
        if key not in self._masks:
            device = self.cache.spec.device
            allowed = self._allowed(device)
            if window is not None:
                # position - window per token, so that no [B, T, S] of numbers is ever made
                oldest_BT1 = (self.positions(device) - window)[:, :, None]
                allowed &= self._column_positions(device)[:, None, :] > oldest_BT1
            mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
            mask.masked_fill_(allowed.logical_not_(), torch.finfo(dtype).min)
            self._masks[key] = mask[:, None]
        return self._masks[key]

    def _allowed(self, device: torch.device) -> Tensor:
        """[B, T, S] bool: what is committed, and of what is staged what each token sees."""
        see_BTC = to_device(self.see_BTC, device)
        rows, width, staged = see_BTC.shape
        if isinstance(self.slots_BT, int):  # all rows alike: the staged columns are one run
            start = self.slots_BT + width - staged
            allowed = torch.zeros((rows, width, self.view), dtype=torch.bool, device=device)
            allowed[:, :, :start] = True
            allowed[:, :, start : start + staged] = see_BTC
            return allowed
        committed_BS = np.arange(self.view) < self.lengths_B[:, None]
        allowed = to_device(committed_BS, device)[:, None].repeat(1, width, 1)
        columns_B1C = to_device(self.columns_BC, device)[:, None]
        return allowed.scatter_(2, columns_B1C.expand(-1, width, -1), see_BTC)

    def _column_positions(self, device: torch.device) -> Tensor:
        """[B, S]: the position at which each column of the view stands."""
        columns_BC = to_device(self.columns_BC, device)
        positions_BC = torch.cat([to_device(part, device) for part in self.staged_at], dim=1)
        plain_BS = torch.arange(self.view, device=device).repeat(len(columns_BC), 1)
        return plain_BS.scatter_(1, columns_BC, positions_BC)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and columns to write, for rows of unequal lengths; built once per forward."""
        if self._index is None:
            assert not isinstance(self.slots_BT, int)
            rows = torch.arange(len(self.slots_BT), device=device)[:, None]
            self._index = (rows, to_device(self.slots_BT, device))
        return self._index


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor in memory."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]


class KVCache:
    """Keys and values of B rows, preallocated; per-row lengths.

    Args:
        spec: what each layer stores.
        num_rows: B.
        capacity: columns to allocate at once (grows by half when a session outlives it).
    """

    def __init__(self, spec: KVSpec, num_rows: int, capacity: int) -> None:
        self.spec = spec
        self.lengths_B = np.zeros(num_rows, dtype=np.int64)
        self.staged = 0
        self._columns_BC = np.zeros((num_rows, 0), dtype=np.int64)
        self._staged_at: tuple[np.ndarray | Tensor, ...] = ()
        # Layers of one shape share a store, so that a commit is one copy and not one per layer.
        shapes = sorted({(h, w) for h, k, v in spec.layers for w in (k, v)})
        counts = dict.fromkeys(shapes, 0)
        self._keys: list[tuple[int, int]] = []
        self._values: list[tuple[int, int]] = []
        for h, k, v in spec.layers:
            for width, places in ((k, self._keys), (v, self._values)):
                places.append((shapes.index((h, width)), counts[h, width]))
                counts[h, width] += 1
        self._stores = [
            self._allocate(counts[h, w], num_rows, h, spec.round_up(capacity + 1), w)
            for h, w in shapes
        ]

    def _allocate(self, layers: int, rows: int, heads: int, columns: int, width: int) -> Tensor:
        # zeros, not empty: a masked column has weight 0, and 0 times a stray NaN is NaN
        try:
            return torch.zeros(
                (layers, rows, heads, columns, width),
                dtype=self.spec.dtype,
                device=self.spec.device,
            )
        except (RuntimeError, MemoryError) as error:
            gib = self.spec.bytes_per_token() * rows * columns / 2**30
            raise BackendError(
                f"No memory for a cache of {columns} tokens x {rows} rows ({gib:.1f} GiB): "
                "use fewer rows or fewer new tokens."
            ) from error

    @property
    def num_rows(self) -> int:
        return len(self.lengths_B)

    @property
    def capacity(self) -> int:
        return self._stores[0].shape[3] if self._stores else 1 << 40

    def whole(self) -> Tensor:
        """[2 L, B, H, S, D]: keys and values of all layers by turns, where all are of one shape."""
        (store,) = self._stores
        return store

    def places(self) -> tuple[Place, ...]:
        """Where its numbers lie: other caches may lie there later."""
        return tuple(
            Place(address=store.data_ptr(), shape=store.shape, strides=store.stride())
            for store in self._stores
        )

    # ------------------------------------------------------------------ writing

    def stage(
        self,
        depth_BT: np.ndarray | Tensor,
        see_BTC: np.ndarray | Tensor,
        pad_B: np.ndarray | None = None,
    ) -> Block:
        """Make room for T new tokens behind what is committed and staged. What only a device knows
        may stay there.

        Args:
            depth_BT: position of each token minus the row's committed length.
            see_BTC: bool, which staged columns (the earlier ones, then these T) a token sees.
            pad_B: leading columns of each row that hold no token (ragged pending, left-padded).
        """
        width = depth_BT.shape[1]
        lengths = self.lengths_B
        total = self.staged + width
        known = lengths.tolist()
        needed = max(known, default=0) + total + 1
        self.reserve(needed)
        view = min(self.spec.round_up(needed), self.capacity)
        pads = pad_B if pad_B is not None and any(pad_B.tolist()) else None
        start = known[0] if known else 0
        even = pads is None and known.count(start) == len(known)
        columns = lengths[:, None] + np.arange(self.staged, total)
        if pads is not None:
            assert self.staged == 0, "ragged pending tokens come first in a step"
            # pads go to a column that no row uses in this view
            columns = columns - pads[:, None]
            columns[np.arange(width) < pads[:, None]] = view - 1
        before = self._columns_BC
        self._columns_BC = np.concatenate([before, columns], 1) if self.staged else columns
        if isinstance(depth_BT, Tensor):
            positions: Any = depth_BT + to_device(lengths, depth_BT.device)[:, None]
        else:
            positions = depth_BT + lengths[:, None]
        if pads is not None:  # they are the first of their row
            for b, count in enumerate(pads.tolist()):
                positions[b, :count] = 0
        self._staged_at = (*self._staged_at, positions)
        slots = start + self.staged if even else columns
        self.staged = total
        return Block(
            cache=self,
            positions_BT=positions,
            slots_BT=slots,
            view=view,
            lengths_B=lengths,
            columns_BC=self._columns_BC,
            staged_at=self._staged_at,
            see_BTC=see_BTC,
        )

    def extend(
        self, block: Block, layer: int, k_BHTD: Tensor, v_BHTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; returns the views [B, H, S, D] to attend over."""
        keys = self._write(block, self._keys[layer], k_BHTD)
        return keys, self._write(block, self._values[layer], v_BHTD)

    def _write(self, block: Block, place: tuple[int, int], new_BHTD: Tensor) -> Tensor:
        store_BHSD = self._stores[place[0]][place[1]]
        if isinstance(block.slots_BT, int):
            store_BHSD.narrow(2, block.slots_BT, new_BHTD.shape[2]).copy_(new_BHTD)
        else:
            rows, slots = block.index(store_BHSD.device)
            store_BHSD[rows, :, slots] = new_BHTD.transpose(1, 2)
        return store_BHSD.narrow(2, 0, block.view)

    def reserve(self, columns: int) -> None:
        """Have room for so many tokens in each row."""
        if columns <= self.capacity:
            return
        wanted = self.spec.round_up(max(columns, self.capacity * 3 // 2))
        for i, old in enumerate(self._stores):
            layers, rows, heads, have, width = old.shape
            new = self._allocate(layers, rows, heads, wanted, width)
            new[:, :, :, :have] = old
            self._stores[i] = new

    # ------------------------------------------------------------------ the owner

    def commit(
        self, head_B: np.ndarray, path_BD: np.ndarray | None = None, num_B: np.ndarray | None = None
    ) -> None:
        """Keep each row's first `head_B` staged columns, then those of its path; drop the rest.

        Args:
            head_B: leading staged columns kept in place (the pending tokens).
            path_BD: column numbers counted from the end of the head, ascending; None: nothing more.
            num_B: how many entries of the path count.
        """
        taken = np.zeros_like(head_B) if num_B is None else num_B
        for b, count in enumerate(taken.tolist()):
            if count:
                assert path_BD is not None
                path = path_BD[b, :count]
                self._close_up(b, int(self.lengths_B[b] + head_B[b]), path)
        self.lengths_B = self.lengths_B + head_B + taken
        self.rollback()

    def _close_up(self, row: int, start: int, columns: np.ndarray) -> None:
        """Move these columns of a row, counted from `start`, side by side."""
        if columns.tolist() == list(range(len(columns))):
            return
        for store in self._stores:
            source = to_device(columns + start, store.device)
            store[:, row, :, start : start + len(columns)] = store[:, row, :, source]

    def rollback(self) -> None:
        """Forget all that is staged."""
        if self.staged or self._staged_at:
            self.staged = 0
            self._columns_BC, self._staged_at = np.zeros((self.num_rows, 0), dtype=np.int64), ()

    def rewind(self, lengths_B: Sequence[int] | np.ndarray) -> None:
        """Keep only the first `lengths_B` tokens of each row."""
        wanted = [int(length) for length in lengths_B]
        have = self.lengths_B.tolist()
        if any(not 0 <= want <= has for want, has in zip(wanted, have, strict=True)):
            raise ValueError(f"cannot rewind rows of {have} tokens to {wanted}")
        self.lengths_B = np.array(wanted, dtype=np.int64)
        self.rollback()

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. In their own order they close up in the same memory, as
        long as they need half of it: a copy takes as long as two steps of a small model."""
        kept = list(rows)
        in_order = all(earlier < later for earlier, later in itertools.pairwise(kept))
        # strides tell how many rows lie in memory, those that left included
        few = any(2 * len(kept) < store.stride(0) // store.stride(1) for store in self._stores)
        if in_order and not few and min(kept, default=0) >= 0:
            with torch.inference_mode():  # as where a drafter's caches were made
                for i, row in enumerate(kept):
                    length = int(self.lengths_B[row])
                    for store in self._stores if i < row else ():
                        store[:, i, :, :length] = store[:, row, :, :length]
            self._stores = [store.narrow(1, 0, len(kept)) for store in self._stores]
        else:
            index = to_device(torch.tensor(kept, dtype=torch.long), self.spec.device)
            self._stores = [store.index_select(1, index) for store in self._stores]
        self.lengths_B = self.lengths_B[np.asarray(kept, dtype=np.int64)]
        self.rollback()

    def repack(
        self, rows: Sequence[int], columns: Sequence[np.ndarray], settled: Sequence[int]
    ) -> None:
        """Keep these rows, and of each one's staged columns those listed, ascending: the first
        `settled` become committed, the others stay staged behind them.

        staged   a b c d e f         columns 0 2 3 5, settled 1
        after    a | c d f           the row is longer by a; c d f are columns 0 1 2 of what is
                                     staged (shorter rows get padding that no token sees)
        """
        assert self.staged, "with nothing staged, `take` does it"
        index = np.asarray(rows, dtype=np.int64)
        if not np.array_equal(index, np.arange(self.num_rows)):
            on_device = to_device(index, self.spec.device)
            self._stores = [store.index_select(1, on_device) for store in self._stores]
        starts = self.lengths_B[index]
        positions_BC = np.concatenate([np.asarray(part) for part in self._staged_at], axis=1)[index]
        staged = max(len(kept) - count for kept, count in zip(columns, settled, strict=True))
        stood_BC = np.zeros((len(index), staged), dtype=np.int64)
        for b, (kept, count) in enumerate(zip(columns, settled, strict=True)):
            stood_BC[b, : len(kept) - count] = positions_BC[b, kept[count:]]
            self._close_up(b, int(starts[b]), kept)
        self.lengths_B = starts + np.asarray(settled, dtype=np.int64)
        self.staged = staged
        self._columns_BC = self.lengths_B[:, None] + np.arange(staged)
        self._staged_at = (stood_BC,)

    def contents(self, row: int) -> list[Tensor]:
        """The committed keys and values of a row, store by store: [G, H, length, D]."""
        length = int(self.lengths_B[row])
        return [store[:, row, :, :length].clone() for store in self._stores]

    def fill(self, row: int, contents: Sequence[Tensor]) -> None:
        """Make a row hold what a row of another cache of this target held."""
        self.lengths_B[row] = contents[0].shape[2] if contents else 0
        self.reserve(int(self.lengths_B[row]) + 1)
        for store, held in zip(self._stores, contents, strict=True):
            store[:, row, :, : held.shape[2]] = held


def right_aligned(pending: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """([B, P] these tokens, filled up with 0 on the left, [B] how many there are of each row)."""
    counts = [len(row) for row in pending]
    tokens = np.zeros((len(counts), max(counts)), dtype=np.int64)
    for b, row in enumerate(pending):
        tokens[b, tokens.shape[1] - counts[b] :] = row
    return tokens, np.array(counts)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a forward of pending tokens and trees is laid out, see `lay_out`. Read-only: many
    forwards share it."""

    counts_B: np.ndarray
    pads_B: np.ndarray
    depth_BT: np.ndarray
    see_BTC: np.ndarray


@lru_cache(maxsize=128)
def _layout(counts: tuple[int, ...], num_nodes: int, parents: bytes | None) -> _Layout:
    """With so many pending tokens in each row. Shapes recur from step to step, so they are
    remembered. `parents`: [B, N] int64; None: trees are filled in elsewhere."""
    counts_B = np.array(counts)
    width = max(counts)
    pads_B = width - counts_B
    depth = np.arange(width + num_nodes)[None] - pads_B[:, None]
    see = np.zeros((len(counts), width + num_nodes, width + num_nodes), dtype=bool)
    column = np.arange(width)
    real = column >= pads_B[:, None]
    see[:, :width, :width] = (column <= column[:, None]) & real[:, None, :]
    see[:, width:, :width] = real[:, None, :]
    if num_nodes and parents is not None:
        parents_BN = np.frombuffer(parents, dtype=np.int64).reshape(len(counts), num_nodes)
        node_depth, node_see = geometry(parents_BN)
        depth[:, width:] = (counts_B - 1)[:, None] + node_depth
        see[:, width:, width:] = node_see
    for one in (counts_B, pads_B, depth, see):
        one.flags.writeable = False
    return _Layout(counts_B, pads_B, depth, see)


def lay_out(
    cache: KVCache,
    pending: Sequence[Sequence[int]],
    tokens_BN: np.ndarray | Tensor = NO_NODES,
    parents_BN: np.ndarray | Tensor = NO_NODES,
) -> tuple[Any, Block]:
    """Stage pending tokens and tree (left out: none) in the cache; the tokens to feed, [B, P + N].

    columns   pad ... pad  p0 .. root | n0 n1 ...      (short rows are padded on the left, so
    depth      0       0    0 .. c-1  | c  ...          that the root is the same column in all)

    Arrays give an array of tokens; tensors, wherever they are, a tensor.
    """
    num_nodes, there = tokens_BN.shape[1], isinstance(parents_BN, Tensor)
    counts = tuple(map(len, pending))
    parents = None if there else np.ascontiguousarray(parents_BN, dtype=np.int64).tobytes()
    width = max(counts)
    small = len(counts) * (width + num_nodes) ** 2 <= _REMEMBERED
    laid = (_layout if small else _layout.__wrapped__)(counts, num_nodes, parents)
    tokens: Any = np.zeros((len(counts), width + num_nodes), dtype=np.int64)
    tokens[:, :width], _ = right_aligned(pending)
    if isinstance(tokens_BN, Tensor):
        tokens = to_device(tokens, tokens_BN.device)
    depth: Any = laid.depth_BT
    see: Any = laid.see_BTC.copy()  # a target's own
    if num_nodes:
        tokens[:, width:] = tokens_BN
    if isinstance(parents_BN, Tensor):
        node_depth, node_see = geometry(parents_BN)
        device = parents_BN.device
        counts_B, depth, see = (
            to_device(one, device) for one in (laid.counts_B.copy(), depth.copy(), see)
        )
        depth[:, width:] = (counts_B - 1)[:, None] + node_depth
        see[:, width:, width:] = node_see
    return tokens, cache.stage(depth, see, laid.pads_B)
