"""The real command, interrupted as people and schedulers do it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def start(words: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= variables
    return subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def steps_done(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def interrupt(words: list[str], out: Path, number: int) -> tuple[int, str]:
    """Exit code and stderr of a run that got this signal after some further steps."""
    before = max(steps_done(out), default=0)
    process = start(words)
    try:
        deadline = time.monotonic() + 300
        while max(steps_done(out), default=0) < before + 3:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return process.returncode, stderr


@pytest.mark.full
def test_interruptions_have_their_exit_codes_and_lose_no_step(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} is {i * i % 97}" for i in range(3000)))
    out = tmp_path / "out"
    words = f"pretrain --text {text} --out {out} --size tiny --vocab-size 300 --block-length 64"
    words += " --batch-tokens 512 --duration 400steps --save-every 1000 --dtype float32"
    code, stderr = interrupt(words.split(), out, signal.SIGINT)
    assert code == 130 and "Traceback" not in stderr
    code, stderr = interrupt(words.split(), out, signal.SIGTERM)
    assert code == 143 and "Traceback" not in stderr
    code, stderr = interrupt(words.split(), out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    process = start([*words.split(), "--json"])
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["steps"] == 400
    assert steps_done(out) == list(range(1, 401))
    assert not (out / "work").exists()


@pytest.mark.full
def test_two_processes_train_the_same_model_as_one(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} is {i * i % 97}" for i in range(3000)))
    words = f"pretrain --text {text} --size tiny --vocab-size 300 --block-length 64 --json"
    words += " --batch-tokens 512 --duration 20steps --dtype float32 --save-dtype float32 --out"
    alone = start([*words.split(), str(tmp_path / "one")])
    assert alone.wait(timeout=300) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    group |= {"LOCAL_WORLD_SIZE": "2"}
    both = [
        start(
            [*words.split(), str(tmp_path / "two")], RANK=str(rank), LOCAL_RANK=str(rank), **group
        )
        for rank in range(2)
    ]
    said = []
    for process in both:
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        said.append((stdout.count("\n"), stderr.count("wrote")))
    assert said == [(1, 1), (0, 0)]  # the first process speaks
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():  # sums over parts are in another order
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
