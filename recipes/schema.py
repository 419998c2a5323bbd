"""A recipe: its sections (`recipes.sections`), and what they must agree on.

Only the scripts' builders see the recipe: models, losses and loops take plain keyword arguments.
"""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from draftsmith.recipes.files.prompt_date import KeptDate
from draftsmith.recipes.paths import PICTURE_PROMPTS, RunPaths
from draftsmith.recipes.published import plain, published_training
from draftsmith.recipes.sections.base import ImpossibleSettings


def _with_picture_prompts(values: dict[str, Any]) -> dict[str, Any]:
    data, output = values.get("data") or {}, values.get("output_dir")
    reprompt = data.get("reprompt") if isinstance(data, dict) else None
    if not isinstance(reprompt, dict) or reprompt.get("sources") is None or not isinstance(output, str):
        return values
    prompts = reprompt.get("out") or str(Path(output) / PICTURE_PROMPTS)
    return {**values, "data": {**data, "prompts": data.get("prompts") or prompts}}


class Recipe(RunPaths):
    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        """Fills missing keys of `train` with the drafter's published settings, and data.prompts with the file that
        reprompt writes."""
        if not isinstance(values, dict):
            return values
        values = _with_picture_prompts(values)
        drafter, train = values.get("drafter") or {}, values.get("train") or {}
        if not isinstance(drafter, dict) or not isinstance(train, dict):
            return values  # validation reports it
        return {**values, "train": published_training(drafter) | train}

    @model_validator(mode="after")
    def _trainable(self) -> "Recipe":
        drafter, train, problems = self.drafter, self.train, []
        if train.keep_best is not None and not train.validation_conversations:
            problems.append("train.keep_best: needs validation conversations, but train.validation_conversations is 0")
        elif train.keep_best == "replay_tau" and not train.eval_replay:
            problems.append(
                "train.keep_best: replay_tau needs train.eval_replay, the number of conversations to replay; set that, "
                "or take simulated_tau"
            )
        if train.max_steps is not None and train.warmup_steps >= train.max_steps:
            problems.append(
                f"train.warmup_steps: {train.warmup_steps:,} is not shorter than the run of {train.max_steps:,} steps "
                "(train.max_steps): the learning rate never reaches train.learning_rate"
            )
        if drafter.lora is not None and train.zero_stage:
            problems.append("drafter.lora: its few weights are not trained under ZeRO: leave train.zero_stage out")
        if train.feature_loss and drafter.extends == "eagle3":
            problems.append(
                f"train.feature_loss: {train.feature_loss:g}, but the output of EAGLE-3's layer is not a feature of "
                "the target and cannot be compared with one: set it to 0, or take kind eagle, or another over eagle"
            )
        if not (train.token_loss or train.feature_loss or train.top_k_loss or train.rank_loss):
            problems.append(
                "train.token_loss: all loss weights are 0 (token_loss, feature_loss, top_k_loss, rank_loss): set one "
                "above 0"
            )
        if isinstance(train.step_weight, list) and (
            len(train.step_weight) != train.ttt_steps or not any(train.step_weight)
        ):
            problems.append(
                f"train.step_weight: {plain(train.step_weight)}; give each of the {train.ttt_steps} unroll steps a "
                "number, and one of them more than 0"
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
