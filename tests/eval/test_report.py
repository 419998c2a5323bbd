"""Numbers from hand-written traces, shares and intervals against slow twins; the report from files alone: its verdict,
exact rounds, hostile text, bounded size; damaged files; the table."""

import base64
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.eval import report
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.generation_log import token_texts
from draftsmith.eval.measurement.metrics import bootstrap, summarise, summarise_all, tau
from draftsmith.eval.report_page import figures, result_files, summary
from draftsmith.eval.report_page import html as report_html
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from tests.conftest import make_tokenizer
from tests.evaluation_cases import MADE, MAIN, PLAIN, Page, described, evaluate, make_recipe, page_of, trace
from tests.training_runs import run_main

EIGHT = trace([0] * 8)  # by plain decoding


def numbers(*generations: Generation) -> dict[str, Any]:
    return summarise(generations, generations, 0)


def random_traces(chance: random.Random) -> list[Generation]:
    """Thirty, of 1 to 3 seconds each."""
    rounds = [[chance.randrange(5) for _ in range(chance.randint(0, 6))] for _ in range(30)]
    return [trace(each, bool(each) and chance.random() < 0.5, decode_seconds=chance.uniform(1, 3)) for each in rounds]


def test_tau_on_hand_written_traces() -> None:
    # 1 token from the prefill; rounds of 2+1, 0+1, 3+1 tokens: 9 tokens in all, 8 in 3 rounds.
    whole = trace([2, 0, 3])
    assert tau([whole]) == pytest.approx(8 / 3)
    # The last round ends at a stop token that was its second drafted token: 2 tokens, no bonus.
    stopped = trace([2, 2], is_cut=True)
    assert numbers(stopped)["tau"] == pytest.approx(5 / 2)
    assert numbers(whole, stopped)["tau"] == pytest.approx(13 / 5)  # over rounds, not a mean of means
    nothing = numbers(trace([]))  # the prefill's token was the stop token
    assert nothing["tau"] is None and nothing["acceptance_by_position"] == [] and nothing["accepted_histogram"] == []
    # whole: position 1 tried 3 times, accepted 2; position 2 tried 2, accepted 2; position 3 tried 2, accepted 1.
    assert numbers(whole)["acceptance_by_position"] == pytest.approx([2 / 3, 1.0, 0.5], abs=1e-4)
    # A cut round says nothing about the position where it was cut: 4 of 4 and 4 of 4, then position 3 fails once.
    assert numbers(whole, stopped)["acceptance_by_position"] == pytest.approx([4 / 5, 1.0, 1 / 3], abs=1e-4)
    assert numbers(whole, stopped)["accepted_histogram"] == [1, 0, 3, 1]
    # A position that nobody drafted was not tried: in rounds of prompt lookup without a draft, and in shallower trees.
    for accepted, tried, expected in (([0, 0, 2], [0, 0, 2], [1.0, 1.0]), ([1, 2, 1], [2, 2, 1], [1.0, 0.5])):
        assert numbers(trace(accepted, tried=tried))["acceptance_by_position"] == expected


@pytest.mark.parametrize(("infinite", "expected"), [(10, [24.975, 974.025]), (25, None), (40, None)])
def test_infinite_resamples_count_and_an_interval_has_two_ends(infinite: int, expected: list[float] | None) -> None:
    """Of 1,000 resamples with 0, 1, 2, ..., the 2.5th and 97.5th percentiles; the last ones are infinite."""
    values = np.arange(1000.0)
    values[len(values) - infinite :] = np.inf
    interval = bootstrap(np.ones((2, 1)), 0)
    assert interval(lambda sums: values) == (expected and pytest.approx(expected))


def test_summary_of_traces() -> None:
    plain, mine = trace([0] * 8, decode_seconds=2.0), trace([2, 0, 3])
    found = summarise([mine] * 4, [plain] * 4, seed=0)
    # 8 nodes a round are 7 drafts; 5 of 21 were accepted. 0.2 s for 21 calls, 0.5 s for 3 forwards.
    wanted = {
        **{"rounds": 12, "new_tokens": 36, "tau": 8 / 3, "tau_interval": [8 / 3, 8 / 3], "accepted_per_round": 5 / 3},
        **{"tokens_per_second": 8.0, "baseline_tokens_per_second": 4.0, "speedup": 2.0, "overhead_share": 0.3},
        **{"time_share": {"draft": 0.2, "verify": 0.5, "other": 0.3}, "wasted_nodes_per_round": 16 / 3},
        **{"tree_nodes_per_round_interval": [8, 8], "draft_calls_per_round_interval": [7, 7]},
        **{"draft_milliseconds_per_call": 200 / 21, "verify_milliseconds_per_round": 500 / 3, "tau_ratio": 1},
        # tau * T_t / (T_draft + T_v)
        "predicted_speedup": 8 / 3 * (2 / 8) / (0.7 / 3),
    }
    assert {name: found[name] for name in wanted} == {
        name: value if isinstance(value, dict) else pytest.approx(value, abs=1e-3) for name, value in wanted.items()
    }
    other = trace([0] * 8, token_ids=[9] * 9)
    assert found["matches_target"] is True
    assert summarise([mine, mine], [other, plain], 0)["matches_target"] is False
    # Drawn answers need not be equal: nothing is said about it.
    assert summarise([mine], [other], 0, sampled=True)["matches_target"] is None
    # The ratio of sums weighs long answers more, the mean of ratios weighs prompts alike.
    # Drafts are 4 times as fast, and twice.
    slow = [trace([0] * 2, decode_seconds=4.0), trace([0] * 100, decode_seconds=2.0)]
    row = summarise([trace([1]), trace([1] * 50)], slow, 0)
    assert row["speedup"] == pytest.approx((102 / 2) / (102 / 6))
    assert row["mean_prompt_speedup"] == pytest.approx(3.0) and row["mean_prompt_speedup_interval"] == [2.0, 4.0]


def test_intervals_resample_conversations_not_turns() -> None:
    """A conversation asked four times over tells no more than once."""
    once = [trace([i, i % 3], conversation_id=f"c{i}") for i in range(8)]
    four = [generation for generation in once for _ in range(4)]
    single, repeated = (summarise(g, [EIGHT] * len(g), 0) for g in (once, four))
    assert (single["prompts"], single["answers"], repeated["prompts"], repeated["answers"]) == (8, 8, 8, 32)
    assert repeated["tau_interval"] == single["tau_interval"]
    assert numbers(once[0])["tau_interval"] is None  # one prompt says nothing about spread


def test_intervals_and_paired_ratios_against_slow_twins() -> None:
    """Resampling one prompt after another, by another generator and the same prompts for both sides."""
    chance = random.Random(4)
    mine, others = random_traces(chance), random_traces(chance)
    row = summarise_all({"plain": [EIGHT] * 30, "main": mine, "other": others}, "plain", 0)["contenders"]["other"]

    def ratios(rows: list[int]) -> tuple[float, float, float]:
        tokens = [sum(len(side[i].token_ids) - 1 for i in rows) for side in (others, mine)]
        rounds = [sum(side[i].rounds for i in rows) for side in (others, mine)]
        seconds = [sum(side[i].decode_seconds for i in rows) for side in (others, mine)]
        taus = [each / count for each, count in zip(tokens, rounds, strict=True)]
        return taus[0], taus[0] / taus[1], tokens[0] / seconds[0] / (tokens[1] / seconds[1])

    names = ("tau", "tau_ratio", "speed_ratio")
    assert [row[name] for name in names] == pytest.approx(ratios(list(range(30))), abs=1e-4)
    drawn = np.array([ratios(chance.choices(range(30), k=30)) for _ in range(2000)])
    for name, values in zip(names, drawn.T, strict=True):
        assert row[f"{name}_interval"] == pytest.approx(np.percentile(values, (2.5, 97.5)), rel=0.05)


def test_what_all_prompts_share_has_no_spread() -> None:
    """Prompts of very different speed, the other always a quarter faster."""
    mine, plain = random_traces(random.Random(4)), [EIGHT] * 30
    faster = [replace(g, decode_seconds=g.decode_seconds / 1.25) for g in mine]
    rows = summarise_all({"plain": plain, "main": mine, "faster": faster}, "plain", 0, main="main")["contenders"]
    assert rows["faster"]["speed_ratio_interval"] == rows["main"]["fastest_ratio_interval"] == [1.25, 1.25]
    assert rows["faster"]["tau_ratio_interval"] == [1.0, 1.0]
    low, high = rows["faster"]["tokens_per_second_interval"]
    assert low < rows["main"]["tokens_per_second_interval"][1] and high > 1.25 * low
    # Plain decoding in another precision drafts nothing, however fast it is.
    for g in mine:
        g.decode_seconds *= 9
    both = {"plain": plain, "plain int8": faster, "main": mine}
    rows = summarise_all(both, "plain", 0, own_plain={"main": "plain int8"})["contenders"]
    assert rows["main"]["fastest_ratio"] == 1.0


def test_parts_are_summed_from_their_own_turns() -> None:
    # Two benchmarks number their questions alike: "0" of the one is not "0" of the other.
    drafted, plain = list[Generation](), list[Generation]()
    conversations = ("chat", "0", "writing", 2, 1), ("chat", "1", "maths", 2, 2), ("code", "0", None, 1, 5)
    for benchmark, name, category, turns, accepted in conversations:
        for turn in range(1, turns + 1):
            whose: Any = {"benchmark": benchmark, "conversation_id": name, "category": category, "turn": turn}
            drafted.append(trace([accepted] * turn, **whose))
            plain.append(trace([0] * turn * (accepted + 1), **whose))
    out = summarise_all({"plain": plain, "drafter": drafted}, "plain", 0)
    rows = {name: part["drafter"] for name, part in (out["benchmarks"] | out["categories"] | out["turns"]).items()}
    assert {name: (row["accepted_per_round"], row["prompts"], row["answers"]) for name, row in rows.items()} == {
        **{"chat": (1.5, 2, 4), "code": (5, 1, 1), "chat/writing": (1, 1, 2), "chat/maths": (2, 1, 2)},
        **{"1": (pytest.approx(8 / 3, abs=1e-4), 3, 3), "2": (1.5, 2, 2)},
    }
    total = out["contenders"]["drafter"]
    assert (total["prompts"], total["answers"]) == (3, 5)
    assert sum(row["drafter"]["rounds"] for row in out["turns"].values()) == total["rounds"]
    single = summarise_all({"plain": plain[-1:], "drafter": drafted[-1:]}, "plain", 0)
    assert single["categories"] == {} and single["benchmarks"]["code"] == single["contenders"]


# The report.

THREE = [("a", None, str(i), 1) for i in range(3)]  # questions


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


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


def figures_of(page: Page) -> list[str]:
    """The page's figures as SVG."""
    head = "data:image/svg+xml;base64,"
    return [base64.b64decode(s.removeprefix(head)).decode() for s in page.sources if s.startswith(head)]


def rounds_of(html: str) -> list[list[tuple[str, int, int]]]:
    """(title, drafted tokens, tokens of the target's own) of every round of each answer on the page."""
    rounds = re.compile(r'<span class="r t\d" title="([^"]*)">(.*?)</span>', re.S)
    answers = html.split('<p class="answer"')[1:]
    return [[(title, r.count("<i"), r.count("<b>")) for title, r in rounds.findall(answer)] for answer in answers]


def script_lines(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        run_main(report, Path(recipe.output_dir).parent / "recipe.yaml")
    return capsys.readouterr().out.splitlines()


def test_answers_show_exactly_the_recorded_rounds(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_html, "SHOWN_ANSWERS", 5)
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


def test_the_page_needs_nothing_but_itself(recipe: Recipe) -> None:
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
    "<script>alert(1)</script></p></details><b>",
    '&lt;&#x3c;"onmouseover="x',
    "\ud800\x00\x1b\x7f\x85",
    "\u202eevil\u2066\ufeff\ufffe",
    "a\n\tb",
    "",
    "\u05e9\u05dc\u05d5\u05dd{{ 7 * 7 }}{% raw %}",
    "$x_1^2$]]>-->",
]


def test_hostile_texts_stay_texts(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tokens, questions, names of contenders, benchmarks and categories, on the page and in the figures."""
    monkeypatch.setattr(report_html, "SHOWN_ANSWERS", 2)
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


def test_token_texts_join_to_the_answer() -> None:
    tokenizer: Any = make_tokenizer()
    answer = "the cat\n sat — \U0001f600 \u05e9\u05dc <|end|>"
    ids = tokenizer(answer)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == answer
    assert texts[-1] == "<|end|>" and "\U0001f600" in texts and texts.count("") >= 3  # four bytes, one place
    broken = [tokenizer.convert_tokens_to_ids(token) for token in ("ð", "Ł", "a")]  # bytes of no character
    assert "".join(token_texts(tokenizer, broken)).endswith("a")


def test_the_table_fits_eighty_columns(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
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
    results = evaluate(recipe, THREE)
    results[MAIN][1].token_ids[3] = 999
    numbers = summarise_all(results, PLAIN, 0)
    for dtype, cause in (("float32", "a defect: please report it"), ("bfloat16", "bfloat16 rounds")):
        result_files.write_acceptance(recipe, numbers, described(results), MAIN, PLAIN, MADE | {"dtype": dtype})
        assert all(f"{MAIN} (67% are)" in text and cause in text for text in told())
    recipe = make_recipe(tmp_path, temperature=0.7, top_p=0.9)
    evaluate(recipe, THREE)
    assert result_files.read_acceptance(recipe.eval_out / "acceptance.json")["matches_target"] is None
    assert all("drawn at temperature 0.7" in text and "token for token" not in text for text in told())


def test_training_curves(recipe: Recipe) -> None:
    evaluate(recipe, THREE)
    assert len(figures_of(Page(page_of(recipe)))) == 2  # by position, time
    line = {"loss": 0.5, "accuracy": [0.5, 0.4], "simulated_tau": 1.7, "lr": 1e-4, "grad_norm": 1.0}
    lines = [json.dumps(line | {"step": step}) for step in range(1, 3001)]
    result_files.metrics_path(recipe).write_text("\n".join([*lines, '{"step": 30']))  # the last is being written
    text = page_of(recipe)
    assert len(figures_of(Page(text))) == 4 and len(text) < 400_000  # loss, simulated tau; 3,000 lines are thinned
    assert "0.5 after 3000 steps" in text


def test_parts_of_benchmarks_whose_names_begin_alike() -> None:
    rows = {MAIN: {}}
    categories = dict.fromkeys(("a/x", "ab/x", "ab/y"), rows)
    found = summary.parts_of({"benchmarks": {"a": rows, "ab": rows}, "categories": categories, "turns": {}})
    parts = [("benchmark", "a"), ("benchmark", "ab"), ("category", "x"), ("category", "y")]
    assert [(kind, name) for kind, name, _ in found] == parts


def test_answers_of_one_token_have_no_rounds(recipe: Recipe) -> None:
    evaluate(recipe, THREE, length=1)
    page = Page(page_of(recipe))
    assert "nothing could be drafted" in page.text and page.sources == []
    assert page.answers == [" word0"] * 3


# Damaged files.


def test_damaged_files_are_named(recipe: Recipe) -> None:
    evaluate(recipe, THREE, contenders=(MAIN, "other"))
    metrics, answers = result_files.metrics_path(recipe), result_files.generations_path(recipe)
    lines, good = answers.read_text().splitlines(), '{"step": 1, "loss": 2.0, "simulated_tau": 1.7}'
    cut, others = [*lines[:7], lines[7][:-9], lines[8]], [line for line in lines if MAIN not in line]
    metrics.write_text(good)
    for path, content, said in (
        (metrics, [good, '{"step": 2}', good], r"metrics\.jsonl:2: lacks loss.*; delete the line"),
        (answers, cut, r"generations\.jsonl:8: malformed JSON.*run `draftsmith evaluate` again"),
        (answers, others, f"holds no answer of '{MAIN}'; it is damaged, or of another run"),
        (recipe.eval_out / "acceptance.json", ['{"tau": 1}'], r"acceptance\.json: .*run `draftsmith evaluate` again"),
    ):
        before = path.read_text()
        path.write_text("\n".join(content))
        with pytest.raises(UserError, match=said):
            result_files.write_report(recipe)
        path.write_text(before)
