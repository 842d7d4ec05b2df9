"""Run in the environment of vLLM: FOLDER/jobs.pickle -> FOLDER/made.pickle. One engine for all.

jobs    name -> (requests, settings)
made    name -> trajectories, or the sentence that refused them; `version` -> vLLM's
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from draftsmith.distill.trajectories.vllm import VllmBackend
from draftsmith.errors import InputError


def run(folder: Path) -> None:
    import vllm

    backend = VllmBackend(str(folder / "model"), engine={"enforce_eager": True})
    made: dict[str, Any] = {"version": vllm.__version__}
    for name, (requests, settings) in pickle.loads((folder / "jobs.pickle").read_bytes()).items():
        try:
            made[name] = backend.collect(requests, settings)
        except InputError as error:
            made[name] = str(error)
    (folder / "made.pickle").write_bytes(pickle.dumps(made))


if __name__ == "__main__":  # vLLM starts processes that import this file
    run(Path(sys.argv[1]))
