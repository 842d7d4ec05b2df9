"""Draft trees in words: every node by the tokens that lead to it."""

from __future__ import annotations

from draftsmith.core.types import PADDING, ROOT, DraftTree

Path = tuple[int, ...]


def paths_of(tree: DraftTree, row: int) -> list[Path]:
    """Return the path of each real node, in their order."""
    out: list[Path] = []
    for token, parent in zip(tree.tokens_BN[row], tree.parents_BN[row], strict=True):
        if parent == PADDING:
            continue
        above = () if parent == ROOT else out[int(parent)]
        out.append((*above, int(token)))
    return out
