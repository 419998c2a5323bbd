"""The command line that scripts share: overrides, help, exit codes, progress bars."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.command import cli, launch, progress
from draftsmith.recipes.command.progress import Bar, speak_if_due
from draftsmith.recipes.errors import UserError
from tests.clock import Clock
from tests.recipes.test_recipes import SMALLEST


def test_command_takes_overrides_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALLEST)
    words = [str(path), "train.seed=4", "--plan", "--show", "3", "train.max_steps=2"]
    command = cli.parse_command("Doc.", words, extra=lambda parser: parser.add_argument("--show", type=int))
    assert (command.recipe.train.seed, command.recipe.train.max_steps) == (4, 2)
    assert (command.plan, command.show, command.recipe_path) == (True, 3, str(path))
    assert command.overrides == ["train.seed=4", "train.max_steps=2"]


Ended = tuple[int | str | None, str]


@pytest.fixture
def ended_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """How `cli.run` ends by an error of its script, or whatever this does: (exit code, what stderr got)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's
    monkeypatch.setattr(cli.atexit, "register", lambda _: None)  # or it would end pytest with a status of its own

    def call(script: BaseException | Callable[[], None], **how: bool) -> Ended:
        with pytest.raises(SystemExit) as caught:
            cli.run(failing(script) if isinstance(script, BaseException) else script, **how)
        return caught.value.code, capsys.readouterr().err

    return call


def failing(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def interrupted_import() -> ImportError:
    """As transformers' lazy imports make one of a Ctrl-C."""
    error = ImportError("could not import module")
    error.__cause__ = KeyboardInterrupt()
    return error


DENIED = PermissionError(errno.EACCES, "Permission denied", "runs/x")


@pytest.mark.parametrize(
    ("error", "terminal", "code", "said"),
    [
        (UserError("wrong."), False, 2, "error: wrong.\n"),
        (KeyboardInterrupt(), False, 130, "interrupted\n"),
        (interrupted_import(), False, 130, "interrupted\n"),
        (KeyboardInterrupt(), True, 130, "\ninterrupted\n"),  # not glued to a bar
        (KeyboardInterrupt("interrupted after step 3"), True, 130, "interrupted after step 3\n"),
        (DENIED, False, 2, "error: runs/x: Permission denied; name"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, terminal: bool, code: int, said: str, ended_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    ended = ended_by(error)
    assert ended[0] == code and ended[1].startswith(said)


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "No such file", "ours"), ZeroDivisionError(), ImportError("gone")):
        with pytest.raises(type(error)):
            cli.run(failing(error))


def test_ranks_tell_their_problems_and_rank_0_an_interruption(ended_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    told = "[rank 1] error: 2 problems\n  - wrong.\n  - worse.\n"
    assert ended_by(UserError(["wrong.", "worse."]), many_processes=True) == (2, told)
    assert ended_by(KeyboardInterrupt(), many_processes=True) == (130, "")
    cli.run(lambda: None, many_processes=True)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_waiting_threads_sleep_beside_other_jobs_unless_the_user_chose(chosen: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", *launch.WAITING)}
    env |= {"OMP_DISPLAY_ENV": "verbose"} | ({"KMP_BLOCKTIME": "7"} if chosen else {})
    script = """
import psutil
psutil.cpu_percent = lambda *_, **__: [80.0] * 256
from draftsmith.recipes.command.cli import parse_arguments
parse_arguments("", ["r.yaml"])
import torch  # its library reads the settings
"""
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert ("GOMP_SPINCOUNT = '1000'" in done.stderr or "KMP_BLOCKTIME=0" in done.stderr) != chosen


@pytest.mark.parametrize("launcher", [("WORLD_SIZE", "LOCAL_RANK"), ("PMI_SIZE", "MPI_LOCALRANKID")])
def test_several_processes_of_a_script_that_needs_one_are_refused_and_the_first_says_so(
    launcher: tuple[str, str], ended_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    for local_rank, waits in (("0", []), ("1", [launch.ENDED_BY_LAUNCHER_SECONDS])):  # until the launcher ends it
        for name, value in zip(launcher, ("2", local_rank), strict=True):
            monkeypatch.setenv(name, value)
        code, said = ended_by(lambda: pytest.fail("it has begun"))
        assert code == 2 and waited == waits and "runs as one process, and 2 were started" in said


def test_a_reader_who_goes_away_is_no_defect() -> None:
    script = "from draftsmith.recipes.command.cli import run\nrun(lambda: print('line\\n' * 99_999))"
    read, write_end = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


# Progress bars.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of bars. Nothing speaks while it moves, unless the test says so."""
    clock = Clock(1000.0)
    monkeypatch.setattr(Bar, "_last_line", clock.now)
    monkeypatch.setattr(progress, "speak_if_due", lambda: None)  # the thread's
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(Bar, "monitor_interval", 0)  # no thread that refreshes
    return clock


def drawn(monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: bool, seconds: float, **settings: Any) -> str:
    """What 4 steps of a stage of 8 show, after so many seconds."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", screen)
    with Bar(total=8, desc="decode", unit="prompt", mininterval=0, **settings) as bar:
        bar.set_postfix_str("tau 2.31", refresh=False)
        for _ in range(4):
            for _ in range(10):
                clock.now += seconds / 40
                speak_if_due()
            bar.update()
    return screen.getvalue()


def test_a_log_gets_one_line_a_stage_and_one_every_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    assert drawn(monkeypatch, clock, True, 1.9) == drawn(monkeypatch, clock, False, 1.9) == ""
    line = "decode: 4 of 8 prompts in 00:08,  2.00s/prompt, 00:08 left, tau 2.31\n"
    assert drawn(monkeypatch, clock, False, 8) == line
    # Two minutes a prompt: a log cannot wait for them. Looked at every 12 seconds, and the last line.
    assert len(drawn(monkeypatch, clock, False, 480).splitlines()) == 480 // 36 + 1
    # Resumed: the pace since then.
    line = "decode: 8 of 8 prompts in 00:08,  2.00s/prompt, 00:00 left, tau 2.31\n"
    assert drawn(monkeypatch, clock, False, 8, initial=4) == line
