"""What modules gave in a forward: the hidden states that a drafter reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """Outputs of the last forward, module by module."""

    states: tuple[list[Tensor], ...]

    @property
    def signals_BTS(self) -> Tensor | None:
        """Side by side, in the order of the modules; None: nobody was listened to."""
        if not self.states:
            return None
        return torch.cat([state for (state,) in self.states], -1)


@contextmanager
def listening(modules: Sequence[Any]) -> Iterator[Heard]:
    """Hear these modules in every forward inside the `with`."""
    with ExitStack() as stack:
        yield Heard(states=tuple(stack.enter_context(_output_of(m)) for m in modules))


@contextmanager
def _output_of(module: Any) -> Iterator[list[Tensor]]:
    """A list that holds what the module gave last."""
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        kept[:] = [output if isinstance(output, Tensor) else output[0]]

    handle = module.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()
