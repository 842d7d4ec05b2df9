"""What an address may ask of the server's event loop, and what the end of the server may take."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from typing import Any

import pytest

from draftsmith.serve.app import CLOSE_SECONDS, AccessPolicy, Server, create_app
from draftsmith.serve.pace import Pace
from draftsmith.serve.protocol import Outbox
from tests.serve.serving import a_manager


def test_who_asks_often_waits_and_others_do_not() -> None:
    async def order() -> list[str]:
        pace, done = Pace(), []

        async def ask(address: str) -> None:
            await pace.turn(address)
            done.append(address)

        await asyncio.gather(*map(ask, [*"aaaaaaaa", "b", "c"]))
        return done

    assert "".join(asyncio.run(order())) == "abc" + 7 * "a"


def test_what_took_long_is_paid_for_by_its_address() -> None:
    async def order() -> list[str]:
        computed = iter((0.0, 1000.0))
        pace, done = Pace(lambda: next(computed)), []

        async def ask(address: str) -> None:
            await pace.turn(address)
            done.append(address)

        with contextlib.suppress(ZeroDivisionError), pace.charged("a"):
            done.append(str(1 // 0))
        rests = asyncio.create_task(ask("a"))
        for _ in range(20):
            await ask("b")
        rests.cancel()
        return done

    assert asyncio.run(order()) == ["b"] * 20


def test_addresses_that_have_rested_are_forgotten() -> None:
    async def known() -> int:
        pace = Pace()
        for number in range(5000):
            await pace.turn(str(number), 0.0)
        return len(pace._free)

    assert asyncio.run(known()) < 2000


class _Jumping(selectors.DefaultSelector):
    """Nothing is waited for: the time that would have passed is added up."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout and 0)
        if not found and timeout:
            self.skipped += timeout
        return found


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return super().time() + self.jumping.skipped


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_comes_within_five_seconds_whatever_waits(waits: bool) -> None:
    """An update that never ends, a connection that does not close, a task that goes on."""
    manager = a_manager()

    class Connection:
        def shutdown(self) -> None:
            pass

    class Lifespan:
        async def shutdown(self) -> None:
            await asyncio.sleep(CLOSE_SECONDS)  # as the decoding thread may need

    async def ended() -> tuple[float, list[str]]:
        server: Any = Server(create_app(manager, "tiny", AccessPolicy()), manager)
        server.servers, server.lifespan, outbox = [], Lifespan(), Outbox()
        manager.subscribe(manager.open({}), outbox, keeps=True)
        if waits:
            server.server_state.connections.add(Connection())
            server.server_state.tasks.add(asyncio.create_task(asyncio.sleep(1e6)))
        now = asyncio.get_running_loop().time
        began = now()
        await server.shutdown()
        return now() - began, [outbox.next()["type"]]

    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        seconds, said = runner.run(ended())
    assert said == ["bye"]
    assert 2 < seconds < 4.8, "and 0.1 s until uvicorn sees the signal"
