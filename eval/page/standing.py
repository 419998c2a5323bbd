"""Who stands where in a report: numbers, colours and families of contenders, the same in its tables and figures."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.eval.page.drawing import MARKERS, SERIES

FEW = 6  # contenders that figures can name, each in a colour of its own


@dataclass(frozen=True)
class Standing:
    """The contenders of one acceptance.json."""

    contenders: dict[str, Any]  # numbers by name
    main: str
    plain: str

    @classmethod
    def of(cls, acceptance: dict[str, Any]) -> "Standing":
        return cls(acceptance["contenders"], acceptance["contender"], acceptance["baseline"])

    @cached_property
    def drafting(self) -> dict[str, Any]:
        """All but plain decoding."""
        return {name: row for name, row in self.contenders.items() if name != self.plain}

    @property
    def many(self) -> bool:
        """Figures name them by number, and colours are families'."""
        return len(self.drafting) > FEW

    @cached_property
    def numbers(self) -> dict[str, int]:
        """From 1, in the order of the table; plain decoding has none."""
        return {name: i for i, name in enumerate(self.drafting, start=1)}

    @cached_property
    def families(self) -> dict[str, int]:
        """From 0: of one family are those who differ in sizes and thresholds alone."""
        keys: dict[tuple[Any, ...], int] = {}
        found = {}
        for name, row in self.drafting.items():
            tree = row["tree"] or {}
            key = (row["proposer"], row["drafter"], tree.get("policy"), tree.get("vocab_size") is not None)
            found[name] = keys.setdefault(key, len(keys))
        return found

    @cached_property
    def family_names(self) -> dict[int, str]:
        """In a few words: who drafts by which policy, whether cut; of equal ones, also from which directory."""
        words: dict[int, str] = {}
        longer: dict[int, str] = {}
        for name, family in self.families.items():
            row = self.drafting[name]
            tree = row["tree"] or {}
            policy = {"eagle2": "EAGLE-2", "ddd": "DDD", "svip": "SVIP", "svip_tree": "SVIP tree", "c2t": "C2T"}
            said = policy.get(key := str(tree.get("policy")), key)
            said = {"prompt_lookup": "prompt lookup", "causal_lm": f"small LM, {said}"}.get(row["proposer"], said)
            words[family] = said + ", cut" * (tree.get("vocab_size") is not None)
            longer[family] = f"{words[family]}: {row['drafter']}"
        twice = {said for said in words.values() if list(words.values()).count(said) > 1}
        return {family: longer[family] if said in twice else said for family, said in words.items()}

    def label(self, name: str) -> str:
        """The name for a figure's legend; of a cut vocabulary with its size, for its trees are as large as others'."""
        tree = self.drafting[name]["tree"] or {}
        size = tree.get("vocab_size")
        told = size is None or str(size) in name or f"{size:,}" in name
        return name if told else f"{name}, {size:,} tokens"

    @cached_property
    def markers(self) -> dict[str, str]:
        """The mark of each who drafts: its own, or its family's where there are many."""
        places = self.families if self.many else {name: i - 1 for name, i in self.numbers.items()}
        return {name: MARKERS[place % len(MARKERS)] for name, place in places.items()}

    @cached_property
    def roles(self) -> dict[str, str]:
        """The colour of each: its own, or its family's where there are many."""
        places = self.families if self.many else {name: i - 1 for name, i in self.numbers.items()}
        return {name: "plain" if name == self.plain else f"s{1 + places[name] % SERIES}" for name in self.contenders}
