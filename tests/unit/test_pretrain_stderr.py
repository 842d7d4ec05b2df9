"""What `pretrain` prints beside its result."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_pretrain import options
from transformers.utils import logging

from draftsmith.commands import pretrain


def test_no_progress_bar_but_our_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="draftsmith")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(4):
        lines = "\n".join(f"line {i} is {i * number}" for i in range(100))
        (corpus / f"{number}.txt").write_text(lines)
    logging.enable_progress_bar()
    pretrain.run(options(corpus, tmp_path / "out", duration="2steps"))
    assert "2 steps" in caplog.text
    assert "Writing model shards" not in capfd.readouterr().err
