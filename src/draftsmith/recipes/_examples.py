"""Examples with a prompt and a completion: only the completion is learnt, and none is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from draftsmith.distill.packing import Weighted
from draftsmith.distill.trajectory import Trajectory

BATCH = 512


def encode(tokenizer: Any, examples: Iterable[tuple[str, str]]) -> tuple[list[Weighted], int]:
    """Documents, each ended by the end token, and the number of UTF-8 bytes of the completions."""
    out: list[Weighted] = []
    size = 0
    source = iter(examples)
    while group := list(islice(source, BATCH)):
        size += sum(len(completion.encode()) for _, completion in group)
        prompts, completions = (
            tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            for texts in zip(*group, strict=True)
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            trajectory = Trajectory(
                prompt_id=str(len(out)),
                forcing="gold",
                prompt=tuple(prompt),
                tokens=(*completion, tokenizer.eos_token_id),
                score=0.0,
            )
            out.append(Weighted(trajectory=trajectory))
    return out, size


def num_tokens(documents: Sequence[Weighted]) -> int:
    """Of prompts and completions."""
    return sum(len(d.trajectory.prompt) + len(d.trajectory.tokens) for d in documents)
