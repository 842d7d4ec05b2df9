"""Prompt files: every layout people use is read, every damage is named with its line."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import tiny_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.prompts import Message, Prompt, note_plain, text_prompts
from draftsmith.data.suites import load_prompts, load_suite
from draftsmith.errors import InputError
from draftsmith.live.config import PromptConfig
from draftsmith.live.templates import Template

DATA = Path(
    os.environ.get("DRAFTSMITH_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "prompts").is_dir(), reason="the reference data folder is not here"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def write(folder: Path, *records: object, name: str = "p.jsonl") -> Path:
    path = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Tokenizer:
    """Characters as tokens, <s> (token 1) in front; the template marks roles."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        said = "".join(f"<{m['role']}>{m['content']}" for m in conversation)
        return said + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


HALF = "a\ud83d"
"""Half an emoji: JSON writes it as an escape."""


def turns_of(*texts: str) -> list[dict[str, str]]:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "def f("}, Prompt(id="1", text="def f(")),
        ({"text": "Once"}, Prompt(id="1", text="Once")),
        ({"question": "Why?"}, Prompt(id="1", messages=(user("Why?"),))),
        (
            {"turns": ["A", "B", "C"], "category": "math", "question_id": 81, "reference": ["r"]},
            Prompt(id="81", messages=(user("A"),), turns=("B", "C"), tag="math", reference=("r",)),
        ),
        (
            {"instruction": "Sum up.", "input": "Text", "output": "T"},
            Prompt(id="1", messages=(user("Sum up.\n\nText"),), reference=("T",)),
        ),
        (
            {"instruction": "Sum up.", "instances": [{"input": "Text", "output": "T"}], "id": "s"},
            Prompt(id="s", messages=(user("Sum up.\n\nText"),), reference=("T",)),
        ),
        ({"instruction": "Go.", "input": ""}, Prompt(id="1", messages=(user("Go."),))),
        (
            {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
            Prompt(id="1", messages=(Message(role="system", content="S"), user("U"))),
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "U"}]}]},
            Prompt(id="1", messages=(user("U"),)),
        ),
        (
            {
                "id": "x",
                "conversations": [
                    {"from": "gpt", "value": "left over"},
                    {"from": "human", "value": "A"},
                    {"from": "gpt", "value": "a"},
                    {"from": "human", "value": "B"},
                    {"from": "gpt", "value": "b"},
                ],
            },
            Prompt(
                id="x",
                messages=(user("A"),),
                turns=("B",),
                answers=("a", "b"),
                reference=("a",),
            ),
        ),
        (
            {"prompt": "p", "reference": [["a", "b"], ["c"]], "language": "de", "tag": "t"},
            Prompt(id="1", text="p", reference=("a", "b", "c"), language="de", tag="t"),
        ),
        ({"prompt": "p", "messages": None}, Prompt(id="1", text="p")),
        (
            {"messages": turns_of("A", "a")},
            Prompt(id="1", messages=(user("A"),), answers=("a",), reference=("a",)),
        ),
        (
            {"turns": ["A", "B"], "reference": [["a", "A."], "b"]},
            Prompt(
                id="1",
                messages=(user("A"),),
                turns=("B",),
                answers=("a", "b"),
                reference=("a", "A."),
            ),
        ),
        (  # alternatives of one turn, not one for each
            {"turns": ["A", "B"], "reference": [["a", "A."]]},
            Prompt(id="1", messages=(user("A"),), turns=("B",), reference=("a", "A.")),
        ),
        (  # what the file says beside a chat comes before what the chat says
            {"messages": turns_of("A", "a", "B", "b"), "reference": ["x", "y"]},
            Prompt(
                id="1", messages=(user("A"),), turns=("B",), answers=("x", "y"), reference=("x",)
            ),
        ),
        (
            {"messages": turns_of("A", "a", "B", "b"), "reference": "x"},
            Prompt(
                id="1", messages=(user("A"),), turns=("B",), answers=("a", "b"), reference=("x",)
            ),
        ),
    ],
)
def test_every_layout_is_read(record: dict[str, Any], expected: Prompt, tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, record)) == (expected,)


def test_a_chat_that_waits_for_an_answer_keeps_its_history(tmp_path: Path) -> None:
    chat = [("user", "A"), ("assistant", "a"), ("user", "B")]
    record = {"messages": [{"role": role, "content": text} for role, text in chat]}
    (prompt,) = load_prompts(write(tmp_path, record))
    assert [(m.role, m.content) for m in prompt.messages] == chat
    assert prompt.turns == ()


def test_compressed_files_plain_files_and_arrays(tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\n\n{"prompt": "b"}\n'
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "p.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "p.json").write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    (tmp_path / "q.json").write_text(lines)
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa\r\n \nb"))
    for name in ("p.jsonl.gz", "p.jsonl.xz", "p.json", "q.json", "p.txt.gz"):
        assert [p.text for p in load_prompts(tmp_path / name)] == ["a", "b"], name
    assert [p.text for p in load_prompts(tmp_path / "p.txt.gz", limit=1)] == ["a"]


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a\u2028b\x85c"})
    assert load_prompts(path)[0].text == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"p\.jsonl, line 2: not JSON"),
        (["[1]"], "line 1: expected a JSON object, got list"),
        (['{"prompt": "a"}', '{"prompt": "  "}'], "line 2: field 'prompt': the prompt is empty"),
        (['{"prompt": 3}'], "field 'prompt': expected text, got 3"),
        (['{"promt": "a"}'], "no prompt in the fields promt; a prompt is one of messages"),
        (['{"turns": []}'], "expected a list of user turns"),
        (['{"turns": ["a", ""]}'], "field 'turns', turn 2: the prompt is empty"),
        (['{"messages": [{"role": "usr", "content": "a"}]}'], "did you mean 'user'"),
        (['{"messages": [{"role": "user", "content": ""}]}'], "message 1: expected text"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}'], "no message of the user"),
        (['{"messages": [{"role": "user", "content": [{"type": "image"}]}]}'], "only text"),
        (['{"messages": "a"}'], "expected a list of messages, got str"),
        (['{"prompt": "a", "reference": 3}'], "field 'reference': expected text or a list"),
        (['{"prompt": "a", "id": [3]}'], "field 'id': expected text"),
        (['{"instruction": "a", "input": 3}'], "field 'input': expected text"),
        (["", " "], "no prompts in this file"),
        (["[" * 100_000], "line 1: not JSON"),
    ],
)
def test_damage_is_named_with_its_line(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": HALF},
        {"question": HALF},
        {"turns": ["a", HALF]},
        {"instruction": "a", "input": HALF},
        {"instruction": "a", "instances": [{"input": HALF}]},
        {"instruction": "a", "instances": [{"output": HALF}]},
        {"messages": turns_of("a", HALF)},
        {"messages": [{"role": "user", "content": ["a", HALF]}]},
        {"prompt": "a", "reference": HALF},
        {"prompt": "a", "answer": ["b", ["c", HALF]]},
        {"prompt": "a", "id": HALF},
        {"prompt": "a", "category": HALF},
        {"prompt": "a", "language": HALF},
    ],
)
def test_half_a_character_is_named_with_its_line(record: dict[str, Any], tmp_path: Path) -> None:
    whole = json.loads(json.dumps(record).replace(json.dumps(HALF), json.dumps("a\U0001f600")))
    first = json.dumps(whole)  # as two halves that make one character
    with pytest.raises(InputError, match=r"p\.jsonl, line 2: .*lone surrogate"):
        load_prompts(write(tmp_path, first, json.dumps(record)))
    assert load_prompts(write(tmp_path, first))


def test_the_fault_of_an_array_over_several_lines_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": HALF}], indent=1))
    with pytest.raises(InputError, match=r"p\.json: .*lone surrogate"):
        load_prompts(path)
    path.write_text('[\n {"prompt": "a"},\n {"prompt": }\n]')
    with pytest.raises(InputError, match=r"p\.json: .*line 3"):
        load_prompts(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "text.jsonl.gz").write_text('{"prompt": "a"}')
    (tmp_path / "text.jsonl.xz").write_text('{"prompt": "a"}')
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-20])
    (tmp_path / "short.jsonl.xz").write_bytes(lzma.compress(b'{"prompt": "a"}\n' * 100)[:-20])
    (tmp_path / "empty.jsonl").write_text("")
    for name, message in {
        "missing.jsonl": "does not exist",
        ".": "is a folder",
        "latin.txt": r"line 2 is not UTF-8 text \(byte 0xe9 at 3\)",
        "binary.txt": "line 1 holds a NUL character",
        "text.jsonl.gz": "damaged or not a .gz file",
        "text.jsonl.xz": "damaged or not a .xz file",
        "short.jsonl.gz": "damaged or not a .gz file",
        "short.jsonl.xz": "damaged or not a .xz file",
        "empty.jsonl": "no prompts in this file",
    }.items():
        with pytest.raises(InputError, match=message):
            load_prompts(tmp_path / name)


def test_a_name_that_is_neither_file_nor_suite_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"prompt.*'nothing'"):
        load_suite("nothing")
    with pytest.raises(InputError, match="does not exist"):
        load_suite("nothing.jsonl")


def test_ids_that_occur_twice_are_told_apart(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "a#2", "a", 5, None, "5"]
    lines = [json.dumps({"text": "x", **({} if i is None else {"id": i})}) for i in ids]
    found = [prompt.id for prompt in load_prompts(write(tmp_path, *lines))]
    assert found == ["a", "b", "a#2", "a#2#2", "a#3", "5", "7", "5#2"]


_FOREVER = "{% for i in range(50000) %}{% for j in range(50000) %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", r", line 1\b"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ raise_exception('no system turns') }}", "no system turns"),
        ("{{ 'x' * 2000000 }}", "makes 2,000,000 characters of a chat of"),
        (f"{_FOREVER}x{{% endfor %}}{{% endfor %}}", "computes for more than 1 s"),
        (f"{_FOREVER}{{% endfor %}}{{% endfor %}}", "computes for more than 1 s"),
        ("{{ lipsum(n=90000) }}", "computes for more than 1 s"),
        ("{{ messages | length * 9**(9**5) }}", "raises to a power"),
    ],
)
def test_a_chat_template_that_fails_is_named_by_its_file(
    template: str, said: str, tmp_path: Path
) -> None:
    """Broken, wrong for this chat, or one that refuses it; of prompts and of live translation."""
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = Prompt(id="a", messages=(Message(role="user", content="hi"),))
    live = Template.of(PromptConfig(template="chat"), tokenizer)
    for render in (lambda: prompt.render(tokenizer), lambda: live.encode("hi")):
        with pytest.raises(InputError, match=rf"chat_template\.jinja.*{said}") as caught:
            render()
        assert caught.value.exit_code == 2


def test_stars_that_are_no_power_are_taken(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    named = "{{ dict(a=1, **{'b': 2}).b }}{{ dict(**{}) }}"
    text = "{# ** #}{{ messages[0].role }}**{{ messages[0].content }}** {{ '**' }}"
    (tmp_path / "chat_template.jinja").write_text(text + named)
    prompt = Prompt(id="a", messages=(Message(role="user", content="hi"),))
    assert prompt.render(AutoTokenizer.from_pretrained(tmp_path)) == "user**hi** **2{}"


def test_rendering_uses_the_chat_template_for_chats_only() -> None:
    plain = Prompt(id="1", text="ab")
    chat = Prompt(id="2", messages=(user("a"),), turns=("b",))
    with_template, without = Tokenizer("yes"), Tokenizer(None)
    assert plain.render(with_template) == "ab"
    assert plain.token_ids(with_template) == (1, 97, 98)
    assert chat.render(with_template) == "<user>a<assistant>"
    assert chat.token_ids(with_template)[0] != 1, "the template writes the start token itself"
    assert chat.render(with_template, ["x"]) == "<user>a<assistant>x<user>b<assistant>"
    assert chat.render(without) == "a"
    assert chat.token_ids(without) == (1, 97)
    with pytest.raises(InputError, match="no turn to ask"):
        chat.render(without, ["x", "y"])


def test_prompts_of_the_command_line_are_chats_of_one_turn_unless_they_are_raw() -> None:
    texts = ["a", "b"]
    raw, chats = text_prompts(texts, raw=True), text_prompts(texts, raw=False)
    assert [p.text for p in raw] == [p.asked for p in raw] == [p.asked for p in chats] == texts
    with_template, without = Tokenizer("yes"), Tokenizer(None)
    assert [p.render(with_template) for p in chats] == ["<user>a<assistant>", "<user>b<assistant>"]
    assert [p.render(with_template) for p in raw] == texts
    # no template: both are the same tokens, the start token among them
    assert [p.token_ids(without) for p in chats] == [p.token_ids(without) for p in raw]
    for kind in (True, False):
        with pytest.raises(InputError, match="prompt 2 is empty"):
            text_prompts(["a", " \n"], raw=kind)
        with pytest.raises(InputError, match=r"prompt 2\b.*lone surrogate"):
            text_prompts(["a", "caf\udce9"], raw=kind)


def test_plain_prompts_of_a_file_are_noted_where_the_model_is_a_chat_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mixed = (Prompt(id="1", text="ab"), Prompt(id="2", messages=(user("a"),)))
    with caplog.at_level("INFO", logger="draftsmith"):
        note_plain(mixed, Tokenizer(None))
        note_plain(mixed[1:], Tokenizer("yes"))
        assert not caplog.messages
        note_plain(mixed, Tokenizer("yes"))
    (said,) = caplog.messages
    assert said.startswith("1 of 2 prompts are plain text")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.just("\ud83d"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "x"]), inner)
    ),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    "messages conversations turns prompt question instruction text input instances reference "
    "answer output language tag category id question_id other".split()
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=4), st.binary(max_size=8), st.integers(0, 200))
def test_any_record_and_any_damage_is_read_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any], noise: bytes, at: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    line = json.dumps(record).encode()
    for content in (line, line[:at] + noise + line[at:]):
        path.write_bytes(content)
        try:
            prompts = load_prompts(path)
        except InputError as error:
            assert "fuzz.jsonl" in str(error)
        else:
            assert all(p.render(Tokenizer("yes")).encode() is not None for p in prompts)


COUNTS = {  # file: prompts, chats, with a reference, with further turns
    "alpaca/seed_tasks.jsonl": (175, 175, 175, 0),
    "dolly/chinkara-open_qa.jsonl.xz": (3742, 0, 0, 0),
    "gsm8k/test.jsonl.xz": (1319, 1319, 1319, 0),
    "hellaswag/klosax_val_correct_800.txt": (800, 0, 0, 0),
    "hellaswag/klosax_val_wrong_800.txt": (800, 0, 0, 0),
    "humaneval/HumanEval.jsonl.gz": (164, 0, 164, 0),
    "mt_bench/question.jsonl": (80, 80, 39, 80),
    "spec_bench/question.jsonl.xz": (480, 480, 359, 80),
}


@needs_data
@pytest.mark.parametrize("name", list(COUNTS))
def test_the_well_known_suites_are_read_completely(name: str) -> None:
    prompts = load_suite(DATA / "prompts" / name)
    counts = (
        len(prompts),
        sum(p.is_chat for p in prompts),
        sum(bool(p.reference) for p in prompts),
        sum(bool(p.turns) for p in prompts),
    )
    assert counts == COUNTS[name]
    assert len({p.id for p in prompts}) == len(prompts)


@needs_data
def test_every_file_of_the_data_folder_is_read_or_refused_by_name() -> None:
    refused = set()
    for path in sorted(path for path in DATA.rglob("*") if path.is_file()):
        try:
            assert load_prompts(path, limit=20_000)
        except InputError as error:
            assert path.name in str(error)
            refused.add(path.suffixes[-1])
    assert refused <= {".bin", ".model", ".safetensors", ".json", ".jsonl", ".npz", ".xz"}
