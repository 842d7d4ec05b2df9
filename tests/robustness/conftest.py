"""One server for all groups of processes that the tests here start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.process_group import Groups, start_groups


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    with start_groups() as server:
        yield server
