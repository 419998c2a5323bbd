"""C2T by its scripts, from recorded answers to acceptance, and what they refuse."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.c2t_labels import labelling
from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import (
    check_contenders,
    drafter_identity,
    loaded_drafting,
    loaded_identity,
    loaded_proposer,
    main_contender,
)
from draftsmith.models.c2t import C2tClassifier, C2tConfig, read_c2t_config
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.train import c2t
from tests.c2t_cases import content_of, recipe_of
from tests.c2t_cases import place as place
from tests.c2t_cases import script as script


def test_from_answers_to_acceptance(place: Path, script: Callable[..., str], tmp_path: Path) -> None:
    labels, rows = f"labels.out={tmp_path / 'rows'}", f"classifier.rows={tmp_path / 'rows'}"
    out = f"classifier.out={tmp_path / 'c2t'}"
    assert "52 nodes a tree" in script(label_trees, labels, "--plan") and not (tmp_path / "rows").exists()
    script(label_trees, labels)
    trees = Trees.read(tmp_path / "rows")
    lineup, drafts = LoadedModels(TargetFiles(recipe_of(place).target)), main_contender(recipe_of(place))
    assert trees.about["drafter"] == loaded_identity(lineup, drafts, loaded_drafting(lineup, drafts).vocab)
    assert trees.about["answers"] == 8
    assert len(trees.accepted) + trees.about["dropped_beyond"] == 52 * len(trees.sizes)
    assert int(trees.accepted.sum()) > 20 and trees.features[:, 2].unique().tolist() == [0, 1, 2, 3]

    assert "to train on" in script(c2t, rows, out, "--plan") and not (tmp_path / "c2t").exists()
    script(c2t, rows, out)
    first, config = content_of(tmp_path / "c2t"), read_c2t_config(tmp_path / "c2t")
    assert {"config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "recipe.yaml"} == set(first)
    assert config == C2tConfig(drafter=trees.about["drafter"])
    script(c2t, rows, out)
    assert content_of(tmp_path / "c2t") == first
    again = f"classifier.out={tmp_path / 'again'}", f"classifier.init_from={tmp_path / 'c2t'}"
    script(c2t, rows, *again, "classifier.share=1")
    assert read_c2t_config(tmp_path / "again") == config

    row = "{}: eval.tree={{policy: c2t, draft_calls: 4, top_k: 4, c2t: {{classifier: {}, beta: {}}}}}"
    compared = [row.format(name, tmp_path / "c2t", beta) for name, beta in (("loose", 0.01), ("strict", 0.9))]
    script(acceptance, f"eval.out={tmp_path / 'eval'}", "eval.mode=replay", "--compare", *compared)
    found = json.loads((tmp_path / "eval/replay/acceptance.json").read_text())["contenders"]
    loose, strict = found["loose"], found["strict"]
    assert loose["tree_nodes_per_round"] > strict["tree_nodes_per_round"] >= 1
    assert loose["tau"] > strict["tau"]


def test_answers_come_from_validation_conversations_by_default(place: Path, tmp_path: Path) -> None:
    answers = (place / "answers.jsonl").read_text().splitlines()
    (tmp_path / "conversations.jsonl").write_text("".join(line + "\n" for line in answers))
    here = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}")
    recording, chosen = labelling.answers_to_label(here, TargetFiles(here.target))
    assert len(chosen) == 1 and "answers are taken from the 1 conv" in recording.note  # a fifth of the eight at most
    none = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}", "train.validation_conversations=0")
    recording, chosen = labelling.answers_to_label(none, TargetFiles(none.target))
    assert len(chosen) == 8 and "has learnt these answers" in recording.note
    gone = recipe_of(place, "labels.answers=null", "output_dir=/nowhere")
    with pytest.raises(UserError, match=r"labels\.answers: not given, and there are no conversations"):
        labelling.answers_to_label(gone, TargetFiles(gone.target))


def test_max_rows_ends_with_a_whole_answer(place: Path, script: Callable[..., str], tmp_path: Path) -> None:
    def labelled(*settings: str) -> Trees:
        script(label_trees, f"labels.out={tmp_path / 'rows'}", *settings)
        return Trees.read(tmp_path / "rows")

    whole, most = labelled(), 1
    for answers in (1, 2, 3):  # the third ends a batch
        some = labelled(f"labels.max_rows={most}")
        assert some.about["answers"] == answers and len(some.accepted) >= most
        first = whole.chosen(torch.arange(len(some.sizes)))
        assert torch.equal(some.features, first.features) and torch.equal(some.accepted, first.accepted)
        assert len(labelled(f"labels.max_rows={len(some.accepted)}").accepted) == len(some.accepted)
        most = len(some.accepted) + 1


# Which drafter a classifier belongs to.


def test_a_classifier_for_another_drafter_is_refused(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    mine = drafter_identity(main_contender(recipe), DraftVocab.full(64))
    assert mine["proposer"] == "drafter" and len(mine["weights_sha256"]) == 64

    def check(words: dict[str, Any], drafter: Path = place / "run/drafter") -> None:
        C2tClassifier(C2tConfig(drafter=words)).save(tmp_path / "c2t")
        tree = f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"
        contender = replace(main_contender(recipe_of(place, tree)), drafter=drafter)
        check_contenders(recipe, TargetFiles.read(recipe.target), [contender])
        loaded_proposer(LoadedModels(TargetFiles(recipe.target)), contender)

    shutil.copytree(place / "run/drafter", tmp_path / "moved")
    check(mine)
    check({})  # nobody knows
    check(mine, tmp_path / "moved")
    for words, told in (
        ({"proposer": "causal_lm"}, "proposer: 'causal_lm' there, 'drafter' here"),
        ({"weights_sha256": "0" * 64}, "weights_sha256: '00000000"),
        ({"vocab_sha256": "0" * 64}, "vocab_sha256: '0+... there, None here"),
    ):
        with pytest.raises(UserError, match=rf"tree.c2t.classifier: .*for another drafter.*{told}.*init_from"):
            check(mine | words)
    contender = main_contender(recipe_of(place, f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"))
    with pytest.raises(UserError, match="a classifier for another drafter"):  # the Python API checks no contenders
        loaded_proposer(LoadedModels(TargetFiles(recipe.target)), contender)
