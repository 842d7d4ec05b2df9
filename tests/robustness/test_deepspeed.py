"""Two processes with the real DeepSpeed, weights whole (ZeRO-2) or in parts (ZeRO-3), against one
process without it.

Needs the package and a C++ compiler; runs in an environment that has it (engines/make_env.sh).
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.process_group import Groups
from tests.small_trainer import DRAFTERS, build, check_close, choosing

pytestmark = [
    pytest.mark.full,
    # not imported here: it writes to stdout, where the server of the groups answers
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is no dependency"),
]


def a_run(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    """Train to the end; the last and the best weights, whole."""
    settings = dict(argument)
    if "stage" in settings:
        settings["deepspeed"] = folder / "ds.json"
        zero = {"zero_optimization": {"stage": settings.pop("stage")}}
        settings["deepspeed"].write_text(json.dumps(zero))
    trainer = build(folder, {"evaluate_every": 2, **settings}, evaluations=[choosing()])
    report = trainer.train()
    last, best = (DRAFTERS[settings["drafter"]]() for _ in range(2))
    trainer.copy_into(last)
    return {
        "processes": trainer.accelerator.num_processes,
        "last": {name: value.detach() for name, value in last.named_parameters()},
        "chosen": trainer.copy_best_into(best),
        "best": {name: value.detach() for name, value in best.named_parameters()},
        "loss": report.evaluation["loss"],
    }


# ZeRO-3 gathers a module's weights while it is called, and `bigram` multiplies bare ones.
@pytest.mark.parametrize(
    ("drafter", "stage"),
    [
        ("bigram", 2),
        *((name, stage) for name in ("llama", "griffin", "medusa") for stage in (2, 3)),
    ],
)
def test_a_run_with_deepspeed_is_the_run_without(
    groups: Groups, tmp_path: Path, drafter: str, stage: int
) -> None:
    alone = a_run(tmp_path, {"drafter": drafter, "accumulation": 2})
    argument = {"drafter": drafter, "stage": stage}
    for member in groups.run(a_run, tmp_path / "engine", size=2, argument=argument):
        assert member["processes"] == 2
        check_close(member["last"], alone["last"], rtol=1e-3, atol=1e-4)
        assert member["chosen"] == alone["chosen"]
        check_close(member["best"], alone["best"], rtol=1e-3, atol=1e-4)
        assert member["loss"] == pytest.approx(alone["loss"], rel=1e-4)
