"""The report from files alone: exact rounds, hostile text, readable colours, bounded size; and the terminal's table."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured import benchmarks, evaluation
from draftsmith.eval.measured.generation_log import read_generations, token_texts
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing, summary
from draftsmith.eval.page import files as report_files
from draftsmith.eval.page import html as html_report
from draftsmith.models.costs import duration
from draftsmith.recipes.prompts.reader import Rejects
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


def test_names_in_figures_stay_as_they_are(tmp_path: Path) -> None:
    names = ("#0a0b05", "font: 9px serif", "_hidden", "url(#abc)", "</text>", "$x$")
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=names)
    for figure in figures_of(Page(page_of(recipe)))[1:]:
        said = re.sub(r"\s+", " ", "".join(ElementTree.fromstring(figure).itertext()))
        assert [name for name in names if name not in said] == []


def luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    r, g, b = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read() -> None:
    """WCAG 2.2: text 4.5 to 1, parts of figures 3 to 1."""
    colour = drawing.COLOURS
    for role in ("ink", "muted", "plain", *(f"s{i + 1}" for i in range(len(drawing.MARKERS)))):
        assert contrast(colour[role], colour["page"]) >= 4.5, role
    for i in range(html_report.TINTS):
        assert contrast(colour["ink"], colour[f"t{i}"]) >= 7, i
        assert contrast(colour[f"t{i}"], colour["page"]) >= 1.15, i  # seen as a tint at all
    assert contrast(colour["draft"], colour["verify"]) >= 3 and contrast(colour["draft"], colour["page"]) >= 3


@pytest.mark.slow
def test_ten_thousand_prompts_make_a_small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "SHOWN_ANSWERS", 1000)
    recipe = make_recipe(tmp_path)
    questions = [(f"bench{i % 3}", f"category{i % 8}", str(i), 1 + i % 2) for i in range(10_000)]
    evaluate(recipe, questions, length=70)
    text = page_of(recipe)
    assert len(text.encode()) < 4_000_000
    assert len(Page(text).answers) == 1000
    assert re.search(r"(2\d|30) more tokens", text)  # what is left out is said
    monkeypatch.setattr(report_files, "SHOWN_ANSWERS", 12)
    few = make_recipe(tmp_path)
    assert len(page_of(few).encode()) < 500_000


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


def test_every_contender_s_answers_are_logged_with_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = make_tokenizer()
    ids = tokenizer("the cat<|end|>")["input_ids"]
    monkeypatch.setattr(
        *(benchmarks, "decode"),
        lambda verifier, proposer, prompts, *_: [Generation(list(prompt), ids, [], False) for prompt in prompts],
    )
    monkeypatch.setattr(benchmarks, "TargetVerifier", lambda *_: None)
    one = tmp_path / "one.jsonl"
    one.write_text('{"question_id": 0, "category": "writing", "turns": ["a", "b"]}\n')
    (tmp_path / "two").mkdir()
    two = tmp_path / "two/other.jsonl"
    two.write_text('{"question_id": 0, "turns": ["c"]}\n{"question_id": 1, "turns": ["d"]}\n')
    rejects = Rejects()
    asked = benchmarks.load_questions([str(one), str(two)], rejects, 1)  # of each source
    assert not rejects.total  # the same number in two benchmarks is not a repetition
    bench = benchmarks.Bench(None, tokenizer, (4,), max_new_tokens=20, max_length=90)  # type: ignore[arg-type]
    with (tmp_path / "log.jsonl").open("w") as file:
        bench.run(asked, {MAIN: None}, MAIN, file, rejects)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    places = [(r["benchmark"], r["category"], r["conversation_id"], r["turn"]) for r in records]
    expected = [("one", "writing", "0", 1), ("one", "writing", "0", 2), ("other", None, "0", 1)]
    assert places == [place for place in expected for _ in (PLAIN, MAIN)]
    assert [r["question"] for r in records if r["contender"] == MAIN] == ["a", "b", "c"]
    assert records[1]["text"] == "the cat" and "".join(records[1]["token_texts"]) == "the cat<|end|>"
    shards = [f"{tmp_path}/two/*.jsonl", f"{tmp_path}/o*.jsonl"]
    named = [(question.id, question.benchmark) for question in benchmarks.load_questions(shards, rejects, 2)]
    assert named == [("0", "two"), ("1", "two"), ("0", "o*")]
    first = benchmarks.load_questions([str(one)], rejects, None, first_turns_only=True)
    assert [len(question.turns) for question in first] == [1]


def test_the_table_fits_eighty_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path)
    questions = [("mt_bench", "writing", str(i // 2), 1 + i % 2) for i in range(8)] + [("humaneval", None, "0", 1)]
    evaluate(recipe, questions, contenders=("[bold]a long name of a contender, longer than its column[/]", "b"))
    lines = script_lines(recipe, capsys)
    *lines, last = lines
    assert last.startswith("written in ")
    assert max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if re.search(r"\d\.\d\d", line)]
    assert [row for row in rows if row in ("plain", "b", "mt_bench", "humaneval", "first", "later")] == [
        *("plain", "b", "mt_bench", "humaneval", "first", "later")
    ]
    assert "[bold]a" in rows  # names are no markup
    assert any("not those of plain" in line for line in lines) is False  # equal answers by construction
    assert all("…" not in line for line in lines)


def test_the_table_shows_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("back\\", "[red]x[/]\\\\", ":smile:", "\\[b]")
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, "0", 1), ("b", None, "0", 1)], contenders=names)
    said = script_lines(recipe, capsys)
    assert [word for line in said for word in line.split()[:1] if word in names][:4] == [*names]
    assert any(f"Parts: {names[0]}. tau" in line for line in said)


def test_sampled_answers_are_not_called_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, temperature=0.7, top_p=0.9)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    assert content["lossless"] is True and content["matches_target"] is None
    said = "\n".join(script_lines(recipe, capsys))
    assert "drawn at temperature 0.7" in said and "token for token" not in said
    page = re.sub(r"\s+", " ", Page(page_of(recipe)).text)
    assert "drawn at temperature 0.7, top-p 0.9, by the target's own distribution (lossless)" in page
    assert "token for token" not in page


@pytest.mark.parametrize(
    ("dtype", "cause"),
    [
        ("float32", "In float32 that is a defect: please report it."),
        ("bfloat16", "bfloat16 rounds: longer forwards, other last bits."),
    ],
)
def test_different_answers_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, cause: str
) -> None:
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    results[MAIN][1].token_ids[3] = 999
    numbers = summarise_all(results, PLAIN, 100, 0)
    report_files.write_acceptance(recipe, numbers, described(results), MAIN, PLAIN, MADE | {"dtype": dtype})
    for text in (" ".join(script_lines(recipe, capsys)), Page(page_of(recipe)).text):
        assert f"not all those of plain decoding: {MAIN} (67% are). {cause}" in re.sub(r"\s+", " ", text)
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    assert content["lossless"] is True and content["matches_target"] is False


def test_training_curves(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    assert "Training" not in Page(page_of(recipe)).text
    lines = [
        {"step": s, "loss": 9 / s, "accuracy": [0.5, 0.4], "simulated_tau": 1.7, "lr": 1e-4, "grad_norm": 1.0}
        | ({"validation_loss": 3.0, "validation_simulated_tau": 1.5} if s % 500 == 0 else {})
        for s in range(1, 3001)
    ]
    # The last line is being written: it does not count.
    report_files.metrics_path(recipe).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30')
    text = page_of(recipe)
    assert 'alt="0.003 after 3000 steps, 3 in validation."' in text and len(text) < 400_000  # 3,000 lines are thinned
    assert len(figures_of(Page(text))) == 4  # by position, time; loss, simulated tau


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 4}, "Speeds: 4 answers decoded side by side, by plain decoding, too."),
        ({"mode": "replay"}, "Replayed: the rounds that decoding these recorded answers would have had."),
        ({}, "Answers, token for token: all those of plain decoding."),
    ],
)
def test_how_it_was_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    recipe = make_recipe(tmp_path, **settings)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(MAIN, "other"))
    overrides = [f"eval.{key}={value}" for key, value in settings.items()]
    for text in (" ".join(script_lines(recipe, capsys, *overrides)), Page(page_of(recipe)).text):
        text = re.sub(r"\s+", " ", text)
        assert said in text
        assert ("Speeds: " in text) == ("batch_size" in settings)
        assert ("all those of plain decoding" in text) == ("mode" not in settings)


def test_answers_of_one_token_have_no_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(2)], length=1)
    page = Page(page_of(recipe))
    assert "nothing could be drafted" in page.text and page.sources == []
    assert [answer["text"] for answer in page.answers] == [" word0"] * 2


def test_the_page_opens_with_the_verdict_tau_and_where_they_come_from(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=(MAIN, "other"))
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    opening = re.sub(r"\s+", " ", Page(page_of(recipe)).text).partition("Result Contender")[0]
    assert summary.verdict(content) in opening
    low, high = content["tau_interval"]
    assert (
        f"With {MAIN}, a verification by the target yields {content['tau']:.2f} tokens on average "
        f"(95 % interval {low:.2f}\u2013{high:.2f}). This number is called tau" in opening
    )
    assert "2026-01-01" in opening and "x86_64, 2 threads; float32; command: acceptance.py" in opening


def test_what_people_want_comes_first_in_the_tables(tmp_path: Path) -> None:
    """So that a narrow screen, on which tables scroll, shows it."""
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", c, str(i), 1) for i, c in enumerate("xyxy")], contenders=(MAIN, "other"))
    heads = re.findall(r"<thead>(.*?)</thead>", page_of(recipe), flags=re.S)
    first = [re.findall(r'<th scope="col">([^<]*)', head)[:3] for head in heads]
    assert first == [
        ["Contender", "tau ", "speed-up "],
        ["Contender", "tau ratio ", "speed ratio "],
        [MAIN, "tau ", "speed-up "],
    ]


def test_the_plan_bounds_the_time_by_the_last_run(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, max_new_tokens=600)
    assert evaluation.likely_time(recipe, [PLAIN, MAIN], 10)[0].startswith("unknown until")
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")["contenders"]
    seconds = sum(10_000 * 600 / content[name]["tokens_per_second"] for name in (PLAIN, MAIN))
    said = evaluation.likely_time(recipe, [PLAIN, MAIN], 10_000 * 600)
    assert said[0] == f"at most {duration(seconds)}, and prefills" and "last run" in said[1]
    assert evaluation.likely_time(recipe, [PLAIN, "new"], 10)[0].startswith("unknown until")


def test_a_worthless_drafter_gets_advice() -> None:
    def said(tau: float | None, proposer: str = "drafter") -> list[str]:
        return summary.advice({"contender": MAIN, "contenders": {MAIN: {"tau": tau, "proposer": proposer}}})

    assert len(said(1.0)) == 1 and said(1.0)[0].startswith("note: tau 1.00: ") and "Train longer" in said(1.0)[0]
    assert said(1.3) == said(None) == said(1.0, "sam") == []


def test_plain_decoding_in_another_precision_is_no_contender_of_the_parts(tmp_path: Path) -> None:
    """More contenders than colours, so the parts' table names them by number."""
    recipe = make_recipe(tmp_path)
    coarse, names = f"{PLAIN}, int8 target", tuple(f"tree {i}" for i in range(7))
    evaluate(recipe, [("a", None, "0", 1), ("b", None, "0", 1)], contenders=(*names, coarse))
    path = recipe.eval_out / "acceptance.json"
    content = json.loads(path.read_text())
    content["contenders"][coarse] |= report_files.UNDRAFTED | {"quantization": "int8"}
    path.write_text(json.dumps(content))
    parts = page_of(recipe).split("<h2>By benchmark")[1].split("</table>")[0]
    columns = re.findall(r'class="wraps">tau,<br>([^<]+)</th>', parts)
    assert columns == [str(i) for i in range(2, 8)]
