"""Kills scripts, as processes of their own, and sends signals to this one.

`tests.crash_states` enumerates what a kill could leave; this is for what only processes show, and takes seconds to
import torch for each of them.
"""

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
    failed, end = False, time.monotonic() + timeout
    with tempfile.TemporaryFile("ab+") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / script), *argv, *(more or {}).get(each, ())],
                cwd=ROOT,
                env=os.environ | ON_CPUS | (words_of_launcher(each, ranks, port) if ranks > 1 else {}),
                stdout=log,
                stderr=log,
                # Jobs that a shell runs in the background ignore Ctrl-C, and so would their children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            for each in range(ranks)
        ]
        # When which signal goes to whom; after SIGABRT faulthandler prints the stacks.
        due = [(end, signal.SIGABRT, processes), (end + LAST_WORDS_SECONDS, signal.SIGKILL, processes)]
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if kill_when is not None and kill_when():
                due.append((now + kill_after, kill_with, processes if rank is None else [processes[rank]]))
                kill_when = None
            if not failed and any(process.poll() for process in processes):
                failed, noticed = True, now + NOTICED_SECONDS
                due += [(noticed, signal.SIGTERM, processes), (noticed + PATIENCE_SECONDS, signal.SIGKILL, processes)]
            for at, number, whom in due:
                for process in whom if at <= now else ():
                    process.send_signal(number)  # to none that has ended
            due = [each for each in due if each[0] > now]
            time.sleep(POLL_SECONDS)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert time.monotonic() < end, f"{script} still ran after {timeout} s:\n{output}"
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
