"""The study: its cells and their runner, and the tables of its pages."""

import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from docs.study import prepare, tables
from docs.study import run as study
from docs.study.numbers import CHAIN, Estimate, Found, cells_of, over_seeds
from docs.study.run import ROOT, TREE, Table, read_lines
from draftsmith.recipes.command.stages import SCRIPTS
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.held_out import validation_rank
from draftsmith.recipes.loader import load_recipe
from tests.training_runs import SIX_STEPS, to_train

CELLS, VISION = (Table(Path(f"docs/study/{name}.yaml")) for name in ("cells", "vision"))


# The tables of cells.


@pytest.mark.parametrize("table", [CELLS, VISION], ids=["cells", "vision"])
def test_every_cell_has_recipes_that_load_and_comes_behind_what_it_needs(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    frozen = {name for name in read_lines(table.results) if name.startswith(("c2t", "timing"))}  # docs/results.md
    assert read_lines(table.results).keys() - frozen <= table.cells.keys() - table.unlisted
    seen = set[str]()
    for name, commands in table.cells.items():
        assert seen.issuperset(table.needs(name)), name
        seen.add(name)
        for _, command, recipe, *words in (each for each in commands if each[0] == "draftsmith"):
            if not re.search("seed[12]", name):  # which differ from seed 0 by that word alone
                own = itertools.takewhile(lambda word: not word.startswith("--"), words)
                # The cell itself writes the prompts that it asks.
                load_recipe(recipe, [each for each in own if not each.startswith(f"data.prompts={table.runs}")])
                assert command in SCRIPTS


# The runner.


SMALL = """
words: {runs: PLACE/runs, folder: "{runs}/{cell}", note: "sh -c 'echo {cell} >> PLACE/ran'"}
results: PLACE/results.jsonl
arms: {a: {weight: 1}, b: {weight: 2}}
cells:
  - {cell: data, line: false, commands: ["{note}", "touch {folder}/answers"]}
  - cell: drafter/{arm}
    each: {arm: [a, b]}
    commands: ["{note}", "test ! -e PLACE/broken-{arm}", "cp {runs}/data/answers {folder}/weights"]
  - cell: drafter/{arm}/more
    each: {n: [7], arm: [{arm: b, last: 4}, a]}
    last: 3
    commands: ["{note}", "cp {runs}/drafter/{arm}/weights {folder}/{weight}-{n}-{last}"]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL.replace("PLACE", str(tmp_path)))
    return tmp_path


def make(place: Path, *options: str) -> list[str]:
    """Runs the study; returns the cells that ran this time."""
    ran = place / "ran"
    before = ran.read_text().split() if ran.exists() else []
    sys.argv = ["run.py", str(place / "small.yaml"), *options]
    study.main()
    return ran.read_text().split()[len(before) :] if ran.exists() else []


def test_every_cell_runs_once_with_what_it_needs(place: Path, capsys: pytest.CaptureFixture) -> None:
    assert make(place, "--plan") == [] and "4 of 4 cells to do" in capsys.readouterr().out
    assert make(place, "--only", "*/b/*") == ["data", "drafter/b", "drafter/b/more"]
    assert (place / "runs/drafter/b/more/2-7-4").exists()
    assert make(place) == ["drafter/a", "drafter/a/more"]
    assert (place / "runs/drafter/a/more/1-7-3").exists()
    lines = (place / "results.jsonl").read_text()
    assert list(read_lines(place / "results.jsonl")) == ["drafter/b", "drafter/b/more", "drafter/a", "drafter/a/more"]
    assert make(place) == []
    assert "0 of 4" in (make(place, "--plan"), capsys.readouterr().out)[1]
    elsewhere = [f"runs={place}/again", f"results={place}/again.jsonl"]
    assert len(make(place, "--set", *elsewhere)) == 5 and (place / "results.jsonl").read_text() == lines


def test_files_that_are_gone_are_made_again_and_their_line_stays(place: Path) -> None:
    make(place)
    first, *_, last = (place / "results.jsonl").read_text().splitlines(keepends=True)
    (place / "results.jsonl").write_text(first)
    for path in (place / "runs/drafter/a").glob("*"):
        if path.is_file():
            path.unlink()
    assert make(place, "--only", "drafter/a*") == ["drafter/a", "drafter/a/more"]
    assert (place / "results.jsonl").read_text().count("\n") == 2
    lines = read_lines(place / "results.jsonl")
    assert lines["drafter/a"] == json.loads(first) and list(lines) == ["drafter/a", "drafter/a/more"]
    assert lines["drafter/a/more"]["commands"] == json.loads(last)["commands"]


def test_a_cell_that_fails_is_told_and_the_others_go_on(place: Path) -> None:
    (place / "broken-a").touch()
    with pytest.raises(UserError) as error:
        make(place)
    told = [problem.partition(";")[0] for problem in error.value.problems]
    assert told == ["drafter/a: test ! ended with 1", "drafter/a/more: needs drafter/a, which failed"]
    assert list(read_lines(place / "results.jsonl")) == ["drafter/b", "drafter/b/more"]
    (place / "broken-a").unlink()
    assert make(place) == ["drafter/a", "drafter/a/more"]


def test_mistakes_are_told(place: Path) -> None:
    with pytest.raises(UserError, match="--only: no cell is called drafter/c"):
        make(place, "--only", "drafter/c", "drafter/a")
    (place / "results.jsonl").write_text('{"cell": "a"}\n{"cel')
    with pytest.raises(UserError, match=r"results\.jsonl:2: no line of a study"):
        make(place)
    (place / "small.yaml").write_text(SMALL.replace("{weight}", "{wieght}"))
    with pytest.raises(UserError, match=r"no value for \{wieght\}"):
        make(place)


@pytest.mark.slow
def test_the_line_of_a_real_training(place: Path, target_dir: Path) -> None:
    """Six steps, and a replay along the training's own answers."""
    answers = to_train(place / "answers") / "conversations.jsonl"
    recipe = {"output_dir": "-", "target": {"model": str(target_dir), "dtype": "float32"}, "train": SIX_STEPS}
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"drafter": {"vocab_size": 160}}))
    replay = f"eval.mode=replay eval.answers={answers} eval.also=[] --compare 'short: eval.tree.nodes=3'"
    commands = [
        f"cp {answers.parent}/draft_vocab.safetensors {answers} {{folder}}",
        f"draftsmith train {place}/recipe.yaml output_dir={{folder}}",
        f"draftsmith evaluate {place}/recipe.yaml output_dir={{folder}} {replay}",
    ]
    content = yaml.safe_load((place / "small.yaml").read_text()) | {"cells": [{"cell": "real", "commands": commands}]}
    (place / "small.yaml").write_text(yaml.safe_dump(content))
    make(place)
    line = read_lines(place / "results.jsonl")["real"]
    assert line["seconds"] > line["train_seconds"] > 0 and len(line["commands"]) == 3
    assert len(line["validation"]["validation_accuracy"]) == 3 and line["parameters"] > 1000
    assert set(line["replay"]) == {TREE, "short"} and line["answers"] == len(line["tokens_by_answer"]) == 24
    for numbers in line["replay"].values():
        assert sum(numbers["rounds_by_answer"]) == numbers["rounds"]
    assert not (place / "runs/real/checkpoints").exists()


# Files that no command writes.


def test_shares_lie_inside_each_other_and_keep_the_same_validation(tmp_path: Path) -> None:
    whole = [json.dumps({"id": f"c{i}"}) for i in range(448)]
    (tmp_path / "all.jsonl").write_text("\n".join(whole) + "\n")
    prepare.shares(tmp_path / "all.jsonl", tmp_path)
    kept = sorted((f"c{i}" for i in range(448)), key=validation_rank)[:48]
    inside: list[str] = []
    for size in (1, 2, 4, 8):
        lines = (tmp_path / f"x{size}.jsonl").read_text().splitlines()
        assert len(lines) == 48 + 50 * size and lines == [line for line in whole if line in set(lines)]
        assert set(inside) < set(lines) and {json.dumps({"id": id_}) for id_ in kept} < set(lines)
        inside = lines


def test_more_conversations_begin_with_all_of_the_recipe_and_ask_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [{"id": f"c{i}", "messages": [{"role": "user"}, {"role": "assistant"}]} for i in range(400)]
    monkeypatch.setattr(prepare, "stdlib_conversations", lambda split, kinds: every[: 200 * len(kinds)])
    asked, whole, prompts = [each["id"] for each in every[:100]], tmp_path / "x8.jsonl", tmp_path / "prompts.jsonl"
    whole.write_text("".join(json.dumps({"id": id_}) + "\n" for id_ in asked))
    prepare.more_prompts(whole, prompts)
    found = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert len({each["id"] for each in found} - set(asked)) == len(found) == (100 - 48) * 3
    assert all(each["messages"] == [{"role": "user"}] for each in found)
    prepare.more(whole, prompts, tmp_path)
    for size, times in ((16, 2), (32, 4)):
        written = [json.loads(line)["id"] for line in (tmp_path / f"x{size}.jsonl").read_text().splitlines()]
        assert written[:100] == asked and len(written) == 48 + times * 52
        assert set(sorted(written, key=validation_rank)[:48]) <= set(asked)


def test_pictures_are_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PICTURES", 2)
    prepare.picture_questions(tmp_path / "questions.jsonl")
    one, other = (json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines())
    assert one["id"] != other["id"] and one["messages"][0]["content"][0]["type"] == "image"
    assert one["messages"][0]["content"][1]["text"].endswith("?")


# Statistics and pages.

TOKENS = np.random.default_rng(9).integers(10, 40, 30).tolist()


def rounds(seed: int, more: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 5 + more, 30).tolist()


@pytest.fixture
def found() -> Found:
    """Three seeds of EAGLE-2, and two of HASS."""
    lines: dict[str, Any] = {"answers": {"tokens_by_answer": TOKENS}}
    for arm, more, seeds in (("eagle2", 3, (0, 1, 2)), ("hass", 2, (0, 2))):
        for seed in seeds:
            lines[cells_of(arm)[seed]] = {"replay": {TREE: {"rounds_by_answer": rounds(seed + more, more)}}}
    return Found(CELLS, lines)


def test_taus_are_means_over_seeds_of_tokens_by_rounds(found: Found) -> None:
    tau = found.tau("eagle2")
    by_hand = [(sum(TOKENS) - 30) / sum(rounds(seed + 3, 3)) for seed in range(3)]
    assert tau is not None and list(tau.by_seed.values()) == pytest.approx(by_hand)
    assert tau.value == pytest.approx(sum(by_hand) / 3) and tau.interval[0] < tau.value < tau.interval[1]
    short = np.array(TOKENS) < 20
    part = found.tau("eagle2", keep=short)
    ours = [(n, own) for n, own in zip(TOKENS, rounds(3, 3), strict=True) if n < 20]
    assert part is not None and part.by_seed[0] == pytest.approx(sum(n - 1 for n, _ in ours) / sum(r for _, r in ours))
    assert found.tau("poss1") is None and tables.with_interval(None) == tables.in_percent(None) == "not run"


def test_ratios_are_paired_by_prompt_and_seed(found: Found) -> None:
    ratio = found.ratio("hass", "eagle2")
    own, base = ([np.array(rounds(seed + more, more)) for seed in (0, 2)] for more in (2, 3))
    assert ratio is not None and ratio.by_seed == pytest.approx(
        {seed: b.sum() / a.sum() for seed, a, b in zip((0, 2), own, base, strict=True)}
    )
    random, tokens, drawn = np.random.default_rng(1), np.array(TOKENS) - 1, []  # a slow twin that draws its own prompts
    for _ in range(4000):
        of = random.integers(0, 30, 30)
        taus = (np.mean([tokens[of].sum() / each[of].sum() for each in seeds]) for seeds in (own, base))
        drawn.append(next(taus) / next(taus))
    width = ratio.interval[1] - ratio.interval[0]  # two bootstraps of thousands of samples differ by less than a tenth
    assert ratio.interval == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=width / 10)
    itself = found.ratio("hass", "hass")
    assert itself is not None and itself.value == 1 and tuple(itself.interval) == (1, 1)


def test_the_interval_over_seeds_is_student_s() -> None:
    """Of logarithms 0, 0.1, 0.2: 0.1 +- t * 0.1 / sqrt(3), and t = 4.3027 as in every table."""
    own = over_seeds(Estimate(1.0, (1.0, 1.0), {k: math.exp(k / 10) for k in range(3)}))
    assert own == pytest.approx([math.exp(0.1 + sign * 4.3027 * 0.1 / 3**0.5) for sign in (-1, 1)], rel=1e-4)


def test_a_claim_holds_only_where_prompts_and_seeds_say_so() -> None:
    for interval, seeds, verdict in (
        ((1.01, 1.05), (1.02, 1.03, 1.04), "holds"),
        ((1.01, 1.05), (1.01, 1.02, 1.06), "undecided"),  # seeds that lie so far apart
        ((0.99, 1.05), (1.02, 1.03, 1.04), "undecided"),
        ((0.90, 0.95), (0.9, 0.91, 0.93), "opposite"),
        ((1.01, 1.05), (1.02, 1.03), "unfinished: 2 of 3 seeds"),
    ):
        assert tables.verdict(Estimate(1.0, interval, dict(enumerate(seeds)))) == verdict


@pytest.mark.parametrize(
    "text", ["study:a -->\nx\n", "study:a -->\n<!-- study:b -->\n<!-- end -->", "study:z -->\n<!-- end -->"]
)
def test_what_lies_between_markers_is_replaced_and_damaged_ones_are_told(text: str) -> None:
    whole = "before\n<!-- study:a -->\nold\n<!-- end -->\nbetween\n<!-- study:b -->\n<!-- end -->\nafter\n"
    filled = tables.fill(whole, {"a": "A", "b": "B"})
    assert filled == whole.replace("old", "A").replace("b -->\n", "b -->\nB\n")
    with pytest.raises(UserError, match=r"marker study:[az]: no such section, or no <!-- end -->"):
        tables.fill(f"<!-- {text}", {"a": "A", "b": "B"})


def test_the_pages_show_what_the_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every table and figure that can be made is on a page."""
    (tmp_path / "study").mkdir()
    for name in tables.PAGES:
        shutil.copy(ROOT / "docs" / f"{name}.md", tmp_path)
        shutil.copy(ROOT / "docs/study" / f"{name}.jsonl", tmp_path / "study")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--folder", str(tmp_path)])
    tables.main()
    for name, (_, sections) in tables.PAGES.items():
        page = (ROOT / "docs" / f"{name}.md").read_text()
        assert (tmp_path / f"{name}.md").read_text() == page
        assert all(f"<!-- study:{section} -->" in page for section in sections)
    drawn = [path.name for path in (tmp_path / "study").glob("*.png")]
    assert len(drawn) == 6 and all(f"(study/{name})" in (ROOT / "docs/results.md").read_text() for name in drawn)


def test_the_committed_taus_are_those_of_their_rounds() -> None:
    lines = read_lines(CELLS.results)
    tokens = lines["answers"]["tokens_by_answer"]
    for name in (each for each in lines if each.startswith("drafter/")):
        for own in (lines[name]["replay"][tree] for tree in (TREE, CHAIN)):
            assert own["tau"] == pytest.approx((sum(tokens) - len(tokens)) / own["rounds"], abs=1e-4), name
            assert sum(own["rounds_by_answer"]) == own["rounds"]


def test_a_study_without_a_line_makes_every_table() -> None:
    made = {name: tables.made(make, Found(CELLS, {})) for name, make in tables.STUDY.items()}
    assert made["drafters"] == "not run" and "| HASS | not run |" in made["compared"].replace("EAGLE-2", "HASS")
    assert tables.made(tables.figures, Found(CELLS, {}), {}) == {}
