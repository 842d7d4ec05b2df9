"""What a client of the live server is told: updates, finals, settings, measurements."""

from __future__ import annotations

import contextlib

from draftsmith.live.config import DisplayConfig, LiveConfig
from draftsmith.live.translator import LiveTranslator
from tests.live_cases import a_stream
from tests.serve.serving import Client, Served, held, name_of, until


def test_updates_are_those_of_a_translator_alone(served: Served, talk: Client) -> None:
    alone = LiveTranslator(
        served.manager.target, served.manager.template("cats"), LiveConfig(bias=0.2)
    )
    for seg in range(6):
        expected, said = [], []
        for rev, (source, final) in enumerate(a_stream(seed=seg)):
            before = alone.last
            update = alone.update(source, final=final)
            assert update is not None
            talk.source(seg, rev, source, final=final)
            if update is not before:
                expected.append((source, update.full, final))
                got = talk.hear("update")
                said.append((got["source"], got["text"] + got["hidden"], got["final"]))
        assert said == expected


def test_ready_and_updates_say_everything(talk: Client, served: Served) -> None:
    talk.source(0, 0, "the cat sat")
    first = talk.hear("update")
    assert (first["id"], first["seg"], first["rev"], first["final"]) == (1, 0, 0, False)
    assert set(first["stats"]) == {
        "tokens", "drafted", "accepted", "forwards", "ms", "waited_ms", "ne", "ad", "ao",
    }  # fmt: skip
    talk.source(0, 1, "the cat sat on the mat", final=True)
    last = talk.hear("update")
    assert last["final"] and last["stable"] == len(last["text"]) and last["hidden"] == ""
    assert last["stats"]["ad"] is not None and last["stats"]["ms"] > 0


def test_what_comes_twice_is_answered_once(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    assert talk.hear("update")["rev"] == 0
    talk.source(0, 0, "the cat sat")
    talk.source(0, 1, "the cat sat")
    talk.source(0, 2, "")
    talk.source(0, 3, "the cat sat on")
    assert talk.hear("update")["rev"] == 3


def test_the_newest_wins_and_no_final_is_lost(served: Served, talk: Client) -> None:
    with held(served.manager):
        talk.source(0, 0, "the")
        talk.say("ping")
        talk.hear("pong")
        until(lambda: served.manager.find(name_of(served)).pending_since is None)
        for rev in range(1, 5):
            talk.source(0, rev, " ".join(["cat"] * rev))
        talk.source(0, 5, "the cat sat", final=True)
        for rev in range(3):
            talk.source(1, rev, " ".join(["dog"] * (rev + 1)))
        talk.source(2, 0, "the log", final=True)
        talk.say("ping")
        heard = [talk.hear() for _ in range(7)]
    assert [one["revs"] for one in heard if one["type"] == "coalesced"] == [
        [1], [2], [3], [4], [0], [1],
    ]  # fmt: skip
    got = [talk.hear("update") for _ in range(4)]
    assert [(one["seg"], one["rev"], one["final"]) for one in got] == [
        (0, 0, False), (0, 5, True), (1, 2, False), (2, 0, True),
    ]  # fmt: skip


def test_silence_takes_no_words_away_however_busy_the_server_is(
    served: Served, talk: Client
) -> None:
    with held(served.manager):
        talk.source(0, 0, "the")
        talk.source(1, 0, "the cat sat")
        talk.source(1, 1, "")
        talk.source(1, 2, "", final=True)
    while not (update := talk.hear("update"))["final"]:
        pass
    assert (update["seg"], update["source"]) == (1, "the cat sat")


def test_a_final_is_answered_before_the_session_ends(served: Served, talk: Client) -> None:
    with held(served.manager):
        talk.source(0, 0, "the cat sat", final=True)
        talk.say("stop")
        talk.source(1, 0, "the dog")
        assert talk.hear("error")["code"] == "stopping"
    assert talk.hear("update", "bye")["final"]
    assert talk.hear("bye")["report"]["updates"] == 1
    until(lambda: len(served.manager) == 0)


def test_what_was_heard_may_become_final_word_for_word(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    talk.source(0, 0, "the cat sat", final=True)
    while not talk.hear("update")["final"]:
        pass
    talk.source(0, 0, "the cat sat", final=True)
    talk.say("ping")
    assert talk.hear()["type"] == "pong"


def test_many_finals_and_many_settings_wait_together(served: Served, talk: Client) -> None:
    with held(served.manager):
        for seg in range(100):
            talk.say("config", mask_k=seg % 5)
            talk.source(seg, 0, "the cat sat", final=True)
        talk.say("ping")
        talk.hear("pong")
    got = [talk.hear("update", "error") for _ in range(100)]
    assert [one["seg"] for one in got] == list(range(100)) and all(one["final"] for one in got)


def test_sessions_with_languages_of_their_own_never_mix() -> None:
    """Without a bias every final text is the offline one of its language."""
    streams = {language: a_stream(seed) for seed, language in enumerate(("cats", "dogs", "mice"))}
    with Served(live=LiveConfig(bias=0.0)) as served, contextlib.ExitStack() as stack:
        clients = {language: stack.enter_context(Client(served)) for language in streams}
        for language, one in clients.items():
            assert one.start(target=language)["settings"]["target"] == language
        for turn in range(max(map(len, streams.values()))):
            for language, stream in streams.items():
                if turn < len(stream):
                    source, final = stream[turn]
                    clients[language].source(0, turn, source, final=final)
        for language, one in clients.items():
            while not (update := one.hear("update"))["final"]:
                pass
            alone = LiveTranslator(
                served.manager.target, served.manager.template(language), LiveConfig(bias=0.0)
            )
            expected = alone.update(streams[language][-1][0], final=True)
            assert expected is not None and update["text"] == expected.shown


def test_settings_change_from_the_next_words_on(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    whole = talk.hear("update")
    talk.say("config", mask_k=2)
    masked = talk.hear("update")
    assert masked["rev"] == 0 and masked["id"] == whole["id"] + 1
    assert masked["text"] + masked["hidden"] == whole["text"] and masked["hidden"]
    talk.say("config", target="dogs", bias=0.0)
    talk.source(0, 1, "the cat sat")
    other = talk.hear("update")
    assert other["stats"]["drafted"] == 0 and other["text"] != whole["text"]


def test_a_bias_that_only_appends_comes_with_a_warning(served: Served) -> None:
    with Client(served) as one:
        assert one.start(bias=0.5)["type"] == "ready"
        assert "quality" in one.hear()["message"]
        one.say("config", bias=0.4)
        one.say("config", final_bias=0.7)
        one.say("ping")
        assert [one.hear()["type"] for _ in range(2)] == ["warning", "pong"]


def test_outputs_that_agree_are_shown() -> None:
    """Nothing at first, then what the last two have in common; a mask has no place beside it."""
    with (
        Served(live=LiveConfig(display=DisplayConfig(agree=2, no_shrink=True))) as other,
        Client(other) as talk,
    ):
        assert talk.start()["type"] == "ready"
        talk.source(0, 0, "the cat sat")
        first = talk.hear("update")
        talk.source(0, 1, "the cat sat on")
        second = talk.hear("update")
        assert not first["text"] and first["hidden"]
        assert first["hidden"].startswith(second["text"])
        talk.say("config", mask_k=2)
        assert talk.hear("error")["code"] == "bad_settings"
