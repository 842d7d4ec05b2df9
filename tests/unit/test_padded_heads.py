"""Teacher and student share a tokenizer, but rows of padding make their heads differ in size: whole
laws are learnt and measured over the entries that both have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command_cases import Command, a_command, distill_words, work_folder
from tests.small_laws import CASES, top
from tests.unit.test_distillation import B, H, Setup, T, V, accept, assert_same, chosen
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.core.types import FullLogprobs, TopLogprobs
from draftsmith.distill.datasets import Online, Shares
from draftsmith.distill.evaluation import FIGURES, Chains
from draftsmith.distill.objectives.distillation import Objective
from draftsmith.distill.objectives.divergence import Reading
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import Backend
from draftsmith.errors import InputError

TARGET = 320
"""Entries of the target's head below; the tokenizer has 300 tokens."""


class Heads:
    """A teacher and a student of so many entries, and both cut to what they have in common. The
    student knows the teacher half."""

    def __init__(self, teacher: int, student: int) -> None:
        self.setup, self.cut = Setup(), Setup()
        rows = torch.arange(B * T).view(B, T).roll(1, 1)
        for setup in (self.setup, self.cut):
            taught = setup.batch.law_ahead(0) >= 0
            setup.batch = replace(setup.batch, law_row_BT=rows.where(taught, -1))
            setup.hidden.data = setup.teacher_hidden.view(B, T, H)
        generator = torch.Generator().manual_seed(7)
        more = torch.randn(4, H, generator=generator, dtype=torch.float64)
        said = torch.cat([self.setup.teacher_weight.detach(), more])
        wide = said + 0.4 * torch.randn(len(said), H, generator=generator, dtype=torch.float64)
        wide[V:] -= more
        self.teacher = said[:teacher]
        self.setup.weight = wide[:student].clone().requires_grad_()
        common = min(teacher, student)
        self.cut.weight = wide[:common].clone().requires_grad_()
        self.common = said[:common]

    def laws(self, kind: str, *, cut: bool = False) -> FullLogprobs | TopLogprobs:
        weight = self.common if cut else self.teacher
        if kind == "in memory":
            return FullLogprobs(hidden_NH=self.setup.teacher_hidden, head=lambda h: h @ weight.T)
        log_p_NV = torch.log_softmax(self.setup.teacher_hidden @ weight.T, -1)
        return replace(top(log_p_NV, len(weight)), vocab_size=len(weight))


def padded(gradient_VH: Tensor, size: int) -> Tensor:
    return torch.cat([gradient_VH, gradient_VH.new_zeros(size - len(gradient_VH), H)])


SIZES = [(V + 3, V), (V, V + 4), (V + 1, V + 4)]
KINDS = ["in memory", "stored"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("teacher", "student"), SIZES)
@pytest.mark.parametrize(("name", "reading"), CASES)
def test_the_loss_is_that_of_heads_cut_to_what_both_have(
    name: str, reading: Reading, teacher: int, student: int, kind: str, temperature: float
) -> None:
    heads = Heads(teacher, student)
    heads.setup.batch = heads.cut.batch = replace(  # places that learn their token keep all rows
        heads.cut.batch, loss_mask_BT=heads.cut.batch.law_ahead(0) >= 0
    )
    objective = chosen(name, reading, teacher_temperature=temperature, cells=5 * V)
    got = heads.setup.run(objective.loss, heads.laws(kind))
    wanted = heads.cut.run(objective.loss, heads.laws(kind, cut=True))
    assert got[0].abs() > 0 and wanted[3].any()
    assert_same(got, [*wanted[:3], padded(wanted[3], student)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("teacher", "student"), SIZES)
def test_so_is_acceptance(teacher: int, student: int, kind: str) -> None:
    heads = Heads(teacher, student)
    got = accept(heads.setup, heads.laws(kind))
    wanted = accept(heads.cut, heads.laws(kind, cut=True))
    assert wanted.total > 0
    torch.testing.assert_close(got.total, wanted.total, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.weight, wanted.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("teacher", "student"), SIZES)
def test_and_so_are_the_figures_of_chains(teacher: int, student: int, kind: str) -> None:
    heads = Heads(teacher, student)
    got, wanted = (
        Chains().loss(
            setup.prediction(), replace(setup.batch, laws=heads.laws(kind, cut=cut)), setup.head
        )
        for setup, cut in ((heads.setup, False), (heads.cut, True))
    )
    taught = [FIGURES.index(name) for name in ("accuracy", "acceptance", "survival_t1")]
    torch.testing.assert_close(got.total[taught], wanted.total[taught], rtol=1e-12, atol=0)
    assert bool((wanted.total[taught] > 0).all())


@pytest.mark.parametrize("objective", [chosen("kl", "exact"), Chains()])
def test_laws_of_the_best_tokens_beyond_the_students_head_are_refused(objective: Objective) -> None:
    """Also beside whole ones, in a batch of two stores."""
    heads = Heads(V + 3, V)
    laws = heads.laws("stored")
    assert isinstance(laws, TopLogprobs)
    nothing = laws.log_p_NK.clone()
    nothing[:, : V - 1] = -torch.inf
    for mixed in (
        replace(laws, log_p_NK=nothing),
        TopLogprobs(ids_NK=laws.ids_NK[:, -3:], log_p_NK=laws.log_p_NK[:, -3:], vocab_size=V + 3),
    ):
        setup = heads.setup
        with pytest.raises(InputError, match=f"hold token {V + 2}, the student's .* has {V}"):
            objective.loss(setup.prediction(), replace(setup.batch, laws=mixed), setup.head)


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft models with fewer and with more rows of padding than the target, and one too small."""
    folder = work_folder(tmp_path_factory.mktemp("work"))
    torch.manual_seed(0)
    for name, size in (("target", TARGET), ("smaller", 304), ("larger", 336), ("lacking", 290)):
        source = folder / ("target" if name == "target" else "draft")
        model = AutoModelForCausalLM.from_pretrained(source)
        model.resize_token_embeddings(size, mean_resizing=False)
        tokens = min(size, 300)
        model.get_output_embeddings().weight.data[tokens:] = 0.0
        model.get_output_embeddings().weight.data[:tokens] *= 4.0  # padding is never drawn
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(folder / "draft").save_pretrained(folder / name)
    return folder


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def store(folder: Path, command: Command) -> Path:
    """With whole laws."""
    out = folder / "store"
    if not out.exists():
        words = ["--prompts", str(folder / "many.txt"), "--limit", "24", "--max-new-tokens", "6"]
        command("collect", *words, "--top-k", "0", "--out", str(out))
    return out


def words_for(folder: Path, drafter: str, out: Path, *words: str) -> list[str]:
    own = distill_words(folder, out, *words, "--duration", "3steps", "--hold-out", "0.3")
    own[own.index("--drafter") + 1] = str(folder / drafter)
    return own


@pytest.mark.parametrize("drafter", ["smaller", "larger"])
@pytest.mark.parametrize("way", ["store", "teacher", "online", "best of the teacher's"])
@pytest.mark.every(4)
def test_a_run_with_a_padded_head_ends_well(
    folder: Path, tmp_path: Path, command: Command, store: Path, drafter: str, way: str
) -> None:
    words = {
        "store": ["--store", str(store), "--teacher-temperature", "0.8"],
        "teacher": ["--store", str(store), "--laws", "teacher"],
        # so many that the target's padding is among them
        "best of the teacher's": ["--store", str(store), "--laws", "teacher", "--top-k", "302"],
        "online": ["--online", "--prompts", str(folder / "many.txt"), "--max-new-tokens", "4"],
    }[way]
    found = command("distill", *words_for(folder, drafter, tmp_path / "out", *words))
    assert 0 < found["acceptance_before"] <= 1 and 0 < found["acceptance"] <= 1
    if way != "online":  # which three steps of new texts every time need not improve
        assert found["acceptance"] >= found["acceptance_before"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == {"smaller": 304, "larger": 336}[drafter]


def loud(folder: Path, name: str) -> Path:
    """The same model, but that it likes its padding best."""
    out = folder / f"{name}-loud"
    if not out.exists():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        head = model.get_output_embeddings().weight.data
        head[300:] = 40 * torch.randn(len(head) - 300, model.config.hidden_size)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(folder / name).save_pretrained(out)
    return out


class Drawn:
    """Texts that are drawn online, by whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.teachers: list[int] = []
        self.students: list[int] = []
        draw = Online._drawn

        def noted(source: Online, backend: Backend, *rest: Any) -> Shares:
            shares = draw(source, backend, *rest)
            tokens = [token for one, _ in shares for token in one.trajectory.tokens]
            (self.students if backend is source.student else self.teachers).extend(tokens)
            return shares

        monkeypatch.setattr(Online, "_drawn", noted)


def online_words(folder: Path, target: Path, drafter: str, out: Path) -> list[str]:
    """Six prompts per step, half of them on-policy, three steps."""
    words = ["--online", "--prompts", str(folder / "many.txt"), "--max-new-tokens", "4"]
    words += ["--on-policy", "0.5", "--prompts-per-step", "6", "--target", str(target)]
    return words_for(folder, drafter, out, *words)


def test_the_student_draws_no_token_that_the_target_does_not_have(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, student = Drawn(monkeypatch), loud(folder, "larger")
    target = folder / "target"
    command("distill", *online_words(folder, target, student.name, tmp_path / "out"))
    assert len(drawn.students) > 9 and max(drawn.students) < TARGET
    assert max(drawn.students) >= 300  # padding that both have, and it likes best


def test_the_target_draws_no_token_that_the_student_does_not_have(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, target = Drawn(monkeypatch), loud(folder, "target")
    found = command("distill", *online_words(folder, target, "smaller", tmp_path / "out"))
    assert len(drawn.teachers) > 9 and 300 <= max(drawn.teachers) < 304
    assert found["acceptance"] is not None


def test_a_stored_text_that_the_student_cannot_read_is_refused(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    target, store = str(loud(folder, "target")), tmp_path / "store"
    words = ["--prompts", str(folder / "many.txt"), "--limit", "24", "--max-new-tokens", "6"]
    command("collect", *words, "--target", target, "--out", str(store))
    highest = max(max(one.tokens) for one in TrajectoryStore.open(store).trajectories())
    assert 304 <= highest < 320
    own = words_for(folder, "smaller", tmp_path / "out", "--store", str(store), "--target", target)
    said = command("distill", *own, code=2)
    assert f"has a head of 304 entries, and a text holds token {highest}" in said
    assert f"resize_token_embeddings({highest + 1})" in said
    own[own.index("--drafter") + 1] = str(folder / "larger")
    command("distill", *own)


def test_a_student_that_lacks_tokens_is_refused_first(
    folder: Path, tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.distill.students.load_model", None)  # it is not even loaded
    words = words_for(folder, "lacking", tmp_path / "out", "--store", str(store))
    said = command("distill", *words, code=2)
    assert "a head of 290 entries, and the tokenizer 300 tokens" in said
    assert "resize_token_embeddings(300)" in said
