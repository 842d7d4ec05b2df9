"""transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[options["weights"]]

    def load(folder: str) -> Any:
        found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        found.generation_config.eos_token_id = None  # texts of the asked length
        return found

    model = load(options["folder"])
    more: dict[str, Any] = {}
    if "prompt_lookup" in options:
        more["prompt_lookup_num_tokens"] = options["prompt_lookup"]
    if "assistant" in options:
        more["assistant_model"] = load(options["assistant"])

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **more,
            )
        return out[0, len(prompt) :].tolist()

    return {"version": transformers.__version__}, generate
