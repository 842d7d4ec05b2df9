"""What every verb takes, and what several `plan` verbs share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from draftsmith.config import Configuration, parse_list, require
from draftsmith.provenance import output_folder


@dataclass(frozen=True, kw_only=True)
class VerbOptions(Configuration):
    """What every verb takes."""

    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""
    debug: bool = False
    """Show the full trace of an unexpected error."""


class _WithFolder(Protocol):
    @property
    def out(self) -> Path | None: ...


_Options = TypeVar("_Options", bound=_WithFolder)
_Result = TypeVar("_Result")


def holds_out(run: Callable[[_Options], _Result]) -> Callable[[_Options], _Result]:
    """A verb that writes several files to the folder --out: no other run does so meanwhile."""

    @functools.wraps(run)
    def alone(options: _Options) -> _Result:
        with nullcontext() if options.out is None else output_folder(options.out):
            return run(options)

    return alone


@dataclass(frozen=True, kw_only=True)
class LawsOptions(Configuration):
    """The laws that a plan goes by."""

    coefficients: str | None = None
    """A,B,C of acceptance = A draft perplexity + B target perplexity + C; left out: the paper's."""
    law: Path | None = None
    """Take them from what `plan law --json` printed, with their covariance."""
    loss: str | None = None
    """E,A,nu,B,delta of the loss law; left out: Besiroglu et al. `plan fit` finds your own."""

    def acceptance_numbers(self) -> tuple[float, ...] | None:
        """A, B, C; None: not given."""
        return parse_numbers(self.coefficients, "--coefficients", "A,B,C")

    def loss_numbers(self) -> tuple[float, ...] | None:
        """E, A, nu, B, delta; None: not given."""
        return parse_numbers(self.loss, "--loss", "E,A,nu,B,delta")

    def validate(self) -> None:
        both = self.coefficients is not None and self.law is not None
        require(not both, "--coefficients and --law exclude each other")
        self.acceptance_numbers()
        for value in self.loss_numbers() or ():
            require(value >= 0, f"--loss: the five constants are 0 or more, got {value:g}")


def parse_numbers(text: str | None, flag: str, form: str) -> tuple[float, ...] | None:
    """Read the numbers of `form`, which names them with commas between; None: not given.

    Raises:
        InputError: there are more or fewer, or one is not finite.
    """
    if text is None:
        return None
    values = parse_list(text, float, name=flag)
    good = len(values) == len(form.split(",")) and all(map(math.isfinite, values))
    require(good, f"{flag} takes {form} as finite numbers, got {text!r}")
    return values
