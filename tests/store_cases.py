"""A recipe whose rows fill several shards, and its captures: what tests of the hidden-state store share."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data_gen import capture as script
from draftsmith.data_gen.states.store import StoreManifest
from draftsmith.data_gen.training_rows.rows import TrainingRow, usable_rows
from draftsmith.models.drafters import states_read
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train import eagle3
from tests.crash_states import state_of
from tests.training_runs import run_main, to_train, write_recipe

CONVERSATIONS = 40
SMALL_SHARDS = ["data.capture.shard_megabytes=0.1"]  # so that few rows fill several
SHARDS = 6  # that the rows of these fill

# What the recipe's drafter is, by the script that trains it.
KINDS: dict[str, list[str]] = {
    "eagle3": [],
    "eagle": ["drafter={kind: eagle}", "train.ttt_steps=3", "train.top_k_loss=1.0"],  # HASS
    "poss": ["drafter={kind: poss, positions_per_specialist: 1, specialists: 3}", "train.ttt_steps=4"],
    "poss over eagle3": [
        "drafter={kind: poss, base: eagle3, vocab_size: 160, positions_per_specialist: 2, specialists: 2}",
        "train.ttt_steps=4",
    ],
}


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A recipe with its conversations and draft vocabulary; the store's rows fill several shards."""
    folder = tmp_path_factory.mktemp("store")
    to_train(folder / "run", CONVERSATIONS)
    capture = {"dtype": "float32", "shard_megabytes": 0.1, "batch_tokens": 100}
    return write_recipe(folder, target_dir, data={"capture": capture})


@pytest.fixture(scope="module")
def stores(recipe_path: Path) -> Callable[[str], Path]:
    """What capture writes in float32 for the recipe with a drafter of this kind."""

    @functools.cache
    def captured(kind: str) -> Path:
        directory = recipe_path.parent / f"states of {kind}"
        capture(recipe_path, *KINDS[kind], f"data.states={directory}")
        return directory

    return captured


@pytest.fixture(scope="module")
def store(stores: Callable[[str], Path]) -> Path:
    return stores("eagle3")


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """A store to damage."""
    shutil.copytree(store, tmp_path / "copy")
    return tmp_path / "copy"


def capture(recipe_path: Path, *arguments: str) -> None:
    run_main(script, recipe_path, *arguments)


def rows_of(recipe: Recipe) -> list[TrainingRow]:
    return usable_rows(recipe, TargetFiles(recipe.target), Rejects())


def target_of(recipe: Recipe) -> Target:
    model = TargetFiles(recipe.target).load_model()
    return Target(model, states_read(recipe.drafter, model.config.num_hidden_layers))


def refusals(recipe_path: Path, *arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        run_main(eagle3, recipe_path, *arguments)
    return "\n".join(raised.value.problems)


def assert_same_store(mine: Path, captured: Path) -> None:
    """The same files; states equal to the rounding of products in batches of other shapes."""
    ours, theirs = StoreManifest.read(mine), StoreManifest.read(captured)
    assert ours is not None and theirs is not None and ours.complete
    assert list(ours.made_of.items()) == list(theirs.made_of.items()) and ours.files == theirs.files
    assert state_of(mine).keys() == state_of(captured).keys()
    for number, shard in ours.shards.items():
        assert shard | {"sha256": ""} == theirs.shards[number] | {"sha256": ""}
        own, its = load_file(mine / shard["file"]), load_file(captured / shard["file"])
        assert own.keys() == its.keys()
        for name in own:
            if not own[name].is_floating_point():  # starts, last_starts, key
                assert torch.equal(own[name], its[name])
            elif own[name].dtype in (torch.float32, torch.bfloat16):
                rounding = 1e-5 if own[name].dtype == torch.float32 else 1e-2
                largest = its[name].abs().max().item()
                torch.testing.assert_close(own[name], its[name], rtol=rounding, atol=rounding * largest)
            else:  # fp8: a step where the states lie between two
                torch.testing.assert_close(own[name].float(), its[name].float(), rtol=2**-3, atol=2**-8)
