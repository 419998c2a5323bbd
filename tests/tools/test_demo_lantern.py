"""The image demo: its pictures and captions, its target, and the measure of generated pictures."""

from typing import Any

import numpy
import pytest
import torch
from transformers import Emu3ForConditionalGeneration

from demos.digits import CAPTIONS, PIXELS
from demos.quality import (
    TARGET,
    ImageTarget,
    real_pictures,
)
from draftsmith.models.image_tokens import ImageTokens


@pytest.fixture(scope="module")
def target() -> ImageTarget:
    return ImageTarget(TARGET)


def test_shipped_target(target: ImageTarget):
    """transformers' own class loads it; each code is decoded; the pictures survive their autoencoder; 8 MB at most."""
    assert sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file()) < 8e6
    model: Any = Emu3ForConditionalGeneration.from_pretrained(TARGET)
    assert set(model.model.vocabulary_mapping.img2bpe) == set(range(model.config.vq_config.codebook_size))
    captions = CAPTIONS[::9]
    real = real_pictures(captions, "test")
    again = target.through(real)
    assert again.shape == real.shape == (40, PIXELS, PIXELS, 3)
    assert numpy.abs(again.astype(float) - real).mean() < 20 < numpy.abs(again[1:].astype(float) - real[:-1]).mean()
    readings = target.classifier.readings(again)
    assert (
        numpy.mean([number == caption.digit for (_, number, _), caption in zip(readings, captions, strict=True)]) > 0.7
    )


def test_the_whitest_pixels_of_a_written_picture_stay_white(monkeypatch: pytest.MonkeyPatch):
    model: Any = Emu3ForConditionalGeneration.from_pretrained(TARGET)
    images = ImageTokens(model)
    monkeypatch.setattr(images.autoencoder, "decode", lambda codes: torch.ones(len(codes), 3, 8, 8))
    picture = images.picture(images.token_ids[:4])
    assert picture is not None and picture.getextrema() == ((255, 255),) * 3
