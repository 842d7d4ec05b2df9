"""Memory of the compiled engine's outputs: never used again while anyone holds what lies in it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from draftsmith.targets.native.engine import OutputMemory


def test_what_nobody_holds_is_used_again() -> None:
    memory = OutputMemory()
    held = memory.take(2, 300)
    at = memory.take(4, 300).data_ptr()  # let go at once
    assert memory.take(3, 400).data_ptr() == at
    assert memory.take(3, 400).data_ptr() != held.data_ptr()


@pytest.mark.parametrize("part", ["whole", "rows", "numpy", "view"])
def test_what_is_held_stays_as_it_is(part: str) -> None:
    memory = OutputMemory()
    made = memory.take(3, 50).fill_(7.0)
    ways = {
        "whole": made,
        "rows": made[1:, :20],
        "numpy": made.numpy()[2],
        "view": made.view(50, 3),
    }
    held = ways[part]
    del made, ways
    others = [memory.take(3, 50).fill_(number) for number in range(20)]
    assert (torch.as_tensor(held) == 7.0).all()
    assert all((other == number).all() for number, other in enumerate(others))


def test_it_keeps_few_pieces_and_none_that_is_very_large() -> None:
    memory = OutputMemory()
    some = [memory.take(8) for _ in range(50)]
    assert len(memory._pieces) == 8 and len({one.data_ptr() for one in some}) == 50
    before = list(memory._pieces)
    assert memory.take(5000, 1000).shape == (5000, 1000)
    assert memory._pieces == before


def test_an_empty_output_needs_no_memory_of_another() -> None:
    memory = OutputMemory()
    assert memory.take(3, 0, 64).shape == (3, 0, 64)
    assert memory.take(2, 5).shape == (2, 5)


def test_threads_do_not_share_a_piece() -> None:
    memory, wrong = OutputMemory(), list[int]()

    def work(number: int) -> None:
        kept: list[Tensor] = []
        for size in range(400):
            kept = [*kept[-2:], memory.take(1 + size % 7, 64).fill_(number)]
            if not all((one == number).all() for one in kept):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong
