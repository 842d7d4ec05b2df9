"""How many live sessions a small machine holds: 20 sessions, one update a second each, a minute.

    python benchmarks/live/serving.py [--sessions 20] [--seconds 60] [--model MODEL]

Starts `draftsmith live serve` in a process of its own and speaks to it as clients do. Every session
hears sentences grow word by word and be final; measured are the answers to finals (until the update
arrives), all others, what was coalesced, and what was lost. Writes
benchmarks/results/live_serving.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from websockets.asyncio.client import connect

from draftsmith.live.streams import make_stream
from draftsmith.provenance import machine_summary, versions, write_json_atomic

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = ROOT / "src" / "draftsmith" / "serve" / "static" / "sample.txt"
LAG = 3


@dataclass
class SessionLog:
    """What one session saw."""

    finals: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    sent: int = 0
    sent_finals: int = 0
    coalesced: int = 0
    errors: int = 0


async def session(address: str, number: int, seconds: float, sentences: list[str]) -> SessionLog:
    """One client; its sentences begin at another one than its neighbours'."""
    seen = SessionLog()
    start = number * len(sentences) // 20 % len(sentences)
    stream = make_stream([*sentences[start:], *sentences[:start]] * 8, lag=LAG)
    waiting: dict[tuple[int, int], float] = {}
    async with connect(address) as socket:
        await socket.send(json.dumps({"type": "start", "v": 1}))
        await socket.recv()

        async def listen() -> None:
            async for frame in socket:
                said = json.loads(frame)
                if said["type"] == "update":
                    sent = waiting.pop((said["seg"], said["rev"]), None)
                    if sent is not None:
                        (seen.finals if said["final"] else seen.others).append(
                            time.monotonic() - sent
                        )
                elif said["type"] == "coalesced":
                    seen.coalesced += len(said["revs"])
                elif said["type"] == "error":
                    seen.errors += 1

        listening = asyncio.create_task(listen())
        await asyncio.sleep(number / 20)  # nobody speaks in step with others
        began = time.monotonic()
        for turn, one in enumerate(stream):
            if turn >= seconds:
                break
            await asyncio.sleep(max(0.0, began + turn - time.monotonic()))
            waiting[one.seg, one.rev] = time.monotonic()
            message = {"type": "source", "seg": one.seg, "rev": one.rev, "text": one.text}
            await socket.send(json.dumps(message | {"final": one.final}))
            seen.sent += 1
            seen.sent_finals += one.final
        await asyncio.sleep(5.0)  # what is still on its way
        listening.cancel()
    return seen


async def everyone(
    address: str, count: int, seconds: float, sentences: list[str]
) -> list[SessionLog]:
    """All sessions at once."""
    clients = (session(address, number, seconds, sentences) for number in range(count))
    return await asyncio.gather(*clients)


def spread(values: list[float]) -> dict[str, float]:
    ms = 1000 * np.array(values)
    return {f"p{q}": round(float(np.percentile(ms, q)), 1) for q in (50, 95, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default=str(ROOT / "models" / "mini-ende" / "target"))
    parser.add_argument("--resync", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    sentences = [line for line in SENTENCES.read_text(encoding="utf-8").splitlines() if line]
    command = [sys.executable, "-m", "draftsmith", "live", "serve", "--port", "0"]
    command += ["--target", given.model, "--dtype", "float32", "--resync", str(given.resync)]
    many = str(given.sessions)
    command += ["--sessions", many, "--per-address", many]  # all of them are of one address
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://([\d.]+:\d+)/", server.stdout.readline())
            assert found, "the server did not say where it is"
            address = found[1]
            seen = asyncio.run(
                everyone(f"ws://{address}/ws", given.sessions, given.seconds, sentences)
            )
            metrics = urlopen(f"http://{address}/metrics").read().decode()
        finally:
            server.terminate()
    result: dict[str, Any] = {
        "sessions": given.sessions,
        "seconds": given.seconds,
        "sent": sum(one.sent for one in seen),
        "finals": sum(one.sent_finals for one in seen),
        "finals_lost": sum(one.sent_finals - len(one.finals) for one in seen),
        "coalesced": sum(one.coalesced for one in seen),
        "errors": sum(one.errors for one in seen),
        "final_ms": spread([value for one in seen for value in one.finals]),
        "update_ms": spread([value for one in seen for value in one.others]),
        "rows_per_batch": _mean(metrics, "live_batch_rows"),
        "batch_seconds": _mean(metrics, "live_batch_seconds"),
    }
    print(json.dumps(result, indent=2))
    result |= {"versions": versions(), "machine": machine_summary()}
    write_json_atomic(given.out / "live_serving.json", result)


def _mean(metrics: str, name: str) -> float:
    """Return the mean of a Prometheus histogram."""
    found = dict(line.split(" ") for line in metrics.splitlines() if line.startswith(name))
    return round(float(found[f"{name}_sum"]) / max(float(found[f"{name}_count"]), 1.0), 4)


if __name__ == "__main__":
    main()
