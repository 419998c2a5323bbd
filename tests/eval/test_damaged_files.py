"""Damaged files of an evaluation are named."""

import json
from pathlib import Path

import pytest

from draftsmith.eval.report_page import files as report_files
from draftsmith.recipes.errors import UserError
from tests.report_cases import MAIN, evaluate, make_recipe

GOOD_METRICS = {"step": 1, "loss": 2.0, "simulated_tau": 1.7}


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"not json", "malformed JSON"), (b"[1, 2]", "not a JSON object"), (b'{"step": 2}', "lacks loss, simulated_tau")],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, "0", 1)])
    good = json.dumps(GOOD_METRICS).encode()
    report_files.metrics_path(recipe).write_bytes(b"\n".join((good, line, good, b"")))
    with pytest.raises(UserError, match=rf"metrics\.jsonl:2: {said}.*; delete the line"):
        report_files.write_report(recipe)


def test_a_damaged_answer_is_named(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(MAIN, "other"))
    path = report_files.generations_path(recipe)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 9 and MAIN.encode() in lines[7]
    path.write_bytes(b"\n".join([*lines[:7], lines[7][:-9], lines[8]]))
    with pytest.raises(UserError, match=r"generations\.jsonl:8: malformed JSON.*run `draftsmith evaluate` again"):
        report_files.write_report(recipe)
    path.write_bytes(b"\n".join(line for line in lines if MAIN.encode() not in line))
    with pytest.raises(UserError, match=r"holds no answer of 'eagle3, tree of 60'; it is damaged, or of another run"):
        report_files.write_report(recipe)


@pytest.mark.parametrize("text", [b"[1]", b'{"contender": "a", "contend', b'{"tau": 1}'])
def test_damaged_numbers_are_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "acceptance.json").write_bytes(text)
    with pytest.raises(UserError, match=r"acceptance\.json: .*written by another version; run `draftsmith evaluate`"):
        report_files.read_acceptance(tmp_path / "acceptance.json")
