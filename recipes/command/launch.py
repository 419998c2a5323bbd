"""The number of processes that a launcher started, this one's rank, and what other processes leave of the cores."""

import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from draftsmith.recipes.errors import UserError

# As torchrun and accelerate name them, and MPI's launchers.
RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
ENDED_BY_LAUNCHER_SECONDS = 10.0  # torchrun ends the other ranks within a second of the first failure
LOOK_SECONDS = 0.2  # at the cores
CROWDED = 0.6  # free cores over threads
# How long OpenMP's threads spin before they sleep, in turns of a loop or (LLVM's and Intel's library) milliseconds. The
# defaults, 300,000 turns or 200 ms, are best for a lone job and ruinous for jobs that share their cores (LOG.md).
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def rank() -> int:
    """This process's number in the launch; 0 if no launcher started it."""
    return next(_numbers(RANK), 0)


def local_rank() -> int:
    """This process's number on its machine."""
    return next(_numbers(LOCAL_RANK), 0)


def world_size() -> int:
    """Processes of the launch, over all machines; 1 if no launcher started this one."""
    return next(_numbers(WORLD_SIZE), 1)


def _numbers(names: Sequence[str]) -> Iterator[int]:
    return (int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal())


def check_alone() -> None:
    """Raises UserError if a launcher started several processes of a script that needs one."""
    if (started := world_size()) > 1:
        with first_one_reports():
            raise UserError(
                f"{_script()} runs as one process, and {started} were started; only `draftsmith train` and `draftsmith "
                "capture` share their work. If it is one process, WORLD_SIZE is left over in the environment: unset it"
            )


def check_joined(started: int, processes: int) -> None:
    """Raises UserError if the launcher started a number of processes other than those of this run."""
    if started != processes:
        with first_one_reports():
            raise UserError(
                f"{started} processes were started (WORLD_SIZE), and this run would have {processes}: use torchrun "
                f"--nproc_per_node {started} {_script()}; if you did, there is no process group for this kind of "
                "device: start one process, or train on the CPU (ACCELERATE_USE_CPU=true)"
            )


def check_all_started() -> None:
    """Raises UserError if `accelerate launch` was asked for several processes and started one.

    It does so with --cpu, or with fewer than two GPUs (accelerate 1.2 to 1.15; not with --multi_gpu, DeepSpeed and
    mpirun), and does not report it, but sets MASTER_ADDR and MASTER_PORT only if it was asked for several.
    """
    by_accelerate = {"ACCELERATE_DYNAMO_MODE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not by_accelerate or any(name in os.environ for name in (*RANK, *WORLD_SIZE)):
        return
    try:  # a variable that the parent has too was not set by accelerate
        inherited = (psutil.Process().parent() or psutil.Process()).environ()
    except psutil.Error:
        return
    if any(inherited.get(name) != os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")):
        raise UserError(
            "accelerate launch was asked for several processes and started one, as with --cpu or fewer than two GPUs. "
            f"Use torchrun --nproc_per_node N {_script()}, or --multi_gpu, on CPUs, too; for one process say "
            "--num_processes 1"
        )


@contextmanager
def first_one_reports() -> Iterator[None]:
    """Lets the first process on each machine report a UserError that all raise.

    The others wait for the launcher to end them: if one exited first, it would end the reporting one.
    """
    try:
        yield
    except UserError:
        if local_rank() > 0:
            time.sleep(ENDED_BY_LAUNCHER_SECONDS)
        raise


def let_waiting_threads_sleep() -> None:
    """Lets OpenMP's threads sleep soon, here and in child processes, if other processes use the cores.

    Not if the user chose how they wait, among the processes of a launch, or once torch has loaded the library.
    """
    chosen = any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING))
    if not (chosen or world_size() > 1 or "torch" in sys.modules) and _crowd(sys.maxsize):
        os.environ.update(WAITING)


@functools.cache  # once a process
def note_crowd(threads: int) -> None:
    """Prints a note if other processes leave too few cores for so many threads."""
    if threads < 2 or world_size() > 1:  # others are ranks of this run
        return
    if cores := _crowd(threads):
        print(
            f"note: other processes use {sum(cores):.1f} of {len(cores)} cores, and this one has {threads} threads: "
            "all become slower, and measured speeds are wrong. Wait for the others, or start each with "
            "OMP_NUM_THREADS=1",
            flush=True,
        )


def _crowd(threads: int) -> list[float]:
    """The use, from 0 to 1, of each core that this process may run on, if that leaves too few for so many threads."""
    used = psutil.cpu_percent(LOOK_SECONDS, percpu=True)
    process: Any = psutil.Process()  # macOS has no affinity
    mine = [each for each in (process.cpu_affinity() if hasattr(process, "cpu_affinity") else []) if each < len(used)]
    cores = [used[each] / 100 for each in mine] or [each / 100 for each in used]
    return cores if len(cores) - sum(cores) < CROWDED * min(threads, len(cores)) else []


def _script() -> str:
    return os.path.relpath(sys.argv[0])
