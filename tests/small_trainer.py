"""The smallest runs of the trainer: a bigram, or a tiny Llama, on a few random documents."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.distill.batches import EvaluationBlocks, PackedBlocks
from draftsmith.distill.callbacks import Callback, StepReport
from draftsmith.distill.config import TrainerConfig
from draftsmith.distill.evaluation import Evaluation
from draftsmith.distill.objectives.distillation import CrossEntropy
from draftsmith.distill.trainer import Trainer
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.medusa import Medusa
from draftsmith.targets.toy import tiny_target

VOCAB = 13


class Bigram(Drafter):
    """The smallest thing that trains: it looks at one token, with dropout to need noise."""

    trains = True

    def __init__(self, *, dropout: float = 0.1, num_steps: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCAB, 8, generator=generator))
        self.out = nn.Parameter(torch.randn(VOCAB, 8, generator=generator))
        self.norm = nn.Parameter(torch.ones(8))
        self.dropout = dropout
        self.num_steps = num_steps

    def forward(self, batch: TrajectoryBatch, carry: Any) -> tuple[DraftPrediction, Any]:
        ahead = 1 if carry is None else carry + 1
        hidden = self.embedding[batch.tokens_BT] * self.norm
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        mask = torch.ones_like(batch.loss_mask_BT)
        return DraftPrediction(hidden_BTH=hidden, mask_BT=mask, ahead=ahead), ahead

    def head(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden @ self.out.T

    start = propose = advance = None


def make_source(seed: int = 0) -> PackedBlocks:
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, VOCAB, size).astype(np.int32) for size in (17, 5, 30, 9, 22)]
    # 88 tokens: 11 blocks of 8, an epoch is 2.75 steps, so that resuming happens in mid-epoch.
    return PackedBlocks(documents, end_id=0, length=8, batch_tokens=32, seed=seed)


CONFIG = TrainerConfig(
    steps=12, learning_rate=0.05, min_learning_rate=0.001, warmup=3, save_every=100, seed=5
)


def make_trainer(folder: Path, **changes: Any) -> Trainer:
    options: dict[str, Any] = {
        "drafter": Bigram(),
        "objective": CrossEntropy(),
        "source": make_source(),
        "config": CONFIG,
        "folder": folder,
        "identity": {"data": "x", "seed": 5},
    }
    return Trainer(**(options | changes))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.drafter.named_parameters()}


class StopAfter(Callback):
    """Ends the process' training as an operator would: by a signal to itself."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step = step
        self.number = number

    def on_step(self, run: Any, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), self.number)


# --------------------------------------------------------------------------- by a JSON argument


def llama() -> Drafter:
    """Two layers, embedding and head tied, a trained norm and a frozen one."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    return Independent.learner(model)


def over_embeddings(drafter: Drafter) -> Drafter:
    """It reads the target's embeddings as if they were its hidden states."""
    target = tiny_target(VOCAB, dtype=torch.float32)
    drafter.bind(target)
    forward = drafter.forward

    def with_states(batch: TrajectoryBatch, carry: Any) -> tuple[DraftPrediction, Any]:
        return forward(replace(batch, features_BTS=target.embed(batch.tokens_BT)), carry)

    drafter.forward = with_states
    return drafter


def griffin() -> Drafter:
    """Three forwards in one graph, which the backward pass computes again."""
    return over_embeddings(Griffin(Griffin.Config(noise=0.0, mask_top=0)))


def medusa() -> Drafter:
    """Heads that learn one after the other."""
    return over_embeddings(Medusa(Medusa.Config(heads=3)))


DRAFTERS = {
    "llama": llama,
    "griffin": griffin,
    "medusa": medusa,
    "bigram": lambda: Bigram(dropout=0),
    "noisy": Bigram,
    "sum": lambda: Bigram(dropout=0, num_steps=3),
}


def held_out(batch_blocks: int = 2) -> EvaluationBlocks:
    """Other text than what is learnt: the loss on it goes down and then up again."""
    rng = np.random.default_rng(2)
    documents = [rng.integers(1, VOCAB, size).astype(np.int32) for size in (11, 25, 8)]
    return EvaluationBlocks(documents, end_id=0, length=8, batch_blocks=batch_blocks)


def choosing(**changes: Any) -> Evaluation:
    """The loss on `held_out`, by which the best weights are chosen."""
    options: dict[str, Any] = {"batches": held_out(), "objective": CrossEntropy(), "chooses": True}
    return Evaluation(**(options | changes))


def build(folder: Path, argument: dict[str, Any], **changes: Any) -> Trainer:
    settings = {key: value for key, value in argument.items() if key not in ("drafter", "rows")}
    plain = make_source()
    source = PackedBlocks(
        plain.documents,
        end_id=0,
        length=8,
        batch_tokens=8 * argument.get("rows", 4),
        seed=0,
        attend_across=argument["drafter"] != "llama",
    )
    config = replace(CONFIG, **settings)
    drafter = DRAFTERS[argument["drafter"]]()
    made: dict[str, Any] = {"drafter": drafter, "source": source, "config": config}
    return make_trainer(folder, **(made | changes))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def named(trainer: Trainer) -> dict[str, nn.Parameter]:
    return dict(trainer.drafter.named_parameters())


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(value, right[name]) for name, value in left.items())


def check_close(left: dict[str, Tensor], right: dict[str, Tensor], **tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )
