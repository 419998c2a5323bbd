"""The report from files alone: exact rounds, hostile text, readable colours, bounded size; and the terminal's table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.generation_log import read_generations, token_texts
from draftsmith.eval.measurement.metrics import summarise_all
from draftsmith.eval.report_page import drawing, summary
from draftsmith.eval.report_page import files as report_files
from draftsmith.eval.report_page.figures import acceptance_plots, parts_of
from draftsmith.eval.report_page.legend import Legend
from tests.conftest import make_tokenizer
from tests.report_cases import (
    MADE,
    MAIN,
    PLAIN,
    Page,
    described,
    evaluate,
    figures_of,
    make_recipe,
    page_of,
    script_lines,
)


def test_answers_show_exactly_the_recorded_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "SHOWN_ANSWERS", 5)
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(9)])
    page = Page(page_of(recipe))
    assert len(page.answers) == 5
    expected = [results[MAIN][i] for i in (0, 1, 3, 5, 7)]  # evenly spread
    for shown, recorded in zip(page.answers, expected, strict=True):
        assert [len(r["i"]) for r in shown["rounds"]] == recorded.accepted_per_round
        titles = [f"Round {i}: {a} of 8 drafted tokens accepted" for i, a in enumerate(recorded.accepted_per_round, 1)]
        assert [r["title"] for r in shown["rounds"]] == titles
        own = [len(r["b"]) for r in shown["rounds"]]
        assert own[:-1] == [1] * (recorded.rounds - 1) and own[-1] == 1 - recorded.last_round_cut
        assert shown["text"] == "".join(f" word{i}" for i in range(30))


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", c, str(i), 1) for i, c in enumerate("xyxy")], contenders=(MAIN, "chain", "lookup"))
    page = Page(page_of(recipe))
    assert not {"script", "link", "iframe", "object", "base", "a"} & set(page.tags)
    assert len(figures_of(page)) == len(page.sources) == 3  # comparison, by position, time
    text = re.sub(r'src="data:[^"]+"', "", page_of(recipe))
    assert "@import" not in text and "@font-face" not in text and "url(" not in text
    assert "//" not in re.sub(r"some/model|<pre>.*?</pre>", "", text, flags=re.S)
    assert all("scroll" in around for around in page.tables_in)  # wide tables scroll inside themselves
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", text)) <= {*drawing.COLOURS, "sans", "mono"}


HOSTILE = [
    "<script>alert(1)</script>",
    "</p></details><b>",
    "&lt;&#x3c;",
    '"onmouseover="x',
    "\ud800",
    "\x00\x1b\x7f\x85",
    "\u202eevil\u2066",
    "\ufeff\ufffe",
    "a\n\tb",
    "",
    "\u05e9\u05dc\u05d5\u05dd",
    "{{ 7 * 7 }}{% raw %}",
    "$x_1^2$",
    "]]>-->",
]


def test_hostile_texts_stay_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tokens, questions, names of contenders, benchmarks and categories, on the page and in the figures."""
    monkeypatch.setattr(report_files, "SHOWN_ANSWERS", 2)
    recipe = make_recipe(tmp_path)
    names = [f"{text}#{i}" for i, text in enumerate(HOSTILE)]
    questions = [(name, category, name, 1) for name in names for category in (name, "c")]
    evaluate(recipe, questions, length=len(HOSTILE), contenders=tuple(names), texts=HOSTILE)
    page = Page(page_of(recipe))
    assert "script" not in page.tags and page.tags.count("main") == 1
    for text in (page.text, *figures_of(page)):
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    for answer in page.answers:
        assert answer["text"] == (
            '<script>alert(1)</script></p></details><b>&lt;&#x3c;"onmouseover="x\ufffd\ufffd\ufffd\ufffd\ufffd'
            "\ufffdevil\ufffd\ufeff\ufffda↵\n⇥\tb·\u05e9\u05dc\u05d5\u05dd{{ 7 * 7 }}{% raw %}$x_1^2$]]>-->"
        )
    for name in names:  # in the table of contenders, at least
        assert drawing.harmless(name) in page.text


def test_generations_are_kept_whole(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=(MAIN, "other"))
    for name, generations in results.items():
        records = list(read_generations(report_files.generations_path(recipe), name))
        again = [Generation(**{key: r[key] for key in vars(generations[0]) if key in r}) for r in records]
        assert again == generations
        assert all(("token_texts" in r) == (name == MAIN) for r in records)


def test_token_texts_join_to_the_answer() -> None:
    tokenizer: Any = make_tokenizer()
    answer = "the cat\n sat — \U0001f600 \u05e9\u05dc <|end|>"
    ids = tokenizer(answer)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == answer
    assert texts[-1] == "<|end|>" and "\U0001f600" in texts and texts.count("") >= 3  # four bytes, one place
    broken = [tokenizer.convert_tokens_to_ids(token) for token in ("ð", "Ł", "a")]  # bytes of no character
    assert "".join(token_texts(tokenizer, broken)).endswith("a")


def test_the_table_fits_eighty_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path)
    questions = [("mt_bench", "writing", str(i // 2), 1 + i % 2) for i in range(8)] + [("humaneval", None, "0", 1)]
    names = ("[bold]a long name of a contender, longer than its column[/]", "back\\", "[red]x[/]\\\\", ":smile:")
    evaluate(recipe, questions, contenders=names)
    *lines, last = script_lines(recipe, capsys)
    assert last.startswith("written in ") and max(map(len, lines)) <= 80 and all("…" not in line for line in lines)
    rows = [line.split()[0] for line in lines if re.search(r"\d\.\d\d", line)]
    parts = ["mt_bench", "humaneval", "first", "later"]
    assert [row for row in rows if row in parts] == parts
    assert {"plain", "[bold]a", *names[1:]} <= set(rows)  # names are no markup


def test_sampled_answers_are_not_called_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, temperature=0.7, top_p=0.9)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    assert content["lossless"] is True and content["matches_target"] is None
    for text in ("\n".join(script_lines(recipe, capsys)), Page(page_of(recipe)).text):
        assert "drawn at temperature 0.7" in text and "token for token" not in text


def test_different_answers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    results[MAIN][1].token_ids[3] = 999
    numbers = summarise_all(results, PLAIN, 100, 0)
    for dtype, cause in (("float32", "a defect: please report it"), ("bfloat16", "bfloat16 rounds")):
        report_files.write_acceptance(recipe, numbers, described(results), MAIN, PLAIN, MADE | {"dtype": dtype})
        for text in (" ".join(script_lines(recipe, capsys)), Page(page_of(recipe)).text):
            text = re.sub(r"\s+", " ", text)
            assert f"{MAIN} (67% are)" in text and cause in text
    assert report_files.read_acceptance(recipe.eval_out / "acceptance.json")["matches_target"] is False


def test_training_curves(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    assert len(figures_of(Page(page_of(recipe)))) == 2  # by position, time
    line = {"loss": 0.5, "accuracy": [0.5, 0.4], "simulated_tau": 1.7, "lr": 1e-4, "grad_norm": 1.0}
    lines = [json.dumps(line | {"step": step}) for step in range(1, 3001)]
    report_files.metrics_path(recipe).write_text("\n".join([*lines, '{"step": 30']))  # the last is being written
    text = page_of(recipe)
    assert len(figures_of(Page(text))) == 4 and len(text) < 400_000  # loss, simulated tau; 3,000 lines are thinned
    assert "0.5 after 3000 steps" in text


@pytest.mark.parametrize("count", [2, 24])
def test_the_comparison_numbers_every_contender_where_it_stands(count: int, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    names = (MAIN, *(f"tree {i}" for i in range(1, count)))
    evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=names)
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    legend, plot = Legend.of(content), acceptance_plots(content)[0]
    panels = plot.draw(drawing.COLOURS.__getitem__).axes
    assert plot.name == "comparison" and len(legend.drafting) == count
    for ax, key in zip(panels, ("tau", "speedup"), strict=True):
        told = {text.get_text(): text.xy for text in ax.texts}  # type: ignore[attr-defined]
        assert told == {
            str(legend.numbers[name]): (row["tree_nodes_per_round"], row[key]) for name, row in legend.drafting.items()
        }


def test_parts_of_benchmarks_whose_names_begin_alike() -> None:
    rows = {MAIN: {}}
    categories = dict.fromkeys(("a/x", "ab/x", "ab/y"), rows)
    acceptance = {"benchmarks": {"a": rows, "ab": rows}, "categories": categories, "turns": {}}
    found = [(kind, benchmark, name) for kind, benchmark, name, _ in parts_of(acceptance)]
    of_ab = [("category", "ab", "x"), ("category", "ab", "y")]
    assert found == [("benchmark", "a", "a"), ("benchmark", "ab", "ab"), *of_ab]


def test_answers_of_one_token_have_no_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(2)], length=1)
    page = Page(page_of(recipe))
    assert "nothing could be drafted" in page.text and page.sources == []
    assert [answer["text"] for answer in page.answers] == [" word0"] * 2


def test_a_worthless_drafter_gets_advice() -> None:
    def said(tau: float | None, proposer: str = "drafter") -> list[str]:
        return summary.advice({"contender": MAIN, "contenders": {MAIN: {"tau": tau, "proposer": proposer}}})

    assert len(said(1.0)) == 1 and said(1.0)[0].startswith("note: tau 1.00: ") and "Train longer" in said(1.0)[0]
    assert said(1.3) == said(None) == said(1.0, "sam") == []
