"""The processes of a run: what they must have alike, how they fail together, and how they part."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from torch import distributed

from draftsmith.models.checkpoint import differences
from draftsmith.recipes.command.cli import tell
from draftsmith.recipes.errors import UserError

_KEPT: list[object] = []  # groups, to the end of the process


def keep_group() -> None:
    """Keeps the default process group until this process ends, whatever destroys it before. One process: nothing.

    The last reference to a gloo group must be one of Python's. Its destructor waits for the threads that did the work,
    and these need the interpreter's lock to let go of the last collective's tensors. Python's reference gives the lock
    away before it destroys; DistributedDataParallel's does not, and where it is the last, the process hangs now and
    then, after all is done.
    """
    if distributed.is_available() and distributed.is_initialized():
        _KEPT.append(distributed.group.WORLD)


@contextmanager
def failing_together() -> Iterator[None]:
    """A UserError of one process inside is the end of all: the first that has one says it, once, and all exit with 2.

    None is then left waiting for another one, or tells with a traceback that it has lost it. All processes come to the
    end, and meet there; what is inside must not fail before a collective. One process: nothing.
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
            tell(problem.problems)
    gather_object([None])  # a launcher ends all when one of them has ended: it must have spoken by then
    sys.exit(2)


def check_ranks_agree(here: dict[str, Any]) -> None:
    """Every rank reads recipe and data itself, and what one of them cannot read, or reads elsewhere, it has otherwise.

    Args:
        here: what all must have alike.

    Raises:
        UserError, or SystemExit after it was told: they do not.
    """
    by_rank = gather_object([here])
    with failing_together():
        for rank, there in enumerate(by_rank):
            if different := [
                f"{key}: rank 0 has {first!r}, rank {rank} has {other!r}"
                for key, first, other in differences(by_rank[0], there)
            ]:
                raise UserError(
                    f"the processes do not train alike ({'; '.join(different)}); do all of them see the same recipe, "
                    "conversations, eval.prompts and draft vocabulary?"
                )
