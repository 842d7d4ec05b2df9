"""A target that repeats texts which were decoded before, whatever is drafted.

Where drafts do not depend on the verifier's noise, verification by token match decodes the text
that plain decoding draws with the same seed, at every temperature. So what a drafter gets accepted
along a text can be counted without the target: behind position t of row b stands token t + 1.

    text      a  b  c  d  e            recorded, with the target's states f0 .. f4
    node      root = b at 1            logits: all on c     states: f1
              n0 = c at 2, n1 = x at 2 logits: all on d     states: f2, which nobody reads behind x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.core.cache import Block, KVCache, KVSpec, lay_out
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.targets.base import BindableTarget


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Texts of one target, prompts included, and its states along them."""

    vocab_size: int
    texts: Sequence[Sequence[int]]
    end_ids: frozenset[int] = frozenset()
    signals: Signals = field(default_factory=Signals)
    states: Sequence[Tensor] = ()
    """[T, S] of each text; empty where `signals` asks for none."""

    def rows(self, numbers: Sequence[int]) -> RecordedTarget:
        """The target of a batch whose row b is to become text `numbers[b]`."""
        return RecordedTarget(self, numbers)


class _Rows(KVCache):
    """Knows which text each of its rows is of, and holds nothing else."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(KVSpec(layers=(), dtype=torch.float32, device=device), num_rows, 0)
        self.text_B = np.arange(num_rows)

    def take(self, rows: Sequence[int]) -> None:
        super().take(rows)
        self.text_B = self.text_B[np.asarray(rows, dtype=np.int64)]


class RecordedTarget:
    """Some of the texts of a `Recorded` as a target (a `Target`)."""

    name = "recorded texts"
    tokenizer = None
    max_length = None
    dtype = torch.float32

    def __init__(self, recorded: Recorded, numbers: Sequence[int]) -> None:
        texts = [recorded.texts[number] for number in numbers]
        self.vocab_size, self.end_ids = recorded.vocab_size, recorded.end_ids
        self._signals = recorded.signals
        states = [recorded.states[number] for number in numbers] if recorded.states else []
        self.device = states[0].device if states else torch.device("cpu")
        following = [torch.tensor([*text[1:], 0], device=self.device) for text in texts]
        self._next_BT = pad_sequence(following, batch_first=True)
        self._states_BTS = pad_sequence(states, batch_first=True) if states else None
        self._logits = torch.zeros(0, device=self.device)
        self._set = torch.zeros(0, dtype=torch.long, device=self.device)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return _Rows(num_rows, self.device)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        assert isinstance(block.cache, _Rows)
        if signals not in (Signals(), self._signals):
            raise ValueError(f"the states that were recorded are {self._signals}, not {signals}")
        text_B1 = torch.from_numpy(block.cache.text_B).to(self.device)[:, None]
        at_BT = block.positions(self.device).clamp(max=self._next_BT.shape[1] - 1)
        states_BTS = None
        if signals != Signals():
            assert self._states_BTS is not None
            states_BTS = self._states_BTS[text_B1, at_BT]
        logits_BNV = self._certain(self._next_BT[text_B1, at_BT[:, -keep:]])
        return TargetOutput(logits_BNV=logits_BNV, signals_BTS=states_BTS)

    def _certain(self, tokens_BN: Tensor) -> Tensor:
        """[B, N, V]: 1 at these tokens, 0 elsewhere, in memory that the next forward uses again."""
        self._logits[self._set] = 0.0
        if len(self._logits) < tokens_BN.numel() * self.vocab_size:
            self._logits = torch.zeros(tokens_BN.numel() * self.vocab_size, device=self.device)
        each = torch.arange(tokens_BN.numel(), device=self.device) * self.vocab_size
        self._set = each + tokens_BN.flatten()
        self._logits[self._set] = 1.0
        return self._logits[: tokens_BN.numel() * self.vocab_size].view(*tokens_BN.shape, -1)


def states_along(target: BindableTarget, text: Sequence[int], signals: Signals) -> Tensor:
    """[T, S]: the target's states at each token of a text."""
    cache = target.new_cache(1, len(text))
    tokens_BT, block = lay_out(cache, [text])
    with torch.inference_mode():
        out = target.forward(torch.from_numpy(tokens_BT), block, 1, signals)
    assert out.signals_BTS is not None
    return out.signals_BTS[0].clone()
