"""Schemas of the files that the report reads. Files are checked on reading; the page relies on it.

Only keys that the report shows are checked, strictly: a number given as text is an error. Other keys pass.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, model_validator

from draftsmith.recipes.files.json_text import parse_json

# Characters that must not be on a page: controls, lone surrogates, non-characters, and bidirectional controls.
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)

Count = Annotated[int, Field(ge=0, le=10**15)]
Number = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]  # farther out, axes cannot be drawn
Bounds = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
Text = InstanceOf[str]  # allows lone surrogates, which `html.visible` names


def clean(value: Any) -> Any:
    """`value` with every forbidden character of its texts replaced."""
    if isinstance(value, str):
        return FORBIDDEN.sub("\ufffd", value)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value


def load(text: bytes, tidy: bool = False) -> dict[str, Any]:
    """The JSON object in `text`, with `clean` texts if `tidy`. Raises ValueError if there is none."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return clean(content) if tidy else content


def check(content: dict[str, Any], shape: type["SomeShape"]) -> "SomeShape":
    """`content` as this shape. Raises ValueError with the first wrong key."""
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        more = f" ({len(others)} more problems)" if others else ""
        raise ValueError(f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}{more}") from None


class Shape(BaseModel):
    model_config = ConfigDict(strict=True)


SomeShape = TypeVar("SomeShape", bound=Shape)


# acceptance.json


class Numbers(Shape):
    """One contender's numbers, in total or for a part."""

    prompts: Count
    answers: Count
    rounds: Count
    new_tokens: Count
    tau: Number | None
    tau_interval: Bounds
    accepted_per_round: Number | None
    accepted_histogram: list[Count]
    acceptance_by_position: list[Number]
    acceptance_by_position_interval: list[Bounds]
    tree_nodes_per_round: Number | None
    tree_nodes_per_round_interval: Bounds
    wasted_nodes_per_round: Number | None
    wasted_nodes_per_round_interval: Bounds
    draft_calls_per_round: Number | None
    draft_calls_per_round_interval: Bounds
    draft_milliseconds_per_call: Number | None
    verify_milliseconds_per_round: Number | None
    tokens_per_second: Annotated[Number, Field(ge=0)] | None
    speedup: Number | None
    speedup_interval: Bounds
    mean_prompt_speedup: Number | None
    mean_prompt_speedup_interval: Bounds
    tau_ratio: Number | None
    tau_ratio_interval: Bounds
    speed_ratio: Number | None
    speed_ratio_interval: Bounds
    overhead_share: Number | None
    time_share: dict[Literal["draft", "verify", "other"], Number | None]
    predicted_speedup: Number | None
    matches_target: bool | None

    @model_validator(mode="after")
    def _agree(self) -> "Numbers":
        if sum(self.accepted_histogram) != self.rounds:
            raise ValueError("accepted_histogram does not add up to rounds")
        if self.rounds and self.accepted_per_round is None:
            raise ValueError("accepted_per_round is missing though there are rounds")
        if self.rounds and None in (self.tau, self.tree_nodes_per_round):
            raise ValueError("tau or tree_nodes_per_round is missing though there are rounds")
        if len(self.acceptance_by_position) != len(self.acceptance_by_position_interval):
            raise ValueError("acceptance_by_position and its intervals differ in length")
        return self


class Tree(Shape):
    policy: str
    vocab_size: Count | None


class Contender(Numbers):
    """One contender's total numbers and description."""

    proposer: str | None
    drafter: str | None
    tree: Tree | None


class DataFile(Shape):
    file: str
    sha256: str


class Made(Shape):
    date: str
    hardware: str
    command: list[str]
    commit: str | None
    versions: dict[str, str]
    data: dict[str, DataFile]


class Acceptance(Shape):
    contender: str
    baseline: str
    contenders: dict[str, Contender]
    benchmarks: dict[str, dict[str, Numbers]]
    categories: dict[str, dict[str, Numbers]]
    turns: dict[Literal["1", "2"], dict[str, Numbers]]
    lossless: bool
    temperature: Number
    top_p: Number
    top_k: Count
    max_new_tokens: Count
    batch_size: Count
    mode: Literal["decode", "replay"]
    bootstrap_samples: Count
    target: str
    drafter: str
    device: str
    dtype: str
    made: Made
    recipe: str

    @model_validator(mode="after")
    def _agree(self) -> "Acceptance":
        for key, name in (("contender", self.contender), ("baseline", self.baseline)):
            if name not in self.contenders:
                raise ValueError(f"{key}: {name!r} is not under contenders")
        for part in ("benchmarks", "categories", "turns"):
            for name, numbers in getattr(self, part).items():
                if numbers.keys() != self.contenders.keys():
                    raise ValueError(f"{part}.{name}: not the contenders listed under contenders")
        return self


# generations.jsonl


class Answer(Shape):
    """Whose answer a line holds, and to which turn; see `generation_log`."""

    contender: Text
    benchmark: Text
    category: Text | None
    conversation_id: Text
    turn: Count


class Record(Answer):
    """A line with its rounds."""

    accepted_per_round: list[Count]
    tree_nodes: list[Count]
    last_round_cut: bool

    @model_validator(mode="after")
    def _agree(self) -> "Record":
        if len(self.tree_nodes) != len(self.accepted_per_round):
            raise ValueError("accepted_per_round and tree_nodes differ in length")
        if any(accepted >= nodes for accepted, nodes in zip(self.accepted_per_round, self.tree_nodes, strict=True)):
            raise ValueError("a round of accepted_per_round exceeds its tree_nodes")
        return self


class ShownRecord(Record):
    """A line of the main contender."""

    question: Text
    token_texts: list[Text]

    @model_validator(mode="after")
    def _whole(self) -> "ShownRecord":
        tokens = 1 + sum(self.accepted_per_round) + len(self.accepted_per_round) - self.last_round_cut
        if len(self.token_texts) != tokens:
            raise ValueError(f"token_texts: {len(self.token_texts)} tokens, but the rounds make {tokens}")
        return self


# metrics.jsonl


class MetricsLine(Shape):
    step: Count
    loss: Number
    accuracy: Annotated[list[Number], Field(min_length=1)]
    simulated_tau: Number
    lr: Number
    validation_loss: Number = 0.0  # lines without validation lack both
    validation_simulated_tau: Number = 0.0
