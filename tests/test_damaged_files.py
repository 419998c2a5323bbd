"""Damaged files of an evaluation: each mistake is named, and what is whole is shown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.page import files as report_files
from draftsmith.recipes.errors import UserError
from tests.report_cases import MAIN, Page, evaluate, make_recipe, page_of, script_lines

GOOD_METRICS = {"step": 1, "loss": 2.0, "accuracy": [0.5, 0.4], "simulated_tau": 1.7, "lr": 1e-4}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json", "malformed JSON"),
        (b"[1, 2]", "not a JSON object"),
        (json.dumps(GOOD_METRICS | {"accuracy": []}).encode(), "accuracy: "),
        (json.dumps(GOOD_METRICS | {"accuracy": [0.5]}).encode(), "1 unroll steps, the first line has 2"),
        (json.dumps(GOOD_METRICS | {"step": "2"}).encode(), "step: Input should be a valid integer"),
    ],
    ids=range(5),
)
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, "0", 1)])
    good = json.dumps(GOOD_METRICS).encode()
    report_files.metrics_path(recipe).write_bytes(b"\n".join((good, line, good, b"")))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: .*; delete the line") as raised:
        report_files.write_report(recipe)
    assert said in str(raised.value)


def damaged_answers() -> Iterator[tuple[str, Any, str]]:
    def change(**keys: Any) -> Any:
        return lambda line: json.dumps(json.loads(line) | keys).encode()

    yield "torn", lambda line: line[: len(line) // 2], "malformed JSON"
    yield "not utf-8", lambda line: line.replace(b" word1", b" \xff"), "not UTF-8: byte"
    yield "list", lambda line: b"[" + line + b"]", "not a JSON object"
    yield "deep", lambda line: b'{"contender": ' + b"[" * 100_000, "nested too deeply"
    yield "no contender", lambda line: b'{"turn": 1}', "contender: "
    yield "empty texts", change(token_texts=[]), "token_texts: 0 tokens, but the rounds make 30"
    yield "short nodes", change(tree_nodes=[9]), "accepted_per_round and tree_nodes differ"
    yield "small nodes", lambda line: line.replace(b"9,", b"1,"), "exceeds its tree_nodes"


@pytest.mark.parametrize(
    ("damage", "said"), [case[1:] for case in damaged_answers()], ids=[c[0] for c in damaged_answers()]
)
def test_a_damaged_answer_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, said: str
) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(MAIN, "other"))
    path = report_files.generations_path(recipe)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 9 and MAIN.encode() in lines[7]
    path.write_bytes(b"\n".join([*lines[:7], damage(lines[7]), lines[8]]))
    page = Page(page_of(recipe))
    assert len(page.answers) == 2
    printed = capsys.readouterr().out
    assert "left out: 1, the first:" in printed and "generations.jsonl:8: " in printed and said in printed
    assert "1 unreadable line of generations.jsonl left out" in page.text
    path.write_bytes(damage(lines[7]))
    with pytest.raises(UserError, match=r"generations\.jsonl:1: .*; it holds no answer of .* again"):
        report_files.write_report(recipe)


def test_answers_are_found_whatever_the_name_and_the_order_of_keys(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    name = 'a "quoted" \\ \x07 na\u202eme\\'
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(name, "other"))
    assert len(Page(page_of(recipe)).answers) == 3
    path = report_files.generations_path(recipe)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records))
    assert len(Page(page_of(recipe)).answers) == 3
    path.write_text("".join(json.dumps(r) + "\n" for r in records if r["contender"] != name))
    with pytest.raises(UserError, match=r"holds no answer of .*, or of another run"):
        report_files.write_report(recipe)


def damaged_numbers() -> Iterator[tuple[str, Any, str]]:
    def change(**keys: Any) -> Any:
        return lambda content: content | keys

    def inside(key: str, value: Any) -> Any:
        return lambda content: content["contenders"][MAIN].update({key: value}) or content

    yield "no contenders", change(contenders={}), "contender: 'eagle3, tree of 60' is not under contenders"
    yield "no date", lambda c: c | {"made": {k: v for k, v in c["made"].items() if k != "date"}}, "made.date: Field"
    for key in ("contender", "categories", "temperature", "recipe"):
        yield f"no {key}", lambda c, key=key: {k: v for k, v in c.items() if k != key}, f"{key}: Field required"
    yield "text", inside("tau", "2.3"), "tau: Input should be a valid number"
    yield "nan", inside("tau", float("nan")), "tau: Input should be a finite number"
    yield "one bound", inside("tau_interval", [1.0]), "tau_interval: List should have at least 2"
    yield "histogram", inside("accepted_histogram", []), "accepted_histogram does not add up"
    yield "intervals", inside("acceptance_by_position_interval", []), "differ in length"
    yield "part", change(benchmarks={"a": {}}), "benchmarks.a: not the contenders"
    yield "turns", change(turns={"one": {}}), "turns.one"
    yield "list", lambda content: [content], "not a JSON object"


@pytest.mark.parametrize(
    ("damage", "said"), [case[1:] for case in damaged_numbers()], ids=[c[0] for c in damaged_numbers()]
)
def test_damaged_numbers_are_named(tmp_path: Path, damage: Any, said: str) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", "c", "0", 1)])
    path = recipe.eval_out / "acceptance.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=r"acceptance\.json: .*written by another version") as raised:
        report_files.read_acceptance(path)
    assert said in str(raised.value)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path)
    with pytest.raises(UserError, match=r"acceptance\.json does not exist; run `draftsmith evaluate` first"):
        script_lines(recipe, capsys)
    recipe.eval_out.mkdir(parents=True)
    (recipe.eval_out / "acceptance.json").write_text('{"tau": 1}')
    with pytest.raises(UserError, match="written by another version"):
        script_lines(recipe, capsys)
    evaluate(recipe, [("a", None, "0", 1)])
    report_files.generations_path(recipe).unlink()
    before = sorted(tmp_path.rglob("*"))
    planned = "\n".join(script_lines(recipe, capsys, "--plan"))
    assert "generations.jsonl: missing; the report will omit it" in planned and "report.html" in planned
    assert sorted(tmp_path.rglob("*")) == before  # a plan writes nothing
    assert "Answers, round by round" not in page_of(recipe)
