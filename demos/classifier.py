"""The small classifier that judges the image demo's pictures: digit, ink and ground.

It stands beside the target's weights, in `classifier/model.safetensors`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from demos.codes import BATCH, pixel_tensor
from demos.digits import GROUNDS, INKS, Caption
from draftsmith.recipes.errors import UserError

FEATURES = 24  # D, where the pictures' distributions are compared


class Classifier(nn.Module):
    """Three convolutions, then D features, which three linear heads read."""

    ASPECTS = (len(INKS), 10, len(GROUNDS))

    def __init__(self, width: int = 16):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 3 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(3 * width * 4 * 4, FEATURES),
        )
        self.heads = nn.Linear(FEATURES, sum(self.ASPECTS))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [N, inks], [N, digits], [N, grounds] of [N, 3, 32, 32] in -1 to 1."""
        return self.heads(nn.functional.gelu(self.trunk(pixels))).split(self.ASPECTS, dim=-1)

    @staticmethod
    def labels(captions: Sequence[Caption]) -> torch.Tensor:
        """[N, 3]: ink, digit and ground."""
        inks, grounds = list(INKS), list(GROUNDS)
        return torch.tensor([[inks.index(c.ink), c.digit, grounds.index(c.ground)] for c in captions])

    @torch.no_grad()
    def features(self, pictures: numpy.ndarray) -> numpy.ndarray:
        """[N, D] of uint8 pictures [N, 32, 32, 3]."""
        batches = [pictures[i : i + BATCH] for i in range(0, len(pictures), BATCH)]
        return torch.cat([self.trunk(pixel_tensor(batch)) for batch in batches]).numpy()

    def readings(self, pictures: numpy.ndarray) -> list[tuple[int, int, int]]:
        """(number of the ink, digit, number of the ground) of each picture."""
        with torch.no_grad():
            features_ND = torch.from_numpy(self.features(pictures))
            aspects = self.heads(nn.functional.gelu(features_ND)).split(self.ASPECTS, dim=-1)
        return list(zip(*(logits.argmax(-1).tolist() for logits in aspects), strict=True))


def load_classifier(target: Path) -> Classifier:
    """Raises UserError if there is none beside the target."""
    path = target / "classifier" / "model.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: no classifier of pictures here; `make image-target` trains one with the target")
    classifier = Classifier()
    classifier.load_state_dict(load_file(path))
    return classifier.eval()


def save_classifier(classifier: Classifier, target: Path) -> None:
    path = target / "classifier" / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in classifier.state_dict().items()}, path)
