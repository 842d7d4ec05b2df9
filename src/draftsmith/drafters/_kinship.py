"""Which target a trained drafter belongs to, as its folder says it.

    drafter.json    "target": {"hidden_size", "vocab_size", "layers", "vocabulary_sha256"}

Released folders say nothing; theirs are checked by the shapes of their weights alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith.drafter_names import drafter_manifest
from draftsmith.drafters._base import TargetView
from draftsmith.errors import BackendError
from draftsmith.types import Signals

_WORDS = {
    "hidden_size": "a hidden size of {}",
    "vocab_size": "a vocabulary of {} tokens",
    "layers": "states read from the layers {}",
    "vocabulary_sha256": "the tokenizer {:.12}",
}


def target_facts(target: TargetView, signals: Signals) -> dict[str, Any]:
    """What a drafter must agree on with its target, as JSON."""
    return {
        "hidden_size": None if target.config is None else int(target.config.hidden_size),
        "vocab_size": target.vocab_size,
        "layers": list(signals.layers),
        "vocabulary_sha256": _vocabulary(target.tokenizer),
    }


def _vocabulary(tokenizer: Any) -> str | None:
    """Digest of the tokens and their ids; None: there is no tokenizer."""
    if tokenizer is None:
        return None
    content = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(content).hexdigest()


def check_target(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse the drafter of another target, before anything is read.

    Raises:
        BackendError: naming what differs.
    """
    if not (folder / "drafter.json").is_file():
        return
    theirs = drafter_manifest(folder)["target"]
    for name, said in _WORDS.items():
        one, other = theirs.get(name), facts[name]
        if one is not None and other is not None and one != other:
            raise BackendError(
                f"The drafter in {folder} was made for another target: one with {said.format(one)},"
                f" and this one has {said.format(other)}. Give the target that it was trained for."
            )
