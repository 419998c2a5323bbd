"""Training of C2T's classifier: what it learns, which rows an epoch takes, which epoch is kept."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.models import c2t
from draftsmith.models.c2t import C2tClassifier, C2tConfig, entropy, node_features, read_c2t_config
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.train import ClassifierSection
from draftsmith.train.run import classifier as classifier_training
from draftsmith.train.run.classifier import epoch_batches, rate_of, rates, split, train_classifier, validate
from tests import reference
from tests.data_gen.test_c2t import made_trees
from tests.scripted_drafting import VOCAB, Table


def test_a_separable_law_is_learnt_and_a_tenth_of_other_trees_calibrates_the_classifier() -> None:
    trees = made_trees(200, 100)
    section = ClassifierSection(epochs=60, learning_rate=0.02, hidden=12)
    start, _, best = train_classifier(section, trees, None)
    assert best["recall"] > 0.95 and best["precision"] > 0.9
    assert abs(best["positive_rate"] - float(trees.accepted.float().mean())) < 0.02
    other = made_trees(50, 100, seed=9)
    right = (start.confidence(other.features) >= 0.5) == other.accepted
    assert float(right.float().mean()) > 0.98
    assert start.config == C2tConfig(hidden=12, drafter={"proposer": "toy"})
    # Another target's nodes are accepted less often at the same P: what passes moves with it.
    calibration = ClassifierSection(init_from="x", batch_size=64)
    assert (rate_of(calibration), rate_of(ClassifierSection())) == (1e-4, 1e-3)
    other, unseen = (made_trees(400, 100, seed, lambda P, H, d: (P > 0.5) & (d < 7)) for seed in (3, 4))
    found, metrics, _ = train_classifier(calibration, other, start)
    assert metrics[0]["rows"] < 40 * 100 * 0.95 and found.config.hidden == 12
    before, after = (rates(each.confidence(unseen.features), unseen.accepted, 0.5)["recall"] for each in (start, found))
    assert after > before
    # It begins where the other one ended: a tenth of the learning rate leaves it near.
    moved = [(a - b).abs().max() for a, b in zip(start.parameters(), found.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1


@pytest.mark.parametrize("ratio", [1, 2, 10**9])
def test_every_epoch_draws_its_rejected_rows_anew(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier_training, "NEGATIVES", ratio)
    accepted, section = made_trees(20, 100).accepted, ClassifierSection(batch_size=64)
    positives, negatives = int(accepted.sum()), int((~accepted).sum())
    wanted = min(negatives, ratio * positives)
    epochs = []
    for epoch in (1, 2, 1):
        batches = list(epoch_batches(accepted, section, epoch))
        assert {len(batch) for batch in batches[:-1]} == {64}
        rows = torch.cat(batches)
        assert len(rows.unique()) == len(rows) == positives + wanted
        assert int(accepted[rows].sum()) == positives
        assert 0 < int(accepted[batches[0]].sum()) < 64  # shuffled
        epochs.append(rows)
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0].sort().values, epochs[1].sort().values) or wanted == negatives


def test_whole_trees_are_kept_out() -> None:
    trees = made_trees(50, 9)
    trees.features[:, 0] = torch.arange(50).repeat_interleave(trees.sizes)  # P is the tree's number
    section = ClassifierSection(validation_share=0.3)

    def parts(**more: Any) -> list[list[int]]:
        return [
            each.features[each.sizes.cumsum(0) - 1, 0].int().tolist()
            for each in split(trees, section.model_copy(update=more))
        ]

    train_on, kept_out = parts()
    assert sorted(train_on + kept_out) == list(range(50)) and len(kept_out) == 15 and parts(seed=1)[1] != kept_out
    assert [len(part) for part in parts(share=0.5)] == [17, 8]
    with pytest.raises(UserError, match="of 0 rows of 0 trees to train on none"):
        split(trees.chosen(torch.tensor([0])), section)


def test_numbers_of_an_epoch_equal_their_slow_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier_training, "NEGATIVES", 2)
    trees = made_trees(30, 40)
    torch.manual_seed(0)
    classifier = C2tClassifier(C2tConfig(hidden=5)).requires_grad_(False)
    classifier.output.bias.fill_(-0.1)
    confidence = reference.c2t_confidence(dict(classifier.state_dict()))
    C = [confidence(p, h, d) for p, h, d in trees.features.tolist()]
    said = trees.accepted.tolist()
    passed = [c >= 0.5 for c in C]
    hits = sum(p and s for p, s in zip(passed, said, strict=True))
    assert 0 < hits < sum(passed) < len(passed)
    found = validate(classifier, trees)
    assert (found["recall"], found["precision"]) == (hits / sum(said), hits / sum(passed))
    assert found["positive_rate"] == sum(passed) / len(passed)
    positives, negatives = sum(said), len(said) - sum(said)
    drawn = 2 * positives
    loss = -sum(math.log(c) for c, s in zip(C, said, strict=True) if s)
    loss -= drawn / negatives * sum(math.log(1 - c) for c, s in zip(C, said, strict=True) if not s)
    assert found["validation_loss"] == pytest.approx(loss / (positives + drawn), rel=1e-5)


def test_recall_selects_the_epoch_then_the_lower_positive_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = [(0.5, 0.01), (0.9, 0.3), (0.9, 0.2), (0.9, 0.2), (0.8, 0.01), (0.9, 0.25)]
    weights = []

    def validated(classifier: C2tClassifier, trees: Trees) -> dict[str, float]:
        recall, positive_rate = scripted[len(weights)]
        weights.append({name: tensor.clone() for name, tensor in classifier.state_dict().items()})
        return {"validation_loss": 1.0, "recall": recall, "positive_rate": positive_rate, "precision": 0.0}

    monkeypatch.setattr(classifier_training, "validate", validated)
    classifier, _, best = train_classifier(ClassifierSection(epochs=6), made_trees(40, 50), None)
    assert best["epoch"] == 3
    for name, tensor in classifier.state_dict().items():
        assert torch.equal(tensor, weights[2][name]) and not torch.equal(tensor, weights[3][name])


# The classifier's features and files.


def test_features_equal_their_slow_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy over some of the tokens or all; of certain and of broken distributions."""
    table = Table(1)
    log_probs = torch.stack([table.row((token,)) for token in range(3)])  # [3, Vd]
    values = torch.tensor([[-0.5, -1.0, -math.inf], [0.0, -3.0, -9.0], [-2.0, -2.0, -2.5]])
    for over in (1, 4, VOCAB, 1000):
        monkeypatch.setattr(c2t, "ENTROPY_OVER", over)
        features = node_features(values, log_probs, 3)
        assert features.shape == (3, 3, 3)
        for i, j in itertools.product(range(3), repeat=2):
            H = reference.entropy_in_nats(table((i,)), over)
            assert features[i, j].tolist() == pytest.approx([math.exp(values[i, j]), H, 2.0], abs=1e-6)
    assert entropy(torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])).tolist() == [0.0, 0.0]
    assert math.isnan(entropy(torch.tensor([0.0, -1.0, math.nan]), over=2).item())


def test_a_classifier_comes_back_as_it_was_saved_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    classifier = C2tClassifier(C2tConfig(hidden=7, drafter={"target": {"hidden_size": 64}}))
    features = torch.rand(4, 5, 3)
    for _ in range(2):  # over an older one, too
        classifier.save(tmp_path)
        (tmp_path / "notes").write_text("kept")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes"}
    again = C2tClassifier.load(tmp_path)
    assert again.config == classifier.config == read_c2t_config(tmp_path)
    assert torch.equal(again.confidence(features), classifier.confidence(features))
    assert not any(parameter.requires_grad for parameter in again.parameters())
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (({"kind": "eagle3"}, "classifier's: kind"), ({"hidden": 10**6}, "hidden: 1000000.*size")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=rf"{tmp_path}.*{message}"):
            C2tClassifier.load(tmp_path)
    for file, message in (("model.safetensors", "not the weights"), ("config.json", "no C2T classifier here")):
        (tmp_path / file).unlink()
        with pytest.raises(UserError, match=message):
            C2tClassifier.load(tmp_path)
