"""A live translation that is quick: a random model that ends its texts, and streams that change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.drafters.none import NoDrafter
from draftsmith.live.config import LiveConfig
from draftsmith.live.templates import Template
from draftsmith.live.translator import LiveTranslator
from draftsmith.targets.hf import HFTarget
from tests.tiny_models import tiny_model, tiny_tokenizer

WORDS = "def add left right return the cat sat on mat dog log and saw".split()


def a_target(seed: int = 0, *, ends: int = 60, context: int = 512) -> HFTarget:
    """Random weights in float64. Many tokens end a text, so that most texts are short."""
    rng = np.random.default_rng(seed)
    end_ids = frozenset({0, *rng.permutation(300)[:ends].tolist()})
    model = tiny_model(seed, context=context).to(torch.float64)
    return HFTarget(model, tokenizer=tiny_tokenizer(), end_ids=end_ids)


def a_template(target: HFTarget) -> Template:
    return Template(tokenizer=target.tokenizer, language="cats")


def a_translator(target: HFTarget, **options: object) -> LiveTranslator:
    """Options are those of `LiveConfig`."""
    return LiveTranslator(target, a_template(target), LiveConfig(**options))


def a_stream(seed: int) -> list[tuple[str, bool]]:
    """Hypotheses of one segment, the last one final: most grow, some are rewritten or shrink."""
    rng = np.random.default_rng(seed)
    words: list[str] = []
    out = []
    for _ in range(int(rng.integers(3, 7))):
        kind = rng.random()
        if kind < 0.25 and words:
            words[int(rng.integers(len(words)))] = str(rng.choice(WORDS))
        elif kind < 0.4 and len(words) > 2:
            words = words[: -int(rng.integers(1, 3))]
        elif kind > 0.9 and out:
            pass  # the same again
        else:
            words = words + [str(one) for one in rng.choice(WORDS, int(rng.integers(1, 4)))]
        out.append((" ".join(words), False))
    return [*out[:-1], (out[-1][0], True)]


def updates(translator: LiveTranslator, seed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(source, output) of each update of a stream."""
    for source, final in a_stream(seed):
        update = translator.update(source, final=final)
        assert update is not None
        yield source, update.output


def from_scratch(target: HFTarget, prompt: list[int], limit: int) -> tuple[int, ...]:
    """Greedy text without anything live: no session, no draft."""
    options = DecodeOptions(max_new_tokens=limit)
    said: list[int] = []
    for step in decode(target, NoDrafter(), [prompt], options):
        said.extend(step.emitted[0])
    return tuple(token for token in said if token not in target.end_ids)
