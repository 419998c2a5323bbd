"""Trains the C2T classifier for train/c2t.py, which describes the method. Shapes: R rows."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from draftsmith.data_gen.trees.labelled_trees import MANIFEST, Trees, TreesManifest, check_rows, read_trees
from draftsmith.models.c2t import KIND, C2tClassifier, C2tConfig
from draftsmith.models.checkpoint import provenance
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, collected
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.loader import dump_recipe, output_problem
from draftsmith.recipes.schema import ClassifierSection, Recipe

THRESHOLD = 0.5  # on the confidence, for the recall and the positive rate that select an epoch
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEARNING_RATE, CALIBRATION_RATE, CALIBRATION_SHARE = 1e-3, 1e-4, 0.1
ROWS_AT_ONCE = 1 << 18  # that are classified together


def main(command: Command) -> None:
    recipe, section = command.recipe, command.recipe.classifier
    rows, out = recipe.classifier_rows_dir, recipe.classifier_dir
    classifier, manifest = checked(recipe)
    if command.plan:
        print_classifier_plan(section, manifest, rows, out)
        return
    start = None if classifier is None else classifier.config
    trees = read_trees(rows, manifest)
    trained = train_classifier(section, manifest, trees, classifier, print)
    for line in trained.beta_lines:
        print(line)
    if start is not None and start.negative_ratio != section.negative_ratio:
        print(
            f"note: {section.init_from} was trained with negative_ratio {start.negative_ratio}, this one with "
            f"{section.negative_ratio}: the same beta lets other nodes pass"
        )
    metrics = "".join(json.dumps(line) + "\n" for line in trained.metrics)
    made_by = provenance({"rows": rows / MANIFEST}) | {"init_from": section.init_from}
    beside = {
        "recipe.yaml": dump_recipe(recipe),
        "provenance.json": json.dumps(made_by, indent=2) + "\n",
        "metrics.jsonl": metrics,
    }
    trained.classifier.save(out, beside)
    best = trained.best
    print(f"{out}: epoch {trained.epoch}, recall {best['recall']:.4f}, positive rate {best['positive_rate']:.4f}")
    if best["recall"] == 0:
        print(
            f"note: no accepted node of the validation trees has a confidence of {THRESHOLD}, so at such a beta trees "
            "are their roots alone; train for more classifier.epochs, or label more answers"
        )
    if still_falls(trained.metrics):
        print("note: the validation loss still falls; more classifier.epochs may be worth their seconds")


def checked(recipe: Recipe) -> tuple[C2tClassifier | None, TreesManifest]:
    """(the classifier to calibrate or None, the rows' manifest), before any row is read.

    Raises:
        UserError: classifier.init_from, classifier.rows or classifier.out cannot be used; it lists all problems.
    """
    section, rows = recipe.classifier, recipe.classifier_rows_dir
    classifier, manifest = None, None
    problems: list[str] = []
    if section.init_from is not None:
        with collected(problems):
            classifier = C2tClassifier.load(section.init_from)
    if classifier is not None and section.hidden != classifier.config.hidden:
        problems.append(
            f"classifier.hidden: {section.hidden}, but the classifier in {section.init_from} has "
            f"{classifier.config.hidden}; set classifier.hidden={classifier.config.hidden}"
        )
    with collected(problems):
        manifest = check_rows(
            rows, TreesManifest.read(rows), None if classifier is None else classifier.config.entropy_over
        )
    if problem := problem_of_out(recipe.classifier_dir):
        problems.append(f"classifier.out: {problem}")
    if problems or manifest is None:
        raise UserError(problems)
    return classifier, manifest


def problem_of_out(out: Path) -> str | None:
    """Why no classifier can be written to `out`: it cannot be made, or holds something else; None: it can."""
    if (problem := output_problem(out, folder=True)) is not None or not (out.exists() and any(out.iterdir())):
        return problem
    try:
        kind = parse_json((out / "config.json").read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    return None if kind == KIND else f"{out} holds something other than a classifier; name another folder"


def share_of(section: ClassifierSection) -> float:
    """Share of the trees that is read."""
    return section.share or (CALIBRATION_SHARE if section.init_from is not None else 1.0)


def rate_of(section: ClassifierSection) -> float:
    return section.learning_rate or (CALIBRATION_RATE if section.init_from is not None else LEARNING_RATE)


def split(trees: int, section: ClassifierSection) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of the trees to train on, numbers of those to validate on), drawn by the seed.

    Raises:
        UserError: there are too few trees for both.
    """
    order = torch.randperm(trees, generator=torch.Generator().manual_seed(section.seed))
    order = order[: math.ceil(share_of(section) * trees)]
    kept_out = math.ceil(section.validation_share * len(order))
    if kept_out >= len(order):
        raise UserError(
            f"{len(order):,} of {trees:,} trees are too few to train on some and keep others for validation; label "
            "more answers, or set classifier.share=1"
        )
    return order[kept_out:], order[:kept_out]


def negatives_of(accepted: int, rejected: int, ratio: float | None) -> int:
    """How many rejected rows an epoch draws."""
    return rejected if ratio is None else min(rejected, max(1, round(ratio * accepted)))


def print_classifier_plan(section: ClassifierSection, manifest: TreesManifest, rows: Path, out: Path) -> None:
    train_on, kept_out = split(manifest.total("trees"), section)
    of_all = len(train_on) / manifest.total("trees")
    accepted = round(manifest.total("accepted") * of_all)
    rejected = round((manifest.total("rows") - manifest.total("accepted")) * of_all)
    drawn = accepted + negatives_of(accepted, rejected, section.negative_ratio)
    steps = section.epochs * -(-drawn // section.batch_size)
    print(f"reads        {manifest.total('rows'):,} rows of {manifest.total('trees'):,} trees in {rows}")
    print(f"trees        {len(train_on):,} to train on, {len(kept_out):,} for validation")
    print(
        f"an epoch     about {accepted:,} accepted and {drawn - accepted:,} rejected rows "
        f"(classifier.negative_ratio: {section.negative_ratio})"
    )
    print(f"steps        about {steps:,} of {section.batch_size:,} rows, learning rate {rate_of(section):g}")
    print(f"begins with  {section.init_from or f'random weights, hidden {section.hidden}'}")
    print(f"writes       {out}")


@dataclass(frozen=True)
class Trained:
    """A trained classifier: that of the chosen epoch."""

    classifier: C2tClassifier
    epoch: int
    metrics: list[dict[str, Any]]  # one line per epoch
    beta_lines: list[str]  # a table of the rates at each threshold

    @property
    def best(self) -> dict[str, Any]:
        return self.metrics[self.epoch - 1]


def train_classifier(
    section: ClassifierSection,
    manifest: TreesManifest,
    trees: Trees,
    start: C2tClassifier | None,
    say: Callable[[str], object],
) -> Trained:
    """Trains on `trees`, which `manifest` describes.

    Args:
        start: the classifier to calibrate; None: random weights.
        say: prints a line.

    Raises:
        UserError: the training trees or the validation trees have no accepted node, or only accepted ones; or the loss
            diverges.
    """
    train_on, kept_out = (trees.chosen(numbers) for numbers in split(trees.count, section))
    for kind, part in (("train on", train_on), ("validate on", kept_out)):
        if not 0 < int(part.accepted.sum()) < part.rows:
            raise UserError(
                f"of {part.rows:,} rows of {part.count:,} trees to {kind} none were accepted, or all; label more "
                "answers, or choose another classifier.seed, share or validation_share"
            )
    config = C2tConfig(
        section.hidden, manifest.made_of["entropy_over"], section.negative_ratio, manifest.made_of.get("drafter") or {}
    )
    with torch.random.fork_rng():
        torch.manual_seed(section.seed)
        classifier = C2tClassifier(config)
    if start is not None:
        classifier.load_state_dict(start.state_dict())
    # With a higher rate Adam itself overflows, with another error; training diverges in any case.
    optimizer = torch.optim.Adam(classifier.parameters(), lr=min(rate_of(section), 1e30))
    features, accepted = train_on.features, train_on.accepted
    say(
        f"{train_on.rows:,} rows of {train_on.count:,} trees to train on, {kept_out.rows:,} of {kept_out.count:,} for "
        f"validation; {sum(p.numel() for p in classifier.parameters())} parameters"
    )
    say("epoch  rows       train loss  validation loss  recall  positive rate  precision")
    metrics: list[dict[str, Any]] = []
    best: dict[str, torch.Tensor] = {}
    chosen = 0
    for epoch in range(1, section.epochs + 1):
        loss_sum, rows = 0.0, 0
        batches = epoch_batches(accepted, section, epoch)
        for at in Bar(batches, desc=f"epoch {epoch}", unit="batch", leave=False):
            losses = functional.binary_cross_entropy_with_logits(classifier(features[at]), accepted[at].float())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            loss_sum, rows = loss_sum + float(losses.detach()) * len(at), rows + len(at)
        line = {"epoch": epoch, "rows": rows, "train_loss": loss_sum / rows, **validate(classifier, kept_out, section)}
        if not math.isfinite(line["train_loss"] + line["validation_loss"]):
            raise UserError(
                f"the loss is not finite after epoch {epoch}; lower classifier.learning_rate ({rate_of(section):g})"
            )
        metrics.append(line)
        say(
            f"{epoch:>5}  {rows:>9,}  {line['train_loss']:>10.4f}  {line['validation_loss']:>15.4f}  "
            f"{line['recall']:>6.4f}  {line['positive_rate']:>13.4f}  {line['precision']:>9.4f}"
        )
        if not chosen or better(line, metrics[chosen - 1]):
            chosen = epoch
            best = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    classifier.load_state_dict(best)
    classifier.eval().requires_grad_(False)
    return Trained(classifier, chosen, metrics, beta_lines(classifier, kept_out))


def better(line: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether an epoch is better than an earlier one: by higher recall, then by lower positive rate."""
    return (line["recall"], -line["positive_rate"]) > (than["recall"], -than["positive_rate"])


def still_falls(metrics: list[dict[str, Any]]) -> bool:
    """Whether the last epoch's validation loss is the lowest by more than a thousandth."""
    losses = [line["validation_loss"] for line in metrics]
    return len(losses) > 1 and losses[-1] < 0.999 * min(losses[:-1])


def epoch_batches(accepted_R: torch.Tensor, section: ClassifierSection, epoch: int) -> Sequence[torch.Tensor]:
    """Row numbers of an epoch's batches: all accepted rows and newly drawn rejected ones, shuffled."""
    chance = torch.Generator().manual_seed(section.seed * 1_000_003 + epoch)
    positive, negative = accepted_R.nonzero()[:, 0], (~accepted_R).nonzero()[:, 0]
    count = negatives_of(len(positive), len(negative), section.negative_ratio)
    drawn = negative[torch.randperm(len(negative), generator=chance)[:count]]
    rows = torch.cat((positive, drawn))
    return rows[torch.randperm(len(rows), generator=chance)].split(section.batch_size)


def confidence_of(classifier: C2tClassifier, trees: Trees) -> torch.Tensor:
    """Confidence C of each row, [R]."""
    return torch.cat([classifier.confidence(part) for part in trees.features.split(ROWS_AT_ONCE)])


def validate(classifier: C2tClassifier, trees: Trees, section: ClassifierSection) -> dict[str, float]:
    """Loss under the distribution of sub-sampled rows; recall, positive rate and precision over all rows. The loss is
    NaN if a confidence is not finite: training has diverged."""
    accepted, confidence = trees.accepted, confidence_of(classifier, trees)
    if not confidence.isfinite().all():
        return {"validation_loss": math.nan, **rates(confidence, accepted, THRESHOLD)}
    loss = functional.binary_cross_entropy(confidence, accepted.float(), reduction="none").double()
    positives, negatives = int(accepted.sum()), int((~accepted).sum())
    # Each rejected row is weighted by the probability that it is drawn.
    drawn = negatives_of(positives, negatives, section.negative_ratio)
    total = float(loss[accepted].sum()) + drawn / negatives * float(loss[~accepted].sum())
    return {"validation_loss": total / (positives + drawn), **rates(confidence, accepted, THRESHOLD)}


def rates(confidence_R: torch.Tensor, accepted_R: torch.Tensor, threshold: float) -> dict[str, float]:
    """Shares of rows that pass the threshold: of the accepted rows (recall), of all (positive_rate); precision is the
    share of accepted rows among those that pass."""
    passed = confidence_R >= threshold
    hits, count = int((passed & accepted_R).sum()), int(passed.sum())
    return {
        "recall": hits / int(accepted_R.sum()),
        "positive_rate": count / len(passed),
        "precision": hits / max(1, count),
    }


def beta_lines(classifier: C2tClassifier, trees: Trees) -> list[str]:
    """A table of the rates at each beta, over uncut validation trees, without the cuts of decoding."""
    confidence = confidence_of(classifier, trees)
    lines = ["beta   recall  positive rate  precision"]
    for beta in BETAS:
        rate = rates(confidence, trees.accepted, beta)
        lines.append(f"{beta:<5}  {rate['recall']:.4f}  {rate['positive_rate']:>13.4f}  {rate['precision']:>9.4f}")
    return lines
