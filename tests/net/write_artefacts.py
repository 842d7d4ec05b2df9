"""Writes `artefacts/`: what the commands left on disk before the package was rebuilt.

The files in git were written by commit a005e67, the last one before the rebuild. They are never
written anew: `test_old_files.py` holds later code to them. A store or a checkpoint of a later
format gets a folder of its own. To see how they came about, with a checkout of that commit:

    PYTHONPATH=CHECKOUT/src python tests/net/write_artefacts.py FOLDER

Everything goes through the command line; only the random models are made with transformers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from draftsmith import cli

TEXT = """
def add(left, right):
    \"\"\"Return the sum of left and right.\"\"\"
    return left + right

def subtract(left, right):
    return left - right

the cat sat on the mat, the dog sat on the log, and the cat saw the dog.
"""
WORDS = "def add left right return cat".split()
SHORT = "--duration 6steps --block-length 32 --batch-tokens 64 --learning-rate 0.003 --warmup 1"
FLOAT32 = "--dtype float32 --save-dtype float32"
MIDWAY = (
    "--duration 24steps --block-length 32 --batch-tokens 64 --learning-rate 0.003 --warmup 2 "
    "--save-every 8 --eval-every 0 --hold-out 0.2 --seed 3"
)
KINDS = {
    "eagle": "",
    "eagle3": "--drafter-option draft_vocab=120",
    "hass": "--drafter-option num_forwards=2",
    "fspad": "",
    "griffin": "--drafter-option num_forwards=2",
    "medusa": "--drafter-option heads=2",
}


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    inputs()
    stores()
    drafters()
    texts()
    unfinished()
    plans()
    benches()
    live()
    tune()
    shutil.rmtree("cache", ignore_errors=True)
    prune()


def draftsmith(words: str, *, stdin: str = "", printed: str | None = None) -> None:
    """Run one command in the folder; `printed`: the file that gets what it prints."""
    print("draftsmith", words, flush=True)
    out = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), mock.patch.object(sys, "stdin", io.StringIO(stdin)):
        try:
            cli.main(words.split())
        except SystemExit as end:
            code = end.code
    if code != 0:
        sys.exit(f"it ended with {code}")
    if printed is not None:
        Path(printed).parent.mkdir(exist_ok=True)
        Path(printed).write_text(out.getvalue(), encoding="utf-8")


def killed(words: str, sign: Path) -> None:
    """Run one command and kill it as soon as `sign` is there."""
    print("draftsmith", words, "(killed)", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "draftsmith", *words.split()])
    while not sign.exists():
        if process.poll() is not None:
            sys.exit(f"it ended before {sign} was written")
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def inputs() -> None:
    """A random target, a draft that knows it half, and texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained("target")
    whole.save_pretrained("target")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.03)
    model.save_pretrained("draft")
    whole.save_pretrained("draft")
    pairs = [
        {"id": f"{first}-{second}", "prompt": f"{first} {second}", "reference": f"{second} cat"}
        for first in WORDS
        for second in WORDS
    ]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    Path("prompts.jsonl").write_text(lines)
    Path("suite.txt").write_text("the cat sat on the cat\nthe dog\ndef add(left\n")
    Path("text.txt").write_text(TEXT * 8)
    Path("source.txt").write_text("the cat sat on the mat\nthe dog saw the log and the cat\n")
    Path("reference.txt").write_text("the mat sat on the cat\nthe cat saw the dog and the log\n")
    Path("pairs.tsv").write_text("the cat sat\tthe dog sat\nthe dog saw the log\tthe cat saw it\n")
    rows = ["target,draft,target_ppl,draft_ppl,alpha"]
    for number, target_ppl in enumerate((8.0, 10.0, 13.0)):
        for place, draft_ppl in enumerate((15.0, 21.0, 30.0, 44.0)):
            noise = ((7 * number + 3 * place) % 5 - 2) * 0.004
            alpha = 0.75 - 0.006 * draft_ppl + 0.009 * target_ppl + noise
            rows.append(f"t{number},d{place},{target_ppl},{draft_ppl},{alpha:.4f}")
    Path("observations.csv").write_text("\n".join(rows) + "\n")
    rows = ["params,tokens,loss"]
    for params in (1e6, 3e6, 1e7, 3e7):
        for tokens in (2e7, 1e8, 4e8):
            rows.append(
                f"{params:g},{tokens:g},{1.7 + 406 / params**0.34 + 410 / tokens**0.28:.5f}"
            )
    Path("runs.csv").write_text("\n".join(rows) + "\n")


def stores() -> None:
    fixed = "collect --target target --prompts prompts.jsonl --max-new-tokens 8 --shard-size 6"
    draftsmith(f"{fixed} --limit 12 --top-k 8 --samples 2 --temperatures 0,1 --out stores/samples")
    draftsmith(f"{fixed} --limit 12 --top-k 8 --features last --out stores/features")
    draftsmith(f"{fixed} --limit 12 --top-k 8 --features eagle3 --out stores/eagle3")
    draftsmith(f"{fixed} --limit 6 --top-k 0 --beams 2 --max-new-tokens 5 --out stores/beams")
    draftsmith(f"{fixed} --limit 6 --top-k 8 --gold --out stores/gold")
    small = f"{fixed} --limit 24 --top-k 4 --shard-size 3 --batch-size 1"
    draftsmith(f"{small} --out stores/whole")
    killed(f"{small} --out stores/unfinished", Path("stores/unfinished/shard-00001.json"))


def drafters() -> None:
    fixed = f"distill --target target {SHORT} {FLOAT32} --hold-out 0.2 --eval-every 0"
    made = "drafters"
    small = "--size tiny --layers 1 --heads 2 --hidden 16 --intermediate 24"
    own = f"pretrain --text text.txt --tokenizer target {small} {SHORT} {FLOAT32}"
    draftsmith(f"{own} --out {made}/pretrained")
    draftsmith(f"{own} --vocab-subset 280 --out {made}/subset")
    start = f"{fixed} --drafter {made}/pretrained --store stores/samples"
    draftsmith(f"{start} --out {made}/independent")
    for seed in (1, 2):
        draftsmith(f"{start} --objective tvd --seed {seed} --out {made}/tvd-{seed}")
    for kind, words in KINDS.items():
        store = "eagle3" if kind == "eagle3" else "features"
        start = f"{fixed} --drafter {kind} --store stores/{store} {words}"
        draftsmith(f"{start} --out {made}/{kind}")


def texts() -> None:
    """What each drafter generates, in how many steps."""
    fixed = "generate --target target --prompts prompts.jsonl --limit 4 --max-new-tokens 20"
    fixed += " --dtype float64 --json"
    names = ["none", "prompt_lookup", "lookahead", "draft"]
    names += [f"drafters/{kind}" for kind in ("pretrained", "subset", "independent", *KINDS)]
    for name in names:
        for temperature in ("0", "0.8"):
            words = f"{fixed} --drafter {name} --temperature {temperature}"
            file = f"printed/{Path(name).name}-{temperature}.json"
            draftsmith(words, printed=file)


def unfinished() -> None:
    """Two of each run: one that was killed after a checkpoint, and the same that was not."""
    students = {
        "distill": "--drafter drafters/pretrained --store stores/samples",
        "griffin": "--drafter griffin --store stores/features --drafter-option num_forwards=2",
    }
    for name, words in students.items():
        fixed = f"distill --target target {words} {MIDWAY} {FLOAT32}"
        draftsmith(f"{fixed} --out whole/{name}")
        out = Path("unfinished", name)
        killed(f"{fixed} --out {out}", out / "work/checkpoints/step-00000008/manifest.json")
    small = "--size tiny --layers 1 --heads 2 --hidden 16 --intermediate 24"
    words = f"pretrain --text text.txt --eval-text suite.txt {small}"
    for name, own in {"pretrain": "--tokenizer target", "own": "--vocab-size 300"}.items():
        fixed = f"{words} {own} {MIDWAY.replace('--hold-out 0.2 ', '')} {FLOAT32}"
        draftsmith(f"{fixed} --out whole/{name}")
        out = Path("unfinished", name)
        killed(f"{fixed} --out {out}", out / "work/checkpoints/step-00000008/manifest.json")


def benches() -> None:
    fixed = "bench --target target --suite suite.txt --max-new-tokens 8"
    several = "--drafter none,prompt_lookup,independent:draft"
    draftsmith(f"{fixed} {several} --temperature 0,0.8 --repeats 2 --out benches/speed")
    # `plan check` looks for the drafts that the ladder names
    shutil.copytree("draft", "plans/ladder/50m-pretrained")
    one = "--drafter independent:plans/ladder/50m-pretrained --draft-length 8 --temperature 0"
    draftsmith(f"{fixed} {one} --repeats 2 --out benches/draft")
    draftsmith(f"{fixed.replace('8', '20')} {one} --perplexity text.txt --out benches/perplexity")
    shutil.rmtree("plans/ladder/50m-pretrained")


def plans() -> None:
    draftsmith("plan law observations.csv --fixed-effects --out plans/law")
    draftsmith("plan law observations.csv --json", printed="plans/law.json")
    draftsmith("plan fit runs.csv --bootstrap 20 --json", printed="plans/loss.json")
    sizes = "--target-params 12853473280 --target-tokens 180B --draft-tokens 1.8e11"
    draftsmith(f"plan optimum {sizes} --law plans/law.json --json", printed="plans/optimum.json")
    budget = "--target-params 13B --target-tokens 1T --tokens 2B"
    draftsmith(f"plan ladder {budget} --law plans/law.json --out plans/ladder")


def live() -> None:
    """A target whose texts end: every seventh token ends one."""
    Path("live").mkdir()
    shutil.copytree("target", "speaker")
    config = json.loads(Path("speaker/generation_config.json").read_text())
    config["eos_token_id"] = list(range(0, 300, 7))
    Path("speaker/generation_config.json").write_text(json.dumps(config))
    draftsmith(
        "live make-stream source.txt --references reference.txt --lag 2 --out live/stream.jsonl"
    )
    draftsmith("live make-examples pairs.tsv --out live/examples.jsonl")
    settings = "--compare ar,ssbd --bias 0,0.5 --mask-k 0,2 --dtype float64 --language German"
    fixed = f"--target speaker {settings}"
    draftsmith(f"live replay live/stream.jsonl {fixed} --out live/replay/de")
    heard = "the cat\nthe cat sat\n\nthe dog\nthe dog saw the log\n"
    draftsmith(
        "live translate --target speaker --dtype float64 --bias 0 --out live/kept.jsonl",
        stdin=heard,
    )
    Path("speaker/model.safetensors").unlink()  # it is the target's


def tune() -> None:
    words = "--drafter prompt_lookup --limit 1 --longest 2 --max-new-tokens 6 --dtype float64"
    draftsmith(f"tune --target target --suite suite.txt {words} --out tuned")
    shutil.copytree("cache/draftsmith/costs", "costs")


def prune() -> None:
    """Leave out pictures and pages, which no command reads, and all but one early checkpoint."""
    for path in sorted(Path().rglob("*")):
        if path.suffix in (".png", ".svg", ".html"):
            path.unlink()
    for folder in sorted(Path().rglob("figures")):
        shutil.rmtree(folder)
    for seed in (1, 2):  # `report` reads their figures alone
        Path(f"drafters/tvd-{seed}/model.safetensors").unlink()
    for folder in Path("unfinished").iterdir():
        for checkpoint in (folder / "work/checkpoints").iterdir():
            if checkpoint.name != "step-00000008":
                shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()
