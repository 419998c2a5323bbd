"""C2T by its scripts, from recorded answers to a sweep, and what they refuse."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.trees import labelling
from draftsmith.data_gen.trees.labelled_trees import TreesManifest, read_trees
from draftsmith.data_gen.trees.labelling import answer_batches
from draftsmith.eval import c2t_sweep
from draftsmith.eval.decoding.contenders import Lineup, drafter_record, main_contender
from draftsmith.eval.decoding.policies import Eagle2, PolicyProposer
from draftsmith.eval.recorded.answers import RecordedAnswer
from draftsmith.eval.recorded.replay import replay
from draftsmith.models.c2t import C2tClassifier, C2tConfig, read_c2t_config
from draftsmith.recipes.errors import UserError
from draftsmith.train import c2t
from tests.c2t_cases import content_of, made_trees, recipe_of, write_trees
from tests.c2t_cases import place as place
from tests.c2t_cases import script as script


@pytest.mark.slow
def test_from_answers_to_a_sweep(place: Path, script: Callable[..., str], tmp_path: Path) -> None:
    rows, out = f"labels.out={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}"
    said = script(label_trees, rows, "--plan")
    assert "52 nodes a tree (4 calls, top 4)" in said and "done         nothing yet" in said
    assert "drawn with other settings" not in said
    assert "drawn with other settings (greedy)" in script(label_trees, rows, "eval.temperature=1", "--plan")
    assert not (tmp_path / "rows").exists()
    script(label_trees, rows)
    manifest = TreesManifest.read(tmp_path / "rows")
    assert manifest is not None and manifest.complete
    assert [shard["answers"] for shard in manifest.shards.values()] == [3, 3, 2]
    assert manifest.made_of["drafter"] == drafter_record(
        main_contender(recipe_of(place)), None, recipe_of(place).target
    )
    trees = read_trees(tmp_path / "rows", manifest)
    assert (trees.rows, trees.count) == (manifest.total("rows"), manifest.total("trees"))
    assert trees.rows + manifest.total("dropped_beyond") == 52 * trees.count
    assert int(trees.accepted.sum()) == manifest.total("accepted") > 20
    assert trees.answer.unique().tolist() == list(range(8))
    assert int(trees.d.min()) == 0 and int(trees.d.max()) == 3

    said = script(c2t, rows, out, "--plan")
    assert f"of {trees.count:,} trees" in said and not (tmp_path / "c2t").exists()
    script(c2t, rows, out)
    assert sorted(content_of(tmp_path / "c2t")) == [
        *("config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "recipe.yaml")
    ]
    config, _ = read_c2t_config(tmp_path / "c2t")
    assert config == C2tConfig(48, 1000, 10.0, manifest.made_of["drafter"])
    assert len((tmp_path / "c2t/metrics.jsonl").read_text().splitlines()) == 4
    first = content_of(tmp_path / "c2t")
    script(c2t, rows, out)
    assert content_of(tmp_path / "c2t") == first

    script(
        c2t,
        rows,
        f"classifier.out={tmp_path / 'again'}",
        f"classifier.init_from={tmp_path / 'c2t'}",
        "classifier.share=1",
    )
    assert read_c2t_config(tmp_path / "again")[0] == config
    with pytest.raises(UserError, match=r"hidden: 12, but the classifier in .* has 48; set classifier.hidden=48"):
        script(c2t, rows, out, f"classifier.init_from={tmp_path / 'c2t'}", "classifier.hidden=12")

    settings = out, f"eval.out={tmp_path / 'eval'}", "--betas", "0.02", "0.5", "0.3", "--nodes", "4", "9"
    script(c2t_sweep, *settings, "--plan")
    assert not (tmp_path / "eval").exists()
    said = script(c2t_sweep, *settings, "--beams", "2:0.01,0.5,0.3", "all")
    found = json.loads((tmp_path / "eval/c2t_sweep.json").read_text())
    assert (tmp_path / "eval/c2t_sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "eval").iterdir())) == 2
    assert [(row["curve"], row["value"]) for row in found["points"]] == [
        *(("c2t, beam 2", beta) for beta in (0.5, 0.3, 0.01)),
        *(("c2t, beam all", beta) for beta in (0.5, 0.3, 0.02)),
        *(("eagle2", nodes) for nodes in (4, 9)),
    ]
    lineup = Lineup(recipe_of(place).target)
    _, answers = labelling.answers_to_label(recipe_of(place))
    eagle2 = replay(
        lineup.target, PolicyProposer(lineup.drafting(main_contender(recipe_of(place))), Eagle2(9, 4, 4)), answers, 3
    )
    rounds = sum(g.rounds for g in eagle2)
    row = found["points"][-1]
    assert row["candidates"] == 9 * rounds
    assert row["tau"] == round(sum(len(g.token_ids) - 1 for g in eagle2) / rounds, 4)
    assert f"{row['candidates']:,}" in said


def test_answers_come_from_validation_conversations_by_default(place: Path, tmp_path: Path) -> None:
    answers = (place / "answers.jsonl").read_text().splitlines()
    (tmp_path / "conversations.jsonl").write_text("".join(line + "\n" for line in answers))
    here = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}")
    recording, chosen = labelling.answers_to_label(here)
    assert len(chosen) == 1 and "answers are taken from the 1 conv" in recording.note  # a fifth of the eight at most
    none = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}", "train.validation_conversations=0")
    recording, chosen = labelling.answers_to_label(none)
    assert len(chosen) == 8 and "has learnt these answers" in recording.note
    with pytest.raises(UserError, match=r"labels\.answers: not given, and there are no conversations"):
        labelling.answers_to_label(recipe_of(place, "labels.answers=null", "output_dir=/nowhere"))


def test_max_rows_ends_with_a_whole_answer_and_more_go_on_behind_it(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    script(label_trees, f"labels.out={tmp_path / 'all'}")
    out = f"labels.out={tmp_path / 'some'}"
    whole = TreesManifest.read(tmp_path / "all")
    assert whole is not None
    trees = read_trees(tmp_path / "all", whole)
    per_answer = [int((trees.answer.repeat_interleave(trees.starts.diff()) == i).sum()) for i in range(8)]
    most = sum(per_answer[:4]) - 5
    script(label_trees, out, f"labels.max_rows={most}")
    some = TreesManifest.read(tmp_path / "some")
    assert some is not None and some.complete
    assert [shard["answers"] for shard in some.shards.values()] == [3, 1]
    assert some.total("rows") == sum(per_answer[:4])
    assert "all is labelled" in script(label_trees, out, f"labels.max_rows={most}")
    first = (tmp_path / "some/shard-00000.safetensors").stat().st_mtime_ns
    assert "3 of 8 answers are done, going on" in script(label_trees, out)  # the cut batch is made whole
    assert content_of(tmp_path / "some") == content_of(tmp_path / "all")
    assert (tmp_path / "some/shard-00000.safetensors").stat().st_mtime_ns == first
    assert "all is labelled" in script(label_trees, out)


def test_rows_that_were_made_otherwise_are_not_gone_on_with(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    out = f"labels.out={tmp_path / 'rows'}"
    script(label_trees, out)
    for override, told in {
        "labels.top_k=3": "top_k: 4 there, 3 now",
        "labels.draft_calls=2": "draft_calls: 4 there, 2 now",
        "labels.entropy_over=9": "entropy_over: 1000 there, 9 now",
        "target.dtype=bfloat16": "target.dtype: 'float32' there, 'bfloat16' now",
        "data.max_length=100": "",  # says nothing of the rows
    }.items():
        if told:
            with pytest.raises(UserError, match=told):
                script(label_trees, out, override)
        else:
            assert "all is labelled" in script(label_trees, out, override)
    (tmp_path / "rows/shard-00001.safetensors").write_bytes(b"")
    before = content_of(tmp_path / "rows")
    assert "shard 1 is missing or damaged; labelling continues from there" in script(label_trees, out)
    after = content_of(tmp_path / "rows")
    assert len(after["shard-00001.safetensors"]) > 0
    assert after["manifest.json"] == before["manifest.json"]


def test_who_can_be_labelled(place: Path) -> None:
    recipe = recipe_of(place)
    with pytest.raises(UserError, match=r"no contender is called 'x'; there are .*'lookup'"):
        labelling.labelled_contender(recipe, "x")
    with pytest.raises(UserError, match="prompt_lookup has no "):
        labelling.labelled_contender(recipe, "lookup")
    (place / "file").touch()
    with pytest.raises(UserError) as error:
        labelling.check_place(recipe_of(place, "labels.draft_calls=600", f"labels.out={place / 'file'}"))
    assert "labels.out: " in error.value.problems[0] and "is a file; name a folder" in error.value.problems[0]
    assert error.value.problems[1].startswith("labels.draft_calls: 600 draft calls deep, in a target of ")
    with pytest.raises(UserError, match=r"labels.out: .*cannot be made: .*file is a file"):
        labelling.check_place(recipe_of(place, f"labels.out={place / 'file/x'}"))
    assert len(answer_batches([RecordedAnswer([1], [2])] * 7, 3)) == 3


def test_a_folder_that_is_no_classifier_is_not_replaced(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/one.txt").write_text("dear")
    for out in (tmp_path / "letters", place / "run/drafter"):
        with pytest.raises(UserError, match="holds something other than a classifier"):
            script(c2t, f"classifier.rows={tmp_path / 'rows'}", f"classifier.out={out}")
    assert (tmp_path / "letters/one.txt").exists()


def test_a_classifier_that_lets_nothing_pass_says_so(script: Callable[..., str], tmp_path: Path) -> None:
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    here = f"classifier.rows={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}"
    said = script(c2t, *here, "classifier.epochs=1", "classifier.batch_size=16", "classifier.negative_ratio=null")
    assert "recall 0.0000" in said and "note: no accepted node" in said
    said = script(c2t, *here, "classifier.epochs=100", "classifier.learning_rate=0.01")
    assert "recall 0.0000" not in said and "note: no accepted node" not in said


def test_a_classifier_s_mistakes_are_told_at_once_and_before_training(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    rows = f"classifier.rows={tmp_path / 'rows'}"
    for plan in ((), ("--plan",)):
        with pytest.raises(UserError) as error:
            init = f"classifier.init_from={tmp_path / 'nowhere'}"
            script(c2t, "classifier.rows=/nowhere", init, f"classifier.out={tmp_path / 'file'}", *plan)
        for problem, told in zip(
            error.value.problems, ("no C2T classifier here", "no labelled trees here", "is a file; name"), strict=True
        ):
            assert told in problem
        with pytest.raises(UserError, match=r"classifier.out: .*cannot be made: .*file is a file"):
            script(c2t, rows, f"classifier.out={tmp_path / 'file/c2t'}", *plan)
        C2tClassifier(C2tConfig()).save(tmp_path / "old")
        (tmp_path / "old/model.safetensors").write_bytes(b"123")
        with pytest.raises(UserError, match="not a readable safetensors file"):
            script(c2t, rows, f"classifier.init_from={tmp_path / 'old'}", f"classifier.out={tmp_path / 'new'}", *plan)
    assert not (tmp_path / "new").exists()


def test_a_drafter_of_nan_is_told_after_the_first_shard(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(place / "run/drafter", tmp_path / "drafter")
    weights = tmp_path / "drafter/model.safetensors"
    tensors, words = load_file(weights), {}
    with safe_open(weights, framework="pt") as file:
        words = file.metadata()
    broken = {name: t.fill_(math.nan) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(broken, weights, metadata=words)
    with pytest.raises(UserError, match=r"drafter: all [\d,]+ nodes drafted along 3 answers have NaN") as error:
        script(label_trees, f"labels.out={tmp_path / 'rows'}", f"eval.drafter={tmp_path / 'drafter'}")
    assert str(tmp_path / "drafter") in str(error.value)
    assert not content_of(tmp_path / "rows")
