"""The languages of the study and their groups."""

from __future__ import annotations

import re

import pytest

from draftsmith.data.languages import GROUPS, LANGUAGES, find


def test_the_languages_of_the_study_are_there_once_with_all_groups() -> None:
    assert len(LANGUAGES) == 20
    for field in ("name", "code", "flores"):
        assert len({getattr(one, field) for one in LANGUAGES}) == 20
    for one in LANGUAGES:
        assert re.fullmatch(r"[a-z]{2}", one.code)
        assert re.fullmatch(r"[a-z]{3}_[A-Z][a-z]{3}", one.flores)
        assert all(getattr(one, group) and "_" not in getattr(one, group) for group in GROUPS)
    dravidian = {one.name for one in LANGUAGES if one.family == "Dravidian"}
    assert dravidian == {"Tamil", "Telugu", "Kannada", "Malayalam"}
    latin = {one.name for one in LANGUAGES if one.script == "Latin"}
    assert latin == {"French", "Spanish", "German", "Portuguese", "Italian", "Turkish"}
    # FLORES names say the script themselves
    scripts = {"Latn": "Latin", "Deva": "Devanagari", "Hang": "Hangul", "Arab": "Arabic"}
    for one in LANGUAGES:
        assert scripts.get(one.flores[4:], one.script) == one.script


@pytest.mark.parametrize("name", ["Korean", "korean", "ko", "kor", "kor_Hang", "ko-KR", " KO "])
def test_a_language_is_found_by_name_and_code(name: str) -> None:
    found = find(name)
    assert found is not None and found.name == "Korean"
    assert find("English") is None
    assert find("k") is None
