"""Trains the C2T classifier for train/c2t.py, which describes the method. Shapes: R rows."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.models.c2t import C2tClassifier, C2tConfig, read_c2t_config
from draftsmith.models.checkpoint import provenance
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.sections.train import ClassifierSection

# Rejected rows for each accepted one; it shifts the scale of the confidence. The paper does not say how many.
NEGATIVES = 10
THRESHOLD = 0.5  # on the confidence, for the recall and the positive rate that select an epoch
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def main(command: Command) -> None:
    recipe, section, out = command.recipe, command.recipe.classifier, command.recipe.classifier_dir
    trees = Trees.read(recipe.classifier_rows_path)
    start = None if section.init_from is None else C2tClassifier.load(section.init_from)
    if (out / "config.json").exists():
        read_c2t_config(out)  # a classifier is replaced, a drafter is not
    if command.plan:
        train_on, kept_out = split(trees, section)
        steps = section.epochs * len(epoch_batches(train_on.accepted, section, 1))
        plan = PlanLines()
        plan.line("reads", str(recipe.classifier_rows_path))
        plan.line("trees", f"{len(train_on.sizes):,} to train on, {len(kept_out.sizes):,} for validation", "counted")
        plan.line("steps", f"{steps:,} of {section.batch_size:,} rows, learning rate {rate_of(section):g}", "exact")
        plan.writes(out)
        return
    classifier, metrics, best = train_classifier(section, trees, start)
    made_by = provenance({"rows": recipe.classifier_rows_path}) | {"init_from": section.init_from}
    beside = {
        "recipe.yaml": dump_recipe(recipe),
        "provenance.json": json.dumps(made_by, indent=2) + "\n",
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics),
    }
    classifier.save(out, beside)
    print(f"{out}: epoch {best['epoch']}, recall {best['recall']:.4f}, positive rate {best['positive_rate']:.4f}")


def rate_of(section: ClassifierSection) -> float:
    return section.learning_rate or (1e-4 if section.init_from is not None else 1e-3)


def split(trees: Trees, section: ClassifierSection) -> tuple[Trees, Trees]:
    """(the trees to train on, those to validate on), drawn by the seed. Raises UserError if either has no accepted
    node, or only accepted ones."""
    share = section.share or (0.1 if section.init_from is not None else 1.0)
    order = torch.randperm(len(trees.sizes), generator=torch.Generator().manual_seed(section.seed))
    order = order[: math.ceil(share * len(order))]
    kept_out = math.ceil(section.validation_share * len(order))
    parts = trees.chosen(order[kept_out:]), trees.chosen(order[:kept_out])
    for kind, part in zip(("train on", "validate on"), parts, strict=True):
        if not 0 < int(part.accepted.sum()) < len(part.accepted):
            raise UserError(
                f"of {len(part.accepted):,} rows of {len(part.sizes):,} trees to {kind} none were accepted, or all; "
                "label more answers, or choose another classifier.seed, share or validation_share"
            )
    return parts


def train_classifier(
    section: ClassifierSection, trees: Trees, start: C2tClassifier | None
) -> tuple[C2tClassifier, list[dict[str, Any]], dict[str, Any]]:
    """(the classifier after its best epoch, a line of metrics for each epoch, the best epoch's). Prints the progress.
    Raises UserError as `split`, or if the loss diverges. `start` is to be calibrated; None: random weights."""
    train_on, kept_out = split(trees, section)
    hidden = section.hidden if start is None else start.config.hidden
    with torch.random.fork_rng():
        torch.manual_seed(section.seed)
        classifier = C2tClassifier(C2tConfig(hidden=hidden, drafter=trees.about["drafter"]))
    if start is not None:
        classifier.load_state_dict(start.state_dict())
    optimizer = torch.optim.Adam(classifier.parameters(), lr=rate_of(section))
    features, accepted = train_on.features, train_on.accepted
    metrics: list[dict[str, Any]] = []
    weights: list[dict[str, torch.Tensor]] = []  # after each epoch
    for epoch in range(1, section.epochs + 1):
        loss_sum, rows = 0.0, 0
        for at in Bar(epoch_batches(accepted, section, epoch), desc=f"epoch {epoch}", unit="batch", leave=False):
            losses = functional.binary_cross_entropy_with_logits(classifier(features[at]), accepted[at].float())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            loss_sum, rows = loss_sum + float(losses.detach()) * len(at), rows + len(at)
        line = {"epoch": epoch, "rows": rows, "train_loss": loss_sum / rows, **validate(classifier, kept_out)}
        if not math.isfinite(line["train_loss"] + line["validation_loss"]):
            raise UserError(f"the loss is not finite after epoch {epoch}; lower classifier.learning_rate")
        measured = ", ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in [*line.items()][2:])
        print(f"epoch {epoch:>3}: {rows:,} rows, {measured}")
        metrics.append(line)
        weights.append({name: tensor.clone() for name, tensor in classifier.state_dict().items()})
    best = max(metrics, key=lambda line: (line["recall"], -line["positive_rate"]))
    classifier.load_state_dict(weights[best["epoch"] - 1])
    classifier.eval().requires_grad_(False)
    print("beta   recall  positive rate  precision, of the validation trees' nodes")
    confidence = classifier.confidence(kept_out.features)
    for beta in BETAS:
        of = rates(confidence, kept_out.accepted, beta)
        print(f"{beta:<5}  {of['recall']:.4f}  {of['positive_rate']:>13.4f}  {of['precision']:>9.4f}")
    return classifier, metrics, best


def epoch_batches(accepted_R: torch.Tensor, section: ClassifierSection, epoch: int) -> Sequence[torch.Tensor]:
    """Row numbers of an epoch's batches: all accepted rows and newly drawn rejected ones, shuffled."""
    chance = torch.Generator().manual_seed(section.seed * 1_000_003 + epoch)
    positive, negative = accepted_R.nonzero()[:, 0], (~accepted_R).nonzero()[:, 0]
    count = negatives_of(len(positive), len(negative))
    drawn = negative[torch.randperm(len(negative), generator=chance)[:count]]
    rows = torch.cat((positive, drawn))
    return rows[torch.randperm(len(rows), generator=chance)].split(section.batch_size)


def negatives_of(accepted: int, rejected: int) -> int:
    """Rejected rows of an epoch."""
    return min(rejected, NEGATIVES * accepted)


def validate(classifier: C2tClassifier, trees: Trees) -> dict[str, float]:
    """Loss under the distribution of sub-sampled rows; recall, positive rate and precision over all rows."""
    accepted, logits = trees.accepted, classifier(trees.features).detach()
    loss = functional.binary_cross_entropy_with_logits(logits, accepted.float(), reduction="none").double()
    positives, negatives = int(accepted.sum()), int((~accepted).sum())
    # Each rejected row is weighted by the probability that it is drawn.
    drawn = negatives_of(positives, negatives)
    total = float(loss[accepted].sum()) + drawn / negatives * float(loss[~accepted].sum())
    return {"validation_loss": total / (positives + drawn), **rates(logits.sigmoid(), accepted, THRESHOLD)}


def rates(confidence_R: torch.Tensor, accepted_R: torch.Tensor, threshold: float) -> dict[str, float]:
    """Shares of rows that pass the threshold: of the accepted rows (recall), of all (positive_rate); precision is the
    share of accepted rows among those that pass."""
    passed = confidence_R >= threshold
    hits, count = int((passed & accepted_R).sum()), int(passed.sum())
    recall, precision = hits / int(accepted_R.sum()), hits / max(1, count)
    return {"recall": recall, "positive_rate": count / len(passed), "precision": precision}
