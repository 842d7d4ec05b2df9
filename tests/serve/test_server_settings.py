"""What a session chooses reaches its translation; what a measurement compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.live.config import DisplayConfig, LiveConfig
from draftsmith.live.translator import InFlightUpdate, LiveEngine, LiveTranslator
from tests.live_cases import a_stream
from tests.serve.serving import LIVE, Client, Served, a_manager

STREAM = [
    (seg, rev, source, final)
    for seg in range(4)
    for rev, (source, final) in enumerate(a_stream(seed=seg + 20))
]
PLAIN = LiveConfig(bias=0.0, display=DisplayConfig(no_shrink=True))


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with Served(live=PLAIN) as one:
        yield one


def alone(served: Served, config: LiveConfig) -> list[Any]:
    """What a translator of its own says to the stream."""
    said: list[Any] = []
    translator = LiveTranslator(served.manager.target, served.manager.template("cats"), config)
    for _, _, source, final in STREAM:
        before = translator.last
        update = translator.update(source, final=final)
        assert update is not None
        if update is not before:
            said.append((update.shown, update.full, update.drafted, update.accepted))
    return said


def served_alike(talk: Client) -> list[Any]:
    """What the server says to it, one after the other."""
    said, shown = [], ""
    for seg, rev, source, final in STREAM:
        talk.source(seg, rev, source, final=final)
        if source != shown or final:  # else there is nothing to say
            got = talk.hear("update")
            full, stats = got["text"] + got["hidden"], got["stats"]
            said.append((got["text"], full, stats["drafted"], stats["accepted"]))
        shown = "" if final else source
    return said


@pytest.mark.parametrize(
    ("chosen", "config"),
    [
        ({"mask_k": 2}, replace(PLAIN, display=DisplayConfig(mask_k=2, no_shrink=True))),
        (
            {"mask_k": 2, "mask": "draft"},
            replace(PLAIN, trim_draft=2, display=DisplayConfig(mask_k=2, no_shrink=True)),
        ),
        ({"context": 1}, replace(PLAIN, context=1)),
        ({"bias": 0.5}, replace(PLAIN, bias=0.5)),
        ({"final_bias": 0.5}, replace(PLAIN, final_bias=0.5)),
        ({"revision_bias": 0.5}, replace(PLAIN, revision_bias=0.5)),
        (
            {"mask_k": 2, "no_shrink": False},
            replace(PLAIN, display=DisplayConfig(mask_k=2)),
        ),
    ],
)
@pytest.mark.every(3)
def test_a_session_translates_as_it_chose(
    served: Served, chosen: Mapping[str, Any], config: LiveConfig
) -> None:
    expected = alone(served, config)
    assert expected != alone(served, PLAIN)
    with Client(served) as talk:
        assert talk.start(**chosen)["type"] == "ready"
        assert served_alike(talk) == expected


def test_what_the_server_fixes_holds_for_all_sessions() -> None:
    fixed = replace(PLAIN, min_common=1.0, max_ratio=0.5)
    with Served(live=fixed) as served, Client(served) as talk:
        assert talk.start()["type"] == "ready"
        expected = alone(served, fixed)
        assert served_alike(talk) == expected != alone(served, PLAIN)


@pytest.mark.parametrize("name", ["final_bias", "revision_bias"])
def test_null_takes_a_bias_of_its_own_back(name: str) -> None:
    with (
        Served(live=replace(PLAIN, **{name: 0.5})) as served,
        Client(served) as talk,
    ):
        assert talk.start()["settings"][name] == 0.5
        talk.say("config", **{name: None}, bias=None)
        talk.say("config", mask_k=0)
        expected = alone(served, PLAIN)
        assert expected != alone(served, replace(PLAIN, **{name: 0.5}))
        assert served_alike(talk) == expected
        with Client(served) as other:
            settings = other.start(**{name: None, "bias": None})["settings"]
            assert (settings[name], settings["bias"]) == (None, 0.0)


def test_what_ready_says_may_be_said_back(served: Served) -> None:
    with Client(served) as one:
        said = one.start(mask_k=3, final_bias=0.1)["settings"]
    with Client(served) as two:
        assert two.start(**said)["settings"] == said
        two.say("config", **{**said, "final_bias": None})
        two.say("ping")
        assert two.hear()["type"] == "pong"


def test_the_speed_up_is_measured_on_what_was_said(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    """Both ways decode the same prompts, segment for segment; only one of them drafts."""
    stream = [
        (0, 0, "the cat sat"),
        (0, 1, "the cat sat on"),
        (1, 0, "mat"),
        (1, 1, "on the mat"),
    ]
    for seg, rev, source in stream:
        talk.source(seg, rev, source)
        talk.hear("update")
    ran: list[InFlightUpdate] = []
    inner = LiveEngine.steps

    def steps(engine: LiveEngine, updates: list[InFlightUpdate], *given: Any) -> Iterator[None]:
        ran.extend(updates)
        return inner(engine, updates, *given)

    monkeypatch.setattr(LiveEngine, "steps", steps)
    talk.say("measure")
    found = talk.hear("measured", "error")
    drafted, plain = ran[::2], ran[1::2]
    assert found["updates"] == len(drafted) == len(stream)
    assert [update.prompt for update in drafted] == [update.prompt for update in plain]
    assert [update.counts()["drafted"] > 0 for update in drafted] == [False, True, False, True]
    assert not any(update.counts()["drafted"] for update in plain)
    end_ids = served.manager.target.end_ids
    for key, side in (("tps", drafted), ("tps_ar", plain)):
        pace = sum(len(one.output(end_ids)) for one in side) / sum(one.seconds for one in side)
        assert found[key] == pytest.approx(pace)
    assert found["speedup"] == pytest.approx(found["tps"] / found["tps_ar"])


def test_nothing_was_said_and_nothing_is_measured(talk: Client) -> None:
    talk.say("measure")
    found = talk.hear("measured", "error")
    assert (found["updates"], found["speedup"]) == (0, None)


def test_sessions_share_no_drafter() -> None:
    """A drafter behind the divergence keeps the state of one translation."""
    manager = a_manager(live=replace(LIVE, then="prompt_lookup"))
    shared, alone = manager.engine, a_manager().engine
    assert type(shared.drafter) is type(alone.drafter)
