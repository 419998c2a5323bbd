"""A recipe: its sections (`recipes.sections`), what they must agree on, and the paths of a run's files.

Only the scripts' builders see the recipe: models, losses and loops take plain keyword arguments.
"""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from draftsmith.recipes.files.prompt_date import KeptDate
from draftsmith.recipes.published import published_training
from draftsmith.recipes.sections.base import ImpossibleSettings, Section, as_list
from draftsmith.recipes.sections.data import DataSection
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.recipes.sections.eval import EvalSection, ExportSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import ClassifierSection, LabelSection, TrainSection

PICTURE_PROMPTS = "prompts.jsonl"


class Recipe(Section):
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
    def _prompts_of_reprompt(cls, values: Any) -> Any:
        """data.prompts are the file that reprompt writes, if nothing else is given."""
        data, output = values.get("data") or {}, values.get("output_dir")
        reprompt = data.get("reprompt") if isinstance(data, dict) else None
        if not isinstance(reprompt, dict) or reprompt.get("sources") is None or not isinstance(output, str):
            return values
        prompts = reprompt.get("out") or str(Path(output) / PICTURE_PROMPTS)
        return {**values, "data": {**data, "prompts": data.get("prompts") or prompts}}

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

    # Paths, defaults resolved.

    @property
    def conversations_path(self) -> Path:
        return Path(self.data.conversations or Path(self.output_dir) / "conversations.jsonl")

    @property
    def picture_prompts_path(self) -> Path:
        return Path(self.data.reprompt.out or Path(self.output_dir) / PICTURE_PROMPTS)

    @property
    def reprompts(self) -> bool:
        """Whether the prompts for training are those that reprompt writes."""
        return self.data.reprompt.sources is not None and str(self.picture_prompts_path) in as_list(self.data.prompts)

    @property
    def training_rejects_path(self) -> Path:
        """Conversations without a training row, with the reason."""
        return Path(self.output_dir) / "conversations.training_rejects.jsonl"

    @property
    def contamination_path(self) -> Path:
        """Training conversations with questions of eval.prompts, one JSON line each."""
        return Path(self.output_dir) / "contamination.jsonl"

    @property
    def draft_vocab_path(self) -> Path:
        return Path(self.output_dir) / "draft_vocab.safetensors"

    @property
    def token_counts_path(self) -> Path:
        """Counts of each target token in supervised positions. FR-Spec's cuts rank by them."""
        return Path(self.eval.token_counts or Path(self.output_dir) / "token_counts.safetensors")

    @property
    def planner_costs_path(self) -> Path:
        return Path(self.output_dir) / "planner_costs.json"

    @property
    def sam_path(self) -> Path:
        """The sorted corpus that data_gen/build_sam.py writes."""
        return Path(self.data.sam.out or Path(self.output_dir) / "sam.safetensors")

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
    def drafter_dir(self) -> Path:
        return Path(self.output_dir) / "drafter"

    @property
    def states_dir(self) -> Path:
        return Path(self.data.states or Path(self.output_dir) / "states")

    @property
    def labelled_trees_path(self) -> Path:
        return Path(self.labels.out or Path(self.output_dir) / "labelled_trees.safetensors")

    @property
    def classifier_rows_path(self) -> Path:
        return Path(self.classifier.rows or self.labelled_trees_path)

    @property
    def classifier_dir(self) -> Path:
        return Path(self.classifier.out or Path(self.output_dir) / "c2t")

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.output_dir) / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON line per logged training step."""
        return Path(self.output_dir) / "metrics.jsonl"

    @property
    def eval_drafter_dir(self) -> Path:
        return Path(self.eval.drafter or self.drafter_dir)

    @property
    def eval_out(self) -> Path:
        """Folder of acceptance.json, generations.jsonl and report.html."""
        return Path(self.eval.out or Path(self.output_dir) / "eval")

    @property
    def imported_dir(self) -> Path:
        """Our copies of the foreign drafters that the recipe names."""
        return Path(self.output_dir) / "imported"

    def export_dir(self, engine: str) -> Path:
        return Path(self.export.out or Path(self.output_dir) / "export" / engine)
