"""Which tests of a grid of parameters are for every edit (`tests/conftest.py`)."""

from __future__ import annotations

from itertools import product

import pytest
from tests.conftest import left_out


def grid(*sizes: int) -> list[dict[str, int]]:
    """Indices as pytest numbers them, the last parameter in turn."""
    names = "abc"[: len(sizes)]
    return [
        dict(zip(names, values, strict=True))
        for values in product(*(range(size) for size in sizes))
    ]


@pytest.mark.parametrize("sizes", [(4, 2), (17, 3), (6, 4), (3, 2, 2), (2, 5), (12, 6), (7,)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 11, 100])
def test_one_of_each_n_in_a_row_is_kept(sizes: tuple[int, ...], n: int) -> None:
    tests = grid(*sizes)
    out = left_out(tests, n)
    for start in range(0, len(tests), n):
        row = range(start, min(start + n, len(tests)))
        assert sum(i not in out for i in row) == 1


@pytest.mark.parametrize(("sizes", "n"), [((17, 3), 3), ((4, 2), 2), ((6, 4), 4), ((12, 6), 5)])
def test_every_value_is_kept(sizes: tuple[int, ...], n: int) -> None:
    tests = grid(*sizes)
    kept = [tests[i] for i in range(len(tests)) if i not in left_out(tests, n)]
    for name, size in zip("ab", sizes, strict=True):
        assert {one[name] for one in kept} == set(range(size))


def test_of_one_parameter_the_first_of_each_n() -> None:
    assert left_out(grid(7), 3) == [1, 2, 4, 5]
