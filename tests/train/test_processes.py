"""Many processes are one: DistributedDataParallel and ZeRO take the steps that one process takes, save what one process
saves, and part without waiting for each other.

Two real processes over gloo, on CPUs. Sums over two ranks are added in another order than one process adds them, which
after six steps of AdamW shows in the sixth digit of a float32.
"""

import contextlib
import functools
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.vocab import DraftVocab
from tests.ranks import run_ranks
from tests.thinning import a_few
from tests.training_runs import SIX_STEPS, TRAINED_BY, metrics, run_main, write_conversations, write_recipe

# Without keep_group this hangs before the thirtieth time, mostly before the tenth, where two ranks share a core.
PARTING = """
import os, sys
import torch
from torch import distributed
from draftsmith.train.run import processes

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rank = int(os.environ["RANK"])
for time in range(40):
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store{time}", rank=rank, world_size=2)
    processes.keep_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    distributed.barrier()
    distributed.destroy_process_group()
    del model
    processes._KEPT.clear()
print("parted")
"""


@pytest.mark.slow
def test_processes_part_again_and_again(tmp_path: Path) -> None:
    script = tmp_path / "parting.py"
    script.write_text(PARTING)
    assert run_ranks(2, str(script), [str(tmp_path)], timeout=120).count("parted") == 2


# Name: (drafter, train). Together: both heads, several stacks, noise, clipping by norm and by value.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({"kind": "eagle3", "vocab_size": 160, "num_layers": 2}, {}),
    "hass": ({"kind": "eagle"}, {"top_k_loss": 1.0, "clip": "value", "max_grad_norm": 0.01}),
    "poss": (
        {"kind": "poss", "base": "eagle3", "positions_per_specialist": 1, "specialists": 3, "vocab_size": 160},
        {"feature_noise": 0.1},
    ),
}
STEPS = 6
MICRO_BATCHES = 4  # of a step: two ranks accumulate two each
VALIDATED = {"validation_loss", "validation_accuracy", "replay_tau", "replay_accepted_by_position"}


class Place:
    """Recipes, and the runs made with them. Where there is `poison`, conversation c5 alone has this token."""

    def __init__(self, folder: Path, target: Path, poison: int | None = None):
        self.folder, self.target, self.poison = folder, target, poison

    def run(
        self, name: str, label: str, processes: int, *overrides: str, launcher: Sequence[str] | None = None
    ) -> Path:
        """Four micro-batches a step, however many processes there are: one alone runs in this process."""
        drafter, settings = RUNS[name]
        output = self.folder / f"{name}-{label}"
        write_conversations(output / "conversations.jsonl", 23)  # an odd number: the last batch of an epoch is smaller
        if self.poison is not None:
            only_c5_answers_with(self.poison, output / "conversations.jsonl")
        vocab = DraftVocab(torch.arange(0, 320, 320 // drafter.get("vocab_size", 320)), 320)
        vocab.save(output / "draft_vocab.safetensors")
        own = {"batch_size": 2, "eval_replay": 3, "gradient_accumulation_steps": MICRO_BATCHES // processes}
        sections = {"drafter": drafter, "train": SIX_STEPS | own | settings}
        sections["eval"] = {"tree": {"policy": "chain", "nodes": 4}}
        path = write_recipe(output, self.target, output_dir=str(output), **sections)
        if processes == 1 and not any(re.match(r"train\.zero_stage=[123]", each) for each in overrides):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                run_main(TRAINED_BY[drafter["kind"]], path, *overrides)
            self.said = said.getvalue()
        else:
            self.said = run_ranks(processes, f"train/{drafter['kind']}.py", [str(path), *overrides], launcher=launcher)
        return output


def only_c5_answers_with(token: int, path: Path) -> None:
    lines = [json.loads(re.sub(rf"\b{token}\b", "5", line)) for line in path.read_text().splitlines()]
    lines[5]["turns"][-1]["output_token_ids"][1] = token
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    return Place(tmp_path_factory.mktemp("processes"), target_dir)


@pytest.fixture(scope="module")
def of_one(place: Place) -> Callable[[str], Path]:
    """What one process does, without ZeRO."""
    return functools.cache(lambda name: place.run(name, "one", 1))


def check_same(mine: Path, one: Path, steps: int = STEPS) -> None:
    """The same lines of metrics, and a drafter and checkpoints that one process could have written."""
    for here, there in zip(metrics(mine), metrics(one), strict=True):
        assert here.keys() == there.keys()
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
        assert here["accuracy"] == there["accuracy"]
        for key in VALIDATED & there.keys():
            assert here[key] == pytest.approx(there[key], rel=1e-5)
    for file in ("drafter/model.safetensors", f"checkpoints/step-{steps:08d}/model.safetensors"):
        found, wanted = load_file(mine / file), load_file(one / file)
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    a_few(
        [
            *(("poss", 0, False), ("eagle3", 0, False), ("hass", 0, False), ("eagle3", 1, False), ("eagle3", 2, False)),
            *(("eagle3", 3, True), ("hass", 2, True), ("hass", 3, False), ("poss", 3, False)),
        ],
        *(("poss", 0, False), ("eagle3", 3, True), ("hass", 2, True)),
    ),
)
def test_two_ranks_follow_the_trajectory_of_one(
    name: str, stage: int, offload: bool, place: Place, of_one: Callable[[str], Path]
) -> None:
    overrides = [f"train.zero_stage={stage}", f"train.offload_optimizer={str(offload).lower()}"]
    check_same(place.run(name, f"zero{stage}{'-offload' * offload}", 2, *overrides), of_one(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    a_few([((1, 0), (2, 3)), ((2, 3), (1, 0)), ((2, 1), (2, 2)), ((1, 3), (2, 0))], ((1, 0), (2, 3))),
)
def test_a_run_goes_on_under_another_stage_and_other_processes(
    first: tuple[int, int], then: tuple[int, int], place: Place, of_one: Callable[[str], Path]
) -> None:
    """(processes, stage); the number of micro-batches a step is the same."""
    label = f"goes-on-{first}-{then}".replace(" ", "")
    place.run("eagle3", label, first[0], f"train.zero_stage={first[1]}", "train.max_steps=6")
    output = place.folder / f"eagle3-{label}"
    shutil.rmtree(output / "checkpoints/step-00000006")
    shutil.rmtree(output / "drafter")
    place.run("eagle3", label, then[0], f"train.zero_stage={then[1]}")
    assert "resumed from" in place.said
    check_same(output, of_one("eagle3"))
    state = json.loads((output / "checkpoints/step-00000006/trainer_state.json").read_text())
    assert state["identity"]["micro-batches a step"] == MICRO_BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("stage", a_few([0, 3], 0))
def test_an_epoch_that_leaves_a_rank_without_rows_is_that_of_one_process(stage: int, place: Place) -> None:
    """19 conversations are ten micro-batches: the last step has two for rank 0, and none for rank 1."""
    epoch = ["train.max_steps=null", "train.epochs=1"]
    one = place.run("eagle3", "epoch-one", 1, *epoch)
    two = place.run("eagle3", f"epoch-two-{stage}", 2, *epoch, f"train.zero_stage={stage}")
    assert len(metrics(one)) == 3
    check_same(two, one, steps=3)


POISON = 317


@pytest.fixture(scope="module")
def poisoned_place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    """A target that one token drives out of all bounds."""
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(target_dir, folder / "target")
    path = folder / "target/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    return Place(folder, folder / "target", POISON)


@pytest.mark.parametrize(
    ("processes", "stage"),
    a_few([(1, 0), (2, 0), (2, 2), (2, 3)], (1, 0)),
)
def test_a_step_that_is_not_finite_is_skipped_and_its_row_named(
    processes: int, stage: int, poisoned_place: Place
) -> None:
    settings = [f"train.zero_stage={stage}", "train.max_steps=2", "train.eval_replay=0", "train.save_every_steps=1"]
    settings += ["train.seed=1"]  # c5 is read in the second step
    output = poisoned_place.run("eagle3", f"{processes}-{stage}", processes, *settings)
    lines = metrics(output)
    [skipped] = [i for i, line in enumerate(lines) if line["grad_norm"] is None]
    assert [line["skipped_steps"] for line in lines] == [int(i >= skipped) for i in range(2)]
    said = f"step {skipped + 1} skipped: its gradient is not finite (c5: the target's captured states are not finite)"
    assert poisoned_place.said.count(said) == 1
    assert [line.get("loss", math.nan) > 0 for line in lines] == [i != skipped for i in range(2)]
    before, after = (
        load_file(output / f"checkpoints/step-{step:08d}/model.safetensors") for step in (skipped, skipped + 1)
    )
    assert all(torch.equal(before[name], after[name]) for name in after)
