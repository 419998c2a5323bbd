"""The table of proposers: one more entry goes through line-up, files and report without another list."""

from pathlib import Path
from typing import get_args

import pytest

from draftsmith.eval.decoding.contenders import Contender, main_contender, named
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.decoding.proposers import PROPOSERS, ProposerEntry
from draftsmith.eval.measured import evaluation
from draftsmith.eval.page import files
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import ProposerName, TreeSection
from tests.compare_cases import place as place
from tests.report_cases import Page


def test_the_schema_names_the_proposers_of_the_table() -> None:
    assert set(get_args(ProposerName)) == set(PROPOSERS)


def test_a_new_proposer_is_decoded_described_and_reported(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no such echo")

    echo = ProposerEntry(
        name=lambda contender: f"echo of {contender.tree.most - 1}",
        make=lambda lineup, contender: PromptLookup(contender.tree.most - 1, lineup.target.device, max_ngram=1),
        model=lambda contender: "the text itself",
    )
    monkeypatch.setitem(PROPOSERS, "echo", echo)
    recipe = load_recipe(str(place / "recipe.yaml"), [f"eval.out={tmp_path}", "eval.max_prompts=2"])
    tree = TreeSection(policy="chain", nodes=4)
    contenders = named([main_contender(recipe), Contender("", "echo", tree, "here")])
    evaluation.evaluate_by_decoding(recipe, contenders, plan=False)
    row = files.read_acceptance(tmp_path / "acceptance.json")["contenders"]["echo of 3"]
    assert (row["proposer"], row["drafter"], row["matches_target"]) == ("echo", "the text itself", True)
    assert row["tree_nodes_per_round"] > 1
    assert "echo of 3" in Page((tmp_path / "report.html").read_text()).text
    monkeypatch.setitem(PROPOSERS, "echo", ProposerEntry(name=echo.name, make=echo.make, key="here", check=refuse))
    with pytest.raises(UserError, match="here: no such echo"):
        evaluation.evaluate_by_decoding(recipe, contenders, plan=True)
