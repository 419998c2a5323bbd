"""The processes of a run: how they part."""

from torch import distributed

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
