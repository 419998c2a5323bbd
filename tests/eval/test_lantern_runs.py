"""LANTERN from the recipe to the table, the report and its pictures; and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import regenerate
from draftsmith.data_gen.answers import regeneration
from draftsmith.data_gen.answers.generators import GenerationSettings, Writer
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import check_contenders, contenders_of
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation
from draftsmith.eval.replay.recorded_answers import read_answers
from draftsmith.eval.report_page import files
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.image_tokens import ImageTokens
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.compare_cases import place as text_place
from tests.image_cases import CODES, VOCABULARY, make_image_target
from tests.report_cases import Page
from tests.training_runs import run_main

__all__ = ["text_place"]
RULES: dict[str, dict[str, Any]] = {
    "lantern": {"rule": "lantern", "delta": 0.4, "k": 8},
    "lantern++": {"rule": "lantern++", "lambda": 3, "k": 4},
    "embedding": {"rule": "lantern", "delta": 0.4, "k": 8, "neighbours": "embedding"},
    "none": {"rule": "lantern", "delta": 0},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_image_target(folder / "target")
    section = TargetSection(model=str(folder / "target"), dtype="float32")
    target = Target(TargetFiles(section).load_model(), (0, 1, 2))
    identity = TargetFiles(section).identity_of(target)
    torch.manual_seed(0)
    vocab = DraftVocab.full(target.vocab_size)
    config = Eagle3Config.for_target(target.config, target.vocab_size, (0, 1, 2), vocab.size)
    save_drafter(folder / "run/drafter", Eagle3Drafter(config, vocab), identity, "", {})
    turns = [{"id": f"q{i}", "turns": [text]} for i, text in enumerate(["a red one", "two", "a blue two"])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    chain = {"policy": "chain", "nodes": 4}
    small = {"proposer": "causal_lm", "draft_model": {"model": section.model, "dtype": "float32"}, "tree": chain}
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": section.model, "dtype": "float32", "guidance": {"scale": 2}},
        "eval": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_new_tokens": 16,
            "temperature": 1,
            "tree": {"nodes": 8, "draft_calls": 3, "top_k": 3},
            "also": [
                *({"name": name, "acceptance": rule, **small} for name, rule in RULES.items()),
                {"name": "exact", **small},
            ],
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder


def test_relaxed_rows_are_measured_and_their_pictures_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(acceptance, place / "recipe.yaml")
    out = place / "run/eval"
    rows = files.read_acceptance(out / "acceptance.json")["contenders"]
    assert [rows[name]["lossless"] for name in ("exact", *RULES)] == [True, False, False, False, False]
    moved = {name: rows[name]["total_variation"] for name in ("exact", *RULES)}
    assert moved["exact"] is None and moved["none"] == 0
    assert 0 < moved["lantern"] <= 0.4 and moved["lantern++"] > 0 and moved["embedding"] > 0
    assert rows["lantern"]["tau"] > rows["exact"]["tau"]
    assert rows["lantern++"]["acceptance"] == {"delta": None, "neighbours": "codebook", **RULES["lantern++"]}
    lines = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    images = ImageTokens.of(TargetFiles(TargetSection(model=str(place / "target"), dtype="float32")).load_model())
    assert images is not None
    for line in lines:
        picture = images.picture(line["token_ids"])
        assert ("image" in line) == (picture is not None)
        if picture is not None:
            assert Image.open(line["image"]["path"]).tobytes() == picture.tobytes()
    made = [line for line in lines if "image" in line]
    assert {line["contender"] for line in made} >= {"plain decoding", "lantern"}
    source = (out / "report.html").read_text()
    assert len(re.findall(r'<img src="data:image/png', source)) == len(made)  # the figures are SVG
    page = " ".join(Page(source).text.split())
    assert "What the answers look like" in page and "no whole picture" in page
    assert f"lantern {moved['lantern']:.3f}" in page.partition("Total variation from the target's distribution")[2]
    table = " ".join(capsys.readouterr().out.split())
    for text in (table, page):
        assert f"but not of {'; '.join(RULES)}: their output is not the target's" in text and "defect" not in text
    tables = [load_file(path)["neighbours"] for path in out.glob("neighbours-*.safetensors")]
    assert len(tables) == 4  # 4, 8 and all 15 codes; 8 embeddings
    codes = {VOCABULARY[name] for name in CODES}
    assert sum(set(table.unique().tolist()) <= {-1, *codes} for table in tables) == 3
    # Replay takes the answers of all others.
    exact = {"proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 4}}
    rivals: list[tuple[dict[str, Any], str]] = [
        ({"name": "lantern"}, "the answers of 'lantern': written by an acceptance rule"),
        ({"name": "nobody's", "acceptance": RULES["lantern"]}, "accepts tokens that the target would not"),
    ]
    settings = [place / "recipe.yaml", "eval.mode=replay", "eval.max_prompts=1"]
    run_main(acceptance, *settings, f"eval.also={json.dumps([exact])}")
    for rival, said in rivals:
        with pytest.raises(UserError, match=said):
            run_main(acceptance, *settings, f"eval.also={json.dumps([exact | rival])}")


def test_conversations_tell_that_they_are_not_the_target_s_own(
    text_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer(recipe: Recipe, files: TargetFiles, settings: GenerationSettings) -> Writer:
        relaxation = Relaxation(torch.full((320, 1), -1), delta=0.5)
        return Writer(files.load((0,)), settings, rule=lambda sampling: LanternAcceptance(sampling, relaxation))

    monkeypatch.setattr(regeneration.Writer, "of", writer)
    path = tmp_path / "c.jsonl"
    settings = [f"data.prompts={text_place / 'prompts.jsonl'}", "data.max_prompts=2", "data.generator.max_new_tokens=4"]
    run_main(regenerate, text_place / "recipe.yaml", *settings, f"data.conversations={path}")
    assert [json.loads(line)["generator"]["lossless"] for line in path.read_text().splitlines()] == [False, False]
    with pytest.raises(UserError, match="written by an acceptance rule that is not lossless"):
        read_answers(path)


def test_rows_of_codes_are_pictures_and_anything_else_is_none(place: Path) -> None:
    images = ImageTokens.of(TargetFiles(TargetSection(model=str(place / "target"), dtype="float32")).load_model())
    assert images is not None
    tokens = [VOCABULARY[name] for name in CODES]
    assert images.codes([VOCABULARY["<image>"], *tokens[:4], VOCABULARY["<eos>"]]) == [[0, 1], [2, 3]]
    assert images.codes(tokens[:6]) is None and images.codes([]) is None
    images.end_of_line = end = VOCABULARY["<null>"]
    assert images.codes([*tokens[:3], end, *tokens[3:6], end]) == [[0, 1, 2], [3, 4, 5]]
    assert images.codes([*tokens[:3], end, tokens[3]]) is None


def test_impossible_sources_of_neighbours_are_named(place: Path, text_place: Path, tmp_path: Path) -> None:
    def refused(said: str, neighbours: object, folder: Path = place) -> None:
        rule = f"eval.acceptance={{rule: lantern, neighbours: {neighbours}}}"
        recipe = load_recipe(str(folder / "recipe.yaml"), [rule])
        with pytest.raises(UserError, match=said):
            check_contenders(recipe, TargetFiles.read(recipe.target), contenders_of(recipe))

    path = tmp_path / "codes.safetensors"
    refused("has no codebook of its own", "codebook", text_place)
    refused("is no file; write codebook, embedding", "embeddings")
    path.write_text("no tensors")
    refused("neighbours: .*not a readable safetensors file", path)
    vectors, ids = torch.zeros(3, 2), torch.arange(3)
    for codebook, tokens, said in (
        (vectors, torch.arange(4), r"needs codebook \[C, d\]"),
        (vectors + torch.nan, ids, "finite numbers"),
        (vectors, torch.tensor([1, 1, 2]), "not two or more different"),
        (vectors, ids.float(), "not .* whole numbers"),
        (vectors, torch.tensor([1, 2, 9_000], dtype=torch.uint16), "tokens 1 to 9,000, but the target has 26"),
    ):
        save_file({"codebook": codebook, "token_ids": tokens}, path)
        refused(said, path)
