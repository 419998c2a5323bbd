"""Kills scripts at chosen moments of the clock, without importing torch for each of them.

    with CrashLab(["draftsmith.data_gen.answers.regeneration"]) as lab:
        argv = [str(recipe), "output_dir=..."]
        ending = lab.run("draftsmith.data_gen.regenerate", argv, kill_after=0.3)  # seconds; None lets it end
        assert ending.status in (0, -signal.SIGKILL), ending.output
        ending = lab.run("draftsmith.train.eagle3", argv, ranks=2, rank=1, kill_when=path.exists)

One server process imports everything heavy, calls nothing of it, and forks a child for every run: milliseconds instead
of seconds. The child does what `python script.py argv` does, `cli.run(module.main)`, alone in its process
group, with its output in a file. It leaves by `os._exit`: what is registered with `atexit` does not run.
`tests.crash_states` enumerates what a kill could leave; this is for what only processes show.

Several ranks are several children of one process group, with the environment that torchrun gives. Either all of them
are killed at once (a node dies), or one rank is; then the others are ended as torchrun does it: SIGTERM, and SIGKILL
after a moment.
"""

import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
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


class Ending(NamedTuple):
    """How a run ended."""

    status: int  # its exit code; -n: signal n ended it; of several ranks that of the first that failed
    output: str  # stdout and stderr
    seconds: float
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
        kill_with: signal.Signals = signal.SIGKILL,
        again_after: float | None = None,
        file_limit: int | None = None,
        timeout: float = 120,
    ) -> Ending:
        """Runs `module.main()` with `sys.argv[1:] = argv` and returns how it ended.

        Args:
            ranks: processes; of several each is told its rank as torchrun tells it.
            more: by rank, arguments that it alone is given, behind `argv`.
            rank: which one of them is killed; None: all.
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
        self._connection.send(request)
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
                if statuses[ended] and not any(status for each, status in statuses.items() if each != ended):
                    terminate_at = time.monotonic() + NOTICED_SECONDS
        except BaseException:
            kill(None, signal.SIGKILL)
            raise
        finally:
            while len(statuses) < ranks:
                ended, statuses[ended] = self._receive(30)
            self._connection.send("seen")
        seconds = time.monotonic() - started
        status = next((status for status in statuses.values() if status), 0)
        output = log.read_text(errors="replace")
        return Ending(status, output, seconds, [statuses[each] for each in range(ranks)])

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
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                connection.close()
                _be_the_child(request, rank, pids[0] if pids else 0)
            pids.append(pid)
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


def _be_the_child(request: dict[str, Any], rank: int, group: int) -> NoReturn:
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
        from draftsmith.recipes.command import cli

        cli.run(main, many_processes=True)
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


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
    os._exit(0)  # what was imported would take seconds to clean up
