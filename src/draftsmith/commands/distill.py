"""`draftsmith distill`: a draft model, or a network over hidden states, learns to say what a target
says.

OUT/work/       checkpoints/: what an interrupted run continues from
OUT/            the drafter with the best held-out figure; run.json is written last
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.commands._options import VerbOptions
from draftsmith.distill.config import DistillConfig
from draftsmith.provenance import start_run

if TYPE_CHECKING:
    from draftsmith.distill.distilling import DistillResult


@dataclass(frozen=True, kw_only=True)
class DistillOptions(DistillConfig, VerbOptions):
    """Distil a drafter from a target: offline from a store, or online with the target loaded."""


def run(options: DistillOptions) -> DistillResult:
    """Train, or continue training, and write the draft model to `options.out`."""
    from draftsmith.distill.distilling import distil
    from draftsmith.distill.distributed import training_folder
    from draftsmith.targets.hf import quieten

    with training_folder(options.out):
        quieten()
        return distil(options, start_run("distill", options, seed=options.seed))


def time_step(options: DistillOptions) -> float:
    """Seconds of a training step on this machine. Nothing is written, and nothing is said, which
    the training would only say again."""
    from draftsmith.distill.distilling import time_step
    from draftsmith.targets.hf import quieten

    quieten()
    log = logging.getLogger("draftsmith")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        return time_step(options)
    finally:
        log.setLevel(before)
