"""`draftsmith live serve` as a program: its address, its refusals, and how it ends."""

from __future__ import annotations

import signal
import socket

import pytest

from tests.command_cases import ran
from tests.forks import Forks
from tests.serve.command import Running
from tests.serve.serving import Client, ConnectionClosed


def is_here(host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(("host", "how"), [("127.0.0.2", signal.SIGINT), ("::1", signal.SIGTERM)])
@pytest.mark.every(2)
def test_its_address_lets_clients_in_and_the_last_words_are_answered_when_it_is_interrupted(
    host: str, how: signal.Signals, forks: Forks
) -> None:
    wanted, host = host, host if is_here(host) else "127.0.0.1"
    named = f"[{host}]" if ":" in host else host
    with Running(forks, "--host", host) as running:
        assert running.url == f"http://{named}:{running.port}/"
        with Client(running, Origin=f"http://{named}:{running.port}") as talk:
            talk.start()
            for seg in range(4):
                talk.source(seg, 0, "The children slept under the roof.", final=True)
            talk.say("ping")
            talk.hear("pong")
            code, errors = running.end(how)
            got = [talk.hear("update", "bye") for _ in range(5)]
            with pytest.raises(ConnectionClosed):
                talk.hear()
            assert talk.socket.close_code == 1000
    assert [one["type"] for one in got] == ["update"] * 4 + ["bye"]
    assert all(one["final"] and one["text"] for one in got[:4])
    assert code == (130 if how == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in errors
    if host != wanted:
        pytest.skip(f"{wanted} is no address of this machine: the signal alone was tested")


def refused(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What the command, in this process, fails with before it loads the model."""
    return str(ran(capsys, "live", "serve", "--target", "nowhere", *more, code=3))


def test_a_port_that_is_taken_is_named_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = refused(capsys, "--port", str(port))
    assert f"127.0.0.1:{port}" in sentence and "--port" in sentence


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b"])
def test_a_host_that_is_not_here_is_named_with_a_remedy(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    sentence = refused(capsys, "--host", host, "--port", "0")
    assert host in sentence and "--host" in sentence
