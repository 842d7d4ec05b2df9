"""OpenVINO GenAI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    device: dict[str, Any] = {"INFERENCE_PRECISION_HINT": options["precision"]}
    device["INFERENCE_NUM_THREADS"] = options["threads"]
    more = dict(device)
    if options.get("prompt_lookup"):
        more["prompt_lookup"] = True
    if options.get("draft_model"):
        more["draft_model"] = genai.draft_model(options["draft_model"], "CPU", **device)
    pipe = genai.LLMPipeline(options["model"], "CPU", **more)

    def generate(prompt: list[int], count: int) -> list[int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        if "tokens" in options:
            config.num_assistant_tokens = options["tokens"]
        if options.get("prompt_lookup"):
            config.max_ngram_size = 3
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        return list(pipe.generate(genai.TokenizedInputs(ids, mask), config).tokens[0])

    return {"version": genai.__version__}, generate
