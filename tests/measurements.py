"""Records of measurements, as `bench` writes them."""

from __future__ import annotations

from typing import Any

from draftsmith.bench.records import RunRecord


def a_record(
    drafter: str = "none", prompt: int = 0, *, seconds: float = 2.0, tokens: int = 20, **more: Any
) -> RunRecord:
    """The first token came with the prompt's step in one second, the others in `seconds`."""
    values: dict[str, Any] = {
        "prompt": f"p{prompt}",
        "drafter": drafter,
        "temperature": 0.0,
        "repeat": 0,
        "seed": 0,
        "place": 0,
        "group": prompt,
        "prompt_tokens": 5,
        "tokens": tokens,
        "decode_tokens": tokens - 1,
        "finish_reason": "length",
        "seconds": seconds + 1.0,
        "prefill_seconds": 1.0,
        "decode_seconds": seconds,
        "digest": "ab" * 8,
    }
    return RunRecord(**values | more)
