"""How good generated pictures are: do they show what the caption says, and are they as varied as real ones?

    python -m demos.quality runs/demo-lantern/eval

Reads the folder's generations.jsonl and prints a row for each contender:

    pictures          answers
    whole             share that are a picture: exactly 64 codes, then the stop token
    distance          Frechet distance to real held-out pictures of the same captions, in features of a small
                      classifier in which real pictures have variance 1 in all directions; with a 95 % interval
    digit, colours    share whose digit, and whose ink and ground, the classifier reads as the caption says; an answer
                      that is no whole picture counts as wrong

`real pictures` is the floor: real held-out pictures of these captions, other than those compared with, through the
autoencoder. A distance falls with the number of pictures: compare only rows of about as many.

The classifier was trained on pictures of the same program (`make image-target`) and lies beside the target's weights.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer, Emu3ForConditionalGeneration

from demos.classifier import Classifier, load_classifier
from demos.codes import CODES, decoded, encoded, pictures_of_answers
from demos.digits import GROUNDS, INKS, Caption, picture_at
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError

TARGET = Path(__file__).parents[1] / "recipes" / "demo_lantern" / "target"
REAL_PICTURES = 2000  # compared with; at least one a caption


def frechet_distance(a_ND: numpy.ndarray, b_MD: numpy.ndarray) -> float:
    """Frechet distance of the normal distributions with the means and covariances of two sets of features.

        |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a^1/2 C_b C_a^1/2)^1/2)

    As defined by Heusel et al., "GANs Trained by a Two Time-Scale Update Rule" (2017), equation 6, with the trace of
    (C_a C_b)^1/2 written by a symmetric matrix of the same eigenvalues. Their Inception network is replaced by the
    caller's features.

    Args:
        a_ND, b_MD: at least two rows each.
    """
    a, b = a_ND.astype(numpy.float64), b_MD.astype(numpy.float64)
    cov_a, cov_b = numpy.cov(a, rowvar=False), numpy.cov(b, rowvar=False)  # [D, D]
    values, vectors = numpy.linalg.eigh(cov_a)
    root_a = vectors * numpy.sqrt(values.clip(min=0)) @ vectors.T
    shared = numpy.sqrt(numpy.linalg.eigvalsh(root_a @ cov_b @ root_a).clip(min=0)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + numpy.trace(cov_a) + numpy.trace(cov_b) - 2 * shared)


def whitening(features_MD: numpy.ndarray) -> numpy.ndarray:
    """[D, D]: times features, it gives these features uncorrelated columns of variance 1.

    Without it a distance is one of the few directions that tell digits and colours apart, and of few pictures mostly
    chance.
    """
    values, vectors = numpy.linalg.eigh(numpy.cov(features_MD.astype(numpy.float64), rowvar=False))
    return vectors / numpy.sqrt(values)


def resampled(
    statistic: Callable[[numpy.ndarray], float], pictures: int, samples: int, biased: bool = False, seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval of a statistic of a selection of pictures, given as their numbers.

    Args:
        biased: the statistic grows where pictures are repeated, as a Frechet distance does: the interval is moved by
            the mean excess of the resampled values over that of all pictures.
    """
    draws = numpy.random.default_rng(seed)
    values = numpy.array([statistic(draws.integers(pictures, size=pictures)) for _ in range(samples)])
    excess = values.mean() - statistic(numpy.arange(pictures)) if biased else 0.0
    low, high = numpy.percentile(values, (2.5, 97.5)) - excess
    return float(low), float(high)


class ImageTarget:
    """What turns codes into pictures and pictures into features: the target's autoencoder and the classifier.

    Raises:
        UserError: `directory` does not hold both.
    """

    def __init__(self, directory: Path):
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory}: no model here (config.json is missing); name the image demo's target")
        if (kind := AutoConfig.from_pretrained(directory).model_type) != "emu3":
            raise UserError(f"{directory}: a model of type {kind}, not the image demo's target (emu3)")
        self.classifier = load_classifier(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        model: Any = Emu3ForConditionalGeneration.from_pretrained(directory)
        self.autoencoder = model.model.vqmodel.float().eval()
        self.code_of: dict[int, int] = model.vocabulary_mapping.bpe2img
        self.stop: int = self.tokenizer.eos_token_id

    def codes(self, token_ids: Sequence[int]) -> list[int] | None:
        """The codes of an answer, or None if it is no whole picture."""
        found = [self.code_of[token] for token in token_ids if token in self.code_of]
        whole = len(found) == CODES and len(token_ids) == CODES + 1 and token_ids[-1] == self.stop
        return found if whole else None

    def caption(self, prompt_ids: Iterable[int]) -> Caption:
        """Of a prompt. Raises ValueError if it is none."""
        return Caption.parse(self.tokenizer.decode(list(prompt_ids), skip_special_tokens=True))

    def through(self, pictures: numpy.ndarray) -> numpy.ndarray:
        """`pictures`, encoded and decoded."""
        return decoded(self.autoencoder, encoded(self.autoencoder, pictures))


@dataclass(frozen=True)
class PictureQuality:
    """A row of the table; intervals are 95 %."""

    pictures: int
    whole: float
    distance: float
    distance_interval: tuple[float, float]
    digit: float
    digit_interval: tuple[float, float]
    colours: float
    colours_interval: tuple[float, float]


def picture_quality(
    classifier: Classifier,
    pictures: Sequence[numpy.ndarray | None],
    captions: Sequence[Caption],
    real_NRD: numpy.ndarray,
    samples: int = 300,
) -> PictureQuality:
    """Of the pictures of one contender, None for one that is not whole.

    Pictures are resampled with the real ones of their caption, so which captions were asked is no part of a distance.

    Args:
        real_NRD: `real_features` of the captions.

    Raises:
        UserError: less than two whole pictures.
    """
    whole = [i for i, picture in enumerate(pictures) if picture is not None]
    if len(whole) < 2:
        raise UserError(f"{len(whole)} of {len(pictures)} answers are whole pictures; at least two are needed")
    shown = numpy.stack([picture for picture in pictures if picture is not None])
    white_DD = whitening(real_NRD.reshape(-1, real_NRD.shape[-1]))
    features_ND, compared_NRD = classifier.features(shown) @ white_DD, real_NRD[whole] @ white_DD
    digit, colours = numpy.zeros(len(pictures)), numpy.zeros(len(pictures))
    for i, (ink, number, ground) in zip(whole, classifier.readings(shown), strict=True):
        digit[i] = number == captions[i].digit
        colours[i] = (ink, ground) == (list(INKS).index(captions[i].ink), list(GROUNDS).index(captions[i].ground))

    def distance(drawn: numpy.ndarray) -> float:
        return frechet_distance(features_ND[drawn], compared_NRD[drawn].reshape(-1, features_ND.shape[1]))

    return PictureQuality(
        len(pictures),
        len(whole) / len(pictures),
        distance(numpy.arange(len(whole))),
        resampled(distance, len(whole), samples, biased=True),
        float(digit.mean()),
        resampled(lambda drawn: digit[drawn].mean(), len(pictures), samples),
        float(colours.mean()),
        resampled(lambda drawn: colours[drawn].mean(), len(pictures), samples),
    )


def real_pictures(captions: Sequence[Caption], seed: str) -> numpy.ndarray:
    """[N, PIXELS, PIXELS, 3]: a held-out digit for each caption."""
    return numpy.stack([picture_at("heldout", i, seed, caption)[1] for i, caption in enumerate(captions)])


def real_features(classifier: Classifier, captions: Sequence[Caption]) -> numpy.ndarray:
    """[N, R, D] of R real pictures for each caption, REAL_PICTURES in all or a few more."""
    each = -(-REAL_PICTURES // len(captions))
    rounds = [classifier.features(real_pictures(captions, f"compared with {i}")) for i in range(each)]
    return numpy.stack(rounds, axis=1)


def read_pictures(path: Path, target: ImageTarget) -> dict[str, tuple[list[Caption], list[numpy.ndarray | None]]]:
    """{contender: (captions, pictures)} of a generations.jsonl, in its order; None for a picture that is not whole.

    Raises:
        UserError: it cannot be read, or names every line that is no answer to a caption, up to three.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); `draftsmith evaluate` writes it") from None
    found: dict[str, tuple[list[Caption], list[list[int] | None]]] = {}
    faults = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            caption, codes = target.caption(record["prompt_token_ids"]), target.codes(record["token_ids"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            faults.append(f"{path}:{number}: not an answer to a caption: {type(error).__name__}: {error}")
            continue
        captions, answers = found.setdefault(str(record.get("contender", "")), ([], []))
        captions.append(caption)
        answers.append(codes)
    if faults:
        raise UserError(faults[:3])
    if not found:
        raise UserError(f"{path}: no answers; `draftsmith evaluate` writes them")
    return {name: (asked, pictures_of_answers(target.autoencoder, answers)) for name, (asked, answers) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of an evaluation, with generations.jsonl")
    parser.add_argument("--target", type=Path, default=TARGET, help="model directory; default: the shipped one")
    parser.add_argument("--samples", type=int, default=300, help="bootstrap samples")
    args = parser.parse_args()
    if args.samples < 1:
        raise UserError(f"--samples: {args.samples} resamplings give no interval; give 100 or more")
    target = ImageTarget(args.target)
    contenders = read_pictures(args.folder / "generations.jsonl", target)
    captions = max((asked for asked, _ in contenders.values()), key=len)
    floor = target.through(real_pictures(captions, "floor"))
    table = Table("contender", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    for heading in ("pictures", "whole", "distance", "digit", "colours"):
        table.add_column(heading, justify="right", no_wrap=True)
    known: dict[tuple[Caption, ...], numpy.ndarray] = {}  # contenders are asked the same
    for name, (asked, pictures) in ({"real pictures": (captions, list(floor))} | contenders).items():
        if (key := tuple(asked)) not in known:
            known[key] = real_features(target.classifier, asked)
        row = picture_quality(target.classifier, pictures, asked, known[key], args.samples)
        shares = [
            f"{share:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
            for share, (low, high) in ((row.digit, row.digit_interval), (row.colours, row.colours_interval))
        ]
        distance = f"{row.distance:.2f} [{row.distance_interval[0]:.2f}, {row.distance_interval[1]:.2f}]"
        table.add_row(Text(name), str(row.pictures), f"{row.whole:.1%}", distance, *shares)
    Console().print(table)


if __name__ == "__main__":
    run(main)
