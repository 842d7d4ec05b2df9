"""The decoding loop, once. Everything that generates text consumes it.

One step, for every row of the batch:

    propose          drafter -> tree below the root
    forward          pending tokens + tree through the target, one pass
    verify           walk the tree with the target's laws -> accepted path + one token
    commit           cache keeps pending + path; the new token is the next root
    advance          the drafter updates its state with the accepted tokens

Autoregressive decoding is this loop with an empty tree; prefill is a step whose pending part is the
prompt, so a drafter that needs no target signals drafts in it already.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.config import at_least, check_plain, require, require_kind, short
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.config import check_seed
from draftsmith.core.law import Noise
from draftsmith.core.rows import (
    Row,
    StopStrings,
    common_prefix,
    several,
    start_rows,
    token_ids,
    wanted,
)
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import Recorder
from draftsmith.core.trees import limit_depth, pad_nodes
from draftsmith.core.types import (
    DecodeStep,
    DraftTree,
    LengthPolicy,
    RequestBatch,
    Signals,
    TargetOutput,
    TreeShape,
    Verdict,
)
from draftsmith.core.verify import Rule, candidates, make_verdict
from draftsmith.core.verify_step import verify_rows
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.errors import InputError
from draftsmith.targets.base import Target, feed_beginning
from draftsmith.targets.native.engine import engine_of
from draftsmith.targets.threads import beside_engine


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """How to decode; the same for all rows of a batch."""

    sampler: Sampler = field(default_factory=Sampler)
    max_new_tokens: int = 128
    verifier_sampler: Sampler | None = None
    """Makes the laws that the rule reads; None: `sampler`, which drafters always follow."""
    rule: str | Rule = "auto"
    """`match`, `rejection`, `block`, `traversal`, or `auto`: match where a draft brings no q, block
    for drawn chains on a CPU whose laws nothing but a temperature shapes, else rejection. `typical`
    changes the law (`core/lossy_rules.py`) and wants `allow_lossy`."""
    shape: TreeShape | None = None
    """Shape of the draft; None: the drafter's default."""
    policy: LengthPolicy | None = None
    """Chooses the draft depth per row and step; None: always the shape's."""
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a row, beside the target's end tokens."""
    ignore_end: bool = False
    """Generate past end tokens (for measurements)."""
    allow_lossy: bool = False
    """Leave to use a rule after which the output law is not the target's."""
    static_shapes: bool = False
    """Fill every draft up with padding to its largest size: the target's forward then sees few
    shapes (the key view grows in buckets anyway), as a compiled forward wants."""

    def __post_init__(self) -> None:
        check_plain(self)
        at_least(1, "max_new_tokens", self.max_new_tokens)
        check_seed(self.seed)
        require_kind("sampler", self.sampler, Sampler, ", such as Sampler.from_params(params)")
        if self.verifier_sampler is not None:
            require_kind("verifier_sampler", self.verifier_sampler, Sampler)
        if self.shape is not None:
            require_kind("shape", self.shape, TreeShape, ", such as TreeShape.chain(4)")
        if self.policy is not None:
            require_kind("policy", self.policy, LengthPolicy, " (see draftsmith.plan)")
        require(
            isinstance(self.rule, str)
            or (hasattr(self.rule, "walk") and not isinstance(self.rule, type)),
            f"rule must be the name of a verification rule, or a Rule, got {short(self.rule)}",
        )
        require(
            isinstance(self.stop_strings, (tuple, list))
            and all(isinstance(text, str) for text in self.stop_strings),
            f"stop_strings must be a tuple of texts, got {short(self.stop_strings)}",
        )


@dataclass(kw_only=True, slots=True)
class Session:
    """Cache and drafter state that outlive a call of `decode`, for prompts that share a beginning.

    A later call reuses each row's longest common prefix of tokens; what was computed beyond it is
    forgotten. The number of rows, the target and the drafter stay the same, and a call that another
    one has gone on from is at its end.
    """

    cache: KVCache | None = None
    state: DraftState | None = None
    tokens: list[list[int]] | None = None
    """Per row, the tokens that the cache holds."""
    opened_with: tuple[Target, Drafter] | None = None
    """Whose cache and state these are; None: not known."""

    def clear(self) -> None:
        """Forget everything: the next call starts afresh, as behind an interrupted step."""
        self.cache = self.state = self.tokens = self.opened_with = None

    def check_opened_with(self, target: Target, drafter: Drafter) -> None:
        """Raise `InputError` where another target or drafter filled it."""
        if self.opened_with is None:
            return
        now = (("target", target), ("drafter", drafter))
        for (what, new), old in zip(now, self.opened_with, strict=True):
            require(
                old is new,
                f"This session was opened with another {what}: go on with that one, call "
                "session.clear() to begin anew, or take a new Session().",
            )


def check_target(target: object) -> None:
    """Raise `InputError` unless it is a model that can be decoded, not a name or a class."""
    require(
        hasattr(target, "new_cache") and not isinstance(target, type),
        f"target must be a loaded model, such as load_target gives, got {short(target)}",
    )


def _check_bound(drafter: Drafter, target: Target) -> None:
    """Raise `InputError` where what the drafter borrowed does not fit this target."""
    bound = drafter.bound_to
    if bound is None or bound is target:
        return
    differ = bound.vocab_size != target.vocab_size
    config = getattr(target, "config", None)
    if config is not None and drafter.signals != Signals():  # of the states that it reads
        measures = ("hidden_size", "num_hidden_layers")
        differ |= any(getattr(config, m, None) != getattr(bound.config, m, None) for m in measures)
    require(
        not differ,
        f"{type(drafter).__name__} is bound to another target than {target.name}, with another "
        "vocabulary or states of another size: call drafter.bind(target) first.",
    )


def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    *,
    request_ids: Sequence[int] | None = None,
    predictions: Sequence[Sequence[int]] = (),
    session: Session | None = None,
    recorder: Recorder | None = None,
) -> Generator[DecodeStep, None, None]:
    """Decode a batch of prompts, one `DecodeStep` per target forward.

    Args:
        target: whose law is preserved.
        drafter: bound to the target (`drafter.bind(target)`).
        prompts: token ids, at least one each.
        request_ids: name the rows' random streams; None: 0, 1, 2, ...
        predictions: an expected continuation per row, for drafters that use one.
        session: keeps cache and drafter state across calls.
        recorder: receives seconds under `draft`, `target`, `verify`.

    Raises:
        InputError: an empty prompt, one that leaves no room in the context, or a stop token outside
            the vocabulary; an argument of another kind; a drafter that is not bound to this target;
            a session of another target or drafter, or one that another call has gone on with.
        LossyRule, UnsupportedProposal: see `verify`.
    """
    check_target(target)
    require_kind("drafter", drafter, Drafter, ", such as load_drafter gives")
    _check_bound(drafter, target)
    require_kind("options", options, DecodeOptions)
    if session is not None:
        require_kind("session", session, Session)
        session.check_opened_with(target, drafter)
    prompts, predictions = several(prompts, "prompts"), several(predictions, "predictions")
    ids = tuple(range(len(prompts)) if request_ids is None else several(request_ids, "request_ids"))
    rows = start_rows(
        prompts,
        ids,
        max_new_tokens=options.max_new_tokens,
        target=target.name,
        vocab_size=target.vocab_size,
        max_length=target.max_length,
    )
    end_ids = frozenset(token_ids(options.stop_token_ids, "stop_token_ids", target.vocab_size))
    if len(predictions) not in (0, len(prompts)):
        raise InputError(
            f"{len(prompts)} prompts need as many predictions (an empty one where there is none), "
            f"got {len(predictions)}."
        )
    expected = tuple(
        token_ids(one, f"Prediction {b}", target.vocab_size) for b, one in enumerate(predictions)
    )
    if not options.ignore_end:
        end_ids |= target.end_ids
    stops = StopStrings(options.stop_strings, target.tokenizer)
    verifier = options.verifier_sampler or options.sampler
    shape = drafter.default_shape if options.shape is None else options.shape
    recorder = recorder or Recorder()
    request = RequestBatch(
        tokens=[row.tokens for row in rows],
        request_ids=ids,
        max_new_tokens=options.max_new_tokens,
        predictions=expected,
    )
    cache, state = _open(target, drafter, request, rows, shape, session)
    base_noise = Noise(options.seed, ids, [len(row.tokens) for row in rows])
    engine = engine_of(target)
    compiled = engine is not None
    live = list(range(len(rows)))  # rows of the request that the cache still holds
    left: list[list[int]] | None = None  # the session's tokens behind the last step
    try:
        while any(row.finish is None for row in rows):
            if session is not None:
                require(
                    session.cache is not cache or session.tokens is left,
                    "Another call has gone on with this session, so this one cannot: finish one "
                    "call before the next, or give each a Session() of its own.",
                )
                session.clear()  # until the step is whole
            active = [rows[i] for i in live]
            noise = base_noise.at([len(row.tokens) for row in active])
            depth_B = _depths(active, shape, options.policy)
            cached = cache.lengths_B.tolist()
            pending: Sequence[Sequence[int]]
            pending = [
                row.tokens[have:] if row.finish is None else ()  # done: kept for its session alone
                for row, have in zip(active, cached, strict=True)
            ]
            with recorder.time("draft"), beside_engine(compiled and not drafter.wants_threads):
                tree = _propose(drafter, state, shape, depth_B, active, options.sampler, noise)
                if options.static_shapes:
                    tree = pad_nodes(tree, drafter.max_nodes(shape))
            with recorder.time("target"):
                beginnings = _Beginnings(len(pending))
                fed = feed_beginning(target, cache, pending, drafter.signals, beginnings.keep)
                parents: Any = tree.parents_BN  # as an array, unless only the device knows them
                parents = parents.numpy() if parents.device.type == "cpu" else parents
                tokens_BT, block = lay_out(cache, fed, tree.tokens_BN, parents)
                out = target.forward(tokens_BT, block, 1 + tree.num_nodes, drafter.signals)
                out = beginnings.before(out, [len(row) + tree.num_nodes for row in fed])
            with beside_engine(compiled):
                with recorder.time("verify"), torch.inference_mode():
                    tree, verdict = verify_rows(
                        tree,
                        out.logits_BNV,
                        verifier,
                        [row.history() for row in active] if verifier.needs_history else [],
                        options.rule,
                        noise,
                        widest=drafter.widest(shape),
                        longest_draw=drafter.longest_draw(shape),
                        allow_lossy=options.allow_lossy,
                        draws=None if engine is None else engine.draws,
                    )
                verdict, step = _emit(rows, live, tree, verdict, end_ids, stops, pending, shape)
                # pending tokens and accepted path stay; a row that was done keeps what it had
                head = [len(known) * step.active[i] for i, known in zip(live, fed, strict=True)]
                cache.commit(
                    np.array(head), verdict.path_BD.numpy(), verdict.num_accepted_B.numpy()
                )
                with recorder.time("draft"), torch.inference_mode():
                    state = drafter.advance(
                        state,
                        Accepted(
                            tree=tree,
                            verdict=verdict,
                            emitted=[step.emitted[i] for i in live],
                            pending=pending,
                            out=out,
                        ),
                    )
            if session is not None:
                session.cache, session.state = cache, state
                session.opened_with = target, drafter
                session.tokens = left = [
                    row.tokens[: int(cache.lengths_B[b])] for b, row in enumerate(active)
                ]
            yield step
            if session is None and any(row.finish for row in active):
                keep = [b for b, row in enumerate(active) if row.finish is None]
                live = [live[b] for b in keep]
                if keep:
                    cache.take(keep)
                    state, base_noise = state.take(keep), base_noise.take(keep)
    finally:
        cache.rollback()
        if options.policy is not None:
            options.policy.learn([row.counts for row in rows])


class _Beginnings:
    """Signals of what was fed before a step's own forward: those of a drafter are of all tokens.

    fed before    a b c | d e f            the step's signals   . . . g h n0
                        | u v                                   . . . w x n0
    together      a b c d e f g h n0
                  . . . . u v w x n0       on the right, as ragged rows stand
    """

    def __init__(self, rows: int) -> None:
        self._signals: list[list[Tensor]] = [[] for _ in range(rows)]

    def keep(self, fed: list[Sequence[int]], out: TargetOutput) -> None:
        if out.signals_BTS is not None:
            for b, piece in enumerate(fed):
                if piece:
                    self._signals[b].append(out.signals_BTS[b, -len(piece) :])

    def before(self, out: TargetOutput, counts: Sequence[int]) -> TargetOutput:
        """The output of the step's own forward, in which `counts` tokens of each row stand on the
        right, with these signals in front of its own."""
        if out.signals_BTS is None or not any(self._signals):
            return out
        rows = [
            torch.cat([*earlier, own[len(own) - count :]])
            for earlier, own, count in zip(self._signals, out.signals_BTS, counts, strict=True)
        ]
        width = max(map(len, rows))
        padded = [torch.nn.functional.pad(row, (0, 0, width - len(row), 0)) for row in rows]
        return replace(out, signals_BTS=torch.stack(padded))


def _open(
    target: Target,
    drafter: Drafter,
    request: RequestBatch,
    rows: list[Row],
    shape: TreeShape,
    session: Session | None,
) -> tuple[KVCache, DraftState]:
    """Cache and drafter state for these rows: fresh, or a session's cut to the common prefix."""
    if session is None or session.cache is None:
        longest = max(len(row.tokens) + row.room for row in rows)
        margin = drafter.max_nodes(shape)  # the staged tree stands behind the text
        cache = target.new_cache(len(rows), longest + margin)
        with torch.inference_mode():
            return cache, drafter.start(request)
    cache, state, tokens = session.cache, session.state, session.tokens
    assert state is not None and tokens is not None
    if len(rows) != cache.num_rows:
        raise InputError(
            f"This session has {cache.num_rows} rows; it cannot continue with {len(rows)}."
        )
    session.clear()  # what fails from here on leaves nothing half rewound
    cache.rewind(
        [
            min(common_prefix(row.tokens, old), len(row.tokens) - 1)
            for row, old in zip(rows, tokens, strict=True)
        ]
    )
    return cache, drafter.resume(state, request)


def _depths(active: list[Row], shape: TreeShape, policy: LengthPolicy | None) -> np.ndarray:
    """[B] how deep each row may draft: a step emits one token more than it accepts."""
    out = np.zeros(len(active), dtype=np.int64)
    live = [b for b, row in enumerate(active) if row.finish is None]
    rows = [active[b] for b in live]
    depths = [shape.depth] * len(rows) if policy is None else wanted(rows, policy)
    for b, row, depth in zip(live, rows, depths, strict=True):
        out[b] = row.asked = max(min(depth, shape.depth, row.room - 1), 0)
    return out


def _propose(
    drafter: Drafter,
    state: DraftState,
    shape: TreeShape,
    depth_B: np.ndarray,
    active: list[Row],
    sampler: Sampler,
    noise: Noise,
) -> DraftTree:
    deepest = int(depth_B.max())
    if deepest == 0:
        return DraftTree.empty(len(depth_B))
    with torch.inference_mode():
        tree = drafter.propose(state, shape.clip(deepest), depth_B, sampler, noise)
    if tree.candidate_BN is None:
        return limit_depth(tree, depth_B)
    # probes: as far as the target knows positions, in rows that draft at all
    beyond_B = np.array([row.context_left for row in active])
    return limit_depth(tree, depth_B, np.where(depth_B > 0, beyond_B, 0))


def _emit(
    rows: list[Row],
    live: list[int],
    tree: DraftTree,
    verdict: Verdict,
    end_ids: frozenset[int],
    stops: StopStrings,
    pending: Sequence[Sequence[int]],
    shape: TreeShape,
) -> tuple[Verdict, DecodeStep]:
    """Hand tokens to the rows. A row that stops inside the block gets the verdict it would have had
    if nothing beyond the stop had been drafted.

    Args:
        rows: of the request, in whose order the step is; the batch holds those of `live`.
    """
    tokens, last = tree.tokens_BN.tolist(), verdict.next_token_B.tolist()
    origin = None if tree.origin_BN is None else tree.origin_BN.tolist()
    paths = [
        path[:num]
        for path, num in zip(verdict.path_BD.tolist(), verdict.num_accepted_B.tolist(), strict=True)
    ]
    done: list[tuple[Any, ...]] = [((), 0, 0, 0, (), None, False)] * len(rows)
    whole = True  # no row stops before its verdict ends
    for b, (i, known) in enumerate(zip(live, candidates(tree), strict=True)):
        row, path, taken, offered = rows[i], paths[b], [], 0
        active = row.finish is None
        if active:
            taken = row.append([*(tokens[b][n] for n in path), last[b]], end_ids, stops)
            offered = known.offered_depth(path) if len(taken) > len(path) else len(taken)
            cut = len(taken) <= len(path)
            # a tree whose path ends above its depth misses there; a chain had nothing more to draft
            deep = row.asked if offered and not (shape.is_chain or cut) else 0
            row.count(max(offered, deep), min(len(taken), len(path)), cut=cut)
            last[b] = taken[-1]
        if len(taken) <= len(path):
            # stopped at a drafted token: it is the row's last, and not cached
            paths[b], whole = path[: max(len(taken) - 1, 0)], False
        drafted = path[: len(taken)]
        done[i] = (
            tuple(taken),
            len(drafted),
            offered,
            sum(map(len, known.children.values())),
            tuple(0 if origin is None else origin[b][n] for n in drafted),
            row.finish,
            active,
        )
    emitted, accepted, offered_depth, proposed, origins, finish, was_active = zip(
        *done, strict=True
    )
    step = DecodeStep(
        emitted=emitted,
        accepted=accepted,
        offered_depth=offered_depth,
        proposed=proposed,
        origins=origins,
        finish=finish,
        prefill=any(len(row) > 1 for row in pending),
        active=was_active,
    )
    return verdict if whole else make_verdict(paths, last), step
