"""The study: its cells and their order, and a runner that loses and repeats nothing.

Cells run a script of the tests in place of training: it writes what the real ones write, and notes that it ran.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from docs.study import cells as study_cells
from docs.study import run as study
from docs.study.cells import (
    ALL_ARMS,
    ARMS,
    C2T_SETTINGS,
    CHAIN,
    LONG,
    LONGER,
    MAIN,
    ON_DEMO,
    RATES,
    SCALED,
    SIZES,
    STEPS,
    TREE,
    Cell,
    Places,
    best_rate,
    c2t_search_name,
    cells,
    commands,
    drafter_name,
    rate_name,
    rates_of,
    sampled_name,
    setting_name,
)
from draftsmith.eval import c2t_sweep
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.stdlib import stdlib_conversations
from tests.study_cases import HERE, PLACES


def searched(best: float = 4e-3) -> dict[str, Any]:
    """Lines of all searches: of learning rates, the best in the middle, and of C2T's settings, the first the best."""
    tried = {setting_name(setting): {"validation_loss": 1.0 + i} for i, setting in enumerate(C2T_SETTINGS)}
    return {c2t_search_name("eagle2"): {"validation": tried}} | {
        rate_name(arm.family, rate, steps): {"validation": {"replay_tau": 2.0 + (rate == best)}}
        for arm in ARMS.values()
        for rate in RATES
        for steps in (STEPS, LONGER[0])
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
    families, longer = {arm.family for arm in ARMS.values()}, {ARMS[arm].family for arm in LONG}
    assert len(rates) == len(RATES) * (len(families) + len(longer))


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
    seen, by_name = set(), {cell.name: cell for cell in cells(searched())}
    for cell in by_name.values():
        for script, recipe, *rest in commands(cell, PLACES, searched()):
            assert (HERE / script).exists()
            own = rest[: next((i for i, part in enumerate(rest) if part.startswith("--")), len(rest))]
            loaded = load_recipe(recipe, [part for part in own if part != f"data.prompts={PLACES.more_prompts}"])
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
                rate = ON_DEMO[cell.arm] if cell.kind == "demo" else cell.rate or 4e-3
                assert cell.kind in ("timing", "unrolled") or loaded.train.learning_rate == rate
                assert loaded.drafter.vocab_size is None
                makers = [by_name[name] for name in cell.needs if by_name[name].kind in ("states", "demo-answers")]
                stores = [str(path.parent) for maker in makers for path in PLACES.made_by(maker)]
                assert (cell.steps != STEPS) == bool(stores) == (loaded.data.states is not None), cell.name
                assert not stores or loaded.data.states in stores
    assert seen == set(study_cells._MAKERS)


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
    assert {loaded[arm].train.ttt_steps for arm in ARMS if arm not in ("eagle2", "hass2-no-top10", "hass3")} == {6}
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
elif kind == "more-answers":
    write(folder / "conversations.jsonl", "\\n".join(json.dumps({"id": f"m{i}"}) for i in range(1300)))
elif kind == "c2t-search":
    for each in ("10-0.001", "30-0.001", "30-0.01", "100-0.01"):
        write(folder / f"c2t-{each}" / "model.safetensors", "x")
        lines = [{"recall": 0.5, "positive_rate": rate, "validation_loss": rate} for rate in (0.2, 0.1)]
        write(folder / f"c2t-{each}" / "metrics.jsonl", "\\n".join(map(json.dumps, lines)))
elif kind == "answers":
    lines = [json.dumps({"id": f"a{i}", "turns": [{"output_token_ids": [1] * 11}]}) for i in range(30)]
    write(out / "heldout" / "conversations.jsonl", "\\n".join(lines) + "\\n")
elif kind == "demo-answers":
    lines = [json.dumps({"id": f"a{i}", "turns": [{"output_token_ids": [1] * 11}]}) for i in range(30)]
    write(folder / "heldout" / "conversations.jsonl", "\\n".join(lines) + "\\n")
    for file in ("draft_vocab.safetensors", "states1/manifest.json", "states3/manifest.json"):
        write(folder / file, "x")
elif kind == "states":
    for store in ("states1", "states3"):
        write(folder / store / "manifest.json", json.dumps({"rows": 30, "tokens": 900}))
elif kind in ("rate", "drafter", "unrolled", "demo"):
    middle = "0.004" in name
    write(folder / "metrics.jsonl", json.dumps({"validation_loss": 1.0, "replay_tau": 2.0 + middle}) + "\\n")
    if not (folder / "checkpoints").exists():
        write(folder / "checkpoints" / "by", name)
if kind in ("drafter", "demo"):
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
if kind == "demo-speed":
    row = {"tau": 2.5, "tau_interval": [2, 3], "tokens_per_second": 9.0, "speedup": 1.5, "speedup_interval": [1, 2],
           "matches_target": True}
    write(folder / "eval" / "acceptance.json", json.dumps({"contenders": {"EAGLE-2, chain of 4": row}}))
if kind in ("drafter", "fr-spec", "demo"):
    keys = ["tau", "tau_interval", "rounds", "new_tokens", "accepted_per_round", "tree_nodes_per_round",
            "draft_calls_per_round", "acceptance_by_position", "acceptance_by_position_interval", "tree"]
    names = ["long name", "chain of 6"] if kind != "fr-spec" else ["long name", "128", "256", "512", "768"]
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
    lines = [json.dumps({"tokens_per_second": rate}) + "\\n" for rate in (900, 1500)]
    for trained in (folder / "trained").iterdir():
        write(trained / "metrics.jsonl", "".join(lines))
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
        if cell.kind in ("drafter", "demo"):
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


@pytest.mark.slow
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
    assert lines["timing"]["training_tokens_per_second"]["eagle3.1"] == [1500]  # not the line with the start


@pytest.mark.slow
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


def test_what_hangs_on_a_drafter_of_other_weights_is_outdated(place: Path) -> None:
    name = drafter_name("poss2-further")
    run([name])
    lines = read()
    assert lines[name]["drafters"] == {drafter_name("eagle3"): lines[drafter_name("eagle3")]["weights"]}
    assert study_cells.outdated(lines) == set()
    lines[drafter_name("eagle3")]["weights"] = "others"
    assert study_cells.outdated(lines) == {name}


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


def test_more_conversations_begin_with_all_of_the_recipe_and_ask_nothing_twice(place: Path) -> None:
    asked = [conversation["id"] for conversation in islice(stdlib_conversations("train"), 100)]
    whole = "".join(json.dumps({"id": id_}) + "\n" for id_ in asked)
    (place / "demo" / "conversations.jsonl").write_text(whole)
    study.write_more_prompts(PLACES)
    lines = (place / PLACES.more_prompts).read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    ids = [prompt["id"] for prompt in prompts]
    assert len(ids) == len(set(ids)) == (100 - 48) * 3 and not set(ids) & set(asked)
    assert all([message["role"] for message in prompt["messages"]] == ["user"] for prompt in prompts)
    (place / PLACES.more_answers).write_text("".join(line + "\n" for line in lines))
    study.write_shares(place / "demo" / "conversations.jsonl", PLACES)
    for size, times in ((16, 2), (32, 4)):
        study.write_more(size, PLACES)
        written = [json.loads(line)["id"] for line in (place / PLACES.conversations(size)).read_text().splitlines()]
        assert written == asked + ids[: len(written) - 100] and len(written) - 48 == times * (100 - 48)
        kept = sorted(written, key=study.validation_rank)[:48]
        assert kept == sorted(asked, key=study.validation_rank)[:48]


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
    done = len(read())
    assert f"{done} of {len(every)} cells done; {len(every) - done} to do" in out
    assert "rate/eagle2" not in out and "drafter/eagle2/x8/seed0" in out and "other commands" not in out


def test_a_drafter_whose_rate_has_no_line_counts_as_not_made(place: Path) -> None:
    """Or the study would end with a traceback when somebody has deleted the line of a rate."""
    run(["rate/eagle2/*", "drafter/eagle2/x8/seed0"])
    lines = read()
    cell = next(cell for cell in cells(lines) if cell.name == "drafter/eagle2/x8/seed0")
    assert study.is_made(cell, PLACES, lines)
    del lines[rate_name("eagle2", 2e-3)]
    assert not study.is_made(cell, PLACES, lines)


def test_files_that_are_still_being_written_do_not_count(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest of stored states is there from the first shard on, and the answers' file from the first answer."""
    cell = next(cell for cell in cells(read()) if cell.name == "states/x16")
    command = study.Study._command
    seen: dict[bool, bool] = {}  # whether the files count, by whether they are there

    def watched(self: study.Study, *arguments: Any) -> float:
        took = command(self, *arguments)
        there = all((place / path).exists() for path in PLACES.made_by(cell))
        seen[there] = study.is_made(cell, PLACES, {})
        return took

    monkeypatch.setattr(study.Study, "_command", watched)
    run([cell.name])
    assert seen == {False: False, True: False}
    assert study.is_made(cell, PLACES, {})


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


@pytest.mark.parametrize("only, needed", [("demo/*", False), ("drafter/eagle2/x8/seed0", True)])
def test_only_cells_of_the_study_s_target_need_its_answers(
    place: Path, monkeypatch: pytest.MonkeyPatch, only: str, needed: bool
) -> None:
    started: list[int] = []
    monkeypatch.setattr(study.Study, "run", lambda self, jobs: started.append(jobs))
    monkeypatch.setattr(sys, "argv", ["study.py", "--demo", str(place / "nowhere"), "--only", only])
    if needed:
        with pytest.raises(UserError, match=r"--demo: .*nowhere.*does not exist; `draftsmith regenerate"):
            study.main()
    else:
        study.main()
    assert started == [1] * (not needed)
