"""Contenders from recipes and overrides: names, checks, and the folder of a run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval import acceptance
from draftsmith.eval.decoding import contenders, proposers
from draftsmith.eval.decoding.contenders import Contender, check_contenders, describe, named
from draftsmith.eval.measured import benchmarks, evaluation
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.measured.compared import load_all, split_overrides
from draftsmith.models import loaded_models
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import ContenderSection, TreeSection
from tests.compare_cases import also, save_untrained
from tests.compare_cases import place as place
from tests.conftest import make_target, make_tokenizer
from tests.training_runs import run_main


def problems_of(recipe: Path, *compared: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(UserError) as raised:
        load_all(str(recipe), overrides, compared)
    return raised.value.problems


# --compare


@pytest.mark.parametrize(
    ("argument", "name", "settings"),
    [
        ("eval.tree.nodes=16", "", ["eval.tree.nodes=16"]),
        ("  eval.tree.nodes=16   eval.tree.top_k=4 ", "", ["eval.tree.nodes=16", "eval.tree.top_k=4"]),
        ("wide: eval.tree.nodes=9", "wide", ["eval.tree.nodes=9"]),
        ("a, b: c: eval.tree.nodes=9", "a, b: c", ["eval.tree.nodes=9"]),
        ("eval.tree={policy: chain, nodes: 5}", "", ["eval.tree={policy: chain, nodes: 5}"]),
        ("x: eval.tree={policy: ddd} eval.drafter=a b", "x", ["eval.tree={policy: ddd}", "eval.drafter=a b"]),
        (
            "eval.tree.paths=[[0], [1], [0, 0]] eval.tree.policy=static",
            "",
            ["eval.tree.paths=[[0], [1], [0, 0]]", "eval.tree.policy=static"],
        ),
    ],
)
def test_a_set_of_overrides_is_split_where_a_key_begins(argument: str, name: str, settings: list[str]) -> None:
    assert split_overrides(argument) == (name, settings)


def test_one_contender_for_each_argument(place: Path) -> None:
    recipe, found, notes = load_all(
        str(place / "recipe.yaml"),
        ["eval.max_prompts=2", "eval.also=[{name: lookup, proposer: prompt_lookup, tree: {policy: chain, nodes: 6}}]"],
        [
            "eval.tree.nodes=8",
            "deep: eval.tree={policy: ddd, nodes: 9} ",
            str(place / "other.yaml"),
            f"other: eval.drafter={place / 'other/drafter'}",
            "eval.tree.vocab_size=16",
            "again: eval.tree.nodes=8",
            f"its own: {place / 'other.yaml'}",
            "copy: eval.proposer=prompt_lookup eval.tree={policy: chain}",
        ],
    )
    assert recipe.eval.max_prompts == 2
    assert [(c.name, c.tree.policy, c.tree.most) for c in found] == [
        ("eagle3, tree of 12", "eagle2", 12),
        ("lookup", "chain", 6),
        ("eagle3, tree of 8", "eagle2", 8),
        ("deep", "ddd", 9),
        ("eagle3, chain of 3", "chain", 4),
        ("other", "eagle2", 12),
        ("eagle3, tree of 12, 16 tokens", "eagle2", 12),
        ("again", "eagle2", 8),  # how much does this machine waver?
        ("its own", "chain", 4),
        ("copy", "chain", 6),
    ]
    folders = ["run", None, "run", "run", "other", "other", "run", "run", "other", None]
    assert [c.drafter and c.drafter.parent.name for c in found] == folders
    # Single keys add to the recipe's, a section replaces it.
    assert found[2].tree.calls == 3 and found[3].tree.calls == 11
    assert found[6].token_counts == place / "run/token_counts.safetensors" and found[0].token_counts is None
    assert len(notes) == 2 and notes[0] == notes[1]
    note = notes[0]
    assert "other.yaml says eval.prompts None (here " in note and "eval.max_new_tokens 512 (here 24)" in note


def test_every_problem_of_every_recipe_at_once(place: Path, tmp_path: Path) -> None:
    first, broken = place / "recipe.yaml", tmp_path / "broken.yaml"
    broken.write_text("output_dir: x\ntarget: {model: a/b}\nevil: 1\ntrain: {max_steps: 0}\n")
    compared = (
        str(broken),
        "eval.tree.nodes=1",
        "eval.max_new_tokens=9 target.dtype=bfloat16",
        str(tmp_path / "gone.yaml"),
        "eval.tree.nods=8",
        "eval.tree.policy=static",
        "name only: ",
    )
    problems = problems_of(first, *compared)
    for said in (
        f"--compare '{broken}': {broken}:3: unknown key `evil`",
        f"--compare '{broken}': {broken}:4: `train.max_steps`",
        "--compare 'eval.tree.nodes=1': override 'eval.tree.nodes=1': `eval.tree.nodes`: expected at least 2",
        "eval.max_new_tokens is the same for all contenders; they may differ only in eval.proposer, eval.drafter",
        "target.dtype is the same for all contenders",
        "gone.yaml: no such recipe file",
        "did you mean `eval.tree.nodes`",
        "leave nodes, draft_calls, top_k out",
        "--compare 'name only: ': name only:: no such recipe file",
    ):
        assert any(said in problem for problem in problems), (said, problems)
    assert len(problems) == 9
    # A problem of the first recipe is told once, not with every set of overrides; the other files are still read.
    both = problems_of(first, "eval.tree.nodes=8", str(broken), overrides=("eval.evil=1", "data.evil=2"))
    assert len(both) == 4 and sum("`eval.evil`" in problem for problem in both) == 1


def test_rows_of_a_compared_recipe_are_left_out_with_a_note(place: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((place / "recipe.yaml").read_text())
    content["eval"]["also"] = [{"name": "wide", "tree": {"nodes": 30}}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(content))
    _, found, notes = load_all(str(place / "recipe.yaml"), (), [f"its own: {tmp_path / 'two.yaml'}"])
    assert [contender.name for contender in found] == ["eagle3, tree of 12", "its own"]
    assert notes == [
        f"{tmp_path / 'two.yaml'} is compared by its main contender alone; those under its eval.also are left out"
    ]


def test_another_target_is_refused_with_both_sides(place: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((place / "recipe.yaml").read_text())
    other = tmp_path / "other.yaml"
    content["target"] |= {"dtype": "bfloat16", "device": "auto", "thinking": False}
    other.write_text(yaml.safe_dump(content))
    told = f"--compare '{other}': another target than {place / 'recipe.yaml'}'s: target."
    assert problems_of(place / "recipe.yaml", str(other)) == [
        told + "dtype is 'bfloat16' there, 'float32' here",
        told + "thinking is False there, None here",
    ]
    content["target"] = yaml.safe_load((place / "recipe.yaml").read_text())["target"]
    content["target"]["model"] += "/../" + Path(content["target"]["model"]).name  # the same place, written otherwise
    other.write_text(yaml.safe_dump(content))
    assert len(load_all(str(place / "recipe.yaml"), (), [f"same: {other}"])[1]) == 2


# Names.


def test_contenders_are_called_what_drafts_and_their_tree(place: Path) -> None:
    recipe = load_recipe(place / "recipe.yaml")

    def contender(name: str | None = None, **tree: Any) -> Contender:
        section = ContenderSection(name=name, tree=TreeSection.model_validate(tree))
        return contenders.contender_of(recipe, section, "here")

    found = named(
        [
            contender(),
            contender(policy="ddd"),
            contender(policy="svip"),
            contender("a static one", policy="static"),
            contender(policy="static"),
            contender(vocab_size=1000),
            contender(policy="chain", draw="sampled"),
            contender(policy="auto"),
        ]
    )
    assert [c.name.removeprefix("eagle3, ") for c in found] == [
        *("tree of 60", "ddd of 60", "svip of up to 40", "a static one", "static tree of 26"),
        *("tree of 60, 1,000 tokens", "sampled chain of 5", "auto"),
    ]
    with pytest.raises(UserError, match=r"here, here: all are called 'eagle3, tree of 60'; give each its own name"):
        named([contender(), contender(draft_calls=6)])
    with pytest.raises(UserError, match="plain decoding, here: all are called 'plain decoding'"):
        named([contender(PLAIN)])


# Checks.


def check(place: Path, *overrides: str, compared: tuple[str, ...] = ()) -> None:
    recipe, found, _ = load_all(str(place / "recipe.yaml"), overrides, compared)
    check_contenders(recipe, found)


def mistakes(place: Path, target_dir: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "no drafter here", ("eval.drafter=nowhere",)
    yield "tokenizer_fingerprint: the drafter was trained for", ("target.chat_template=" + str(place / "t.jinja"),)
    yield "the drafter cannot read this target: .*capture_layers", (f"eval.drafter={place / 'deep'}",)
    yield "exceeds|512 draft calls deep, in a target of 512 positions", ("eval.tree={policy: chain, nodes: 513}",)
    yield "600 nodes, 8 draft calls deep, in a target of 512", ("eval.tree={nodes: 600}",)
    yield "61 is more than the 60 tokens of the drafter's vocabulary", ("eval.tree.vocab_size=61",)
    yield "no such token counts", ("eval.tree.vocab_size=16", f"eval.token_counts={place / 'none'}")
    yield "eval.drafter: .*weightless: model.safetensors is missing", (f"eval.drafter={place / 'weightless'}",)
    yield "eval.drafter: .*short/model.safetensors: damaged or cut short", (f"eval.drafter={place / 'short'}",)
    static = "eval.tree={policy: static, paths: [[0], [60]]}"
    yield "^eval.tree.paths: rank 60 exceeds a draft vocabulary of 60 tokens: .* name 59 at most", (static,)
    few = "eval.tree={policy: static, paths: [[0], [16]], vocab_size: 16}"
    yield "rank 16 exceeds a draft vocabulary of 16 tokens", (few,)
    yield "was counted with a tokenizer", ("eval.tree.vocab_size=16", f"eval.token_counts={place / 'foreign'}")
    chain = {"policy": "chain", "nodes": 4}
    for name, said in (
        ("wide", "has a vocabulary of 330 tokens, the target .* one of 320"),
        ("strange", "has another tokenizer than the target"),
        ("absent", r"draft_model\.model: no model at"),
    ):
        yield said, (also(proposer="causal_lm", draft_model={"model": str(place / name)}, tree=chain),)


def test_what_cannot_be_measured_is_told_before_weights_are_loaded(
    place: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    save_untrained(place / "deep", target_dir)
    config = json.loads((place / "deep/config.json").read_text())
    config["drafter"]["capture_layers"] = [2, 3, 8]
    (place / "deep/config.json").write_text(json.dumps(config))
    for name in ("weightless", "short"):
        shutil.copytree(place / "run/drafter", place / name)
    (place / "weightless/model.safetensors").unlink()
    whole = (place / "short/model.safetensors").read_bytes()
    (place / "short/model.safetensors").write_bytes(whole[: len(whole) - 8])  # the last row of the last tensor
    save_token_counts(place / "foreign", torch.ones(320, dtype=torch.int64), "f" * 64, [4])
    make_target(num_layers=1, vocab_size=330).save_pretrained(place / "wide")
    make_tokenizer().save_pretrained(place / "wide")
    make_target(num_layers=1).save_pretrained(place / "strange")
    strange = make_tokenizer()
    strange.add_tokens(["zebra"])
    strange.save_pretrained(place / "strange")

    def never(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(TargetFiles, "load", never)
    monkeypatch.setattr(loaded_models, "load_draft_model", never)
    for said, overrides in mistakes(place, target_dir):
        with pytest.raises(UserError, match=said):
            run_main(acceptance, place / "recipe.yaml", *overrides)
    with monkeypatch.context() as other:
        other.setattr(proposers, "device_name", lambda wanted: "meta" if wanted == "auto" else "cpu")
        small = also(proposer="causal_lm", draft_model={"model": str(target_dir)}, tree={"policy": "chain", "nodes": 4})
        with pytest.raises(UserError, match=r"^eval\.also\.0\.draft_model\.device: is meta, the target's cpu"):
            run_main(acceptance, place / "recipe.yaml", small)
    # All of them at once, each once.
    with pytest.raises(UserError) as raised:
        check(
            place,
            also(drafter="nowhere", tree={"nodes": 600}),
            compared=("eval.tree.vocab_size=61", "a: eval.drafter=nowhere", "b: eval.drafter=elsewhere"),
        )
    assert len(raised.value.problems) == 4
    drafters = [problem for problem in raised.value.problems if "no drafter here" in problem]
    assert drafters[0].startswith("eval.also.0.drafter: nowhere: ")  # which --compare 'a: eval.drafter=nowhere' shares
    assert drafters[0].endswith("(also affects 1 other contender)")
    assert drafters[1].startswith("--compare 'b: eval.drafter=elsewhere': eval.drafter: elsewhere: ")
    with pytest.raises(UserError, match=r"eval\.max_new_tokens 512 leaves no room"):
        run_main(acceptance, place / "recipe.yaml", "eval.max_new_tokens=512")
    check(place)  # and nothing is wrong with the recipe itself


def test_a_cut_that_was_hardly_counted_is_noted_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = (torch.arange(320) >= 30).long()  # the drafter has the tokens 3 to 62
    save_token_counts(place / "few", counts, tokenizer_fingerprint(make_tokenizer()), [4])
    cut, few = "eval.tree.vocab_size=50", f"eval.token_counts={place / 'few'}"
    check(place, cut, compared=(f"few: {cut} {few}", f"{few} eval.tree={{nodes: 9, vocab_size: 50}}"))
    printed = capsys.readouterr().out
    assert printed.startswith("note: eval.tree.vocab_size: only 34 of 50 draft tokens were counted")
    assert printed.count("note: ") == 1


def test_every_problem_has_its_place(place: Path) -> None:
    c2t = {"policy": "c2t", "c2t": {"classifier": "/nope"}}
    strange = {"model": str(place / "absent")}
    sections = [
        {"name": "a", "tree": c2t},
        {"name": "b", "tree": {"vocab_size": 900}},
        {"name": "c", "proposer": "causal_lm", "draft_model": strange, "tree": {"policy": "chain"}},
        {"name": "d", "proposer": "causal_lm", "draft_model": {"model": str(place)}, "tree": {"policy": "chain"}},
    ]
    with pytest.raises(UserError) as raised:
        check(
            place,
            "eval.tree={vocab_size: 901}",
            "eval.also=" + json.dumps(sections),
            compared=("eval.tree.vocab_size=16 eval.token_counts=/none", f"x: eval.tree={json.dumps(c2t)}"),
        )
    problems = raised.value.problems
    starts = (
        "eval.tree.vocab_size: 901 is more",
        "eval.also.0.tree.c2t.classifier: /nope: no C2T classifier here",
        "eval.also.1.tree.vocab_size: 900 is more",
        "eval.also.2.draft_model.model: no model at",
        "eval.also.3.draft_model.model: ",
        "--compare 'eval.tree.vocab_size=16 eval.token_counts=/none': eval.token_counts: /none: no such token counts",
    )
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start), problem
    assert problems[1].endswith("(also affects 1 other contender)")


# The folder and files of a run.


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("weights were loaded"))


def test_a_folder_that_cannot_be_made_is_told_before_weights_are_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights(monkeypatch)
    made = Path.mkdir

    def refuses(path: Path, *given: Any, **more: Any) -> None:  # as a pseudo filesystem does
        if tmp_path in path.parents:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        made(path, *given, **more)

    monkeypatch.setattr(Path, "mkdir", refuses)
    for mode in ("decode", "replay"):
        with pytest.raises(UserError, match=r"^eval\.out: .*/x/y cannot be made: No such file or directory"):
            run_main(acceptance, place / "recipe.yaml", f"eval.out={tmp_path / 'x/y'}", f"eval.mode={mode}")


def test_an_interrupted_run_leaves_the_older_one_whole(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(place / "recipe.yaml"), f"eval.out={tmp_path / 'out'}", "eval.max_prompts=1"]
    run_main(acceptance, *arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(before) == {".lock", "acceptance.json", "generations.jsonl", "report.html"}

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for owner, name, kept in ((evaluation, "how_made", True), (benchmarks, "loaded_proposer", False)):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            run_main(acceptance, *arguments, "eval.tree.nodes=4")
        left = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert bool(left.pop("generations.jsonl.partial", None)) == kept
        assert left == before, name
        assert ("answers decoded so far" in capsys.readouterr().err) == kept
        (tmp_path / "out/generations.jsonl.partial").unlink(missing_ok=True)

    # New answers never lie beside older numbers: replay believes what these say about the answers.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation, "write_acceptance", interrupted)
        run_main(acceptance, *arguments, "eval.tree.nodes=4")
    assert (tmp_path / "out/generations.jsonl").read_bytes() != before["generations.jsonl"]
    assert not (tmp_path / "out/acceptance.json").exists()


@pytest.mark.parametrize("mode", ["decode", "replay"])
def test_two_evaluations_do_not_write_to_one_folder(place: Path, tmp_path: Path, mode: str) -> None:
    arguments = [str(place / "recipe.yaml"), f"eval.out={tmp_path}", "eval.max_prompts=1"]
    if mode == "replay":
        run_main(acceptance, *arguments)
    out = tmp_path if mode == "decode" else tmp_path / "replay"
    with alone_in(out), pytest.raises(UserError, match="another run is writing there"):
        run_main(acceptance, *arguments, f"eval.mode={mode}")


def test_describe_names_what_was_asked_for() -> None:
    section = TreeSection.model_validate({"policy": "c2t", "c2t": {"classifier": "here", "beam": None}})
    described = describe(Contender("c", "drafter", section, "", drafter=Path("d")))
    assert described["tree"]["nodes"] == 1024 and described["tree"]["draft_calls"] == 10
    assert described["drafter"] == "d" and described["tree"]["c2t"]["classifier"] == "here"
    assert re.fullmatch(r"\d+", str(describe(Contender("c", "drafter", TreeSection(), ""))["tree"]["nodes"]))
