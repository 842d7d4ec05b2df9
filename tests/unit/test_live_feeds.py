"""Every recogniser's lines become the same hypotheses: short recordings, and round trips."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed_cases import WRITERS, Segment, as_lines, heard, piece, result, transcript

from draftsmith.errors import InputError
from draftsmith.live.feeds import FEEDS, open_feed
from draftsmith.live.records import Hypothesis

# The sequence in the documentation of StreamingRecognizeResponse.
TO_BE = [
    {"results": [result("tube", stability=0.01)]},
    {"results": [result("to be a", stability=0.01)]},
    {"results": [result("to be", stability=0.9), result(" or not to be", stability=0.01)]},
    {"results": [result("to be or not to be", "to bee or not to bee", is_final=True)]},
    {"results": [result(" that's", stability=0.01)]},
    {"results": [result(" that is", stability=0.9), result(" the question", stability=0.01)]},
    {"results": [result(" that is the question", " that was the question", is_final=True)]},
]
TO_BE_SAID = [
    (0, 0, "tube", False),
    (0, 1, "to be a", False),
    (0, 2, "to be or not to be", False),
    (0, 3, "to be or not to be", True),
    (1, 0, "that's", False),
    (1, 1, "that is the question", False),
    (1, 2, "that is the question", True),
]


# --------------------------------------------------------------------------- one feed each


def test_google_as_documented() -> None:
    assert heard("google", as_lines(*TO_BE)) == TO_BE_SAID


def test_google_with_the_names_of_its_json() -> None:
    text = json.dumps(TO_BE).replace("is_final", "isFinal")
    events = [{"speechEventType": "SPEECH_ACTIVITY_BEGIN"}, {"results": [{"stability": 0.1}]}]
    assert heard("google", as_lines(*events, *json.loads(text))) == TO_BE_SAID


def test_a_google_message_may_end_a_segment_and_begin_the_next() -> None:
    both = {"results": [result("to be", isFinal=True), result(" or"), result(" not")]}
    assert heard("google", as_lines(both)) == [
        (0, 0, "to be", True),
        (1, 0, "or not", False),
        (1, 1, "or not", True),
    ]


def test_lines_with_an_empty_one_behind_each_segment() -> None:
    feed = ["\n", "This is\n", "This is an\r\n", "\n", "  \n", "Next one\n"]
    assert heard("lines", feed) == [
        (0, 0, "This is", False),
        (0, 1, "This is an", False),
        (0, 2, "This is an", True),
        (1, 0, "Next one", False),
        (1, 1, "Next one", True),
    ]


def test_jsonl_keeps_its_numbers_and_ends_what_was_left_open() -> None:
    feed = as_lines(
        {"seg": 2, "rev": 4, "text": "This is", "reference": "Das ist", "time": 1.5},
        {"seg": 2, "rev": 7, "text": ""},
        {"seg": 5, "rev": 0, "text": " Next ", "final": True},
        {"seg": 6, "rev": 0, "text": ""},
        {"seg": 6, "rev": 1, "text": " ", "final": True},
        {"seg": 7, "rev": 0, "text": "Last"},
        {"seg": 7, "rev": 1, "text": "", "final": True},
    )
    assert heard("jsonl", feed) == [
        (2, 4, "This is", False),
        (2, 7, "", False),
        (2, 8, "This is", True),
        (5, 0, " Next ", True),
        (6, 0, "", False),
        (7, 0, "Last", False),
        (7, 1, "Last", True),
    ]
    first, *_ = open_feed("jsonl").read(feed)
    assert (first.reference, first.time) == ("Das ist", 1.5)


def test_simulstreaming_rows_hold_what_is_new() -> None:
    feed = as_lines(
        {"start": 0.0, "end": 1.2, "text": " And so", "is_final": False, "emission_time": 1.25},
        {"start": 1.2, "end": 2.4, "text": " my fellow Americans", "is_final": False},
        {"start": 2.4, "end": 3.6, "text": ",", "is_final": False},
        {"is_final": True, "emission_time": 4},
        {"start": 4.8, "end": 6.0, "text": " ask not", "is_final": True},
        {"is_final": True},
    )
    assert heard("simulstreaming", feed) == [
        (0, 0, "And so", False),
        (0, 1, "And so my fellow Americans", False),
        (0, 2, "And so my fellow Americans,", False),
        (0, 3, "And so my fellow Americans,", True),
        (1, 0, "ask not", True),
    ]
    times = [one.time for one in open_feed("simulstreaming").read(feed)]
    assert times == [1.25, None, None, 4.0, None]


def test_textflow_holds_all_that_is_not_complete() -> None:
    feed = [
        "100 101 there have been",
        "100 101 There have been many",
        "100 110 There have been many revolutions.",
        "200 201 We are",
        "100 110 There have been many revolutions.",
        "200 201 We are living",
        "100 200 There have been many revolutions!",
        "200 201 We are living on",
        "200 210 We are living.",
    ]
    assert heard("textflow", feed) == [
        (0, 0, "there have been", False),
        (0, 1, "There have been many", False),
        (0, 2, "There have been many revolutions.", False),
        (0, 3, "There have been many revolutions. We are", False),
        (0, 4, "There have been many revolutions. We are living", False),
        (0, 5, "There have been many revolutions!", True),
        (1, 0, "We are living on", False),
        (1, 1, "We are living.", False),
        (1, 2, "We are living.", True),
    ]


def test_textflow_forgets_sentences_that_the_last_round_did_not_reach() -> None:
    three = ["100 110 A.", "200 210 B.", "300 310 C."]
    two = ["100 110 A.", "200 210 B C."]
    assert heard("textflow", [*three, *two, "100 110 AA."])[-2][2] == "AA. B C."
    one = ["100 101 A B C"]  # the incoming sentence is the last one of its round
    assert heard("textflow", [*three, *one])[-2][2] == "A B C"


def test_textflow_keeps_what_follows_a_complete_sentence() -> None:
    feed = ["100 110 A.", "200 210 B.", "100 200 A.", "300 301 c"]  # 200 did not change
    assert heard("textflow", feed)[2:4] == [(0, 2, "A.", True), (1, 0, "B. c", False)]


def test_textflow_ignores_a_complete_sentence_that_comes_again() -> None:
    feed = ["100 200 A.", "100 200 A.", "200 200200 x"]
    with pytest.raises(InputError, match="line 3"):
        heard("textflow", feed)
    assert heard("textflow", feed[:2]) == [(0, 0, "A.", True)]


def test_aws_events_with_and_without_their_name() -> None:
    feed = as_lines(
        {"TranscriptEvent": {"Transcript": {"Results": []}}},
        {"TranscriptEvent": transcript("to", "a1", True)},
        transcript("to be", "a1", True),
        transcript("To be.", "a1", False),
        transcript("or", "b2", True),
        transcript("not", "c3", True),  # b2 never ended
    )
    assert heard("aws", feed) == [
        (0, 0, "to", False),
        (0, 1, "to be", False),
        (0, 2, "To be.", True),
        (1, 0, "or", False),
        (1, 1, "or", True),
        (2, 0, "not", False),
        (2, 1, "not", True),
    ]


@pytest.mark.parametrize("partial", [True, False])
def test_aws_results_of_two_channels_are_refused(partial: bool) -> None:
    feed = as_lines(
        transcript("to", "left", partial),
        transcript("hello", "right", True),
        transcript("to be", "left", True),
    )
    with pytest.raises(InputError, match=r"line 3.*'left'"):
        heard("aws", feed)


def test_deepgram_utterances_end_with_speech_final_or_utterance_end() -> None:
    feed = as_lines(
        {"type": "Metadata", "request_id": "r"},
        {"type": "SpeechStarted", "channel": [0, 1], "timestamp": 0.1},
        piece("", False, False),
        piece("yeah so", False, False),
        piece("Yeah, so my card is", True, False),
        piece("two two", False, False),
        piece("", True, False),
        piece("two two two", True, True),
        {"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 2.1},
        piece("Bye.", True, False),
        {"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 4.0},
        piece("So", False, False),
        piece("", True, True),
    )
    assert heard("deepgram", feed) == [
        (0, 0, "", False),
        (0, 1, "yeah so", False),
        (0, 2, "Yeah, so my card is", False),
        (0, 3, "Yeah, so my card is two two", False),
        (0, 4, "Yeah, so my card is", False),
        (0, 5, "Yeah, so my card is two two two", True),
        (1, 0, "Bye.", False),
        (1, 1, "Bye.", True),
        (2, 0, "So", False),
        (2, 1, "So", True),
    ]


def test_azure_results_of_both_output_formats_and_events() -> None:
    feed = as_lines(
        {"Id": "1", "Text": "to be", "Offset": 100, "Duration": 5000, "Channel": 0},
        {"Id": "2", "RecognitionStatus": "Success", "DisplayText": "To be.", "Offset": 100},
        {"Id": "3", "Text": "or"},
        {
            "RecognitionStatus": "Success",
            "NBest": [{"Lexical": "or not", "Display": "Or not."}, {"Display": "Or knot."}],
        },
        {"Id": "4", "RecognitionStatus": "NoMatch", "Offset": 900},
        {"event": "recognizing", "text": "bye"},
        {"event": "recognized", "text": "Bye."},
        {"Text": "hm"},
        {"RecognitionStatus": "InitialSilenceTimeout", "DisplayText": ""},
    )
    assert heard("azure", feed) == [
        (0, 0, "to be", False),
        (0, 1, "To be.", True),
        (1, 0, "or", False),
        (1, 1, "Or not.", True),
        (2, 0, "bye", False),
        (2, 1, "Bye.", True),
        (3, 0, "hm", False),
        (3, 1, "hm", True),
    ]


def test_an_empty_hypothesis_is_passed_on_and_the_words_before_it_end_the_segment() -> None:
    assert heard("azure", as_lines({"Text": "hm"}, {"Text": " "})) == [
        (0, 0, "hm", False),
        (0, 1, "", False),
        (0, 2, "hm", True),
    ]


# --------------------------------------------------------------------------- all feeds


@st.composite
def growing(draw: st.DrawFn) -> Segment:
    """A segment that only grows, and whose final is what was heard last: all feeds can say it."""
    words = draw(st.lists(st.sampled_from(["a", "Bär", "c.", "公园", '"d"']), min_size=1))
    texts = [" ".join(words[:end]) for end in range(1, len(words) + 1)]
    return [*texts, texts[-1]]


def test_there_is_a_round_trip_for_every_feed() -> None:
    assert WRITERS.keys() == FEEDS.keys()


@pytest.mark.parametrize("name", WRITERS)
@given(segments=st.lists(growing(), max_size=4))
@pytest.mark.every(3)
def test_what_a_recogniser_said_comes_out_of_its_feed(name: str, segments: list[Segment]) -> None:
    assert heard(name, list(WRITERS[name](segments))) == [
        (seg, rev, text, rev == len(texts) - 1)
        for seg, texts in enumerate(segments)
        for rev, text in enumerate(texts)
    ]


@pytest.mark.parametrize("name", WRITERS)
@given(segments=st.lists(growing(), min_size=1, max_size=3), data=st.data())
@pytest.mark.every(3)
def test_an_input_that_breaks_off_ends_with_a_final(
    name: str, segments: list[Segment], data: st.DataObject
) -> None:
    whole = list(WRITERS[name](segments))
    said = heard(name, whole[: data.draw(st.integers(1, len(whole)))])
    seg, rev, text, final = said[-1]
    assert final
    assert text in segments[seg]
    assert [one[:2] for one in said] == sorted({one[:2] for one in said})
    assert [number for number, *_, last in said if last] == list(range(seg + 1))
    assert rev == len([one for one in said if one[0] == seg]) - 1


@pytest.mark.parametrize("name", WRITERS)
def test_every_line_is_answered_before_the_next_is_read(name: str) -> None:
    read = []

    def live() -> Iterator[str]:
        for line in WRITERS[name]([["a b", "a b c", "a b c"]]):
            read.append(line)
            yield line

    hypotheses = open_feed(name).read(live())
    assert next(hypotheses).text == "a b"
    assert len(read) == 1
    assert next(hypotheses).text == "a b c"
    assert len(read) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_no_input_is_no_hypothesis(name: str) -> None:
    assert heard(name, []) == []
    assert heard(name, ["\n", "  \n"]) == []


def test_an_unknown_feed_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'googel'.*'google'"):
        open_feed("googel")


def test_a_stream_of_our_own_goes_through_unchanged() -> None:
    stream = [
        Hypothesis(seg=0, rev=0, text="to  be", reference="sein", time=0.5),
        Hypothesis(seg=0, rev=2, text="to be", final=True, reference="sein", time=1.0),
        Hypothesis(seg=3, rev=0, text="or not", final=True),
    ]
    feed = [
        json.dumps({name: getattr(one, name) for name in Hypothesis.__slots__}) for one in stream
    ]
    assert list(open_feed("jsonl").read(feed)) == stream
