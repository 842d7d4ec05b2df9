"""The suite catches broken decoders: each mutant must fail a check that the real thing passes.

The checks are the suite's own (exact enumeration through `decode()`), on small targets. A mutant
that survives means that the suite is too weak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.core import cache, decode, rows, trees, verify
from draftsmith.core.law import Law
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter

from . import mutants
from .cases import CHAIN, TREE, Case
from .checking import check
from .enumeration import EnumeratingNoise, NoiseReused
from .reference_drafters import Greedy, ReferenceDrafter, Sampled, Whimsical, WithoutReplacement
from .toys import NUM_NEW, PROMPTS, SETTINGS, sparse

WRONG_LAW = "does not emit the target's law"
Patcher = Callable[[pytest.MonkeyPatch], None]


def run(
    drafter: type[ReferenceDrafter],
    *,
    shape: TreeShape = TREE,
    setting: str = "cool",
    rule: str = "rejection",
    end_ids: frozenset[int] = frozenset(),
    noise: type[EnumeratingNoise] = EnumeratingNoise,
    strict: bool = True,
    keep: int = 0,
) -> None:
    """The suite's check of one configuration; raises AssertionError when the law is wrong."""
    build: Callable[[Any], Drafter] = drafter
    draws = drafter.proposal is not Greedy.proposal
    keep = keep or (5 if not draws else 3 if shape.is_chain else 2)
    case = Case(kind="reference", label=drafter.__name__, build=build, shape=shape, draws=draws)
    options = decode.DecodeOptions(sampler=SETTINGS[setting], max_new_tokens=NUM_NEW, rule=rule)
    check(
        case,
        sparse(keep, 0, end_ids=end_ids),
        sparse(keep, 1),
        options,
        PROMPTS,
        noise=noise,
        strict=strict,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """How the code is broken, and in which configuration it must be noticed."""

    breaks: Patcher
    drafter: type[ReferenceDrafter]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def source(owner: Any, name: str, old: str, new: str, *also: Any) -> Patcher:
    return lambda patch: mutants.break_source(patch, owner, name, old, new, also=also)


def raw_law_behind_the_last_draft(patch: pytest.MonkeyPatch) -> None:
    intact = verify.TreeLaws.at

    def at(self: verify.TreeLaws, rows: Any, nodes: Any) -> Law:
        leaf = all((self.parents_BN[b] != n).all() for b, n in zip(rows, nodes, strict=True))
        if leaf and (nodes >= 0).all():
            return Sampler(temperature=1.0).law(self.logits_BNV[rows, nodes + 1])
        return intact(self, rows, nodes)

    patch.setattr(verify.TreeLaws, "at", at)


def history_of_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "history_at", lambda known, *path: known)


ACCEPT = "noise.accept(prob, rows, node.depth, sibling)"
CODE_MUTANTS = {
    "accepts with p instead of p/q": Mutant(
        breaks=source(verify.Rejection, "step", "prob = prob / q.prob(drafted).to(prob)", "pass"),
        drafter=Sampled,
        options={"shape": CHAIN},
    ),
    "residual is |p - q|": Mutant(
        breaks=source(Law, "residual", ".clamp_(min=0.0)", ".abs()"),
        drafter=Sampled,
        options={"shape": CHAIN},
    ),
    "residual is p": Mutant(
        breaks=source(Law, "residual", "self.probs_RK - self._beside(q)", "self.probs_RK.clone()"),
        drafter=Sampled,
        options={"shape": CHAIN},
    ),
    "each sibling is judged against p, not the residual": Mutant(
        breaks=source(
            verify.Rejection,
            "step",
            "prob = law.prob(drafted)",
            "prob = node.law.take(alive).prob(drafted)",
        ),
        drafter=Sampled,
    ),
    "last draw is from p, not the residual": Mutant(
        breaks=source(
            verify.Rejection, "step", "drawn = final.draw(", "drawn = node.law.take(done).draw("
        ),
        drafter=Sampled,
        options={"shape": CHAIN},
    ),
    "law of the node above": Mutant(
        breaks=source(verify.TreeLaws, "at", "nodes + 1", "np.maximum(nodes, 0)"),
        drafter=Greedy,
        options={"rule": "match", "shape": CHAIN},
    ),
    "penalties do not see the block": Mutant(
        breaks=source(trees, "history_at", "while node != ROOT:", "while False:", verify),
        drafter=Greedy,
        options={"rule": "match", "setting": "counts", "shape": CHAIN},
    ),
    "repetition penalty does not see the block": Mutant(
        breaks=source(trees, "history_at", "while node != ROOT:", "while False:", verify),
        drafter=Sampled,
        options={"setting": "repetition", "shape": CHAIN},
    ),
    "bonus token from the raw logits": Mutant(
        breaks=raw_law_behind_the_last_draft,
        drafter=Greedy,
        options={"rule": "match", "shape": CHAIN},
    ),
    "rejected opaque token can be drawn again": Mutant(
        breaks=lambda patch: patch.setattr(Law, "without", lambda self, tokens_R: self),
        drafter=Greedy,
    ),
    "conditional q is not renormalised": Mutant(
        breaks=source(verify, "drawn_from", "for nodes in earlier", "for nodes in earlier[:0]"),
        drafter=WithoutReplacement,
        options={"keep": 3, "setting": "min_p"},
    ),
    "one number judges all siblings": Mutant(
        breaks=source(verify.Rejection, "step", ACCEPT, "noise.accept(prob, rows, node.depth)"),
        drafter=Greedy,
        options={"strict": False},
    ),
    "first child is taken for a match": Mutant(
        breaks=source(verify, "holding", "== wanted[r]", ">= 0"),
        drafter=Greedy,
        options={"rule": "match"},
    ),
    "siblings see each other": Mutant(
        breaks=source(
            cache,
            "_layout",
            "node_depth, node_see = geometry(parents_BN)",
            "node_depth, node_see = geometry(parents_BN)\n"
            "        node_see = node_see | (node_depth[:, :, None] > node_depth[:, None, :])",
        ),
        drafter=Greedy,
        options={"rule": "match"},
    ),
    "positions count nodes, not depth": Mutant(
        breaks=source(
            cache,
            "_layout",
            "(counts_B - 1)[:, None] + node_depth",
            "counts_B[:, None] + np.arange(num_nodes)",
        ),
        drafter=Greedy,
        options={"rule": "match"},
    ),
    "another path is committed": Mutant(
        breaks=source(
            cache.KVCache, "commit", "path = path_BD[b, :count]", "path = np.arange(count)"
        ),
        drafter=Greedy,
        options={"rule": "match"},
    ),
    "commit takes the column before": Mutant(
        breaks=source(
            cache.KVCache,
            "_close_up",
            "columns + start, store",
            "columns + start - 1, store",
        ),
        drafter=Greedy,
        options={"rule": "match"},
    ),
    "end token inside the block is passed over": Mutant(
        breaks=source(rows.Row, "append", "if self.finish:\n            break", "pass"),
        drafter=Greedy,
        options={"rule": "match", "end_ids": frozenset({2, 5, 7}), "shape": CHAIN},
    ),
}

DRAFTER_MUTANTS: dict[str, tuple[type[ReferenceDrafter], dict[str, Any]]] = {
    "raw q": (mutants.RawQ, {"shape": CHAIN}),
    "argmax reported as drawn": (mutants.Confident, {"shape": CHAIN}),
    "distinct children called i.i.d.": (mutants.Mislabelled, {"keep": 3, "setting": "min_p"}),
    "i.i.d. children called distinct": (mutants.MislabelledToo, {}),
    "low-confidence draws dropped": (mutants.LowConfidenceDropped, {"shape": CHAIN}),
    "sampled children pruned by confidence": (mutants.Pruned, {}),
    "sampled children de-duplicated": (mutants.Deduplicated, {}),
    "sampled children re-sorted by q": (mutants.Resorted, {}),
    "distinct children re-sorted by q": (
        mutants.ResortedDistinct,
        {"keep": 3, "setting": "min_p"},
    ),
}

NOISE_MUTANTS: dict[str, tuple[type[EnumeratingNoise], type[ReferenceDrafter], dict[str, Any]]] = {
    "drafter and verifier share noise": (mutants.NoPurpose, Sampled, {"shape": CHAIN}),
    "siblings share noise": (mutants.NoLane, Sampled, {}),
    "positions share noise": (mutants.NoPosition, Greedy, {"rule": "match", "shape": CHAIN}),
}


@pytest.mark.parametrize("name", CODE_MUTANTS)
def test_broken_code_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = CODE_MUTANTS[name]
    run(mutant.drafter, **mutant.options)
    mutant.breaks(monkeypatch)
    with pytest.raises(AssertionError, match=WRONG_LAW):
        run(mutant.drafter, **mutant.options)


@pytest.mark.parametrize("name", DRAFTER_MUTANTS)
def test_broken_drafter_is_caught(name: str) -> None:
    drafter, options = DRAFTER_MUTANTS[name]
    run(WithoutReplacement if issubclass(drafter, WithoutReplacement) else Sampled, **options)
    with pytest.raises(AssertionError, match=WRONG_LAW):
        run(drafter, **options)


@pytest.mark.parametrize("name", NOISE_MUTANTS)
def test_shared_noise_is_caught_by_the_law_and_by_its_keys(name: str) -> None:
    noise, drafter, options = NOISE_MUTANTS[name]
    run(drafter, **options)
    with pytest.raises(AssertionError, match=WRONG_LAW):
        run(drafter, **options, noise=noise, strict=False)
    with pytest.raises(NoiseReused):
        run(drafter, **options, noise=noise)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_growing_only_below_confident_tokens_is_no_mutant(rule: str) -> None:
    """The suite does not cry wolf at a shape that looks at earlier draws only."""
    run(mutants.GrownWhereConfident, rule=rule)


def test_a_mutant_whose_code_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mutants.MutantGone):
        mutants.break_source(monkeypatch, Law, "residual", "no such code", "")


def test_probes_and_odd_trees_are_no_mutant() -> None:
    run(Whimsical, rule="rejection")
