"""The date that chat templates write into prompts (`strftime_now`): one for everything in an output folder.

A run may take days, and its prompts must stay the same when it is resumed, trained on, or measured.
"""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.files.atomic import atomic_write

FILE = "prompt_date.txt"


@dataclass
class KeptDate:
    """A run's date.

    Attributes:
        folder: the output folder, which keeps it in FILE.
        others: folders of runs whose files this one reads. A folder without a date takes theirs.
        writes: whether the folder may be written to, which a plan does not.
    """

    folder: Path
    others: tuple[Path, ...] = ()
    writes: bool = False

    def read(self) -> date:
        """The folder's date, or else the others', or today's; keeps it in the folder from then on.

        Raises UserError if a file does not hold a date.
        """
        own = self.folder / FILE
        there = next((path for folder in (self.folder, *self.others) if (path := folder / FILE).exists()), None)
        if there is None:
            day = today()
        else:
            text = there.read_text(encoding="utf-8", errors="replace").strip()
            try:
                day = date.fromisoformat(text)
            except ValueError:
                raise UserError(
                    f"{there}: {quoted(text)} is not a date (YYYY-MM-DD), and prompts have had one: write it there"
                ) from None
        if self.writes and there != own and rank() == 0:
            atomic_write(own, f"{day}\n")
            print(f"the chat template writes the date into prompts: {day}, kept in {own}")
        return day


def today() -> date:
    return date.today()
