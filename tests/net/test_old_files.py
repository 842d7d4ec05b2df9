"""Every file in `artefacts/` is read by the commands of today, and gives what it gave.

See `write_artefacts.py` for how they were made. Weights may differ by what another processor rounds
otherwise; tokens, counts and figures may not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.net.running import run
from tests.net.write_artefacts import FLOAT32, KINDS, MIDWAY, SHORT

from draftsmith.distill.trajectories.shards import error_bound
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.drafters.vocabulary import VocabularySubset

ROUNDING = 1e-4
"""What weights may differ by: Adam moves each by about 3e-3 in every step."""
FLOAT32_LOGPROB = 16 * 2.0**-21
"""What the logprob of a token may differ by: log p of 300 tokens lies between -8 and -4, where
neighbouring float32 numbers are 2**-21 apart, and rounding errors of sums over 4 layers of width 32
to 48 grow to about sqrt(4 x 48) = 14 of these units."""
SMALL = "--size tiny --layers 1 --heads 2 --hidden 16 --intermediate 24"
DRAWS = ["draft", "pretrained", "subset", "independent"]
DRAFTERS = [*DRAWS[1:], *KINDS]
GENERATE = (
    "generate --target target --prompts prompts.jsonl --max-new-tokens 20 --dtype float64 --json"
)
TOGETHER = f"{GENERATE} --limit 4 --batch-size 4"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def assert_same_weights(made: Path, recorded: Path) -> None:
    found, wanted = weights(made), weights(recorded)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=ROUNDING, msg=name)


def assert_same_figures(found: Any, wanted: Any, where: str = "", *, within: float = 1e-9) -> None:
    """Equal, but for the last digits of numbers that are no whole ones."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same_figures(found[key], value, f"{where}.{key}", within=within)
    elif isinstance(wanted, list):
        assert isinstance(found, list) and len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same_figures(found[number], value, f"{where}[{number}]", within=within)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=within, abs=within), where
    else:
        assert found == wanted, where


# --------------------------------------------------------------------------- drafters


def printed(old: Path, name: str, temperature: str) -> Any:
    """What `generate` printed for four prompts, one after the other."""
    return read(old / f"printed/{name}-{temperature}.json")


def emitted(payload: Any) -> list[tuple[list[int], str]]:
    return [(one["token_ids"], one["finish_reason"]) for one in payload["results"]]


@pytest.mark.parametrize("name", ["prompt_lookup", "lookahead", "draft", *DRAFTERS])
@pytest.mark.every(3)
def test_a_drafter_decodes_in_as_many_steps_as_before_and_changes_nothing(
    name: str, old: Path
) -> None:
    drafter = f"drafters/{name}" if name in DRAFTERS else name
    for temperature in ("0", "0.8"):
        words = f"{GENERATE} --limit 2 --drafter {drafter} --temperature {temperature}"
        if name in DRAWS:
            words += " --rule rejection"  # what `auto` was for draws when these were printed
        results = printed(old, name, temperature)["results"]
        assert_same_figures(run(words, folder=old).json, {"results": results[:2]})
    assert emitted(printed(old, name, "0")) == emitted(printed(old, "none", "0"))
    # with the same seed, rule `match` emits what plain decoding draws; rows do not matter either
    words = f"{TOGETHER} --drafter {drafter} --temperature 0.8 --rule match"
    assert emitted(run(words, folder=old).json) == emitted(printed(old, "none", "0.8"))


def test_plain_decoding_draws_what_it_drew(old: Path) -> None:
    for temperature in ("0", "0.8"):
        found = run(f"{GENERATE} --limit 4 --temperature {temperature}", folder=old).json
        assert_same_figures(found, printed(old, "none", temperature))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "medusa"])
@pytest.mark.parametrize("shape", ["--draft-length 3", "--draft-tree 2,2,1", "--draft-tree 3x3:6"])
@pytest.mark.every(4)
def test_an_old_drafter_drafts_in_every_shape(kind: str, shape: str, old: Path) -> None:
    found = run(f"{TOGETHER} --drafter {kind}:drafters/{kind} {shape}", folder=old).json
    assert emitted(found) == emitted(printed(old, "none", "0"))
    assert any(one["tokens_per_step"] > 1 for one in found["results"])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.every(3)
def test_an_old_drafter_is_trained_further(kind: str, old: Path, tmp_path: Path) -> None:
    store = "eagle3" if kind == "eagle3" else "features"
    words = f"distill --target target --store stores/{store} {SHORT} {FLOAT32} --hold-out 0.2"
    start = f"{words} --drafter {kind}:drafters/{kind} --out {tmp_path / 'out'} --json"
    before = read(old / f"drafters/{kind}/run.json")["results"]
    found = run(start, folder=old).json
    # it goes on where the first training ended
    assert found["before"] == pytest.approx(before["held_out"][found["figure"]], abs=1e-4)


def test_an_old_draft_model_with_a_subset_of_the_tokens_is_trained_further(
    old: Path, tmp_path: Path
) -> None:
    """Its file has no digest of its tokens, so the tokenizer beside it tells; the next one has."""
    before, out = old / "drafters/subset", tmp_path / "out"
    words = f"distill --target target --store stores/samples {SHORT} {FLOAT32} --hold-out 0.2"
    found = run(f"{words} --drafter drafters/subset --out {out} --json", folder=old).json
    assert found["after"] > found["before"]
    one, two = (VocabularySubset.beside(str(path)) for path in (before, out))
    assert one is not None and one.tokens_sha256 is None
    assert two is not None and two.tokens_sha256 is not None
    assert torch.equal(one.d2t, two.d2t) and one.unknown == two.unknown
    drafted = run(f"{TOGETHER} --drafter independent:{out}", folder=old).json
    assert emitted(drafted) == emitted(printed(old, "none", "0"))


# --------------------------------------------------------------------------- stores


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.every(3)
def test_the_same_drafter_is_learnt_from_an_old_store(kind: str, old: Path, tmp_path: Path) -> None:
    store = "eagle3" if kind == "eagle3" else "features"
    words = f"distill --target target {SHORT} {FLOAT32} --hold-out 0.2 --eval-every 0"
    own = f"--drafter {kind} --store stores/{store} {KINDS[kind]}"
    found = run(f"{words} {own} --out {tmp_path / 'out'} --json", folder=old).json
    results = read(old / f"drafters/{kind}/run.json")["results"]
    assert found["tokens"] == results["tokens"]
    assert found["after"] == pytest.approx(results["held_out"][found["figure"]], abs=1e-4)
    assert_same_weights(tmp_path / "out", old / "drafters" / kind)


def test_the_same_draft_model_is_learnt_from_an_old_store(old: Path, tmp_path: Path) -> None:
    words = f"distill --target target {SHORT} {FLOAT32} --hold-out 0.2 --eval-every 0"
    own = "--drafter drafters/pretrained --store stores/samples"
    found = run(f"{words} {own} --out {tmp_path / 'out'} --json", folder=old).json
    results = read(old / "drafters/independent/run.json")["results"]
    assert_same_figures(found["acceptance_before"], results["alpha_before"], within=1e-4)
    assert_same_weights(tmp_path / "out", old / "drafters/independent")


@pytest.mark.parametrize(
    "words",
    [
        "--store stores/samples --laws teacher",
        "--store stores/samples --beams 1 --objective hellinger --tail floor",
        "--store stores/beams --aggregate mixture --objective jsd",
        "--store stores/beams --beam-weights score --objective tvdpp",
        "--store stores/gold --objective sft",
        "--store stores/samples stores/gold stores/features --objective lk",
        "--store stores/samples --text text.txt --text-share 0.5",
    ],
)
@pytest.mark.every(3)
def test_old_stores_are_learnt_from_in_every_way(words: str, old: Path, tmp_path: Path) -> None:
    fixed = f"distill --target target --drafter drafters/pretrained {SHORT} {FLOAT32}"
    found = run(f"{fixed} {words} --out {tmp_path / 'out'} --json", folder=old).json
    assert found["steps"] == 6 and found["tokens"] > 0
    losses = [loss for _, loss in read(tmp_path / "out/run.json")["results"]["training_loss"]]
    assert len(losses) == 6 and all(-1 < loss < 20 for loss in losses)
    moved = [
        (tensor - weights(old / "drafters/pretrained")[name]).abs().max().item()
        for name, tensor in weights(tmp_path / "out").items()
    ]
    assert max(moved) > 10 * ROUNDING, "the bound on weights could tell nothing apart"


def test_a_collection_that_was_killed_is_completed(old: Path, tmp_path: Path) -> None:
    store = tmp_path / "unfinished"
    shutil.copytree(old / "stores/unfinished", store)
    kept = {path.name: path.read_bytes() for path in store.glob("shard-*")}
    words = "collect --target target --prompts prompts.jsonl --max-new-tokens 8 --limit 24"
    own = f"--top-k 4 --shard-size 3 --batch-size 1 --out {store} --json"
    assert 0 < len([name for name in kept if name.endswith(".parquet")]) < 8
    found = run(f"{words} {own}", folder=old).json
    assert found["written"] == 8 - len([name for name in kept if name.endswith(".parquet")])
    whole = {path.name: path.read_bytes() for path in (old / "stores/whole").glob("shard-*")}
    assert {path.name for path in store.glob("shard-*")} == whole.keys()
    assert all((store / name).read_bytes() == content for name, content in kept.items())
    assert exact_columns(store) == exact_columns(old / "stores/whole")
    theirs = TrajectoryStore.open(old / "stores/whole").trajectories()
    for mine, wanted in zip(TrajectoryStore.open(store).trajectories(), theirs, strict=True):
        assert abs(mine.score - wanted.score) <= len(wanted.tokens) * FLOAT32_LOGPROB
        assert mine.top is not None and wanted.top is not None
        np.testing.assert_array_equal(mine.top.ids_NK, wanted.top.ids_NK)
        # Rounding is far below the distance of two codes, so a value may reach the next code only.
        reach_NK = error_bound(np.minimum(mine.top.log_p_NK, wanted.top.log_p_NK))
        assert (np.abs(mine.top.log_p_NK - wanted.top.log_p_NK) <= reach_NK).all()


def exact_columns(store: Path) -> list[dict[str, Any]]:
    """The rows of a store without the columns that hold rounded logprobs."""
    import pyarrow.parquet

    rounded = {"score", "laws_codes_low", "laws_codes_high"}
    rows: list[dict[str, Any]] = []
    for path in sorted(store.glob("*.parquet")):
        rows += pyarrow.parquet.read_table(path).to_pylist()
    return [{key: value for key, value in row.items() if key not in rounded} for row in rows]


@pytest.mark.parametrize("name", ["samples", "features", "eagle3", "beams", "gold"])
def test_the_same_store_is_collected_again(name: str, old: Path, tmp_path: Path) -> None:
    """Every column and file of a store, by the command that its run.json has."""
    words = read(old / f"stores/{name}/run.json")["command"].split()[1:]
    words[words.index("--out") + 1] = str(tmp_path / name)
    ended = run([*words, "--json"], folder=old)
    assert ended.json["trajectories"] > 0
    there, made = old / "stores" / name, tmp_path / name
    assert {path.name for path in made.iterdir()} >= {path.name for path in there.iterdir()}
    import pyarrow.parquet

    for path in sorted(there.glob("*.parquet")):
        ours = pyarrow.parquet.read_table(made / path.name)
        theirs = pyarrow.parquet.read_table(path)
        assert ours.schema.equals(theirs.schema)
        assert [row["tokens"] for row in ours.to_pylist()] == [
            row["tokens"] for row in theirs.to_pylist()
        ]
    for path in sorted(there.glob("*.safetensors")):
        found, wanted = load_file(made / path.name), load_file(path)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=0.02, atol=0.02)
    shard = next(iter(sorted(there.glob("shard-*.json"))))
    assert read(made / shard.name).keys() == read(shard).keys()
    assert read(made / "manifest.json").keys() == read(there / "manifest.json").keys()


# --------------------------------------------------------------------------- runs that were killed

STARTED = {
    "distill": "distill --target target --drafter drafters/pretrained --store stores/samples",
    "griffin": "distill --target target --drafter griffin --store stores/features "
    "--drafter-option num_forwards=2",
    "pretrain": f"pretrain --text text.txt --eval-text suite.txt {SMALL} --tokenizer target",
    "own": f"pretrain --text text.txt --eval-text suite.txt {SMALL} --vocab-size 300",
}


@pytest.mark.parametrize("name", list(STARTED))
def test_a_training_that_was_killed_ends_in_the_weights_of_one_that_was_not(
    name: str, old: Path, tmp_path: Path
) -> None:
    verb = STARTED[name].split()[0]
    midway = MIDWAY if verb == "distill" else MIDWAY.replace("--hold-out 0.2 ", "")
    out = tmp_path / "out"
    shutil.copytree(old / "unfinished" / name, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    marked = json.dumps({**json.loads(lines[0]), "mark": 1})
    (out / "metrics.jsonl").write_text("\n".join([marked, *lines[1:]]) + "\n")
    found = run(f"{STARTED[name]} {midway} {FLOAT32} --out {out} --json", folder=old).json
    assert found["steps"] == 24
    kept = (out / "metrics.jsonl").read_text().splitlines()
    assert kept[:8] == [marked, *lines[1:8]], "it began anew"
    assert json.loads(kept[-1])["step"] == 24
    assert_same_weights(out, old / "whole" / name)
    now, then = (read(folder / "run.json")["results"] for folder in (out, old / "whole" / name))
    assert then.keys() <= now.keys()
    assert_same_figures({key: now[key] for key in then}, then, within=1e-3)


# --------------------------------------------------------------------------- benches, plans, live


def test_old_runs_are_compared(old: Path, tmp_path: Path) -> None:
    names = ["independent", "tvd-1", "tvd-2", "eagle", "griffin", "medusa"]
    folders = " ".join(["benches/speed", *(f"drafters/{name}" for name in names)])
    found = run(f"report {folders} --out {tmp_path} --json", folder=old).json
    shown = json.dumps(found)
    for name in ("tvd", "eagle", "griffin", "medusa", "prompt_lookup"):
        assert name in shown
    assert (tmp_path / "comparison.html").stat().st_size > 0
    assert (tmp_path / "comparison.csv").stat().st_size > 0


def test_an_old_law_gives_the_optimum_that_it_gave(old: Path) -> None:
    sizes = "--target-params 12853473280 --target-tokens 180B --draft-tokens 1.8e11"
    for law in ("plans/law.json", "plans/law/law.json"):
        found = run(f"plan optimum {sizes} --law {law} --json", folder=old).json
        assert_same_figures(found, read(old / "plans/optimum.json"), within=1e-6)


def test_old_observations_give_the_laws_that_they_gave(old: Path) -> None:
    found = run("plan law observations.csv --json", folder=old).json
    assert_same_figures(found, read(old / "plans/law.json"), within=1e-6)
    found = run("plan fit runs.csv --bootstrap 20 --json", folder=old).json
    assert_same_figures(found, read(old / "plans/loss.json"), within=1e-4)


def test_an_old_ladder_is_predicted_again_and_checked(old: Path, tmp_path: Path) -> None:
    budget = "--target-params 13B --target-tokens 1T --tokens 2B"
    own = f"--law plans/law.json --out {tmp_path / 'ladder'} --json"
    made = run(f"plan ladder {budget} {own}", folder=old).json
    ladder = read(old / "plans/ladder/ladder.json")
    assert made.keys() == ladder.keys()
    for ours, theirs in zip(made["rungs"], ladder["rungs"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("size", "params", "gamma", "alpha", "tau", "speedup"):
            assert_same_figures(ours[name], theirs[name], name, within=1e-6)
    records = "--records benches/draft benches/perplexity"
    found = run(f"plan check plans/ladder/ladder.json {records} --json", folder=old).json
    quantities = {(row["size"], row["quantity"]) for row in found["comparisons"]}
    assert {("50m", "alpha"), ("50m", "speedup")} <= quantities


def test_old_counts_of_a_bench_are_read(old: Path) -> None:
    found = run("plan alpha benches/perplexity --json", folder=old).json
    assert 0 < found["mle"]["alpha"] < 1
    words = "plan law benches/perplexity observations.csv --json"
    assert run(words, folder=old).json["n"] == 13


def test_an_old_stream_is_replayed_as_it_was(old: Path, tmp_path: Path) -> None:
    settings = "--compare ar,ssbd --bias 0,0.5 --mask-k 0,2 --dtype float64 --language German"
    words = f"live replay live/stream.jsonl --target speaker {settings} --out {tmp_path} --json"
    rows = run(words, folder=old).json["rows"]
    there = old / "live/replay/de"
    timed = dict.fromkeys(("output_tps", "speedup"))
    for ours, theirs in zip(rows, read(there / "table.json")["rows"], strict=True):
        # what it was, and columns that are new
        assert_same_figures({name: ours[name] for name in theirs} | timed, theirs | timed)
    timed = dict.fromkeys(("seconds", "first_seconds"))
    for path in sorted(there.glob("*/records.jsonl")):
        lines = (tmp_path / path.parent.name / path.name).read_text().splitlines()
        for ours, theirs in zip(lines, path.read_text().splitlines(), strict=True):
            assert_same_figures(json.loads(ours) | timed, json.loads(theirs) | timed)
    for path in sorted(there.glob("*.csv")):
        head, *_ = path.read_text().splitlines()
        assert (tmp_path / path.name).read_text().splitlines()[0].startswith(f"{head},")
    for path in sorted(there.glob("*/subtitles.*")):
        assert (tmp_path / path.parent.name / path.name).read_text() == path.read_text()


def test_old_records_are_scored_and_joined(old: Path, tmp_path: Path) -> None:
    for path in ("live/kept.jsonl", "live/replay/de/ssbd-bias0.5/records.jsonl"):
        found = run(f"live score {path} --json --out {tmp_path / 'log'}", folder=old).json
        assert found["steadiness"]["updates"] > 0
    joined = run("live score live/replay --json", folder=old).json
    assert "de" in json.dumps(joined)


def test_streams_and_examples_are_made_as_they_were(old: Path, tmp_path: Path) -> None:
    for words, name in (
        ("live make-stream source.txt --references reference.txt --lag 2", "stream.jsonl"),
        ("live make-examples pairs.tsv", "examples.jsonl"),
    ):
        assert run(f"{words} --out {tmp_path / name}", folder=old).code == 0
        assert (tmp_path / name).read_bytes() == (old / "live" / name).read_bytes()


def test_old_examples_are_learnt_from(old: Path, tmp_path: Path) -> None:
    words = f"pretrain --text live/examples.jsonl {SMALL} {FLOAT32} --tokenizer target"
    short = "--duration 2steps --block-length 64 --batch-tokens 64"
    found = run(f"{words} {short} --out {tmp_path / 'out'} --json", folder=old).json
    assert found["steps"] == 2


def test_costs_are_kept_in_a_file_of_the_same_form(old: Path, cache: Path) -> None:
    words = f"{TOGETHER} --drafter prompt_lookup --draft-length auto"
    assert emitted(run(words, folder=old).json) == emitted(printed(old, "none", "0"))
    (made,) = (cache / "draftsmith/costs").glob("*.json")
    (there,) = (old / "costs").glob("*.json")
    assert read(made).keys() - {"beside_others"} == read(there).keys()  # added since, if any ran
    assert read(made)["key"].keys() == read(there)["key"].keys() | {"timed"}  # added since
    assert read(made)["costs"].keys() == read(there)["costs"].keys() | {"other_D"}  # added since
