"""Texts that are longer than those that a drafter has learnt from: said once, where it drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_cases import (
    Command,
    a_command,
    a_store,
    family_folder,
    learnt_from,
    network_words,
)

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

LENGTH = 12
KINDS = ("eagle", "eagle3", "fspad", "griffin", "hass", "p_eagle", "parallel", "unrolled")
ROOT = Path(__file__).parents[2]
SHIPPED = sorted(ROOT.glob("models/*/*/drafter.json"))


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(64, layers=8)


def loaded(kind: str, target: HFTarget, folder: Path, length: int | None = LENGTH) -> Drafter:
    """A drafter from a folder that says (None: does not say) how long its texts were."""
    made = make_drafter(kind)
    made.bind(target)
    made.trained_length = length
    made.save(folder, kind=kind)
    drafter = make_drafter(str(folder))
    drafter.bind(target)
    return drafter


def generate(
    target: HFTarget, drafter: Drafter, *rows: tuple[int, int], shape: TreeShape | None = None
) -> list[int]:
    """Texts of these many tokens in a prompt and behind it; how deep drafts were in each step."""
    prompts = [list(range(1, 1 + length)) for length, _ in rows]
    options = DecodeOptions(
        max_new_tokens=max(new for _, new in rows), shape=shape or TreeShape.chain(2), seed=1
    )
    return [max(step.offered_depth) for step in decode(target, drafter, prompts, options)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [one for one in caplog.records if "was trained on texts" in one.message]
    assert all(one.levelname == "WARNING" for one in records)
    return [one.message for one in records]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_text_is_said_once_and_no_other(
    kind: str, target: HFTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = loaded(kind, target, tmp_path / "layer")
    # the last draft is made behind 12 known tokens
    assert any(generate(target, drafter, (LENGTH - 4, 6)))
    assert not warnings(caplog)
    assert any(generate(target, drafter, (LENGTH - 4, 7)))
    (said,) = warnings(caplog)
    assert str(tmp_path / "layer") in said and f"at most {LENGTH} tokens" in said
    assert "distill --block-length" in said
    generate(target, drafter, (LENGTH + 8, 6), (LENGTH + 8, 6))
    generate(target, drafter, (3, 20), shape=TreeShape(widths=(2, 2), keep=3))
    assert warnings(caplog) == [said]


def test_what_could_have_become_too_long_and_has_not_is_no_reason(
    target: HFTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = loaded("hass", target, tmp_path)
    steps = decode(target, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=100))
    for _ in range(3):
        next(steps)
    steps.close()
    assert not warnings(caplog)


def test_a_prompt_that_is_longer_is_said_where_the_first_draft_is_made(
    target: HFTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, options = loaded("eagle", target, tmp_path), DecodeOptions(max_new_tokens=8)
    steps = decode(target, drafter, [list(range(LENGTH + 5))], options)
    next(steps)
    assert not warnings(caplog)  # states come out of the prompt's own step
    next(steps)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("kind", "length"), [("hass", None), ("parallel", None), ("medusa", 12)])
def test_older_folders_and_heads_without_positions_say_nothing(
    kind: str,
    length: int | None,
    target: HFTarget,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = loaded(kind, target, tmp_path, length)
    assert drafter.trained_length == length
    assert ("trained_length" in json.loads((tmp_path / "drafter.json").read_text())) == bool(length)
    assert any(generate(target, drafter, (LENGTH + 8, 6)))
    assert not warnings(caplog)


@pytest.mark.parametrize("bad", ["512", 0, -3, 1.5, True, [512]])
def test_a_length_that_is_none_is_refused(bad: object, target: HFTarget, tmp_path: Path) -> None:
    loaded("eagle", target, tmp_path)
    file = tmp_path / "drafter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trained_length": bad}))
    with pytest.raises(InputError, match="trained_length"):
        make_drafter(str(tmp_path))


@pytest.mark.parametrize("manifest", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_layers_have_at_most_the_length_of_their_blocks(manifest: Path) -> None:
    training = json.loads((manifest.parent / "run.json").read_text())["options"]["training"]
    assert 64 < json.loads(manifest.read_text())["trained_length"] <= training["block_length"]


def test_there_are_shipped_layers() -> None:
    assert len(SHIPPED) >= 2


# --------------------------------------------------------------------------- trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("work"), "llama")


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


def trained(
    command: Command, source: list[str], drafter: str | Path, out: Path, block: int
) -> object:
    """The length that drafter.json has behind a training with blocks of this length."""
    words = network_words(2)
    words[words.index("--block-length") + 1] = str(block)
    words[words.index("--batch-tokens") + 1] = str(2 * block)
    command("distill", "--drafter", str(drafter), *source, "--out", str(out), *words)
    return json.loads((out / "drafter.json").read_text()).get("trained_length")


@pytest.mark.parametrize("kind", ["eagle", "parallel"])
def test_training_keeps_the_longest_text_as_far_as_a_block_goes(
    kind: str, folder: Path, tmp_path: Path, command: Command
) -> None:
    store = a_store(folder, command, f"{kind}-store", "--features", kind)
    first, names, own = tmp_path / "first", iter("abcd"), ["--store", str(store)]
    longest = max(len(one.prompt) + len(one.tokens) for one in learnt_from(store, 0.2))
    assert trained(command, own, kind, first, longest - 2) == longest - 2
    assert trained(command, own, first, tmp_path / next(names), longest - 3) == longest - 2
    assert trained(command, own, first, tmp_path / next(names), 40) == longest < 40
    plain = [*own, "--laws", "teacher", "--text", str(ROOT / "README.md"), "--text-share", "0.5"]
    assert trained(command, plain, kind, tmp_path / next(names), 40) == 40
    manifest = json.loads((first / "drafter.json").read_text())
    del manifest["trained_length"]
    (first / "drafter.json").write_text(json.dumps(manifest))
    # of an earlier version: nothing tells what it had learnt from
    assert trained(command, own, first, tmp_path / next(names), 40) is None


def test_where_texts_are_still_to_be_drawn_it_is_the_block(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    drawn = ["--online", "--prompts", str(folder / "prompts.txt"), "--max-new-tokens", "8"]
    assert trained(command, drawn, "eagle", tmp_path / "made", 40) == 40
