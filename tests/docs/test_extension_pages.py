"""The packages that the pages about extending show are installed, found and used."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.command_cases import network_words, ran, work_folder

from draftsmith import plugins
from draftsmith.config import InputError
from draftsmith.core import verify_step
from draftsmith.core.types import Proposal
from draftsmith.distill.objectives import divergence
from draftsmith.drafters.config import built_in_kinds
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import BackendError
from draftsmith.plugins import (
    DRAFTERS,
    OBJECTIVES,
    RULES,
    SUITES,
    TARGETS,
    load_plugin,
    plugin_names,
)
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import open_target

PAGES = Path(__file__).resolve().parents[2] / "docs/extend"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package on the path as pip would: its module, and metadata with its entry points."""
    site, modules = tmp_path / "site", []
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(package: str, group: str, points: dict[str, str], source: str = "") -> None:
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        module = next(iter(points.values())).partition(":")[0]
        (site / f"{module}.py").write_text(source)
        modules.append(module)
        importlib.invalidate_caches()
        plugins.entry_points_of.cache_clear()

    yield put
    for module in modules:
        sys.modules.pop(module, None)
    for remembered in (
        plugins.entry_points_of,
        divergence._known_or_installed,
        verify_step._rule_class,
    ):
        remembered.cache_clear()


def install_page(name: str, install: Install) -> None:
    """Install the package that the page shows: its module, and the two lines of pyproject.toml."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    ((group, point, value),) = re.findall(
        r'```toml\n\[project\.entry-points\."(.+?)"\]\n(\w+) = "(.+?)"\n```', text
    )
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    install(f"the-{name}", group, {point: value}, source)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("models"))


def test_the_objective_of_the_page_trains(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_page("objective", install)
    target, out = ("--target", str(models / "target")), models / "chi2"
    words = ["--prompts", str(models / "many.txt"), "--max-new-tokens", "8"]
    ran(capsys, "collect", "--json", *target, *words, "--out", str(models / "store"))
    words = ["--store", str(models / "store"), "--drafter", str(models / "draft")]
    words += [*network_words(20), "--objective", "chi2", "--out", str(out)]
    ran(capsys, "distill", "--json", *target, *words)
    record = json.loads((out / "run.json").read_text())
    before, after = (record["results"][name] for name in ("held_out_before", "held_out"))
    assert after["acceptance"] > before["acceptance"]
    words = [*words[:-2], "--beta", "0.3", "--out", str(models / "none")]
    said = ran(capsys, "distill", "--json", *target, *words, code=2)
    assert "--beta" in said


def test_the_objective_of_the_page_has_a_true_gradient(install: Install) -> None:
    install_page("objective", install)
    record = divergence.divergence_named("chi2")
    log_p = torch.randn(3, 7, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def nats(logits_NV: torch.Tensor) -> torch.Tensor:
        cells = divergence.whole_cells(log_p, logits_NV)
        return record.nats(cells, divergence.Knobs())

    assert torch.autograd.gradcheck(nats, (logits,))
    assert nats(log_p).abs().max() < 1e-12


def test_the_rule_of_the_page_gives_the_texts_of_plain_decoding(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_page("verification-rule", install)
    words = ["generate", "--target", str(models / "target"), "--dtype", "float64", "--temperature"]
    words += ["0.8", "--prompt", "the cat sat on the mat, the cat", "--max-new-tokens", "24"]
    plain = ran(capsys, *words, "--json")["results"][0]
    draft = ["--drafter", "prediction", "--drafter-option", "length=4"]
    file = models / "expected.jsonl"
    file.write_text(json.dumps({"text": words[-3], "reference": plain["text"]}) + "\n")
    at = words.index("--prompt")
    words[at : at + 2] = ["--prompts", str(file)]
    found = {}
    for rule in ("match", "cautious"):
        found[rule] = ran(capsys, *words, "--json", *draft, "--rule", rule)["results"][0]
        assert found[rule]["token_ids"] == plain["token_ids"]
    assert 1 < found["cautious"]["tokens_per_step"] <= 2
    assert found["match"]["tokens_per_step"] > found["cautious"]["tokens_per_step"]


def test_the_drafter_of_the_tutorial_is_found_when_it_is_installed(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PAGES.parent / "add-a-drafter.md").read_text(encoding="utf-8")
    source = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    install("bigram", DRAFTERS, {"bigram": "my_bigram:DRAFTER"}, source)
    words = ["generate", "--target", str(models / "target"), "--dtype", "float64", "--json"]
    words += ["--prompt", "the cat sat on the mat, the cat", "--max-new-tokens", "24"]
    plain = ran(capsys, *words)["results"][0]
    drafted = ran(capsys, *words, "--drafter", "bigram")["results"][0]
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["acceptance_rate"] is not None
    assert "'bigram'" in ran(capsys, *words, "--drafter", "bigrm", code=2)


LOSSY = """
from typing import ClassVar
from draftsmith.core.verify import Match

class Eager(Match):
    name: ClassVar[str] = "eager"
    lossy: ClassVar[bool] = True

    def step(self, tree, node, noise):
        child, drawn = super().step(tree, node, noise)
        for row, children in enumerate(node.children):
            child[row] = children[0] if children else child[row]
        return child, drawn
"""


def test_an_installed_lossy_rule_needs_leave(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("eager-rule", RULES, {"eager": "eager_rule:Eager"}, LOSSY)
    words = ["generate", "--target", str(models / "target"), "--drafter", "prompt_lookup"]
    words += ["--prompt", "the cat sat on the mat, the cat", "--max-new-tokens", "16"]
    assert "allow_lossy" in ran(capsys, *words, "--json", "--rule", "eager", code=2)
    made = ran(capsys, *words, "--json", "--acceptance", "eager")
    assert "eager is lossy" in made["lossy"]
    assert made["results"][0]["tokens_per_step"] > 1


def test_an_installed_lossless_rule_is_not_called_lossy(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    source = LOSSY.replace("lossy: ClassVar[bool] = True", "lossy: ClassVar[bool] = False")
    install("exact-rule", RULES, {"careful": "careful_rule:Eager"}, source)
    words = ["generate", "--target", str(models / "target"), "--drafter", "prompt_lookup"]
    words += ["--prompt", "the cat sat on the mat, the cat", "--max-new-tokens", "8", "--json"]
    assert "lossy" not in ran(capsys, *words, "--acceptance", "careful")


def test_the_suite_of_the_page_is_measured_on(
    models: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_page("prompt-suite", install)
    words = ["bench", "--target", str(models / "target"), "--drafter", "prompt_lookup"]
    words += ["--suite", "openings", "--max-new-tokens", "4", "--no-hf-baseline"]
    ran(capsys, *words, "--json", "--out", str(models / "bench"))
    records = (models / "bench/records.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in records} == {"function", "cat"}
    said = ran(capsys, *words, "--json", "--suite", "opening", "--out", "x", code=2)
    assert "'openings'" in said


def test_the_target_of_the_page_is_decoded(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_page("target", install)
    words = ["generate", "--target", "echo:16", "--temperature", "0.8", "--max-new-tokens", "20"]
    words += ["--prompt", "abcabcab", "--json"]
    plain = ran(capsys, *words)["results"][0]
    drafted = ran(capsys, *words, "--drafter", "lookahead")["results"][0]
    assert drafted["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) == 20
    assert drafted["tokens_per_step"] > 1
    said = ran(capsys, *words, "--revision", "main", code=2)
    assert "revision" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    said = ran(capsys, "live", "translate", "--target", "echo:16", code=2)
    assert "transformers model" in said


@pytest.mark.parametrize("group", [DRAFTERS, OBJECTIVES, RULES, SUITES])
def test_a_name_that_two_packages_offer_is_an_error(group: str, install: Install) -> None:
    for package in ("one", "two"):
        install(package, group, {"same": f"{package}_module:X"}, "X = 1")
    assert plugin_names(group).count("same") == 1
    with pytest.raises(InputError, match=r"both offer .same."):
        load_plugin(group, "same", ())


def test_a_package_that_is_installed_while_the_process_runs_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "late-1.0.dist-info"
    site.mkdir()
    os.utime(site, (1, 1))
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(InputError, match="Unknown drafter 'late'"):
        drafter_class("late")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{DRAFTERS}]\nlate = late_module:DRAFTER\n")
    assert "late" in plugin_names(DRAFTERS)
    with pytest.raises(BackendError, match="late_module"):
        drafter_class("late")


def test_built_in_names_are_taken(install: Install) -> None:
    install("d", DRAFTERS, {"griffin": "d_module:X"}, "X = 1")
    install("o", OBJECTIVES, {"kl": "o_module:X"}, "X = 1")
    install("r", RULES, {"match": "r_module:X"}, "X = 1")
    for group, name, known in (
        (DRAFTERS, "griffin", built_in_kinds()),
        (OBJECTIVES, "kl", divergence.DIVERGENCES),
        (RULES, "match", ("match",)),
    ):
        with pytest.raises(InputError, match=rf"'{name}'.*built in"):
            load_plugin(group, name, known)
    with pytest.raises(InputError, match="package d "):
        drafter_class("griffin")
    with pytest.raises(InputError, match="package o "):
        divergence.divergence_named("kl")
    with pytest.raises(InputError, match="package r "):
        verify_step.make_rule("match", Proposal.OPAQUE)


def test_a_broken_package_is_named(install: Install) -> None:
    install("broken", DRAFTERS, {"mine": "broken_module:DRAFTER"}, "import nothing_of_this_name")
    with pytest.raises(BackendError, match=r"package broken .*nothing_of_this_name"):
        drafter_class("mine")
    install("odd", DRAFTERS, {"odd": "odd_module:X"}, "X = 1")
    with pytest.raises(BackendError, match=r"package odd .*subclass"):
        drafter_class("odd")
    install("odd-rule", RULES, {"odd": "odd_rule:X"}, "X = 1")
    with pytest.raises(BackendError, match=r"package odd-rule "):
        verify_step.make_rule("odd", Proposal.OPAQUE)
    install("odd-objective", OBJECTIVES, {"odd": "odd_objective:X"}, "X = 1")
    with pytest.raises(BackendError, match=r"package odd-objective "):
        divergence.divergence_named("odd")
    install("leaves", DRAFTERS, {"leaves": "leaves_module:X"}, "raise SystemExit(0)")
    with pytest.raises(BackendError, match=r"package leaves "):
        drafter_class("leaves")
    install("empty", TARGETS, {"empty": "empty_module:load"}, "def load(source, **_): pass")
    with pytest.raises(BackendError, match=r"package empty .*returns a target"):
        open_target(ModelConfig(target="empty:1"))


def test_the_index_lists_every_group() -> None:
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    groups = {value for name, value in vars(importlib.import_module("draftsmith.plugins")).items()
              if name.isupper()}  # fmt: skip
    assert set(re.findall(r"\| `(draftsmith\.\w+)` \|", text)) == groups
    assert "preparation" not in text
