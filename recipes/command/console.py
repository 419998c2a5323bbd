"""The `draftsmith` command: every script of the project under one name, and `run` for a whole recipe.

    draftsmith init Qwen/Qwen3-0.6B       # write a recipe for a target
    draftsmith run qwen3-0.6b.yaml        # answers, draft vocabulary, drafter, acceptance; resumable
    draftsmith train qwen3-0.6b.yaml      # one stage; draftsmith train --help shows its options

It imports nothing heavy before it has parsed the command line, so `--help` is fast.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import version

import draftsmith.recipes.command.interrupts  # noqa: F401 - Ctrl-C from here on
from draftsmith.recipes.command.stages import SCRIPTS


def main() -> None:
    """Runs the command that `sys.argv` names."""
    # argcomplete asks for completions by calling the program, with the line in the environment.
    completing = os.environ.get("_ARGCOMPLETE") is not None
    words = os.environ.get("COMP_LINE", "").split()[1:] if completing else sys.argv[1:]
    name = words[0] if words else "--help"
    if completing and (name not in SCRIPTS or (len(words) == 1 and not os.environ["COMP_LINE"].endswith(" "))):
        from draftsmith.recipes.command.completion import complete_command

        complete_command(SCRIPTS)
    elif name in ("-h", "--help", "help"):
        from draftsmith.recipes.command.cli import run

        run(lambda: print(help_text()), many_processes=True)  # any launcher, and `| head`
    elif name == "--version":
        print(f"draftsmith {version('draftsmith')}")
    elif name not in SCRIPTS:
        close = difflib.get_close_matches(name, SCRIPTS, n=1)
        meant = f"; did you mean `{close[0]}`?" if close else ""
        print(f"error: {name!r} is not a draftsmith command{meant} (draftsmith --help lists them)", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv = [f"draftsmith {name}", *sys.argv[2:]]
        if completing:
            os.environ["_ARGCOMPLETE"] = "2"  # the words of the line that are the program's name
        from draftsmith.recipes.command.cli import run

        module = SCRIPTS[name].module
        run(lambda: importlib.import_module(module).main(), many_processes=name in ("train", "capture"))


def help_text() -> str:
    stages = ("regenerate", "rank-vocab", "train", "evaluate")
    rest = [name for name in SCRIPTS if name not in ("init", "run", *stages)]

    def lines(names: Iterable[str]) -> str:
        return "\n".join(f"  {name:<14} {SCRIPTS[name].help}" for name in names)

    return f"""\
usage: draftsmith COMMAND my.yaml [key.path=value ...] [--plan]

Train draft models for speculative decoding, and measure what they are worth.

{lines(("init", "run"))}

the stages of every recipe, in the order of `run`:
{lines(stages)}

also:
{lines(rest)}

  draftsmith init Qwen/Qwen3-0.6B && draftsmith run qwen3-0.6b.yaml

draftsmith COMMAND --help shows what a command reads and writes; --plan shows what it would do and need."""


if __name__ == "__main__":
    main()
