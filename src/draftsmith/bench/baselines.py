"""Transformers' own `generate` on the target's weights, a baseline of every measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.bench.arms import TimedRun, now
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import no_garbage_collection
from draftsmith.targets.hf import HFTarget


def supports(sampler: Sampler) -> bool:
    """Check whether transformers can draw from this law: it has no presence or frequency
    penalty."""
    return not (sampler.presence_penalty or sampler.frequency_penalty or sampler.logit_bias)


class _Clock:
    """A streamer that records when the first new tokens came (`put` gets the prompt first)."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._device, self._rows, self._calls = device, rows, 0
        self.first_time = 0.0
        self.first_tokens = 1
        """Per row: with drafts the prompt's step may give several."""

    def put(self, value: Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_time = now(self._device)
            self.first_tokens = value.numel() // self._rows

    def end(self) -> None:
        pass


def time_generate(
    target: HFTarget,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    *,
    prompt_lookup: int = 0,
    ignore_end: bool = False,
) -> TimedRun:
    """Continue the prompts by `model.generate`; prefill and decoding timed apart.

    Args:
        prompt_lookup: length of transformers' own prompt-lookup drafts; 0: none.
        ignore_end: generate past end tokens.
    """
    ids_BT, mask_BT = _left_padded(prompts, target.device)
    config = _config(target, sampler, max_new_tokens, prompts, prompt_lookup, ignore_end)
    clock = _Clock(target.device, len(prompts))
    devices = [target.device] if target.device.type == "cuda" else []
    seeded = torch.random.fork_rng(devices=devices)
    with seeded, target.native() as model, torch.inference_mode():
        torch.manual_seed(seed)
        with no_garbage_collection():
            start = now(target.device)
            out = model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                generation_config=config,
                streamer=clock,
            )
            end = now(target.device)
    rows = [[int(t) for t in row[ids_BT.shape[1] :]] for row in out]
    tokens = [until_end(row, frozenset() if ignore_end else target.end_ids) for row in rows]
    ended = [bool(row) and not ignore_end and row[-1] in target.end_ids for row in tokens]
    full = config.max_new_tokens == max_new_tokens
    return TimedRun(
        tokens=tuple(map(tuple, tokens)),
        drafted=tuple((False,) * len(row) for row in tokens),
        decode_tokens=tuple(max(len(row) - clock.first_tokens, 0) for row in tokens),
        finish=tuple("stop" if done else "length" if full else "context" for done in ended),
        seconds=end - start,
        prefill_seconds=clock.first_time - start if clock.first_time else 0.0,
    )


def _config(
    target: HFTarget,
    sampler: Sampler,
    max_new_tokens: int,
    prompts: Sequence[Sequence[int]],
    prompt_lookup: int,
    ignore_end: bool,
) -> Any:
    """Set every option, since transformers fills gaps from the model's own defaults."""
    from transformers import GenerationConfig

    room = max_new_tokens
    if target.max_length is not None:
        room = min(room, target.max_length - max(len(prompt) for prompt in prompts))
    warping: dict[str, float] = {}
    if sampler.temperature > 0:  # greedy, these would only be warned about
        warping = {"temperature": sampler.temperature, "top_k": sampler.top_k}
        warping |= {"top_p": sampler.top_p, "min_p": sampler.min_p}
    return GenerationConfig(
        max_new_tokens=room,
        do_sample=sampler.temperature > 0,
        **warping,
        repetition_penalty=sampler.repetition_penalty,
        eos_token_id=None if ignore_end else sorted(target.end_ids) or None,
        pad_token_id=min(target.end_ids, default=0),
        prompt_lookup_num_tokens=prompt_lookup or None,
    )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, prompt in enumerate(prompts):
        ids[b, width - len(prompt) :] = torch.tensor(prompt)
        mask[b, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
