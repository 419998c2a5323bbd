"""An acceptance rule that is not lossless, from decoding to the report and to replay, which refuses its answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.data_gen import regenerate
from draftsmith.data_gen.answers import regeneration
from draftsmith.data_gen.answers.generators import GenerationSettings, Writer
from draftsmith.eval.decoding.accept import Accepted, accepted_path, deepest
from draftsmith.eval.decoding.contenders import Contender, main_contender, named
from draftsmith.eval.measurement import evaluation
from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.eval.replay.answers import read_answers
from draftsmith.eval.report_page import files
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import Draws, Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from tests.compare_cases import place as place
from tests.report_cases import Page
from tests.thinning import a_few
from tests.training_runs import run_main


class AmongTheBest:
    """A drafted token is right if the target ranks it among its best three."""

    lossless = False

    def __init__(self, sampling: Sampling):
        self.sampling = sampling

    def first(self, logits_BV: torch.Tensor, draws: Sequence[Draws] | None) -> torch.Tensor:
        return logits_BV.argmax(-1)

    def accept(self, tree: DraftTree, logits_BNV: torch.Tensor, draws: Sequence[Draws] = ()) -> Accepted:
        best_BNk = logits_BNV.topk(3).indices
        of_parent = best_BNk.gather(1, tree.parents.clamp(min=0)[..., None].expand(-1, -1, 3))
        last = deepest(tree, (of_parent == tree.tokens[..., None]).any(-1))
        return accepted_path(tree, last, best_BNk[..., 0].gather(1, last[:, None])[:, 0])


def contenders_of(recipe: Recipe) -> list[Contender]:
    own = main_contender(recipe)
    return named([own, replace(own, name="relaxed", rule=AmongTheBest)])


@pytest.fixture(params=a_few([0.0, 0.4], 0.4), ids=["sampled", "greedy"])
def recipe(request: pytest.FixtureRequest, place: Path, tmp_path: Path) -> Recipe:
    settings = [f"eval.out={tmp_path / 'out'}", f"eval.temperature={request.param}", "eval.max_prompts=4"]
    return load_recipe(str(place / "recipe.yaml"), settings)


@pytest.mark.slow
def test_a_relaxed_contender_is_measured_told_and_not_replayed(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, relaxed = contenders = contenders_of(recipe)
    evaluation.evaluate_by_decoding(recipe, contenders, plan=False)
    table = " ".join(capsys.readouterr().out.split())
    content = files.read_acceptance(recipe.eval_out / "acceptance.json")
    rows = content["contenders"]
    assert [rows[name]["lossless"] for name in (PLAIN, exact.name, "relaxed")] == [True, True, False]
    assert content["lossless"] is True
    assert rows["relaxed"]["tau"] > rows[exact.name]["tau"]
    greedy = recipe.eval.temperature == 0
    assert rows["relaxed"]["matches_target"] is (False if greedy else None)
    # The report says whose output is not the target's, and takes it for no defect.
    page = " ".join(Page((recipe.eval_out / "report.html").read_text()).text.split())
    for text in (table, page):
        assert "but not of relaxed: their output is not the target's" in text and "defect" not in text
    # Replay takes the answers of all others.
    evaluation.evaluate_by_replay(recipe, [exact], plan=False)
    replayed = files.read_acceptance(recipe.eval_out / "replay/acceptance.json")
    assert replayed["contenders"][exact.name]["accepted_histogram"] == rows[exact.name]["accepted_histogram"]
    recording = read_answers(files.generations_path(recipe))
    assert recording.of("another", PLAIN) and recording.relaxed == {"relaxed"}
    with pytest.raises(UserError, match=r"the answers of 'relaxed' in .* by an acceptance rule that is not lossless"):
        evaluation.evaluate_by_replay(recipe, contenders, plan=False)
    renamed = replace(relaxed, name="nobody's")
    with pytest.raises(UserError, match="accepts tokens that the target would not write"):
        evaluation.evaluate_by_replay(recipe, [exact, renamed], plan=False)


def test_conversations_tell_that_they_are_not_the_target_s_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer(recipe: Recipe, files: TargetFiles, settings: GenerationSettings) -> Writer:
        return Writer(files.load((0,)), settings, rule=AmongTheBest)

    monkeypatch.setattr(regeneration.Writer, "of", writer)
    path = tmp_path / "c.jsonl"
    settings = [f"data.prompts={place / 'prompts.jsonl'}", "data.max_prompts=2", "data.generator.max_new_tokens=4"]
    run_main(regenerate, place / "recipe.yaml", *settings, f"data.conversations={path}")
    assert [json.loads(line)["generator"]["lossless"] for line in path.read_text().splitlines()] == [False, False]
    with pytest.raises(UserError, match="written by an acceptance rule that is not lossless"):
        read_answers(path)
