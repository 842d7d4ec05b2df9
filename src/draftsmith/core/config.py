"""The configuration of decoding: shapes of drafts, sampling, names of verification rules."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, Self

from draftsmith.config import (
    LARGEST,
    Configuration,
    at_least,
    check_plain,
    is_whole,
    parse_list,
    real_number,
    require,
    short,
    whole_number,
)
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import RULES, plugin_names
from draftsmith.provenance import read_json

_DYNAMIC = re.compile(r"(\d+)x(\d+):(\d+)")
MOST_CONTINUATIONS = 4096
"""The most of one prompt: all are kept until the last is done."""
MOST_NODES = 4096
"""The largest draft that may be asked for, as a chain or a tree: a step of N nodes has a mask of
N * N."""
FORMS = "4,2,2,1 (children at each depth), 10x6:59 (beams x depth : nodes) or a JSON file of paths"


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeShape:
    """How large a tree may be, in one of three ways:

    widths (2, 1)                    every node at depth d has widths[d] children; a chain: all 1
    paths ((0,), (1,), (0, 0))       just these nodes: the first and second child of the root, and
                                     the first child of the first (EAGLE-1, Medusa)
    widths (10, 10, 10), keep 59     grown by the drafter's probabilities: widths[d] beams go on at
                                     each depth, and of all nodes seen on the way the `keep` most
                                     probable paths are proposed (EAGLE-2)
    """

    widths: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    """Each node by the ranks of its ancestors and its own, in order of length; all its ancestors
    are there, and all its elder siblings."""
    keep: int | None = None

    def __post_init__(self) -> None:
        rows = (self.widths, *self.paths) if isinstance(self.paths, tuple) else (self.paths,)
        numbers = all(isinstance(row, tuple) and all(map(is_whole, row)) for row in rows)
        if not (numbers and (self.keep is None or is_whole(self.keep))):
            raise InputError(
                "a tree's widths are a tuple of whole numbers, its paths a tuple of such tuples, "
                f"and keep is a whole number or None; got widths={short(self.widths)}, "
                f"paths={short(self.paths)}, keep={short(self.keep)}"
            )
        if self.paths:
            _check_paths(self.paths)
        if bool(self.paths and self.widths) or (self.keep is not None and not self.widths):
            raise InputError("a tree has either widths (and perhaps keep) or paths")
        if min((*self.widths, 1 if self.keep is None else self.keep)) < 1:
            raise InputError(
                f"widths and keep are at least 1, got {short(self.widths)}, {self.keep}"
            )
        # the product of many large widths takes long
        small = max((len(self.widths), self.keep or 0, *self.widths)) <= MOST_NODES
        require(small and self.num_nodes <= MOST_NODES, f"a draft has at most {MOST_NODES} nodes")

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        at_least(0, "length", length, most=MOST_NODES)
        return cls(widths=(1,) * length)

    @property
    def depth(self) -> int:
        return len(self.paths[-1]) if self.paths else len(self.widths)

    @property
    def is_chain(self) -> bool:
        if self.paths:
            return len(self.paths) == self.depth
        return self.keep is None and all(width == 1 for width in self.widths)

    @property
    def is_dynamic(self) -> bool:
        return self.keep is not None

    @property
    def num_nodes(self) -> int:
        """The most that are proposed."""
        if self.paths:
            return len(self.paths)
        nodes, level = 0, 1
        for width in self.widths:
            level *= width
            nodes += level
        return nodes if self.keep is None else min(self.keep, nodes)

    @property
    def widest(self) -> int:
        """The most children that a node has."""
        return max(self.widths) if self.widths else 1 + max((p[-1] for p in self.paths), default=-1)

    def clip(self, depth: int) -> TreeShape:
        """The same shape, no deeper than `depth`: cut by depth alone, never by content."""
        if depth >= self.depth:
            return self
        depth = max(depth, 0)
        if self.paths:
            return TreeShape(paths=tuple(path for path in self.paths if len(path) <= depth))
        return TreeShape(widths=self.widths[:depth], keep=self.keep if depth else None)


def parse_tree(text: str) -> TreeShape:
    """Read --draft-tree.

        4,2,2,1       children per node at each depth
        10x6:59       10 beams, 6 deep; the 59 most probable of all nodes are kept (EAGLE-2)
        tree.json     any nodes: a JSON list of paths, [[0], [1], [0, 0], ...], each node by the
                      ranks of its ancestors and its own (EAGLE-1, Medusa)

    Raises:
        InputError: naming what is wrong and what the forms are.
    """
    if text.endswith(".json"):
        return _read_tree(Path(text))
    dynamic, keep = _DYNAMIC.fullmatch(text.strip()), None
    try:
        if dynamic:
            beams, depth, keep = map(int, dynamic.groups())
            widths = (beams,) * min(depth, MOST_NODES + 1)
        else:
            widths = tuple(int(part) for part in text.split(",", MOST_NODES))
    except ValueError:
        raise InputError(f"--draft-tree must be {FORMS}; got {short(text)}") from None
    if not widths or min(*widths, 1 if keep is None else keep) < 1:
        raise InputError(f"--draft-tree: every number must be at least 1, got {short(text)}")
    try:
        return TreeShape(widths=widths, keep=keep)
    except InputError as error:
        raise InputError(f"--draft-tree: {error}, got {short(text)}") from None


def _read_tree(path: Path) -> TreeShape:
    found = read_json(path, "--draft-tree")
    good = isinstance(found, list) and all(
        isinstance(one, list) and one and all(type(rank) is int and rank >= 0 for rank in one)
        for one in found
    )
    if not good or not found:
        raise InputError(
            f"--draft-tree {path} must hold a list of paths, such as [[0], [1], [0, 0]]"
        )
    paths = sorted({tuple(one) for one in found}, key=lambda one: (len(one), one))
    try:
        return TreeShape(paths=tuple(paths))
    except InputError as error:
        raise InputError(f"--draft-tree {path}: {error}") from None


def _check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    """Raise InputError unless every node's parent and elder siblings come before it."""
    known: set[tuple[int, ...]] = {()}
    length = 1
    for path in paths:
        *above, rank = path or (-1,)
        complete = tuple(above) in known and (rank == 0 or (*above, rank - 1) in known)
        if rank < 0 or len(path) < length or path in known or not complete:
            raise InputError(
                f"the node {short(path)} comes without its ancestors or elder siblings"
            )
        known.add(path)
        length = len(path)


def check_bias(value: float, name: str = "bias") -> None:
    """Raise `InputError` unless this can be a bias; NaN and what is no number cannot."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        meant = "0: exact, from 0.5 on every draft stays"
        raise InputError(f"{name} must lie between 0 and 1, got {value} ({meant})")


def bias_warning(*biases: float | None) -> str | None:
    """A warning about biases that degrade the text; None: there is none."""
    if any(bias is not None and bias >= 0.5 for bias in biases):
        return "from a bias of 0.5 on text is only appended: early mistakes stay, quality collapses"
    return None


LOSSLESS_RULES = ("match", "rejection", "block", "traversal")
"""The lossless verification rules, by name."""
LOSSY_RULES = ("typical",)
"""Those that change the output distribution."""


def check_rule_name(name: str, built_in: Sequence[str], flag: str) -> None:
    """Raise `InputError` unless `name` is one of these, or a rule of an installed package."""
    known = [*built_in, *plugin_names(RULES)]
    require(name in known, f"{flag}: there is no rule {name!r}{nearest(name, known)}")


@dataclass(frozen=True, kw_only=True)
class Warping:
    """What changes the law that is drawn from, beside the temperature and single tokens."""

    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""
    repetition_penalty: float = 1.0
    """Divide (multiply, if negative) the logits of tokens that occurred; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every generated token."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it was generated."""

    def warping(self) -> dict[str, Any]:
        """These values by name, for another configuration that has them."""
        return {field.name: getattr(self, field.name) for field in fields(Warping)}

    def check_warping(self, logit_bias: Iterable[tuple[int, float]], *, prefix: str = "") -> None:
        """Raise `InputError` unless laws can be made with these values.

        Args:
            logit_bias: (token, amount) pairs.
            prefix: `--` when the values are flags: errors name `--top-p` instead of `top_p`.
        """

        def name(field: str) -> str:
            return f"{prefix}{field.replace('_', '-')}" if prefix else field

        top_k, top_p, min_p = self.top_k, self.top_p, self.min_p
        require(top_k >= 0, f"{name('top_k')} must be 0 (off) or more, got {top_k}")
        require(0 < top_p <= 1, f"{name('top_p')} must be above 0 and at most 1, got {top_p}")
        require(0 <= min_p <= 1, f"{name('min_p')} must lie between 0 and 1, got {min_p}")
        penalty = self.repetition_penalty
        good = 1 / LARGEST <= penalty <= LARGEST  # what is nearer to 0 divides to infinity
        words = f"must be above 0, from {1 / LARGEST:g} to {LARGEST:g}"
        require(good, f"{name('repetition_penalty')} {words}, got {penalty}")
        for field, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            good = abs(value) <= LARGEST  # what is larger has no sums in float32
            words = f"must be a finite number between {-LARGEST:g} and {LARGEST:g}"
            require(good, f"{name(field)} {words}, got {value}")
        for token, bias in logit_bias:
            require(
                is_whole(token) and isinstance(bias, Real),
                f"{name('logit_bias')} takes token ids and numbers, got {short((token, bias))}",
            )
            require(token >= 0, f"{name('logit_bias')}: a token id is 0 or more, got token {token}")
            # -inf forbids a token; +inf and NaN have no law.
            good = abs(bias) <= LARGEST or bias == -math.inf
            require(good, f"{name('logit_bias')}: the bias of token {token} cannot be {bias}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Warping, Configuration):
    """What turns logits into the law that is drawn from, beside the temperature."""

    logit_bias: str = ""
    """Added to logits: TOKEN_ID:BIAS pairs, such as 17:-5,42:1.5."""
    seed: int = 0
    """Seed of all draws; the same seed gives the same text."""

    def biases(self) -> dict[int, float]:
        """`logit_bias`, parsed."""
        biases: dict[int, float] = {}
        for pair in (
            parse_list(self.logit_bias, str, name="--logit-bias") if self.logit_bias else ()
        ):
            left, _, right = pair.partition(":")
            try:
                token = whole_number(left, "--logit-bias")
                bias = real_number(right, "--logit-bias")
            except InputError:
                raise
            except ValueError:
                hint = "expected TOKEN_ID:BIAS pairs such as 17:-5,42:1.5"
                raise InputError(f"--logit-bias: {hint}, got {short(pair)}") from None
            require(token not in biases, f"--logit-bias has two biases for token {token}")
            biases[token] = bias
        return biases

    def params(self, temperature: float) -> SamplingParams:
        """These values and a temperature, for a text as long as the default of `SamplingParams`."""
        biases = self.biases()
        return SamplingParams(
            temperature=temperature, logit_bias=biases, seed=self.seed, **self.warping()
        )

    def validate(self) -> None:
        self.check_warping(self.biases().items(), prefix="--")
        check_seed(self.seed, "--seed")


def check_seed(value: int, name: str = "seed") -> None:
    """Raise `InputError` unless `value` can key random numbers."""
    good = is_whole(value) and 0 <= value < 2**63
    require(good, f"{name} must be a whole number of 0 or more, got {short(value)}")


def parse_temperatures(text: str, name: str = "--temperature") -> tuple[float, ...]:
    """Read temperatures with commas between. Raises `InputError` for one that is not usable."""
    values = parse_list(text, float, name=name)
    for value in values:
        check_temperature(value, name)
    require(len(set(values)) == len(values), f"{name} names one twice: {text}")
    return values


def check_temperature(value: float, name: str = "--temperature") -> None:
    """Raise `InputError` unless `value` is a usable temperature."""
    # below 1e-30 scaled logits overflow; such a temperature is meant as greedy
    good = value == 0 or 1 / LARGEST <= value <= LARGEST
    words = f"must be 0 (greedy) or a positive number of at most {LARGEST:g}"
    require(good, f"{name} {words}, got {short(value)}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Warping):
    """How to continue a prompt, by the names and with the defaults of vLLM's `SamplingParams`.

    The order of the steps is transformers': bias, penalties, temperature, top-k, top-p, min-p. A
    `top_k` of -1 keeps all tokens, as 0 does.

    Raises:
        InputError: a value out of range, or a parameter that draftsmith does not honour.
    """

    n: int = 1
    """Continuations per prompt."""
    temperature: float = 1.0
    """0: greedy."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> amount added to its logit; -inf forbids the token."""
    seed: int | None = None
    """Seed of all draws; None: another one at each call."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text, which is cut before them."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text, beside the target's end tokens."""
    ignore_eos: bool = False
    """Generate past the target's end tokens."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: up to the end of the target's context, for which memory
    is then allocated."""

    def __new__(cls, **given: object) -> Self:
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InputError(f"SamplingParams has no {name!r}{nearest(name, known)}.")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_plain(self)
        texts = isinstance(self.stop, Collection) and all(
            isinstance(text, str) for text in self.stop
        )
        require(
            self.stop is None or texts,
            f"stop must be a text or a list of texts, got {self.stop!r}",
        )
        ids = self.stop_token_ids
        require(
            ids is None or (isinstance(ids, Collection) and all(map(is_whole, ids))),
            f"stop_token_ids must be a list of whole numbers, got {ids!r}",
        )
        at_least(1, "n", self.n, most=MOST_CONTINUATIONS)
        check_temperature(self.temperature, "temperature")
        require(
            self.n == 1 or self.temperature > 0,
            f"n must be 1 at temperature 0, where all {self.n} continuations would be the same",
        )
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        biases = {} if self.logit_bias is None else self.logit_bias
        require(
            isinstance(biases, Mapping),
            f"logit_bias must map token ids to numbers, got {short(biases)}",
        )
        self.check_warping(biases.items())
        if self.seed is not None:
            check_seed(self.seed)
        most = self.max_tokens
        require(most is None or most >= 1, f"max_tokens must be None or at least 1, got {most}")
        require(all(self.stop_strings), "stop must hold no empty string")
        require(
            ids is None or min(ids, default=0) >= 0,
            f"stop_token_ids must be 0 or more, got {ids!r}",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
