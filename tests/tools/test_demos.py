"""The demos: what they ask, their targets, and the measures of what is written about and as pictures."""

import collections
import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import Emu3ForConditionalGeneration, LlamaForCausalLM

from demos.descriptions import checked_statements, description_of
from demos.digits import CAPTIONS, PIXELS
from demos.make_demo_target import grow, llama_config
from demos.prompts import OUT, caption_conversations, scene_conversations
from demos.quality import TARGET, ImageTarget, real_pictures
from demos.scenes import SPLITS, ChartBar, Scene, Thing, scene_at
from demos.stdlib import split_of
from draftsmith.models.image_tokens import ImageTokens
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.pictures import read_picture
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import records

# Prompts: shipped files are what `demos.prompts` writes.


def shipped(name: str) -> list[Conversation]:
    rejects = Rejects()
    found = list(read_conversations(str(OUT / f"{name}.jsonl.gz"), rejects))
    assert not rejects.total
    return found


def test_shipped_pictures_and_captions_are_those_that_the_program_makes(tmp_path: Path) -> None:
    """Pictures by their pixels: another zlib packs them in other bytes."""
    for split, rows in (("train", 3600), ("heldout", 360)):
        found = [record for _, record in records(str(OUT / f"captions-{split}.jsonl.gz"), Rejects())]
        assert found == list(caption_conversations(split)) and len(found) == rows
    for split, rows in (("train", 2000), ("heldout", 160)):
        found = shipped(f"scenes-{split}")
        assert len(found) == rows
        for conversation, made in itertools.islice(zip(found, scene_conversations(split), strict=False), 20):
            one, other = json.loads(json.dumps(conversation.messages)), made["messages"]
            pictures = [read_picture(each[0]["content"][0].pop("url"), tmp_path).image for each in (one, other)]
            assert (conversation.id, one) == (made["id"], other)
            assert pictures[0].tobytes() == pictures[1].tobytes()


def test_shipped_questions_keep_the_library_s_modules_apart() -> None:
    names = ("train", "heldout", "copy")
    train, heldout, copied = ([each.meta["module"] for each in shipped(f"stdlib-{name}")] for name in names)
    assert (len(train), len(heldout), len(copied)) == (5173, 617, 715)
    assert {split_of(module) for module in train} == {"train"}
    assert {split_of(module) for module in heldout + copied} == {"heldout"}


# The text target, grown from a shallower one; the image target.


def test_a_grown_target_computes_the_same_and_learns_with_all_layers() -> None:
    torch.manual_seed(0)
    shallow = LlamaForCausalLM(llama_config(40, layers=2, width=64, inner_width=96))
    deep = LlamaForCausalLM(llama_config(40, layers=6, width=64, inner_width=96))
    untouched = copy.deepcopy(deep)
    tokens_BT = torch.randint(40, (2, 9))
    assert not torch.allclose(deep(tokens_BT).logits, shallow(tokens_BT).logits, atol=1e-3)
    grow(deep, shallow)
    torch.testing.assert_close(deep(tokens_BT).logits, shallow(tokens_BT).logits)
    for name, weight in deep.named_parameters():
        assert "norm" in name or not torch.equal(weight, untouched.get_parameter(name)), name
    for layers, inner_width in ((4, 96), (2, 128)):
        with pytest.raises(UserError, match="of the same widths, and of a half"):
            grow(deep, LlamaForCausalLM(llama_config(40, layers, 64, inner_width)))
    deep(tokens_BT).logits.logsumexp(-1).sum().backward()
    for name, weight in deep.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert weight.grad is not None and weight.grad.norm() > 0, name


def test_the_shipped_image_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own class loads it; each code is decoded; the pictures survive their autoencoder; 8 MB at most."""
    assert sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file()) < 8e6
    model: Any = Emu3ForConditionalGeneration.from_pretrained(TARGET)
    assert set(model.model.vocabulary_mapping.img2bpe) == set(range(model.config.vq_config.codebook_size))
    target, captions = ImageTarget(TARGET), CAPTIONS[::9]
    real = real_pictures(captions, "test")
    again = target.through(real)
    assert again.shape == real.shape == (40, PIXELS, PIXELS, 3)
    assert numpy.abs(again.astype(float) - real).mean() < 20 < numpy.abs(again[1:].astype(float) - real[:-1]).mean()
    digits = [digit for _, digit, _ in target.classifier.readings(again)]
    assert numpy.mean([digit == caption.digit for digit, caption in zip(digits, captions, strict=True)]) > 0.7
    # The whitest pixels of a written picture stay white.
    images = ImageTokens(model)
    monkeypatch.setattr(images.autoencoder, "decode", lambda codes: torch.ones(len(codes), 3, 8, 8))
    picture = images.picture(images.token_ids[:4])
    assert picture is not None and picture.getextrema() == ((255, 255),) * 3


# What is said about pictures, and its check.

KINDS = {"total", "placed", "tally", "relation", "blank", "bars", "nth", "height", "most", "versus"}
THINGS = Scene(
    things=(
        Thing(0, "red", "circle", size="small"),
        Thing(2, "blue", "square", size="large"),
        Thing(3, "orange", "sign", word="CAT"),
        Thing(5, "red", "cross", size="large"),
    )
)
BARS = Scene(bars=(ChartBar("red", 2), ChartBar("green", 5), ChartBar("blue", 2), ChartBar("yellow", 1)))


def test_descriptions_are_true() -> None:
    """On the pictures that they describe; about other ones nearly all that they say is false."""
    kinds, about_others, lengths = collections.Counter(), [], []
    series = [scene_at(split, index) for split in SPLITS for index in range(300)]
    for scene, other in zip(series, series[1:] + series[:1], strict=True):
        text = description_of(scene, random.Random(str(scene)))
        statements = checked_statements(text, scene)
        assert [statement.text for statement in statements if statement.holds is False or not statement.kind] == []
        assert ". ".join(statement.text for statement in statements) + "." == text
        kinds.update(statement.kind for statement in statements)
        lengths.append(len(text.split()))
        about_others += [each.holds for each in checked_statements(text, other) if each.holds is not None]
    assert set(kinds) == KINDS | {"remark"}
    assert max(lengths) <= 225 and sum(lengths) / len(lengths) > 80
    assert sum(about_others) / len(about_others) < 0.1


@pytest.mark.parametrize(
    ("scene", "true", "false"),
    [
        (THINGS, "I count four things.", "I count three things."),
        (THINGS, "At the top left there is a little red circle.", "At the top left there is a big red circle."),
        (THINGS, "The small red circle is above the orange sign.", "The orange sign is above the small red circle."),
        (THINGS, "The bottom row is empty.", "The top row is empty."),
        (BARS, "The second bar is green and five units high.", "The second bar is green and four units high."),
        (BARS, "The tallest bar is green.", "The shortest bar is green."),
        (BARS, "The green bar is taller than the red bar.", "The red bar is taller than the green bar."),
    ],
)
def test_planted_falsehoods_are_found(scene: Scene, true: str, false: str) -> None:
    for sentence, holds in ((true, True), (false, False)):
        (statement,) = checked_statements(sentence, scene)
        assert statement.kind in KINDS and statement.holds is holds


def test_what_cannot_be_checked() -> None:
    text = "That is all. The weather is fine. The first bar is pretty. There is a red. The first bar is red and two"
    assert [(s.kind, s.holds) for s in checked_statements(text, BARS)] == [("remark", None), *[("", None)] * 3]
