"""The report from files alone: exact rounds, hostile text, readable colours, bounded size; and the terminal's table."""

import base64
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured import benchmarks, evaluation
from draftsmith.eval.measured.generation_log import read_generations, token_texts
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing as figures
from draftsmith.eval.page import files as report_files
from draftsmith.eval.page import html as html_report
from draftsmith.eval.page.legend import Legend
from draftsmith.models.costs import duration
from draftsmith.recipes.prompts.reader import Rejects
from tests.conftest import make_tokenizer
from tests.report_cases import MADE, MAIN, PLAIN, Page, described, evaluate, make_recipe, page_of, script_lines


def test_answers_show_exactly_the_recorded_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, report_answers=5)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(9)])
    page = Page(page_of(recipe))
    assert len(page.answers) == 5
    expected = [results[MAIN][i] for i in (0, 1, 3, 5, 7)]  # evenly spread
    for shown, recorded in zip(page.answers, expected, strict=True):
        assert [len(r["i"]) for r in shown["rounds"]] == recorded.accepted_per_round
        assert [r["counts"] for r in shown["rounds"]] == [(a, 8) for a in recorded.accepted_per_round]
        own = [len(r["b"]) for r in shown["rounds"]]
        assert own[:-1] == [1] * (recorded.rounds - 1) and own[-1] == 1 - recorded.last_round_cut
        assert shown["text"] == "".join(f" word{i}" for i in range(30))


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", c, str(i), 1) for i, c in enumerate("xyxy")], contenders=(MAIN, "chain", "lookup"))
    whole = page_of(recipe)
    text = re.sub(r'(<a download="[^"]+" href=")data:[^"]+', r"\1#", whole)  # base64 may hold any word
    page = Page(text)
    assert page.tags.count("a") == text.count('<a download="') == 2
    assert not {"script", "link", "img", "iframe", "object", "image", "base"} & set(page.tags)
    assert "@import" not in text and "@font-face" not in text
    outside = text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("http://www.w3.org/1999/xlink", "")
    assert "//" not in re.sub(r"some/model|<pre>.*?</pre>", "", outside, flags=re.S)
    assert not re.findall(r"url\((?!#)", text)
    assert page.tags.count("svg") == 5  # comparison, by position, histogram, time, by category
    assert text.count('role="img" aria-label="') == 5
    assert len(set(page.ids)) == len(page.ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(page.ids)
    assert all("scroll" in around for around in page.tables_in)  # wide tables scroll inside themselves
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", text))
    assert used <= {*figures.LIGHT, "sans", "mono"}
    assert "0a0b" not in text.lower()  # no placeholder of a colour is left
    assert figures.LIGHT.keys() == figures.DARK.keys()


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


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    """In tokens, questions, names of contenders, benchmarks and categories, on the page and in the figures."""
    recipe = make_recipe(tmp_path, report_answers=2, bootstrap_samples=100)
    names = [f"{text}#{i}" for i, text in enumerate(HOSTILE)]
    questions = [(name, category, name, 1) for name in names for category in (name, "c")]
    evaluate(recipe, questions, length=len(HOSTILE), contenders=tuple(names), texts=HOSTILE)
    text = page_of(recipe)
    page = Page(text)
    assert "script" not in page.tags and page.tags.count("main") == 1
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]", text)
    for answer in page.answers:
        assert answer["text"] == (
            '<script>alert(1)</script></p></details><b>&lt;&#x3c;"onmouseover="x[U+D800]␀␛[U+007F][U+0085]'
            "[U+202E]evil[U+2066][U+FEFF][U+FFFE]a↵\n⇥\tb·\u05e9\u05dc\u05d5\u05dd{{ 7 * 7 }}{% raw %}$x_1^2$]]>-->"
        )
    for name in names:  # in the table of contenders, at least
        assert html_report.clean(name) in page.text


def test_names_in_figures_stay_as_they_are(tmp_path: Path) -> None:
    names = ("#0a0b05", "font: 9px serif", 'a id="b"', 'a d="1.23456"', "url(#abc)", "</text>")
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=names)
    drawn = re.findall(r"<svg .*?</svg>", page_of(recipe), flags=re.S)
    assert len(drawn) == 4
    for figure in drawn:
        said = re.sub(r"\s+", " ", Page(figure).text)
        assert [name for name in names if name not in said] == []


def luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    r, g, b = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [figures.LIGHT, figures.DARK], ids=["light", "dark"])
def test_colours_can_be_read(theme: dict[str, str]) -> None:
    """WCAG 2.2: text 4.5 to 1, parts of figures 3 to 1."""
    for role in ("ink", "muted", "plain", *(f"s{i + 1}" for i in range(len(figures.MARKERS)))):
        assert contrast(theme[role], theme["page"]) >= 4.5, role
        assert contrast(theme[role], theme["card"]) >= 4.5, role
    for i in range(html_report.TINTS):
        assert contrast(theme["ink"], theme[f"t{i}"]) >= 7, i
        assert contrast(theme[f"t{i}"], theme["page"]) >= 1.15, i  # seen as a tint at all
    assert contrast(theme["draft"], theme["verify"]) >= 3 and contrast(theme["draft"], theme["page"]) >= 3


@pytest.mark.slow
def test_ten_thousand_prompts_make_a_small_page(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, report_answers=1000, bootstrap_samples=200)
    questions = [(f"bench{i % 3}", f"category{i % 8}", str(i), 1 + i % 2) for i in range(10_000)]
    evaluate(recipe, questions, length=70)
    text = page_of(recipe)
    assert len(text.encode()) < 4_000_000
    assert len(Page(text).answers) == 1000
    assert re.search(r"(2\d|30) more tokens", text)  # what is left out is said
    few = make_recipe(tmp_path)
    assert len(page_of(few).encode()) < 500_000


def test_answers_are_spread_over_benchmarks_and_categories(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    questions = [("big", None, str(i), 1) for i in range(50)] + [("small", c, f"{c}{i}", 1) for c in "xy" for i in "01"]
    evaluate(recipe, questions)
    path = report_files.generations_path(recipe)
    chosen, faults = html_report.choose_answers(path, MAIN, 6)
    assert faults == []
    assert [(r["benchmark"], r["category"]) for r in chosen] == [
        *[("big", None)] * 2,
        *[("small", "x")] * 2,
        *[("small", "y")] * 2,
    ]
    assert [r["conversation_id"] for r in chosen[:2]] == ["0", "25"]
    assert len(html_report.choose_answers(path, MAIN, 500)[0]) == 54
    assert html_report.choose_answers(path, MAIN, 0) == ([], [])
    assert {r["contender"] for r in chosen} == {MAIN}


def test_generations_are_kept_whole(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=(MAIN, "other"))
    for name, generations in results.items():
        faults: list[str] = []
        records = list(read_generations(report_files.generations_path(recipe), name, faults))
        assert faults == []
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
    assert "drawn at temperature 0.7, top-p 0.9 by the target's own distribution (lossless)" in page
    assert "every answer of every contender equals" not in page


@pytest.mark.parametrize(
    ("dtype", "caption", "note"),
    [
        ("float32", "In float32 that is a defect: please report it.", "take this for a defect of Draftsmith"),
        ("bfloat16", "bfloat16 rounds: longer forwards, other last bits.", "in bfloat16 a forward over several tokens"),
    ],
)
def test_different_answers_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, caption: str, note: str
) -> None:
    recipe = make_recipe(tmp_path)
    results = evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    results[MAIN][1].token_ids[3] = 999
    numbers = summarise_all(results, PLAIN, 100, 0)
    report_files.write_acceptance(recipe, numbers, described(results), MAIN, PLAIN, MADE | {"dtype": dtype})
    said = re.sub(r"\s+", " ", " ".join(script_lines(recipe, capsys)))
    assert f"not all those of plain decoding: {MAIN} (67% are). {caption}" in said
    page = re.sub(r"\s+", " ", Page(page_of(recipe)).text)
    assert f"not all plain decoding's token for token: {MAIN} (67 % are). " in page and note in page
    assert ("defect" in page) == (dtype == "float32") and "keeps the target's distribution, in exact arithmetic" in page
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    assert content["lossless"] is True and content["matches_target"] is False


def test_training_curves_and_png_files(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, png=True)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    assert "Training" not in Page(page_of(recipe)).text
    lines = [
        {"step": s, "loss": 9 / s, "accuracy": [0.5, 0.4], "simulated_tau": 1.7, "lr": 1e-4, "grad_norm": 1.0}
        | ({"validation_loss": 3.0, "validation_simulated_tau": 1.5} if s % 500 == 0 else {})
        for s in range(1, 3001)
    ]
    report_files.metrics_path(recipe).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30')
    written = report_files.write_report(recipe)  # the last line is being written: it does not count
    names = [path.name for path in written]
    expected = ["acceptance_by_position", "accepted_histogram", "time_per_token"]
    expected += ["loss", "accuracy", "simulated_tau", "learning_rate"]
    assert names == ["report.html", *(f"{name}.png" for name in expected)]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[1:])
    text = written[0].read_text()
    assert "0.003 after 3000 steps, 3 in validation." in text and len(text) < 400_000  # 3,000 lines are thinned


@pytest.mark.parametrize(
    ("settings", "table", "page"),
    [
        ({"batch_size": 4}, "Speeds: 4 answers decoded side by side", "4 answers were decoded side by side, by plain"),
        ({"mode": "replay"}, "Replayed: the rounds that decoding", "Nothing was decoded, so nothing was timed."),
        ({}, "all those of plain decoding", "equals plain decoding's, token for token."),
    ],
)
def test_how_it_was_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], table: str, page: str
) -> None:
    recipe = make_recipe(tmp_path, **settings)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)], contenders=(MAIN, "other"))
    overrides = [f"eval.{key}={value}" for key, value in settings.items()]
    said = re.sub(r"\s+", " ", " ".join(script_lines(recipe, capsys, *overrides)))
    shown = re.sub(r"\s+", " ", Page(page_of(recipe)).text)
    assert table in said and page in shown
    assert ("side by side" in said) == ("batch_size" in settings) == ("side by side" in shown)
    assert ("token for token" in said) == ("mode" not in settings) and "how the others compare with" in shown


def test_answers_of_one_token_have_no_rounds(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(2)], length=1)
    page = Page(page_of(recipe))
    assert "nothing could be drafted" in page.text and page.tags.count("svg") == 0
    assert [answer["text"] for answer in page.answers] == [" word0"] * 2


def test_the_page_opens_with_the_verdict_tau_and_where_they_come_from(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=(MAIN, "other"))
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    opening = re.sub(r"\s+", " ", Page(page_of(recipe)).text).partition("Result Contender")[0]
    for sentence in html_report.verdict(Legend.of(content)):
        assert sentence in opening
    low, high = content["tau_interval"]
    assert (
        f"With {MAIN}, a verification by the target yields {content['tau']:.2f} tokens on average "
        f"(95 % interval [{low:.2f}, {high:.2f}]). This number is called tau" in opening
    )
    for part in ("2026-01-01", "x86_64, 2 threads; float32; torch 2.13.0; commit 0123456789ab; command: acceptance.py"):
        assert part in opening


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


def test_files_from_before_a_number_was_known_make_a_page(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(4)])
    path = recipe.eval_out / "acceptance.json"
    content = json.loads(path.read_text())
    for row in content["contenders"].values():
        for key in ("fastest_ratio", "fastest_ratio_interval", "matching_share", "inner_tau", "inner_tau_interval"):
            del row[key]
    path.write_text(json.dumps(content))
    report_files.print_table(report_files.read_acceptance(path))
    assert "contenders.csv" in page_of(recipe)


def test_the_downloads_hold_the_numbers(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    names = (MAIN, 'comma, "quote"\nline')
    evaluate(recipe, [("a", None, str(i), 1) for i in range(4)], contenders=names)
    links = re.findall(r'download="([^"]+)" href="data:([^;]+);base64,([^"]+)"', page_of(recipe))
    files = {name: base64.b64decode(content).decode() for name, _, content in links}
    content = report_files.read_acceptance(recipe.eval_out / "acceptance.json")
    assert json.loads(files["acceptance.json"]) == content
    rows = {row["contender"]: row for row in csv.DictReader(io.StringIO(files["contenders.csv"], newline=""))}
    assert list(rows) == [PLAIN, *names]
    for name, row in content["contenders"].items():
        for column, value in {
            "tau": row["tau"],
            "tau_high": row["tau_interval"][1],
            "speedup": row["speedup"],
            "speedup_low": row["speedup_interval"][0],
            "tokens_per_second": row["tokens_per_second"],
        }.items():
            assert float(rows[name][column]) == value


def test_plain_decoding_has_no_draft_in_the_times(tmp_path: Path) -> None:
    """Even where the file comes from a version that charged the loop's own work to it."""
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, str(i), 1) for i in range(3)])
    shares = report_files.read_acceptance(recipe.eval_out / "acceptance.json")["contenders"][PLAIN]["time_share"]
    assert shares == {"draft": 0.3, "verify": 0.6, "other": 0.1}
    said = re.findall(r'aria-label="Where the time of a token goes. ([^"]*)"', page_of(recipe))[0]
    of_plain, of_main = said.split("; ")
    assert of_plain.endswith("ms a token, verify 60 % · other 40 %")
    assert of_main.endswith("ms a token, draft 30 % · verify 60 % · other 10 %.")


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
        return report_files.advice({"contender": MAIN, "contenders": {MAIN: {"tau": tau, "proposer": proposer}}})

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
    parts = page_of(recipe).split('id="parts"')[1].split("</table>")[0]
    columns = re.findall(r'class="wraps">tau,<br>([^<]+)</th>', parts)
    assert columns == [str(i) for i in range(2, 8)]
