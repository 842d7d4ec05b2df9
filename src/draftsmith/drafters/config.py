"""What is drafted and how it is verified: names of drafters, and the options of drafting."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.config import (
    Configuration,
    Many,
    Range,
    at_least,
    parse_list,
    require,
    require_name,
    short,
)
from draftsmith.core.config import (
    LOSSLESS_RULES,
    LOSSY_RULES,
    MOST_NODES,
    TreeShape,
    check_rule_name,
    parse_tree,
)
from draftsmith.errors import InputError
from draftsmith.plugins import DRAFTERS, plugin_names
from draftsmith.provenance import read_json


def kinds() -> list[str]:
    """Return every drafter kind: files here that define `DRAFTER`, and installed entry points."""
    return sorted({*built_in_kinds(), *plugin_names(DRAFTERS)})


@functools.cache
def built_in_kinds() -> tuple[str, ...]:
    """Files beside this one that name a drafter class; reading them as text imports no torch."""
    files = Path(__file__).parent.glob("*.py")
    return tuple(f.stem for f in files if "\nDRAFTER = " in f.read_text(encoding="utf-8"))


def option_names() -> set[str]:
    """Names of the options of all built-in kinds: the fields of every class `Config` here, but for
    the source, which KIND:SOURCE says; reading them as text imports no torch."""
    found: set[str] = set()
    for file in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == "Config":
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found |= {name.id for name in fields if isinstance(name, ast.Name)}
    return found - {"source"}


def drafter_parts(name: str) -> tuple[str, str | None]:
    """(kind, source) of KIND, KIND:SOURCE or the folder of a draft model or drafter; source None:
    none. A kind is a kind, even beside a folder of its name: that one is `./KIND`."""
    require_name("a drafter", name)
    name = os.fspath(name)
    if name in kinds():
        return name, None
    # unlike Path.is_file, this takes any text
    if os.path.isfile(os.path.join(name, "drafter.json")):
        return drafter_manifest(Path(name))["kind"], name
    if os.path.isfile(os.path.join(name, "config.json")):
        return "independent", name
    kind, colon, source = name.partition(":")
    return kind, source if colon else None


def cascade_parts(name: str) -> list[str]:
    """The drafters that a name joins with '+', first to last; the name alone if it joins none (a
    path may hold a '+').

    Raises:
        InputError: it joins two of one kind, which options KIND.KEY=VALUE could not tell apart.
    """
    require_name("a drafter", name)
    name = os.fspath(name)
    parts = name.split("+")
    named = [part.partition(":")[0] for part in parts]
    if len(parts) < 2 or not set(named) <= set(kinds()) or os.path.exists(name):
        return [name]
    check_sources(f"--drafter {name}", [(f"the kind {kind}", kind) for kind in named])
    return parts


def check_sources(cascade: str, sources: Iterable[tuple[str, Hashable]]) -> None:
    """Raise `InputError` where a cascade has one source twice; `sources`: of each its name, and
    what tells it from the others."""
    seen = set()
    for name, source in sources:
        require(source not in seen, f"{cascade} names {name} twice: name each source once")
        seen.add(source)


def drafter_manifest(folder: Path) -> dict[str, Any]:
    """What `distill` wrote about a drafter: its `kind`, `options`, `target` and `trained_length`
    (None in folders of earlier versions).

    Raises:
        InputError: it cannot be read.
    """
    path = folder / "drafter.json"
    known = read_json(path, "drafter")
    try:
        kind, length = str(known["kind"]), known.get("trained_length")
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"trained_length is {length!r}, which should be a number of tokens")
        return {
            "kind": kind,
            "options": dict(known["options"]),
            "target": dict(known.get("target", {})),
            "trained_length": length,
        }
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def check_options(assignments: Sequence[str]) -> None:
    """Raise `InputError` for a --drafter-option that is not KEY=VALUE, or says again what another
    one has said."""
    known: set[str] = set()
    for text in assignments:
        key, equals, _ = text.partition("=")
        key = key.strip().replace("-", "_")
        require(bool(equals and key), f"--drafter-option must be KEY=VALUE, got {short(text)}")
        require(key not in known, f"--drafter-option {key} is given twice: leave one out")
        known.add(key)


@dataclass(frozen=True, kw_only=True)
class DraftingConfig(Configuration):
    """What is drafted and how it is verified; left out, the drafter's own defaults hold."""

    draft_length: int | Literal["adaptive", "auto"] | Range | None = None
    """Tokens drafted per step; adaptive: more after drafts that were accepted whole; auto: what
    brings most by measured costs and recent acceptance, also nothing (with a tree: how deep it
    grows). 1..9: all of these, with `bench --perplexity`."""
    draft_tree: str | None = None
    """A tree instead of a chain: children per node at each depth, such as 4,2,2,1; or 10x6:59, ten
    beams six deep and the 59 most probable of their nodes; or a JSON file with a list of paths."""
    draft_proposal: Literal["sampled", "greedy", "without_replacement"] | None = None
    """How a draft model chooses children: draws, its top tokens, or draws without replacement."""
    rule: str = "auto"
    """Verification: match, rejection, block (of chains as a whole), traversal (of trees as a whole)
    or an installed rule; auto takes match, rejection or (for drawn chains on a CPU) block: what
    accepts more of this drafter's proposals and costs little."""
    acceptance: str = "exact"
    """exact, or a rule that is LOSSY, after which the output law is not the target's: typical keeps
    drafts that the target does not find unlikely (Medusa); or an installed rule."""
    drafter_option: Many = ()
    """An option of the drafter itself, KEY=VALUE (with several drafters: KIND.KEY=VALUE)."""

    def tree(self) -> TreeShape | None:
        """The draft's shape, or None when neither a tree nor a length was asked."""
        if self.draft_tree is not None:
            return parse_tree(self.draft_tree)
        length = self.draft_length
        return TreeShape.chain(length) if isinstance(length, int) else None

    def lengths(self) -> tuple[int, ...]:
        """Those that `draft_length` lists: a number or a range; none where it is a word."""
        first, dots, last = str(self.draft_length).partition("..")
        if isinstance(self.draft_length, int):
            return (self.draft_length,)
        return tuple(range(int(first), int(last) + 1)) if dots else ()

    def check_lengths(self) -> None:
        """For a measurement of acceptance: it counts chains of fixed lengths, verified exactly."""
        words = self.draft_length is not None and not self.lengths()
        require(
            not words,
            f"--draft-length {self.draft_length}: --perplexity counts drafts of fixed lengths; "
            "give a whole number or a range such as 1..9",
        )
        require(self.draft_tree is None, "--draft-tree: --perplexity counts chains; leave it out")
        lossy = f"--acceptance {self.acceptance}: --perplexity counts what is verified exactly"
        require(self.acceptance == "exact", f"{lossy}; leave it out")

    def refuse_range(self) -> None:
        """For verbs that draft in one way."""
        require(
            ".." not in str(self.draft_length),
            f"--draft-length {self.draft_length}: a range is for `bench --perplexity`; give a "
            "whole number, adaptive or auto",
        )

    def assignments(self, drafter: str, *, alone: bool) -> tuple[str, ...]:
        """The KEY=VALUE texts meant for `drafter` (as --drafter has it), without the KIND."""
        parts = cascade_parts(drafter)
        if len(parts) > 1:  # whose options keep the name of the part that they are for
            kinds = tuple(f"{drafter_parts(part)[0]}." for part in parts)
            return tuple(one for one in self.drafter_option if alone or one.startswith(kinds))
        kind, _ = drafter_parts(drafter)
        mine = []
        for text in self.drafter_option:
            key = text.partition("=")[0]
            if key.startswith(f"{kind}."):
                mine.append(text[len(kind) + 1 :])
            elif alone:
                mine.append(text)
        return tuple(mine)

    def own_length(self, drafter: str, *, alone: bool) -> str | None:
        """The option for `drafter` that says how long its drafts are; None: there is none. A part
        of a cascade behind the first keeps a length of its own, whatever the flags say."""
        first = drafter_parts(cascade_parts(drafter)[0])[0]
        keys = [one.partition("=")[0].strip() for one in self.assignments(drafter, alone=alone)]
        return next((key for key in keys if key in ("length", f"{first}.length")), None)

    def check_assignments(self, drafters: tuple[str, ...]) -> None:
        """With several drafters every --drafter-option says which one it is for."""
        kinds = {drafter_parts(part)[0] for drafter in drafters for part in cascade_parts(drafter)}
        for text in self.drafter_option:
            if len(drafters) > 1 and text.partition(".")[0] not in kinds:
                raise InputError(
                    f"--drafter-option {text!r}: say which drafter it is for, as KIND.KEY=VALUE "
                    f"with KIND one of {', '.join(sorted(kinds))}"
                )

    def is_lossy(self) -> bool:
        """Whether the output law is not the target's. A rule of an installed package is loaded."""
        from draftsmith.core.types import Proposal
        from draftsmith.core.verify_step import make_rule

        return self.acceptance != "exact" and make_rule(self.acceptance, Proposal.OPAQUE).lossy

    @property
    def used_rule(self) -> str:
        """The rule to verify by."""
        return self.rule if self.acceptance == "exact" else self.acceptance

    def validate(self) -> None:
        check_rule_name(self.rule, ("auto", *LOSSLESS_RULES), "--rule")
        check_rule_name(self.acceptance, ("exact", *LOSSY_RULES), "--acceptance")
        alone = self.rule == "auto" or self.acceptance == "exact"
        require(alone, f"--acceptance {self.acceptance} is a rule of its own: leave out --rule")
        length = self.draft_length
        if isinstance(length, int):
            at_least(1, "--draft-length", length, most=MOST_NODES)
        elif ".." in str(length):
            ends = str(length).replace("..", ",")
            first, last = parse_list(ends, int, name="--draft-length")
            good = 1 <= first <= last <= MOST_NODES
            upwards = f"a range upwards, from 1 or more to {MOST_NODES} or less"
            require(good, f"--draft-length must be {upwards}, got {short(length)}")
        if self.draft_tree is not None:
            require(
                length in (None, "auto"),
                f"--draft-length {length} and --draft-tree exclude each other: give one; "
                "--draft-length auto chooses how deep a tree grows",
            )
            drawn = self.draft_proposal not in (None, "greedy")
            require(
                parse_tree(self.draft_tree).keep is None or not drawn,
                f"--draft-tree {self.draft_tree} grows from the most probable tokens, where "
                f"--draft-proposal {self.draft_proposal} does nothing: leave it out, or give a "
                "tree of fixed shape, such as 4,2,1",
            )
        check_options(self.drafter_option)
