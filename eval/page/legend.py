"""The legend of a report: each contender's number, colour, marker and family, shared by tables and figures."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes

from draftsmith.eval.page.drawing import MARKERS, WIDTH, Colours

FEW = 6  # most contenders with colours and markers
ROW = 17  # pixels of a contender's row
NAME = 49  # characters of a name


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
    def families(self) -> dict[str, int]:
        """From 0. Contenders of a family differ only in sizes and thresholds."""
        keys: dict[tuple[Any, ...], int] = {}
        found = {}
        for name, row in self.drafting.items():
            tree = row["tree"] or {}
            key = (row["proposer"], row["drafter"], tree.get("policy"), tree.get("vocab_size") is not None)
            key += ((row.get("router") or {}).get("fuse"),)  # None: no router
            found[name] = keys.setdefault(key, len(keys))
        return found

    def label(self, name: str) -> str:
        """The name in a figure's legend, with the size of a cut vocabulary."""
        tree = self.drafting[name]["tree"] or {}
        size = tree.get("vocab_size")
        told = size is None or str(size) in name or f"{size:,}" in name
        return name if told else f"{name}, {size:,} tokens"

    @cached_property
    def markers(self) -> dict[str, str]:
        """Each contender's marker, without plain decoding."""
        return dict.fromkeys(self.drafting, ".") | dict(zip(self.coloured, MARKERS, strict=False))

    @cached_property
    def roles(self) -> dict[str, str]:
        """Each contender's colour role."""
        mine = {name: f"s{i}" for i, name in enumerate(self.coloured, start=1)}
        return {name: mine.get(name, "plain") for name in self.contenders}

    def grouped(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Names by family, both in the order of `names`."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(self.families[name], []).append(name)
        return groups

    def draw(self, ax: Axes, colours: Colours, names: list[str]) -> None:
        """Draws a row per contender: marker and name. `ax` is ROW pixels high per row."""
        ax.set_axis_off()
        ax.set_xlim(0, WIDTH)
        ax.set_ylim(ROW * len(names), 0)
        for row, name in enumerate(names):
            y = ROW * (row + 0.5)
            style: Any = {"va": "center_baseline", "fontsize": 11, "color": colours(self.roles[name])}
            ax.plot(4, y, self.markers[name], markersize=5, color=style["color"], markeredgewidth=0)
            ax.text(14, y, shortened(self.label(name), NAME), ha="left", **style)


def shortened(text: str, most: int) -> str:
    """`text` in one row of at most `most` characters."""
    return textwrap.shorten(text, most, placeholder="…") or "?"
