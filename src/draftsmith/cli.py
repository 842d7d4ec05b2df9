"""The command line: verbs only, no logic.

The verb `generate` is `commands/generate.py`, which has `GenerateOptions` and `run(options)`;
`live make-stream` is `commands/live/make_stream.py` with `LiveMakeStreamOptions`. Only the module
of the verb that is asked for is imported, and it imports torch only when it runs. `run` prints
for people as it likes. Under `--json` the value that
it returns (a dict, or an object with `json_payload()`) is the only output on stdout; all else
goes to stderr. Exit codes: see `errors`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

from draftsmith.commands._options import VerbOptions
from draftsmith.config import (
    check_known,
    check_values,
    flags_of,
    join_minus_values,
    name_leading,
    short,
)
from draftsmith.errors import BackendError, DraftsmithError, InputError, nearest
from draftsmith.provenance import DISK_FULL, is_first_process

INTERRUPTED = 130
_LONGEST = 2000
"""Characters of an error that are printed."""
_GROUPS = {
    "": "quickstart chat generate bench doctor pretrain collect distill report tune",
    "live": "translate make-stream make-examples replay score serve",
    "plan": "law optimum sweep alpha fit table ladder check",
}
VERBS = tuple(f"{group} {verb}".strip() for group, own in _GROUPS.items() for verb in own.split())
"""In the order of the overview."""
_HELP = ("-h", "--help", "help")


def options_of(verb: str) -> type[VerbOptions]:
    """The options of a verb, from its module: `live make-stream` takes `LiveMakeStreamOptions`."""
    name = "".join(word.capitalize() for word in re.split("[ -]", verb))
    found: type[VerbOptions] = getattr(_module_of(verb), f"{name}Options")
    return found


def verbs() -> dict[str, type[VerbOptions]]:
    """Every verb with its options, in the order of the overview."""
    return {verb: options_of(verb) for verb in VERBS}


def _module_of(verb: str) -> ModuleType:
    return importlib.import_module(
        f"draftsmith.commands.{verb.replace(' ', '.').replace('-', '_')}"
    )


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """(verb, the rest) of a command line that begins with a word.

    Raises:
        InputError: there is no such verb; the nearest is named.
    """
    first = words[0]
    if first in VERBS:
        return first, list(words[1:])
    group = [verb.split()[1] for verb in VERBS if verb.startswith(f"{first} ")]
    if not group:
        kind = "option" if first.startswith("-") else "verb"
        raise InputError(f"unknown {kind} {first!r}{nearest(first, VERBS)}")
    second = words[1] if len(words) > 1 else ""
    if second not in group:
        what = f"unknown {first} verb {second!r}{nearest(second, group)}" if second else first
        raise InputError(f"{what}: say one of {', '.join(f'{first} {verb}' for verb in group)}")
    return f"{first} {second}", list(words[2:])


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `draftsmith` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("DRAFTSMITH_DEBUG", "") not in ("", "0")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it: nobody wants to read it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    code = 0
    failed: BaseException | None = None
    try:
        with _messages_to_stderr():
            code = _dispatch(words)
    except SystemExit as end:  # by tyro, which has printed a help; by rich, whose reader has gone
        gone = isinstance(end.__context__, BrokenPipeError)
        if gone or end.code is None:
            code = 0
        elif isinstance(end.code, int):
            code = end.code
        else:  # `sys.exit("text")`: Python would print it, and end with 1
            failed = BackendError(f"an installed package ended the command: {end.code}")
    except (Exception, KeyboardInterrupt) as error:
        failed = error
    lost = _lost_output()
    if failed is None or (lost is not None and isinstance(failed, OSError)):
        failed = lost
    if failed is not None:
        code = _report(failed, debug)
    sys.exit(code)


def _lost_output() -> Exception | None:
    """Flush stdout; what to report, where it takes nothing more. What it still holds then goes
    nowhere: Python would complain once more when it flushes at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return error
        return BackendError(f"cannot write the output: {error.strerror}")
    return None


def _report(error: BaseException, debug: bool) -> int:
    """Say what ended the command; its exit code."""
    if isinstance(error, BrokenPipeError):
        return 0  # the reader of our output (`| head`) has gone: nothing is wrong
    if isinstance(error, KeyboardInterrupt):
        sentence, code = "interrupted", INTERRUPTED
    elif isinstance(error, DraftsmithError):
        sentence, code = str(error), error.exit_code
    elif isinstance(error, OSError) and error.filename is not None:
        path = short(str(error.filename))
        sentence, code = f"cannot use the path {path}: {error.strerror}", InputError.exit_code
    elif isinstance(error, OSError) and error.errno in DISK_FULL:
        # files are written by functions that name them: it is stdout, and not buffered
        sentence, code = f"cannot write the output: {error.strerror}", BackendError.exit_code
    else:
        hint = "" if debug else " (run again with --debug for the trace)"
        what = " ".join(f"{type(error).__name__}: {error}".split())
        sentence, code = f"unexpected {what}{hint}", BackendError.exit_code
    if len(sentence) > _LONGEST:  # it quotes something endless
        sentence = f"{sentence[:_LONGEST]}..."
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk, too
        if debug:
            traceback.print_exception(error)
        print(f"draftsmith: {sentence}", file=sys.stderr)
    return code


class _Stderr(logging.StreamHandler[Any]):
    """Write each message to what `sys.stderr` is at that moment; of several processes one does."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if is_first_process():
            super().emit(record)


@contextlib.contextmanager
def _messages_to_stderr() -> Iterator[None]:
    """Print the bare messages of every logger of draftsmith, from INFO up."""
    logger, handler = logging.getLogger("draftsmith"), _Stderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"draftsmith {version('draftsmith')}")
        return 0
    if not words or words[0] in _HELP:
        print(_overview(VERBS), file=sys.stdout if words else sys.stderr)
        return 0 if words else InputError.exit_code
    group = [verb for verb in VERBS if verb.startswith(f"{words[0]} ")]
    if group and words[1:2] and words[1] in _HELP:
        print(_overview(group, f"{words[0]} "))
        return 0
    verb, rest = split_verb(words)
    given = parse(verb, rest)
    given.validate()
    run = _module_of(verb).run
    if not given.json:
        run(given)
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        result = run(given)
    payload = result if isinstance(result, dict) else result.json_payload()
    if is_first_process():
        print(json.dumps(payload, ensure_ascii=False, allow_nan=False))
    return 0


def parse(verb: str, words: Sequence[str]) -> Any:
    """The options of `verb` from command-line words. `--help` exits, as tyro does."""
    import tyro

    cls = options_of(verb)
    flags = flags_of(cls)
    words = join_minus_values(name_leading(words, flags), flags)
    drafts = "--drafter-option" in flags
    check_known(words, flags, verb, _drafter_option if drafts else lambda name: None)
    check_values(words, flags, verb)
    return tyro.cli(
        cls,
        prog=f"draftsmith {verb}",
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _drafter_option(name: str) -> str | None:
    """How an option of drafters is set; None: no drafter has one of this name."""
    from draftsmith.drafters.config import option_names

    return f"--drafter-option {name}=VALUE" if name in option_names() else None


def _overview(verbs: Sequence[str], group: str = "") -> str:
    lines = [
        f"usage: draftsmith {group}VERB [OPTIONS]",
        "",
        "Lossless speculative decoding: faster answers from the model that you have, with the same",
        "output distribution.",
        "",
    ]
    for verb in verbs:
        lines.append(f"  {verb:<16} {(options_of(verb).__doc__ or '').strip().splitlines()[0]}")
    how = f"'draftsmith {group}VERB --help' lists a verb's options"
    lines += ["", f"{how}; --version prints the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
