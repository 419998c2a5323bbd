"""Kills scripts, as processes of their own, and sends signals to this one.

`tests.crash_states` enumerates what a kill could leave; this is for what only processes show, and takes seconds to
import torch for each of them.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.ranks import LAST_WORDS_SECONDS, ON_CPUS, ROOT, free_port, words_of_launcher

POLL_SECONDS = 0.002
NOTICED_SECONDS = 0.1  # after a rank failed the launcher ends the others; torchrun looks as often
PATIENCE_SECONDS = 2.0  # of the launcher with a rank that got SIGTERM; torchrun's is 30


class Ending(NamedTuple):
    """How a run ended."""

    statuses: list[int]  # exit codes by rank; -n: signal n ended it
    output: str  # stdout and stderr of all

    @property
    def status(self) -> int:
        """Of the first rank that failed; 0: none has."""
        return next((status for status in self.statuses if status), 0)


def run_script(
    script: str,
    argv: Sequence[str],
    *,
    ranks: int = 1,
    more: Mapping[int, Sequence[str]] | None = None,
    rank: int | None = None,
    kill_when: Callable[[], bool] | None = None,
    kill_after: float = 0.0,
    kill_with: signal.Signals = signal.SIGKILL,
    timeout: float = 300.0,
) -> Ending:
    """Runs a script of this tree. If one rank fails, the others are ended as torchrun does it: SIGTERM, then SIGKILL.

    Args:
        ranks: processes; of several each is told its rank as torchrun tells it.
        more: by rank, arguments that it alone is given, behind `argv`.
        rank: which one of them is killed; None: all.
        kill_when: asked all the time; `kill_after` seconds after it is first true, `kill_with` is sent.
        timeout: seconds after which AssertionError is raised with the output, in which the stacks of all threads stand.
    """
    port = free_port() if ranks > 1 else 0
    now = time.monotonic()
    kill_at, terminate_at, give_up_at, timeout_at = math.inf, math.inf, math.inf, now + timeout
    with tempfile.TemporaryFile("ab+") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / script), *argv, *(more or {}).get(each, ())],
                cwd=ROOT,
                env=os.environ | ON_CPUS | (words_of_launcher(each, ranks, port) if ranks > 1 else {}),
                stdout=log,
                stderr=log,
            )
            for each in range(ranks)
        ]

        def send(number: int) -> None:
            for process in processes:
                process.send_signal(number)  # to none that has ended

        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if kill_when is not None and kill_when():
                kill_at, kill_when = now + kill_after, None
            if now >= kill_at:
                kill_at = math.inf
                send(kill_with) if rank is None else processes[rank].send_signal(kill_with)
            if terminate_at == math.inf and any(process.poll() for process in processes):
                terminate_at, give_up_at = now + NOTICED_SECONDS, now + NOTICED_SECONDS + PATIENCE_SECONDS
            if now >= terminate_at > 0:
                terminate_at = 0.0
                send(signal.SIGTERM)
            if now >= give_up_at or now >= timeout_at + LAST_WORDS_SECONDS:
                send(signal.SIGKILL)
            elif now >= timeout_at:
                send(signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(POLL_SECONDS)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert now < timeout_at, f"{script} still ran after {timeout} s:\n{output}"
    return Ending([process.returncode for process in processes], output)


@contextmanager
def signalled_when(ready: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Sends a signal to this process, once, as soon as `ready` says so."""

    def send() -> None:
        while not ready():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # unless the run has a handler of its own
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
        sender.join(60)
    finally:
        signal.signal(number, before)
