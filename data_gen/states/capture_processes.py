"""The processes of a capture: who leads, what each takes next, and what the leader hears of it.

    torchrun --nproc_per_node 8 data_gen/capture.py my.yaml     says by RANK, LOCAL_RANK and WORLD_SIZE who is who

    rank 0     looks at what is there, and tells which shards are missing
    all        take the next one that nobody has taken, write it, and tell
    rank 0     names it in the manifest, which nobody else writes, and shows how far all of them are

They share a few words, in the key-value store where the launcher has them meet (MASTER_ADDR, MASTER_PORT). There is no
process group and no collective: nobody waits for anybody but for rank 0's first words, and rank 0 at the end for what
the others still write. A launcher ends all processes when one of them fails; where it does not, they find out here.
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

from draftsmith.recipes.command.cli import tell
from draftsmith.recipes.errors import UserError

POLL_SECONDS = 0.1
FAILED = "failed"

T = TypeVar("T")


class Team:
    """This process among those of its run.

    Args:
        local_rank: its number among those of its machine.
        words: what all of them share; None: this one is alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, words: Store | None = None):
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.words = HashStore() if words is None else words

    @classmethod
    def of_environment(cls) -> "Team":
        """The processes that a launcher started, or this one.

        Raises:
            UserError: they cannot meet.
        """
        rank, size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        if size == 1:
            return cls()
        try:
            words, _, _ = next(rendezvous("env://"))
        except (ValueError, DistError) as error:
            raise UserError(
                f"rank {rank} of {size} does not find the others ({str(error).splitlines()[0]}); start them with "
                "torchrun or accelerate launch"
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what an earlier one told does not count
        return cls(rank, size, local_rank, PrefixStore(f"capture/{attempt}", words))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def take_device(self, wanted: str) -> str | None:
        """Where this process's target goes; None: where target.device says.

        Args:
            wanted: target.device. Of a kind of which there are several, each process of a machine takes its own.

        Raises:
            UserError: fewer devices than processes on this machine.
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

    # What they tell each other.

    def tell(self, key: str, words: Any) -> None:
        self._asked(lambda: self.words.set(key, json.dumps(words)))

    def is_told(self, key: str) -> bool:
        return self._asked(lambda: self.words.check([key]))

    def told(self, key: str) -> Any:
        """What was or will be told under `key`."""
        self.wait(lambda: self.is_told(key))
        return json.loads(self._asked(lambda: self.words.get(key)))

    def count(self, name: str, more: int = 0) -> int:
        """A sum over all processes, with what this one adds."""
        return self._asked(lambda: self.words.add(name, more))

    def wait(self, until: Callable[[], bool]) -> None:
        """Ends this process where another one has failed, which has said why."""
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
            sys.exit(2)  # rank 0, or the launcher, has ended and taken the words with it

    @contextmanager
    def speaking_once(self) -> Iterator[None]:
        """Of several processes that fail, the first one says why. No other ends before it has: a launcher would then
        end them all."""
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            if self.count("speakers", 1) > 1:
                self.wait(lambda: False)
            tell(error.problems)
            self.count(FAILED, 1)
            sys.exit(2)
        except Exception:
            self.count(FAILED, 1)
            raise
