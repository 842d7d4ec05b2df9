"""The command line from outside: exit codes, one sentence per error, one object per `--json`."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith import cli
from draftsmith.commands.doctor import DoctorOptions
from draftsmith.config import flags_of
from draftsmith.errors import BackendError, CheckFailed, InputError
from draftsmith.provenance import output_folder


def draftsmith(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftsmith", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[DoctorOptions], Any]], None]:
    """Put another function in the place of `doctor`."""

    def install(run: Callable[[DoctorOptions], Any]) -> None:
        monkeypatch.setattr("draftsmith.commands.doctor.run", run)

    return install


def code_of(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return caught.value.code


def test_version_and_overview() -> None:
    assert draftsmith("--version").stdout == "draftsmith 0.1.0\n"
    overview = draftsmith("--help")
    assert overview.returncode == 0
    for verb in cli.verbs():
        assert f"  {verb} " in overview.stdout
    nothing = draftsmith()
    assert nothing.returncode == 2
    assert nothing.stdout == ""
    assert "usage: draftsmith" in nothing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genrate"], "draftsmith: unknown verb 'genrate'; did you mean 'generate'?"),
        (["--jsn"], "draftsmith: unknown option '--jsn'"),
        (["doctor", "--jsn"], "unknown option '--jsn' of draftsmith doctor; did you mean '--json'"),
        (["generate", "--temprature=1"], "did you mean '--temperature'"),
        (
            ["generate", "--target", "T", "--prompt", "x", "--temperature", "-1"],
            "draftsmith: --temperature must be 0 (greedy) or a positive number",
        ),
        (
            ["distill", "--draft-vocab", "8192"],
            "unknown option '--draft-vocab' of draftsmith distill; did you mean "
            "'--drafter-option draft_vocab=VALUE'?",
        ),
        (["generate", "--min_match=3"], "'--drafter-option min_match=VALUE'"),
        (["doctor", "--draft-vocab", "8192"], "unknown option '--draft-vocab' of draftsmith doc"),
        (["generate", "--prompt", "x"], "--target"),
        (["generate", "--target", "T", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "--target", "T", "--dtype", "bf16"], "bfloat16"),
    ],
)
def test_bad_arguments_end_with_code_2_and_name_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("group", ["plan", "live"])
@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_of_a_group_lists_its_verbs(
    group: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(group, flag) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"usage: draftsmith {group} VERB [OPTIONS]"
    listed = [line for line in lines if line.startswith("  ")]
    own = [verb for verb in cli.verbs() if verb.startswith(f"{group} ")]
    assert len(listed) == len(own) > 3
    for line, verb in zip(listed, own, strict=True):
        assert line.split(maxsplit=2)[:2] == verb.split() and len(line) > 30


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    """One process asks for all of them: what the first ones import, the later ones keep."""
    code = (
        "import sys\nfrom draftsmith import cli\n"
        "for verb in cli.verbs():\n"
        "    try:\n        cli.main([*verb.split(), '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0, (verb, end.code)\n"
        "    else:\n        raise AssertionError(verb)\n"
        "    heavy = {'torch', 'transformers', 'scipy', 'matplotlib', 'numpy'} & {*sys.modules}\n"
        "    assert not heavy, (verb, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in cli.verbs():
        assert f"usage: draftsmith {verb} " in done.stdout


def test_an_option_of_drafters_that_stands_alone_imports_nothing_heavy() -> None:
    """The names of their options are read as text."""
    code = (
        "import sys\nfrom draftsmith import cli\n"
        "try:\n    cli.main(['distill', '--draft-vocab', '8192'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, *{'torch', 'transformers', 'numpy'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"] and "draft_vocab=VALUE" in done.stderr


def test_a_verb_imports_no_module_of_another_verb() -> None:
    code = (
        "import sys\nfrom draftsmith import cli\n"
        "try:\n    cli.main(['live', 'make-stream', '--help'])\n"
        "except SystemExit:\n    print(*[name for name in sys.modules if '.commands.' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    names = {name.partition(".commands.")[2] for name in done.stdout.splitlines()[-1].split()}
    assert names == {"_options", "live", "live.make_stream"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("no such file"), 2),
        (BackendError("the model is damaged"), 3),
        (CheckFailed("the laws differ"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division\nby zero"), 3),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(
    error: BaseException, code: int, doctor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DoctorOptions) -> None:
        raise error

    doctor(run)
    assert code_of("doctor") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("draftsmith: ")
    assert err.count("\n") == 1
    if isinstance(error, ZeroDivisionError):
        assert "unexpected ZeroDivisionError: division by zero" in err
        assert "--debug" in err


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_debug_shows_the_trace(
    way: str, doctor: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: DoctorOptions) -> None:
        raise ZeroDivisionError

    doctor(run)
    if way == "environment":
        monkeypatch.setenv("DRAFTSMITH_DEBUG", "1")
    assert code_of("doctor", *(["--debug"] if way == "flag" else [])) == 3
    assert "Traceback" in capsys.readouterr().err


class Result:
    def json_payload(self) -> dict[str, Any]:
        return {"text": "ü", "n": 1}


@pytest.mark.parametrize("result", [Result(), Result().json_payload()])
def test_json_prints_one_object_and_moves_everything_else_to_stderr(
    result: object, doctor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DoctorOptions) -> object:
        print("progress")
        return result

    doctor(run)
    assert code_of("doctor", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"text": "ü", "n": 1}
    assert err == "progress\n"
    assert code_of("doctor") == 0
    assert capsys.readouterr().out == "progress\n"


STUB = """
import os, signal
from draftsmith import cli
from draftsmith.commands import doctor

def run(options):
    {body}

doctor.run = run
cli.main(["doctor"])
"""


def test_ctrl_c_ends_with_130_in_one_line() -> None:
    # a shell that runs its jobs in the background makes them ignore this signal
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = STUB.format(body=f"{heed}; os.kill(os.getpid(), signal.SIGINT); signal.pause()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "draftsmith: interrupted\n"


def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = STUB.format(body="[print('x' * 1000) for _ in range(1000)]")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


PRINTING = {
    "help": 'cli.main(["doctor", "--help"])',
    "short": STUB.format(body="print('x')"),
    "long": STUB.format(body="print('x' * 100000)"),
    "rich": STUB.format(body="from rich.console import Console; Console().print('x\\n' * 9000)"),
    "json": STUB.format(body="return {'a': 1}").replace('"doctor"', '"doctor", "--json"'),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_device_behind_stdout_is_said_and_seen_by_scripts(buffered: bool) -> None:
    """One process prints in every way: each way ends alone, as a command would."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    for name, body in PRINTING.items():
        code = body if body.startswith("\nimport") else f"from draftsmith import cli\n{body}"
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env=environment,
            )
        assert done.returncode == 3, (name, done.stderr)
        (line,) = done.stderr.splitlines()
        assert line.startswith("draftsmith: ") and os.strerror(errno.ENOSPC) in line, name
        assert "unexpected" not in line, name


def test_a_reader_of_rich_output_that_stops_reading_is_no_error() -> None:
    body = "from rich.console import Console; [Console().print('x' * 1000) for _ in range(1000)]"
    with subprocess.Popen(
        [sys.executable, "-c", STUB.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_a_closed_stdout_is_no_error() -> None:
    code = STUB.format(body="from rich.console import Console; Console().print('x'); print('x')")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_of_the_system_names_the_path_and_blames_the_user(
    doctor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(lambda options: (tmp_path / ("x" * 5000)).read_text())
    assert code_of("doctor") == 2
    err = capsys.readouterr().err
    assert os.strerror(errno.ENAMETOOLONG) in err and "unexpected" not in err
    assert len(err) < 300


def test_an_endless_sentence_is_cut(doctor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: DoctorOptions) -> None:
        raise InputError(f"--rule: there is no rule {'[' * 100_000}")

    doctor(run)
    assert code_of("doctor") == 2
    err = capsys.readouterr().err
    assert err.startswith("draftsmith: --rule") and len(err) < 3000


def test_a_package_that_exits_with_a_text_is_a_failure(
    doctor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(lambda options: sys.exit("no licence was found"))
    assert code_of("doctor") == 3
    said = "draftsmith: an installed package ended the command: no licence was found\n"
    assert capsys.readouterr().err == said


def test_messages_of_loggers_go_bare_to_stderr_and_only_while_a_verb_runs(
    doctor: Callable[[Callable[[DoctorOptions], Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DoctorOptions) -> dict[str, int]:
        logging.getLogger("draftsmith.distill.x").info("step %d", 3)
        logging.getLogger("draftsmith.distill.x").debug("not this")
        return {"a": 1}

    doctor(run)
    before = list(logging.getLogger("draftsmith").handlers)
    for _ in range(2):  # a second call brings no second line
        assert code_of("doctor", "--json") == 0
        assert capsys.readouterr() == ('{"a": 1}\n', "step 3\n")
    assert logging.getLogger("draftsmith").handlers == before


ONE_FILE = {f"live {verb}" for verb in ("translate", "make-stream", "make-examples", "score")}
"""Their --out is a file, which is written whole."""
INTO_A_FOLDER = {
    "quickstart": "",
    "bench": "--target none --drafter prompt_lookup --suite none",
    "pretrain": "--text none",
    "collect": "--target none --prompts none",
    "distill": "--target none --drafter none --store none",
    "report": "none",
    "tune": "--target none --drafter prompt_lookup --suite none",
    "live replay": "none --target none",
    "plan law": "none",
    "plan optimum": "--target-params 13B --target-tokens 1T --draft-tokens 1T",
    "plan sweep": "--grid printed",
    "plan alpha": "none",
    "plan fit": "none",
    "plan table": "4",
    "plan ladder": "--target-params 13B --target-tokens 1T --tokens 2B",
    "plan check": "none --records none",
}


@pytest.mark.parametrize("verb", INTO_A_FOLDER)
def test_a_verb_does_not_write_into_the_folder_of_another_run(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with output_folder(out):
        assert code_of(*verb.split(), *INTO_A_FOLDER[verb].split(), "--out", str(out)) == 2
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert f"--out {out}" in capsys.readouterr().err.splitlines()[-1]


def test_every_verb_with_an_out_is_known_to_write_one_file_or_a_folder() -> None:
    with_out = {verb for verb, options in cli.verbs().items() if "--out" in flags_of(options)}
    assert with_out == ONE_FILE | INTO_A_FOLDER.keys()
