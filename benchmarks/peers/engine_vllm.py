"""vLLM on the CPU, both cores given to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options['threads'] - 1}")
    import vllm

    model = vllm.LLM(
        options["folder"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=options.get("speculative"),
    )

    def generate(prompt: list[int], count: int) -> list[int]:
        params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        (out,) = model.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    return {"version": vllm.__version__}, generate
