"""The command line that all scripts share (a recipe, overrides, `--plan`) and their exit codes.

def main() -> None:
    command = parse_command(__doc__)
    ...

if __name__ == "__main__":
    run(main)
"""

import argparse
import atexit
import errno
import io
import logging
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from draftsmith.recipes.command.interrupts import interruption, print_interrupted
from draftsmith.recipes.command.launch import check_alone, let_waiting_threads_sleep, rank, world_size
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe, placed
from draftsmith.recipes.schema import Recipe

EPILOG = """\
overrides: any key of the recipe, its value written as in YAML, for example
  train.max_steps=100  eval.tree.nodes=30  data.prompts='[a.jsonl, b.jsonl]'  output_dir=runs/try
"""

# Their warnings (generation flags, sequence lengths, cache notices) would hide our problems and tables.
NOISY_LOGGERS = ("transformers", "datasets", "huggingface_hub", "torch.distributed")

# Errors of a path that the user chose: permissions, a read-only or full disk, a file in place of a folder.
_PLACE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST),
)


class Command(argparse.Namespace):
    """A parsed command line. Options from `extra` are further attributes."""

    recipe: Recipe
    recipe_path: str
    overrides: list[str]
    plan: bool
    processes: int | None = None  # for `draftsmith train` to start


def parse_command(
    doc: str | None,
    argv: Sequence[str] | None = None,
    extra: Callable[[argparse.ArgumentParser], object] | None = None,
    writes: bool = True,
) -> Command:
    """Parses `script.py recipe.yaml [key.path=value ...] [--plan]` and loads the recipe.

    Args:
        doc: the script's docstring, for --help.
        argv: arguments without the script's name; None: sys.argv.
        extra: adds the script's own options to the parser.
        writes: whether the script writes into output_dir.
    """
    command = parse_arguments(doc, argv, extra)
    command.recipe = load_recipe(command.recipe_path, command.overrides)
    if writes:
        check_output(command.recipe)
        if not command.plan:
            command.recipe.keep_date()
    return command


def check_output(recipe: Recipe) -> None:
    """Raises UserError if output_dir exists and cannot be written to. The loader checks a missing one."""
    output = Path(recipe.output_dir)
    if output.exists() and not os.access(output, os.W_OK):
        raise UserError(f"output_dir: nothing can be written to {output}; name another folder, or fix its permissions")


def parse_arguments(
    doc: str | None, argv: Sequence[str] | None = None, extra: Callable[[argparse.ArgumentParser], object] | None = None
) -> Command:
    """`parse_command` without loading the recipe, for scripts that load several and report all their problems."""
    parser = argparse.ArgumentParser(
        description=doc, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "recipe_path",
        metavar="recipe.yaml",
        help="the recipe; paths in it are relative to where you are, ~ is your home folder",
    )
    values = parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", help="values that replace the recipe's"
    )
    parser.add_argument("--plan", action="store_true", help="check everything, print what would be done, and stop")
    if extra is not None:
        extra(parser)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        from draftsmith.recipes.command.completion import keys

        values.completer = keys  # type: ignore[attr-defined]
        argcomplete.autocomplete(parser)
    # Intermixed: overrides may stand before and after options.
    command = parser.parse_intermixed_args(argv, Command())
    let_waiting_threads_sleep()
    return command


def run(main: Callable[[], None], many_processes: bool = False) -> None:
    """Calls `main` and turns errors into exit codes: 2 for a UserError or an unwritable path, after its problems,
    130 for Ctrl-C, 141 for a closed output pipe (`| head`). Other exceptions are defects of ours.

    Args:
        many_processes: whether a launcher may start several processes that share the work.
    """
    _quiet_third_parties()
    sys.argv[1:] = map(placed, sys.argv[1:])  # shells expand `~` only where a word begins
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):  # a terminal without some character shows its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _no_finalization() if many_processes and world_size() > 1 else nullcontext():
        try:
            if not many_processes:
                check_alone()
            main()
            sys.stdout.flush()
        except (UserError, OSError, KeyboardInterrupt, ImportError) as error:
            if (interrupt := interruption(error)) is not None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C needs no traceback either
                print_interrupted(str(interrupt))
                sys.exit(130)
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                sys.exit(128 + signal.SIGPIPE)
            problems = error.problems if isinstance(error, UserError) else _unwritable(error)
            if not problems:
                raise
            print_problems(problems)
            sys.exit(2)


@contextmanager
def _no_finalization() -> Iterator[None]:
    """Ends one of several processes without the interpreter's finalization, after its exit handlers.

    A process group's thread may still hold the last collective's tensors. It needs the interpreter's lock to release
    them, and asking for that lock during finalization aborts the process, after all its work is done.
    """
    status = 1  # of an exception that Python reports

    def leave() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    atexit.register(leave)  # runs behind all handlers that register from now on
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def print_problems(problems: Sequence[str]) -> None:
    """Prints problems on stderr, with the rank under a launcher, since a problem may concern one rank only."""
    who = f"[rank {rank()}] " if world_size() > 1 else ""
    if len(problems) == 1:
        text = f"{who}error: {problems[0]}"
    else:
        text = "\n".join([f"{who}error: {len(problems)} problems", *(f"  - {p}" for p in problems)])
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _nobody_reads() -> bool:
    """Whether the broken pipe is our output. If so, redirects it to nowhere for the interpreter's last flush."""
    place = sys.stdout.fileno()
    asked = select.poll()
    asked.register(place, 0)  # poll always reports errors
    if not asked.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), place)
    return True


def _unwritable(error: BaseException) -> list[str]:
    """A problem, if the user can fix the error."""
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _PLACE_ERRORS:
        return []
    return [f"{error.filename}: {error.strerror}; name another place, or fix this one"]


def _quiet_third_parties() -> None:
    if not sys.warnoptions:  # users cannot fix future changes between libraries
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|deepspeed|torch)\b")
    if "TRANSFORMERS_VERBOSITY" in os.environ:
        return  # the user asked for a level
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # for child processes and later imports
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
