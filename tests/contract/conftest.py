"""Key views of the contract suite grow in small steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    """Views grow by 32 columns instead of 256: texts of a hundred tokens cross several edges, and
    attention does not pay for columns that nobody sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.core.cache.BUCKET", 32)
        yield
