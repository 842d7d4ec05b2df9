"""Drafters from folders in the released layouts compute what the released implementations computed
(their numbers, recorded in float64; none of their code)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    FullLogprobs,
    Proposal,
    RequestBatch,
    TargetOutput,
    TrajectoryBatch,
    TreeShape,
    Verdict,
)
from draftsmith.distill.objectives.distillation import CrossEntropy, Distillation, Imitation
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.hf import HFTarget, load_model

FOLDER = (
    Path(os.environ.get("DRAFTSMITH_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    / "parity"
)
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the recorded numbers are not here (set DRAFTSMITH_DATA)"
)

FEATURE_LEVEL = ("eagle", "eagle3", "fspad", "griffin", "hass")
GREEDY = Sampler()


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """Without a tokenizer: everything here is token ids."""
    return HFTarget(load_model(str(FOLDER / "target"), dtype="float64", device="cpu"))


def released(kind: str, target: HFTarget, *options: str) -> Drafter:
    """The recorded drafter, loaded as a user would and bound."""
    drafter = make_drafter(f"{kind}:{FOLDER / kind / 'drafter'}", options)
    drafter.bind(target)
    return drafter.eval().requires_grad_(False)


@lru_cache
def arrays(path: str) -> dict[str, Tensor]:
    with np.load(FOLDER / path) as loaded:
        return {name: torch.from_numpy(loaded[name]) for name in loaded.files}


@lru_cache
def expected(kind: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / kind / "expected.json").read_text())
    return read


def same(found: Tensor, wanted: Tensor, *, rtol: float = 0.0, atol: float = 1e-12) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted.reshape(found.shape), rtol=rtol, atol=atol)


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("kind", [*FEATURE_LEVEL, "medusa"])
def test_the_target_has_the_recorded_features_and_logits(
    kind: str, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_float64)
    recorded, drafter = arrays(f"{kind}/expected.npz"), released(kind, target)
    with (
        torch.no_grad(),
        target.native("eager") as model,
        target.capture(drafter.signals) as captured,
    ):
        logits = model(recorded["text"]).logits
    assert captured.signals_BTS is not None
    same(captured.signals_BTS, recorded["features"])
    if kind != "medusa":  # none were recorded with its heads
        same(logits, recorded["target_logits"])


def norm_in_float64(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    """transformers' own rounds to float32, the recorded one did not."""
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def text_of(recorded: dict[str, Tensor]) -> TrajectoryBatch:
    return TrajectoryBatch(
        tokens_BT=recorded["text"],
        loss_mask_BT=torch.ones_like(recorded["text"], dtype=torch.bool),
        features_BTS=recorded["features"],
    )


def check_one_step(drafter: Drafter, recorded: dict[str, Tensor]) -> None:
    """What the drafter says behind every place of the text."""
    prediction, carry = drafter(text_of(recorded), None)
    head = drafter.head() if prediction.narrow is None else prediction.narrow.head
    known = slice(recorded["step1_logits"].shape[1])
    same(prediction.hidden_BTH[:, known], recorded["step1_predict"])
    same(carry.feature_BTH[:, known], recorded["step1_regress"])
    same(head(prediction.hidden_BTH[:, known]), recorded["step1_logits"])


@pytest.mark.parametrize("kind", FEATURE_LEVEL)
def test_one_step_behind_every_place_of_a_text(kind: str, target: HFTarget) -> None:
    check_one_step(released(kind, target), arrays(f"{kind}/expected.npz"))


@pytest.mark.parametrize("kind", FEATURE_LEVEL)
def test_a_folder_that_is_written_here_says_the_same_to_released_code(
    kind: str, target: HFTarget, tmp_path: Path
) -> None:
    """Released code knows neither `rope_parameters` nor `attention_bias` nor drafter.json."""
    released(kind, target).save(tmp_path, kind=kind)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_scaling"] is None and config["qkv_bias"] is False
    del config["rope_parameters"], config["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "drafter.json").unlink()
    drafter = make_drafter(f"{kind}:{tmp_path}")
    drafter.bind(target)
    check_one_step(drafter.eval().requires_grad_(False), arrays(f"{kind}/expected.npz"))


def test_every_head_of_medusa(target: HFTarget) -> None:
    recorded, drafter = arrays("medusa/expected.npz"), released("medusa", target)
    batch = text_of(recorded)
    carry = None
    assert drafter.num_steps == len(recorded["logits"]) == 4
    for logits in recorded["logits"]:
        prediction, carry = drafter(batch, carry)
        assert prediction.head is not None
        same(prediction.head(prediction.hidden_BTH), logits)


# ------------------------------------------------------------------------------------ drafts


def begun(drafter: Drafter, recorded: dict[str, Tensor], length: int) -> DraftState:
    """A state whose target was fed so many tokens of the text and said the next one."""
    tokens = recorded["text"][0].tolist()
    request = RequestBatch(tokens=[tokens[:length]], request_ids=(0,), max_new_tokens=64)
    return moved(drafter, drafter.start(request), recorded, range(length), length)


def moved(
    drafter: Drafter, state: DraftState, recorded: dict[str, Tensor], pending: range, length: int
) -> DraftState:
    """The target was fed `pending` and a chain of drafts up to `length`, accepted them all and said
    the token at `length`."""
    tokens = recorded["text"]
    drafted = length - pending.stop
    tree = DraftTree(
        tokens_BN=tokens[:, pending.stop : length],
        parents_BN=torch.arange(-1, drafted - 1)[None],
        proposal=Proposal.OPAQUE,
    )
    verdict = Verdict(
        path_BD=torch.arange(drafted)[None],
        num_accepted_B=torch.tensor([drafted]),
        next_token_B=tokens[:, length],
    )
    out = TargetOutput(
        logits_BNV=torch.empty(0), signals_BTS=recorded["features"][:, pending.start : length]
    )
    accepted = Accepted(
        tree=tree,
        verdict=verdict,
        emitted=[tokens[0, pending.stop : length + 1].tolist()],
        pending=[tokens[0, pending.start : pending.stop].tolist()],
        out=out,
    )
    return drafter.advance(state, accepted)


def drafted(drafter: Drafter, state: DraftState, shape: TreeShape, length: int) -> DraftTree:
    with torch.inference_mode():
        noise = Noise(0, [0], [length + 1])
        return drafter.propose(state, shape, np.array([shape.depth]), GREEDY, noise)


@pytest.mark.parametrize("kind", FEATURE_LEVEL)
def test_a_greedy_chain_and_the_states_it_goes_through(kind: str, target: HFTarget) -> None:
    recorded, drafter = arrays(f"{kind}/expected.npz"), released(kind, target)
    network: Any = drafter.network
    states: list[tuple[Tensor, Tensor]] = []
    network.register_forward_hook(
        lambda module, inputs, output: states.append(tuple(one[:, -1] for one in output))
    )
    length = expected(kind)["P"]
    tree = drafted(drafter, begun(drafter, recorded, length), TreeShape.chain(6), length)
    assert tree.tokens_BN[0].tolist() == expected(kind)["chain_tokens"]
    predict, regress = (torch.cat(each) for each in zip(*states, strict=True))
    same(regress, recorded["chain_regress"])
    # EAGLE-3's were recorded over its draft vocabulary
    own = lambda hidden: network.own_logits(hidden, drafter.target)  # noqa: E731
    same(own(predict), recorded["chain_logits"])


@pytest.mark.parametrize("kind", FEATURE_LEVEL)
def test_trees_that_follow_the_drafter(kind: str, target: HFTarget) -> None:
    """Four successive calls of each size: the pairs of the text that are new are read, too."""
    recorded, drafter = arrays(f"{kind}/expected.npz"), released(kind, target)
    for size, calls in expected(kind)["trees"].items():
        state, fed = None, 0
        for length, tokens, parents, depths in calls:
            if state is None:
                state = begun(drafter, recorded, length)
            else:
                state = moved(drafter, state, recorded, range(fed, fed + 1), length)
            fed = length
            tree = drafted(drafter, state, dynamic(*json.loads(f"[{size[1:-1]}]")), length)
            assert described(tree, recorded, length) == (tokens, parents, depths), (size, length)


def dynamic(total: int, depth: int, top: int) -> TreeShape:
    """The released code counts the root, and not the first level."""
    return TreeShape(widths=(top,) * (depth + 1), keep=total - 1)


def described(
    tree: DraftTree, recorded: dict[str, Tensor], length: int
) -> tuple[list[int], list[int], list[int]]:
    """(tokens behind the root's, parents, depths below the root's) as they were recorded."""
    parents = tree.parents_BN[0].tolist()
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    root = int(recorded["text"][0, length])
    return [root, *tree.tokens_BN[0].tolist()], parents, [0, *depths]


@pytest.mark.parametrize("number", range(2))
def test_a_tree_of_fixed_paths(number: int, target: HFTarget) -> None:
    """Behind the whole text and the token that the target says there."""
    recorded, drafter = arrays("medusa/expected.npz"), released("medusa", target)
    name, *wanted = expected("medusa")["trees"][number]
    length, root = recorded["text"].shape[1], torch.tensor([[wanted[0][0]]])
    recorded = recorded | {"text": torch.cat([recorded["text"], root], dim=1)}
    tree = drafted(drafter, begun(drafter, recorded, length), choices(name), length)
    assert described(tree, recorded, length) == tuple(wanted)


def choices(name: str) -> TreeShape:
    paths = [tuple(path) for path in expected("medusa")["choices"][name]]
    return TreeShape(paths=tuple(sorted(paths, key=lambda path: (len(path), path))))


# ---------------------------------------------------------------------------- whole texts


@pytest.mark.parametrize("kind", [*FEATURE_LEVEL, "medusa"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.every(5)
def test_greedy_texts_and_accepted_lengths(kind: str, first: int, target: HFTarget) -> None:
    """Three prompts with one size of tree, here in one batch."""
    sizes, prompts, texts, accepted = zip(*expected(kind)["e2e"][first : first + 3], strict=True)
    shape = choices(sizes[0]) if isinstance(sizes[0], str) else dynamic(*sizes[0])
    assert sizes[0] == sizes[1] == sizes[2]
    room = 16  # a step near the end of its room drafts less
    longest = max(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True))
    options = DecodeOptions(max_new_tokens=longest + room, shape=shape)
    needed = 1 + max(len(lengths) for lengths in accepted)
    steps = list(islice(decode(target, released(kind, target), prompts, options), needed))
    for row, (prompt, text, lengths) in enumerate(zip(prompts, texts, accepted, strict=True)):
        emitted = [token for step in steps for token in step.emitted[row]]
        assert [*prompt, *emitted][: len(text)] == text
        assert [step.accepted[row] for step in steps[: 1 + len(lengths)]] == [0, *lengths]


# --------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recorded:
    """A training step that was recorded, and how it is asked for here."""

    file: str
    kind: str
    forwards: int = 1
    top_weight: float = 0.0
    options: tuple[str, ...] = ()


def steps_recorded() -> list[Recorded]:
    """The last word of a file is True where attention leaks as it was released."""
    rows = [
        Recorded("eagle-1-single-None", "eagle"),
        Recorded("fspad-1-single-None", "fspad"),
        Recorded("griffin1-1-single-None", "griffin", options=("num_forwards=1",)),
    ]
    for leaks, attention in ((True, "attention=official"), (False, "attention=exact")):
        for forwards in (1, 3):
            options: tuple[str, ...] = (f"num_forwards={forwards}", attention)
            file = f"hass-{forwards}-single-{leaks}"
            rows.append(Recorded(file, "hass", forwards, 1.0, options))
        for forwards in (2, 3):
            options = (f"num_forwards={forwards}", attention, "mask_shift=official")
            file = f"griffin2-{forwards}-single-{leaks}"
            rows.append(Recorded(file, "griffin", forwards, 0.5, options))
    return rows


@pytest.mark.parametrize("step", steps_recorded(), ids=lambda step: step.file)
def test_losses_and_gradients_of_a_training_step(step: Recorded, target: HFTarget) -> None:
    recorded = arrays(f"train-{step.file}.npz")
    drafter = released(step.kind, target, "noise=0", *step.options).train().requires_grad_(True)
    batch = recorded_batch(recorded, target)
    objective = Imitation(token=Distillation(objective="kl"), top_weight=step.top_weight)
    losses, carry = [], None
    assert drafter.num_steps == step.forwards == len(recorded["losses"])
    for _ in range(step.forwards):
        prediction, carry = drafter(batch, carry)
        terms = objective.loss(prediction, batch, drafter.head())
        # theirs has a cross-entropy for a divergence, and divides by a little more than the count
        entropy_N = entropy(prediction, batch)
        mean = terms.total / terms.weight + objective.token_weight * entropy_N.mean()
        losses.append(mean * len(entropy_N) / (len(entropy_N) + 1e-5))
    same(torch.stack(losses).detach().double(), recorded["losses"], rtol=1e-6)
    network: Any = drafter.network
    names, weights = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(torch.stack(losses).sum(), weights)
    assert {f"grad.{name}" for name in names} == {name for name in recorded if "grad." in name}
    for name, gradient in zip(names, gradients, strict=True):
        wanted = recorded[f"grad.{name}"]
        same(gradient, wanted, atol=1e-6 * float(wanted.abs().max()))


def recorded_batch(recorded: dict[str, Tensor], target: HFTarget) -> TrajectoryBatch:
    """Recorded are pairs (token t + 1, feature t) and, as the mask of a pair, whether token t
    counts; here it is whether the token that is predicted, t + 2, does."""
    tokens, counts = recorded["data.input_ids"], recorded["data.loss_mask"].bool()
    assert not counts[:, -2:].any() and not counts[:, :2].any()
    features = recorded["data.hidden_states"]
    torch.testing.assert_close(recorded["data.target"][:, :-1], features[:, 1:], rtol=0, atol=0)
    return TrajectoryBatch(
        tokens_BT=tokens.roll(1, dims=1),  # nobody reads the first one
        loss_mask_BT=counts.roll(2, dims=1),
        features_BTS=features,
        laws=FullLogprobs(hidden_NH=features[0], head=target.head),
        law_row_BT=torch.arange(-1, tokens.shape[1] - 1)[None],  # the state before says a token
    )


def entropy(prediction: DraftPrediction, batch: TrajectoryBatch) -> Tensor:
    """[N]: of the target's laws, where a prediction counts."""
    counted_BT = prediction.mask_BT & batch.mask_ahead(prediction.ahead)
    rows = batch.law_ahead(prediction.ahead)[counted_BT]
    assert isinstance(batch.laws, FullLogprobs)
    log_p = batch.laws.head(batch.laws.hidden_NH[rows]).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def test_losses_and_gradients_of_medusas_heads(target: HFTarget) -> None:
    values, recorded = arrays("medusa/expected.npz"), arrays("medusa/train.npz")
    drafter = released("medusa", target, "decay=1").train().requires_grad_(True)
    labels = recorded["labels"]
    batch = TrajectoryBatch(
        tokens_BT=labels.clamp(min=0), loss_mask_BT=labels >= 0, features_BTS=values["features"]
    )
    losses, carry = [], None
    for _ in range(drafter.num_steps):
        prediction, carry = drafter(batch, carry)
        assert prediction.head is not None
        terms = CrossEntropy().loss(prediction, batch, prediction.head)
        losses.append(prediction.weight * terms.total / terms.weight)
    same(torch.stack(losses).detach().double(), recorded["heads"], rtol=1e-6)
    total = torch.stack(losses).sum()
    same(total.detach().double(), recorded["loss"], rtol=1e-6)
    network: Any = drafter.network
    names, weights = zip(*network.named_parameters(), strict=True)
    assert {f"grad.{name}" for name in names} == {name for name in recorded if "grad." in name}
    for name, gradient in zip(names, torch.autograd.grad(total, weights), strict=True):
        wanted = recorded[f"grad.{name}"]
        same(gradient, wanted, atol=1e-6 * float(wanted.abs().max()))
