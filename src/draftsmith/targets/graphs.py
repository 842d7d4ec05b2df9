"""Forwards of few tokens on a GPU as CUDA graphs: one launch in place of a thousand.

A small model's forward is a fraction of a millisecond of arithmetic on a GPU and many milliseconds
of Python that asks for it. A graph is what one forward asked for; it is asked for again as a whole,
with other numbers in the same places:

    a shape's first forwards      as always
    the next                      captured:    inputs -> [places] -> graph -> [places] -> outputs
    all further ones              numbers are copied into the places, and the graph is replayed

A shape is all that a graph has fixed: rows, tokens, columns of the key view, logits, signals, and
the memory of the cache, which an allocator hands out again to the next request of the same size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import Block
from draftsmith.core.transfer import to_device
from draftsmith.core.types import Signals, TargetOutput

_log = logging.getLogger(__name__)

WIDEST = 64
"""Tokens of a row; prompts are longer, and computing them takes longer than asking."""
REPEATS = 3
"""Forwards of a shape before it is captured, which takes longer than one: where rows of a batch end
one by one, most shapes come less often."""
MOST = 32
"""Graphs at a time; those replayed last stay."""
_SEEN = 256
"""Shapes whose forwards are counted; those seen last stay."""

Forward = Callable[[Tensor, Block, int, Signals], TargetOutput]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], TargetOutput]], tuple[Replay, TargetOutput]]
"""Takes a forward, and returns what does it again and where its results are then."""


class CudaCapture:
    """Captures with CUDA; all graphs share memory for what they compute on the way."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], TargetOutput]) -> tuple[Replay, TargetOutput]:
        graph = torch.cuda.CUDAGraph()
        # what other threads do on the device does not disturb
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out


class _Captured:
    """One graph and the places of its inputs."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        tokens_BT: Tensor,
        block: Block,
        windows: Sequence[int | None],
        keep: int,
        signals: Signals,
        dtype: torch.dtype,
    ) -> None:
        device = block.cache.spec.device
        self._tokens_BT = torch.zeros_like(tokens_BT)
        self._positions_BT = torch.zeros_like(tokens_BT)
        self._slots_BT = torch.zeros_like(tokens_BT)
        self._masks = {
            (window, dtype): torch.zeros_like(block.mask(window, dtype)) for window in windows
        }
        self.load(tokens_BT, block)
        # a graph reads what its inputs hold, and does not keep them: they stay here
        self._rows_B1 = torch.arange(len(tokens_BT), device=device)[:, None]
        fixed = Block(
            cache=block.cache,
            positions_BT=self._positions_BT,
            slots_BT=_slots(block, tokens_BT.shape[1]),
            view=block.view,
            lengths_B=block.lengths_B,
            columns_BC=block.columns_BC,
            staged_at=block.staged_at,
            see_BTC=block.see_BTC,
            _masks=dict(self._masks),
            _index=(self._rows_B1, self._slots_BT),
        )
        self._replay, self._out = capture(lambda: forward(self._tokens_BT, fixed, keep, signals))

    def load(self, tokens_BT: Tensor, block: Block) -> None:
        """Copy the inputs of a forward into their places."""
        device = self._tokens_BT.device
        self._tokens_BT.copy_(tokens_BT)
        self._positions_BT.copy_(block.positions(device))
        self._slots_BT.copy_(to_device(_slots(block, tokens_BT.shape[1]), device))
        for (window, dtype), place in self._masks.items():
            place.copy_(block.mask(window, dtype))

    def replay(self) -> TargetOutput:
        """The results, copied: the next graph computes in the same memory."""
        self._replay()
        states = self._out.signals_BTS
        return TargetOutput(
            logits_BNV=self._out.logits_BNV.clone(),
            signals_BTS=None if states is None else states.clone(),
        )


class Graphs:
    """Runs a target's forwards, as graphs where they come often.

    Args:
        forward: the target's own.
        windows: of its layers.
        dtype: of its attention.
        capture: `CudaCapture()`, or what stands for it in tests.
    """

    def __init__(
        self,
        forward: Forward,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        capture: Capture,
    ) -> None:
        self._forward, self._capture = forward, capture
        self._windows, self._dtype = tuple(dict.fromkeys(windows)), dtype
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self.why_not: str | None = None
        """Why there are none; None: nothing is known against them."""

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        """Logits and signals as the target's own forward gives them."""
        key = (tokens_BT.shape, block.view, keep, signals, block.cache.places())
        if tokens_BT.shape[1] > WIDEST or self.why_not is not None or not self._often(key):
            return self._forward(tokens_BT, block, keep, signals)
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = self._captured(tokens_BT, block, keep, signals)
            if graph is None:
                return self._forward(tokens_BT, block, keep, signals)
        else:
            graph.load(tokens_BT, block)
        self._graphs[key] = graph
        if len(self._graphs) > MOST:
            self._graphs.popitem(last=False)
        return graph.replay()

    def _often(self, key: Hashable) -> bool:
        """Whether this shape came so often before that it has a graph, or is worth one."""
        count = self._seen.pop(key, 0)
        self._seen[key] = count + 1
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return key in self._graphs or count >= REPEATS

    def _captured(
        self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals
    ) -> _Captured | None:
        """A graph; None where this model cannot be captured, and is not tried again."""
        try:
            return _Captured(
                self._forward,
                self._capture,
                tokens_BT,
                block,
                self._windows,
                keep,
                signals,
                self._dtype,
            )
        except RuntimeError as error:  # what waits for the device cannot be captured
            self.why_not = str(error).strip().splitlines()[0]
            _log.warning("forwards are not captured as CUDA graphs: %s", self.why_not)
            return None


def _slots(block: Block, width: int) -> np.ndarray:
    """[B, T] the column of each new token: the last that are staged."""
    slots: np.ndarray = block.columns_BC[:, -width:]
    return slots
