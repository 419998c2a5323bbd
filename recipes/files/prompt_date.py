"""The date that chat templates write into prompts (`strftime_now`): one for all days of a run and what follows it."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.files.atomic import atomic_write

FILE = "prompt_date.txt"


@dataclass
class KeptDate:
    """A run's date, which its folder keeps in FILE."""

    folder: Path
    others: tuple[Path, ...] = ()  # folders of runs whose files this one reads
    writes: bool = False  # not for a plan

    def read(self) -> date:
        """The folder's date, or else the others', or today's; keeps it in the folder from then on."""
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
