"""The base class of a recipe's sections and the types of their values. The text under a field documents it."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: Any) -> Any:
        return {} if values is None else values  # `train:` with nothing below it

    @property
    def changed_keys(self) -> set[str]:
        """Keys that differ from the default. A resolved recipe names every key, so being named is not enough."""
        fields = type(self).model_fields
        return {key for key in self.model_fields_set if getattr(self, key) != fields[key].default}


def _number(value: Any) -> Any:
    """`1e-4`, which YAML 1.1 reads as text, as the number that it is."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value)
    return float(value) if is_number else value


Number = Annotated[float, BeforeValidator(_number)]
# YAML 1.1 reads `no` and `off` as false.
OrNo = BeforeValidator(lambda value: "no" if value is False else value)
OrOff = BeforeValidator(lambda value: "off" if value is False else value)

# Upper bounds lie far beyond any sensible use and catch typing errors.
MOST_COUNTED = 1_000_000_000
MOST_FLOAT = 1e38  # what float32 holds
Count = Annotated[int, Field(ge=1, le=MOST_COUNTED)]  # of tokens, steps, rows, conversations
CountOrZero = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]  # of batches, vocabularies, matrices
Beam = Annotated[int, Field(ge=1, le=1000)]
Depth = Annotated[int, Field(ge=1, le=10_000)]  # of draft trees
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy takes no others
Positive = Annotated[Number, Field(gt=0, le=MOST_FLOAT)]
PositiveOrZero = Annotated[Number, Field(ge=0, le=MOST_FLOAT)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[Number, Field(gt=0, le=1e9)]


def as_list(sources: str | list[str] | None) -> list[str]:
    """The sources of a key that takes none, one or several."""
    return [sources] if isinstance(sources, str) else sources or []


class ImpossibleSettings(ValueError):
    """All contradictions in a section. Each begins with the key to change, dotted below the section, and `: `."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("; ".join(problems))
        self.problems = list(problems)
