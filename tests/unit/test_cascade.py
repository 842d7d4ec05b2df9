"""Several drafters at once: whose draft a row has, and what each of them sees of the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import Generator, SamplingParams
from draftsmith.core.config import parse_tree
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import generate
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import alike, stack_drafts
from draftsmith.core.types import (
    PADDING,
    DecodeStep,
    DraftTree,
    Proposal,
    RequestBatch,
    TreeShape,
)
from draftsmith.drafters.base import Accepted, Drafter, DraftState, TextState
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.config import DraftingConfig, cascade_parts
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.recycling import Recycling
from draftsmith.drafters.registry import load_drafter, make_drafter
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError, UnsupportedProposal
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

V = 24


def target() -> HFTarget:
    return tiny_target(V, seed=3, dtype=torch.float64)


def draft_model(seed: int, **options: int) -> Independent:
    model = tiny_target(V, seed=seed, dtype=torch.float64)
    return Independent(Independent.Config(proposal="greedy", **options), model=model)


def proposed(drafter: Drafter, texts: list[list[int]], depth: list[int]) -> DraftTree:
    request = RequestBatch(tokens=texts, request_ids=tuple(range(len(texts))), max_new_tokens=20)
    noise = Noise(0, request.request_ids, [len(text) for text in texts])
    shape = TreeShape.chain(max(depth))
    return drafter.propose(drafter.start(request), shape, np.array(depth), Sampler(), noise)


def chain(tree: DraftTree, row: int) -> list[int]:
    return tree.tokens_BN[row][tree.parents_BN[row] != PADDING].tolist()


REPEATED, NEW = [1, 2, 3, 4, 1, 2], [5, 6, 7, 8]


def test_the_first_drafter_with_a_draft_has_the_row() -> None:
    """Row by row; the second keeps the length that is its own."""
    alone = draft_model(8, length=2)
    cascade = Cascade([Suffix(), draft_model(8, length=2)])
    for drafter in (alone, cascade):
        drafter.bind(target())
    tree = proposed(cascade, [REPEATED, NEW, NEW], [4, 4, 0])
    assert chain(tree, 0) == chain(proposed(Suffix(), [REPEATED], [4]), 0) == [3, 4]
    assert chain(tree, 1) == chain(proposed(alone, [NEW], [4]), 0)[:2] and chain(tree, 2) == []
    assert tree.origin_BN is not None
    assert tree.origin_BN[:2].tolist() == [[0, 0], [2, 2]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    cascade = Cascade([Suffix(), draft_model(8)])
    cascade.bind(target())
    together = proposed(cascade, [REPEATED, NEW], [4, 3])
    for row, text in enumerate([REPEATED, NEW]):
        one = proposed(cascade, [text], [[4, 3][row]])
        assert chain(one, 0) == chain(together, row)


def text_of(drafter: Drafter, *, batch: bool = True) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, origins of accepted drafts) of two rows."""
    model = target()
    drafter.bind(model)
    rows: list[list[int]] = [[], []]
    origins: list[list[int]] = [[], []]
    options = DecodeOptions(max_new_tokens=40, ignore_end=True)
    for step in decode(model, drafter, [REPEATED, NEW], options):
        for row in range(2):
            rows[row] += step.emitted[row]
            origins[row] += step.origins[row]
    return rows, origins


MAKERS: dict[str, Callable[[], Drafter]] = {
    "suffix, then a draft model": lambda: Cascade([Suffix(), draft_model(3)]),
    "two draft models": lambda: Cascade(
        [Suffix(Suffix.Config(min_match=4)), draft_model(3, length=1), draft_model(5)]
    ),
    "a draft model with little to say, then suffix": lambda: Cascade(
        [PromptLookup(PromptLookup.Config(min_ngram=3)), Suffix(), draft_model(3)]
    ),
    "suffix, then eagle": lambda: Cascade([Suffix(), Eagle(Eagle.Config(length=3))]),
    "eagle, then suffix": lambda: Cascade([Eagle(Eagle.Config(length=3)), Suffix()]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_text_is_that_of_the_target(name: str) -> None:
    plain, _ = text_of(NoDrafter())
    found, origins = text_of(MAKERS[name]())
    assert found == plain
    if "draft model" in name:  # seed 3 drafts with the target's own weights
        assert {2, 3} & set(origins[0] + origins[1]), "no draft of the model was accepted"


def accepted_of(first: Drafter) -> tuple[int, int]:
    """(accepted, offered) tokens of the drafter behind `first`, which draws from the very law."""
    model = target()
    cascade = Cascade([first, Independent(Independent.Config(), model=target())])
    cascade.bind(model)
    options = DecodeOptions(
        sampler=Sampler(temperature=0.9), max_new_tokens=40, ignore_end=True, seed=4
    )
    accepted = offered = 0
    for step in decode(model, cascade, [NEW], options):
        if step.origins[0] and step.origins[0][0] == 2:
            accepted += step.accepted[0]
        offered += step.offered_depth[0]
    return accepted, offered


def test_draws_behind_another_drafter_are_judged_by_what_they_were_drawn_from() -> None:
    """Draws from the target's own law are never refused, and as opaque drafts they would be."""
    accepted, offered = accepted_of(Suffix(Suffix.Config(min_match=24)))
    assert accepted == offered > 30


def drawing(seed: int, **options: Any) -> Independent:
    model = tiny_target(V, seed=seed, dtype=torch.float64)
    return Independent(Independent.Config(**options), model=model)


def chains_of(parts: list[Drafter], texts: list[list[int]], temperature: float) -> DraftTree:
    """What they propose together for rows 7, 8, ..."""
    cascade = Cascade(parts)
    cascade.bind(target())
    ids = tuple(range(7, 7 + len(texts)))
    request = RequestBatch(tokens=texts, request_ids=ids, max_new_tokens=20)
    noise, depth_B = Noise(0, ids, list(map(len, texts))), np.full(len(texts), 3)
    sampler, shape = Sampler(temperature=temperature), TreeShape.chain(3)
    return cascade.propose(cascade.start(request), shape, depth_B, sampler, noise)


def test_a_draft_of_one_kind_stays_what_it_is() -> None:
    parts: list[Drafter] = [Suffix(), drawing(5)]
    drawn, copied = (chains_of(parts, [text], 1.0) for text in (NEW, REPEATED))
    assert drawn.proposal is Proposal.SAMPLED and drawn.q is not None and drawn.opaque_B is None
    assert copied.proposal is Proposal.OPAQUE and copied.q is None and copied.opaque_B is None
    assert chains_of(parts, [NEW], 0.0).proposal is Proposal.OPAQUE
    assert chains_of([Suffix(), draft_model(5)], [NEW], 1.0).proposal is Proposal.OPAQUE


def test_rows_of_two_kinds_are_told_apart_and_keep_their_laws() -> None:
    texts = [NEW, REPEATED, REPEATED, NEW]
    parts: list[Drafter] = [Suffix(), drawing(5)]
    tree = chains_of(parts, texts, 1.0)
    assert tree.opaque_B is not None and tree.opaque_B.tolist() == [False, True, True, False]
    assert tree.q_rows_BN is not None and tree.q is not None
    assert [run.proposal.value for _, run in alike(tree)] == ["sampled", "opaque", "sampled"]
    for row in (0, 3):
        nodes = np.flatnonzero(tree.parents_BN[row] != PADDING)
        laws = tree.q.take(tree.q_rows_BN[row, nodes])
        one = drawing(5)  # the same row without a neighbour of another kind
        one.bind(target())
        request = RequestBatch(tokens=[NEW], request_ids=(7 + row,), max_new_tokens=20)
        noise = Noise(0, (7 + row,), [len(NEW)])
        sampler, shape = Sampler(temperature=1.0), TreeShape.chain(3)
        alone = one.propose(one.start(request), shape, np.array([3]), sampler, noise)
        assert alone.q is not None and alone.q_rows_BN is not None
        assert torch.equal(tree.tokens_BN[row, nodes], alone.tokens_BN[0])
        own = alone.q.take(alone.q_rows_BN[0])
        assert torch.allclose(laws.probs(), own.probs(), atol=1e-12, rtol=0)


def test_what_repeats_outputs_leaves_all_drafts_opaque() -> None:
    """Which of the parts drafts then depends on the noise that would decide about its draws."""
    for first in (Suffix(Suffix.Config(memory=100)), PredictionDrafter()):
        assert chains_of([first, drawing(5)], [NEW], 1.0).proposal is Proposal.OPAQUE


def test_draws_that_say_no_law_or_branch_are_opaque() -> None:
    """Beside a chain a later part drafts its own shape, which may be a tree."""

    class Branching(Independent):
        default_shape = TreeShape(widths=(2, 1))

    class Silent(Independent):
        def propose(self, *given: Any) -> DraftTree:
            return replace(super().propose(*given), q=None, q_rows_BN=None)

    for kind in (Branching, Silent):
        part = kind(Independent.Config(), model=tiny_target(V, seed=5, dtype=torch.float64))
        if kind is Branching:
            part.default_shape = Branching.default_shape
        tree = chains_of([Suffix(), part], [NEW, REPEATED], 1.0)
        assert tree.proposal is Proposal.OPAQUE and tree.opaque_B is None


@pytest.mark.parametrize("rule", ["auto", "match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_rows_of_two_kinds_are_those_of_each_alone(rule: str, temperature: float) -> None:
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=24, ignore_end=True, rule=rule
    )
    model = target()

    def texts(prompts: list[list[int]], ids: list[int]) -> list[list[int]]:
        cascade = Cascade([Suffix(), drawing(3, draft_temperature=0.8)])
        cascade.bind(model)
        rows: list[list[int]] = [[] for _ in prompts]
        for step in decode(model, cascade, prompts, options, request_ids=ids):
            for row, new in zip(rows, step.emitted, strict=True):
                row += new
        return rows

    prompts = [NEW, REPEATED, [9, 9, 9], [5]]
    together = texts(prompts, [0, 1, 2, 3])
    assert together == [texts([prompt], [b])[0] for b, prompt in enumerate(prompts)]


class Noted(Cascade):
    """Notes the origin of each row's draft at every step; None: it has none."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__(parts)
        self.origins: list[list[int | None]] = []

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        tree = super().propose(state, shape, depth_B, sampler, noise)
        origin_BN = tree.origin_BN
        assert origin_BN is not None
        drafted_B = (tree.parents_BN != PADDING).any(1).tolist()
        firsts = zip(origin_BN[:, 0].tolist(), drafted_B, strict=True)
        self.origins.append([origin if drafted else None for origin, drafted in firsts])
        return tree


class Sometimes(Independent):
    """A draft model that drafts behind texts of every third length only."""

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, TextState)
        silent_B = np.array([len(text) % 3 > 0 for text in state.known])
        return super().propose(state, shape, np.where(silent_B, 0, depth_B), sampler, noise)


def sometimes(seed: int, length: int) -> Sometimes:
    model = tiny_target(V, seed=seed, dtype=torch.float64)
    return Sometimes(Sometimes.Config(proposal="greedy", length=length), model=model)


BESIDE: dict[str, tuple[Callable[[], list[Drafter]], set[int]]] = {
    "suffix": (lambda: [Suffix(), draft_model(3, length=3)], {2}),
    "another draft model": (lambda: [sometimes(3, 4), draft_model(3, length=3)], {0, 2}),
    "a wrong draft model": (lambda: [sometimes(8, 4), draft_model(3, length=3)], {2}),
}
"""Parts, and the origins of those that are the very target (its seed is 3)."""


@pytest.mark.parametrize("name", BESIDE)
def test_a_draft_model_keeps_its_cache_in_step_with_the_others_drafts(name: str) -> None:
    """Whatever the very target drafts is accepted whole, whoever drafted before."""
    build, good = BESIDE[name]
    model, cascade = target(), Noted(build())
    cascade.bind(model)
    options = DecodeOptions(max_new_tokens=60, ignore_end=True)
    steps = list(decode(model, cascade, [REPEATED, NEW], options))
    drafts: Counter[int | None] = Counter()
    for step, origins in zip(steps, cascade.origins, strict=False):  # the last may ask for none
        for row, origin in enumerate(origins):
            drafts[origin] += 1
            if origin in good:
                assert step.accepted[row] == step.offered_depth[row] > 0
    assert all(drafts[origin] > 2 for origin in good)


class Notes(Drafter):
    """A drafter that drafts one token behind texts of its own, and keeps what it is shown of
    the notes on nodes."""

    def __init__(self, mine: int) -> None:
        super().__init__()
        self.mine = mine
        self.shown: list[list[list[int]]] = []

    def start(self, request: RequestBatch) -> DraftState:
        known = [list(row) for row in request.tokens]
        return TextState(known=known, num_prompt=[len(row) for row in known])

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, TextState)
        drafts = [
            [row[-1]] if row[-1] == self.mine and depth else []
            for row, depth in zip(state.known, depth_B, strict=True)
        ]
        tree = stack_drafts(drafts)
        notes = 10 * self.mine + torch.arange(tree.tokens_BN.numel()).view(tree.tokens_BN.shape)
        return replace(tree, fed_BN=notes.masked_fill(tree.parents_BN == PADDING, -1))

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert accepted.tree.fed_BN is not None
        self.shown.append(accepted.tree.fed_BN.tolist())
        return state


NOTING: list[type[Notes]] = [Notes, type("More", (Notes,), {}), type("Most", (Notes,), {})]
"""A cascade has each kind once."""


def test_notes_on_nodes_are_shown_to_the_drafter_whose_nodes_they_are() -> None:
    model, parts = target(), [kind(mine) for mine, kind in enumerate(NOTING, start=1)]
    cascade = Cascade(parts)
    cascade.bind(model)
    next(decode(model, cascade, [[5, 1], [5, 2], [5, 3], [5, 4]], DecodeOptions(max_new_tokens=4)))
    for row, part in enumerate(parts):
        (shown,) = part.shown
        assert shown == [[10 * part.mine + row if b == row else -1] for b in range(4)]


def test_states_are_read_of_one_drafter_alone() -> None:
    with pytest.raises(InputError, match="Eagle and Eagle read hidden states"):
        Cascade([Eagle(), Eagle()])
    late = Cascade([Suffix(), Eagle3()])
    late.bind(target())
    assert late.signals == late.parts[1].signals


def test_a_cascade_within_one_is_its_parts() -> None:
    """As `live --then A+B` makes: inside, all drafts would have one origin."""
    model, inner = target(), Cascade([sometimes(3, 4), draft_model(3, length=3)])
    cascade = Cascade([PredictionDrafter(), inner])
    assert cascade.parts[1:] == inner.parts
    cascade.bind(model)
    seen: set[int] = set()
    options = DecodeOptions(max_new_tokens=60, ignore_end=True)
    for step in decode(model, cascade, [NEW], options):
        seen.update(step.origins[0])
        assert step.accepted[0] == step.offered_depth[0]
    assert {2, 3} <= seen


@pytest.mark.parametrize("tree", [None, parse_tree("2,2,1")], ids=["chains", "a tree"])
def test_each_token_says_whose_draft_it_was(tree: TreeShape | None) -> None:
    """Held against the origins that the steps give; of two of one class the second has a number."""
    model = target()
    cascade = Cascade([Suffix(), draft_model(8, length=2), draft_model(3, length=2)])
    cascade.bind(model)
    names = {0: "Suffix", 2: "Independent", 3: "Independent 2"}
    steps: list[list[tuple[int, tuple[int, ...]]]] = [[], []]

    def note(step: DecodeStep, numbers: range) -> None:
        for number in numbers:
            steps[number].append((len(step.emitted[number]), step.origins[number]))

    options = DecodeOptions(max_new_tokens=40, ignore_end=True, shape=tree)
    found = generate(model, cascade, [REPEATED, NEW], options, batch_size=2, on_step=note)
    for one, taken in zip(found, steps, strict=True):
        expected: list[str | None] = []
        for count, origins in taken:
            expected += [names[origin] for origin in origins] + [None] * (count - len(origins))
        assert list(one.sources) == expected and len(one.sources) == len(one.token_ids)
        assert [name is not None for name in one.sources] == list(one.accepted_mask)
        drafted = Counter(name for name in one.sources if name is not None)
        assert one.metrics.by_source == {name: drafted[name] for name in names.values()}
    both = found[0].metrics + found[1].metrics
    assert list(both.by_source) == list(names.values())
    assert sum(both.by_source.values()) == both.accepted > 0
    if tree is not None:  # of chains the first draft model has every one that suffix has not
        assert both.by_source["Independent 2"] > 0, "the target itself drafted nothing"


def test_both_origins_of_a_prediction_are_one_source() -> None:
    """Where it stands from the start, and where it was found again."""
    model = target()
    cascade = load_drafter("prediction+suffix")
    cascade.bind(model)
    options = DecodeOptions(max_new_tokens=24, ignore_end=True)
    (plain,) = generate(model, NoDrafter(), [NEW], options)
    text = list(plain.token_ids)
    text[4] = (text[4] + 1) % V  # behind it the prediction is found again
    (made,) = generate(model, cascade, [NEW], options, predictions=[text])
    assert {0, 1} <= made.metrics.by_origin.keys()
    counts = Counter(made.sources)
    own = {name: counts[name] for name in ("prediction", "suffix")}
    assert made.metrics.by_source == own and own["prediction"] > 10


def test_a_drafter_that_is_one_source_names_none() -> None:
    model, drafter = target(), draft_model(3)
    drafter.bind(model)
    (made,) = generate(model, drafter, [NEW], DecodeOptions(max_new_tokens=12))
    assert made.metrics.accepted and made.sources == () and made.metrics.by_source == {}


def test_a_cascade_within_one_keeps_the_names_of_its_parts() -> None:
    inner = load_drafter("suffix+prompt_lookup")
    names = Cascade([PredictionDrafter(), inner], ["prediction", "inner"]).sources
    assert names == ("prediction", "prediction", "suffix", "prompt_lookup")


def one_model_twice() -> list[Drafter]:
    model = draft_model(3)
    return [model, Suffix(), model]


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: [Suffix(), Suffix()], "Suffix"),
        (lambda: [Suffix(), PromptLookup(), Suffix(Suffix.Config(min_match=4))], "Suffix"),
        (one_model_twice, "Independent"),
        (lambda: [Suffix(), load_drafter("prompt_lookup+suffix")], "suffix"),
        (lambda: [Medusa(Medusa.Config(source="a")) for _ in range(2)], "Medusa"),
        (lambda: [Medusa(Medusa.Config(source=one)) for one in ("a", "./b/../a")], "Medusa"),
    ],
    ids=["one kind", "other options", "one object", "within another", "one folder", "as written"],
)
def test_one_source_twice_is_refused(build: Callable[[], list[Drafter]], name: str) -> None:
    with pytest.raises(InputError, match=f"names {name} twice: name each source once"):
        Cascade(build())


def test_one_source_twice_is_refused_before_anything_is_loaded() -> None:
    """By the options alone, also where neither folder exists."""
    with pytest.raises(InputError, match="names the kind independent twice: name each"):
        DraftingConfig().check_assignments(("independent:no/a+independent:no/b",))


@pytest.mark.parametrize("name", ["mine+mine", "mine+other", "suffix+mine", "mine+nothing"])
def test_a_folder_in_a_cascade_is_to_be_written_with_its_kind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "mine", tmp_path / "other"):
        folder.mkdir()
        (folder / "drafter.json").write_text('{"kind": "hass", "options": {}}')
    with pytest.raises(InputError, match=r"write hass:mine, and name each source once"):
        load_drafter(name)


def test_a_draft_models_folder_in_a_cascade_is_to_be_written_with_its_kind(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"write independent:{tmp_path}"):
        load_drafter(f"{tmp_path}+{tmp_path}")


def test_predictions_reach_the_drafter_that_reads_them() -> None:
    cascade = Cascade([PredictionDrafter(), Suffix()])
    assert cascade.reads_predictions
    model = target()
    cascade.bind(model)
    options = DecodeOptions(max_new_tokens=12, ignore_end=True)
    plain, _ = text_of(NoDrafter())
    steps = list(decode(model, cascade, [REPEATED], options, predictions=[plain[0][:12]]))
    assert len(steps) < 6


def test_names_join_drafters() -> None:
    assert cascade_parts("suffix+hass:a/b") == ["suffix", "hass:a/b"]
    assert cascade_parts("independent:runs/a+b") == ["independent:runs/a+b"]
    assert cascade_parts("runs/a+b") == ["runs/a+b"]
    drafter = load_drafter(
        "suffix+prompt_lookup", ["suffix.min_match=3", "prompt_lookup.max_ngram=5"]
    )
    assert isinstance(drafter, Cascade)
    assert [type(part) for part in drafter.parts] == [Suffix, PromptLookup]
    assert drafter.parts[0].config.min_match == 3 and drafter.parts[1].config.max_ngram == 5


def test_a_path_with_a_plus_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suffix+none").mkdir()
    assert cascade_parts("suffix+none") == ["suffix+none"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("suffix+suffix", [], "names the kind suffix twice: name each source once"),
        ("d_eagle+d_eagle", [], "its part 'd_eagle' is no drafter .*KIND:FOLDER"),
        ("suffix+sufix", [], "its part 'sufix' is no drafter"),
        ("a/b+c/d", [], "does not exist"),
        ("suffix+none", [], "drafts nothing"),
        ("suffix+lookahead", [], "use it alone"),
        ("suffix+hass", [], "needs a model"),
        ("suffix+prompt_lookup", ["length=3"], "KIND.KEY=VALUE"),
        ("suffix+prompt_lookup", ["hass.length=3"], "KIND one of suffix, prompt_lookup"),
        ("suffix+prompt_lookup", ["suffix.lenght=3"], "length"),
    ],
)
def test_bad_cascades_are_refused(name: str, options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_drafter(name, options)


def test_block_takes_a_cascade_whose_later_drafter_has_a_length() -> None:
    """`--draft-length` is the first one's; the error says what is the other's."""
    model, options = target(), DecodeOptions(max_new_tokens=12, ignore_end=True, rule="block")
    trees, chains = (Cascade([Suffix(), Eagle(Eagle.Config(length=n))]) for n in (0, 2))
    trees.bind(model)
    with pytest.raises(UnsupportedProposal, match=r"--drafter-option KIND\.length=N"):
        list(decode(model, trees, [NEW], options))
    chains.bind(model)
    assert sum(sum(step.proposed) for step in decode(model, chains, [NEW], options)) > 0


def test_what_lookups_find_are_no_draws() -> None:
    """`auto` judges by the draws alone: a long match beside them changes no rule."""
    shape, drawing = TreeShape.chain(8), Eagle(Eagle.Config(draw_length=2))
    for lookup in (Suffix(), PromptLookup(), Recycling(), PredictionDrafter()):
        assert lookup.longest_draw(shape) == 0
        assert Cascade([lookup, drawing]).longest_draw(shape) == 2
    assert Lookahead().longest_draw(shape) == NoDrafter().longest_draw(shape) == 0
    assert Cascade([drawing, Suffix()]).longest_draw(shape) == 2
    assert Cascade([Suffix(), PromptLookup()]).longest_draw(shape) == 0
    assert Eagle(Eagle.Config(draw_length=0)).longest_draw(shape) == 8


def test_a_cascade_does_not_learn() -> None:
    with pytest.raises(InputError, match="learns by itself"):
        make_drafter("suffix+hass")


def test_options_of_several_names_find_their_cascade() -> None:
    options = DraftingConfig(drafter_option=("suffix.min_match=3", "prompt_lookup.length=4"))
    names = ("suffix+prompt_lookup", "prompt_lookup")
    options.check_assignments(names)
    assert options.assignments(names[0], alone=False) == options.drafter_option
    assert options.assignments(names[1], alone=False) == ("length=4",)
    with pytest.raises(InputError, match="say which drafter"):
        DraftingConfig(drafter_option=("hass.length=4",)).check_assignments(names)


def test_a_generator_takes_a_cascade() -> None:
    generator = Generator(target(), "suffix+prompt_lookup", drafter_options={"suffix.min_match": 3})
    plain = Generator(target())
    text = [list(REPEATED)]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    drafted, expected = (one.generate(text, params)[0] for one in (generator, plain))
    assert drafted.token_ids == expected.token_ids
