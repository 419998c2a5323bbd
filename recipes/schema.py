"""A recipe: its sections (`recipes.sections`), what they must agree on, and the paths of a run's files.

Only the scripts' builders see the recipe: models, losses and loops take plain keyword arguments.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, model_validator

from draftsmith.recipes.files.prompt_date import KeptDate
from draftsmith.recipes.sections.base import ImpossibleSettings, Section, as_list
from draftsmith.recipes.sections.data import DataSection
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.recipes.sections.eval import EvalSection, ExportSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import ClassifierSection, LabelSection, TrainSection, published_training

PICTURE_PROMPTS, SELF_PROMPTS = "prompts.jsonl", "self_prompts.jsonl"


class RunPath:
    """A path of a run: what the recipe says under `key`, or else the file or folder `name` in output_dir."""

    def __init__(self, name: str, key: str | None = None):
        self.name, self.key = name, key

    def __get__(self, recipe: Any, _: type) -> Path:
        given = attrgetter(self.key)(recipe) if self.key else None
        return Path(given or Path(recipe.output_dir) / self.name)


class Recipe(Section):
    model_config = ConfigDict(ignored_types=(RunPath,))

    output_dir: str
    """Folder for everything that a run writes."""
    target: TargetSection
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    labels: LabelSection = LabelSection()
    classifier: ClassifierSection = ClassifierSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()

    conversations_path = RunPath("conversations.jsonl", "data.conversations")
    picture_prompts_path = RunPath(PICTURE_PROMPTS, "data.reprompt.out")
    self_prompts_path = RunPath(SELF_PROMPTS)
    training_rejects_path = RunPath("conversations.training_rejects.jsonl")  # without a training row, with the reason
    contamination_path = RunPath("contamination.jsonl")  # training conversations with questions of eval.prompts
    draft_vocab_path = RunPath("draft_vocab.safetensors")
    own_counts_path = RunPath("token_counts.safetensors")  # of supervised positions, as rank-vocab writes them
    token_counts_path = RunPath("token_counts.safetensors", "eval.token_counts")
    sam_path = RunPath("sam.safetensors", "data.sam.out")  # sorted corpus
    states_dir = RunPath("states", "data.states")
    checkpoints_dir = RunPath("checkpoints")
    metrics_path = RunPath("metrics.jsonl")  # a JSON line per logged training step
    drafter_dir = RunPath("drafter")
    eval_drafter_dir = RunPath("drafter", "eval.drafter")
    imported_dir = RunPath("imported")  # our copies of foreign drafters
    labelled_trees_path = RunPath("labelled_trees.safetensors", "labels.out")
    classifier_dir = RunPath("c2t", "classifier.out")
    planner_costs_path = RunPath("planner_costs.json")
    eval_out = RunPath("eval", "eval.out")

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        """Fills missing keys of `train` with the drafter's published settings."""
        drafter, train = values.get("drafter") or {}, values.get("train") or {}
        if not isinstance(drafter, dict) or not isinstance(train, dict):
            return values  # validation reports it
        return {**values, "train": published_training(drafter) | train}

    @model_validator(mode="before")
    @classmethod
    def _own_prompts(cls, values: Any) -> Any:
        """In data.prompts, `self` stands for the file of self-prompt; if nothing is given, that of reprompt is read."""
        data, output = values.get("data") or {}, values.get("output_dir")
        if not isinstance(data, dict) or not isinstance(output, str):
            return values
        prompts, reprompt = data.get("prompts"), data.get("reprompt")
        if not prompts and isinstance(reprompt, dict) and reprompt.get("sources") is not None:
            prompts = reprompt.get("out") or str(Path(output) / PICTURE_PROMPTS)
        own = str(Path(output) / SELF_PROMPTS)
        if isinstance(prompts, list):
            prompts = [own if name == "self" else name for name in prompts]
        prompts = own if prompts == "self" else prompts
        return values if prompts == data.get("prompts") else {**values, "data": {**data, "prompts": prompts}}

    @model_validator(mode="after")
    def _trainable(self) -> "Recipe":
        drafter, train, problems = self.drafter, self.train, []
        if train.keep_best is not None and not train.validation_conversations:
            problems.append("train.keep_best: needs validation conversations, but train.validation_conversations is 0")
        elif train.keep_best == "replay_tau" and not train.eval_replay:
            problems.append("train.keep_best: replay_tau needs train.eval_replay; set that, or take simulated_tau")
        if train.max_steps is not None and train.warmup_steps >= train.max_steps:
            problems.append(
                f"train.warmup_steps: {train.warmup_steps:,} is not shorter than the run of {train.max_steps:,} steps: "
                "the learning rate never reaches train.learning_rate"
            )
        if drafter.lora is not None and train.zero_stage:
            problems.append("drafter.lora: its few weights are not trained under ZeRO: leave train.zero_stage out")
        if train.feature_loss and drafter.extends == "eagle3":
            problems.append(
                "train.feature_loss: the output of EAGLE-3's layer is not a feature of the target and cannot be "
                "compared with one: set it to 0, or take kind eagle, or another over eagle"
            )
        if not (train.token_loss or train.feature_loss or train.top_k_loss or train.rank_loss):
            problems.append("train.token_loss: all loss weights are 0: set one above 0")
        weights = train.step_weight
        if isinstance(weights, list) and (len(weights) != train.ttt_steps or not any(weights)):
            problems.append(
                f"train.step_weight: {weights}; give each of the {train.ttt_steps} unroll steps a number, and one of "
                "them more than 0"
            )
        if train.detach_features == "specialists" and not drafter.specialised:
            problems.append(
                f"train.detach_features: specialists, but kind {drafter.kind} has none: set it to true (HASS) or false"
            )
        first = (drafter.specialist_count - 1) * drafter.positions  # drafted by the last specialist, counted from 0
        if drafter.specialised and train.ttt_steps <= first:
            problems.append(
                f"train.ttt_steps: {train.ttt_steps} steps train no further than position {train.ttt_steps}, and the "
                f"last of {drafter.specialist_count} specialists of {drafter.positions} each would begin at position "
                f"{first + 1} and learn nothing: set it to {first + 1} or more, or drafter.specialists to less"
            )
        if problems:
            raise ImpossibleSettings(problems)
        return self

    @model_validator(mode="after")
    def _dated(self) -> "Recipe":
        others = self.conversations_path.parent, self.states_dir.parent
        self.target._kept_date = KeptDate(Path(self.output_dir), others)
        return self

    def keep_date(self) -> None:
        """From now on, the date of prompts is kept in output_dir once it is asked for."""
        if self.target._kept_date is not None:
            self.target._kept_date.writes = True

    @property
    def reprompts(self) -> bool:
        """Whether the prompts for training are those that reprompt writes."""
        return self.data.reprompt.sources is not None and str(self.picture_prompts_path) in as_list(self.data.prompts)

    @property
    def prompts_itself(self) -> bool:
        """Whether the target writes prompts for training."""
        return str(self.self_prompts_path) in as_list(self.data.prompts)

    @property
    def static_sams(self) -> list[Path]:
        sections = [each for contender in self.eval.contenders for each in (contender.sam, contender.router)]
        return [Path(section.static) for section in sections if section is not None and section.static is not None]

    @property
    def measures_drafter(self) -> bool:
        """Whether a contender drafts by eval.drafter."""
        others = any(each.drafts_by_drafter and each.drafter is None for each in self.eval.also)
        return others or self.eval.drafts_by_drafter

    @property
    def classifier_rows_path(self) -> Path:
        return Path(self.classifier.rows or self.labelled_trees_path)

    def export_dir(self, engine: str) -> Path:
        return Path(self.export.out or Path(self.output_dir) / "export" / engine)
