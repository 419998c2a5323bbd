"""Each contender's number, colour and marker, shared by a report's tables and figures."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.eval.report_page.drawing import MARKERS

FEW = 6  # most contenders with colours and markers


@dataclass(frozen=True)
class Legend:
    """The contenders of one acceptance.json."""

    contenders: dict[str, Any]  # numbers by name
    main: str
    plain: str

    @classmethod
    def of(cls, acceptance: dict[str, Any]) -> "Legend":
        return cls(acceptance["contenders"], acceptance["contender"], acceptance["baseline"])

    @cached_property
    def drafting(self) -> dict[str, Any]:
        """All but plain decoding, in whatever precision."""
        return {
            name: row
            for name, row in self.contenders.items()
            if name != self.plain and not (row.get("quantization") and row["proposer"] is None)
        }

    @property
    def many(self) -> bool:
        """Whether there are too many contenders to give each a colour."""
        return len(self.drafting) > FEW

    @cached_property
    def coloured(self) -> list[str]:
        """At most FEW contenders in the table's order: the main one and the fastest (in a replay: of greatest tau)."""
        others = [name for name in self.drafting if name != self.main]
        others.sort(key=lambda name: (self.drafting[name]["speedup"] or 0, self.drafting[name]["tau"] or 0))
        best = {self.main, *others[-(FEW - 1) :]}
        return [name for name in self.drafting if name in best]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """From 1, in the table's order; without plain decoding."""
        return {name: i for i, name in enumerate(self.drafting, start=1)}

    @cached_property
    def markers(self) -> dict[str, str]:
        return dict.fromkeys(self.drafting, ".") | dict(zip(self.coloured, MARKERS, strict=False))

    @cached_property
    def roles(self) -> dict[str, str]:
        """Each contender's colour role."""
        mine = {name: f"s{i}" for i, name in enumerate(self.coloured, start=1)}
        return {name: mine.get(name, "plain") for name in self.contenders}
