"""The one exception for mistakes that a user can mend: shown without a traceback, exit code 2."""

from collections.abc import Sequence


class UserError(Exception):
    """One or more problems, each a full sentence: what is wrong, where, and what to do.

    Scripts print `problems` on stderr and exit with code 2 (`recipes.cli.run`); library code just raises it.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
