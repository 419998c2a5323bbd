"""Prints shell code that completes `draftsmith`: commands, options, files, and the recipe's keys.

eval "$(draftsmith completion bash)"          # in ~/.bashrc
eval "$(draftsmith completion zsh)"           # in ~/.zshrc, after compinit
draftsmith completion fish | source           # in config.fish
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import argcomplete
from argcomplete.shell_integration import shellcode

SHELLS = ("bash", "zsh", "fish", "tcsh")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=sys.argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS)
    argcomplete.autocomplete(parser)
    shell = parser.parse_args().shell
    print(shellcode(["draftsmith"], shell=shell))


def complete_command(names: Iterable[str]) -> None:
    """Completes the command's name for argcomplete."""
    parser = argparse.ArgumentParser(prog="draftsmith")
    parser.add_argument("command", choices=sorted(names))
    argcomplete.autocomplete(parser)


def keys(prefix: str, **_: Any) -> list[str]:
    """The recipe's keys that begin with `prefix`, for `key.path=value`."""
    from draftsmith.recipes.loader import all_keys

    return [f"{key}=" for key in all_keys() if key.startswith(prefix)]
