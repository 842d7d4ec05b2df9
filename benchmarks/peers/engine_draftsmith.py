"""draftsmith, as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    import torch

    import draftsmith
    from draftsmith import Generator, SamplingParams
    from draftsmith.core.types import TreeShape

    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    length = options.get("draft_length")
    generator = Generator(
        options["target"],
        options.get("drafter", "none"),
        weights=options["weights"],
        shape=None if length is None else TreeShape.chain(length),
    )

    def generate(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = generator.generate([prompt], params)
        return list(output.token_ids)

    return {
        "version": draftsmith.__version__,
        "engine": getattr(generator.target, "engine", ""),
    }, generate
