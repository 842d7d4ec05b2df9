"""One engine in a process of its own: answers requests that come line by line.

    PYTHON worker.py ENGINE OPTIONS          ENGINE: a module beside this file; OPTIONS: JSON

Needs nothing but the engine: it runs in environments where draftsmith is not installed.

    stdin    {"prompt": [token, ...], "max_new_tokens": n}
    stdout   {"ready": {facts}}, then for each request {"seconds": s, "tokens": [token, ...]}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not for the caller
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    engine = importlib.import_module(sys.argv[1])
    facts, generate = engine.open_engine(json.loads(sys.argv[2]))
    print(json.dumps({"ready": facts}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = generate(request["prompt"], request["max_new_tokens"])
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "tokens": list(map(int, tokens))}
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
