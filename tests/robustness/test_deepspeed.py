"""The real DeepSpeed: two processes under ZeRO-2, one under ZeRO-3, against one without it.

Needs the package and a C++ compiler; runs in an environment that has it (engines/make_env.sh).
"""

from __future__ import annotations

import json
import os
import socket
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


def alone() -> dict[str, str]:
    """What a launcher tells a single process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return first | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def a_run(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    """Train to the end; the last and the best weights, whole."""
    settings = dict(argument)
    if "stage" in settings:
        settings["deepspeed"] = folder / "ds.json"
        zero = {"zero_optimization": {"stage": settings.pop("stage")}}
        settings["deepspeed"].write_text(json.dumps(zero))
        os.environ |= {name: value for name, value in alone().items() if name not in os.environ}
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


@pytest.mark.parametrize("drafter", ["llama", "griffin", "medusa"])
@pytest.mark.parametrize(("stage", "size"), [(2, 2), (3, 1)])
def test_a_run_with_deepspeed_is_the_run_without(
    groups: Groups, tmp_path: Path, stage: int, size: int, drafter: str
) -> None:
    plain = a_run(tmp_path, {"drafter": drafter, "accumulation": 2})
    argument = {"drafter": drafter, "accumulation": 2 // size, "stage": stage}
    for member in groups.run(a_run, tmp_path / "engine", size=size, argument=argument):
        assert member["processes"] == size
        check_close(member["last"], plain["last"], rtol=1e-3, atol=1e-4)
        assert member["chosen"] == plain["chosen"]
        check_close(member["best"], plain["best"], rtol=1e-3, atol=1e-4)
        assert member["loss"] == pytest.approx(plain["loss"], rel=1e-4)
