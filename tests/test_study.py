"""The study: its cells and their order, a runner that loses and repeats nothing, and a report that invents nothing.

Cells run a script of the tests in place of training: it writes what the real ones write, and notes that it ran.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.study import cells as study_cells
from docs.study import numbers as study_numbers
from docs.study import page as study_report
from docs.study import run as study
from docs.study.cells import (
    ALL_ARMS,
    ARMS,
    CHAIN,
    CUTS,
    LONGEST_ANSWER,
    MAIN,
    RATES,
    RECIPE,
    SCALED,
    SIZES,
    TREE,
    VALIDATION,
    Cell,
    Places,
    best_rate,
    cells,
    commands,
    drafter_name,
    rate_name,
    rates_of,
    sampled_name,
    unrolled_name,
)
from docs.study.numbers import Found
from draftsmith.eval import c2t_sweep
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe

HERE = Path(__file__).parents[1]
PLACES = Places(Path("out"), Path("demo"))
ANSWERS = 30  # of the fake study


def searched(best: float = 4e-3) -> dict[str, Any]:
    """Lines of all learning rates, the best one in the middle."""
    return {
        rate_name(arm.family, rate): {"validation": {"replay_tau": 2.0 + (rate == best)}}
        for arm in ARMS.values()
        for rate in RATES
    }


# The design.


def test_the_most_valuable_cells_come_first() -> None:
    names = [cell.name for cell in cells({})]
    assert len(names) == len(set(names))
    place = names.index
    first_seed = [place(drafter_name(arm)) for arm in MAIN]
    for_little = [place(name) for name in ("fr-spec/answers", "fr-spec/library", "c2t/eagle2", "c2t/eagle3")]
    scaled = [place(drafter_name(arm, size)) for arm in SCALED for size in SIZES if size < 8]
    other_seeds = [place(drafter_name(arm, seed=seed)) for arm in MAIN for seed in (1, 2)]
    assert max(first_seed) < min(for_little) < max(for_little) < min(scaled) < max(scaled) < min(other_seeds)
    seed_1, seed_2 = ([place(drafter_name(arm, seed=seed)) for arm in MAIN] for seed in (1, 2))
    assert max(seed_1) < min(seed_2)
    assert names[-1] == "timing"  # alone, when all else is done


def test_a_cell_comes_behind_what_it_needs_and_a_family_searches_once() -> None:
    seen: set[str] = set()
    for cell in cells({}):
        assert seen.issuperset(cell.needs), cell.name
        seen.add(cell.name)
    rates = [name for name in seen if name.startswith("rate/")]
    assert len(rates) == len(RATES) * len({arm.family for arm in ARMS.values()})


def test_every_main_arm_and_baseline_has_three_seeds_and_both_figures_all_sizes() -> None:
    names = {cell.name for cell in cells({})}
    assert {"eagle2", "hass", "eagle3", *(f"poss{n}{base}" for n in (1, 2, 3) for base in ("", "-eagle3"))} < set(MAIN)
    assert {drafter_name(arm, seed=seed) for arm in ARMS for seed in range(3)} < names
    assert {drafter_name(arm, size) for arm in SCALED for size in (1, 2, 4, 8)} < names


def test_rates_go_on_beyond_an_end_that_is_best() -> None:
    lines = searched(best=8e-3)
    assert rates_of("hass", lines) == [2e-3, 4e-3, 8e-3, 16e-3]
    lines[rate_name("hass", 16e-3)] = {"validation": {"replay_tau": 2.5}}
    assert rates_of("hass", lines) == [2e-3, 4e-3, 8e-3, 16e-3]
    assert best_rate("hass", lines) == 8e-3
    lines[rate_name("hass", 16e-3)] = {"validation": {"replay_tau": 9.0}}
    assert rates_of("hass", lines)[-1] == 32e-3  # and no further: the bound
    lines[rate_name("hass", 32e-3)] = {"validation": {"replay_tau": 10.0}}
    assert best_rate("hass", lines) == 32e-3
    assert rates_of("hass", searched(best=2e-3))[0] == 1e-3


def test_of_rates_that_are_equally_good_the_highest_is_taken() -> None:
    lines = searched(best=2e-3)
    lines[rate_name("hass", 4e-3)] = {"validation": {"replay_tau": 2.98}}
    assert rates_of("hass", lines) == [1e-3, 2e-3, 4e-3, 8e-3]  # the very best lies at an end still
    lines[rate_name("hass", 1e-3)] = {"validation": {"replay_tau": 2.5}}
    assert best_rate("hass", lines) == 4e-3
    lines[rate_name("hass", 4e-3)] = {"validation": {"replay_tau": 2.96}}
    assert best_rate("hass", lines) == 2e-3


def test_a_rate_is_not_chosen_before_all_are_tried() -> None:
    lines = searched()
    del lines[rate_name("poss", 8e-3)]
    with pytest.raises(KeyError):
        best_rate("poss", lines)


def test_every_command_is_a_script_of_ours_with_a_recipe_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    seen = set()
    for cell in cells(searched()):
        for script, recipe, *rest in commands(cell, PLACES, searched()):
            assert (HERE / script).exists()
            own = rest[: next((i for i, part in enumerate(rest) if part.startswith("--")), len(rest))]
            loaded = load_recipe(recipe, own)
            if script == "eval/c2t_sweep.py":
                options = argparse.ArgumentParser()
                c2t_sweep._options(options)
                beams = options.parse_args(rest[len(own) :]).beams
                (_, narrow), (_, wide) = beams
                assert [beam for beam, _ in beams] == [15, None] and min(narrow) < min(wide)
            seen.add(cell.kind)
            if script.startswith("train/") and script != "train/c2t.py":
                assert loaded.drafter.kind == Path(script).stem
                assert loaded.train.seed == cell.seed
                assert cell.kind in ("timing", "unrolled") or loaded.train.learning_rate == (cell.rate or 4e-3)
                assert loaded.drafter.vocab_size is None
    assert seen == {"data", "answers", "rate", "drafter", "sampled", "fr-spec", "c2t", "unrolled", "timing"}


def test_arms_differ_in_the_drafter_and_its_publication_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same rows, steps, batch, optimiser and schedule; the losses are those that each was published with."""
    monkeypatch.chdir(HERE)
    own = {"ttt_steps", "step_weight", "token_loss", "feature_loss", "top_k_loss", "feature_noise", "detach_features"}
    shared, loaded = set(), {}
    for arm in ARMS:
        cell = Cell(drafter_name(arm), "drafter", 0, arm=arm)
        _, recipe, *overrides = commands(cell, PLACES, searched())[0]
        loaded[arm] = load_recipe(recipe, overrides)
        train = {key: str(value) for key, value in loaded[arm].train.model_dump().items() if key not in own}
        shared.add(json.dumps([train, loaded[arm].data.model_dump()], sort_keys=True))
    assert len(shared) == 1
    assert loaded["eagle2"].train.ttt_steps == 1
    assert {loaded[arm].train.ttt_steps for arm in ARMS if arm not in ("eagle2", "hass3")} == {6}
    assert loaded["hass"].train.top_k_loss == loaded["hass3"].train.top_k_loss == 1
    whole, cut = loaded["poss2-eagle3-whole"].train, loaded["poss2-eagle3"].train
    assert whole == cut.model_copy(update={"detach_features": False}) != cut
    for n, count in ((1, 6), (2, 3), (3, 2)):
        for arm in (f"poss{n}", f"poss{n}-eagle3"):
            section = loaded[arm].drafter
            assert (section.positions, section.specialist_count, section.extends) == (
                *(n, count),
                "eagle3" if "eagle3" in arm else "eagle",
            )
        assert loaded[f"poss{n}"].train.top_k_loss == 0  # as published
    assert loaded["matched"].train.model_dump() == loaded["poss2"].train.model_dump()  # its baseline, by losses, too


# The runner.

SCRIPT = """
import json, os, sys, time
from pathlib import Path
name, kind, out, pause = sys.argv[1:5]
out = Path(out)
folder = out / name
with (out / "ran.txt").open("a") as file:
    file.write(name + "\\n")
if (out / "broken").exists() and (out / "broken").read_text() == name:
    sys.exit("it broke")
if name == pause:
    (out / "pausing").write_text(str(os.getpid()))
    while not (out / "go on").exists():
        time.sleep(0.02)
def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
if kind == "data":
    for file in ("draft_vocab.safetensors", "token_counts.safetensors"):
        write(out / "data" / file, "x")
elif kind == "answers":
    lines = [json.dumps({"id": f"a{i}", "turns": [{"output_token_ids": [1] * 11}]}) for i in range(30)]
    write(out / "heldout" / "conversations.jsonl", "\\n".join(lines) + "\\n")
elif kind in ("rate", "drafter", "unrolled"):
    middle = name.endswith("0.004")
    write(folder / "metrics.jsonl", json.dumps({"validation_loss": 1.0, "replay_tau": 2.0 + middle}) + "\\n")
    if not (folder / "checkpoints").exists():
        write(folder / "checkpoints" / "by", name)
if kind == "drafter":
    header = {"fc": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
              "d2t": {"dtype": "I64", "shape": [7], "data_offsets": [48, 104]}, "__metadata__": {"a": "b"}}
    text = json.dumps(header).encode()
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    weights = (out / "weights").read_bytes() if (out / "weights").exists() else bytes(104)
    (folder / "drafter" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + weights)
if kind == "sampled":
    contenders = {"plain": {}} | {own: {"tau": 2.5, "tau_interval": [2, 3], "rounds": 9, "new_tokens": 20}
                                  for own in ("long name", "chain of 6")}
    write(folder / "eval" / "acceptance.json",
          json.dumps({"contender": "long name", "baseline": "plain", "contenders": contenders}))
if kind in ("drafter", "fr-spec"):
    keys = ["tau", "tau_interval", "rounds", "new_tokens", "accepted_per_round", "tree_nodes_per_round",
            "draft_calls_per_round", "acceptance_by_position", "acceptance_by_position_interval", "tree"]
    names = ["long name", "chain of 6"] if kind == "drafter" else ["long name", "128", "256", "512", "768"]
    contenders = {"plain": {}} | {own: {key: 0.5 for key in keys} for own in names}
    write(folder / "eval" / "replay" / "acceptance.json",
          json.dumps({"contender": "long name", "baseline": "plain", "contenders": contenders}))
    lines = [json.dumps({"contender": own, "conversation_id": f"a{i}", "turn": 1, "token_ids": [1] * 11,
                         "accepted_per_round": [0] * (2 + i % 3)}) for own in names for i in reversed(range(30))]
    write(folder / "eval" / "replay" / "generations.jsonl", "\\n".join(lines) + "\\n")
elif kind == "c2t":
    write(folder / "eval" / "c2t_sweep.json", json.dumps({"points": [], "at_equal_tau": [], "answers": 30}))
elif kind == "timing":
    costs = {"draft_by_calls": {"chain": [[1.0, 0.5], [6.0, 3.0]]}, "plain_round": 2.0}
    write(folder / "eagle2-0" / "eval" / "plan.json", json.dumps({"costs": costs}))
"""

Run = Callable[..., None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a demo's conversations, where cells run SCRIPT."""
    (tmp_path / "demo").mkdir()
    lines = [json.dumps({"id": f"c{i}"}) for i in range(448)]
    (tmp_path / "demo" / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    replaced(monkeypatch.setattr, tmp_path)
    return tmp_path


def replaced(setattr_: Callable[[Any, str, Any], None], root: Path, pause: str = "-") -> None:
    def fake(cell: Cell, places: Places, lines: Any) -> list[list[str]]:
        if cell.kind == "drafter":
            best_rate(ALL_ARMS[cell.arm].family, lines)  # as the real ones: the search must be over
        return [["script.py", cell.name, cell.kind, str(places.out), pause]]

    setattr_(study, "ROOT", root)
    setattr_(study, "commands", fake)


def ran(place: Path) -> list[str]:
    return (place / "out" / "ran.txt").read_text().split()


def run(only: list[str] | None = None, jobs: int = 1) -> None:
    study.Study(PLACES, Path("results.jsonl"), only).run(jobs)


def read() -> dict[str, Any]:
    return study.read_lines(Path("results.jsonl"))


def test_every_cell_once_in_order_and_never_again(place: Path) -> None:
    run()
    lines = read()
    assert list(lines) == ran(place) == [cell.name for cell in cells(lines)]
    run()
    assert ran(place) == list(lines)
    line = lines[drafter_name("hass")]
    assert line["parameters"] == 12  # the draft vocabulary is no parameter
    assert line["learning_rate"] == 4e-3
    assert line["replay"][TREE]["rounds_by_answer"] == [
        2 + int(id_[1:]) % 3 for id_ in sorted(f"a{i}" for i in range(30))
    ]
    assert set(line["replay"]) == {TREE, CHAIN}
    assert line["commands"] and str(place) not in json.dumps(line["commands"])
    assert lines["timing"]["milliseconds"] == {
        "eagle2": {"chain, 1 calls": [0.5], "chain, 6 calls": [3.0], "plain round": [2.0]}
    }


def test_workers_side_by_side_do_no_cell_twice(place: Path) -> None:
    run(["drafter/hass/*", "drafter/eagle*/x8/*"], jobs=3)
    assert len(ran(place)) == len(set(ran(place)))
    assert set(ran(place)) == set(read()) > {drafter_name("hass", 8, 2), "answers", rate_name("eagle3", 4e-3)}
    assert not any(name.startswith(("drafter/poss", "fr-spec")) for name in ran(place))


def test_lines_of_a_rate_that_is_not_the_best_any_more_are_made_again(place: Path) -> None:
    """And those that measured such a drafter; whoever reads lines goes without them meanwhile."""
    run(["fr-spec/answers", "drafter/hass/x8/seed1", sampled_name("eagle3")])
    path, lines = place / "results.jsonl", read()
    assert study_cells.outdated(lines) == set()
    again = {drafter_name("eagle2"), "fr-spec/answers", drafter_name("eagle3"), sampled_name("eagle3")}
    for name in again:
        assert lines[name]["learning_rate"] == 4e-3
        lines[name]["learning_rate"] = 8e-3
    lines["fr-spec/answers"]["replay"] = "of the old one"
    lines[drafter_name("hass", seed=1)]["learning_rate"] = 1.0
    del lines[rate_name("hass", 2e-3)]  # which rate is the best is not known
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    assert study_cells.outdated(lines) == again == lines.keys() - study_cells.current(lines).keys()
    before = ran(place)
    stray = place / "out/fr-spec/answers/of the old drafter"
    stray.touch()
    run(["fr-spec/answers", sampled_name("eagle3"), "answers"])
    assert set(ran(place)[len(before) :]) == again
    assert not stray.exists()
    assert read().keys() == lines.keys() and read()["fr-spec/answers"]["replay"] != "of the old one"
    assert read()[drafter_name("eagle2")]["learning_rate"] == 4e-3
    unchanged = read().keys() - again
    assert {name: read()[name] for name in unchanged} == {name: lines[name] for name in unchanged}


def test_a_cell_that_fails_is_told_and_the_others_go_on(place: Path) -> None:
    broken = drafter_name("eagle2")
    (place / "out").mkdir()
    (place / "out" / "broken").write_text(broken)
    with pytest.raises(UserError, match=rf"{broken}: script.py ended with 1: it broke \(all of it: .*log.txt\)"):
        run(["drafter/eagle2/x8/*", "fr-spec/answers"])
    # FR-Spec needs that drafter, the other seeds do not.
    assert drafter_name("eagle2", 8, 2) in read()
    assert {broken, "fr-spec/answers"}.isdisjoint(read())
    assert ran(place).count(broken) == 1
    (place / "out" / "broken").unlink()
    run(["drafter/eagle2/x8/*", "fr-spec/answers"])
    assert {broken, "fr-spec/answers"} < set(read())
    assert ran(place).count(drafter_name("eagle2", 8, 2)) == 1


def test_files_that_are_gone_are_made_again_and_their_line_stays(place: Path) -> None:
    run([drafter_name("eagle2")])
    before = (place / "results.jsonl").read_text()
    (place / "out" / drafter_name("eagle2") / "drafter" / "model.safetensors").unlink()
    (place / "out" / "data" / "token_counts.safetensors").unlink()
    run([drafter_name("eagle2")])  # nobody needs them
    assert (place / "results.jsonl").read_text() == before
    assert ran(place).count("data") == ran(place).count(drafter_name("eagle2")) == 1
    run(["fr-spec/answers"])
    assert ran(place).count("data") == ran(place).count(drafter_name("eagle2")) == 2
    assert ran(place).count("answers") == 1
    after = (place / "results.jsonl").read_text()
    assert after.startswith(before) and after.count("\n") == before.count("\n") + 1


def test_a_drafter_of_other_commands_is_made_again_and_what_was_measured_with_other_weights_too(place: Path) -> None:
    run(["fr-spec/answers"])
    drafter, before = drafter_name("eagle2"), read()
    note = place / "out" / drafter / "commands.json"
    (command,) = json.loads(note.read_text())
    note.write_text(json.dumps([[*command, "train.learning_rate=1.0"]]))  # by a search that has been thrown away
    run(["fr-spec/library"])
    assert ran(place).count(drafter) == 2
    assert json.loads(note.read_text()) == [command]
    assert {name: read()[name] for name in before} == before
    note.unlink()
    (place / "out" / "weights").write_bytes(bytes([1] * 104))
    run(["fr-spec/*"])  # whose lines are there: nobody needs the drafter
    assert read().keys() == before.keys() | {"fr-spec/library"} and ran(place).count(drafter) == 2
    run(["c2t/eagle2"])
    assert ran(place).count(drafter) == 3 and read()[drafter]["weights"] != before[drafter]["weights"]
    assert study_cells.outdated(read()) == {"fr-spec/answers", "fr-spec/library"}
    run(["fr-spec/*"])
    assert ran(place).count(drafter) == 3 and study_cells.outdated(read()) == set()


def test_a_drafter_that_the_search_for_its_rate_has_trained_is_not_trained_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where all that makes a drafter is the same; and nothing is kept that nobody goes on with."""
    begun: dict[str, str] = {}
    tidy = study.tidy

    def watching(cell: Cell, folder: Path) -> None:
        if (folder / "checkpoints").exists():
            begun[cell.name] = (folder / "checkpoints" / "by").read_text()
        tidy(cell, folder)

    monkeypatch.setattr(study, "tidy", watching)
    run(["drafter/hass/x8/*", "drafter/hass3/*"])
    for name, by in begun.items():
        assert by == (rate_name("hass", 4e-3) if name == drafter_name("hass") else name)
        assert (place / "out" / name / "checkpoints").exists() == name.startswith("rate/")
    assert read()[drafter_name("hass")]["resumed"] and "resumed" not in read()[drafter_name("hass", 8, 1)]
    for arm in ("hass", "hass3"):
        cell = next(cell for cell in cells(searched()) if cell.name == drafter_name(arm))
        rate = next(cell for cell in cells(searched()) if cell.name == rate_name("hass", 4e-3))
        wanted, tried = (
            [p for p in commands(each, PLACES, searched())[0] if "output_dir" not in p] for each in (cell, rate)
        )
        assert (wanted == tried) == (arm == "hass")


def test_a_run_goes_on_in_its_folder_unless_its_commands_changed(tmp_path: Path) -> None:
    wanted = [["train/eagle.py", "a=1"]]
    study.begin_anew_if_changed(tmp_path, wanted)
    (tmp_path / "checkpoints").mkdir()
    study.begin_anew_if_changed(tmp_path, wanted)
    assert (tmp_path / "checkpoints").exists()
    study.begin_anew_if_changed(tmp_path, [["train/eagle.py", "a=2"]])
    assert not (tmp_path / "checkpoints").exists()


def wait_for(there: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end, "waited a minute"
        time.sleep(0.02)


DRIVER = """
import sys
from pathlib import Path
from tests.test_study import replaced, run
replaced(setattr, Path(sys.argv[1]), sys.argv[2])
run([sys.argv[2]])
"""


@pytest.fixture
def started(place: Path) -> Iterator[subprocess.Popen]:
    """A study in a process of its own, in the middle of a cell."""
    command = [sys.executable, "-c", DRIVER, str(place), drafter_name("eagle2")]
    process = subprocess.Popen(command, cwd=HERE, start_new_session=True)
    try:
        wait_for(lambda: (place / "out" / "pausing").exists() and (place / "out" / "pausing").read_text())
        yield process
    finally:
        with suppress(ProcessLookupError):  # whatever a broken runner left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_study_leaves_its_cell_claimed_while_the_training_lives(
    place: Path, started: subprocess.Popen
) -> None:
    cell = next(cell for cell in cells(read()) if cell.name == drafter_name("eagle2"))
    orphan = int((place / "out" / "pausing").read_text())
    started.kill()
    started.wait()
    own = study.Study(PLACES, Path("results.jsonl"))
    with own.claimed(cell) as lock:
        assert lock is None  # nobody may train in the same folder
    assert cell.name not in read()
    os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: is_free(own, cell))
    run([cell.name])
    assert list(read()).count(cell.name) == 1
    assert ran(place).count(cell.name) == 2
    assert ran(place).count("data") == 1  # what was done before the kill stays


def is_free(own: study.Study, cell: Cell) -> bool:
    with own.claimed(cell) as lock:
        return lock is not None


def test_sigterm_ends_the_training_too_and_writes_no_line(place: Path, started: subprocess.Popen) -> None:
    training = int((place / "out" / "pausing").read_text())
    started.terminate()
    started.wait(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(training, 0)
    assert drafter_name("eagle2") not in read()


def test_shares_lie_inside_each_other_and_keep_the_same_validation(place: Path) -> None:
    study.write_shares(place / "demo" / "conversations.jsonl", PLACES)
    ids = {}
    for size, name in SIZES.items():
        lines = (place / "out" / "data" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == sorted(
            (json.loads(line)["id"] for line in lines), key=lambda id_: int(id_[1:])
        )  # in the order of the file
        ids[size] = {json.loads(line)["id"] for line in lines}
        assert len(lines) == 48 + 50 * size
    assert ids[1] < ids[2] < ids[4] < ids[8]
    kept = sorted(ids[8], key=study.validation_rank)[:48]
    for size in SIZES:
        # What training keeps for validation: the lowest ranks, a fifth of the conversations at most.
        assert sorted(ids[size], key=study.validation_rank)[:48] == kept


def test_the_smallest_share_is_enough_for_all_validation_conversations() -> None:
    """Training keeps a fifth at most; of the demo's 2,000 conversations, the smallest share has 244 others."""
    assert (2000 - study_cells.VALIDATION) // 8 + study_cells.VALIDATION >= 5 * study_cells.VALIDATION


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"cell": "a"}\n{"cell": "a"}\n', "results.jsonl:2: a stands there twice"),
        ('{"cell": "a"}\n{"cel', "results.jsonl:2: no line of a study"),
        ("[1]\n", "results.jsonl:1: no line of a study"),
    ],
)
def test_damaged_results_are_told(place: Path, text: str, message: str) -> None:
    (place / "results.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read()


def test_results_that_break_while_workers_run_end_the_study(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study.append_line

    def breaking(path: Path, record: Any) -> None:
        whole(path, record)
        if record["cell"] == "answers":
            (place / path).write_text("no line\n")

    monkeypatch.setattr(study, "append_line", breaking)
    with pytest.raises(UserError, match=r"results\.jsonl:1: no line of a study"):
        run(jobs=2)


def test_a_pattern_without_a_cell_is_told(place: Path) -> None:
    with pytest.raises(UserError, match="--only: no cell is called drafter/eagel2"):
        run(["drafter/eagel2*"])


def test_the_plan_counts_what_is_left(place: Path, capsys: pytest.CaptureFixture) -> None:
    run(["rate/eagle2/*"])
    every = cells(read())
    capsys.readouterr()
    study.print_plan(every, read(), PLACES)
    out = capsys.readouterr().out
    assert f"4 of {len(every)} cells done; {len(every) - 4} to do" in out
    assert "rate/eagle2" not in out and "drafter/eagle2/x8/seed0" in out and "other commands" not in out


def test_the_plan_names_lines_that_were_made_otherwise(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Validating along answers changes no drafter."""
    run(["rate/eagle2/*"])
    lines = read()
    for name, more in ((rate_name("eagle2", 4e-3), "train.eval_replay=0"), (rate_name("eagle2", 8e-3), "train.x=1")):
        lines[name]["commands"] = [f"{lines[name]['commands'][0]} {more}"]
    study.print_plan(cells(lines), lines, PLACES)
    assert (
        f"made by other commands than today's; where that matters, delete the line: {rate_name('eagle2', 8e-3)}\n"
        in (capsys.readouterr().out)
    )


def test_no_worker_is_a_mistake(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", "--jobs", "0", "--demo", str(place / "demo")])
    with pytest.raises(UserError, match="--jobs: 0 cells at a time"):
        study.main()


# The report.


def rounds_of(seed: int, more: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 5 + more, ANSWERS).tolist()


def replay(seed: int, more: int) -> dict[str, Any]:
    return {
        "rounds_by_answer": rounds_of(seed, more),
        "answers_sha256": "same",
        "acceptance_by_position": [0.8, 0.7, 0.6, 0.5, 0.5, 0.5, None, None],
        "acceptance_by_position_interval": [[0.7, 0.9]] * 6 + [None, None],
        "tree_nodes_per_round": 60.0,
    }


TOKENS = np.random.default_rng(9).integers(10, 40, ANSWERS).tolist()


@pytest.fixture
def lines() -> dict[str, Any]:
    """Three seeds of EAGLE-2, two of HASS, four sizes of EAGLE-2 and one cut of FR-Spec."""

    def drafter(seed: int, more: int) -> dict[str, Any]:
        return {
            **{"kind": "drafter", "seed": seed, "commit": "abc", "seconds": 60.0, "train_seconds": 30.0},
            "commands": [f"python train/eagle.py train.eval_replay={VALIDATION}"],
            **{
                "parameters": 870_000,
                "validation": {"validation_accuracy": [0.4 + 0.1 * seed]},
                "replay": {TREE: replay(seed, more), CHAIN: replay(seed + 50, more + 3)},
            },
        }

    sizes = {name: 244 * size for size, name in SIZES.items()}
    common = {"commit": "abc", "seconds": 10.0, "seed": 0}
    return {
        "data": {**common, "training_conversations": sizes},
        "answers": {**common, "tokens_by_answer": TOKENS},
        **{drafter_name("eagle2", seed=seed): drafter(seed, 3) for seed in range(3)},
        **{drafter_name("eagle2", size): drafter(10 + size, 6) for size in (1, 2, 4)},
        **{drafter_name("hass", seed=seed): drafter(20 + seed, 2) for seed in (0, 2)},
        **{
            f"sampled/eagle3/seed{seed}": {
                **common,
                "decoded": {name: {"tau": tau, "tau_interval": [1, 4]} for name, tau in taus.items()},
            }
            for seed, taus in ((0, {TREE: 2.5, CHAIN: 1.0}), (2, {TREE: 3.0, CHAIN: 2.0}))
        },
        "fr-spec/answers": {
            **common,
            "replay": {TREE: replay(0, 3), **{str(size): replay(size, 5) for size in CUTS}},
        },
    }


def test_taus_are_means_over_seeds_of_tokens_by_rounds(lines: dict[str, Any]) -> None:
    found = Found(lines).tau("eagle2")
    assert found is not None
    by_hand = [(sum(TOKENS) - ANSWERS) / sum(rounds_of(seed, 3)) for seed in range(3)]
    assert list(found.by_seed.values()) == pytest.approx(by_hand)
    assert found.value == pytest.approx(sum(by_hand) / 3)
    assert found.interval[0] < found.value < found.interval[1]
    assert Found(lines).tau("poss1") is None


def test_ratios_are_paired_by_prompt_and_seed(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("hass", "eagle2")
    assert found is not None
    assert set(found.by_seed) == {0, 2}  # HASS has no seed 1
    sums = {
        name: [sum(rounds_of(seed + offset, more)) for seed in (0, 2)]
        for name, offset, more in (("h", 20, 2), ("e", 0, 3))
    }
    assert list(found.by_seed.values()) == pytest.approx([e / h for h, e in zip(sums["h"], sums["e"], strict=True)])
    assert found.value == pytest.approx(sum(1 / h for h in sums["h"]) / sum(1 / e for e in sums["e"]))
    # The interval against a slow twin that draws its own prompts.
    random, drawn = np.random.default_rng(1), []
    tokens = np.array(TOKENS) - 1
    rounds = {name: [np.array(rounds_of(seed + o, m)) for seed in (0, 2)] for name, o, m in (("h", 20, 2), ("e", 0, 3))}
    for _ in range(4000):
        of = random.integers(0, ANSWERS, ANSWERS)
        h, e = (np.mean([tokens[of].sum() / own[of].sum() for own in rounds[name]]) for name in "he")
        drawn.append(h / e)
    # A tenth of the interval: two bootstraps of thousands of samples differ by less.
    width = found.interval[1] - found.interval[0]
    assert found.interval == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=width / 10)


def test_an_arm_beside_itself_gains_nothing_for_certain(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("hass", "hass")
    assert found is not None and found.value == 1 and found.interval == (1, 1)


def test_open_cells_are_shown_open_and_nothing_is_made_up(lines: dict[str, Any]) -> None:
    found = Found(lines)
    tables = {name: make(found) for name, make in study_report.SECTIONS.items()}

    def row(name: str, *begins: str) -> list[str]:
        hits = [line for line in tables[name] if line.startswith("| " + " | ".join(begins) + " |")]
        assert len(hits) == 1, (name, begins)
        return [cell.strip() for cell in hits[0].strip("|").split("|")]

    assert row("drafters", "PosS-1")[1:] == ["open"] * 4
    hass = row("drafters", "HASS")
    assert hass[1] == "0.87" and hass[3].split(", ")[1] == "-"  # the seed without a line
    assert row("compared", "HASS", "EAGLE-2")[2].endswith("]")
    assert row("compared", "PosS-1", "HASS")[2:] == ["open"] * 3
    assert row("positions-chain", "EAGLE-2")[1:] == [f"{rate} ± 10" for rate in (80, 70, 60, 50, 50, 50)]
    assert row("positions-tree", "EAGLE-2")[7:] == ["open", "open"]  # no round was so deep
    assert row("positions-chain", "EAGLE-3")[1:] == ["open"] * 6
    assert row("steps", "EAGLE-2")[1:] == ["50", *["-"] * 5] and row("steps", "EAGLE-3")[1:] == ["open"] * 6
    first = Found(lines).tau("eagle2", seeds=(0,))
    assert row("data", "EAGLE-2, tree of 60")[4] == study_report.with_interval(first)  # of the seed that all sizes have
    assert row("longer", "600")[1:] == [study_report.with_interval(first), *["open"] * 3]
    assert row("longer", "2,400")[1:] == ["open"] * 4
    assert row("endings", "EAGLE-2")[2] == "open"  # no answer was so long
    assert row("endings", "EAGLE-2")[1] == study_report.with_interval(Found(lines).tau("eagle2"))
    assert row("endings", "EAGLE-3")[1:] == ["open"] * 2
    assert row("data", "EAGLE-3, tree of 60")[1:] == ["open"] * 4
    assert "open" not in row("fr-spec", "the target's answers", "128")
    assert row("fr-spec", "the library's text", "128")[2:] == ["open"] * 2
    assert row("c2t", "EAGLE-2")[1:] == ["open"] * 7
    at_100 = {"eagle2_nodes": 100, "tau": 3.5, "eagle2_candidates": 1000}
    at_8 = {"eagle2_nodes": 8, "tau": 2.5, "eagle2_candidates": 100}
    beyond = {"share": None, "share_interval": None}
    equal = [
        at_100 | {"curve": "c2t, beam 15", "share": 0.8, "share_interval": [0.7, 0.9]},
        at_100 | beyond | {"curve": "c2t, beam all", "beyond": "above", "share_at_end": 2.0},
        at_8 | beyond | {"curve": "c2t, beam 15", "beyond": "below", "share_at_end": 0.97},
        at_8 | {"curve": "c2t, beam all", "share": 0.9, "share_interval": None},
    ]
    points = [
        {"curve": "c2t, beam 15", "tau": tau, "calls_per_round": calls} for tau, calls in ((4.0, 6.0), (3.0, 5.0))
    ]
    found = Found({**lines, "c2t/eagle2": {"at_equal_tau": equal, "points": points}})
    assert study_report.c2t(found)[2] == "| EAGLE-2 | 100 | 3.50 | 1,000 | 0.80 [0.70, 0.90] | not reached | 5.5 | - |"
    assert study_report.c2t(found)[3] == "| EAGLE-2 | 8 | 2.50 | 100 | < 0.97 | 0.90 | - | - |"

    def claimed(line: dict[str, Any]) -> list[str]:
        rows = study_report.claims(Found({**lines, "c2t/eagle2": line}))
        return [row.split(" | ", 2)[2] for row in rows[-2:]]

    judged = {"at_equal_tau": equal, "points": points}
    assert claimed(judged) == ["0.80 [0.70, 0.90] (N = 100) | shows, of the one seed |", "0.90 (N = 8) | not shown |"]
    judged = {"at_equal_tau": equal[1:3], "points": points}
    assert claimed(judged) == ["< 0.97 (N = 8) | shows, of the one seed |", "not reached | not shown |"]
    assert study_report.claims(found)[-3].endswith("] | as much |")  # an interval that holds the paper's
    twice = lines["fr-spec/answers"]["replay"]["512"] | {"rounds_by_answer": [2 * n for n in rounds_of(0, 3)]}
    lines["fr-spec/answers"]["replay"]["512"] = twice
    assert study_report.claims(Found(lines))[-3].endswith("| keeps 50 % [50, 50] | less, of the one seed |")
    assert row("losses", "hybrid")[1:] == ["open"] * 5
    soft = row("losses", "soft CE, steps by 0.8^k (EAGLE-3)")
    assert soft[1:4] == ["open"] * 3 and soft[4:] == [
        "2.75 (2.50 [1.00, 4.00], open, 3.00 [1.00, 4.00])",
        "1.50 (1.00 [1.00, 4.00], open, 2.00 [1.00, 4.00])",
    ]
    assert row("costs", "HASS")[1:] == ["60", "60", *["open"] * 4, "0.5"]
    assert all("open" in cell for cell in row("rates", "EAGLE-2")[2].split("; "))
    assert tables["progress"][0].startswith(f"{len(lines)} of ")


def test_a_claim_shows_only_where_prompts_and_seeds_say_so() -> None:
    def verdict(low: float, high: float, *seeds: float) -> str:
        return study_report.verdict(study_report.Estimate(1.0, (low, high), dict(enumerate(seeds))))

    assert study_report.verdict(None) == "open"
    assert verdict(1.01, 1.05, 1.02, 1.03, 1.04) == "shows"
    assert verdict(1.01, 1.05, 1.01, 1.02, 1.06) == "not clear"  # seeds that lie so far apart
    assert verdict(0.99, 1.05, 1.02, 1.03, 1.04) == "not clear"
    assert verdict(0.9, 0.95, 0.9, 0.91, 0.93) == "the other way round"
    assert verdict(1.01, 1.05, 1.02, 1.03) == "open, 2 of 3 seeds"


def test_what_a_step_keeps_of_the_first_is_compared_seed_by_seed(lines: dict[str, Any]) -> None:
    """Of a drafter that was trained with one step, by a line of its own."""
    assert Found(lines).level("eagle3", "eagle2", 5) is None
    for seed in range(3):
        trained = lines[drafter_name("eagle2", seed=seed)]
        own = [0.5, 0.4, 0.4, 0.3, 0.2 + seed / 100, 0.2]
        lines[unrolled_name("eagle2", seed)] = {**trained, "validation": {"validation_accuracy": own}}
        own = [0.4, 0.4, 0.4, 0.4, 0.36, 0.3]
        lines[drafter_name("eagle3", seed=seed)] = {**trained, "validation": {"validation_accuracy": own}}
    found = Found(lines).level("eagle3", "eagle2", 5)
    assert found is not None
    assert list(found.by_seed.values()) == pytest.approx([0.9 / 0.4, 0.9 / 0.42, 0.9 / 0.44])
    assert "| EAGLE-2 | 50 | 40 | 40 | 30 | 21 | 20 |" in study_report.steps(Found(lines))
    claim = next(line for line in study_report.claims(Found(lines)) if "from step 1 to 5" in line)
    assert claim.endswith("| EAGLE-3 40 to 36 %; EAGLE-2 50 to 21 % | shows |")


def test_the_interval_over_seeds_is_student_s() -> None:
    """Of logarithms 0, 0.1, 0.2: 0.1 +- t * 0.1 / sqrt(3), and t = 4.3027 as in every table."""
    found = study_numbers.over_seeds(study_numbers.Estimate(1.0, (1.0, 1.0), {k: math.exp(k / 10) for k in range(3)}))
    assert found == pytest.approx([math.exp(0.1 + sign * 4.3027 * 0.1 / 3**0.5) for sign in (-1, 1)], rel=1e-4)


def test_growth_and_shares_are_paired_by_prompt(lines: dict[str, Any]) -> None:
    lines |= {drafter_name("eagle3", size): lines[drafter_name("eagle2", 2)] for size in (1, 8)}
    found = Found(lines).growth("eagle3", "eagle2", (1, 8))
    assert found is not None and found.value == pytest.approx(sum(rounds_of(0, 3)) / sum(rounds_of(11, 6)))
    assert Found(lines).growth("eagle3", "eagle2", (1, 4)) is None
    share = Found(lines).share_of("fr-spec/answers", "128", TREE)
    assert share is not None and share.value == pytest.approx(sum(rounds_of(0, 3)) / sum(rounds_of(128, 5)))
    assert share.interval[0] < share.value < share.interval[1]


def test_answers_that_were_cut_off_stand_apart(lines: dict[str, Any]) -> None:
    tokens = lines["answers"]["tokens_by_answer"] = [LONGEST_ANSWER if i % 5 == 0 else n for i, n in enumerate(TOKENS)]
    for cut_off in (True, False):
        own = [i for i, n in enumerate(tokens) if (n == LONGEST_ANSWER) == cut_off]
        found = Found(lines).tau("eagle2", cut_off=cut_off, seeds=(1,))
        assert found is not None
        assert found.value == pytest.approx(sum(tokens[i] - 1 for i in own) / sum(rounds_of(1, 3)[i] for i in own))
    assert load_recipe(HERE / RECIPE).data.generator.max_new_tokens == LONGEST_ANSWER


def test_what_data_gains_is_the_ratio_of_two_sizes(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("eagle2", "eagle2", sizes=(8, 1))
    assert found is not None and set(found.by_seed) == {0}
    assert found.value == pytest.approx(sum(rounds_of(11, 6)) / sum(rounds_of(0, 3)))


def test_a_study_without_a_line_is_all_open() -> None:
    found = Found({})
    for name, make in study_report.SECTIONS.items():
        assert make(found), name
    assert study_report.plots(found) == []


@pytest.mark.parametrize("half, shown", [(0.001, "2.123"), (0.04, "2.12"), (0.3, "2.12"), (0.7, "2.1")])
def test_no_more_digits_than_the_interval_allows(half: float, shown: str) -> None:
    estimate = study_report.Estimate(2.1234, (2.1234 - half, 2.1234 + half), {0: 2.1234})
    assert study_report.with_interval(estimate).split()[0] == shown


def test_lines_along_other_answers_are_refused(lines: dict[str, Any]) -> None:
    lines[drafter_name("hass")]["replay"][TREE]["answers_sha256"] = "other"
    with pytest.raises(UserError, match="were not measured along the same answers"):
        Found(lines)


def test_what_lies_between_markers_is_replaced_and_nothing_else() -> None:
    text = "before\n<!-- study:a -->\nold\n<!-- end -->\nbetween\n<!-- study:b -->\n<!-- end -->\nafter\n"
    filled, missing = study_report.fill(text, {"a": "A", "b": "B", "c": "C"})
    assert filled == text.replace("old", "A").replace("b -->\n", "b -->\nB\n")
    assert missing == ["c"]
    assert study_report.fill(filled, {"a": "A", "b": "B", "c": "C"})[0] == filled


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- study:a -->\nx\n", "study:a has no <!-- end -->"),
        ("<!-- study:a -->\n<!-- study:b -->\n<!-- end -->\n", "study:a has no <!-- end -->"),
        ("<!-- study:z -->\n<!-- end -->\n", "study:z: no such section"),
    ],
)
def test_damaged_markers_are_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study_report.fill(text, {"a": "A", "b": "B"})


def test_plots_of_what_is_there(lines: dict[str, Any], tmp_path: Path) -> None:
    made = {plot.name: plot for plot in study_report.plots(Found(lines))}
    assert set(made) == {"positions", "positions_poss", "data", "fr_spec"}  # C2T and PosS over EAGLE-3 are open
    for plot in made.values():
        study_report.write_png(plot, tmp_path / f"{plot.name}.png")
        assert (tmp_path / f"{plot.name}.png").read_bytes().startswith(b"\x89PNG")
    assert "HASS" in made["positions"].description and "PosS" not in made["positions"].description


def test_the_report_command(
    lines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    results, doc = tmp_path / "results.jsonl", tmp_path / "results.md"
    results.write_text("".join(json.dumps({"cell": name, **line}) + "\n" for name, line in lines.items()))
    parts = "".join(f"<!-- study:{name} -->\n<!-- end -->\n" for name in ("drafters", "plot-data", "plot-c2t_eagle2"))
    doc.write_text(f"# Ours\n{parts}")
    argv = ["study_report.py", "--results", str(results), "--doc", str(doc), "--plots", str(tmp_path / "plots")]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "argv", [*argv, "--results", str(tmp_path / "reslts.jsonl")])
    with pytest.raises(UserError, match=r"--results: .*reslts\.jsonl does not exist"):
        study_report.main()  # and the tables of another study stay as they are
    assert doc.read_text() == f"# Ours\n{parts}"
    monkeypatch.setattr(sys, "argv", argv)
    study_report.main()
    assert "| HASS | 0.87 |" in doc.read_text() and doc.read_text().startswith("# Ours\n")
    assert "](plots/data.png)\n<!-- end -->" in doc.read_text()
    assert "<!-- study:plot-c2t_eagle2 -->\nopen\n" in doc.read_text()  # no picture of what was not measured
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        *("positions.png", "positions_poss.png", "data.png", "fr_spec.png")
    }


def test_the_committed_document_has_a_marker_for_every_section() -> None:
    text = (HERE / "docs" / "results.md").read_text(encoding="utf-8")
    _, missing = study_report.fill(text, dict.fromkeys((*study_report.SECTIONS, *study_report.PLOT_SECTIONS), ""))
    assert not missing


def test_the_committed_lines_can_be_read_and_reported() -> None:
    found = Found(study.read_lines(HERE / study.RESULTS))
    known = {cell.name for cell in cells(found.lines)}
    assert set(found.lines) <= known
    for name, line in found.lines.items():
        for tree in (TREE, CHAIN) if line["kind"] == "drafter" else ():
            own = line["replay"][tree]
            of_answers = found.lines["answers"]["tokens_by_answer"]
            assert len(own["rounds_by_answer"]) == len(of_answers), name
            # tau as eval/acceptance.py gives it, from what the report goes by.
            assert own["tau"] == pytest.approx((sum(of_answers) - len(of_answers)) / own["rounds"], abs=1e-4)
            assert sum(own["rounds_by_answer"]) == own["rounds"]
