"""Verdicts where the laws are on a device: the same as on the host, and one look per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.pretend_device import DEVICE, Elsewhere, PretendDevice, send

import draftsmith.core.verify_step as verify_step_module
from draftsmith.core.block_rule import Block
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Law, Noise
from draftsmith.core.lossy_rules import BiasedDraw, BiasedGreedy, Typical
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.trees import geometry
from draftsmith.core.types import PADDING, ROOT, DecodeStep, DraftTree, Proposal, TreeShape
from draftsmith.core.verify import Match, Rejection, Rule
from draftsmith.core.verify_step import verify_step
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import BackendError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

V = 7
SAMPLERS = {
    "greedy": Sampler(),
    "dense": Sampler(temperature=0.8),
    "top-p": Sampler(temperature=1.3, top_p=0.8),
    "top-k and min-p": Sampler(temperature=1.0, top_k=4, min_p=0.05),
}


def random_tree(rng: np.random.Generator, rows: int, kind: Proposal) -> DraftTree:
    """Rows of unequal trees, some nodes only probes; siblings were drawn from random laws."""
    nodes = int(rng.integers(1, 9))
    parents = np.full((rows, nodes), PADDING)
    for b in range(rows):
        for n in range(int(rng.integers(0, nodes + 1))):
            parents[b, n] = ROOT if rng.random() < 0.4 else rng.integers(ROOT, n)
    q = torch.from_numpy(rng.dirichlet(np.full(V, 0.7), size=rows * (nodes + 1)))
    q_rows = np.arange(rows)[:, None] * (nodes + 1) + np.maximum(parents, ROOT) + 1
    tokens = np.zeros_like(parents)
    for b in range(rows):
        for n in range(nodes):
            law = q[q_rows[b, n]].numpy().copy()
            if kind is Proposal.WITHOUT_REPLACEMENT:
                elder = [tokens[b, m] for m in range(n) if parents[b, m] == parents[b, n]]
                law[elder] = 0.0
                law += 1e-9
            tokens[b, n] = rng.choice(V, p=law / law.sum())
    sampled = kind is not Proposal.OPAQUE
    return DraftTree(
        tokens_BN=torch.from_numpy(tokens),
        parents_BN=torch.from_numpy(parents),
        proposal=kind,
        q=Law(q, V) if sampled else None,
        q_rows_BN=torch.from_numpy(q_rows) if sampled else None,
        candidate_BN=None if sampled else torch.from_numpy(rng.random(parents.shape) < 0.7),
        origin_BN=None if sampled else torch.from_numpy(rng.integers(0, 2, parents.shape)),
    )


def sent(tree: DraftTree, *, shape_too: bool) -> DraftTree:
    """The tree as a drafter leaves it: its tokens and law on the device, and perhaps its shape."""
    fields = ["tokens_BN", "parents_BN"] if shape_too else ["tokens_BN"]
    there = {name: Elsewhere(getattr(tree, name)) for name in fields}
    q = None if tree.q is None else Law(Elsewhere(tree.q.probs_RK), V)
    return dataclasses.replace(tree, q=q, **there)


@pytest.mark.parametrize(
    "shape_too",
    [
        pytest.param(False, id="known shape", marks=pytest.mark.full),
        pytest.param(True, id="shape on the device"),
    ],
)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (Match(), Proposal.OPAQUE),
        (Match(), Proposal.SAMPLED),
        (Rejection(), Proposal.OPAQUE),
        (Rejection(), Proposal.SAMPLED),
        (Rejection(), Proposal.WITHOUT_REPLACEMENT),
        (Typical(epsilon=0.2, alpha=0.9), Proposal.OPAQUE),
        (Typical(), Proposal.SAMPLED),
        (BiasedGreedy(0.3), Proposal.OPAQUE),
        (BiasedDraw(0.3), Proposal.OPAQUE),
        (BiasedGreedy(0.3), Proposal.SAMPLED),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.every(5)
def test_the_verdict_is_that_of_the_host(
    rule: Rule, kind: Proposal, sampler: str, shape_too: bool
) -> None:
    kept = 0
    for seed in range(16):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, 3, kind)
        logits = torch.from_numpy(rng.normal(scale=1.5, size=(3, 1 + tree.num_nodes, V)))
        noise = Noise(seed, [5, 6, 7], [4, 9, 2])
        here = verify_step(
            tree, logits, SAMPLERS[sampler], [], rule, noise, widest=9, allow_lossy=True
        )[1]
        with PretendDevice() as device, torch.inference_mode():
            there = sent(tree, shape_too=shape_too)
            came, verdict = verify_step(
                there, Elsewhere(logits), SAMPLERS[sampler], [], rule, noise,
                widest=9, allow_lossy=True,
            )  # fmt: skip
        assert len(device.waits) == 1 and not device.uploads
        for name in ("path_BD", "num_accepted_B", "next_token_B"):
            assert torch.equal(getattr(verdict, name), getattr(here, name)), f"seed {seed}: {name}"
        assert torch.equal(came.tokens_BN, tree.tokens_BN)
        assert torch.equal(came.parents_BN, tree.parents_BN)
        kept += int(here.num_accepted_B.sum())
    assert kept > 0


def chains(rng: np.random.Generator, rows: int, kind: Proposal) -> DraftTree:
    """Rows of chains of unequal lengths, the shortest of none."""
    tree = random_tree(rng, rows, kind)
    parents = torch.arange(ROOT, tree.num_nodes - 1).repeat(rows, 1)
    for b in range(rows):
        parents[b, int(rng.integers(0, tree.num_nodes + 1)) :] = PADDING
    return dataclasses.replace(tree, parents_BN=parents, candidate_BN=None)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", [Proposal.OPAQUE, Proposal.SAMPLED])
def test_blocks_are_judged_on_the_device_as_on_the_host(kind: Proposal, sampler: str) -> None:
    """The law of an opaque draft, a point mass, begins on the host: it has to meet the target's."""
    kept = 0
    for seed in range(16):
        rng = np.random.default_rng(seed)
        tree = chains(rng, 3, kind)
        logits = torch.from_numpy(rng.normal(scale=1.5, size=(3, 1 + tree.num_nodes, V)))
        noise = Noise(seed, [5, 6, 7], [4, 9, 2])
        here = verify_step(tree, logits, SAMPLERS[sampler], [], Block(), noise, widest=1)[1]
        with PretendDevice(), torch.inference_mode():
            there = verify_step(
                sent(tree, shape_too=True), Elsewhere(logits), SAMPLERS[sampler], [], Block(),
                noise, widest=1,
            )[1]  # fmt: skip
        for name in ("path_BD", "num_accepted_B", "next_token_B"):
            assert torch.equal(getattr(there, name), getattr(here, name)), f"seed {seed}: {name}"
        kept += int(here.num_accepted_B.sum())
    assert kept > 0


def test_penalties_bring_the_tree_first_and_give_the_verdict_of_the_host() -> None:
    sampler = Sampler(temperature=1.0, presence_penalty=2.0)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, 2, Proposal.OPAQUE)
        logits = torch.from_numpy(rng.normal(size=(2, 1 + tree.num_nodes, V)))
        noise, known = Noise(seed, [0, 1], [2, 2]), [History(tokens=[1, 2], num_prompt=1)] * 2
        here = verify_step(tree, logits, sampler, known, Match(), noise, widest=9)[1]
        with PretendDevice(), torch.inference_mode():
            there = verify_step(
                sent(tree, shape_too=True), Elsewhere(logits), sampler, known, Match(), noise,
                widest=9,
            )[1]  # fmt: skip
        assert torch.equal(here.next_token_B, there.next_token_B)
        assert torch.equal(here.path_BD, there.path_BD)


def test_broken_logits_are_an_error_where_the_walk_comes_by_and_only_there() -> None:
    tree = DraftTree(
        tokens_BN=torch.tensor([[3, 4]]),
        parents_BN=torch.tensor([[-1, -1]]),
        proposal=Proposal.OPAQUE,
    )
    logits = torch.zeros((1, 3, V))
    logits[0, 0, 3] = 9.0
    noise = Noise(0, [0], [1])

    def verdict(broken: torch.Tensor) -> int:
        with PretendDevice(), torch.inference_mode():
            found = verify_step(tree, Elsewhere(broken), Sampler(), [], Match(), noise, widest=2)[1]
        return int(found.num_accepted_B[0])

    aside, on_the_way = logits.clone(), logits.clone()
    aside[0, 2] = on_the_way[0, 1] = torch.nan
    assert verdict(logits) == verdict(aside) == 1
    with pytest.raises(BackendError, match="NaN"):
        verdict(on_the_way)


def test_a_broken_draft_model_is_an_error() -> None:
    tree = random_tree(np.random.default_rng(3), 2, Proposal.SAMPLED)
    assert tree.q is not None
    broken = dataclasses.replace(tree, q=Law(tree.q.probs_RK * torch.nan, V))
    logits = torch.zeros((2, 1 + tree.num_nodes, V))
    with PretendDevice(), torch.inference_mode(), pytest.raises(BackendError, match="NaN"):
        verify_step(
            sent(broken, shape_too=False), Elsewhere(logits), Sampler(temperature=1.0), [],
            Rejection(), Noise(0, [0, 1], [1, 1]), widest=9,
        )  # fmt: skip


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(temperature=0.7, top_k=5),
        Sampler(temperature=1.4, top_p=0.6),
        Sampler(temperature=1.0, top_k=6, top_p=0.75, min_p=0.1),
        Sampler(temperature=1.0, top_k=1),
        Sampler(temperature=1.0, top_p=1e-6),
        Sampler(temperature=1.0, top_k=99, logit_bias=((3, -np.inf), (2, 1.0))),
    ],
)
def test_laws_of_a_device_are_those_of_the_host(sampler: Sampler) -> None:
    """Ties included, at the edge of a nucleus and of the top k: scores come in steps of a half."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn((200, 12), generator=generator, dtype=torch.float64)).round() / 2
    here = sampler.law(logits).probs()
    with PretendDevice() as device, torch.inference_mode():
        law = sampler.law(Elsewhere(logits), check=lambda top_R: None)
        assert not device.waits
        there = law.probs().cpu()
    torch.testing.assert_close(there, here, rtol=1e-12, atol=0)
    assert (here == 0).any()


def test_the_geometry_of_a_tree_that_only_the_device_knows() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        parents = random_tree(rng, 3, Proposal.OPAQUE).parents_BN
        depth, see = geometry(parents.numpy())
        with PretendDevice() as device, torch.inference_mode():
            depth_there, see_there = geometry(Elsewhere(parents))
            assert not device.waits
            assert (depth_there.cpu().numpy() == depth).all()
            assert (see_there.cpu().numpy() == see).all()


# --------------------------------------------------------------------------- whole steps


def model(seed: int, *, there: bool) -> HFTarget:
    made = tiny_target(48, seed=seed, layers=1)
    if not there:
        return made
    send(made.model)
    return HFTarget(made.model, end_ids=frozenset(), check=False)


def independent(proposal: str, confidence: float = 0.0) -> Callable[[bool], Drafter]:
    config = Independent.Config(proposal=proposal, confidence=confidence)
    return lambda there: Independent(config, model=model(1, there=there))


SIXTY = TreeShape(widths=(10,) * 6, keep=59)
BUSHY = TreeShape(widths=(3, 2))
CASES: dict[str, tuple[Callable[[bool], Drafter], TreeShape | None, str, int]] = {
    "none": (lambda there: NoDrafter(), None, "dense", 1),
    "prompt lookup": (lambda there: PromptLookup(), None, "greedy", 1),
    "a draft model's chain": (independent("sampled"), TreeShape.chain(4), "top-p", 1),
    "its doubtful chain": (independent("sampled", 0.02), TreeShape.chain(4), "top-p", 1),
    "its doubtful greedy chain": (independent("greedy", 0.02), TreeShape.chain(4), "greedy", 1),
    "its greedy chain": (independent("greedy"), TreeShape.chain(4), "greedy", 1),
    "its draws": (independent("sampled"), BUSHY, "dense", 1),
    "its distinct draws": (independent("without_replacement"), BUSHY, "top-k and min-p", 1),
    "its tree of 59": (independent("greedy"), SIXTY, "greedy", 1),
    "eagle's tree of 59": (lambda there: Eagle(), SIXTY, "greedy", 1),
    "eagle3's tree of 59": (lambda there: Eagle3(), SIXTY, "top-p", 1),
    "medusa": (lambda there: Medusa(), None, "dense", 1),
    "a prediction, then eagle": (
        lambda there: Cascade([PredictionDrafter(), Eagle()]),
        None,
        "greedy",
        1,
    ),
    # they meet on the host
    "a prediction, and eagle in its tree": (
        lambda there: Cascade([PredictionDrafter(), Eagle()]),
        SIXTY,
        "greedy",
        2,
    ),
    "a draft model's draws, and eagle among them": (
        lambda there: Cascade([independent("sampled")(there), Eagle()]),
        BUSHY,
        "dense",
        3,
    ),
    "prompt lookup, and a draft model's best": (
        lambda there: Cascade([PromptLookup(), independent("greedy")(there)]),
        BUSHY,
        "dense",
        2,
    ),
    # its window is read from the logits once more, while there is room to draft
    "lookahead": (lambda there: Lookahead(), None, "greedy", 2),
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4]]
PREDICTIONS = [[], list(range(48))]
"""For drafters that read some; the second row is found again in its own at every step."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_a_step_looks_once(name: str) -> None:
    """... and its tokens are those of the host."""
    build, shape, sampler, looks = CASES[name]
    options = DecodeOptions(sampler=SAMPLERS[sampler], max_new_tokens=7, shape=shape, seed=3)
    target, drafter = model(0, there=False), build(False)
    drafter.bind(target)
    here = [
        step.emitted for step in decode(target, drafter, PROMPTS, options, predictions=PREDICTIONS)
    ]
    with PretendDevice() as device, torch.inference_mode():
        target, drafter = model(0, there=True), build(True)
        drafter.bind(target)
        assert target.device.type == DEVICE.type
        there, counts = [], []
        device.waits.clear()
        for step in decode(target, drafter, PROMPTS, options, predictions=PREDICTIONS):
            there.append(step.emitted)
            counts.append(len(device.waits))
            device.waits.clear()
            if len(there) < 3:  # what is uploaded once and for all
                device.uploads.clear()
    assert there == here and len(counts) > 3
    assert counts[1] == looks and set(counts[1:]) <= set(range(1, looks + 1))
    assert counts[0] <= looks
    assert not device.uploads


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_a_later_drafters_tree_is_judged_as_wide_as_it_is(rule: str) -> None:
    """The first drafter makes chains and the second a tree that only the device knows."""
    options = DecodeOptions(
        sampler=SAMPLERS["dense"], max_new_tokens=16, seed=3, rule=rule, allow_lossy=True
    )

    def steps(*, there: bool) -> list[DecodeStep]:
        target, drafter = model(0, there=there), Cascade([PromptLookup(), Eagle()])
        drafter.bind(target)
        return list(decode(target, drafter, PROMPTS, options))

    here = steps(there=False)
    with PretendDevice(), torch.inference_mode():
        assert steps(there=True) == here
    origins = [origin for step in here for row in step.origins for origin in row]
    assert 2 in origins, "no node of the tree was accepted"


@pytest.mark.parametrize("second", ["a draft model", "eagle"])
def test_rows_of_two_kinds_are_judged_as_on_the_host(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row copies, and the other is drawn from laws that are on the device. (Where laws are not
    cut, `auto` judges chains by `block` on the host alone.)"""
    options = DecodeOptions(sampler=SAMPLERS["top-k and min-p"], max_new_tokens=16, seed=3)

    def steps(*, there: bool) -> list[DecodeStep]:
        drawing: Drafter = Eagle(Eagle.Config(length=3, proposal="sampled"))
        if second == "a draft model":
            drawing = independent("sampled")(there)
        target, drafter = model(0, there=there), Cascade([PromptLookup(), drawing])
        drafter.bind(target)
        return list(decode(target, drafter, [[1, 2, 3] * 4, [4, 5, 4]], options))

    mixed: list[int] = []
    alike = verify_step_module.alike
    monkeypatch.setattr(
        verify_step_module, "alike", lambda tree: mixed.append(tree.num_nodes) or alike(tree)
    )
    here = steps(there=False)
    assert max(mixed) > 1, "no step had drafts of two kinds"
    with PretendDevice(), torch.inference_mode():
        assert steps(there=True) == here
