"""The image demo: its pictures and captions, its target, and the measure of generated pictures."""

from typing import Any

import numpy
import pytest
from transformers import AutoTokenizer, Emu3ForConditionalGeneration

from demos.digits import CAPTIONS, PIXELS, SPLITS, digit_scans
from demos.make_image_target import prompt_ids
from demos.quality import (
    TARGET,
    ImageTarget,
    frechet_distance,
    real_pictures,
)


@pytest.fixture(scope="module")
def target() -> ImageTarget:
    return ImageTarget(TARGET)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def test_splits_share_no_scan():
    sets = [{scan.tobytes() for scans in digit_scans(split).values() for scan in scans} for split in SPLITS]
    assert [len(scans) for scans in sets] == [1617, 180]
    assert not sets[0] & sets[1]


def test_answers_are_the_same_as_text_and_as_tokens(tokenizer):
    """Regenerated conversations hold both."""
    codes = [tokenizer.convert_tokens_to_ids(f"<|visual token {code:06d}|>") for code in (0, 1, 311, 511, 511)]
    text = tokenizer.decode(codes)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == codes
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    chat = [{"role": "user", "content": CAPTIONS[0].text}, {"role": "assistant", "content": text}]
    ids = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, mine in zip(ids["input_ids"], ids["assistant_masks"], strict=True) if mine]
    assert answer == [*codes, tokenizer.eos_token_id]
    assert ids["input_ids"][:7] == prompt_ids(tokenizer, [CAPTIONS[0]])[0].tolist()


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


def test_frechet_distance_of_covariances_that_do_not_commute():
    """The trace of the root by all eigenvalues of the product, which is not symmetric."""
    draws = numpy.random.default_rng(1)
    a, b = (draws.normal(size=(50, 4)) @ draws.normal(size=(4, 4)) for _ in range(2))
    product = numpy.cov(a, rowvar=False) @ numpy.cov(b, rowvar=False)
    root = numpy.sqrt(numpy.linalg.eigvals(product).real).sum()
    traces = sum(numpy.trace(numpy.cov(each, rowvar=False)) for each in (a, b))
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + traces - 2 * root
    assert frechet_distance(a, b) == pytest.approx(expected)
