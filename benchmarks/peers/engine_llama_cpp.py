"""llama.cpp's server, over HTTP on this machine."""

from __future__ import annotations

import atexit
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any


def open_engine(options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., list[int]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(options["threads"])
    command = [options["server"], "--model", options["gguf"], "--host", "127.0.0.1"]
    command += ["--port", str(port), "--threads", threads, "--threads-batch", threads]
    # read, not mapped: a mapped file whose pages lie scattered costs it a third of its speed
    command += ["--ctx-size", "4096", "--parallel", "1", "--load-mode", "none"]
    command += options.get("arguments", [])
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(server.kill)
    address = f"http://127.0.0.1:{port}"

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers)) as got:
            return json.load(got)

    while True:
        try:
            ask("/health")
            break
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                raise SystemExit(f"llama-server ended with {server.returncode}") from None
            time.sleep(0.2)

    def generate(prompt: list[int], count: int) -> list[int]:
        answer = ask(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": count,
                "temperature": 0,
                "top_k": 1,
                "samplers": ["top_k"],
                "cache_prompt": False,
                "ignore_eos": True,
                "return_tokens": True,
            },
        )
        return list(answer["tokens"])

    shown = subprocess.run([options["server"], "--version"], capture_output=True, text=True)
    version = re.search(r"version: (.*)", shown.stderr + shown.stdout)
    return {"version": version[1] if version else "unknown"}, generate
