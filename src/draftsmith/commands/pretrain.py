"""`draftsmith pretrain`: text files -> a small causal language model, ready to draft.

OUT/work/       tokenizer/, checkpoints/: what an interrupted run continues from
OUT/            the finished model, loadable with transformers; run.json is written last
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.commands._options import VerbOptions
from draftsmith.distill.config import PretrainConfig
from draftsmith.provenance import start_run

if TYPE_CHECKING:
    from draftsmith.distill.pretraining import PretrainResult


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(PretrainConfig, VerbOptions):
    """Train a small model from text: a drafter in a target's family, or a model of its own."""


def run(options: PretrainOptions) -> PretrainResult:
    """Train, or continue training, and write the model to `options.out`."""
    from draftsmith.distill.distributed import training_folder
    from draftsmith.distill.pretraining import pretrain
    from draftsmith.targets.hf import quieten

    with training_folder(options.out):
        quieten()
        return pretrain(options, start_run("pretrain", options, seed=options.seed))
