"""How the suite builds every drafter on a toy target. A new file in `drafters/` needs a line here:
`test_every_drafter_has_a_case` fails until it has one, and all other tests then come for free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter, TargetView
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden.drafter import FeatureDrafter, TrainedDrafter
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.p_eagle import PEagle
from draftsmith.drafters.parallel import Parallel
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.recycling import Recycling
from draftsmith.drafters.suffix import Suffix
from draftsmith.drafters.unrolled import Unrolled
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget

from .reference_drafters import Greedy, Sampled, Whimsical, WithoutReplacement

CHAIN = TreeShape.chain(2)
TREE = TreeShape(widths=(2, 1))
PATHS = TreeShape(paths=((0,), (1,), (1, 0)))
DYNAMIC = TreeShape(widths=(2, 2), keep=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drafter in one configuration."""

    kind: str
    """File name in `drafters/`; `reference` for the suite's own."""
    label: str
    build: Callable[[Target], Drafter]
    """From a draft model, which drafters without one ignore."""
    shape: TreeShape = CHAIN
    draws: bool = False
    """Drafts are sampled, so that every draft adds branches to the enumeration."""
    tabular_only: bool = False
    remembers: bool = False
    """Proposals depend on more than the row's tokens (on what earlier steps computed)."""
    drafts: bool = True
    uses_predictions: bool = False
    asks_model: bool = False
    """Drafts with forwards of the draft model, which has a context of its own."""
    other_shape: bool = False
    """The very drafter of another case, with a shape of its own."""

    def __str__(self) -> str:
        return self.label


def _independent(
    proposal: str,
    shape: TreeShape,
    label: str,
    *,
    draws: bool = True,
    other_shape: bool = False,
    confidence: float = 0.0,
    draft_temperature: float = 1.0,
) -> Case:
    return Case(
        kind="independent",
        label=label,
        build=lambda model: Independent(
            Independent.Config(
                proposal=proposal, confidence=confidence, draft_temperature=draft_temperature
            ),
            model=model,
        ),
        shape=shape,
        draws=draws,
        asks_model=True,
        other_shape=other_shape,
    )


def _then(label: str, second: Callable[[Target], Drafter], *, asks_model: bool = False) -> Case:
    """A prediction, and another drafter behind it."""
    return Case(
        kind="prediction",
        label=f"prediction-then-{label}",
        build=lambda model: Cascade(
            [PredictionDrafter(PredictionDrafter.Config(length=2, resync=False)), second(model)]
        ),
        draws=asks_model,
        uses_predictions=True,
        asks_model=asks_model,
    )


def _filling(
    first: str, second: str, parts: Callable[[Target], list[Drafter]], **facts: bool
) -> Case:
    """Two drafters that fill one tree."""
    return Case(
        kind=first,
        label=f"{first}-and-{second}",
        build=lambda model: Cascade(parts(model)),
        shape=TREE,
        **facts,
    )


KNOWN = (1, 3, 6)
"""What a draft vocabulary knows of each eight tokens: no column is its token."""


def _knowing_some(cls: Any) -> Any:
    """This drafter over hidden states with a draft vocabulary of `KNOWN` tokens."""

    class Some(cls):
        def bind(self, target: TargetView) -> None:
            if self.network is not None:
                return super().bind(target)
            counts_V = torch.isin(torch.arange(target.vocab_size) % 8, torch.tensor(KNOWN)).float()
            self.config = replace(self.config, draft_vocab=int(counts_V.sum()))
            super().bind(target)
            # which tokens, and no more: a toy target's head has no finite rows to begin from
            TrainedDrafter.choose_vocabulary(self, counts_V)

    return Some


def _features(
    kind: str,
    cls: type[FeatureDrafter],
    shape: TreeShape,
    proposal: str = "greedy",
    *,
    label: str = "",
    other_shape: bool = False,
    **options: Any,
) -> Case:
    """With random weights: they are made when the drafter is bound to its target."""
    return Case(
        kind=kind,
        label=f"{kind}-{label or ('dynamic' if shape.is_dynamic else proposal)}",
        build=lambda _: cls(cls.Config(proposal=proposal, **options)),
        shape=shape,
        draws=proposal != "greedy",
        remembers=True,
        other_shape=other_shape,
    )


def _reference(
    cls: Callable[[TabularTarget], Drafter],
    shape: TreeShape,
    label: str,
    *,
    draws: bool = True,
    remembers: bool = False,
) -> Case:
    return Case(
        kind="reference",
        label=label,
        build=cls,  # tabular_only
        shape=shape,
        draws=draws,
        tabular_only=True,
        remembers=remembers,
    )


CASES = (
    Case(kind="none", label="none", build=lambda _: NoDrafter(), drafts=False),
    Case(
        kind="prompt_lookup",
        label="prompt_lookup",
        build=lambda _: PromptLookup(PromptLookup.Config(length=2)),
    ),
    Case(
        kind="prompt_lookup",
        label="prompt_lookup-earliest",
        build=lambda _: PromptLookup(PromptLookup.Config(length=3, match="earliest", max_ngram=1)),
    ),
    Case(
        kind="suffix",
        label="suffix",
        build=lambda _: Suffix(Suffix.Config(length=2, min_match=1, factor=2.0)),
    ),
    Case(
        kind="suffix",
        label="suffix-cut",
        build=lambda _: Suffix(Suffix.Config(length=3, min_match=1, min_probability=0.5)),
    ),
    Case(
        kind="recycling",
        label="recycling-chain",
        build=lambda _: Recycling(Recycling.Config(length=2, successors=2)),
        remembers=True,
    ),
    Case(
        kind="recycling",
        label="recycling-tree",
        build=lambda _: Recycling(Recycling.Config(successors=3)),
        shape=TreeShape(paths=((0,), (1,), (0, 0), (0, 1))),
        remembers=True,
    ),
    Case(
        kind="lookahead",
        label="lookahead",
        build=lambda _: Lookahead(Lookahead.Config(window=2, ngram=3, guesses=2)),
        remembers=True,
    ),
    Case(
        kind="lookahead",
        label="lookahead-unseeded",
        build=lambda _: Lookahead(
            Lookahead.Config(
                window=3, ngram=2, guesses=-1, seed_from_prompt=False, shift="accepted"
            )
        ),
        remembers=True,
    ),
    Case(
        kind="prediction",
        label="prediction",
        build=lambda _: PredictionDrafter(PredictionDrafter.Config(length=2)),
        uses_predictions=True,
    ),
    _then("prompt_lookup", lambda _: PromptLookup(PromptLookup.Config(length=2))),
    _then(
        "independent",
        lambda model: Independent(Independent.Config(), model=model),
        asks_model=True,
    ),
    _filling(
        "prediction",
        "independent",
        lambda model: [
            PredictionDrafter(PredictionDrafter.Config(length=2, resync=False)),
            Independent(Independent.Config(), model=model),
        ],
        draws=True,
        uses_predictions=True,
        asks_model=True,
    ),
    _filling(
        "independent",
        "prompt_lookup",
        lambda model: [
            Independent(Independent.Config(proposal="greedy"), model=model),
            PromptLookup(PromptLookup.Config(length=2)),
        ],
        asks_model=True,
    ),
    _filling(
        "suffix",
        "eagle",
        lambda _: [Suffix(Suffix.Config(min_match=1, factor=2.0)), Eagle(Eagle.Config())],
        remembers=True,
    ),
    Case(  # its rows are of two kinds
        kind="suffix",
        label="suffix-then-independent",
        build=lambda model: Cascade(
            [
                Suffix(Suffix.Config(length=2, min_match=2, factor=2.0)),
                Independent(Independent.Config(draft_temperature=0.7), model=model),
            ]
        ),
        draws=True,
        asks_model=True,
    ),
    _independent("sampled", CHAIN, "independent-chain"),
    _independent(
        "sampled", CHAIN, "independent-chain-confident", confidence=0.4, draft_temperature=0.7
    ),
    _independent("sampled", TREE, "independent-tree", other_shape=True),
    _independent("without_replacement", TREE, "independent-distinct", draft_temperature=1.5),
    _independent("greedy", TREE, "independent-greedy", draws=False),
    _independent("sampled", PATHS, "independent-paths", other_shape=True),
    _independent("without_replacement", PATHS, "independent-distinct-paths", other_shape=True),
    _independent("sampled", DYNAMIC, "independent-dynamic", draws=False, other_shape=True),
    _features("eagle", Eagle, DYNAMIC),
    _features("eagle", Eagle, PATHS, proposal="without_replacement"),
    _features("eagle", Eagle, CHAIN, proposal="sampled"),
    _features(
        "eagle",
        _knowing_some(Eagle),
        TREE,
        label="of-some",
        proposal="without_replacement",
        seed=4,
    ),
    _features("eagle3", Eagle3, DYNAMIC),
    _features("eagle3", _knowing_some(Eagle3), CHAIN, label="of-some", proposal="sampled"),
    _features("hass", Hass, DYNAMIC),
    _features("hass", Hass, CHAIN, label="confident", proposal="sampled", confidence=0.5),
    _features("fspad", Fspad, DYNAMIC),
    _features("griffin", Griffin, DYNAMIC),
    _features("griffin", Griffin, CHAIN, proposal="sampled"),
    _features("griffin", Griffin, TREE, proposal="greedy", other_shape=True),
    _features("unrolled", Unrolled, DYNAMIC),
    _features(
        "unrolled", Unrolled, CHAIN, proposal="sampled", fusion="plain", draft_temperature=0.7
    ),
    _features("unrolled", Unrolled, PATHS, proposal="without_replacement"),
    Case(
        kind="medusa",
        label="medusa",
        build=lambda _: Medusa(Medusa.Config(heads=2)),
        shape=PATHS,
        remembers=True,
    ),
    Case(
        kind="medusa",
        label="medusa-of-some",
        build=lambda _: _knowing_some(Medusa)(Medusa.Config(heads=2)),
        shape=CHAIN,
        remembers=True,
    ),
    _features("parallel", Parallel, DYNAMIC),
    _features("parallel", Parallel, CHAIN, proposal="sampled", markov=0),
    _features("parallel", _knowing_some(Parallel), CHAIN, label="of-some", proposal="sampled"),
    _features(
        "parallel",
        Parallel,
        CHAIN,
        label="confident",
        proposal="sampled",
        confidence_head=True,
        confidence=0.53,
    ),
    _features("parallel", Parallel, PATHS, proposal="without_replacement"),
    _features("parallel", Parallel, CHAIN, proposal="greedy", block=3, layers=1, states="layers"),
    _features("p_eagle", PEagle, DYNAMIC, seed=10),
    _features("p_eagle", PEagle, CHAIN, proposal="sampled", block=3, seed=10, draw_length=1),
    _features("p_eagle", PEagle, PATHS, proposal="without_replacement", layers=1, seed=10),
    _features("p_eagle", PEagle, TREE, proposal="greedy", other_shape=True, seed=10),
    _reference(Sampled, TREE, "reference-sampled"),
    _reference(WithoutReplacement, TREE, "reference-distinct"),
    _reference(Greedy, TREE, "reference-greedy", draws=False),
    _reference(Whimsical, TREE, "reference-whimsical", draws=False, remembers=True),
)

DRAFTERS = tuple(case for case in CASES if not case.other_shape)
"""For tests that give the shape themselves: each drafter in each configuration, once."""

LOSSLESS_RULES = ("match", "rejection")


def by_case_in_brief(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """One case of each kind for every edit, all of them in `make test-full`."""
    seen: set[str] = set()
    parameters = []
    for case in cases:
        parameters.append(pytest.param(case, marks=pytest.mark.full if case.kind in seen else ()))
        seen.add(case.kind)
    return pytest.mark.parametrize("case", parameters, ids=str)
