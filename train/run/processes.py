"""The processes of a run: they must agree on their inputs, fail together, stop together and shut down cleanly."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from torch import distributed

from draftsmith.models.checkpoint import differences
from draftsmith.recipes.command.cli import print_problems
from draftsmith.recipes.errors import UserError

# A scheduler signals all processes of a job, and the launcher among them signals the others again. SIGTERMs that come
# this close together ask for one stop.
SAME_SIGTERM_SECONDS = 5.0
_KEPT: list[object] = []  # process groups, until the process ends


def keep_group() -> None:
    """Keeps the default process group, if there is one, alive until this process ends.

    Python must hold the last reference to a gloo group. The group's destructor waits for its worker threads, which need
    the interpreter's lock to release the last collective's tensors. Python's reference releases the lock before it
    destroys the group; if DistributedDataParallel's is the last, the process sometimes hangs at its end.
    """
    if distributed.is_available() and distributed.is_initialized():
        _KEPT.append(distributed.group.WORLD)


class StopRequest:
    """Notes SIGTERM while it is entered; a run can then finish its step. A second SIGTERM, at another moment, ends
    the process at once."""

    def __init__(self) -> None:
        self.came, self._at = False, 0.0

    def __enter__(self) -> "StopRequest":
        self._default = signal.signal(signal.SIGTERM, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        # The launcher's SIGTERM of the same moment may still come.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.came else self._default or signal.SIG_DFL)

    def note(self, *_: object) -> None:
        now = time.monotonic()
        if not self.came:
            self.came, self._at = True, now
        elif now - self._at > SAME_SIGTERM_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def failing_together() -> Iterator[None]:
    """Makes a UserError of one process end all of them: the first rank with an error prints it, and all exit with 2.

    All processes must reach the end of the block, where they meet: the block may not raise before a collective of its
    own. A single process just raises the error.
    """
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    failed = gather_object([problem is not None])
    if not any(failed):
        return
    if problem is not None:
        if len(failed) == 1:
            raise problem
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        if failed.index(True) == rank:
            print_problems(problem.problems)
    gather_object([None])  # a launcher ends all processes once one has ended: the message must be out by then
    sys.exit(2)


def check_ranks_agree(here: dict[str, Any]) -> None:
    """Ends the run as `failing_together` if ranks, which read recipe and data by themselves, have different values."""
    by_rank = gather_object([here])
    with failing_together():
        for rank, there in enumerate(by_rank):
            if different := [
                f"{key}: rank 0 has {first!r}, rank {rank} has {other!r}"
                for key, first, other in differences(by_rank[0], there)
            ]:
                raise UserError(
                    f"the processes disagree ({'; '.join(different)}); do all of them see the same recipe, "
                    "conversations, eval.prompts and draft vocabulary?"
                )
