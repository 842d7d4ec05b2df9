"""`lookahead`: the window against the published drawing and update, the pool, the loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import geometry, limit_depth
from draftsmith.core.types import (
    PADDING,
    DraftTree,
    RequestBatch,
    TargetOutput,
    TreeShape,
    Verdict,
)
from draftsmith.drafters.base import Accepted, Drafter
from draftsmith.drafters.lookahead import Lookahead, Pool, trie, window_parents
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget, tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other


def test_the_drawing_of_the_window() -> None:
    w01, w02, w10, w11, w12 = range(5)
    #                                   w01 w02  w10  w11  w12  w20  w21  w22
    assert window_parents(3, 3) == (-1, w01, -1, w01, w02, w10, w11, w12)


@pytest.mark.parametrize(("width", "ngram"), [(3, 4), (7, 5), (1, 4), (4, 2), (2, 3)])
def test_the_windows_tree_gives_the_published_mask_and_positions(width: int, ngram: int) -> None:
    # published: row 0 without the root is W - 1 long, the others W: it is longer by lead = -1
    lead = -1
    places = [(0, i) for i in range(width + lead)]
    places += [(r, c) for r in range(1, ngram - 1) for c in range(width)]
    positions, sees = [], np.zeros((len(places), len(places)), dtype=bool)
    for n, (row, column) in enumerate(places):
        positions.append(1 + column if row == 0 else 1 + lead + column + row)
        for m, (other_row, other_column) in enumerate(places):
            if row == 0:
                sees[n, m] = other_row == 0 and other_column <= column
            elif other_row == 0:
                sees[n, m] = other_column <= column + lead
            else:
                sees[n, m] = other_column == column and other_row <= row
    parents = np.array([window_parents(ngram - 1, width)], dtype=np.int64)
    depth_BN, sees_BNN = geometry(parents)
    assert depth_BN[0].tolist() == positions  # counted from the root
    assert (sees_BNN[0] == sees).all()


def drafted(drafter: Drafter, state: object, shape: TreeShape, noise: Noise) -> DraftTree:
    return drafter.propose(state, shape, np.array([shape.depth]), Sampler(), noise)


def step(
    drafter: Drafter, state: object, target: TabularTarget, text: list[int], new: int = 1
) -> tuple[DraftTree, object]:
    """One step by hand: the target's logits on every node; the text grows by `new` tokens."""
    tree = drafted(drafter, state, drafter.default_shape, Noise(3, [0], [len(text)]))
    paths = [text]
    for token, parent in zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True):
        paths.append([*paths[1 + parent], token])
    logits = torch.stack([target.logits_after(path) for path in paths])[None]
    pending = [text[-1:]]
    emitted = []
    for _ in range(new):
        emitted.append(int(target.logits_after(text).argmax()))
        text.append(emitted[-1])
    nothing = torch.zeros(1, dtype=torch.long)
    accepted = Accepted(
        tree=tree,
        verdict=Verdict(path_BD=nothing[None], num_accepted_B=nothing, next_token_B=nothing),
        emitted=[emitted],
        pending=pending,
        out=TargetOutput(logits_BNV=logits),
    )
    return tree, drafter.advance(state, accepted)


@pytest.mark.parametrize(("width", "ngram"), [(3, 4), (7, 5), (1, 4), (4, 2), (2, 3)])
def test_window_and_pool_move_as_in_the_authors_code(width: int, ngram: int) -> None:
    """`past_tokens` and `token_map` of lade/decoding.py, in the authors' own layout."""
    target = TabularTarget(8, seed=2)
    drafter = Lookahead(
        Lookahead.Config(window=width, ngram=ngram, guesses=3, seed_from_prompt=False)
    )
    text = [1, 2, 3, 4, 5]
    state = drafter.start(RequestBatch(tokens=[text], request_ids=(0,), max_new_tokens=99))
    past: list[list[int]] = []
    token_map: dict[int, list[tuple[int, ...]]] = {}
    for number in range(14):
        before = list(text)
        tree, state = step(drafter, state, target, text)
        shape = [len(row) for row in past] or [width + ngram - 3]
        num_probes = sum(shape)
        ours = tree.tokens_BN[0].tolist()
        if not past:
            past = [ours[:num_probes]]
            assert set(past[0]) <= set(before), "row 0 begins as tokens of the prompt"
        assert ours[:num_probes] == [token for row in past for token in row], number
        assert tree.candidate_BN is not None
        assert not tree.candidate_BN[0, :num_probes].any()
        guesses, parents = trie(reversed(token_map.get(before[-1], [])), 99, num_probes)
        assert ours[num_probes:] == guesses
        assert tree.parents_BN[0, num_probes:].tolist() == parents

        # what the target says behind the last row: column i of row r stands behind row 0's first
        # i - 1 + (r > 0) tokens and its own column (the root is the column before row 0's first)
        def column(i: int, past: list[list[int]] = past, before: list[int] = before) -> list[int]:
            return [*before, *past[0][:i], *(row[i] for row in past[1:])]

        count = width if len(past) == ngram - 1 else len(past[0]) + 1
        new = [int(target.logits_after(column(i)).argmax()) for i in range(count)]
        if len(past) < ngram - 1:  # filling: every row loses its first place
            past = [row[1:] for row in past] + [new[1:]]
            continue
        for i in range(width):
            key = before[-1] if i == 0 else past[0][i - 1]
            gram = (*(row[i] for row in past[1:]), new[i])
            known = token_map.setdefault(key, [])
            if gram in known:
                known.remove(gram)
            known.append(gram)
            del known[:-3]
        past = [(past[1] if ngram > 2 else new)[1:], *past[2:], *([new] if ngram > 2 else [])]
    assert token_map


@pytest.mark.parametrize("shift", ["one", "accepted"])
def test_the_window_stays_whole_however_far_the_text_moves(shift: str) -> None:
    target = TabularTarget(8, seed=2)
    drafter = load_drafter("lookahead", ["window=4", "ngram=4", f"shift={shift}"])
    text = [1, 2, 3, 4, 5]
    state = drafter.start(RequestBatch(tokens=[text], request_ids=(0,), max_new_tokens=99))
    for number, new in enumerate([4, 1, 2, 4, 3, 4, 1]):
        tree, state = step(drafter, state, target, text, new)
        rows = min(number + 1, 3)
        num_probes = rows * (4 + 3 - rows) - 1
        assert tree.candidate_BN is not None
        assert (~tree.candidate_BN[0]).sum() == num_probes
        assert tree.num_nodes <= drafter.max_nodes(drafter.default_shape)


def test_a_window_that_was_cut_is_left_as_it_is() -> None:
    target = TabularTarget(8, seed=2)
    drafter = Lookahead(Lookahead.Config(guesses=0, seed_from_prompt=False))
    text = [1, 2, 3, 4, 5]
    state = drafter.start(RequestBatch(tokens=[text], request_ids=(0,), max_new_tokens=99))
    for _ in range(6):
        _, state = step(drafter, state, target, text)
    noise = Noise(3, [0], [len(text)])
    whole = drafted(drafter, state, drafter.default_shape, noise)
    for cut in (limit_depth(whole, np.array([2]), np.array([8])), DraftTree.empty(1)):
        nothing = torch.zeros(1, dtype=torch.long)
        state = drafter.advance(
            state,
            Accepted(
                tree=cut,
                verdict=Verdict(
                    path_BD=nothing[None], num_accepted_B=nothing, next_token_B=nothing
                ),
                emitted=[[6]],
                pending=[[5]],
                out=TargetOutput(logits_BNV=torch.randn(1, 1 + cut.num_nodes, 8)),
            ),
        )
        text.append(6)
        again = drafted(drafter, state, drafter.default_shape, noise)
        assert again.tokens_BN.tolist() == whole.tokens_BN.tolist()


def test_guesses_share_prefixes_and_are_cut_to_the_shape() -> None:
    guesses = [(1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 3)]
    assert trie(guesses, 3, 10) == ([1, 2, 3, 4, 5, 2, 3], [-1, 10, 11, 11, -1, 14, 15])
    assert trie(guesses, 1, 0) == ([1, 5], [-1, -1])
    assert trie([], 3, 4) == ([], [])


def test_the_pool_forgets_the_least_recently_seen() -> None:
    pool = Pool(2)
    for gram in [(1,), (2,), (1,), (3,)]:
        pool.add(0, gram)
    assert pool.behind(0) == [(3,), (1,)]
    assert pool.behind(9) == []
    unlimited = Pool(-1)
    for token in range(50):
        unlimited.add(0, (token,))
    assert len(unlimited.behind(0)) == 50


def test_probes_are_cut_by_the_context_and_candidates_by_the_draft_length() -> None:
    drafter = Lookahead(Lookahead.Config(window=3, ngram=3))
    request = RequestBatch(tokens=[[1, 2, 3, 1, 2, 3, 1]], request_ids=(0,), max_new_tokens=99)
    tree = drafted(drafter, drafter.start(request), TreeShape.chain(2), Noise(0, [0], [7]))
    assert tree.candidate_BN is not None
    assert tree.candidate_BN[0].tolist() == [False, False, False, True, True]
    cut = limit_depth(tree, np.array([1]), np.array([2]))
    assert (cut.parents_BN[0] != PADDING).tolist() == [True, True, False, True, False]


def test_options_are_checked() -> None:
    drafter = load_drafter("lookahead", ["window=4", "ngram=3", "guesses=-1"])
    assert drafter.config == Lookahead.Config(window=4, ngram=3, guesses=-1)
    assert drafter.default_shape == TreeShape.chain(2)
    for wrong in ({"window": 0}, {"ngram": 1}, {"guesses": -2}):
        with pytest.raises(InputError, match="lookahead needs"):
            Lookahead.Config(**wrong)


# ------------------------------------------------------------------ through the decoding loop

PROMPTS = ([1, 2, 3, 1, 2], [4], [5, 6, 7, 5, 6, 7, 5, 6, 7, 5])


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    rule: str = "auto",
    shape: TreeShape | None = None,
    ids: Sequence[int] | None = None,
    session: Session | None = None,
) -> tuple[list[list[int]], int]:
    """(generated tokens per row, drafted tokens accepted)"""
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature),
        max_new_tokens=40,
        seed=7,
        rule=rule,
        shape=shape,
    )
    out: list[list[int]] = [[] for _ in prompts]
    accepted = 0
    for each in decode(target, drafter, prompts, options, request_ids=ids, session=session):
        accepted += sum(each.accepted)
        for row, new in zip(out, each.emitted, strict=True):
            row.extend(new)
    return out, accepted


TARGETS = [
    TabularTarget(8, scale=4.0),
    TabularTarget(8, scale=4.0, end_ids=frozenset({0})),
    TabularTarget(8, scale=4.0, max_length=24),
    tiny_target(),
]


@pytest.mark.parametrize("target", TARGETS, ids=["plain", "end", "context", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        ["window=4", "ngram=4", "guesses=3"],
        ["window=3", "ngram=3", "guesses=-1", "shift=accepted", "seed_from_prompt=false"],
    ],
    ids=["seeded", "unseeded"],
)
@pytest.mark.every(3)
def test_text_is_that_of_plain_decoding_in_ragged_batches_and_alone(
    target: Target, temperature: float, options: list[str]
) -> None:
    drafter = load_drafter("lookahead", options)
    plain, _ = run(target, NoDrafter(), PROMPTS, temperature=temperature)
    batch, together = run(target, drafter, PROMPTS, temperature=temperature)
    assert batch == plain
    apart = 0
    for number, prompt in enumerate(PROMPTS):
        alone, accepted = run(target, drafter, [prompt], temperature=temperature, ids=[number])
        assert alone == [plain[number]]
        apart += accepted
    assert apart == together, "the draft of a row does not depend on its neighbours either"


def test_a_repetitive_text_is_accepted_at_every_temperature() -> None:
    target = TabularTarget(8, order=1, scale=30.0)  # so peaked that it runs in a circle
    for seeded in ("true", "false"):
        drafter = load_drafter("lookahead", [f"seed_from_prompt={seeded}"])
        for rule in ("match", "rejection"):
            for temperature in (0.0, 0.5):
                _, accepted = run(target, drafter, PROMPTS, temperature=temperature, rule=rule)
                assert accepted > 60, (seeded, rule, temperature)


def test_a_transformer_that_repeats_itself_is_drafted_by_its_own_window() -> None:
    drafter = load_drafter("lookahead", ["seed_from_prompt=false"])
    target = tiny_target(8, hidden=16)
    plain, _ = run(target, NoDrafter(), [[1, 2]])
    ours, accepted = run(target, drafter, [[1, 2]])
    assert ours == plain
    assert accepted > 0


def test_a_short_draft_still_has_the_whole_window() -> None:
    target = TabularTarget(8, order=1, scale=30.0)
    drafter = load_drafter("lookahead", ["seed_from_prompt=false"])
    plain, _ = run(target, NoDrafter(), PROMPTS)
    ours, accepted = run(target, drafter, PROMPTS, shape=TreeShape.chain(1))
    assert ours == plain
    assert accepted > 30


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_goes_on_from_a_longer_a_cut_and_another_text(temperature: float) -> None:
    target = TabularTarget(8, scale=4.0, end_ids=frozenset({0}))
    session, drafter = Session(), Lookahead()
    prompts = [list(prompt) for prompt in PROMPTS]
    for change in (lambda row: [*row, 3, 1], lambda row: row[: len(row) // 2 + 1], lambda row: [6]):
        plain, _ = run(target, NoDrafter(), prompts, temperature=temperature)
        ours, _ = run(target, drafter, prompts, temperature=temperature, session=session)
        assert ours == plain
        prompts = [change([*row, *new]) for row, new in zip(prompts, plain, strict=True)]


def test_what_was_learned_from_text_that_is_taken_back_is_forgotten() -> None:
    drafter = Lookahead(Lookahead.Config(window=1, ngram=3))
    request = RequestBatch(tokens=[[1, 2, 3, 1]], request_ids=(0,), max_new_tokens=9)
    state = drafter.start(request)

    def tokens_behind(text: list[int]) -> list[int]:
        tree = drafted(drafter, state, TreeShape.chain(2), Noise(0, [0], [len(text)]))
        assert tree.candidate_BN is not None
        return tree.tokens_BN[0][tree.candidate_BN[0]].tolist()

    assert tokens_behind([1, 2, 3, 1]) == [2, 3]
    state = state.rewind([[1, 2, 3, 1, 5, 6, 1]])
    assert tokens_behind([1, 2, 3, 1, 5, 6, 1]) == [5, 6, 2, 3]
    state = state.rewind([[1, 2, 3, 1]])
    assert tokens_behind([1, 2, 3, 1]) == [2, 3]
