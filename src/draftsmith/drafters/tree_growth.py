"""Growing a draft tree, level by level, from the scores of a `Reader`.

    fed in    first: what the model does not       then the nodes that have children, one level
              know yet, up to the root             per forward, each seeing its ancestors

The nodes of a tree of fixed shape do not depend on the model, and their order is the shape's (level
by level, siblings adjacent). A dynamic tree follows the model's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.config import LARGEST, require
from draftsmith.core.cache import KVCache, lay_out, right_aligned
from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import History, Sampler, highest, require_finite
from draftsmith.core.transfer import to_device
from draftsmith.core.trees import depths, history_at, levels, sees, shape_parents
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, Signals, TreeShape
from draftsmith.drafters.base import TextState
from draftsmith.drafters.columns import Columns
from draftsmith.targets.base import Target, feed_beginning, stay_inside
from draftsmith.targets.native.engine import Draws, engine_of


class Reader(Protocol):
    """A draft model that reads a tree, level by level, behind its known tokens."""

    @property
    def columns(self) -> Columns:
        """The tokens that its D logits are of."""
        ...

    def root(self) -> Tensor:
        """[B, D] logits behind the last known token."""
        ...

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """In place of `root` and `level`: chains of the most probable tokens, or of draws, as deep
        as each row may draft; all but the last of the longest were fed. None: it has no faster way
        to them, and draws nothing. `confidence`: see `ChildSelection`."""
        ...

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        """[B, F, D] logits behind F nodes of the next depth; [B, 1, D] if all have the same.

        Args:
            see_BFC: which of the C nodes fed so far, these F at the end, each of them sees.
            above_BF: each one's parent among the nodes of the level before (0: the root).
        """
        ...


MakesDraws = Callable[[int], Draws]
"""The draws of a chain of so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """What a reader drafted by itself."""

    tokens_BN: Tensor
    law_BND: Tensor | None
    """Probabilities that each token was drawn with, by the reader's columns; None: it was not."""
    count_B: np.ndarray
    """Tokens of each row's chain, no more than it may draft; what stands behind them is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabularies:
    """How the draft model's ids and the target's correspond."""

    size: int
    """Number of tokens in the target's vocabulary."""
    to_draft: Callable[[Tensor], Tensor]
    """Target ids -> ids that the draft model is fed."""
    to_target: Callable[[Tensor, float], Tensor]
    """What [.., Vd] draft ids have, such as logits -> what the target's [.., size] have; the number
    given where the draft model has no token."""
    known: int
    """How many of the draft model's ids, the first ones, the target has."""
    target_ids: Callable[[Tensor], Tensor] = lambda ids: ids
    """Draft ids -> the target's."""
    ids_on: Callable[[torch.device], Tensor] | None = None
    """[Vd] the target's ids of all draft ids on a device, where they ascend: draft logits are then
    searched as they are; None: as `to_target` gives them."""


class ModelReader:
    """Reads with a language model over its own cache; its tokens may be other than the target's.

    cache columns   [ ... known tokens ... root | n0 n1 | n2 n3 ... ]
                      committed                   staged, in the order in which they were fed
    """

    def __init__(
        self,
        model: Target,
        cache: KVCache,
        known: Sequence[Sequence[int]],
        vocabularies: Vocabularies,
    ) -> None:
        self._model, self._cache, self._known = model, cache, known
        self._vocabularies = vocabularies
        ids_on = vocabularies.ids_on
        self.columns = Columns(vocabularies.size, None if ids_on is None else ids_on(model.device))
        self._depth = 0

    def chain(
        self, depth_B: np.ndarray, draws: MakesDraws | None, confidence: float
    ) -> Chain | None:
        """See `Reader`."""
        engine = engine_of(self._model)
        if engine is None:
            return None
        known = self._vocabularies
        chosen_BN, own_BND, count_B = engine.chain(
            self._cache,
            *right_aligned(self._pending()),
            depth_B,
            most=known.known,
            limit=self._model.max_length,
            draws=None if draws is None else draws(int(depth_B.max())),
            confidence=confidence,
        )
        return Chain(
            tokens_BN=known.target_ids(chosen_BN),
            law_BND=None if own_BND is None else self._own(own_BND, 0.0),
            count_B=count_B,
        )

    def root(self) -> Tensor:
        """Feed and commit what the cache lacks of the known tokens."""
        fed, block = lay_out(self._cache, self._pending())
        stay_inside(self._model, block)
        logits_BNV = self._model.forward(torch.from_numpy(fed), block, 1, Signals()).logits_BNV
        self._cache.commit(block.pending_B)
        return self._own(logits_BNV[:, -1])

    def _own(self, values: Tensor, missing: float = -torch.inf) -> Tensor:
        """[.., D]: the draft model's logits, or probabilities, by `columns`; `missing` where it has
        no token."""
        if self._vocabularies.ids_on is not None:
            return values
        wide = self._vocabularies.to_target(values.reshape(-1, values.shape[-1]), missing)
        return wide.reshape(*values.shape[:-1], -1)

    def _pending(self) -> Sequence[Sequence[int]]:
        """The last known tokens that the cache lacks; what lies before them is fed."""
        pending: Sequence[Sequence[int]] = [
            self._vocabularies.to_draft(torch.tensor(row[int(have) :], dtype=torch.long)).tolist()
            for row, have in zip(self._known, self._cache.lengths_B, strict=True)
        ]
        return feed_beginning(self._model, self._cache, pending)

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        """See `Reader`; the parents' states are in the cache, so `above_BF` is not needed."""
        depth_BF = np.full(tokens_BF.shape, self._depth, dtype=np.int64)
        self._depth += 1
        block = self._cache.stage(depth_BF, see_BFC)
        stay_inside(self._model, block)
        fed = self._vocabularies.to_draft(tokens_BF)
        count = tokens_BF.shape[1]
        return self._own(self._model.forward(fed, block, count, Signals()).logits_BNV)


def grow_dynamic(
    reader: Reader, shape: TreeShape, depth_B: np.ndarray, *, rated: bool = False
) -> DraftTree:
    """The best `shape.keep` nodes by the draft model's probabilities (EAGLE-2, arXiv 2406.16858),
    found where the reader's logits are.

    A path's score is the sum of log q along it. At every depth the `width` best beams live on and
    each gets `width` children; all children, not only the beams among them, go to a pool. The
    `keep` best of the pool are proposed:

        depth 1    a b        pool   a b | c d e f     width 2, keep 4: the best four of the six
        depth 2    a: c d            0 1   2 3 4 5     scores never rise along a path and of equals
                   b: e f                              the earlier wins, so parents are kept, too

    A row's pool ends at its own depth, however deep its neighbours draft.

    The choice depends on the draft model alone, never on the verifier's noise: opaque, and exact.
    `rated`: see `ChildSelection`.
    """
    assert shape.keep is not None
    width, columns = shape.widths[0], reader.columns
    logits_BD = reader.root()
    score_BP, token_BP = _best(logits_BD[:, None], width, columns)
    score_BP, token_BP = score_BP[:, 0], token_BP[:, 0]
    depth_P = [1] * token_BP.shape[1]
    parent_BP = torch.full_like(token_BP, ROOT)
    fed_BP = torch.full_like(token_BP, -1)
    beam_BF = torch.arange(token_BP.shape[1], device=token_BP.device).expand_as(token_BP)
    above_BF = torch.zeros_like(beam_BF)
    see_BFC = torch.zeros((*beam_BF.shape, 0), dtype=torch.bool, device=token_BP.device)
    fed = 0
    for depth, width in enumerate(shape.widths[1:], start=2):
        count = beam_BF.shape[1]
        itself = torch.eye(count, dtype=torch.bool, device=see_BFC.device)
        see_BFC = torch.cat([see_BFC, itself.expand(len(see_BFC), -1, -1)], dim=2)
        numbers_F = torch.arange(fed, fed + count, device=fed_BP.device)
        fed_BP = fed_BP.scatter(1, beam_BF, numbers_F.expand_as(beam_BF))
        fed += count
        logits_BFD = reader.level(token_BP.gather(1, beam_BF), see_BFC, above_BF)
        best = _best(logits_BFD, width, columns)
        log_q_BFK, child_BFK = (one.expand(-1, count, -1) for one in best)
        child_score = (score_BP.gather(1, beam_BF)[..., None] + log_q_BFK).flatten(1)
        start = token_BP.shape[1]
        depth_P += [depth] * child_score.shape[1]
        token_BP = torch.cat([token_BP, child_BFK.flatten(1)], dim=1)
        score_BP = torch.cat([score_BP, child_score], dim=1)
        parents = beam_BF[..., None].expand_as(child_BFK).flatten(1)
        parent_BP = torch.cat([parent_BP, parents], dim=1)
        fed_BP = torch.cat([fed_BP, torch.full_like(parents, -1)], dim=1)
        chosen_BF = _first(child_score, width)
        above_BF = chosen_BF // child_BFK.shape[2]
        beam_BF = start + chosen_BF
        see_BFC = see_BFC.gather(1, above_BF[..., None].expand(-1, -1, see_BFC.shape[2]))
    if (depth_B < shape.depth).any():
        beyond_BP = to_device(np.array(depth_P) > depth_B[:, None], score_BP.device)
        score_BP = score_BP.masked_fill(beyond_BP, -torch.inf)
    kept_BN = _first(score_BP, min(shape.keep, score_BP.shape[1])).sort(dim=1).values
    score_BN, parent_BN = score_BP.gather(1, kept_BN), parent_BP.gather(1, kept_BN)
    prob_BN = None
    if rated:
        above_BN = score_BP.gather(1, parent_BN.clamp(min=0)).masked_fill(parent_BN == ROOT, 0.0)
        prob_BN = (score_BN - above_BN).exp()
    place_BN = torch.searchsorted(kept_BN, parent_BN.clamp(min=0))
    parent_BN = torch.where(parent_BN == ROOT, ROOT, place_BN)
    # too deep, or a padded draft model has run out of tokens
    parent_BN = parent_BN.masked_fill(score_BN == -torch.inf, PADDING)
    return DraftTree(
        tokens_BN=token_BP.gather(1, kept_BN),
        parents_BN=parent_BN,
        proposal=Proposal.OPAQUE,
        fed_BN=fed_BP.gather(1, kept_BN),
        prob_BN=prob_BN,
    )


def _best(logits_BFD: Tensor, count: int, columns: Columns) -> tuple[Tensor, Tensor]:
    """(log q, tokens) [B, F, count] of the most probable tokens."""
    precise = logits_BFD if logits_BFD.dtype == torch.float64 else logits_BFD.float()
    top, column = _top(precise, min(count, precise.shape[-1]))
    return top - precise.logsumexp(-1, keepdim=True), columns.tokens(column)


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(scores, columns) [.., count] of the highest, downwards; of equal ones the lowest columns. A
    device breaks ties as its topk does: to look for them would be to wait for it."""
    if scores.device.type != "cpu":
        values, columns = scores.topk(count, dim=-1)
        return values, columns
    values, columns = scores.topk(min(count + 1, scores.shape[-1]), dim=-1)
    if bool((values[..., 1:] == values[..., :-1]).any()):
        values, columns = (
            one.view(*scores.shape[:-1], -1) for one in highest(scores.flatten(0, -2), count)
        )
    return values[..., :count], columns[..., :count]


def _first(score_BP: Tensor, count: int) -> Tensor:
    """[B, count] places of the largest, equal ones in order."""
    return score_BP.sort(dim=1, descending=True, stable=True).indices[:, :count]


Choice = Literal["sampled", "without_replacement", "greedy"]
COLDEST, HOTTEST = 0.1, 10.0
"""Bounds of `draft_temperature`."""
PROPOSALS: dict[Choice, Proposal] = {
    "sampled": Proposal.SAMPLED,
    "without_replacement": Proposal.WITHOUT_REPLACEMENT,
    "greedy": Proposal.OPAQUE,
}


@lru_cache(maxsize=64)
def drawing(sampler: Sampler, draft_temperature: float) -> Sampler:
    """The sampler of draws at `draft_temperature` times the text's temperature, which are verified
    by the laws that it gives. At temperature 0 there are no draws."""
    if sampler.temperature == 0 or draft_temperature == 1:
        return sampler
    own = sampler.temperature * draft_temperature
    return replace(sampler, temperature=min(max(own, 1 / LARGEST), LARGEST))


@dataclass(frozen=True, slots=True)
class ChildSelection:
    """How children are chosen behind the known tokens of a state."""

    choice: Choice
    sampler: Sampler
    """It makes the laws of the draws; see `drawing`."""
    noise: Noise
    texts: TextState
    confidence: float = 0.0
    """A chain ends behind the token that makes it, by the drafter's own laws at the temperature of
    its draws (1 where it takes the best), less probable than this. What is drafted before decides
    that, never the token that would follow: no law of a draw is touched."""
    draw_length: int = 0
    """A chain of draws ends behind so many tokens, whatever its confidence; 0: it does not."""
    rated: bool = False
    """A tree of the most probable tokens says how probable they are, in `DraftTree.prob_BN`."""
    believed: Callable[[], Tensor] | None = None
    """In place of these laws: [B] how probable it is that the token behind those read last is
    accepted. It knows the tokens before, not that one. None: the laws say."""

    @property
    def names_tokens(self) -> bool:
        """Options of the sampler change logits by the ids of tokens."""
        return self.sampler.needs_history or bool(self.sampler.logit_bias)

    @property
    def reads_logits_alone(self) -> bool:
        """A chain's tokens are the best by their logits, or draws from softmax(logits / T)."""
        greedy = self.choice == "greedy" and not self.names_tokens
        return greedy or self.sampler.reads_logits_alone

    def draws(self, steps: int) -> Draws:
        """What decides the tokens of a chain, the n-th of which is node n of its tree."""
        rows = len(self.texts.known)
        node = np.tile(np.arange(steps), rows)
        each = self.noise.uniform(np.repeat(np.arange(rows), steps), node, Purpose.DRAFT, node)
        return Draws(temperature=self.sampler.temperature, uniform_BN=each.reshape(rows, steps))

    def histories(
        self, tokens_BN: Tensor, parents_N: np.ndarray, nodes: np.ndarray
    ) -> list[History]:
        """The tokens before each node's law, row by row; empty unless the sampler reads them."""
        if not self.sampler.needs_history:
            return []
        drafted_BN = tokens_BN.cpu().numpy()
        return [
            history_at(History(tokens=known, num_prompt=num_prompt), drafted_BN[b], parents_N, n)
            for b, (known, num_prompt) in enumerate(
                zip(self.texts.known, self.texts.num_prompt, strict=True)
            )
            for n in nodes.tolist()
        ]


def inside_context(
    depth_B: np.ndarray, texts: Sequence[Sequence[int]], draft: Target
) -> np.ndarray:
    """[B] how deep each row may draft behind its text: as deep as it is asked and the draft model
    knows positions. The last of those gives one token more; a text that has outgrown them none."""
    if draft.max_length is None:
        return depth_B
    left_B = draft.max_length - np.array([len(text) for text in texts])
    return np.where(left_B < 0, 0, np.minimum(depth_B, left_B + 1))


def grow(reader: Reader, shape: TreeShape, depth_B: np.ndarray, how: ChildSelection) -> DraftTree:
    """Draft a tree; its numbers stay where the reader's logits are. What lies deeper than a row may
    draft (`depth_B`) is padding.

    A shape that follows the model takes its top tokens, whatever `how` asks for; so does every
    draft at temperature 0, where a law is one token and draws would leave its siblings nothing.
    """
    if shape.is_dynamic:
        return grow_dynamic(reader, shape, depth_B, rated=how.rated)
    if how.sampler.temperature == 0:
        how = replace(how, choice="greedy")
    elif how.draw_length and how.choice != "greedy" and shape.is_chain:
        shape = shape.clip(how.draw_length)
        depth_B = np.minimum(depth_B, shape.depth)
        how = replace(how, confidence=0.0)
    if shape.is_chain and how.reads_logits_alone:
        draws = None if how.choice == "greedy" else how.draws
        found = reader.chain(np.minimum(depth_B, shape.depth), draws, how.confidence)
        if found is not None:
            return _tree_of(found, how, reader.columns)
    return _grow_fixed(reader, shape, depth_B, how)


def _tree_of(chain: Chain, how: ChildSelection, columns: Columns) -> DraftTree:
    """The chain that a reader drafted by itself: all but its last node were fed."""
    steps = chain.tokens_BN.shape[1]
    parents_BN, fed_BN, q_rows_BN = _chain_nodes(tuple(chain.count_B.tolist()), steps)
    law = None
    if chain.law_BND is not None:
        law_RD = chain.law_BND.flatten(0, 1)
        require_finite(law_RD.sum(-1))
        law = columns.named(Law(law_RD, columns.count))
    return DraftTree(
        tokens_BN=chain.tokens_BN,
        parents_BN=parents_BN,
        proposal=PROPOSALS[how.choice],
        q=law,
        q_rows_BN=None if law is None else q_rows_BN,
        fed_BN=fed_BN,
    )


@lru_cache(maxsize=128)
def _chain_nodes(counts: tuple[int, ...], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N] of chains of these lengths: parents, which of the fed tokens each node was, rows of
    their laws. Trees share them: they are not to be changed."""
    node_N = torch.arange(steps)
    parents_BN = (node_N - 1).where(node_N < torch.tensor(counts)[:, None], PADDING)
    fed_BN = node_N.where(node_N < steps - 1, -1).repeat(len(counts), 1)
    return parents_BN, fed_BN, torch.arange(len(counts) * steps).view(-1, steps)


def _grow_fixed(
    reader: Reader, shape: TreeShape, depth_B: np.ndarray, how: ChildSelection
) -> DraftTree:
    num_rows, template = len(how.texts.known), np.array(shape_parents(shape), dtype=np.int64)
    num_nodes = len(template)
    see_NN = sees(template[None])[0]
    q_rows = np.zeros((num_rows, num_nodes + 1), dtype=np.int64)
    fed = np.full(num_nodes, -1, dtype=np.int64)
    laws: list[Law] = []
    order: list[int] = []
    before = np.array([ROOT])
    ends = Ends(depth_B, how.confidence) if shape.is_chain and how.confidence else None
    columns, logits_BFD = reader.columns, reader.root()[:, None]
    device = logits_BFD.device
    # one column more: children that a ragged level does not have are written there
    tokens_BN = torch.zeros((num_rows, num_nodes + 1), dtype=torch.long, device=device)
    spent_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
    rated = how.rated and how.choice == "greedy"
    prob_BN = torch.zeros_like(tokens_BN, dtype=torch.float64) if rated else None
    for depth, level in enumerate(levels(shape)):
        if depth > 0:
            nodes = level.frontier_F
            above = np.searchsorted(before, template[nodes])  # nodes ascend within a level
            fed[nodes] = len(order) + np.arange(len(nodes))
            order += nodes.tolist()
            logits_BFD = reader.level(
                tokens_BN[:, to_device(nodes, device)],
                torch.from_numpy(see_NN[nodes][:, order]).expand(num_rows, -1, -1),
                torch.from_numpy(above).expand(num_rows, -1),
            ).expand(-1, len(nodes), -1)
        before = level.frontier_F
        scores_RD = logits_BFD.reshape(-1, logits_BFD.shape[-1])
        kids_FW = to_device(level.kids_FW, device)
        before_R = how.histories(tokens_BN, template, level.frontier_F)
        if how.choice == "greedy":
            known = columns
            if how.names_tokens or shape.widest > columns.count:
                scores_RD, known = columns.widened(scores_RD), Columns(columns.vocab_size)
            scores_RD = how.sampler.penalised(scores_RD, before_R)
            require(
                shape.widest <= scores_RD.shape[1],
                f"the draft has nodes with {shape.widest} children, but there are only "
                f"{scores_RD.shape[1]} tokens: ask for a narrower tree",
            )
            top_RW, column_RW = _top(scores_RD, kids_FW.shape[1])
            drawn_RW = known.tokens(column_RW)
            if prob_BN is not None:
                log_RW = top_RW.double() - scores_RD.double().logsumexp(-1, keepdim=True)
                prob_BN[:, kids_FW] = log_RW.exp().view(num_rows, *kids_FW.shape)
        else:
            law = _law(how, scores_RD, before_R, columns)
            rows = np.repeat(np.arange(num_rows), len(level.frontier_F))
            kids = np.tile(level.kids_FW, (num_rows, 1))
            first = sum(part.num_rows for part in laws)
            q_rows[rows[:, None], kids] = (first + np.arange(len(rows)))[:, None]
            laws.append(law)
            drawn_RW, spent_RW = _draw(law, how, rows, depth, kids)
            spent_BN[:, kids_FW] = spent_RW.view(num_rows, *kids_FW.shape)
        tokens_BN[:, kids_FW] = drawn_RW.view(num_rows, *kids_FW.shape)
        if ends is not None and ends.reached(
            _believed(how, laws, scores_RD, drawn_RW) if how.believed is None else how.believed()
        ):
            num_nodes = depth + 1
            break
    template = template[:num_nodes]
    too_deep_BN = depths(template[None]) > depth_B[:, None]
    parents_BN = torch.from_numpy(np.where(too_deep_BN, PADDING, template))
    if ends is not None:
        parents_BN = to_device(parents_BN, device).masked_fill(ends.passed_BN(), PADDING)
    if how.choice == "without_replacement":
        some = slice(num_nodes)
        parents_BN = _without_spent(parents_BN, spent_BN[:, some], see_NN[some, some])
    return DraftTree(
        tokens_BN=tokens_BN[:, :num_nodes].contiguous(),
        parents_BN=parents_BN,
        proposal=PROPOSALS[how.choice],
        q=Law.cat(laws) if laws else None,
        q_rows_BN=torch.from_numpy(q_rows[:, :num_nodes].copy()) if laws else None,
        fed_BN=torch.from_numpy(fed[:num_nodes]).repeat(num_rows, 1),
        prob_BN=None if prob_BN is None else prob_BN[:, :num_nodes],
    )


class Ends:
    """Where chains end that have become less probable than `confidence`: a token is drafted or not
    by what stands before it, so the laws of draws stay what they are.

    On a CPU drafting ends with the last chain. A device is not waited for: it drafts all tokens,
    and those behind an end become padding.
    """

    def __init__(self, depth_B: np.ndarray, confidence: float) -> None:
        self._depth_B, self._confidence = depth_B, confidence
        self._sure: list[Tensor] = []  # [B] how probable the chain is, by its length

    def reached(self, prob_B: Tensor) -> bool:
        """Take in the next token's probability; whether all chains are known to have ended."""
        self._sure.append(prob_B * self._sure[-1] if self._sure else prob_B)
        if prob_B.device.type != "cpu":
            return False
        doubtful_B = (self._sure[-1] < self._confidence).numpy()
        return bool((doubtful_B | (self._depth_B <= len(self._sure))).all())

    def passed_BN(self) -> Tensor:
        """[B, N], which tokens stand behind the end of their chain."""
        before = torch.stack([torch.ones_like(self._sure[0]), *self._sure[:-1]], dim=1)
        return before < self._confidence


def _believed(
    how: ChildSelection, laws: Sequence[Law], scores_RD: Tensor, drawn_RW: Tensor
) -> Tensor:
    """[R] the probability of each token by the law that it was drawn from, or by the softmax of the
    scores that it is the best of."""
    if how.choice != "greedy":
        return laws[-1].prob(drawn_RW[:, 0]).double()
    return scores_RD.softmax(-1).amax(-1).double()


def _law(
    how: ChildSelection, scores_RD: Tensor, histories: Sequence[History], columns: Columns
) -> Law:
    """Made over the whole vocabulary, as the target's is: options name tokens, a nucleus asks how
    many there are, and a sum of other numbers, be they zeros, rounds otherwise."""
    scores_RV = columns.widened(scores_RD)
    if scores_RV.device.type == "cpu":
        return columns.narrowed(how.sampler.law(scores_RV, histories))
    # no wait for the device here: verification reads these laws later
    return columns.narrowed(how.sampler.law(scores_RV, histories, check=lambda top_R: None))


def _draw(
    law: Law, how: ChildSelection, rows: np.ndarray, depth: int, kids: np.ndarray
) -> tuple[Tensor, Tensor]:
    """(tokens, spent) [R, width]; spent: the support was used up, there is no such child."""
    drawn: list[Tensor] = []
    spent: list[Tensor] = []
    left = law
    for k in range(kids.shape[1]):
        token_R = left.draw(how.noise, rows, depth, Purpose.DRAFT, kids[:, k])
        spent_R = torch.zeros_like(token_R, dtype=torch.bool)
        if how.choice == "without_replacement":
            for earlier_R in drawn:
                spent_R |= earlier_R == token_R
            left = left.without(token_R)
        drawn.append(token_R)
        spent.append(spent_R)
    return torch.stack(drawn, dim=1), torch.stack(spent, dim=1)


def _without_spent(parents_BN: Tensor, spent_BN: Tensor, see_NN: np.ndarray) -> Tensor:
    """Children that there are none of, and all below them, are padding."""
    device = spent_BN.device
    sees_NN = to_device(see_NN.astype(np.float32), device)
    gone_BN = spent_BN.float() @ sees_NN.T > 0
    return to_device(parents_BN, device).masked_fill(gone_BN, PADDING)
