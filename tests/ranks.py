"""Starts a training script as one or several processes over gloo, as torchrun does on a user's machine.

A run that hangs is told with the stack of every thread of every process, which a bare timeout would not give.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
LAST_WORDS_SECONDS = 5.0


def run_ranks(processes: int, script: str, arguments: Sequence[str], timeout: float = 300.0) -> str:
    """Runs `script` to its end on CPUs and returns what its processes printed.

    Raises:
        AssertionError: it failed or hung, with its output.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *launch, script, *arguments],
            cwd=ROOT,
            env=os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
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
