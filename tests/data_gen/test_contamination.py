"""Training conversations that ask what the evaluation asks: what is found, what is not, and what is left out where."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftsmith.data_gen import contamination, rank_vocab
from draftsmith.data_gen.training_rows.overlap import GRAM, EvaluationIndex, screen
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import EvalSection
from draftsmith.train.run import training_inputs
from tests.evaluation_cases import write_lines
from tests.training_runs import run_main, write_recipe

chance = random.Random(0)
WORDS = ["".join(chance.choices("abcdefghijklmnop", k=6)) for _ in range(400)]


def words(count: int, seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def asks(*texts: Any, name: str = "t") -> Conversation:
    messages = [{"role": "user", "content": text} for text in texts]
    return Conversation(name, messages, meta={"benchmark": "b"}, source="s", line=1)


def find(evaluation: list[Conversation], *texts: Any) -> tuple[str, str, float] | None:
    """(evaluation id, reason, share) of what a conversation with these user turns is found to ask."""
    finding = EvaluationIndex(evaluation).find(asks(*texts))
    return None if finding is None else (finding["evaluation_id"], finding["reason"], finding["share"])


# What is found.


def test_equal_questions_whatever_case_spacing_and_signs() -> None:
    evaluation = [asks("Who?", name="e0"), asks("What is the capital of France?", name="e1")]
    full_width = "what is the capital of \uff26rance"
    parts = [{"type": "text", "text": text} for text in ("What is the ", "capital of France?")]
    for text in ("  what IS the\ncapital -- of 'France' ", full_width, parts):
        assert find(evaluation, text) == ("e1", "exact", 1.0)
        assert find(evaluation, "something else", text) == ("e1", "exact", 1.0)  # in a later turn
        assert find(evaluation, f"{text} Tell me!") is None
    assert find([asks("Straße und Ärger", name="e")], "STRASSE UND A\u0308RGER!") == ("e", "exact", 1.0)
    text = "".join(chr(0x4E00 + i) for i in range(40))  # unspaced
    assert find([asks(text, name="e")], f"請問:{text[:30]}。") == ("e", "overlap", 0.643)  # 18 of 28
    assert find([asks("∫∑?", name="e")], "∫∑ ?") == ("e", "exact", 1.0)
    assert find([asks("∫∑?", name="e")], "!?!") is None
    for role in ("system", "assistant", "tool"):
        said = [{"role": "user", "content": "x"}, {"role": role, "content": "What is the capital of France?"}]
        assert EvaluationIndex(evaluation).find(Conversation("t", said)) is None


@given(
    asked=st.lists(st.sampled_from("abc"), min_size=GRAM, max_size=30),
    seen=st.lists(st.sampled_from("abc"), min_size=1, max_size=30),
    kept=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
@example(asked=words(40, seed=1), seen=words(40, seed=2), kept=(0, 26))  # 14 of the 28 runs
@example(asked=words(40, seed=1), seen=words(40, seed=2), kept=(0, 25))
@settings(deadline=None, derandomize=True, database=None, max_examples=200)
def test_overlap_is_the_share_of_runs(asked: list[str], seen: list[str], kept: tuple[int, int]) -> None:
    """Of the evaluation turn's distinct runs of words those that stand in the training turn, if they are half."""
    seen = [*seen[:9], *asked[kept[0] : kept[1]], *seen[9:]]
    runs, there = ({tuple(turn[i : i + GRAM]) for i in range(len(turn) - GRAM + 1)} for turn in (asked, seen))
    share = 1.0 if seen == asked else len(runs & there) / len(runs)
    expected = ("e", "exact" if seen == asked else "overlap", round(share, 3)) if share >= 0.5 else None
    assert find([asks(" ".join(asked), name="e")], ", ".join(seen).upper()) == expected


def test_the_most_similar_evaluation_turn_is_named() -> None:
    asked = words(60, seed=1)
    evaluation = [asks(" ".join(asked[:40]), name="less"), asks(" ".join(asked[10:]), name="more")]
    assert find(evaluation, " ".join(asked[5:])) == ("more", "overlap", 1.0)
    assert find(evaluation, " ".join(asked[5:]), " ".join(asked[:40])) == ("less", "exact", 1.0)


def test_a_form_of_words_that_many_evaluation_turns_share_is_no_question() -> None:
    form = words(40, seed=1)
    evaluation = [asks(" ".join([*form, *words(15, seed=10 + n)]), name=f"e{n}") for n in range(3)]
    assert find(evaluation, " ".join([*form, *words(15, seed=99)])) is None
    assert find(evaluation, " ".join([*form, *words(15, seed=11)])) == ("e1", "exact", 1.0)
    assert find(evaluation, " ".join([*form, *words(15, seed=11), "x"])) == ("e1", "overlap", 1.0)
    # Of two turns the runs still count, and the same question twice is one question.
    assert find(evaluation[:2], " ".join([*form, *words(15, seed=99)])) == ("e0", "overlap", 0.651)
    again = [*evaluation[:1], *(asks(*(m["content"] for m in evaluation[0].messages), name=f"copy{n}") for n in "ab")]
    assert find(again, " ".join([*form, "x"])) == ("e0", "overlap", 0.651)


def test_short_later_turns_say_nothing() -> None:
    evaluation = [asks("Tell me a story about a cat.", "Go on, please.", "Now as a poem of four lines in the rain.")]
    assert find(evaluation, "What is rain?", "go on please") is None
    assert find(evaluation, "now as a poem of four lines in the rain") is not None
    assert find([asks("Go on, please.")], "go on please") is not None  # as a first turn it is the question


# In a pipeline.

EVALUATION = [f"evaluation question number {n} about the cat and the mat" for n in range(4)]


def recipe_of(tmp_path: Path, target_dir: Path, action: str, **data: Any) -> Recipe:
    """Also in tmp_path/recipe.yaml."""
    bench = write_lines(tmp_path / "bench.jsonl", *({"prompt": text} for text in EVALUATION))
    evaluation = {"prompts": str(bench), "max_prompts": 1}
    return load_recipe(write_recipe(tmp_path, target_dir, data={"contamination": action, **data}, eval=evaluation))


def write_training(path: Path) -> str:
    """Six conversations; the second and the fifth ask evaluation questions."""
    questions = [f"training question {n}" for n in range(6)]
    questions[1], questions[4] = EVALUATION[3].upper(), EVALUATION[0]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in questions]
    return str(write_lines(path, *({"id": f"t{n}", "messages": talk} for n, talk in enumerate(talks))))


def listed(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recipe.contamination_path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("action", ["list", "remove", "off"])
def test_regeneration_lists_or_removes(
    tmp_path: Path, target_dir: Path, action: str, capsys: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, target_dir, action, prompts=write_training(tmp_path / "p.jsonl"))
    rejects = Rejects(tmp_path / "rejects.jsonl")
    asked = [c.id for c in screen(recipe, list(read_conversations(recipe.data.prompts, Rejects())), rejects)]
    printed = capsys.readouterr().out
    if action == "off":
        assert len(asked) == 6 and not printed and not recipe.contamination_path.exists()
        return
    first, second = listed(recipe)
    assert {"id": "t1", "line": 2, "reason": "exact", "evaluation_id": "bench.jsonl:4"}.items() <= first.items()
    assert (second["id"], second["evaluation_id"]) == ("t4", "bench.jsonl:1")
    assert "2 of 6 training conversations ask what 4 evaluation conversations ask" in printed
    if action == "list":
        assert len(asked) == 6 and not rejects.total
        return
    assert asked == ["t0", "t2", "t3", "t5"] and rejects.counts == {"contaminated": 2}
    entry = json.loads((tmp_path / "rejects.jsonl").read_text().splitlines()[0])
    assert (entry["line"], entry["record"]["id"]) == (2, "t1") and entry["reason"].startswith("contaminated: exact")


@pytest.mark.parametrize("action", ["list", "remove", "off"])
def test_rank_vocab_and_training_leave_out_the_same(
    tmp_path: Path, target_dir: Path, action: str, capsys: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, target_dir, action, conversations=write_training(tmp_path / "own.jsonl"))
    run_main(rank_vocab, tmp_path / "recipe.yaml")
    printed, rejects = capsys.readouterr().out, Rejects()
    ids = {row.id for rows in training_inputs.read_rows(recipe, TargetFiles(recipe.target), rejects) for row in rows}
    assert recipe.draft_vocab_path.exists()
    assert recipe.contamination_path.exists() == ("contamination" in printed) == (action != "off")
    if action == "remove":
        assert ids == {"t0", "t2", "t3", "t5"} and rejects.counts == {"contaminated": 2}
        assert "left out" in printed and [entry["id"] for entry in listed(recipe)] == ["t1", "t4"]
        kept = [json.loads(line) for line in recipe.training_rejects_path.read_text().splitlines()]
        assert [entry["line"] for entry in kept] == [2, 5]
    else:
        assert len(ids) == 6 and not rejects.total


def test_evaluation_prompts_that_cannot_be_read(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """They stop nothing where findings are only listed; nothing is left out by half a check."""
    monkeypatch.setattr(datasets, "load_dataset", None)  # as without a network
    own = write_training(tmp_path / "own.jsonl")
    conversations = list(read_conversations(own, Rejects()))
    sources = ["mt_bench", str(tmp_path / "gone.jsonl"), str(tmp_path / "bench.jsonl")]
    evaluation = {"eval": EvalSection(prompts=sources)}
    listing, removing = (
        recipe_of(tmp_path, target_dir, action, conversations=own).model_copy(update=evaluation)
        for action in ("list", "remove")
    )
    assert len(screen(listing, conversations, Rejects())) == 6
    printed = capsys.readouterr().out
    assert printed.count("no contamination check against eval.prompts: ") == 2
    assert "2 of 6 training conversations" in printed
    with pytest.raises(UserError, match=r"cannot fetch(.|\n)*no such file(.|\n)*data\.contamination=list"):
        screen(removing, conversations, Rejects())


def test_script(tmp_path: Path, target_dir: Path) -> None:
    prompts, own = write_training(tmp_path / "p.jsonl"), write_training(tmp_path / "own.jsonl")
    recipe = recipe_of(tmp_path, target_dir, "off", prompts=prompts, conversations=own)
    for overrides, expected in (
        ([], [(prompts, "t1"), (prompts, "t4"), (own, "t1"), (own, "t4")]),
        (["data.conversations=null", "data.max_prompts=2"], [(prompts, "t1")]),
    ):
        run_main(contamination, tmp_path / "recipe.yaml", *overrides)
        assert [(entry["source"], entry["id"]) for entry in listed(recipe)] == expected
