"""A target that the processes share out trains as a whole one does, under every way of sharing the drafter."""

import shutil
from pathlib import Path

import pytest

from tests.test_processes import RUNS, Place, check_same

SHARDED = "train.shard_target=true"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    return Place(tmp_path_factory.mktemp("sharded"), target_dir)


@pytest.fixture(scope="module")
def of_one(place: Place) -> dict[str, Path]:
    """What one process does with the whole target."""
    return {name: place.run(name, "one", 1) for name in ("eagle3", "hass")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [*(("eagle3", stage) for stage in range(4)), ("hass", 0)],
)
def test_two_ranks_follow_the_trajectory_of_one(
    name: str, stage: int, place: Place, of_one: dict[str, Path]
) -> None:
    output = place.run(name, f"zero{stage}", 2, SHARDED, f"train.zero_stage={stage}")
    check_same(output, of_one[name])
