"""Kills scripts at random or chosen moments, hundreds of times, without importing torch hundreds of times.

    with CrashLab(["draftsmith.data_gen.regenerate"]) as lab:
        argv = [str(recipe), "output_dir=..."]
        ending = lab.run("draftsmith.data_gen.regenerate", argv, kill_after=0.3)       # seconds; None lets it end
        ending = lab.run("draftsmith.data_gen.regenerate", argv, fault=Fault("write", 5))
        assert ending.status in (0, -signal.SIGKILL), ending.output

One server process imports everything heavy, calls nothing of it, and forks a child for every run: milliseconds instead
of seconds. The child does what `python script.py argv` does, `recipes.cli.run(module.main)`, alone in its process
group, with its output in a file. It leaves by `os._exit`: what is registered with `atexit` does not run.

A kill by the clock lands where the time goes. A `Fault` lands where it hurts: the child kills itself at the n-th write
(in the middle of it), rename, fsync, ... that Python code makes. What C++ and Rust write (torch.save, safetensors) only
the clock reaches.
"""

import builtins
import importlib
import io
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parent.parent
CAN_FORK = hasattr(os, "fork") and hasattr(os, "waitid")  # for `pytest.mark.skipif`
POLL_SECONDS = 0.001  # between two looks at `kill_when`
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Audit events of Python's os module, by the names that a Fault uses. They come before the deed. "open" is for writing.
AUDITED = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.mkdir": "mkdir", "open": "open"}


class Fault(NamedTuple):
    """The child dies at the `number`-th (from 1) `event`: open, write, truncate, fsync, rename, remove, rmdir, mkdir.

    It dies before the deed; a write has done `share` of its bytes by then.
    """

    event: str
    number: int
    share: float = 0.5

    @classmethod
    def drawn(cls, chance: random.Random, events: Counter[str]) -> "Fault":
        """Rare kinds of events more often than they happen, and early ones: a resumed run has fewer of them.

        Args:
            events: `Ending.events` of a whole run.
        """
        kinds = sorted(events)
        (event,) = chance.choices(kinds, [math.sqrt(events[kind]) for kind in kinds])
        return cls(event, 1 + int(events[event] * chance.random() ** 2), chance.random())


class Ending(NamedTuple):
    """How a run ended."""

    status: int  # its exit code; -n: signal n ended it
    output: str  # stdout and stderr
    seconds: float
    events: Counter[str]  # of a run that ended by itself with `count_events`


class CrashLab:
    """A server that has imported `modules` and runs their `main`s; to be used in a `with` statement, from one thread.

    Modules that the children would else import one by one belong into `modules` too (a model's own of transformers).

    Raises:
        RuntimeError: the server cannot import a module, or importing one starts threads, which a fork would lose.
    """

    def __init__(self, modules: Sequence[str]):
        self._modules = list(modules)

    def __enter__(self) -> "CrashLab":
        if not CAN_FORK:
            raise RuntimeError("this platform cannot fork; skip these tests where not crash.CAN_FORK")
        self._folder = tempfile.TemporaryDirectory(prefix="crash-lab-")
        ours, theirs = socket.socketpair()
        self._server_log = Path(self._folder.name) / "server"
        with theirs, self._server_log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.crash", str(theirs.fileno()), *self._modules],
                cwd=ROOT,
                env=os.environ | ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests
            )
        self.server_pid = self._server.pid
        self._connection = Connection(ours.detach())
        try:
            self._receive(120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # the server ends by that
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()

    def run(
        self,
        module: str,
        argv: Sequence[str],
        *,
        kill_after: float | None = None,
        kill_when: Callable[[], bool] | None = None,
        fault: Fault | None = None,
        kill_with: signal.Signals = signal.SIGKILL,
        count_events: bool = False,
        file_limit: int | None = None,
        timeout: float = 120,
    ) -> Ending:
        """Runs `module.main()` with `sys.argv[1:] = argv` and returns how it ended.

        Args:
            kill_after: seconds from the start after which `kill_with` is sent to the process group.
            kill_when: asked all the time; when true, `kill_with` is sent.
            file_limit: bytes above which no file can grow: the writer sees an OSError, as on a full disk.
            timeout: seconds after which the run is killed and AssertionError raised, with its output.
        """
        log = Path(self._folder.name) / "output"
        request = {"module": module, "argv": list(argv), "log": str(log), "fault": fault, "file_limit": file_limit}
        started = time.monotonic()
        self._connection.send(request | {"count_events": count_events})
        pid = self._receive(30)
        try:
            self._kill_in_time(pid, started, kill_after, kill_when, kill_with)
            if not self._connection.poll(max(0.0, started + timeout - time.monotonic())):
                raise AssertionError(f"{module} still ran after {timeout} s:\n{log.read_text(errors='replace')}")
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            raise
        finally:
            # The server keeps the ended child as a zombie until we answer: its id is nobody else's so long.
            status = self._receive(30)
            self._connection.send("seen")
            events: Counter[str] = self._receive(30)
        return Ending(status, log.read_text(errors="replace"), time.monotonic() - started, events)

    def _kill_in_time(
        self,
        pid: int,
        started: float,
        kill_after: float | None,
        kill_when: Callable[[], bool] | None,
        kill_with: signal.Signals,
    ) -> None:
        if kill_after is not None and not self._connection.poll(max(0.0, started + kill_after - time.monotonic())):
            os.killpg(pid, kill_with)
        while kill_when is not None and not self._connection.poll(POLL_SECONDS):
            if kill_when():
                os.killpg(pid, kill_with)
                return

    def _receive(self, seconds: float) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
            problem = f"did not answer within {seconds} s"
        except (EOFError, ConnectionError):
            problem = "ended"
        raise RuntimeError(f"the crash lab's server {problem}:\n{self._server_log.read_text(errors='replace')[-2000:]}")


# The server.


def serve(connection: Connection, modules: Sequence[str]) -> None:
    """Forks a child for every request; ends when the other side of the connection is closed."""
    for name in modules:
        importlib.import_module(name)
    tasks = Path("/proc/self/task")
    if tasks.exists() and (threads := len(list(tasks.iterdir()))) > 1:
        raise RuntimeError(f"importing {', '.join(modules)} has started {threads - 1} threads: forking would lose them")
    sys.stdout.flush()  # else every child writes it again
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        events, childs_events = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be_the_child(request, childs_events)
        os.close(childs_events)
        os.setpgid(pid, pid)  # the child does the same: whoever comes first
        connection.send(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        connection.send(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        try:
            connection.recv()
        finally:
            os.waitpid(pid, 0)
        with open(events, "rb") as pipe:
            connection.send(Counter(json.loads(pipe.read() or "{}")))


def _be_the_child(request: dict[str, Any], events_pipe: int) -> NoReturn:
    """Runs the script's main as a process of its own would; never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        for name in (signal.SIGINT, signal.SIGTERM):  # whatever the tests were started with
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        if request["file_limit"] is not None:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], hard))
        sys.argv = [request["module"].rpartition(".")[2] + ".py", *request["argv"]]
        main = importlib.import_module(request["module"]).main
        events = _watch(request["fault"]) if request["fault"] or request["count_events"] else Counter()
        from draftsmith.recipes import cli

        cli.run(main)
        os.write(events_pipe, json.dumps(events).encode())
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# Faults, in the child.


def _watch(fault: Fault | None) -> Counter[str]:
    """Counts events from now on and kills this process at the fault; returns the counts, which go on."""
    events: Counter[str] = Counter()

    def happens(event: str) -> bool:
        events[event] += 1
        return fault is not None and (event, events[event]) == fault[:2]

    def audit(name: str, details: tuple[Any, ...]) -> None:
        if name in AUDITED and not (name == "open" and not _writes(details[2])) and happens(AUDITED[name]):
            _die()

    def fsync(handle: Any) -> None:
        if happens("fsync"):
            _die()
        really_fsync(handle)

    class WatchedFile(io.FileIO):
        def write(self, data: Any) -> int:
            if happens("write"):
                assert fault is not None
                super().write(memoryview(data).cast("B")[: int(fault.share * memoryview(data).nbytes)])
                _die()
            return super().write(data)

        def truncate(self, size: int | None = None) -> int:
            if happens("truncate"):
                _die()
            return super().truncate(size)

    def watched_open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """`open`, as the io module's documentation composes it."""
        if not set(mode) & set("wax+"):
            return really_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = WatchedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    really_fsync, really_open = os.fsync, io.open
    os.fsync = fsync
    io.open = watched_open  # pathlib's
    builtins.open = watched_open
    sys.addaudithook(audit)
    return events


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
    os._exit(0)  # what was imported would take seconds to clean up
