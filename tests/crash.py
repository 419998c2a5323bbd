"""Kills scripts at random or chosen moments, hundreds of times, without importing torch hundreds of times.

    with CrashLab(["draftsmith.data_gen.answers.regeneration"]) as lab:
        argv = [str(recipe), "output_dir=..."]
        ending = lab.run("draftsmith.data_gen.regenerate", argv, kill_after=0.3)       # seconds; None lets it end
        ending = lab.run("draftsmith.data_gen.regenerate", argv, fault=Fault("write", 5))
        assert ending.status in (0, -signal.SIGKILL), ending.output
        ending = lab.run("draftsmith.train.eagle3", argv, ranks=2, rank=1, kill_after=0.3)

One server process imports everything heavy, calls nothing of it, and forks a child for every run: milliseconds instead
of seconds. The child does what `python script.py argv` does, `cli.run(module.main)`, alone in its process
group, with its output in a file. It leaves by `os._exit`: what is registered with `atexit` does not run.

A kill by the clock lands where the time goes. A `Fault` lands where it hurts: the child kills itself at the n-th write
(in the middle of it), rename, fsync, ... that Python code makes. What C++ and Rust write (torch.save, safetensors) only
the clock reaches.

Several ranks are several children of one process group, with the environment that torchrun gives. Either all of them
are killed at once (a node dies), or one rank is; then the others are ended as torchrun does it: SIGTERM, and SIGKILL
after a moment.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.ranks import LAST_WORDS_SECONDS, free_port, words_of_launcher

ROOT = Path(__file__).parent.parent
CAN_FORK = hasattr(os, "fork") and hasattr(os, "waitid")  # for `pytest.mark.skipif`
POLL_SECONDS = 0.001  # between two looks at `kill_when`, or at the children
NOTICED_SECONDS = 0.1  # after a rank failed the launcher ends the others; torchrun looks as often
PATIENCE_SECONDS = 1.0  # of the launcher with a rank that got SIGTERM; torchrun's is 30
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Without a GPU, whose threads would not survive a fork.
OTHER_VARIABLES = {"TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1", "CUDA_VISIBLE_DEVICES": ""}
# Audit events of Python's os module, by the names that a Fault uses. They come before the deed. "open" is for writing.
AUDITED = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.mkdir": "mkdir", "open": "open"}
# Functions of torch.distributed that are "collective" to a Fault. What C++ calls (DistributedDataParallel) is not seen.
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "reduce", "reduce_scatter_tensor",
)  # fmt: skip


class Fault(NamedTuple):
    """The child dies at the `number`-th (from 1) `event`: open, write, truncate, fsync, rename, remove, rmdir, mkdir,
    collective.

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

    status: int  # its exit code; -n: signal n ended it; of several ranks that of the first that failed
    output: str  # stdout and stderr
    seconds: float
    events: Counter[str]  # of a run that ended by itself with `count_events`; of several ranks those of `rank` or 0
    statuses: list[int]  # by rank


class CrashLab:
    """A server that has imported `modules` and runs their `main`s; to be used in a `with` statement, from one thread.

    Modules that the children would else import one by one belong into `modules` too (a model's own of transformers).

    Args:
        environment: variables that are set before anything is imported.

    Raises:
        RuntimeError: the server cannot import a module, or importing one starts threads, which a fork would lose.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None):
        self._modules, self._environment = list(modules), dict(environment or {})

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
                env=os.environ | ONE_THREAD | OTHER_VARIABLES | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests
            )
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
        ranks: int = 1,
        more: Mapping[int, Sequence[str]] | None = None,
        rank: int | None = None,
        kill_after: float | None = None,
        kill_when: Callable[[], bool] | None = None,
        fault: Fault | None = None,
        kill_with: signal.Signals = signal.SIGKILL,
        again_after: float | None = None,
        count_events: bool = False,
        file_limit: int | None = None,
        timeout: float = 120,
    ) -> Ending:
        """Runs `module.main()` with `sys.argv[1:] = argv` and returns how it ended.

        Args:
            ranks: processes; of several each is told its rank as torchrun tells it.
            more: by rank, arguments that it alone is given, behind `argv`.
            rank: which one of them is killed, by the clock or at the fault. None: all; the fault is rank 0's then, and
                kills the others at that moment.
            kill_after: seconds from the start after which `kill_with` is sent.
            kill_when: asked all the time; when true, `kill_with` is sent.
            again_after: seconds after which it is sent once more.
            file_limit: bytes above which no file can grow: the writer sees an OSError, as on a full disk.
            timeout: seconds after which the run is killed and AssertionError raised, with its output, in which the
                stacks of all threads stand.
        """
        log = Path(self._folder.name) / "output"
        log.write_bytes(b"")  # all ranks append
        request = {"module": module, "argv": list(argv), "log": str(log), "file_limit": file_limit}
        request |= {"more": dict(more or {}), "ranks": ranks, "port": free_port() if ranks > 1 else None}
        started = time.monotonic()
        self._connection.send(request | {"fault": fault, "faulty": rank or 0, "count_events": count_events})
        pids: list[int] = self._receive(30)
        statuses: dict[int, int] = {}  # by rank, in the order in which they ended

        def kill(which: int | None, how: signal.Signals) -> None:
            # The server keeps ended children as zombies until we have seen all: their ids are nobody else's so long.
            os.killpg(pids[0], how) if which is None else os.kill(pids[which], how)

        try:
            kill_at = math.inf if kill_after is None else started + kill_after
            terminate_at = give_up_at = math.inf  # what the launcher does to the others where one rank failed
            timeout_at = started + timeout
            while len(statuses) < ranks:
                now = time.monotonic()
                if now >= kill_at or (kill_when is not None and kill_when()):
                    kill(rank, kill_with)
                    kill_at, kill_when = math.inf if again_after is None else now + again_after, None
                    again_after = None
                if now >= terminate_at:
                    kill(None, signal.SIGTERM)
                    terminate_at, give_up_at = math.inf, now + PATIENCE_SECONDS
                if now >= give_up_at:
                    kill(None, signal.SIGKILL)
                    give_up_at = math.inf
                if now >= timeout_at:
                    self._dump_stacks(pids[0], ranks - len(statuses), statuses)
                    raise AssertionError(f"{module} still ran after {timeout} s:\n{log.read_text(errors='replace')}")
                until = min(kill_at, terminate_at, give_up_at, timeout_at)
                until = until if kill_when is None else min(until, now + POLL_SECONDS)
                if not self._connection.poll(max(0.0, until - now)):
                    continue
                ended, statuses[ended] = self._receive(0)
                if rank is None and statuses[ended] == -signal.SIGKILL:
                    kill(None, signal.SIGKILL)
                elif statuses[ended] and not any(status for each, status in statuses.items() if each != ended):
                    terminate_at = time.monotonic() + NOTICED_SECONDS
        except BaseException:
            kill(None, signal.SIGKILL)
            raise
        finally:
            while len(statuses) < ranks:
                ended, statuses[ended] = self._receive(30)
            self._connection.send("seen")
            events: list[Counter[str]] = self._receive(30)
        seconds = time.monotonic() - started
        status = next((status for status in statuses.values() if status), 0)
        output = log.read_text(errors="replace")
        return Ending(status, output, seconds, events[rank or 0], [statuses[each] for each in range(ranks)])

    def _dump_stacks(self, group: int, running: int, statuses: dict[int, int]) -> None:
        """Ends ranks that hang so that each prints its stacks (faulthandler)."""
        os.killpg(group, signal.SIGABRT)
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while running and self._connection.poll(max(0.0, deadline - time.monotonic())):
            ended, statuses[ended] = self._receive(0)
            running -= 1

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
        pids: list[int] = []
        pipes: list[int] = []
        for rank in range(request["ranks"]):
            events, childs_events = os.pipe()
            pid = os.fork()
            if pid == 0:
                connection.close()
                _be_the_child(request, rank, pids[0] if pids else 0, childs_events)
            os.close(childs_events)
            pids.append(pid)
            pipes.append(events)
            os.setpgid(pid, pids[0])  # the child does the same: whoever comes first
        connection.send(pids)
        running = dict(enumerate(pids))
        while running:
            for rank, pid in [*running.items()]:
                if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    connection.send((rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
                    del running[rank]
            time.sleep(POLL_SECONDS)
        try:
            connection.recv()
        finally:
            for pid in pids:
                os.waitpid(pid, 0)
        counted = []
        for events in pipes:
            with open(events, "rb") as pipe:
                counted.append(Counter(json.loads(pipe.read() or "{}")))
        connection.send(counted)


def _be_the_child(request: dict[str, Any], rank: int, group: int, events_pipe: int) -> NoReturn:
    """Runs the script's main as a process of its own would; never returns.

    Args:
        group: process group to join; 0: its own.
    """
    status = 1
    try:
        os.setpgid(0, group)
        if request["ranks"] > 1:
            os.environ.update(words_of_launcher(rank, request["ranks"], request["port"]))
        for name in (signal.SIGINT, signal.SIGTERM):  # whatever the tests were started with
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        if request["file_limit"] is not None:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], hard))
        more = request["more"].get(rank, ())
        sys.argv = [request["module"].rpartition(".")[2] + ".py", *request["argv"], *more]
        main = importlib.import_module(request["module"]).main
        fault = request["fault"] if rank == request["faulty"] else None
        events = _watch(fault) if fault or request["count_events"] else Counter()
        from draftsmith.recipes.command import cli

        cli.run(main, many_processes=True)
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

    def watched_collective(really_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if happens("collective"):
                _die()
            return really_call(*args, **kwargs)

        return call

    if distributed := sys.modules.get("torch.distributed"):
        for name in COLLECTIVES:
            if hasattr(distributed, name):
                setattr(distributed, name, watched_collective(getattr(distributed, name)))
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
