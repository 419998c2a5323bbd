"""Schemas of the files that the report reads. Files are checked on reading; the page relies on it.

Only keys that the report shows are checked, strictly: a number given as text is an error. Other keys pass.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, model_validator

from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.schema import TreeSection

# Characters that must not be on a page: controls, lone surrogates, non-characters, and bidirectional controls.
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)

FileCount = Annotated[int, Field(ge=0, le=10**15)]
FileNumber = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]  # farther out, axes cannot be drawn
Bounds = Annotated[list[FileNumber], Field(min_length=2, max_length=2)] | None
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


class FileShape(BaseModel):
    model_config = ConfigDict(strict=True)


SomeShape = TypeVar("SomeShape", bound=FileShape)


# acceptance.json


class SourceShares(FileShape):
    """How much of the drafting one source of a proposer did."""

    rounds: FileNumber
    accepted: FileNumber


class Numbers(FileShape):
    """One contender's numbers, in total or for a part."""

    prompts: FileCount
    answers: FileCount
    rounds: FileCount
    new_tokens: FileCount
    tau: FileNumber | None
    tau_interval: Bounds
    accepted_per_round: FileNumber | None
    accepted_histogram: list[FileCount]
    acceptance_by_position: list[FileNumber]
    acceptance_by_position_interval: list[Bounds]
    tree_nodes_per_round: FileNumber | None
    tree_nodes_per_round_interval: Bounds
    wasted_nodes_per_round: FileNumber | None
    wasted_nodes_per_round_interval: Bounds
    draft_calls_per_round: FileNumber | None
    draft_calls_per_round_interval: Bounds
    draft_milliseconds_per_call: FileNumber | None
    verify_milliseconds_per_round: FileNumber | None
    tokens_per_second: Annotated[FileNumber, Field(ge=0)] | None
    speedup: FileNumber | None
    speedup_interval: Bounds
    mean_prompt_speedup: FileNumber | None
    mean_prompt_speedup_interval: Bounds
    tau_ratio: FileNumber | None
    tau_ratio_interval: Bounds
    speed_ratio: FileNumber | None
    speed_ratio_interval: Bounds
    overhead_share: FileNumber | None
    time_share: dict[Literal["draft", "verify", "other"], FileNumber | None]
    predicted_speedup: FileNumber | None
    matches_target: bool | None
    matching_share: FileNumber | None = None  # older files lack these
    fastest_ratio: FileNumber | None = None
    fastest_ratio_interval: Bounds = None
    inner_tau: FileNumber | None = None
    inner_tau_interval: Bounds = None
    drafted_by: dict[str, SourceShares] = {}
    total_variation: FileNumber | None = None
    total_variation_interval: Bounds = None

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


class Tree(FileShape):
    policy: str
    vocab_size: FileCount | None


class ContenderNumbers(Numbers):
    """One contender's total numbers and description."""

    proposer: str | None
    drafter: str | None
    tree: Tree | None
    lossless: bool = True  # older files lack it
    quantization: str | None = None  # of a row in another precision than the recipe's


class DataFile(FileShape):
    file: str
    sha256: str


class Made(FileShape):
    date: str
    hardware: str
    command: list[str]
    commit: str | None
    versions: dict[str, str]
    data: dict[str, DataFile]


class AcceptanceFile(FileShape):
    contender: str
    baseline: str
    contenders: dict[str, ContenderNumbers]
    benchmarks: dict[str, dict[str, Numbers]]
    categories: dict[str, dict[str, Numbers]]
    turns: dict[Literal["1", "2"], dict[str, Numbers]]
    lossless: bool
    temperature: FileNumber
    top_p: FileNumber
    top_k: FileCount
    max_new_tokens: FileCount
    batch_size: FileCount
    mode: Literal["decode", "replay"]
    bootstrap_samples: FileCount
    target: str
    drafter: str
    device: str
    dtype: str
    made: Made
    recipe: str
    chosen_trees: dict[str, TreeSection] = {}  # by policy auto, for contenders as the recipe names them

    @model_validator(mode="after")
    def _agree(self) -> "AcceptanceFile":
        for key, name in (("contender", self.contender), ("baseline", self.baseline)):
            if name not in self.contenders:
                raise ValueError(f"{key}: {name!r} is not under contenders")
        for part in ("benchmarks", "categories", "turns"):
            for name, numbers in getattr(self, part).items():
                if numbers.keys() != self.contenders.keys():
                    raise ValueError(f"{part}.{name}: not the contenders listed under contenders")
        return self


# generations.jsonl


class NamedPicture(FileShape):
    """A picture of a prompt."""

    path: Text
    sha256: Text | None = None


class AnswerLine(FileShape):
    """Whose answer a line holds, and to which turn; see `generation_log`."""

    contender: Text
    benchmark: Text
    category: Text | None
    conversation_id: Text
    turn: FileCount
    pictures: list[NamedPicture] = []
    image: NamedPicture | None = None


class Record(AnswerLine):
    """A line with its rounds."""

    accepted_per_round: list[FileCount]
    tree_nodes: list[FileCount]
    last_round_cut: bool
    drafted_by: list[dict[str, FileCount]] = []

    @model_validator(mode="after")
    def _agree(self) -> "Record":
        if self.drafted_by and [sum(each.values()) for each in self.drafted_by] != self.accepted_per_round:
            raise ValueError("drafted_by does not add up to accepted_per_round")
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


class MetricsLine(FileShape):
    step: FileCount
    loss: FileNumber
    accuracy: Annotated[list[FileNumber], Field(min_length=1)]
    simulated_tau: FileNumber
    lr: FileNumber
    validation_loss: FileNumber = 0.0  # lines without validation lack both
    validation_simulated_tau: FileNumber = 0.0
