"""The processes of a capture and the values that they share.

    rank 0     publishes the numbers of the missing shards
    all        take the next free shard, write it, and publish its manifest entry
    rank 0     enters it in the manifest, which no other rank writes, and shows the progress of all

Values are shared in the launcher's key-value store (MASTER_ADDR, MASTER_PORT), without a process group. The other ranks
wait once, for rank 0's list, and rank 0 waits at the end for the last shards. Most launchers end all processes when one
fails; with other launchers, `Team.wait` ends them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from draftsmith.recipes.command.cli import print_problems
from draftsmith.recipes.errors import UserError, first_line

POLL_SECONDS = 0.1
FAILED = "failed"

T = TypeVar("T")


class Team:
    """This process among those of its run.

    Args:
        local_rank: its number on its machine.
        shared: the store of all processes; None: there is only one process.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, shared: Store | None = None):
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.shared = HashStore() if shared is None else shared

    @classmethod
    def of_environment(cls) -> "Team":
        """The processes that a launcher started, or this one. Raises UserError if they cannot connect."""
        rank, size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        if size == 1:
            return cls()
        try:
            shared, _, _ = next(rendezvous("env://"))
        except (ValueError, DistError) as error:
            raise UserError(
                f"rank {rank} of {size} does not find the others ({first_line(error)}); start them with "
                "torchrun or accelerate launch"
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # hides the values of earlier attempts
        return cls(rank, size, local_rank, PrefixStore(f"capture/{attempt}", shared))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def take_device(self, wanted: str) -> str | None:
        """The device of this process's target, or None if `wanted`, which is target.device, decides.

        Raises UserError if this machine has fewer devices than processes.
        """
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        given = torch.device((accelerator or "cpu") if wanted == "auto" else wanted)
        if self.size == 1 or given.type == "cpu" or given.index is not None:
            return None
        count = torch.get_device_module(given).device_count()
        if self.local_rank >= count:
            raise UserError(
                f"target.device: {wanted}: each process takes a device of its own, and the machine of rank {self.rank} "
                f"has {count} of kind {given.type} for {self.local_rank + 1} processes or more; start {count} there"
            )
        torch.get_device_module(given).set_device(self.local_rank)
        return f"{given.type}:{self.local_rank}"

    # Shared values.

    def publish(self, key: str, value: Any) -> None:
        self._asked(lambda: self.shared.set(key, json.dumps(value)))

    def is_published(self, key: str) -> bool:
        return self._asked(lambda: self.shared.check([key]))

    def receive(self, key: str) -> Any:
        """Waits for the value of `key` and returns it."""
        self.wait(lambda: self.is_published(key))
        return json.loads(self._asked(lambda: self.shared.get(key)))

    def count(self, name: str, more: int = 0) -> int:
        """Adds `more` to a sum over all processes and returns the sum."""
        return self._asked(lambda: self.shared.add(name, more))

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until `until()` is True. Exits with 2 if another process has failed and reported its error."""
        while not until():
            if self.count(FAILED):
                sys.exit(2)
            time.sleep(POLL_SECONDS)

    def _asked(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except DistError:
            if self.leads:
                raise
            sys.exit(2)  # rank 0 or the launcher has ended, and the store with it

    @contextmanager
    def reporting_once(self) -> Iterator[None]:
        """Lets only the first failing process print its error. The others wait for it, because a launcher ends all
        processes when one exits."""
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            if self.count("speakers", 1) > 1:
                self.wait(lambda: False)
            print_problems(error.problems)
            self.count(FAILED, 1)
            sys.exit(2)
        except Exception:
            self.count(FAILED, 1)
            raise
