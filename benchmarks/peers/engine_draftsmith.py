"""draftsmith, as `draftsmith chat` opens it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    import torch

    import draftsmith
    from draftsmith import SamplingParams
    from draftsmith.commands.chat import ChatOptions, open_generator
    from draftsmith.drafters.config import DraftingConfig
    from draftsmith.targets.config import ModelConfig
    from draftsmith.targets.hf import open_target

    torch.set_num_threads(options["threads"])
    chosen = ChatOptions(
        model=ModelConfig(target=options["target"], weights=options["weights"]),
        drafter=options["drafter"],
        max_new_tokens=128,
        drafting=DraftingConfig(draft_length=options["draft_length"]),
    )
    target = open_target(chosen.model, quiet=True)
    generator = open_generator(chosen, target)

    def generate(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = generator.generate([prompt], params)
        return list(output.token_ids)

    return {"version": draftsmith.__version__, "engine": getattr(target, "engine", "")}, generate
