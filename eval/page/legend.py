"""The legend of a report: each contender's number, colour, marker and family, shared by tables and figures."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes

from draftsmith.eval.page.drawing import MARKERS, SERIES, WIDTH, Colours

FEW = 6  # most contenders with names and separate colours in figures
ROW = 17  # pixels of a contender's row
NAME = 46  # characters of a name
POLICIES = {"eagle2": "EAGLE-2", "ddd": "DDD", "svip": "SVIP", "svip_tree": "SVIP tree", "c2t": "C2T"}


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
        """All but plain decoding."""
        return {name: row for name, row in self.contenders.items() if name != self.plain}

    @property
    def many(self) -> bool:
        """Whether figures use numbers as names and colours for families."""
        return len(self.drafting) > FEW

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
            found[name] = keys.setdefault(key, len(keys))
        return found

    @cached_property
    def family_names(self) -> dict[int, str]:
        """Policy, kind of drafter and whether the vocabulary is cut; for equal names also the drafter's directory."""
        words: dict[int, str] = {}
        longer: dict[int, str] = {}
        for contender, family in self.families.items():
            row = self.drafting[contender]
            tree = row["tree"] or {}
            name = POLICIES.get(key := str(tree.get("policy")), key)
            name = {"prompt_lookup": "prompt lookup", "causal_lm": f"small LM, {name}"}.get(row["proposer"], name)
            words[family] = name + ", cut" * (tree.get("vocab_size") is not None)
            longer[family] = f"{words[family]}: {row['drafter']}"
        names = list(words.values())
        return {family: longer[family] if names.count(name) > 1 else name for family, name in words.items()}

    def label(self, name: str) -> str:
        """The name in a figure's legend, with the size of a cut vocabulary."""
        tree = self.drafting[name]["tree"] or {}
        size = tree.get("vocab_size")
        told = size is None or str(size) in name or f"{size:,}" in name
        return name if told else f"{name}, {size:,} tokens"

    @cached_property
    def _places(self) -> dict[str, int]:
        """Index of colour and marker, from 0: the contender's, or its family's if there are many."""
        return self.families if self.many else {name: i - 1 for name, i in self.numbers.items()}

    @cached_property
    def markers(self) -> dict[str, str]:
        """Each contender's marker, without plain decoding."""
        return {name: MARKERS[place % len(MARKERS)] for name, place in self._places.items()}

    @cached_property
    def roles(self) -> dict[str, str]:
        """Each contender's colour role."""
        return {name: f"s{1 + place % SERIES}" for name, place in self._places.items()} | {self.plain: "plain"}

    def grouped(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Names by family, both in the order of `names`."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(self.families[name], []).append(name)
        return groups

    def draw(self, ax: Axes, colours: Colours, names: list[str]) -> None:
        """Draws a row per contender: marker, number, name. `ax` is ROW pixels high per row."""
        ax.set_axis_off()
        ax.set_xlim(0, WIDTH)
        ax.set_ylim(ROW * len(names), 0)
        for row, name in enumerate(names):
            y = ROW * (row + 0.5)
            style: Any = {"va": "center_baseline", "fontsize": 11, "color": colours(self.roles[name])}
            ax.plot(4, y, self.markers[name], markersize=5, color=style["color"], markeredgewidth=0)
            ax.text(27, y, str(self.numbers[name]), ha="right", **style)
            ax.text(34, y, shortened(self.label(name), NAME), ha="left", **style)


def shortened(text: str, most: int) -> str:
    """`text` in one row of at most `most` characters."""
    return textwrap.shorten(text, most, placeholder="…") or "?"
