"""The section `train`: steps, losses, precision and processes; `labels` and `classifier`: C2T's training."""

from typing import Annotated, Any, Literal

from pydantic import Field

from draftsmith.recipes.sections.base import (
    Beam,
    Count,
    CountOrZero,
    Depth,
    Number,
    OrNo,
    Positive,
    PositiveOrZero,
    Section,
    Seed,
    Size,
)
from draftsmith.recipes.sections.drafter import MOST_SPECIALISTS

TokenObjective = Literal[
    "soft_ce", "forward_kl", "hard_ce", "reverse_kl", "total_variation", "log_acceptance", "hybrid"
]


StepWeights = Annotated[list[PositiveOrZero], Field(min_length=1)]
StepWeight = Annotated[Number, Field(gt=0, le=10)] | StepWeights | Literal["acceptance"]
Detach = bool | Literal["specialists"]


class TrainSection(Section):
    max_steps: Count | None = None
    """Optimiser steps. None: as many as `epochs` needs."""
    epochs: Number | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the training conversations, unless max_steps is set. Both None: 1."""
    batch_size: Size = 4
    """Conversations per micro-batch, in each process."""
    gradient_accumulation_steps: Size = 1
    """Micro-batches per optimiser step. Splitting a batch over them changes nothing but memory."""
    packing: bool = False
    """The target reads a micro-batch's conversations in one row without padding, each attending only to itself, as the
    drafter always does. Losses and gradients stay the same; time and memory change."""
    learning_rate: Positive = 1e-4
    """AdamW's learning rate after the warm-up. Small drafters need a higher one."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps of linear warm-up."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """Decay to zero at the last step. A run resumed with another number of steps goes on at its new rate."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's running mean of gradients."""
    adam_beta2: Number = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's running mean of squared gradients."""
    weight_decay: PositiveOrZero = 0.0
    """At every step, weights shrink by this times the learning rate."""
    max_skipped_steps: CountOrZero = 10
    """Steps that a run may skip because of a non-finite gradient; one more stops it."""
    max_grad_norm: Positive = 0.5
    """Limit on the gradient's global norm, or with clip: value on each of its elements."""
    clip: Literal["norm", "value"] = "norm"
    """How gradients are clipped. EAGLE-1, HASS and PosS were published with `value`."""
    ttt_steps: Annotated[int, Field(ge=1, le=MOST_SPECIALISTS**2)] = 7
    """Unroll steps: the depth of the chains trained on. Default: 7 for eagle3, 1 for eagle (more is HASS),
    positions_per_specialist * specialists with specialists, else 2 for vispec, but 7 over eagle3."""
    step_weight: StepWeight = 0.8
    """Weight of unroll step k's loss: step_weight**k, or a list's entry k. `acceptance`: each step's gain in decoding
    (train/loss/step_weights.py; losses do not compare). Default: 0.8 for eagle3 and what extends it, else 1."""
    token_loss: PositiveOrZero = 1.0
    """Weight of `token_objective`, by default the soft cross-entropy with the target's distribution. Default: 1 for
    eagle3 and what extends it, 10 for vispec, else 0.1."""
    feature_loss: PositiveOrZero = 0.0
    """Weight of the smooth L1 distance of drafted features. Default: 1 for eagle and for poss over it, else 0."""
    top_k_loss: PositiveOrZero = 0.0
    """Weight of the cross-entropy over the target's 10 likeliest tokens (HASS: 1)."""
    token_objective: TokenObjective = "soft_ce"
    """What `token_loss` weights (train/loss/losses.py). Default: soft_ce, for vispec total_variation."""
    rank_loss: PositiveOrZero = 0.0
    """Weight of ViSpec's loss on the order of the target's 10 likeliest tokens. Default: 0.05 for vispec, else 0."""
    feature_noise: PositiveOrZero = 0.0
    """Width of the uniform noise on the target's features in the drafter's input, for rows of 512 tokens. Shorter rows
    get more, longer rows less. Default: 0 for eagle3 and what extends it, else 0.2."""
    detach_features: Detach = False
    """Stop gradients through drafted features from each step to the one before (HASS); `specialists`: only where a new
    specialist takes over from the one before (PosS). Default: true for eagle and poss, specialists for poss and
    for vispec with specialists over eagle3, else false."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16"], OrNo] = "auto"
    """`auto`: bf16 on accelerators with native bf16, else no (float32). On CPUs bf16 may be slower."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed's ZeRO: 1 shards AdamW's moments over the processes, 2 also gradients, 3 also weights (not for vispec).
    0: every process holds everything (DistributedDataParallel)."""
    offload_optimizer: bool = False
    """With zero_stage: keep AdamW's moments on the CPU and take its steps there."""
    shard_target: bool = False
    """For targets too large for one device: shard the frozen target's layers over the processes and gather them one at
    a time (DeepSpeed's ZeRO-3, with any zero_stage)."""
    gradient_checkpointing: bool = False
    """Recompute the drafter's layer in the backward pass: less memory, more time, same gradients."""
    seed: Seed = 0
    """Seed of the row order, the initial weights and the noise."""
    save_every_steps: Count = 500
    """Optimiser steps between checkpoints. A run continues from the last one in <output_dir>/checkpoints."""
    keep_checkpoints: Size = 2
    """Number of checkpoints to keep; older ones are deleted."""
    log_every_steps: Count = 10
    """Optimiser steps per line of metrics.jsonl. A line covers all of them."""
    validation_conversations: CountOrZero = 64
    """Conversations kept out of training, at most a fifth of all, chosen by a hash of their id. 0: no validation."""
    validate_every_steps: Count = 200
    """Optimiser steps between validations."""
    eval_replay: CountOrZero = 0
    """Validation conversations to replay with eval.tree after every checkpoint; their acceptance, which equals that of
    decoding, goes to metrics.jsonl. 0 switches it off."""
    keep_best: Literal["simulated_tau", "replay_tau"] | None = None
    """Keep the checkpoint with the highest value of this metric on the validation conversations, and save its drafter
    at the end. replay_tau needs eval_replay; simulated_tau validates every checkpoint. None: the last checkpoint's."""
    trackers: list[str] = ["tensorboard"]
    """accelerate's trackers that also receive metrics.jsonl: tensorboard (in <output_dir>/tensorboard), wandb ..."""


class LabelSection(Section):
    """Labelled draft trees (data_gen/label_trees.py), a C2T classifier's training data."""

    answers: str | None = None
    """Recorded answers along which trees are drafted: a generations.jsonl, or regenerated conversations. Default: the
    conversations that training keeps for validation, because the drafter was trained on the others."""
    max_rows: Count | None = None
    """Stop after the answer that reaches this many rows. None: all answers."""
    top_k: Beam = 10
    """Children per expanded node, and width of the beam."""
    draft_calls: Depth = 11
    """Depth of the trees. top_k 10 and draft_calls 11 give 1,010 nodes below a root."""
    batch_size: Size = 16
    """Answers processed side by side."""
    out: str | None = None
    """File of the rows. Default: <output_dir>/labelled_trees.safetensors."""

    @property
    def nodes(self) -> int:
        """Below a root; fewer if the draft vocabulary has fewer than top_k tokens."""
        return self.top_k + (self.draft_calls - 1) * self.top_k**2


class ClassifierSection(Section):
    """The C2T classifier (train/c2t.py)."""

    rows: str | None = None
    """File that data_gen/label_trees.py wrote. Default: <output_dir>/labelled_trees.safetensors."""
    hidden: Size = 48
    """Width of its one hidden layer. With init_from it is that one's."""
    batch_size: Size = 1024
    """Rows per step."""
    learning_rate: Positive | None = None
    """Adam's learning rate. Default: 1e-3, or 1e-4 with init_from."""
    epochs: Count = 10
    """Passes over the rows. Use more for fewer rows than the paper's nine million."""
    validation_share: Number = Field(default=0.05, gt=0, lt=1)
    """Share of the trees kept for validation, as whole trees."""
    init_from: str | None = None
    """Directory of a trained classifier to calibrate for this target and drafter."""
    share: Number | None = Field(default=None, gt=0, le=1)
    """Share of the trees to read. Default: all, or a tenth with init_from."""
    seed: Seed = 0
    """Seed of the initial weights, the validation trees and the kept rejected rows."""
    out: str | None = None
    """Directory of the classifier. Default: <output_dir>/c2t."""


# The training that each drafter was published with, where it differs from the defaults, which are EAGLE-3's.

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
