"""The languages of the DistillBeam study and what they have in common, to group results by.

Morphology is the dominant type of a language, as handbooks sort it; every such word is a
simplification. Regions say where a language has most of its speakers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """One language and the groups it belongs to."""

    name: str
    """English name."""
    code: str
    """ISO 639-1."""
    flores: str
    """ISO 639-3 and ISO 15924, as FLORES-200 names its files."""
    script: str
    morphology: str
    region: str
    family: str


GROUPS = ("script", "morphology", "region", "family")
"""The fields of a language that results are grouped by."""

_TABLE = """
French      fr  fra_Latn  Latin       fusional       Europe      Indo-European
Spanish     es  spa_Latn  Latin       fusional       Europe      Indo-European
German      de  deu_Latn  Latin       fusional       Europe      Indo-European
Portuguese  pt  por_Latn  Latin       fusional       Europe      Indo-European
Italian     it  ita_Latn  Latin       fusional       Europe      Indo-European
Chinese     zh  zho_Hans  Han         isolating      East_Asia   Sino-Tibetan
Japanese    ja  jpn_Jpan  Japanese    agglutinative  East_Asia   Japonic
Korean      ko  kor_Hang  Hangul      agglutinative  East_Asia   Koreanic
Arabic      ar  arb_Arab  Arabic      templatic      West_Asia   Afro-Asiatic
Turkish     tr  tur_Latn  Latin       agglutinative  West_Asia   Turkic
Hindi       hi  hin_Deva  Devanagari  fusional       South_Asia  Indo-European
Bengali     bn  ben_Beng  Bengali     fusional       South_Asia  Indo-European
Tamil       ta  tam_Taml  Tamil       agglutinative  South_Asia  Dravidian
Urdu        ur  urd_Arab  Arabic      fusional       South_Asia  Indo-European
Telugu      te  tel_Telu  Telugu      agglutinative  South_Asia  Dravidian
Kannada     kn  kan_Knda  Kannada     agglutinative  South_Asia  Dravidian
Malayalam   ml  mal_Mlym  Malayalam   agglutinative  South_Asia  Dravidian
Marathi     mr  mar_Deva  Devanagari  fusional       South_Asia  Indo-European
Gujarati    gu  guj_Gujr  Gujarati    fusional       South_Asia  Indo-European
Punjabi     pa  pan_Guru  Gurmukhi    fusional       South_Asia  Indo-European
"""


def _read(line: str) -> Language:
    name, code, flores, script, morphology, region, family = line.split()
    return Language(
        name=name,
        code=code,
        flores=flores,
        script=script,
        morphology=morphology,
        region=region.replace("_", " "),
        family=family,
    )


LANGUAGES: tuple[Language, ...] = tuple(map(_read, _TABLE.strip().splitlines()))


@cache
def find(name: str) -> Language | None:
    """The language of this name or code (`Korean`, `ko`, `kor_Hang`, `ko-KR`), in any case."""
    wanted = name.strip().lower().replace("_", "-").split("-")[0]
    for one in LANGUAGES:
        if wanted in (one.name.lower(), one.code, one.flores[:3]):
            return one
    return None
