"""Draft models with a subset of the target's tokens: they learn what they read and say in drafting,
and the mass of what they do not know is never drafted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import (
    Command,
    a_command,
    distill_words,
    learnt_from,
    ran,
    work_folder,
)
from tests.small_laws import CASES, TAILS
from tests.tiny_models import TEXT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from dense_objectives import dense_distillation
from draftsmith import cli
from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    Signals,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.distill.acceptance import expected_acceptance
from draftsmith.distill.batches import TrainingExample, assemble, cut_to, pack, taught
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.distributed import Learner, fill
from draftsmith.distill.objectives.distillation import (
    Acceptance,
    CrossEntropy,
    Distillation,
    Objective,
)
from draftsmith.distill.objectives.divergence import DIVERGENCES, Reading, Tail
from draftsmith.distill.students import ModelStudent, open_student
from draftsmith.distill.tokenizer_training import load_tokenizer
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings, Trajectory
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.tree_growth import Vocabularies
from draftsmith.drafters.vocabulary import SUBSET_FILE, OverTargetTokens, VocabularySubset
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

V = 30
ASCENDING = [0, 2, 3, 7, 11, 12, 18, 21, 25, 29]
MIXED = [18, 3, 29, 0, 7, 25, 2, 12, 21, 11]
UNKNOWN = 4


def draft_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(MIXED),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).double()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.4)
    return model


def maps(d2t: Sequence[int]) -> Vocabularies:
    return VocabularySubset(torch.tensor(d2t), UNKNOWN).vocabularies(len(d2t), V)


def texts() -> list[Trajectory]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (5, 16), generator=draw).tolist()
    return [
        Trajectory(
            prompt_id=str(number),
            forcing="sample",
            prompt=tuple(row[: 2 + number]),
            tokens=tuple(row[2 + number :]),
            score=0.0,
        )
        for number, row in enumerate(ids)
    ]


def batch_of(top_k: int) -> TrajectoryBatch:
    """The texts with the laws of a target; 0: whole."""
    blocks = pack([TrainingExample(trajectory=one) for one in texts()], 40)
    batch = taught(assemble(blocks, 40, 0), tiny_target(V), Signals())
    return cut_to(batch, top_k)


# --------------------------------------------------------------------------- as in decoding


def figures(subset: Vocabularies, top_k: int) -> list[float]:
    """Acceptance, and the target's mass outside."""
    out = Learner(Independent.learner(draft_model(), subset))(batch_of(top_k), None, Acceptance())
    return (out["total"] / out["weight"]).tolist()


@pytest.mark.parametrize("top_k", [0, V])
@pytest.mark.parametrize("d2t", [ASCENDING, MIXED])
def test_the_figure_is_the_acceptance_of_decoding(d2t: list[int], top_k: int) -> None:
    """Both models' laws through their caches, each token read as in drafting, over all positions:
    also behind tokens that the draft model does not know, and where the best one is unknown."""
    draft = HFTarget(draft_model(), None)
    betas = expected_acceptance(tiny_target(V), draft, texts(), vocabularies=maps(d2t))
    wanted = sum(beta.sum() for beta in betas) / sum(map(len, betas))
    assert figures(maps(d2t), top_k)[0] == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("top_k", [0, V, 4])
@pytest.mark.parametrize("d2t", [ASCENDING, MIXED])
def test_the_mass_outside_is_that_of_the_tokens_it_lacks(d2t: list[int], top_k: int) -> None:
    """Token by token from the target's own laws; what a cut law does not say counts as inside."""
    batch, found = batch_of(0), []
    assert isinstance(batch.laws, FullLogprobs)
    for b, t in batch.mask_ahead(1).nonzero().tolist():
        law = batch.laws.take(batch.law_ahead(1)[b, t : t + 1])
        p = law.head(law.hidden_NH)[0].softmax(-1).tolist()
        kept = sorted(range(V), key=lambda i: p[i])[-(top_k or V) :]
        found.append(sum(p[i] for i in kept if i not in d2t))
    acceptance, outside = figures(maps(d2t), top_k)
    assert outside == pytest.approx(sum(found) / len(found), abs=1e-6)
    assert 0.1 < outside < 0.9 and acceptance <= 1 - outside


@pytest.mark.parametrize(
    "to_draft",
    [
        lambda ids: ids.clamp(max=len(MIXED) - 1),  # the target's ids as if they were its own
        lambda ids: maps(MIXED).to_draft(ids).where(torch.isin(ids, torch.tensor(MIXED)), 0),
    ],
    ids=["unmapped", "another stand-in"],
)
def test_other_ids_would_give_another_figure(to_draft: Callable[[Tensor], Tensor]) -> None:
    """The test above sees what is fed."""
    right, _ = figures(maps(MIXED), 0)
    assert abs(figures(replace(maps(MIXED), to_draft=to_draft), 0)[0] - right) > 1e-3


class Made(TorchDispatchMode):
    """Keeps all that is made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tensors += [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        return out


def test_logits_over_all_tokens_are_made_once() -> None:
    logits, to_target = torch.randn(7, len(MIXED)), maps(MIXED).to_target
    with Made() as made:
        wide = to_target(logits, -math.inf)
    whole = [one for one in made.tensors if one.shape == wide.shape]
    assert len({one.untyped_storage().data_ptr() for one in whole}) == 1
    assert torch.equal(wide[:, MIXED], logits) and int(wide.isfinite().sum()) == logits.numel()


# --------------------------------------------------------------------------- the restricted loss


def readable_loss(
    objective: Distillation, model: Any, d2t: list[int], batch: TrajectoryBatch
) -> tuple[Tensor, Tensor]:
    """Total and weight, token by token: what the model reads, what it says, and what is left of the
    target's law."""
    columns = sorted(d2t)  # ids of the target's, upwards
    fed = [[d2t.index(i) if i in d2t else UNKNOWN for i in row] for row in batch.tokens_BT.tolist()]
    order = torch.tensor([d2t.index(i) for i in columns])
    logits_BTD = model(torch.tensor(fed), position_ids=batch.positions_BT).logits[..., order]
    assert isinstance(batch.laws, TopLogprobs) and batch.law_row_BT is not None
    own_K = torch.zeros(len(batch.laws), len(columns), dtype=torch.long)
    log_p_K = torch.full(own_K.shape, -math.inf, dtype=torch.float64)
    known = []
    for row, (ids, log_p) in enumerate(
        zip(batch.laws.ids_NK.tolist(), batch.laws.log_p_NK.tolist(), strict=True)
    ):
        law = {i: math.exp(p) for i, p in zip(ids, log_p, strict=True)}
        inside = {i: p for i, p in law.items() if i in columns}
        left = 1 - sum(p for i, p in law.items() if i not in columns)
        if len(inside) == len(columns):
            left = sum(inside.values())
        known.append(max(law, key=lambda i: law[i]) in columns)
        for cell, (i, p) in enumerate(sorted(inside.items())):
            own_K[row, cell], log_p_K[row, cell] = columns.index(i), math.log(p / left)
    counts_BT = batch.loss_mask_BT.clone()
    place = {i: column for column, i in enumerate(columns)}
    for b, t in batch.loss_mask_BT.nonzero().tolist():
        row, token = int(batch.law_row_BT[b, t]), int(batch.tokens_BT[b, t])
        taught = row >= 0 and not objective.record.hard
        counts_BT[b, t] = known[row] if taught else token in place
    tokens = [[place.get(i, 0) for i in row] for row in batch.tokens_BT.tolist()]
    restricted = replace(
        batch,
        tokens_BT=torch.tensor(tokens),
        loss_mask_BT=counts_BT,
        laws=TopLogprobs(ids_NK=own_K, log_p_NK=log_p_K),
    )
    prediction = DraftPrediction(
        hidden_BTH=logits_BTD, mask_BT=torch.ones_like(batch.loss_mask_BT), ahead=1
    )
    terms = dense_distillation(objective, prediction, restricted, lambda logits: logits)
    assert 0 < counts_BT.sum() < batch.loss_mask_BT.sum()
    return terms.total, terms.weight


@pytest.mark.parametrize("d2t", [ASCENDING, MIXED])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("name", "reading"), [*CASES, ("sft", "exact")])
@pytest.mark.every(3)
def test_the_restricted_loss_has_the_gradient_of_the_formula(
    name: str, reading: Reading, tail: Tail, d2t: list[int]
) -> None:
    record, options = DIVERGENCES[name], {"tail": tail, "reading": reading}
    objective = Distillation(
        objective=name, **{key: one for key, one in options.items() if key in record.options}
    )
    batch = replace(batch_of(7), documents_BT=None)  # one text behind the other
    batch.law_row_BT[:, ::5] = -1  # these learn their token
    model = draft_model()
    drafter = Independent.learner(model, maps(d2t))
    found = []
    for compute in (
        lambda: readable_loss(objective, model, d2t, batch),
        lambda: tuple(Learner(drafter)(batch, None, objective)[key] for key in ("total", "weight")),
    ):
        torch.manual_seed(0)  # for the readings that draw
        model.zero_grad()
        total, weight = compute()
        total.backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        found.append({"total": total.detach(), "weight": weight} | gradients)
    wanted, got = found
    assert sum(float(one.abs().sum()) for one in wanted.values()) > 0
    for key, one in wanted.items():
        scale = float(one.abs().max())
        torch.testing.assert_close(
            got[key], one, rtol=1e-6, atol=1e-6 * scale, check_dtype=False, msg=key
        )


def test_whole_laws_are_renormalised_over_the_known_tokens() -> None:
    batch = batch_of(0)
    assert isinstance(batch.laws, FullLogprobs)
    model = draft_model()
    drafter = Independent.learner(model, maps(MIXED))
    found = Learner(drafter)(batch, None, Distillation(objective="kl"))
    prediction, _ = drafter(batch, None)
    nats, counted = 0.0, 0
    for b, t in batch.mask_ahead(1).nonzero().tolist():
        law = batch.laws.take(batch.law_ahead(1)[b, t : t + 1])
        logits_V = law.head(law.hidden_NH)[0]
        if int(logits_V.argmax()) in MIXED:
            log_p = logits_V[MIXED].log_softmax(-1)
            log_q = model.lm_head(prediction.hidden_BTH[b, t].detach()).detach()
            nats += float((log_p.exp() * (log_p - log_q.log_softmax(-1))).sum())
            counted += 1
    assert counted == found["weight"] < batch.mask_ahead(1).sum()
    assert float(found["total"].detach()) == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize(
    "objective",
    [CrossEntropy(), *(Distillation(objective=name) for name in ("kl", "sft", "tvdpp"))],
)
def test_a_part_in_which_nothing_counts_gives_every_weight_a_gradient(objective: Objective) -> None:
    """An own head, too: processes with replicated weights wait for the gradient of each."""
    batch, model = batch_of(7), draft_model()
    batch = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    out = Learner(Independent.learner(model, maps(MIXED)))(batch, None, objective)
    assert out["weight"] == 0 == out["total"]
    out["total"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_draft_model_continues_prompts_in_the_targets_tokens() -> None:
    """It draws no other tokens than its own, and its end is the target's."""
    draft = HFTarget(draft_model(), None, end_ids=frozenset({MIXED.index(21)}))
    over = OverTargetTokens(draft, maps(MIXED), None)
    assert (over.vocab_size, over.end_ids) == (V, {21})
    requests = [CollectRequest(prompt_id=str(i), prompt=(1, i, 28)) for i in range(20)]
    settings = CollectSettings(forcing="sample", max_new_tokens=12, top_k=V)
    answers = TransformersBackend(over).collect(requests, settings)
    drawn = {token for one in answers for token in one.tokens}
    assert len(drawn) > 5 and drawn <= set(MIXED)
    assert any(one.tokens[-1] == 21 for one in answers)
    assert all(21 not in one.tokens[:-1] for one in answers)
    one, read = answers[1], [MIXED.index(i) if i in MIXED else UNKNOWN for i in (1, 1, 28)]
    with draft.native() as bare, torch.no_grad():
        law_D = bare(torch.tensor([read])).logits[0, -1].log_softmax(-1)
    assert one.prompt == (1, 1, 28) and one.top is not None
    known = dict(zip(one.top.ids_NK[0].tolist(), one.top.log_p_NK[0].tolist(), strict=True))
    assert [known[i] for i in MIXED] == pytest.approx(law_D.tolist(), abs=1e-5)


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def subset(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A draft model of 200 of the target's 300 tokens, made once."""
    made = folder / "subset"
    if not made.exists():
        (folder / "text.txt").write_text(TEXT * 30)
        words = "--size tiny --layers 1 --heads 2 --hidden 32 --intermediate 48 --vocab-subset 200 "
        words += "--duration 10steps --block-length 32 --batch-tokens 64 --context 128 "
        words += "--dtype float32 --save-dtype float32"
        where = ["--tokenizer", str(folder / "target"), "--out", str(made), "--json"]
        ran(capsys, "pretrain", "--text", str(folder / "text.txt"), *words.split(), *where)
    return made


@pytest.fixture
def store(folder: Path, command: Command) -> Path:
    made = folder / "store"
    if not made.exists():
        prompts = ["--prompts", str(folder / "many.txt"), "--max-new-tokens", "12"]
        command("collect", *prompts, "--samples", "2", "--out", str(made))
    return made


def words(folder: Path, drafter: Path, out: Path, *more: str) -> list[str]:
    fixed = distill_words(folder, out, "--hold-out", "0.2", "--batch-tokens", "512", *more)
    fixed[fixed.index("--drafter") + 1] = str(drafter)
    return fixed


def test_a_store_makes_a_better_draft_model_that_goes_on_learning(
    folder: Path, tmp_path: Path, command: Command, subset: Path, store: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    own = ["--store", str(store), "--duration", "30steps", "--eval-every", "10"]
    first = command("distill", *words(folder, subset, one, *own))
    assert first["acceptance"] > first["acceptance_before"] + 0.01
    second = command("distill", *words(folder, one, two, *own))
    assert second["acceptance_before"] == pytest.approx(first["acceptance"], abs=1e-6)
    kept = load_file(subset / SUBSET_FILE)
    for made in (one, two):
        assert all(torch.equal(kept[name], t) for name, t in load_file(made / SUBSET_FILE).items())
        assert "200 tokens of the target's" in (made / "README.md").read_text()
    text = ["--prompts", str(folder / "many.txt"), "--limit", "6", "--max-new-tokens", "20"]
    text += ["--dtype", "float64"]
    plain = command("generate", *text, "--drafter", "none")
    drafted = command("generate", *text, "--drafter", f"independent:{two}")
    for found, wanted in zip(drafted["results"], plain["results"], strict=True):
        assert found["token_ids"] == wanted["token_ids"]


def test_what_it_lacks_is_said_and_bounds_its_acceptance(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subset: Path,
    store: Path,
) -> None:
    found = {}
    for name, drafter in (("some", subset), ("all", folder / "draft")):
        laws = ["--laws", "teacher", "--duration", "2steps"]
        own = words(folder, drafter, tmp_path / name, "--store", str(store), *laws)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["distill", "--target", str(folder / "target"), *own])
        results = json.loads((tmp_path / name / "run.json").read_text())["results"]
        found[name] = (capsys.readouterr().err, results)
    said, results = found["some"]
    tokens = [i for one in learnt_from(store, 0.2) for i in one.tokens]
    kept = VocabularySubset.beside(str(subset))
    assert kept is not None
    share = sum(i not in kept.d2t.tolist() for i in tokens) / len(tokens)
    assert 0 < share < 1 and results["share_outside_vocabulary"] == pytest.approx(share)
    assert f"\n{100 * share:.2f} % of the answers' tokens" in f"\n{said}" and "  outside 0." in said
    for held in (results["held_out"], results["held_out_before"]):
        assert 0 < held["outside"] < 1 and held["acceptance"] <= 1 - held["outside"]
    said, results = found["all"]
    assert "outside" not in said and "outside" not in json.dumps(results)


@pytest.mark.parametrize(
    "mode",
    [
        "--laws teacher",
        "--laws teacher --top-k 200",
        "TEXT",
        "--online",
        "--online --on-policy 0.5",
    ],
)
def test_every_way_to_laws_makes_it_better(
    mode: str, folder: Path, tmp_path: Path, command: Command, subset: Path, store: Path
) -> None:
    online = ["--prompts", str(folder / "many.txt"), "--max-new-tokens", "8"]
    online += ["--prompts-per-step", "16"]
    own = online if "--online" in mode else ["--store", str(store)]
    text = ["--text", str(folder / "text.txt"), "--text-share", "0.25"]
    own += text if mode == "TEXT" else mode.split()
    found = command("distill", *words(folder, subset, tmp_path / "made", *own))
    assert found["acceptance"] > found["acceptance_before"] + 0.005


def test_tvdpp_in_parts_is_tvdpp(
    folder: Path, tmp_path: Path, command: Command, subset: Path, store: Path
) -> None:
    """The rewards of all parts are counted over the known tokens, too."""
    made = []
    for parts in ("1", "4"):
        own = ["--store", str(store), "--objective", "tvdpp", "--duration", "4steps"]
        out = tmp_path / parts
        command("distill", *words(folder, subset, out, *own, "--gradient-accumulation", parts))
        made.append(load_file(out / "model.safetensors"))
    for name, one in made[0].items():
        torch.testing.assert_close(made[1][name], one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("another target", "names tokens of another target: in this target's tokenizer"),
        ("another draft model", "names 199 tokens, but the draft model beside it has 200"),
        ("a larger target", "names token 300, but the target has 300 tokens"),
    ],
)
def test_a_subset_of_another_model_is_refused(
    change: str,
    said: str,
    folder: Path,
    tmp_path: Path,
    command: Command,
    subset: Path,
    store: Path,
) -> None:
    other = tmp_path / "other"
    shutil.copytree(subset, other)
    known = VocabularySubset.beside(str(subset))
    assert known is not None
    tokenizer = load_tokenizer(str(folder / "target"))
    if change == "another target":
        swapped = {token: 299 - i for token, i in tokenizer.get_vocab().items()}
        tokenizer.get_vocab = lambda: swapped
        known.save(other, tokenizer)
    elif change == "another draft model":
        replace(known, d2t=known.d2t[:-1], unknown=0).save(other, tokenizer)
    else:
        d2t = known.d2t.clone()
        d2t[-1] = 300
        replace(known, d2t=d2t).save(other, tokenizer)
    own = words(folder, other, tmp_path / "made", "--store", str(store))
    told = command("distill", *own, code=3)
    assert said in told and str(other / SUBSET_FILE) in told
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("lacks", [True, False])
def test_a_drawing_copy_draws_by_the_weights_that_it_was_filled_with(
    lacks: bool, folder: Path, subset: Path, tmp_path: Path
) -> None:
    """As --on-policy fills it while the student learns."""
    drafter = str(subset if lacks else folder / "draft")
    tokenizer = load_tokenizer(str(folder / "target"))
    options = DistillConfig(target=str(folder / "target"), drafter=drafter, out=tmp_path)
    student = open_student(options, tokenizer)
    assert isinstance(student, ModelStudent)
    drawing, kept = student.drawing_copy(), VocabularySubset.beside(drafter)
    ids = kept.d2t.tolist() if kept else list(range(300))
    prompt = [ids[5], ids[-1], ids[40]]
    request = CollectRequest(prompt_id="0", prompt=tuple(prompt))
    settings = CollectSettings(forcing="sample", max_new_tokens=1, top_k=300)

    def said() -> list[float]:
        """Logprobs of the copy behind the prompt, of the tokens that it knows."""
        (one,) = TransformersBackend(drawing.target).collect([request], settings)
        assert one.top is not None
        law = dict(zip(one.top.ids_NK[0].tolist(), one.top.log_p_NK[0].tolist(), strict=True))
        return [law[i] for i in ids]

    def wanted() -> list[float]:
        read = torch.tensor([[ids.index(i) for i in prompt]])
        with torch.no_grad():
            law: list[float] = student.model(read).logits[0, -1].log_softmax(-1).tolist()
        return law

    first = wanted()
    assert said() == pytest.approx(first, abs=1e-4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in student.learner.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    assert said() == pytest.approx(first, abs=1e-4), "a copy"
    fill(drawing.learner, dict(student.learner.named_parameters()))
    second = wanted()
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) > 0.1
    assert said() == pytest.approx(second, abs=1e-4)


def test_a_run_is_that_of_its_vocabulary(folder: Path, subset: Path, tmp_path: Path) -> None:
    """Weights alone do not tell what they were fed."""
    other = tmp_path / "other"
    shutil.copytree(subset, other)
    known = VocabularySubset.beside(str(subset))
    assert known is not None
    tokenizer = load_tokenizer(str(folder / "target"))
    replace(known, unknown=known.unknown - 1).save(other, tokenizer)
    one, two = (
        open_student(
            DistillConfig(target=str(folder / "target"), drafter=str(path), out=tmp_path), tokenizer
        ).identity
        for path in (subset, other)
    )
    assert one["drafter"] == two["drafter"] and one != two
    assert json.loads(json.dumps(one)) == one
