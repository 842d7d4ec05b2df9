"""Key views of the contract suite grow in small steps, but for the texts of trained models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_buckets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Views grow by 32 columns instead of 256: texts of a hundred tokens cross several edges, and
    attention does not pay for columns that nobody sees.

    The shipped 256 stays in test_real_text.py, whose published texts end behind column 256; the
    cache alone crosses its edges in unit/test_cache.py (`test_the_key_view_grows_in_buckets`).
    """
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_real_text"):
            patch.setattr("draftsmith.core.cache.BUCKET", 32)
        yield
