"""Measured step costs, kept from run to run: a JSON file per machine, software, models and way to
draw.

    ~/.cache/draftsmith/costs/5c0a...json        (below XDG_CACHE_HOME where that is set)

A file says what its seconds belong to and counts only for just that. One that cannot be read, or is
of something else, is as if it were not there; a folder that cannot be written keeps nothing. Both
are said, neither stops a run.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.bench.arms import Arm
from draftsmith.bench.step_costs import Workload
from draftsmith.config import as_dict, from_dict
from draftsmith.errors import DraftsmithError
from draftsmith.plan.control import StepCosts
from draftsmith.provenance import (
    digest,
    jsonable,
    machine_summary,
    portable_text,
    versions,
    write_json_atomic,
)
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target
from draftsmith.targets.hf import HFTarget

REFRESH = "DRAFTSMITH_REFRESH_COSTS"
"""Set to anything but 0 it has costs measured again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Costs from an earlier run."""

    costs: StepCosts
    measured: str
    """The day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFile:
    """Where the costs of one combination are kept."""

    path: Path
    key: dict[str, Any]
    """All that they depend on."""

    def load(self) -> Kept | str | None:
        """What is kept; None: nothing; or why what is there cannot be used."""
        if os.environ.get(REFRESH, "") not in ("", "0"):
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                return f"{portable_text(str(self.path))} holds costs of something else"
            costs = from_dict(StepCosts, content["costs"])
            return Kept(costs=costs, measured=str(content["measured"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return f"{portable_text(str(self.path))} cannot be read"

    def store(self, costs: StepCosts) -> str | None:
        """Keep them; or why they could not be kept."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        content = {"key": self.key, "measured": today, "costs": as_dict(costs)}
        try:
            write_json_atomic(self.path, content)
        except (DraftsmithError, OSError) as error:
            return f"costs are not kept: {error}"
        return None


def cost_file(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> CostFile:
    """The file for chains up to the arm's depth."""
    key = jsonable(
        {
            "machine": {k: v for k, v in machine_summary().items() if k != "memory_gib"},
            "versions": versions(),
            "target": _model_facts(target),
            "drafter": {
                "kind": type(arm.drafter).__name__,
                "options": as_dict(arm.drafter.config),
                "weights": _structure(arm.drafter),
                "longest": arm.used_shape.depth,
            },
            # what a drawn token costs depends on how laws are cut, hardly on the temperature
            "sampler": as_dict(
                replace(sampler, temperature=float(sampler.temperature > 0), logit_bias=())
            ),
            "rows": workload.rows,
            "context": workload.bucket,
        }
    )
    return CostFile(path=_folder() / f"{digest(key)[:24]}.json", key=key)


def _folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    # a relative one is to be ignored, says the specification
    if os.path.isabs(given):
        return Path(given) / "draftsmith" / "costs"
    try:
        return Path.home() / ".cache" / "draftsmith" / "costs"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "draftsmith" / "costs"


def _model_facts(target: Target) -> dict[str, Any]:
    """What decides how long its forwards take."""
    return {
        "name": target.name,
        "vocab_size": target.vocab_size,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "weights": _structure(target.model) if isinstance(target, HFTarget) else None,
        "attention": target.attn_implementation if isinstance(target, HFTarget) else None,
    }


def _structure(model: nn.Module) -> str:
    """Of its parameters: names, sizes and formats. What they say costs nothing."""
    return digest([[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters()])
