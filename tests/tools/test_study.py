"""The study: its cells and their runner, and the tables of its pages."""

import itertools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.study import run as study
from docs.study import tables
from docs.study.numbers import Found, cells_of
from docs.study.run import ROOT, TREE, Table, read_lines
from draftsmith.recipes.command.stages import SCRIPTS
from draftsmith.recipes.loader import load_recipe

CELLS, SMOLLM2, VISION = (Table(Path(f"docs/study/{name}.yaml")) for name in ("cells", "smollm2", "vision"))


# The tables of cells.


@pytest.mark.parametrize("table", [CELLS, SMOLLM2, VISION], ids=["cells", "smollm2", "vision"])
def test_every_cell_has_recipes_that_load_and_comes_behind_what_it_needs(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    gone = ("c2t", "timing", "eagle-passes", "drafter/eagle3-norm")
    frozen = {name for name in read_lines(table.results) if name.startswith(gone)}
    assert read_lines(table.results).keys() - frozen <= table.cells.keys() - table.unlisted
    seen = set[str]()
    for name, commands in table.cells.items():
        assert seen.issuperset(table.needs(name)), name
        seen.add(name)
        for _, command, recipe, *words in (each for each in commands if each[0] == "draftsmith"):
            if not re.search("seed[12]", name):  # which differ from seed 0 by that word alone
                own = itertools.takewhile(lambda word: not word.startswith("--"), words)
                # The cell itself writes the prompts that it asks; SmolLM2 is in a package that may not be installed.
                read = [each for each in own if not each.startswith(f"data.prompts={table.runs}")]
                load_recipe(recipe, [*read, *(["target.model=docs/study/target"] if table is SMOLLM2 else [])])
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


def test_drafters_of_the_real_model_that_are_not_trained_have_a_row() -> None:
    lines = read_lines(SMOLLM2.results)
    del lines["drafter/hass/seed0"]
    assert f"| HASS {'| not run ' * 5}|" in tables.real_model(Found(SMOLLM2, lines))


@pytest.mark.slow
def test_the_page_shows_what_the_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every table and figure that can be made is on it."""
    for name in tables.LINES:
        shutil.copy(tables.STUDY_FOLDER / f"{name}.jsonl", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--folder", str(tmp_path)])
    tables.main()
    page = (tmp_path / "tables.md").read_text()
    assert page == (tables.STUDY_FOLDER / "tables.md").read_text()
    assert {section for _, makers in tables.LINES.values() for section in makers} == tables.WANTED["sections"].keys()
    drawn = [path.name for path in tmp_path.glob("*.png")]
    assert len(drawn) == 6 and all(f"({name})" in page for name in drawn)
