"""Starts a training script as one or several processes over gloo, as torchrun does on a user's machine.

A run that hangs is told with the stack of every thread of every process, which a bare timeout would not give.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
LAST_WORDS_SECONDS = 5.0
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}
# Below those that Linux, macOS and Windows give to clients: none of them takes the port before rank 0 listens there.
FREE_PORTS = range(20_000, 32_000)


def run_ranks(
    processes: int, script: str, arguments: Sequence[str], timeout: float = 300.0, launcher: Sequence[str] = ()
) -> str:
    """Runs `script` to its end on CPUs and returns what its processes printed. `launcher`: in the place of torchrun, as
    arguments of Python; it knows how many processes there are. Raises AssertionError with the output if it failed or
    hung."""
    launch = launcher or ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with tempfile.TemporaryFile() as output:
        words, env = [sys.executable, *launch, script, *arguments], os.environ | ON_CPUS
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        status: int | None = None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in reversed(everyone):  # ranks before their launcher, which would end them
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                    each.wait(LAST_WORDS_SECONDS)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    assert status is not None, f"no end after {timeout:.0f} s; every process's stacks:\n{said}"
    assert status == 0, said
    return said


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def words_of_launcher(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment in which torchrun starts one of so many ranks of this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
