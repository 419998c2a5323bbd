"""What the target is asked travels whole: inserts and pictures reach prefill, trees, training rows and keys.

An insert of the target's own embeddings of some tokens must change nothing against the tokens themselves, wherever it
goes; one of other embeddings must change everything that depends on it. Pictures are read as the family's model
does."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from draftsmith.data_gen.states.store import key_of
from draftsmith.data_gen.training_rows.rows import TrainingRow, Turn, rows_of
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.chat import render_prompt
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.picture_prompts import opened
from draftsmith.models.prompt import EmbeddingInsert, PlacedInsert, Prompt, RenderError
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles, weight_digests
from draftsmith.models.vision import PictureInsert
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run.batches import MicroBatch, collate, collate_as
from draftsmith.train.run.checkpoints import rows_digest
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.drafter_cases import small_target
from tests.pairs import greedy, pair_of, untaught
from tests.thinning import a_few
from tests.tiny_vision import (
    FAMILIES,
    PLACEHOLDER,
    WITH_AXES,
    asked,
    make_vision_target,
    picture,
    save_vision_target,
    vision_config,
)

TREE = TreeSection(nodes=12, draft_calls=3, top_k=4)
TALL, WIDE = picture(16, 40, seed=1), picture(48, 16, seed=2)
# Tiles and rows of padding; several axes, and states that get pictures added.
both = pytest.mark.parametrize("family", a_few(FAMILIES, "llava_next", "qwen3_vl"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: save_vision_target(root / family, family) for family in FAMILIES}


@cache
def target_of(family: str) -> Target:
    return Target(make_vision_target(family), (1, 3, 5))


def section_of(folder: Path, **more: Any) -> TargetSection:
    return TargetSection(model=str(folder), device="cpu", dtype="float32", **more)


def tokenizer_of(folder: Path, **more: Any) -> Any:
    return TargetFiles(section_of(folder, **more)).tokenizer


def with_processor(folder: Path, copy: Path, other: Path, **changes: Any) -> Path:
    """A copy of a target's folder with another one's image processor."""
    settings = json.loads((other / "preprocessor_config.json").read_text()) | changes
    (copytree(folder, copy) / "preprocessor_config.json").write_text(json.dumps(settings))
    return copy


def prompts_of(folder: Path) -> list[Prompt]:
    """One picture; two of different shapes, the second in a later turn; two in one message; none."""
    tokenizer = tokenizer_of(folder)
    answer = {"role": "assistant", "content": "the mat"}
    conversations = [
        [asked("the cat sat", picture())],
        [asked("the dog", TALL), answer, asked("and in the rain the cat", WIDE), answer, asked("the rain")],
        [asked("ran after", WIDE, TALL)],
        [{"role": "user", "content": "the cat and the dog"}],
    ]
    return [render_prompt(tokenizer, messages) for messages in conversations]


def pixel_inputs(family: str, prompt: Prompt) -> dict[str, torch.Tensor]:
    """What the family's own model takes for a prompt."""
    ids = torch.tensor([list(prompt)])
    pixels = [insert.pixels() for insert in prompt.inserts if isinstance(insert, PictureInsert)]
    if family == "llava_next":  # tiles of all pictures, one behind the other
        pixels = [each | {"pixel_values": each["pixel_values"].flatten(0, 1)} for each in map(dict, pixels)]
    joined = {name: torch.cat([each[name] for each in pixels]) for name in (pixels[0] if pixels else ())}
    if family in WITH_AXES:
        joined["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | joined


def generated(family: str, prompt: Prompt, length: int) -> list[int]:
    """transformers' own greedy answer."""
    model = make_vision_target(family)
    if family in WITH_AXES:
        model.model.rope_deltas = None  # text after a picture would inherit it
    inputs = pixel_inputs(family, prompt)
    out = model.generate(**inputs, max_new_tokens=length, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def placed(prompts: Sequence[Prompt]) -> list[PlacedInsert]:
    return [PlacedInsert(row, insert) for row, prompt in enumerate(prompts) for insert in prompt.inserts]


# Prompts.


@both
def test_pictures_of_every_shape_are_counted_as_the_model_reads_them(family: str, folders: dict[str, Path]) -> None:
    """Wide, tall, small. Of an enlarged picture, LLaVA-NeXT cuts rows and columns of padding off."""
    tokenizer, reader = tokenizer_of(folders[family]), target_of(family).pictures
    assert reader is not None
    for width, height in ((1, 1), (3, 5), (33, 32), (48, 16), (200, 1), (1, 200), (37, 111), (512, 384)):
        (insert,) = render_prompt(tokenizer, [asked("the cat", picture(width, height))]).inserts
        assert isinstance(insert, PictureInsert)
        assert len(reader.read(insert).embeddings) == insert.length


@pytest.mark.parametrize(("family", "other"), [("llava_next", "llava_next"), ("llava", "qwen2_5_vl")])
def test_another_model_s_image_processor_is_refused(
    family: str, other: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    other_tiles = {"image_grid_pinpoints": [[16, 32]]} if family == other else {}
    folder = with_processor(folders[family], tmp_path / "other", folders[other], **other_tiles)
    with pytest.raises(UserError, match=r"is preprocessor_config\.json"):
        render_prompt(tokenizer_of(folder), [asked("the cat", picture(64, 64))])


@both
def test_what_cannot_be_shown_is_refused(family: str, folders: dict[str, Path]) -> None:
    tokenizer = tokenizer_of(folders[family])
    for content, reason in (
        (asked("what is <image>", picture())["content"], "placeholders differ: 1 and 2"),
        ([{"type": "video"}], "neither text nor picture: video"),
        ([{"type": "image"}], "without a path"),
    ):
        with pytest.raises(RenderError, match=reason):
            render_prompt(tokenizer, [{"role": "user", "content": content}])


def test_a_picture_read_otherwise_is_another(folders: dict[str, Path], tmp_path: Path) -> None:
    llava = folders["llava"]
    darker = with_processor(llava, tmp_path / "darker", llava, image_mean=[0.1, 0.2, 0.3])
    messages = [asked("the cat", picture())]
    keys = [render_prompt(tokenizer_of(folder), messages).digest for folder in (llava, llava, darker)]
    assert keys[0] == keys[1] != keys[2]


def test_a_chat_template_of_the_processor_serves(folders: dict[str, Path], tmp_path: Path) -> None:
    """LLaVA's published folders have it in a file that tokenizers do not read."""
    copytree(folders["llava_next"], tmp_path, dirs_exist_ok=True)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        _ = tokenizer_of(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    messages = [asked("the cat", picture())]
    own = render_prompt(tokenizer_of(folders["llava_next"]), messages)
    assert render_prompt(tokenizer_of(tmp_path), messages) == own
    TargetFiles(section_of(tmp_path)).save_without_weights(tmp_path / "stored")
    assert render_prompt(tokenizer_of(tmp_path / "stored"), messages) == own


def test_targets_that_see_otherwise_have_another_identity() -> None:
    """Also those that write alike: another projector, or another tower."""
    found = [weight_digests(target_of("llava"))]
    for part in ("multi_modal_projector", "vision_tower"):
        model = copy.deepcopy(make_vision_target("llava"))
        next(p for name, p in model.named_parameters() if f"{part}." in name and p.dim() > 1).mul_(1.5)
        found.append(weight_digests(Target(model)))
    assert len({each["embedding_digest"] for each in found}) == 1
    assert len({each["vision_digest"] for each in found}) == 3
    assert "vision_digest" not in weight_digests(Target(make_target()))


def test_pictures_come_as_files_bytes_or_images(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    tokenizer = tokenizer_of(folders["llava"])
    given: list[dict[str, Any]] = [
        *({"type": "image", key: str(path)} for key in ("path", "url", "image")),
        {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "image", "image": path.read_bytes()},
        {"type": "image", "path": str(path), "sha256": sha256(path.read_bytes()).hexdigest()},
    ]
    wanted = render_prompt(tokenizer, [asked("the cat", picture())])
    for part in given:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "the cat"}]}]
        assert render_prompt(tokenizer, messages) == wanted
    assert opened(picture().convert("CMYK")).mode == "RGB"
    [insert] = render_prompt(tokenizer, [{"role": "user", "content": given[:1]}]).inserts
    assert isinstance(insert, PictureInsert)
    pixels, processor = insert.pixels(), insert.pixels.func.__self__  # type: ignore[attr-defined]
    processor._held.clear()
    assert torch.equal(insert.pixels()["pixel_values"], pixels["pixel_values"])  # read again
    for change, reason in ((lambda: TALL.save(path), "has changed since"), (path.unlink, "is no longer there")):
        processor._held.clear()
        change()
        with pytest.raises(UserError, match=reason):
            insert.pixels()
    with pytest.raises(RenderError, match="picture missing"):
        render_prompt(tokenizer, [{"role": "user", "content": [given[0]]}])


# What the target reads.


@both
def test_embeddings_and_positions_are_the_model_s_own(family: str, folders: dict[str, Path]) -> None:
    target, given = target_of(family), dict[str, Any]()
    for prompt in prompts_of(folders[family])[:3]:
        handle = target.decoder.register_forward_pre_hook(
            lambda _module, _args, inputs: given.update(inputs), with_kwargs=True
        )
        with torch.no_grad():
            target.model(**pixel_inputs(family, prompt))
        handle.remove()
        shift = target.model.model.rope_deltas.item() if family in WITH_AXES else 0
        ids, inserts = torch.tensor([list(prompt)]), placed([prompt])
        mine, drafter_s = target.decoder_arguments(ids, inserts), target.inputs(ids, inserts=inserts)
        torch.testing.assert_close(mine["inputs_embeds"], given["inputs_embeds"], rtol=0, atol=1e-6)
        torch.testing.assert_close(drafter_s.embeddings, mine["inputs_embeds"])
        assert torch.equal(drafter_s.positions[0], torch.arange(len(prompt)))
        assert ("position_ids" in mine) == (family in WITH_AXES)
        if family in WITH_AXES:
            assert torch.equal(mine["position_ids"], given["position_ids"])
            assert target.pictures is not None and target.pictures.shift(prompt.inserts, len(prompt)) == shift < 0
        assert ("deepstack_visual_embeds" in mine) == (family == "qwen3_vl")
        for name in mine.keys() & {"visual_pos_masks", "deepstack_visual_embeds"}:
            torch.testing.assert_close(mine[name], given[name])


# Decoding.


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_the_model_s_own(family: str, folders: dict[str, Path]) -> None:
    """With pictures, several of them, in later turns, beside text: one by one, and side by side. As its own drafter the
    target accepts whole chains; another one is mostly wrong."""
    target, prompts, length = target_of(family), prompts_of(folders[family]), 24
    expected = [generated(family, prompt, length) for prompt in prompts]
    others = [render_prompt(tokenizer_of(folders[family]), [asked("the cat sat", TALL)])]
    assert generated(family, others[0], length) != expected[0]  # the picture matters
    itself = PolicyProposer(CausalLMDrafting(target), policy_of(TREE))
    for proposer in (None, itself, PolicyProposer(FeatureDrafting(untaught("eagle3", target)), policy_of(TREE))):
        together = decode_batch(target, proposer, prompts, {-1}, length)
        alone = [decode(target, proposer, prompt, {-1}, length) for prompt in prompts]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone] == expected
        if proposer is itself:
            assert sum(sum(answer.accepted_per_round) for answer in together) > 50


@both
def test_rows_come_and_go_with_their_positions(family: str, folders: dict[str, Path]) -> None:
    """Rows admitted, kept in another order and rolled back continue as they would alone."""
    target, prompts = target_of(family), prompts_of(folders[family])
    session = target.session((1,))
    session.prefill(prompts[:2])
    session.prefill(prompts[2:], at_once=1000)
    session.read([[5, 6]] * 4)
    session.keep([3, 1, 0])
    cut = prompts[1].inserts[1].first  # before the second picture
    session.rollback([len(prompts[3]) + 1, cut, len(prompts[0])])
    texts = [prompts[3].then([5]), Prompt(prompts[1][:cut], prompts[1].inserts[:1]), prompts[0]]
    for more in ([[7], [8], [9]], [[11], [12], [13]]):
        last, _ = session.read(more)
        texts = [text.then(tokens) for text, tokens in zip(texts, more, strict=True)]
        session.keep([0, 1, 2])
        for row, text in enumerate(texts):
            wanted, _ = target.session().prefill([text])
            torch.testing.assert_close(target.logits(last[row : row + 1, -1]), wanted, rtol=1e-4, atol=1e-4)


# Training rows.


def rows_of_prompts(folder: Path) -> list[TrainingRow]:
    spans = [[(len(prompt), len(prompt) + 6)] for prompt in prompts_of(folder)]
    answers = [prompt.then([*range(40, 46)]) for prompt in prompts_of(folder)]
    return [
        TrainingRow(str(i), list(prompt), span, inserts=prompt.inserts)
        for i, (prompt, span) in enumerate(zip(answers, spans, strict=True))
    ]


@both
def test_rows_share_a_pass_as_if_each_were_alone(family: str, folders: dict[str, Path]) -> None:
    """Padded, and packed by our attention or by masks: each row's states are the whole model's over it alone."""
    target, rows = Target(make_vision_target(family), (1, 3, 5)), rows_of_prompts(folders[family])
    wanted = []
    for row in rows:
        inputs = pixel_inputs(family, Prompt(row.input_ids, row.inserts))
        # Not output_hidden_states, which has Qwen3-VL's states before a picture is added to them.
        with torch.no_grad(), target.capturing((1, 3, 5)) as read:
            last = target.model.base_model(**inputs).last_hidden_state
        wanted.append((torch.cat(read, dim=-1)[0], last[0]))

    def check(batch: MicroBatch, documents: Any) -> None:
        states = target.states(batch.ids, documents=documents, inserts=batch.inserts)
        for (line, start, tokens), i in zip(batch.places, batch.rows, strict=True):
            for mine, own in zip((states.captured, states.last), wanted[i], strict=True):
                torch.testing.assert_close(mine[line, start : start + tokens], own, rtol=1e-4, atol=1e-4)

    padded, packed = collate(rows), collate_as(rows, [[2, 3, 0], [1]])
    check(padded, None)
    for way in (None, "masks"):
        target._packing = way  # type: ignore[assignment]
        check(packed, packed.documents)
    blind = target.states(padded.ids).last[0, : len(rows[0].input_ids)]
    assert (blind - wanted[0][1]).abs().max() > 1e-2


# Mistakes.


def test_pictures_of_other_families_are_refused_by_name_and_text_is_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Before anything is decoded, and before placeholders are counted: these families' templates write other ones."""
    text = vision_config("llava").text_config.to_dict() | {"head_dim": 8, "model_type": "gemma3_text"}
    text |= {"sliding_window": 64, "query_pre_attn_scalar": 8, "layer_types": None, "rope_parameters": None}
    tower = vision_config("llava").vision_config.to_dict() | {"model_type": "siglip_vision_model"}
    special: dict[str, Any] = {"image_token_id": PLACEHOLDER, "eos_token_id": 4, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=tower, **special)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tokenizer_of(folders["llava"]).save_pretrained(tmp_path)
    tokenizer = tokenizer_of(tmp_path)
    with pytest.raises(UserError, match=r"gemma3 are not supported: .*in both directions.* LLaVA-NeXT"):
        render_prompt(tokenizer, [asked("the cat", picture())])
    target = Target(TargetFiles(section_of(tmp_path)).load_model())
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "the cat"}])
    assert decode(target, None, prompt, {-1}, 6).token_ids == greedy(target, list(prompt), 6)


HOLE = 3
TEXT = [11, 12, 13, 14, 15, 16]


def with_insert(target: Target, tokens: list[int], first: int, end: int, scale: float = 1.0) -> Prompt:
    """`tokens`, of which some are given by the target's embeddings of them; times `scale`."""
    rows = scale * target.embedding(torch.tensor(tokens[first:end])).detach()
    hidden = [*tokens[:first], *[HOLE] * (end - first), *tokens[end:]]
    return Prompt(hidden, (EmbeddingInsert(first, rows),))


def test_a_prompt_is_its_tokens_and_what_stands_in_their_place() -> None:
    one, other = (EmbeddingInsert(1, torch.full((2, 4), value)) for value in (1.0, 2.0))
    assert Prompt([5, 6]) == [5, 6] and Prompt([5, 6]).inserts_digest == b""
    prompts = [Prompt([5, 3, 3, 7]), *(Prompt([5, 3, 3, 7], (each,)) for each in (one, other, one.at(2)))]
    assert len({prompt.digest for prompt in prompts}) == 4 and len(set(prompts)) == 4
    assert len({one, other, EmbeddingInsert(1, one.rows.clone()), one.at(2)}) == 3
    assert len({PlacedInsert(0, one), PlacedInsert(0, other)}) == 2
    assert {(5, 6): "there"}[Prompt([5, 6])] == "there"  # type: ignore[index]
    longer = prompts[1].then([8, 9])
    assert list(longer) == [5, 3, 3, 7, 8, 9] and longer.inserts == (one,)
    assert [longer.begins_with(prompt) for prompt in prompts] == [False, True, False, False]
    assert longer.begins_with(Prompt([5])) and not longer.begins_with(Prompt([5, 3]))  # the insert reaches beyond
    for wrong in (one.at(3), one.at(-1)):
        with pytest.raises(ValueError, match="an insert covers tokens"):
            Prompt([5, 3, 3, 7], (wrong,))


# Gemma scales its embeddings in their module, Granite in the decoder.
@pytest.mark.parametrize("family", ["gemma", "granite", "gpt2"])
def test_an_insert_of_the_target_s_own_embeddings_changes_nothing(family: str) -> None:
    overrides: dict[str, Any] = {"embedding_multiplier": 3.0} if family == "granite" else {}
    target = Target(make_target(family, **overrides))
    asked = with_insert(target, TEXT, 1, 4)

    def read(prompt: Prompt) -> list[torch.Tensor]:
        ids, inserts = torch.tensor([prompt.token_ids]), [PlacedInsert(0, each) for each in prompt.inserts]
        states, embeddings = target.states(ids, inserts=inserts), target.inputs(ids, inserts=inserts).embeddings
        alone = target.captured_states(ids, (0, 3), inserts)
        return [states.captured, states.last, alone, embeddings, target.session((0, 3)).prefill([[7], prompt])[0]]

    plain, blind = read(Prompt(TEXT)), read(Prompt(asked.token_ids))
    for mine, its in zip(read(asked), plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert (blind[1] - plain[1]).abs().max() > 1e-2  # the placeholders alone
    text = torch.tensor([TEXT])
    for outside in (-3, len(TEXT)):  # a part of the text has no column of the insert
        [away] = [PlacedInsert(0, each.at(outside)) for each in asked.inserts]
        assert torch.equal(target.inputs(text, inserts=[away]).embeddings, target.inputs(text).embeddings)


def test_decoding_reads_inserts_as_the_text_that_they_are() -> None:
    """Target and drafter: the same tokens in the same rounds, alone and beside text; replay likewise."""
    target, drafter = pair_of("llama", None)
    proposer = PolicyProposer(FeatureDrafting(drafter), policy_of(TREE))
    prompts = [[21, 22, 23, 24, 25, 26, 27, 28, 29], [11, 12, 13]]
    asked = [with_insert(target, prompts[0], 0, 7), Prompt(prompts[1])]
    expected = decode_batch(target, proposer, prompts, {-1}, 30)
    assert sum(expected[0].accepted_per_round) > 8
    for found in (decode_batch(target, proposer, asked, {-1}, 30), [decode(target, proposer, asked[0], {-1}, 30)]):
        for answer, wanted in zip(found, expected, strict=False):
            assert (answer.token_ids, answer.accepted_per_round) == (wanted.token_ids, wanted.accepted_per_round)
    recorded = [RecordedAnswer(each, answer.token_ids) for each, answer in zip(asked, expected, strict=True)]
    rounds = replay(target, proposer, recorded, 2)
    assert [answer.accepted_per_round for answer in rounds] == [answer.accepted_per_round for answer in expected]


def test_turns_join_to_rows_only_where_their_inserts_do() -> None:
    """And rows under one question with two inserts, or without, have keys of their own."""
    target = small_target()
    first = with_insert(target, TEXT, 1, 4)
    again, other = first.then([7, 8, 9]), with_insert(target, TEXT, 1, 4, 2.0).then([7, 8, 9])
    assert [row.spans for row in rows_of("a", [Turn(first, [7, 8]), Turn(again, [10])])] == [[(6, 8), (9, 10)]]
    rows = list(rows_of("a", [Turn(first, [7, 8]), Turn(other, [10])]))
    assert [row.spans for row in rows] == [[(6, 8)], [(9, 10)]]
    assert [row.inserts for row in rows] == [first.inserts, other.inserts]
    alike = [rows[0], replace(rows[0], inserts=other.inserts), replace(rows[0], inserts=())]
    assert len({key_of(each) for each in alike}) == len({rows_digest([each]) for each in alike}) == 3
