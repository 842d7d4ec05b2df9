"""The real command, interrupted as people and schedulers do it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.forks import Forks, group_of


def steps_done(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def interrupt(forks: Forks, words: list[str], out: Path, number: int) -> tuple[int, str]:
    """Exit code and stderr of a run that got this signal after some further steps."""
    before = max(steps_done(out), default=0)
    with forks.command(*words) as process:
        deadline = time.monotonic() + 300
        while max(steps_done(out), default=0) < before + 3:
            assert process.poll() is None, process.errors()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
        return process.wait(), stderr


@pytest.mark.full
def test_interruptions_have_their_exit_codes_and_lose_no_step(tmp_path: Path, forks: Forks) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} is {i * i % 97}" for i in range(3000)))
    out = tmp_path / "out"
    words = f"pretrain --text {text} --out {out} --size tiny --vocab-size 300 --block-length 64"
    words += " --batch-tokens 512 --duration 150steps --save-every 1000 --dtype float32"
    code, stderr = interrupt(forks, words.split(), out, signal.SIGINT)
    assert code == 130 and "Traceback" not in stderr
    code, stderr = interrupt(forks, words.split(), out, signal.SIGTERM)
    assert code == 143 and "Traceback" not in stderr
    code, stderr = interrupt(forks, words.split(), out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    with forks.command(*words.split(), "--json") as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["steps"] == 150
    assert steps_done(out) == list(range(1, 151))
    assert not (out / "work").exists()


@pytest.mark.full
def test_two_processes_train_the_same_model_as_one(tmp_path: Path, forks: Forks) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} is {i * i % 97}" for i in range(3000)))
    words = f"pretrain --text {text} --size tiny --vocab-size 300 --block-length 64 --json"
    words += " --batch-tokens 512 --duration 20steps --dtype float32 --save-dtype float32 --out"
    with forks.command(*words.split(), tmp_path / "one") as alone:
        assert alone.wait() == 0, alone.errors()
    group = [forks.command(*words.split(), tmp_path / "two", **place) for place in group_of(2)]
    said = []
    for process in group:
        with process:
            stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        said.append((stdout.count("\n"), stderr.count("wrote")))
    assert said == [(1, 1), (0, 0)]  # the first process speaks
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():  # sums over parts are in another order
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
