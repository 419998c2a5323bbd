"""C2T's classifier: its features and its files. Trees grow by it in tests/test_policies.py."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.models.c2t import C2tClassifier, C2tConfig, entropy, node_features, read_c2t_config
from draftsmith.recipes.errors import UserError
from tests import reference
from tests.scripted_drafting import VOCAB, Table


def test_features_equal_their_slow_twin() -> None:
    table = Table(1)
    log_probs = torch.stack([table.row((token,)) for token in range(3)])  # [3, Vd]
    values = torch.tensor([[-0.5, -1.0, -math.inf], [0.0, -3.0, -9.0], [-2.0, -2.0, -2.5]])
    for over in (1, 4, VOCAB, 1000):
        features = node_features(values, log_probs, 3, over)
        assert features.shape == (3, 3, 3)
        for i, j in itertools.product(range(3), repeat=2):
            H = reference.entropy_in_nats(table((i,)), over)
            assert features[i, j].tolist() == pytest.approx([math.exp(values[i, j]), H, 2.0], abs=1e-6)


def test_entropy_of_certain_and_of_broken_distributions() -> None:
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert entropy(certain).tolist() == [0.0, 0.0]
    assert entropy(torch.full((4,), -math.log(4))).item() == pytest.approx(math.log(4))
    assert entropy(torch.full((4,), -math.log(4)), over=3).item() == pytest.approx(math.log(4) * 3 / 4)
    assert math.isnan(entropy(torch.tensor([0.0, math.nan])).item())
    assert math.isnan(entropy(torch.tensor([0.0, -1.0, math.nan]), over=2).item())


def test_a_classifier_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    config = C2tConfig(hidden=7, entropy_over=50, negative_ratio=3.5, drafter={"target": {"hidden_size": 64}})
    classifier = C2tClassifier(config)
    features = torch.rand(4, 5, 3)
    for _ in range(2):  # over an older one, too
        classifier.save(tmp_path / "c2t")
        (tmp_path / "c2t/notes").write_text("kept")
    assert {path.name for path in (tmp_path / "c2t").iterdir()} == {"config.json", "model.safetensors", "notes"}
    again = C2tClassifier.load(tmp_path / "c2t")
    assert again.config == config == read_c2t_config(tmp_path / "c2t")
    assert torch.equal(again.confidence(features), classifier.confidence(features))
    assert again.confidence(features).shape == (4, 5)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def changed(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "not the weights that config.json .* describes"),
    "no json": (lambda d: (d / "config.json").write_text("{"), "not a C2T classifier's: .*JSON"),
    "a drafter": (lambda d: changed(d, kind="eagle3"), "not a C2T classifier's: kind"),
    "a huge width": (lambda d: changed(d, hidden=1_000_000), "hidden: 1000000.*size mismatch"),
    "another key": (lambda d: changed(d, layers=3), "not a C2T classifier's: layers: "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_classifiers_are_refused(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    C2tClassifier(C2tConfig()).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        C2tClassifier.load(tmp_path)
    assert str(tmp_path) in str(error.value)
