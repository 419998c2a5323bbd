"""Training conversations that ask what the evaluation asks: what is found, what is not, and what is left out where."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.data_gen import contamination, rank_vocab
from draftsmith.data_gen.training_rows import overlap
from draftsmith.data_gen.training_rows.overlap import GRAM, EvaluationIndex, screen
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import DataSection, EvalSection, Recipe, TargetSection
from draftsmith.train.run import inputs
from tests.conftest import make_tokenizer
from tests.training_runs import run_main, train

chance = random.Random(0)
WORDS = ["".join(chance.choices("abcdefghijklmnop", k=6)) for _ in range(400)]


def words(count: int, seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def asks(*texts: Any, name: str = "t", benchmark: str = "b") -> Conversation:
    messages = [{"role": "user", "content": text} for text in texts]
    return Conversation(name, messages, meta={"benchmark": benchmark}, source="s", line=1)


def find(evaluation: list[Conversation], *texts: Any) -> tuple[str, str, float] | None:
    """(evaluation id, reason, share) of what a conversation with these user turns is found to ask."""
    finding = EvaluationIndex(evaluation).find(asks(*texts))
    return None if finding is None else (finding["evaluation_id"], finding["reason"], finding["share"])


# What is found.


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "  what IS the\ncapital -- of 'France' ",
        "what is the capital of \uff26rance",  # a full-width F
        [{"type": "text", "text": "What is the "}, {"type": "text", "text": "capital of France?"}],
    ],
)
def test_equal_questions_whatever_case_spacing_and_signs(text: Any) -> None:
    evaluation = [asks("Who?", name="e0"), asks("What is the capital of France?", name="e1")]
    assert find(evaluation, text) == ("e1", "exact", 1.0)
    assert find(evaluation, "something else", text) == ("e1", "exact", 1.0)  # in a later turn
    assert find(evaluation, f"{text} Tell me!") is None


def test_casefold_and_unspaced_scripts() -> None:
    assert find([asks("Straße und Ärger", name="e")], "STRASSE UND A\u0308RGER!") == ("e", "exact", 1.0)
    text = "".join(chr(0x4E00 + i) for i in range(40))
    assert find([asks(text, name="e")], f"請問:{text[:30]}。") == ("e", "overlap", 0.643)  # 18 of 28
    assert find([asks("∫∑?", name="e")], "∫∑ ?") == ("e", "exact", 1.0)
    assert find([asks("∫∑?", name="e")], "!?!") is None


def test_only_user_turns_count() -> None:
    index = EvaluationIndex([asks("What is the capital of France?")])
    for role in ("system", "assistant", "tool"):
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": "What is the capital of France?"}]
        assert index.find(Conversation("t", messages)) is None
    malformed: list[Any] = [3, None, {"role": "user"}, {"role": "user", "content": [3, {"text": None}]}]
    assert index.find(Conversation("t", malformed)) is None


def slow_share(asked: list[str], seen: list[str]) -> float:
    """The definition: the share of the evaluation turn's distinct runs of words that stand in the training turn."""
    runs = {tuple(asked[i : i + GRAM]) for i in range(len(asked) - GRAM + 1)}
    return sum(any(tuple(seen[i : i + GRAM]) == run for i in range(len(seen))) for run in runs) / len(runs)


@pytest.mark.parametrize("kept", [10, 25, 26, 40])
def test_overlap_is_the_share_of_runs(kept: int) -> None:
    asked = words(40, seed=1)
    seen = [*words(9, seed=2), *asked[:kept], *words(30, seed=3)]
    share = slow_share(asked, seen)
    expected = ("e", "overlap", round(share, 3)) if share >= 0.5 else None
    assert find([asks(" ".join(asked), name="e")], ", ".join(seen).upper()) == expected
    assert (expected is not None) == (kept >= 26)  # 14 of the 28 runs


def test_the_most_similar_evaluation_turn_is_named() -> None:
    asked = words(60, seed=1)
    evaluation = [asks(" ".join(asked[:40]), name="less"), asks(" ".join(asked[10:]), name="more")]
    assert find(evaluation, " ".join(asked[5:])) == ("more", "overlap", 1.0)
    assert find(evaluation, " ".join(asked[5:]), " ".join(asked[:40])) == ("less", "exact", 1.0)


def test_texts_shorter_than_a_run_are_found_exactly_or_not_at_all() -> None:
    short = words(GRAM - 1, seed=1)
    assert find([asks(" ".join(short), name="e")], " ".join([*short, "x"])) is None
    assert find([asks(" ".join([*short, "y"]), name="e")], " ".join(["x", *short, "y"])) == ("e", "overlap", 1.0)


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
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in EVALUATION))
    return Recipe(
        output_dir=str(tmp_path / "run"),
        target=TargetSection(model=str(target_dir), device="cpu"),
        data=DataSection(contamination=action, **data),  # type: ignore[arg-type]
        eval=EvalSection(prompts=str(tmp_path / "bench.jsonl"), max_prompts=1),
    )


def write_training(path: Path) -> str:
    """Six conversations; the second and the fifth ask evaluation questions."""
    questions = [f"training question {n}" for n in range(6)]
    questions[1], questions[4] = EVALUATION[3].upper(), EVALUATION[0]
    turns = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": f"a{n}"}] for n, q in enumerate(questions)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": f"t{n}", "messages": m}) + "\n" for n, m in enumerate(turns)))
    return str(path)


def listed(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recipe.contamination_path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("action", ["list", "remove", "off"])
def test_regeneration_lists_or_removes(
    tmp_path: Path, target_dir: Path, action: str, capsys: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, target_dir, action, prompts=write_training(tmp_path / "p.jsonl"))
    conversations = list(read_conversations(str(recipe.data.prompts), Rejects()))
    rejects = Rejects(tmp_path / "rejects.jsonl")
    asked = [c.id for c in screen(recipe, conversations, rejects)]
    printed = capsys.readouterr().out
    if action == "off":
        assert len(asked) == 6 and not printed and not recipe.contamination_path.exists()
        return
    first, second = listed(recipe)
    assert (first["id"], first["line"], first["reason"]) == ("t1", 2, "exact")
    assert (first["evaluation_id"], first["benchmark"], first["share"]) == ("bench.jsonl:4", "bench", 1.0)
    assert first["text"] == EVALUATION[3].upper() and first["evaluation_text"] == EVALUATION[3]
    assert (second["id"], second["evaluation_id"]) == ("t4", "bench.jsonl:1")
    assert "2 of 6 training conversations ask what 4 evaluation conversations ask (2 exact; bench 2)" in printed
    if action == "list":
        assert len(asked) == 6 and not rejects.total
    else:
        assert asked == ["t0", "t2", "t3", "t5"] and rejects.counts == {"contaminated": 2}
        entry = json.loads((tmp_path / "rejects.jsonl").read_text().splitlines()[0])
        assert (entry["line"], entry["reason"]) == (2, "contaminated: exact: asks what bench.jsonl:4 of bench asks")
        assert entry["record"]["id"] == "t1"


def test_nothing_left_to_ask_is_an_error(tmp_path: Path, target_dir: Path) -> None:
    recipe = recipe_of(tmp_path, target_dir, "remove", prompts=str(tmp_path / "bench.jsonl"))
    conversations = list(read_conversations(str(recipe.data.prompts), Rejects()))
    with pytest.raises(UserError, match=r"all 4 conversations ask what eval\.prompts ask"):
        screen(recipe, conversations, Rejects())


@pytest.mark.parametrize("action", ["list", "remove", "off"])
def test_rank_vocab_and_training_leave_out_the_same(
    tmp_path: Path, target_dir: Path, action: str, capsys: pytest.CaptureFixture
) -> None:
    path = write_training(tmp_path / "own.jsonl")
    recipe = recipe_of(tmp_path, target_dir, action, conversations=path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run_main(rank_vocab, tmp_path / "recipe.yaml")
    printed = capsys.readouterr().out
    tokenizer = make_tokenizer()
    digits = {n: tokenizer(str(n), add_special_tokens=False)["input_ids"][-1] for n in range(6)}
    rejects = Rejects()
    training, validation = inputs.read_rows(recipe, TargetFiles(recipe.target), rejects)
    ids = {row.id for row in training + validation}
    if action == "remove":
        assert ids == {"t0", "t2", "t3", "t5"} and rejects.counts == {"contaminated": 2}
        assert "left out" in printed and [entry["id"] for entry in listed(recipe)] == ["t1", "t4"]
        kept = [json.loads(line) for line in recipe.training_rejects_path.read_text().splitlines()]
        assert [entry["line"] for entry in kept] == [2, 5]
        supervised = {token for row in training + validation for token in row.input_ids}
        assert not supervised & {digits[1], digits[4]}
    else:
        assert len(ids) == 6 and not rejects.total
        assert recipe.contamination_path.exists() == ("contamination" in printed) == (action == "list")
    assert isinstance(DraftVocab.load(recipe.draft_vocab_path).target_ids, torch.Tensor)


def test_a_resumed_training_keeps_its_rows(tmp_path: Path, target_dir: Path) -> None:
    """The evaluation's prompts grew between the runs: other rows are left out, and the run says so."""
    recipe = recipe_of(tmp_path, target_dir, "remove", conversations=write_training(tmp_path / "own.jsonl"))
    bench, path = tmp_path / "bench.jsonl", tmp_path / "recipe.yaml"
    grown = bench.read_text()
    bench.write_text(json.dumps({"prompt": EVALUATION[3]}) + "\n")
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run_main(rank_vocab, path)
    train(path, "train.max_steps=1")
    train(path, "train.max_steps=2")
    bench.write_text(grown)
    with pytest.raises(UserError, match=r"rows: the checkpoint has '\d rows, sha256 .*, this run has '\d rows, sha256"):
        train(path, "train.max_steps=3")


def test_what_regenerate_wrote_is_not_listed_twice(tmp_path: Path, target_dir: Path) -> None:
    write_training(tmp_path / "run" / "conversations.jsonl")
    recipe = recipe_of(tmp_path, target_dir, "list", prompts=write_training(tmp_path / "p.jsonl"))
    assert overlap.training_check(recipe) is None
    # Removal looks again: the file may be older than the wish.
    removing = recipe_of(tmp_path, target_dir, "remove", prompts=str(tmp_path / "p.jsonl"))
    rows, _ = inputs.read_rows(removing, TargetFiles(removing.target), Rejects())
    assert {row.id for row in rows} <= {"t0", "t2", "t3", "t5"}


def test_evaluation_prompts_that_cannot_be_read(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """They stop nothing where findings are only listed; nothing is left out by half a check."""
    import datasets

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    own = write_training(tmp_path / "own.jsonl")
    conversations = list(read_conversations(own, Rejects()))
    sources = ["mt_bench", str(tmp_path / "gone.jsonl"), str(tmp_path / "bench.jsonl")]

    def recipe(action: str, prompts: list[str]) -> Recipe:
        base = recipe_of(tmp_path, target_dir, action, conversations=own)
        return base.model_copy(update={"eval": EvalSection(prompts=prompts)})

    assert len(screen(recipe("list", sources), conversations, Rejects())) == 6
    printed = capsys.readouterr().out
    assert "no contamination check against eval.prompts: mt_bench: datasets cannot fetch" in printed
    assert f"no contamination check against eval.prompts: no such file: {tmp_path / 'gone.jsonl'}" in printed
    assert "2 of 6 training conversations" in printed
    assert len(screen(recipe("list", sources[:1]), conversations, Rejects())) == 6
    printed = capsys.readouterr().out
    assert "0 of 6 training conversations ask what 0 evaluation conversations ask\n" in printed
    removing = recipe("remove", sources)
    for check in (
        lambda: screen(removing, conversations, Rejects()),
        lambda: inputs.read_rows(removing, TargetFiles(removing.target), Rejects()),
    ):
        with pytest.raises(UserError) as caught:
            check()
        mt_bench, gone, advice = caught.value.problems
        assert "cannot fetch" in mt_bench and "no such file" in gone and "data.contamination=list" in advice


def test_large_sources_are_compared_in_part_and_that_is_said(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "MOST", 2)
    check = overlap.Check(recipe_of(tmp_path, target_dir, "list"), remove=False)
    assert check.index.conversations == 2 and "the first 2 conversations of" in check.notes[0]


# The script.


def test_script(tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture) -> None:
    prompts, own = write_training(tmp_path / "p.jsonl"), write_training(tmp_path / "own.jsonl")
    recipe = recipe_of(tmp_path, target_dir, "off", prompts=prompts, conversations=own)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run_main(contamination, tmp_path / "recipe.yaml", "--plan")
    assert prompts in capsys.readouterr().out and not recipe.contamination_path.exists()
    for overrides, expected in [
        ([], [(prompts, "t1"), (prompts, "t4"), (own, "t1"), (own, "t4")]),
        # Asked about one source again, the other's lines stay.
        (["data.conversations=null", "data.max_prompts=2"], [(own, "t1"), (own, "t4"), (prompts, "t1")]),
    ]:
        run_main(contamination, tmp_path / "recipe.yaml", *overrides)
        assert [(entry["source"], entry["id"]) for entry in listed(recipe)] == expected
    printed = capsys.readouterr().out
    assert f"6 conversations of {prompts}, 6 conversations of {own}" in printed
    assert "4 of 12 training conversations" in printed and "(4 exact; bench 4)" in printed


def test_the_list_is_no_other_file(tmp_path: Path, target_dir: Path) -> None:
    recipe = recipe_of(tmp_path, target_dir, "list", prompts=write_training(tmp_path / "p.jsonl"))
    recipe.contamination_path.parent.mkdir(parents=True)
    recipe.contamination_path.write_text("my notes\n")
    with pytest.raises(UserError, match="not a list of contaminated conversations"):
        screen(recipe, [asks(EVALUATION[0])], Rejects())
    assert recipe.contamination_path.read_text() == "my notes\n"
