"""Files of measurements: what is wrong is named with file, row and column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.config import parse_count
from draftsmith.plan.fit import read_law
from draftsmith.plan.observations import read_counts, read_observations, read_trained
from draftsmith.plan.tables import agrees

HEAD = "target,draft,target_ppl,draft_ppl,alpha\n"


def written(folder: Path, text: str, name: str = "given.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1.8e11", 1.8e11),
        ("180000000000.0", 1.8e11),
        ("180B", 1.8e11),
        ("2.4T", 2.4e12),
        ("125m", 1.25e8),
        (" 64 K ", 64e3),
        ("12853473280", 12853473280.0),
        (".5B", 5e8),
        ("1E9", 1e9),
    ],
)
def test_counts_have_units_of_a_thousand(text: str, count: float) -> None:
    assert parse_count(text, "--tokens") == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "180G",
        "180BB",
        "B",
        "-5",
        "0",
        "0.9",
        "1e-3",
        "1,000",
        "nan",
        "inf",
        "1e999",
        "180 billion",
        "٣",
    ],
)
def test_other_units_and_amounts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tokens.*1 or more"):
        parse_count(text, "--tokens")


def test_more_columns_blank_lines_and_a_byte_order_mark_are_no_trouble(tmp_path: Path) -> None:
    text = "\ufeff\n , \nmoe, target ,draft,target_ppl,draft_ppl,alpha,table\n"
    rows = "0.002,a,b,10,20,0.6,T1\n\n,a,c,10,15,0.7,T1\n"
    first, second = read_observations(written(tmp_path, text + rows))
    assert (first.target, first.draft, first.draft_ppl, first.moe) == ("a", "b", 20.0, 0.002)
    assert second.moe is None and second.alpha == 0.7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty: it needs the columns target, draft"),
        ("\n\n", "is empty"),
        (HEAD, "holds no rows below its header"),
        ("target,draft,target_ppl,draft_pl,alpha\na,b,1,2,0.5\n", "no column 'draft_ppl'; did you"),
        ("target,draft,target_ppl,draft_ppl,alpha,alpha\n", "has the column 'alpha' twice"),
        (HEAD + "a,b,10,20\n", r"row 1 \(line 2\) has 4 values, the header has 5"),
        (
            HEAD + "a,b,10,20,0.5\na,b,10,20,1.0\n",
            r"row 2 \(line 3\), column 'alpha': must be less than 1, got '1.0'",
        ),
        (HEAD + "a,b,10,20,0\n", "column 'alpha': must be greater than 0, got '0'"),
        (HEAD + "a,b,10,20,nan\n", "column 'alpha': must be a finite number, got 'nan'"),
        (HEAD + "a,b,10,inf,0.5\n", "column 'draft_ppl': must be a finite number"),
        (HEAD + "a,b,ten,20,0.5\n", "column 'target_ppl': must be a number, got 'ten'"),
        (HEAD + "a,b,0.5,20,0.5\n", "column 'target_ppl': must be .* equal to 1, got '0.5'"),
        (HEAD + "a,,10,20,0.5\n", "column 'draft': there is no value"),
        (HEAD + "a,b,1_0,20,0.5\n", "column 'target_ppl': must be a number, got '1_0'"),
        (HEAD + "a,b,١٠,20,0.5\n", "column 'target_ppl': must be a number, got '١٠'"),
        (
            HEAD + "a,b,10,1e300,0.5\n",
            r"column 'draft_ppl': must be less .* 1000000000, got '1e300'",
        ),
        ("\n" + HEAD + "a,b,10,20,1.0\n", r"row 1 \(line 3\), column 'alpha'"),
        (HEAD.replace(",", ";"), "has semicolons between its columns: it takes commas"),
        (HEAD.replace(",", "\t"), "has tabs between its columns: it takes commas"),
    ],
)
def test_observations_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=said) as error:
        read_observations(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("reader", "text", "said"),
    [
        (read_trained, "params,tokens,loss\n1e8,180Q,3\n", r"row 1 .*'tokens': it must be a count"),
        (
            read_trained,
            "params,tokens,loss\n-1,1e9,3\n",
            "column 'params': it must be a count of 1",
        ),
        (
            read_trained,
            "params,tokens,loss\n1e8,1e9,0\n",
            "column 'loss': must be greater than or equal to 0.000001",
        ),
        (
            read_trained,
            "params,tokens,perplexity\n1e8,1e9,1\n",
            "'perplexity': must be greater than 1",
        ),
        (read_trained, "params,tokens\n1e8,1e9\n", "neither a column 'loss'"),
        (read_trained, "params,tokens,loss,perplexity\n1,1,1,2\n", "both a column 'loss'"),
        (read_counts, "gamma,accepted_length,count\n2,3,5\n", r"row 1 .*: 3 tokens"),
        (
            read_counts,
            "gamma,accepted_length,count\n2,1,-5\n",
            "column 'count': must be .* equal to 0, got '-5'",
        ),
        (
            read_counts,
            "gamma,accepted_length,count\n2,1,1.5\n",
            "column 'count': must be a whole number, got '1.5'",
        ),
        (
            read_counts,
            "gamma,accepted_length,count\n0,0,5\n",
            "column 'gamma': must be .* equal to 1, got '0'",
        ),
        (read_counts, "gamma,accepted_length,count\n2,1,0\n", "all counts are 0"),
        (
            read_counts,
            "gamma,accepted_length,count\n1e12,1,5\n",
            "row 1 .*'gamma': must be less .* 10000, got '1e12'",
        ),
        (
            read_counts,
            "gamma,accepted_length,count\n10001,1,5\n",
            "'gamma': must be less .* 10000, got '10001'",
        ),
        (read_counts, "gamma,accepted_length,count\n2,1,1e300\n", "'count': .* got '1e300'"),
        (read_counts, "gamma,count\n2,1\n", "no column 'accepted_length'"),
        (
            read_counts,
            "prompt,gamma,accepted_length,count\na,2,1,5\n,2,1,5\n",
            r"row 2 .*'prompt': there is no value",
        ),
        (
            read_counts,
            "prompt,gamma,accepted_length,count\n,2,1,5\n,2,1,5\n",
            r"row 1 .*'prompt': there is no value",
        ),
        (read_counts, "gamma,accepted_length,count\n2,3,5\n", "accepted_length: 3 tokens"),
        (read_counts, "gamma,accepted_length,count\n2,1,1e30\n", "must be less .*got '1e30'"),
        (read_trained, "params,tokens,loss,perplexity\n1,1,1,\n", "both a column 'loss'"),
        (read_trained, "params,tokens,loss\n1,1,\n", r"row 1 .*'loss': there is no value"),
    ],
)
def test_runs_and_counts_that_cannot_be_used(
    tmp_path: Path, reader: Callable[[Path], object], text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=said) as error:
        reader(path)
    assert str(path) in str(error.value)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.csv.*No such file"):
        read_observations(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="cannot read"):
        read_observations(tmp_path / "binary.csv")


def test_perplexities_of_runs_become_losses(tmp_path: Path) -> None:
    (one,) = read_trained(written(tmp_path, "params,tokens,perplexity\n125M,180B,7.389056\n"))
    assert (one.params, one.tokens) == (1.25e8, 1.8e11)
    assert one.loss == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no law"),
        ("{", "cannot read the law"),
        ('{"A": 1, "B": 2}', "option 'C' of LawFile is missing in"),
        ('{"A": 1, "B": null, "C": 0}', "option B in .*: expected float, got None"),
        ('{"A": 1, "B": "x", "C": 0}', "option B in .*: expected float, got 'x'"),
        ('{"A": 1, "B": NaN, "C": 0}', "option B in .*: expected float, got nan"),
        ('{"A": 1, "B": 2, "C": 0, "cov": [[1, 2], [2, 1]]}', "option cov.*: expected 3 values"),
        ('{"A": 1, "B": 2, "C": 0, "cov": [[1,0,0],[0,-1,0],[0,0,1]]}', "no negative variance"),
        ('{"A": 1, "B": 2, "C": 0, "cov": [[1,5,0],[0,1,0],[0,0,1]]}', "symmetric"),
        ('{"A": 1, "B": 2, "C": 0, "cov": "none"}', "option cov in"),
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [["1",0,0],[0,1,0],[0,0,1]]}',
            "float, got '1'",
        ),
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [[true,0,0],[0,1,0],[0,0,1]]}',
            "float, got True",
        ),
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [[1,0,0],[0,1],[0,0,1]]}',
            "expected 3 values, got 2",
        ),
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [[1,0,0],[0,1e999,0],[0,0,1]]}',
            "float, got inf",
        ),
        # the rates of a real fit: variances of 1e-7
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [[4e-7,1e-9,0],[-9e-9,2e-6,0],[0,0,4e-4]]}',
            "symmetric",
        ),
        (
            '{"A": 1, "B": 2, "C": 0, "cov": [[4e-7,0,2e-5],[0,2e-6,0],[2e-5,0,4e-4]]}',
            "no negative variance",
        ),
        ("[" * 100_000, "cannot read the law"),
        ('{"A": ' + "9" * 5000 + ', "B": 2, "C": 0}', "cannot read the law"),
        ('{"A": 1, "B": 2, "C": 0, "mse": true, "n": 9}', "option mse in .*, got True"),
        ('{"A": 1, "B": 2, "C": 0, "mse": 1, "n": 3}', "'mse' and 'n' must be those of a fit"),
    ],
)
def test_laws_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text, "law.json")
    with pytest.raises(ValueError, match=said) as error:
        read_law(path)
    assert str(path) in str(error.value)


def test_a_law_may_have_a_byte_order_mark_and_a_rounded_covariance(tmp_path: Path) -> None:
    cov = "[[4e-7,1e-9,0],[1.0000001e-9,2e-6,0],[0,0,0]]"
    text = '\ufeff{"A": -1, "B": 2, "C": 0, "cov": ' + cov + "}"
    law = read_law(written(tmp_path, text, "law.json"))
    assert law.cov is not None and law.cov[0] == (4e-7, 1e-9, 0.0)


def test_a_law_without_covariance_is_a_law(tmp_path: Path) -> None:
    law = read_law(written(tmp_path, '{"A": -1, "B": 2, "C": 0}', "law.json"))
    assert (law.A, law.B, law.C, law.cov) == (-1.0, 2.0, 0.0, None)


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("0.002160", 0.00215951, True),
        ("0.002160", 0.0021594, False),
        ("2.71e-3", 2.7096e-3, True),
        ("8.50e7", 8.4951e7, True),
        ("8.50e7", 8.4949e7, False),
        ("-0.006700", -0.00670008, True),
    ],
)
def test_agreement_is_to_the_printed_digits(text: str, value: float, same: bool) -> None:
    assert agrees(text, value) == same
