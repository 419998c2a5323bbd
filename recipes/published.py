"""The training that each drafter was published with, where it differs from the defaults, which are EAGLE-3's."""

from typing import Any

from draftsmith.recipes.sections.drafter import MOST_SPECIALISTS, DrafterSection
from draftsmith.recipes.sections.train import TrainSection

HASS_TRAINING = {
    "step_weight": 1.0,
    "token_loss": 0.1,
    "feature_loss": 1.0,
    "feature_noise": 0.2,
    "detach_features": True,
}


# ViSpec's second stage as its code has it: 10 times the L1 distance of two distributions, which is 20 times their total
# variation, and 0.1 times the ranking loss, averaged over two passes: half of both at each. No loss on features. Its
# paper (arXiv 2509.15235) names a cross-entropy.
VISPEC_TRAINING: dict[str, Any] = {
    "ttt_steps": 2,
    "step_weight": 1.0,
    "token_objective": "total_variation",
    "token_loss": 10.0,
    "rank_loss": 0.05,
    "feature_noise": 0.2,
}


def published_training(drafter: dict[str, Any]) -> dict[str, Any]:
    """Keys of `train` in which a drafter's publication differs from the defaults, which are EAGLE-3's.

    Args:
        drafter: the recipe's section before validation.
    """
    kind, fused = drafter.get("kind"), drafter.get("base") == "eagle3"
    if kind == "eagle":
        return {"ttt_steps": 1, **HASS_TRAINING}
    per, count = drafter.get("positions_per_specialist"), drafter.get("specialists")
    if kind == "vispec" and per is None and count is None:
        return {} if fused else VISPEC_TRAINING
    if kind not in ("poss", "vispec"):
        return {}
    per, count = 2 if per is None else per, 4 if count is None else count
    # A value that is not a count is reported at its own key; a step number from it would repeat the report.
    countable = all(type(each) is int and 1 <= each <= MOST_SPECIALISTS for each in (per, count))
    steps = {"ttt_steps": per * count} if countable else {}
    if fused:
        return {"detach_features": "specialists"} | steps
    return (HASS_TRAINING if kind == "poss" else VISPEC_TRAINING) | steps


# Settings of PosS's own version over EAGLE-3 that differ from the defaults here.
POSS_EAGLE3: dict[str, Any] = {"step_weight": 0.9, "detach_features": False}


def other_than_published(drafter: DrafterSection, train: TrainSection) -> str | None:
    """A sentence about losses that differ from the drafter's publication; None if all agree.

    It warns users who change the drafter's kind in a recipe that names another kind's losses, as resolved recipes do.
    The number of unroll steps is a free choice, but an EAGLE-1 drafter with more than one is HASS.
    """
    defaults = TrainSection(**published_training(drafter.model_dump()))
    published = {key: getattr(defaults, key) for key in (*HASS_TRAINING, "top_k_loss", "token_objective", "rank_loss")}
    name = drafter.kind + " over eagle3" * (drafter.over == "eagle3")
    if name == "poss over eagle3":
        published |= {key: value for key, value in POSS_EAGLE3.items() if getattr(train, key) != published[key]}
    if drafter.kind == "eagle" and train.ttt_steps > 1:
        name = f"HASS (eagle with train.ttt_steps {train.ttt_steps})"
        published["top_k_loss"] = 1.0
    if train.ttt_steps == 1:  # neither has any effect on a single step
        del published["step_weight"], published["detach_features"]
    others = [
        f"train.{key} {plain(given)} (published {plain(value)})"
        for key, value in published.items()
        if (given := getattr(train, key)) != value
    ]
    return f"not as published for {name}: {', '.join(others)}" if others else None


def plain(value: float | bool | str | list[float]) -> str:
    return str(value).lower() if isinstance(value, (bool, str, list)) else f"{value:g}"
