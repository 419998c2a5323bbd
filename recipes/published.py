"""The training that each drafter was published with, where it differs from the defaults, which are EAGLE-3's."""

from typing import Any

from draftsmith.recipes.sections.drafter import MOST_SPECIALISTS

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
    """Keys of `train` in which the publication of `drafter`, a section before validation, differs from the defaults."""
    kind, fused = drafter.get("kind"), drafter.get("base") == "eagle3"
    if kind == "eagle":
        return {"ttt_steps": 1, **HASS_TRAINING}
    if kind not in ("poss", "vispec"):
        return {}
    training = {} if fused else HASS_TRAINING if kind == "poss" else VISPEC_TRAINING
    per, count = drafter.get("positions_per_specialist"), drafter.get("specialists")
    if kind == "vispec" and per is None and count is None:
        return training
    per, count = 2 if per is None else per, 4 if count is None else count
    # A value that is not a count is reported at its own key; a step number from it would repeat the report.
    countable = all(type(each) is int and 1 <= each <= MOST_SPECIALISTS for each in (per, count))
    steps = {"ttt_steps": per * count} if countable else {}
    return training | ({"detach_features": "specialists"} if fused else {}) | steps
