"""Contenders side by side: from recipes and overrides to names, checks, one lineup, one table; batches of answers."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from draftsmith.eval import acceptance
from draftsmith.eval.decoding import contenders
from draftsmith.eval.decoding.contenders import Contender, Lineup, check_contenders, contenders_of, describe, named
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured import benchmarks, evaluation
from draftsmith.eval.measured.benchmarks import PLAIN, Bench, load_questions
from draftsmith.eval.measured.compared import load_all, split_overrides
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing as figures
from draftsmith.eval.page import figures as plots
from draftsmith.eval.page import files as report_files
from draftsmith.eval.page import html as html_report
from draftsmith.eval.page.comparison import LABEL, comparison_plot
from draftsmith.eval.page.legend import FEW, Legend
from draftsmith.models.chat import load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter, target_identity
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.models.vocab import DraftVocab, save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import ContenderSection, TargetSection, TreeSection
from tests.conftest import make_target, make_tokenizer

PROMPTS = ["the cat", "the dog ran after the cat in the rain", "a mat", "rain", "the dog and the cat"]


def save_untrained(directory: Path, target_dir: Path, layers: tuple[int, ...] | None = None, seed: int = 0) -> Path:
    """A drafter as training would save it, of 60 tokens; `layers` it reads."""
    section = TargetSection(model=str(target_dir))
    target = Target(load_causal_lm(section), layers)
    identity = target_identity(target, section.model, None, tokenizer_fingerprint(load_tokenizer(section)))
    vocab = DraftVocab(torch.arange(3, 63), target.vocab_size)
    torch.manual_seed(seed)
    config = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size)
    save_drafter(directory, Eagle3Drafter(config, vocab, target.embedding_table), identity, "", {})
    return directory


@pytest.fixture(scope="module")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafters that read different layers, a small LM, token counts, prompts; and a recipe over them."""
    folder = tmp_path_factory.mktemp("compare")
    save_untrained(folder / "run/drafter", target_dir)
    save_untrained(folder / "other/drafter", target_dir, (1, 5), seed=1)
    make_target(num_layers=2, seed=3).save_pretrained(folder / "small")
    make_tokenizer().save_pretrained(folder / "small")
    tokenizer = load_tokenizer(TargetSection(model=str(target_dir)))
    counts = torch.arange(320).flip(0) + 1
    save_token_counts(folder / "run/token_counts.safetensors", counts, tokenizer_fingerprint(tokenizer), [4])
    turns = [{"id": f"q{i}", "turns": [text, "and the mat?"][: 1 + i % 2]} for i, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_new_tokens": 24,
            "bootstrap_samples": 100,
            "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4},
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    other = content | {"output_dir": str(folder / "other"), "eval": {"tree": {"policy": "chain", "nodes": 4}}}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    return folder


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments])
    acceptance.main()


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
            f"eval.drafter={place / 'other/drafter'}",
            "eval.tree.vocab_size=16",
            "eval.tree.nodes=8",
        ],
    )
    assert recipe.eval.max_prompts == 2
    assert [(c.name, c.tree.policy, c.tree.most) for c in found] == [
        (f"eagle3, tree of 12, {place / 'run/drafter'}", "eagle2", 12),
        ("lookup", "chain", 6),
        ("eagle3, tree of 8", "eagle2", 8),
        ("deep", "ddd", 9),
        ("eagle3, chain of 3", "chain", 4),
        (f"eagle3, tree of 12, {place / 'other/drafter'}", "eagle2", 12),
        ("eagle3, tree of 12, 16 tokens", "eagle2", 12),
        ("eagle3, tree of 8 (2)", "eagle2", 8),  # the same again: how much does this machine waver?
    ]
    assert [c.drafter and c.drafter.parent.name for c in found] == [
        "run",
        None,
        "run",
        "run",
        "other",
        "other",
        *["run"] * 2,
    ]
    assert (
        found[2].tree.calls == 3 and found[3].tree.calls == 11
    )  # single keys add to the recipe's, a section replaces it
    assert found[6].token_counts == place / "run/token_counts.safetensors" and found[0].token_counts is None
    (note,) = notes
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
        "eval.max_new_tokens is the same for all contenders, who differ in eval.tree, eval.drafter, eval.token_counts",
        "target.dtype is the same for all contenders",
        "gone.yaml: no such recipe file",
        "did you mean `eval.tree.nodes`",
        "leave nodes, draft_calls, top_k out",
        "--compare 'name only: ': name only: : no such recipe file",
    ):
        assert any(said in problem for problem in problems), (said, problems)
    assert len(problems) == 9
    # A problem of the first recipe is told once, not with every set of overrides; the other files are still read.
    both = problems_of(first, "eval.tree.nodes=8", str(broken), overrides=("eval.evil=1", "data.evil=2"))
    assert len(both) == 4 and sum("`eval.evil`" in problem for problem in both) == 1


def test_unknown_keys_and_equal_names_are_told_with_the_rest(place: Path) -> None:
    problems = problems_of(
        place / "recipe.yaml",
        *("foo=1", "x: eval.tree.nodes=1", "x: eval.tree.nodes=9", "x: eval.max_new_tokens=3"),
        overrides=("eval.also=[{name: x, proposer: prompt_lookup, tree: {policy: chain}}]",),
    )
    assert problems[0].startswith("--compare 'foo=1': override 'foo=1': unknown key `foo`: known here are output_dir")
    assert "expected at least 2" in problems[1] and "eval.max_new_tokens is the same for all" in problems[2]
    assert problems[3] == (
        "eval.also.0, --compare 'x: eval.tree.nodes=1', --compare 'x: eval.tree.nodes=9', "
        "--compare 'x: eval.max_new_tokens=3': names must differ; 'x' stands more than once"
    )
    assert len(problems) == 4


def test_rows_of_a_compared_recipe_are_left_out_with_a_note(place: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((place / "recipe.yaml").read_text())
    content["eval"]["also"] = [{"name": "wide", "tree": {"nodes": 30}}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(content))
    _, found, notes = load_all(str(place / "recipe.yaml"), (), [str(tmp_path / "two.yaml")])
    assert len(found) == 2
    assert notes == [
        f"{tmp_path / 'two.yaml'} is compared by its eval.tree alone; the 1 contender under its eval.also is left out"
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
    assert len(load_all(str(place / "recipe.yaml"), (), [str(other)])[1]) == 2


# Names.


def test_default_names_say_what_differs(place: Path) -> None:
    recipe = load_recipe(place / "recipe.yaml")

    def contender(name: str = "", **tree: Any) -> Contender:
        section = ContenderSection(name=name, tree=TreeSection.model_validate(tree))
        return contenders.contender_of(recipe, section, "here")

    found = named(
        [
            contender(),
            contender(draft_calls=6),
            contender(draft_calls=6, top_k=8),
            contender(policy="ddd"),
            contender(policy="ddd", ddd={"threshold": -0.5}),
            contender(policy="ddd", ddd={"at": "every"}),
            contender(policy="svip"),
            contender(policy="svip", svip={"h": 0.5}),
            contender("eagle3, static tree of 26", policy="chain"),
            contender(policy="static"),
            contender(vocab_size=1000),
            contender(policy="chain", draw="sampled"),
            contender(policy="auto"),
        ]
    )
    assert [c.name.removeprefix("eagle3, ") for c in found] == [
        *("tree of 60, 8 calls, top 10", "tree of 60, 6 calls, top 10", "tree of 60, 6 calls, top 8"),
        *("ddd of 60, threshold -0.3, at 5 7 9", "ddd of 60, threshold -0.5, at 5 7 9"),
        *("ddd of 60, threshold -0.3, at every", "svip of up to 40, h 0.3", "svip of up to 40, h 0.5"),
        *("static tree of 26", "static tree of 26 (2)", "tree of 60, 1,000 tokens"),
        *("sampled chain of 5", "auto"),
    ]
    assert len({c.name for c in found}) == len(found)
    with pytest.raises(UserError, match=r"here, here: names must differ; 'x' stands more than once"):
        named([contender("x"), contender("x")])
    with pytest.raises(UserError, match="'plain decoding' stands more than once"):
        named([contender(PLAIN)])


# Checks.


def check(place: Path, *overrides: str, compared: tuple[str, ...] = ()) -> None:
    recipe, found, _ = load_all(str(place / "recipe.yaml"), overrides, compared)
    check_contenders(recipe, found)


def also(**section: Any) -> str:
    return f"eval.also=[{json.dumps({'name': 'x'} | section)}]"


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
    yield "^eval.tree.paths: rank 60 is none of a draft vocabulary of 60 tokens: .* name 59 at most", (static,)
    few = "eval.tree={policy: static, paths: [[0], [16]], vocab_size: 16}"
    yield "rank 16 is none of a draft vocabulary of 16 tokens", (few,)
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

    monkeypatch.setattr(contenders, "load_causal_lm", never)
    monkeypatch.setattr(contenders, "load_draft_model", never)
    for said, overrides in mistakes(place, target_dir):
        with pytest.raises(UserError, match=said):
            check(place, *overrides)
        with pytest.raises(UserError, match=said):
            run_script(monkeypatch, str(place / "recipe.yaml"), *overrides)
    # All of them at once, each once.
    with pytest.raises(UserError) as raised:
        check(
            place,
            also(drafter="nowhere", tree={"nodes": 600}),
            compared=("eval.tree.vocab_size=61", "eval.drafter=nowhere", "eval.drafter=elsewhere"),
        )
    assert len(raised.value.problems) == 4
    drafters = [problem for problem in raised.value.problems if "no drafter here" in problem]
    assert drafters[0].startswith("eval.also.0.drafter: nowhere: ")  # which --compare 'eval.drafter=nowhere' shares
    assert drafters[0].endswith("(and so for 1 other contender)")
    assert drafters[1].startswith("--compare 'eval.drafter=elsewhere': eval.drafter: elsewhere: ")
    with pytest.raises(UserError, match=r"eval\.max_new_tokens 512 leaves no room"):
        run_script(monkeypatch, str(place / "recipe.yaml"), "eval.max_new_tokens=512")
    check(place)  # and nothing is wrong with the recipe itself


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
    assert problems[1].endswith("(and so for 1 other contender)")


# The folder and files of a run.


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))


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
            run_script(monkeypatch, str(place / "recipe.yaml"), f"eval.out={tmp_path / 'x/y'}", f"eval.mode={mode}")


def test_an_interrupted_run_leaves_the_older_one_whole(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(place / "recipe.yaml"), f"eval.out={tmp_path / 'out'}", "eval.max_prompts=1"]
    run_script(monkeypatch, *arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(before) == {"acceptance.json", "generations.jsonl", "report.html"}

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for owner, name, kept in ((evaluation, "how_made", True), (Lineup, "proposer", False)):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            run_script(monkeypatch, *arguments, "eval.tree.nodes=4")
        left = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert bool(left.pop("generations.jsonl.partial", None)) == kept
        assert left == before, name
        assert ("answers decoded so far" in capsys.readouterr().err) == kept
        (tmp_path / "out/generations.jsonl.partial").unlink(missing_ok=True)


# One lineup.


def test_models_are_loaded_once_and_each_reads_its_own_layers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {"policy": "chain", "nodes": 4}
    small = {"model": str(place / "small")}
    recipe, found, _ = load_all(
        str(place / "recipe.yaml"),
        [
            "eval.also="
            + json.dumps(
                [
                    {"name": "lookup", "proposer": "prompt_lookup", "tree": chain},
                    {"name": "lm", "proposer": "causal_lm", "draft_model": small, "tree": chain},
                    {
                        "name": "lm cut",
                        "proposer": "causal_lm",
                        "draft_model": small,
                        "tree": chain | {"vocab_size": 50},
                    },
                ]
            )
        ],
        ["cut: eval.tree.vocab_size=16", str(place / "other.yaml"), f"b: eval.drafter={place / 'other/drafter'}"],
    )
    check_contenders(recipe, found)
    loads: list[str] = []
    for name in ("load_causal_lm", "load_drafter", "load_draft_model"):
        load = getattr(contenders, name)
        monkeypatch.setattr(contenders, name, lambda *given, n=name, load=load: (loads.append(n), load(*given))[1])
    lineup = Lineup(recipe.target)
    proposers = {c.name: lineup.proposer(c) for c in found}
    assert loads == ["load_causal_lm", "load_drafter", "load_draft_model", "load_drafter"]
    main = found[0].name
    assert {name: tuple(p.capture_layers) for name, p in proposers.items()} == {
        **{main: (2, 3, 4), "lookup": (), "lm": (), "lm cut": (), "cut": (2, 3, 4)},
        **{"eagle3, chain of 3": (1, 5), "b": (1, 5)},
    }
    sizes = {c.name: lineup.drafting(c).vocab.size for c in found if c.proposer != "prompt_lookup"}
    assert (sizes[main], sizes["cut"], sizes["lm"], sizes["lm cut"]) == (60, 16, 320, 50)
    # The 16 most frequent of the drafter's tokens 3 to 62, where lower ids were counted more often.
    assert lineup.drafting(next(c for c in found if c.name == "cut")).vocab.target_ids.tolist() == list(range(3, 19))


def test_compare_measures_everyone_on_the_same_prompts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(place / "recipe.yaml"),
        f"eval.out={place / 'out'}",
        "eval.png=true",
        also(proposer="causal_lm", draft_model={"model": str(place / "small")}, tree={"policy": "chain", "nodes": 4}),
        "--compare",
        "eval.tree={policy: chain, nodes: 4}",
        "svip: eval.tree={policy: svip, draft_calls: 6}",
        "cut: eval.tree.vocab_size=16",
        str(place / "other.yaml"),
        "eval.tree.nodes=4",
        "eval.tree.nodes=6",
    ]
    run_script(monkeypatch, *arguments, "--plan")
    planned = capsys.readouterr().out
    assert "note: " in planned and "note" not in planned.partition("\n")[2]
    assert not (place / "out").exists()
    for said in (
        "svip: svip, at most 7 nodes, at most 6 draft calls",
        "cut: eagle2, at most 12 nodes, at most 3 draft calls",
    ):
        assert said in planned
    assert "from 16 tokens" in planned and "draft model  " in planned and "answers      63," in planned
    run_script(monkeypatch, *arguments)
    content = report_files.read_acceptance(place / "out/acceptance.json")
    rows = content["contenders"]
    assert len(rows) == 9 and list(rows)[:2] == [PLAIN, content["contender"]]
    assert all(row["matches_target"] for row in rows.values())
    assert all(row["new_tokens"] == rows[PLAIN]["new_tokens"] for row in rows.values())
    assert rows["cut"]["tree"]["vocab_size"] == 16 and rows["svip"]["tree"]["svip"] == {"c": 0.15, "h": 0.3}
    assert rows["x"]["proposer"] == "causal_lm" and rows["x"]["drafter"] == str(place / "small")
    assert rows[PLAIN]["tree"] is None and rows[PLAIN]["wasted_nodes_per_round"] == 0
    assert rows["eagle3, tree of 4"]["tree"] == {
        **{"policy": "eagle2", "vocab_size": None, "nodes": 4, "draft_calls": 3, "top_k": 4}
    }
    assert content["target_identity"]["tokenizer_fingerprint"] and content["mode"] == "decode"
    log = [json.loads(line) for line in (place / "out/generations.jsonl").read_text().splitlines()]
    by_turn: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for record in log:
        by_turn.setdefault((record["conversation_id"], record["turn"]), set()).add(tuple(record["token_ids"]))
    assert len(by_turn) == 7 and all(len(answers) == 1 for answers in by_turn.values())
    main = rows[content["contender"]]
    for name, row in rows.items():
        mine = [record for record in log if record["contender"] == name]
        drafted = sum(sum(r["tree_nodes"]) - len(r["tree_nodes"]) - sum(r["accepted_per_round"]) for r in mine)
        assert row["wasted_nodes_per_round"] == pytest.approx(drafted / row["rounds"], abs=1e-4)
        assert row["tau_ratio"] == pytest.approx(row["tau"] / main["tau"], abs=1e-3)
    page = (place / "out/report.html").read_text()
    assert "how the others compare with" in page and (place / "out/comparison.png").exists()
    assert "a colour and its mark are a family" in page  # of eight contenders, more than can be named


def test_auto_is_chosen_before_anything_is_decoded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's choice is what is measured, and what acceptance.json says."""
    recorded = place / "auto/generations.jsonl"
    candidates = [{"policy": "chain", "nodes": 3}, {"nodes": 6, "draft_calls": 3, "top_k": 4}]
    automatic = [
        *("eval.tree={policy: auto}", f"eval.planner={{answers: {recorded}, candidates: {json.dumps(candidates)}}}"),
        *("--compare", "eval.tree={policy: chain, nodes: 4}"),
    ]
    out = f"eval.out={place / 'auto'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))
        with pytest.raises(UserError, match=r"eval\.planner\.answers: .*generations\.jsonl cannot be read"):
            run_script(monkeypatch, str(place / "recipe.yaml"), out, *automatic)
    run_script(monkeypatch, str(place / "recipe.yaml"), out)
    run_script(monkeypatch, str(place / "recipe.yaml"), f"eval.out={place / 'chosen'}", *automatic)
    content = report_files.read_acceptance(place / "chosen/acceptance.json")
    main = content["contenders"][content["contender"]]
    assert content["contender"] in ("eagle3, auto: chain of 2", "eagle3, auto: tree of 6")
    assert main["tree"]["nodes"] == (3 if main["tree"]["policy"] == "chain" else 6)
    assert main["draft_calls_per_round"] == main["tree"]["draft_calls"] and main["matches_target"]
    assert set(content["contenders"]) == {PLAIN, content["contender"], "eagle3, chain of 3"}


# Batches.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_the_answers_of_one_at_a_time(
    place: Path, tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: token for token. Drawn: too, for the draws of an answer hang on its turn and contender alone."""
    recipe = load_recipe(place / "recipe.yaml")
    lineup = Lineup(recipe.target)
    sampling = Sampling(temperature)
    asked = load_questions(str(place / "prompts.jsonl"), Rejects(), None)

    keys_drawn: list[Any] = []
    made = benchmarks.SeededDraws
    monkeypatch.setattr(benchmarks, "SeededDraws", lambda seed, key: (keys_drawn.append(key), made(seed, key))[1])

    def answers(size: int) -> dict[tuple[str, str, int], tuple[list[int], list[int]]]:
        found = contenders_of(recipe)
        proposers = {c.name: lineup.proposer(c, sampling) for c in found}
        bench = Bench(lineup.target, lineup.tokenizer, lineup.stop_ids, 16, 120, sampling, 0, size)
        with (tmp_path / "log.jsonl").open("w") as file:
            results = bench.run(asked, {**proposers}, found[0].name, file, rejects := Rejects())
        assert not rejects.total
        keys = {name: [(g.conversation_id, g.turn) for g in generations] for name, generations in results.items()}
        assert len(set(map(tuple, keys.values()))) == 1  # the same turns in the same order for all
        return {
            (name, g.conversation_id, g.turn): (g.token_ids, g.accepted_per_round)
            for name, generations in results.items()
            for g in generations
        }

    one = answers(1)
    assert len(one) == 2 * 7
    own = [key for key in keys_drawn if key != "warm-up"]
    assert len(set(own)) == len(own) == 2 * 7 and len(keys_drawn) == 2 * 7 + 2  # no two answers share their draws
    assert answers(2) == one
    assert answers(99) == one


def test_a_turn_that_cannot_be_asked_ends_its_own_conversation_alone(place: Path, tmp_path: Path) -> None:
    recipe = load_recipe(place / "recipe.yaml")
    lineup = Lineup(recipe.target)
    asked = load_questions(str(place / "prompts.jsonl"), Rejects(), None)
    bench = Bench(lineup.target, lineup.tokenizer, lineup.stop_ids, 16, 512, batch_size=4)
    lengths = {q.id: len(bench.prompt(q, q.turns[0])) for q in asked}
    assert max(lengths, key=lengths.__getitem__) == "q1"
    bench = replace(bench, max_length=lengths["q1"] + 15)
    rejects = Rejects()
    with (tmp_path / "log.jsonl").open("w") as file:
        results = bench.run(asked, {}, PLAIN, file, rejects)
    done = [(g.conversation_id, g.turn) for g in results[PLAIN]]
    assert ("q1", 1) not in done and ("q0", 1) in done and ("q2", 1) in done and ("q3", 1) in done
    assert ("q4", 1) in done and ("q1", 2) not in done  # the next batch, and no second turn without a first
    assert rejects.total == 1 + (("q3", 2) not in done)


# Figures with many.


PARTLESS: dict[str, Any] = {"benchmarks": {}, "categories": {}, "turns": {}}


def numbers_of(count: int) -> dict[str, Any]:
    """acceptance.json's content for contenders of every size and policy."""
    trees = [("eagle2", n) for n in (8, 16, 30, 60)] + [("ddd", 60), ("svip", 9), ("static", 26)]
    trees += [("eagle2", 60)] * 6 + [("chain", n) for n in range(3, 20)]
    trees = trees[:count]
    plain = [Generation([1], list(range(40)), [0] * 39, False, [1] * 39, [0] * 39) for _ in range(4)]
    results: dict[str, list[Generation]] = {PLAIN: plain}
    for i, (policy, nodes) in enumerate(trees):
        rows = []
        for prompt in range(4):
            accepted = [min(nodes - 1, 1 + (i + prompt + r) % 3) for r in range(12)]
            out = Generation([1], list(range(1 + sum(accepted) + 12)), accepted, False, [nodes] * 12, [3] * 12)
            rows.append(out)
        results[f"{policy} {i}"] = rows
    for prompt, generations in enumerate(zip(*results.values(), strict=True)):
        for g in generations:
            g.conversation_id, g.decode_seconds = str(prompt), 0.01 * g.rounds
            g.draft_seconds, g.verify_seconds = 0.3 * g.decode_seconds, 0.6 * g.decode_seconds
    rows = summarise_all(results, PLAIN, 100, 0)
    for (name, row), tree in zip(rows["contenders"].items(), [None, *trees], strict=True):
        shape = None if tree is None else {"policy": tree[0], "nodes": tree[1], "vocab_size": None}
        row |= {"proposer": None if name == PLAIN else "drafter", "drafter": "d", "tree": shape}
    return rows | {"contender": next(name for name in results if name != PLAIN), "baseline": PLAIN}


@pytest.mark.parametrize("count", [2, 6, 7, 24])
def test_numbers_in_the_comparison_hide_nothing(count: int) -> None:
    """Of all contenders: a number in each panel and in the legend, no two over each other, dots near their nodes."""
    content = numbers_of(count)
    legend = Legend.of(content)
    plot = comparison_plot(legend)
    assert plot is not None
    figure: Figure = plot.draw(figures.LIGHT.__getitem__)
    *panels, below = figure.axes
    assert len(panels) == 2
    assert [text.get_text() for text in below.texts][1::2] == list(legend.drafting)
    for ax, key in zip(panels, ("tau", "speedup"), strict=True):
        texts = {text.get_text(): text for text in ax.texts}
        assert set(texts) == {str(i + 1) for i in range(count)}
        places = [ax.transData.transform(text.get_position()) for text in texts.values()]
        for i, (x, y) in enumerate(places):
            for a, b in places[:i]:
                assert abs(x - a) >= LABEL[0] - 0.1 or abs(y - b) >= LABEL[1] - 0.1
        dots = [line.get_xydata() for line in ax.lines if str(line.get_marker()) in figures.MARKERS]
        assert len(dots) == count
        drawn = sorted(ax.transData.transform(dot[0])[0] for dot in dots)  # type: ignore[index]
        true = sorted(
            ax.transData.transform((row["tree_nodes_per_round"], row[key]))[0] for row in legend.drafting.values()
        )
        assert max(abs(a - b) for a, b in zip(drawn, true, strict=True)) < 32
    assert comparison_plot(Legend.of(numbers_of(1))) is None


def test_no_interval_runs_through_a_number_of_near_neighbours() -> None:
    """A chain of five nodes, and prompt lookup of about as many, which vary from prompt to prompt."""
    content = numbers_of(2)
    lookup, chain = list(content["contenders"].values())[1:]
    nodes = "tree_nodes_per_round"
    lookup |= {nodes: 4.6, f"{nodes}_interval": [3.9, 5.3], "tau": 1.58, "tau_interval": [1.39, 1.8]}
    chain |= {nodes: 5.0, f"{nodes}_interval": [5.0, 5.0], "tau": 1.44, "tau_interval": [1.34, 1.57]}
    plot = comparison_plot(Legend.of(content))
    assert plot is not None
    ax = plot.draw(figures.LIGHT.__getitem__).axes[0]
    intervals = [ax.transData.transform(line.get_xydata()) for line in ax.lines if line.get_linewidth() == 1.4]  # type: ignore[arg-type]
    assert len(intervals) == 4
    for text in ax.texts:
        x, y = ax.transData.transform(text.get_position())
        for (left, low), (right, high) in intervals:
            beside = x + LABEL[0] / 2 < left or x - LABEL[0] / 2 > right
            assert beside or y + LABEL[1] / 2 < low or y - LABEL[1] / 2 > high, text.get_text()


def test_many_contenders_are_told_apart_by_number_and_family() -> None:
    few, many = Legend.of(numbers_of(FEW)), Legend.of(numbers_of(24))
    assert len({few.roles[name] for name in few.drafting}) == FEW and not few.many
    by_policy: dict[str, set[str]] = {}
    for name, role in many.roles.items():
        by_policy.setdefault(name.split()[0], set()).add(role)
    assert all(len(roles) == 1 for roles in by_policy.values())  # a family has one colour
    assert len(set().union(*by_policy.values())) == len(by_policy)  # and no other has it
    ten = numbers_of(24)
    for i, row in enumerate(list(ten["contenders"].values())[1:13]):
        row["tree"] = {"policy": f"policy {i}", "nodes": 9, "vocab_size": None}
    looks = Legend.of(ten)
    assert len({looks.families[name] for name in looks.drafting}) > figures.SERIES
    seen = {looks.families[name]: (looks.roles[name], looks.markers[name]) for name in looks.drafting}
    assert len(set(seen.values())) == len(seen)
    assert len({role for role, _ in list(seen.values())[:10]}) == 10
    cut = numbers_of(7)
    for row, size in zip(list(cut["contenders"].values())[1:], (64, 128), strict=False):
        row["tree"]["vocab_size"] = size
    assert Legend.of(cut).label("eagle2 0") == "eagle2 0, 64 tokens" and Legend.of(cut).label("ddd 4") == "ddd 4"
    assert many.roles[PLAIN] == "plain" and many.numbers["eagle2 0"] == 1


def test_lines_of_many_stand_family_by_family() -> None:
    content = numbers_of(24)
    legend = Legend.of(content)
    (plot,) = [p for p in plots.acceptance_plots(content | PARTLESS) if p.name == "acceptance_by_position"]
    shown = [ax for ax in plot.draw(figures.LIGHT.__getitem__).axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == list(legend.family_names.values())
    numbers = [{text.get_text() for text in ax.texts} for ax in shown]
    for name, family in legend.families.items():
        assert [str(legend.numbers[name]) in panel for panel in numbers] == [i == family for i in range(len(shown))]


def test_a_replay_shows_no_speeds(place: Path, tmp_path: Path) -> None:
    content = numbers_of(3)
    for row in content["contenders"].values():
        for key in ("speedup", "tokens_per_second", "speed_ratio", "mean_prompt_speedup", "overhead_share"):
            row[key] = row[f"{key}_interval"] = None
    plot = comparison_plot(Legend.of(content))
    assert plot is not None and len(plot.draw(figures.LIGHT.__getitem__).axes) == 2  # one panel, the legend
    assert plot.title == "tau by verified nodes" and "speed" not in plot.description
    assert "times nothing" in html_report.verdict(Legend.of(content), "replay")[0]


def test_describe_names_what_was_asked_for() -> None:
    section = TreeSection.model_validate({"policy": "c2t", "c2t": {"classifier": "here", "beam": None}})
    described = describe(Contender("c", "drafter", section, "", drafter=Path("d")))
    assert described["tree"]["nodes"] == 1024 and described["tree"]["draft_calls"] == 10
    assert described["drafter"] == "d" and described["tree"]["c2t"]["classifier"] == "here"
    assert re.fullmatch(r"\d+", str(describe(Contender("c", "drafter", TreeSection(), ""))["tree"]["nodes"]))
