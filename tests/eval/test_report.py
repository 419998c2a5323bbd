"""The report from files alone: its verdict, exact rounds, hostile text, bounded size; damaged files; the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.generation_log import read_generations, token_texts
from draftsmith.eval.measurement.metrics import summarise_all
from draftsmith.eval.report_page import figures, summary
from draftsmith.eval.report_page import files as report_files
from draftsmith.recipes.errors import UserError
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
    rounds_of,
    script_lines,
)

Speeds = dict[str, tuple[float | None, list[float] | None]]
FAST, SLOW, WIDE = (1.64, [1.41, 1.93]), (0.74, [0.67, 0.83]), (1.7, [0.9, 2.5])


@pytest.mark.parametrize(
    ("speeds", "said", "fastest"),
    [
        ({"a": SLOW, "b": FAST}, "Fastest here", "b"),
        ({"a": WIDE, "b": FAST}, "Fastest here", "b"),  # a is not sure to be fast
        ({"a": SLOW, "b": (0.5, [0.4, 0.6])}, "Nothing beats", "a"),
        ({"a": WIDE, "b": SLOW}, "Nothing is clearly faster", "a"),
        ({"a": (1.1, None)}, "Nothing is clearly faster", "a"),
        ({"a": (None, None)}, "No verdict", None),
    ],
)
def test_the_verdict_says_what_the_intervals_allow(speeds: Speeds, said: str, fastest: str | None) -> None:
    rows = {
        name: {"speedup": value, "speedup_interval": bounds, "proposer": None if name == PLAIN else "drafter"}
        for name, (value, bounds) in ({PLAIN: (1.0, [1.0, 1.0])} | speeds).items()
    }
    acceptance = {"contenders": rows, "contender": "a", "baseline": PLAIN, "mode": "decode"}
    verdict = summary.verdict(acceptance)
    assert verdict.startswith(said) and (fastest is None or f" {fastest}, {speeds[fastest][0]:.2f} times" in verdict)
    assert "times nothing" in summary.verdict(acceptance | {"mode": "replay"})


def test_the_terminal_compares_the_fastest_with_the_next() -> None:
    def row(ratio: float, proposer: str | None = "drafter") -> dict[str, Any]:
        return {"proposer": proposer, "fastest_ratio": ratio, "fastest_ratio_interval": [ratio - 0.1, ratio + 0.1]}

    rows = {PLAIN: row(2.0, None), "a": row(1.5), "b": row(1.0), "c": row(1.2)}
    heading = "Fastest drafting: b. Times as fast as the next ones, paired by prompt:"
    told = f"{heading}\n  c 1.20 (1.10-1.30)\n  a 1.50 (1.40-1.60)"
    assert summary.fastest({"contenders": rows}) == told
    assert summary.fastest({"contenders": {name: rows[name] for name in (PLAIN, "b")}}) is None


def test_answers_show_exactly_the_recorded_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "SHOWN_ANSWERS", 5)
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(9)])
    html = page_of(recipe)
    expected = [
        [
            (f"Round {i}: {count} of 8 drafted tokens accepted", count, 1 - (i == each.rounds and each.last_round_cut))
            for i, count in enumerate(each.accepted_per_round, 1)
        ]
        for each in (results[MAIN][i] for i in (0, 1, 3, 5, 7))  # evenly spread
    ]
    assert rounds_of(html) == expected
    assert Page(html).answers == ["".join(f" word{i}" for i in range(30))] * 5


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    names = (MAIN, *(f"tree {i}" for i in range(9)))
    evaluate(recipe, [("a", c, str(i), 1) for i, c in enumerate("xyxy")], contenders=names)
    page = Page(page_of(recipe))
    assert not {"script", "link", "iframe", "object", "base", "a"} & set(page.tags)
    time, by_position = figures_of(page)
    assert sum(name in by_position for name in names) == len(figures.MARKERS) and MAIN in by_position  # the fastest
    assert PLAIN in time and PLAIN not in by_position
    text = re.sub(r'src="data:[^"]+"', "", page_of(recipe))
    assert "@import" not in text and "@font-face" not in text and "url(" not in text
    assert "//" not in re.sub(r"some/model|<pre>.*?</pre>", "", text, flags=re.S)
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", text)) <= {*figures.COLOURS, "sans", "mono"}


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
        assert answer == (
            '<script>alert(1)</script></p></details><b>&lt;&#x3c;"onmouseover="x\ufffd\ufffd\ufffd\ufffd\ufffd'
            "\ufffdevil\ufffd\ufeff\ufffda↵\n⇥\tb·\u05e9\u05dc\u05d5\u05dd{{ 7 * 7 }}{% raw %}$x_1^2$]]>-->"
        )
    for name in names:  # in the table of contenders, at least
        assert figures.harmless(name) in page.text


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


def test_whose_answers_they_are_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Different ones are named, with the cause; of drawn ones nothing is said."""

    def told() -> list[str]:
        texts = (" ".join(script_lines(recipe, capsys)), Page(page_of(recipe)).text)
        return [re.sub(r"\s+", " ", text) for text in texts]

    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    results[MAIN][1].token_ids[3] = 999
    numbers = summarise_all(results, PLAIN, 0)
    for dtype, cause in (("float32", "a defect: please report it"), ("bfloat16", "bfloat16 rounds")):
        report_files.write_acceptance(recipe, numbers, described(results), MAIN, PLAIN, MADE | {"dtype": dtype})
        assert all(f"{MAIN} (67% are)" in text and cause in text for text in told())
    recipe = make_recipe(tmp_path, temperature=0.7, top_p=0.9)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    assert report_files.read_acceptance(recipe.eval_out / "acceptance.json")["matches_target"] is None
    assert all("drawn at temperature 0.7" in text and "token for token" not in text for text in told())


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


def test_parts_of_benchmarks_whose_names_begin_alike() -> None:
    rows = {MAIN: {}}
    categories = dict.fromkeys(("a/x", "ab/x", "ab/y"), rows)
    found = summary.parts_of({"benchmarks": {"a": rows, "ab": rows}, "categories": categories, "turns": {}})
    parts = [("benchmark", "a"), ("benchmark", "ab"), ("category", "x"), ("category", "y")]
    assert [(kind, name) for kind, name, _ in found] == parts


def test_answers_of_one_token_have_no_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(2)], length=1)
    page = Page(page_of(recipe))
    assert "nothing could be drafted" in page.text and page.sources == []
    assert page.answers == [" word0"] * 2


def test_a_worthless_drafter_gets_advice() -> None:
    def said(tau: float | None, proposer: str = "drafter") -> str | None:
        return summary.advice({"contender": MAIN, "contenders": {MAIN: {"tau": tau, "proposer": proposer}}})

    assert "Train longer" in (said(1.0) or "") and said(1.3) is said(None) is said(1.0, "sam") is None


# Damaged files.


def test_damaged_files_are_named(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(MAIN, "other"))
    metrics, answers = report_files.metrics_path(recipe), report_files.generations_path(recipe)

    def damaged(path: Path, content: bytes, said: str) -> None:
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            report_files.write_report(recipe)
        path.unlink() if before is None else path.write_bytes(before)

    good = b'{"step": 1, "loss": 2.0, "simulated_tau": 1.7}'
    for line, said in ((b"not json", "malformed"), (b"[1]", "not a JSON object"), (b'{"step": 2}', "lacks loss")):
        damaged(metrics, b"\n".join((good, line, good, b"")), rf"metrics\.jsonl:2: {said}.*; delete the line")
    lines = answers.read_bytes().splitlines()
    cut = b"\n".join([*lines[:7], lines[7][:-9], lines[8]])
    damaged(answers, cut, r"generations\.jsonl:8: malformed JSON.*run `draftsmith evaluate` again")
    others = b"\n".join(line for line in lines if MAIN.encode() not in line)
    damaged(answers, others, "holds no answer of 'eagle3, tree of 60'; it is damaged, or of another run")
    for text in (b"[1]", b'{"contender": "a", "contend', b'{"tau": 1}'):
        damaged(recipe.eval_out / "acceptance.json", text, r"acceptance\.json: .*run `draftsmith evaluate` again")
