"""What draftsmith raises, and the exit code that the command line gives each.

    DraftsmithError
      InputError         bad arguments, files or prompts              exit code 2
      BackendError       model, weights or numerics failed            exit code 3
        UnsupportedModel   a target that cannot be decoded exactly
      CheckFailed        a check ran and its answer is no             exit code 1
      LossyRule          a rule that changes the law, without leave   exit code 2
      UnsupportedProposal  a rule is not lossless for these children  exit code 2

A message is one sentence for the user: what is wrong, where, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path


class DraftsmithError(Exception):
    """Base of every error that draftsmith raises on purpose."""

    exit_code = 2


class InputError(DraftsmithError, ValueError):
    """The user's arguments, files or prompts cannot be used."""


class BackendError(DraftsmithError, RuntimeError):
    """A model, its weights or its numerics failed."""

    exit_code = 3


class UnsupportedModel(BackendError):
    """The target cannot be decoded exactly (its state cannot roll back, say)."""


class CheckFailed(DraftsmithError):
    """A check ran to its end and the answer is no."""

    exit_code = 1


class LossyRule(InputError):
    """A verification rule changes the output law and nobody allowed it."""


class UnsupportedProposal(InputError):
    """The verification rule is not lossless for this kind of proposal."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'? (known: ...)` for an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(known)})"


@contextlib.contextmanager
def naming(*paths: Path) -> Iterator[None]:
    """Name the files in an InputError from inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{', '.join(map(str, paths))}: {error}") from None
