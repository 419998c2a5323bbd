"""Every shipped recipe runs, from prompts to acceptance, on a shrunken target of its architecture.

The stages are those of the recipe's head, in its order: a drafter by the script of its kind, and for C2T labelled trees
and the classifier before acceptance.

The target has the recipe's model_type, its kind of attention, rotary scaling, biases and layer types, and random
weights; its tokenizer has a template of the same kind. The overrides are sizes and paths alone, and float32: what is
decoded must then equal plain decoding.
"""

import json
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.data_gen import label_trees, rank_vocab, regenerate, reprompt
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.models.c2t import C2tClassifier
from draftsmith.models.chat import render_marked, render_prompt
from draftsmith.models.checkpoint import read_drafter_config, read_weights
from draftsmith.models.target import default_capture_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.command.stages import stages_of
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.records import to_conversation
from draftsmith.recipes.schema import Recipe, TargetSection, TrainSection, other_than_published
from draftsmith.train import c2t
from tests.conftest import make_target, make_tokenizer
from tests.thinning import EXHAUSTIVE
from tests.tiny_vision import FAMILIES, picture, save_vision_target
from tests.training_runs import TRAINED_BY, run_main

ROOT = Path(__file__).parents[1]
DEMOS = {
    "demo",
    "demo-decoding",
    "demo-eagle",
    "demo-full",
    "demo-lantern",
    "demo-poss",
    "demo-vision",
}  # run as they are, by the commands in their heads
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)

# Templates that do what the targets' own do, in fewer words.
LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    "{%- for message in messages -%}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)
R1 = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}"
    "{%- else -%}{{ '<|User|>' + message['content'] }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|Assistant|><think>\n' }}{%- endif -%}"
)
QWEN3 = (
    "{%- for message in messages -%}"
    "{%- set content = message['content'].split('</think>')[-1].lstrip('\n') -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}"
    "{%- else -%}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)
LLAMA2 = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{%- else -%}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{%- endif -%}"
    "{%- endfor -%}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "attention_bias": True}


LLAMA3_SPECIAL = ["<|pad|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
LLAMA3_8B = ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, LLAMA3, LLAMA3_SPECIAL)
LLAMA2_CHAT = ("llama", {"num_key_value_heads": 4}, LLAMA2, ["<unk>", "<s>", "</s>"])

# Recipe -> (model_type, config, template, special tokens with pad, bos and eos first, tokens of what it must supervise)
SHRUNKEN: dict[str, tuple[str, dict, str | None, list[str]]] = {
    "llama3.1-8b-instruct": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE},
        LLAMA3,
        LLAMA3_SPECIAL,
    ),
    "llama3.3-70b-instruct": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "num_attention_heads": 8, "num_key_value_heads": 1},
        LLAMA3,
        LLAMA3_SPECIAL,
    ),
    "vicuna-13b-v1.3": ("llama", {"num_key_value_heads": 4}, None, ["<unk>", "<s>", "</s>"]),
    "deepseek-r1-distill-llama-8b": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE},
        R1,
        ["<|pad|>", "<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"],
    ),
    "llama3-8b-instruct-hass": LLAMA3_8B,
    "llama3-8b-instruct-poss": LLAMA3_8B,
    "llama3-8b-fr-spec": LLAMA3_8B,
    "llama2-13b-chat-poss": LLAMA2_CHAT,
    "llama2-7b-chat-c2t": LLAMA2_CHAT,
    # tests/tiny_vision.py has these
    "llava-v1.6-vicuna-7b-vispec": ("llava_next", {}, None, []),
    "llava-v1.6-vicuna-13b-vispec": ("llava_next", {}, None, []),
    "qwen2.5-vl-3b-instruct-vispec": ("qwen2_5_vl", {}, None, []),
    "qwen2.5-vl-7b-instruct-vispec": ("qwen2_5_vl", {}, None, []),
    "qwen3-8b": ("qwen3", {}, QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "gpt-oss-20b": (
        "gpt_oss",
        EXPERTS,
        HARMONY,
        ["<|endoftext|>", "<|startoftext|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
    ),
}


def tiny_tokenizer(template: str | None, special: list[str]) -> PreTrainedTokenizerFast:
    """With these special tokens; the first three are pad, bos and eos."""
    return make_tokenizer(template, special, dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False)))


def save_target(name: str, directory: Path) -> Path:
    family, settings, template, special = SHRUNKEN[name]
    if family in FAMILIES:
        return save_vision_target(directory, family)
    model = make_target(family, **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    tiny_tokenizer(template, special).save_pretrained(directory)
    return directory


def write_prompts(path: Path, words: str) -> Path:
    questions = [[f"{words} {i}", f"and then {words}"][: 1 + i % 2] for i in range(12)]
    path.write_text("".join(json.dumps({"id": f"q{i}", "turns": turns}) + "\n" for i, turns in enumerate(questions)))
    return path


def write_corpus(path: Path) -> Path:
    texts = ["the cat sat on the mat", "the dog ran after the cat", "".join(map(chr, range(32, 256)))] * 20
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_pictures(folder: Path) -> Path:
    """Twelve pictures with captions, as LLaVA-Pretrain has them."""
    records = []
    for i in range(12):
        picture(16 + i, 24, seed=i).save(folder / f"{i}.png")
        asked = [{"from": "human", "value": "the cat sat\n<image>"}, {"from": "gpt", "value": "a cat"}]
        records.append({"id": str(i), "image": f"{i}.png", "conversations": asked})
    (folder / "captions.json").write_text(json.dumps(records))
    return folder / "captions.json"


def shrunken(name: str, recipe: Recipe, tmp_path: Path) -> list[str]:
    """Overrides that make a run of seconds of a shipped recipe, all its stages and contenders kept."""
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        f"target.model={save_target(name, tmp_path / 'target')}",
        "target.dtype=float32",
        "target.device=cpu",
        "data.max_prompts=12",
        "data.max_length=200",
        "data.generator.kind=transformers",
        "data.generator.max_new_tokens=16",
        "train.max_steps=3",
        "train.warmup_steps=1",
        "train.mixed_precision=no",
        "train.save_every_steps=2",
        "train.log_every_steps=1",
        "train.validation_conversations=2",
        f"eval.prompts={write_prompts(tmp_path / 'benchmark.jsonl', 'the dog ran')}",
        "eval.max_prompts=2",
        "eval.max_new_tokens=12",
        "eval.tree.nodes=12",
        "eval.tree.draft_calls=3",
    ]
    if recipe.reprompts:
        overrides.append(f"data.reprompt.sources={write_pictures(tmp_path)}")
    else:
        overrides.append(f"data.prompts={write_prompts(tmp_path / 'prompts.jsonl', 'the cat sat')}")
    if recipe.drafter.num_key_value_heads is not None:
        overrides.append("drafter.num_key_value_heads=4")
    if recipe.drafter.vocab_size is not None:
        overrides.append("drafter.vocab_size=24")
    if recipe.drafter.intermediate_size is not None:
        overrides.append("drafter.intermediate_size=64")
    if recipe.data.ranking.sources:
        corpus = write_corpus(tmp_path / "corpus.jsonl")
        overrides += [f"data.ranking.sources.0.source={corpus}"]
    trees = {"eval.tree": recipe.eval.tree} | {
        f"eval.also.{i}.tree": row.tree for i, row in enumerate(recipe.eval.also)
    }
    cuts = sorted({tree.vocab_size for tree in trees.values() if tree.vocab_size is not None})
    for place, tree in trees.items():
        if tree.vocab_size is not None:  # in the same order, among the 320 tokens of the shrunken target
            overrides.append(f"{place}.vocab_size={40 + 20 * cuts.index(tree.vocab_size)}")
        if tree.policy == "c2t":
            overrides += [f"{place}.c2t.classifier={tmp_path / 'run/c2t'}", f"{place}.draft_calls=3"]
        elif tree.policy == "eagle2" and place != "eval.tree" and tree.most > 60:
            overrides.append(f"{place}.nodes=60")
    if "labels" in recipe.model_fields_set:
        overrides += [
            "labels.draft_calls=2",
            "labels.top_k=60",
            "classifier.epochs=2",
            "classifier.validation_share=0.3",
        ]
    return overrides


QUICK = ("llama2-7b-chat-c2t",)  # all six scripts; the others are slow tests


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=EXHAUSTIVE) for name in SHRUNKEN])
def test_from_prompts_to_acceptance(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # a recipe names its template relative to it
    path = f"recipes/{name}.yaml"
    recipe = load_recipe(path)
    overrides = shrunken(name, recipe, tmp_path)
    kind = recipe.drafter.kind
    train = TRAINED_BY[kind]
    if name in ("gpt-oss-20b", "llama3-8b-instruct-poss"):  # a plan takes seconds: some without conversations
        run_main(train, path, *overrides, "train.token_loss=0.5", "--plan")
        said = capsys.readouterr().out
        assert "unknown until regenerate has run" in said
        assert re.match(rf"note: not as published for {kind}: train.token_loss 0.5 \(published [01.]+\)\n", said)
    if recipe.reprompts:
        run_main(reprompt, path, *overrides)
    run_main(regenerate, path, *overrides)
    run_main(rank_vocab, path, *overrides)
    planned = None
    if recipe.reprompts or name in ("vicuna-13b-v1.3", "llama2-7b-chat-c2t"):
        run_main(train, path, *overrides, "--plan")
        said = capsys.readouterr().out
        planned = re.search(r"\nrows +(\d+), (\d+) more for validation.*\nparameters +(\S+) M trained", said, re.DOTALL)
        assert planned
    run_main(train, path, *overrides)
    said = capsys.readouterr().out
    assert "as published for" not in said
    if planned:
        assert f"{planned[3]} M trainable parameters" in said
        assert f" {planned[1]} rows, {planned[2]} kept for validation" in said
    if "labels" in recipe.model_fields_set:
        run_main(label_trees, path, *overrides)
        run_main(c2t, path, *overrides)
        assert sum(p.numel() for p in C2tClassifier.load(tmp_path / "run/c2t").parameters()) == 241
    run_main(acceptance, path, *overrides)

    conversations = [json.loads(line) for line in (tmp_path / "run/conversations.jsonl").read_text().splitlines()]
    assert len(conversations) == 12
    if recipe.reprompts:
        assert all("sha256" in str(each["messages"]) for each in conversations)
    report = json.loads((tmp_path / "run/eval/acceptance.json").read_text())
    assert report["matches_target"] is True
    assert len(report["contenders"]) == 2 + len(recipe.eval.also)
    assert all(row["matches_target"] for row in report["contenders"].values())
    check_drafter(recipe, tmp_path / "run/drafter")
    if recipe.data.ranking.sources:  # the corpus was counted, not the answers
        assert "corpus.jsonl" in load_token_counts(tmp_path / "run/token_counts.safetensors")[1]["corpora"]
    if recipe.target.thinking is False:  # the switch reached the prompts: an empty thought stands at their end
        prompt = conversations[0]["turns"][0]["prompt_token_ids"]
        tokenizer = TargetFiles(TargetSection(model=str(tmp_path / "target"), thinking=False)).tokenizer
        assert str(tokenizer.decode(prompt)).endswith("<think>\n\n</think>\n\n")
    if recipe.target.template_args:
        tokenizer = TargetFiles(TargetSection(model=str(tmp_path / "target"))).tokenizer
        assert "Reasoning: low" in tokenizer.decode(conversations[0]["turns"][0]["prompt_token_ids"])


def check_drafter(recipe: Recipe, directory: Path) -> None:
    """What was trained has the shape that the recipe's head promises."""
    config, _ = read_drafter_config(directory)
    names = set(read_weights(directory))
    assert config.kind == recipe.drafter.kind
    if recipe.drafter.extends == "eagle3":
        assert config.capture_layers == default_capture_layers(7)
        return
    assert config.capture_layers == (7,)  # the target's last state
    assert ("fc.bias" in names) == recipe.drafter.fc_bias
    assert not any("lm_head" in name or "embed" in name for name in names)  # the target's, frozen
    layers = {name.split(".")[1] for name in names if name.startswith(("specialists.", "layers."))}
    assert len(layers) == (recipe.drafter.specialist_count if config.kind == "poss" else 1)


@pytest.mark.parametrize("name", RECIPES)
def test_loads_and_says_where_it_comes_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(f"recipes/{name}.yaml")  # also checks that every source can be read by its name
    assert recipe.output_dir == f"runs/{name}"
    head = (ROOT / f"recipes/{name}.yaml").read_text().split("\noutput_dir:")[0]
    assert all(line.startswith("#") for line in head.splitlines() if line)
    for stage in stages_of(recipe):
        assert f"draftsmith {stage} recipes/{name}.yaml" in head
    assert "Measured" in head
    # The vision demo starts from random weights, where ViSpec's published loss is flat; its comments say so.
    assert (other_than_published(recipe.drafter, recipe.train) is None) == (name != "demo-vision")


@pytest.mark.parametrize("name", [name for name in RECIPES if "poss" in name])
def test_poss_recipes_turn_to_eagle3_as_their_heads_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The override in the head is valid, and brings EAGLE-3's losses with it."""
    monkeypatch.chdir(ROOT)
    head = (ROOT / f"recipes/{name}.yaml").read_text().split("\noutput_dir:")[0]
    (drafter,) = re.findall(r"drafter='(\{kind: poss, base: eagle3.*?\})'", head)
    given = load_recipe(f"recipes/{name}.yaml")
    recipe = load_recipe(f"recipes/{name}.yaml", [f"drafter={drafter}", *re.findall(r"train\.clip=\w+", head)])
    same = ("positions_per_specialist", "specialists")
    assert [getattr(recipe.drafter, key) for key in same] == [getattr(given.drafter, key) for key in same]
    assert recipe.train.ttt_steps == given.train.ttt_steps
    losses = ("step_weight", "token_loss", "feature_loss", "top_k_loss", "feature_noise")
    eagle3 = TrainSection()
    assert {key: getattr(recipe.train, key) for key in losses} == {key: getattr(eagle3, key) for key in losses}
    assert recipe.train.detach_features == "specialists"
    assert given.train.feature_loss == 1  # so that there is something to turn


def test_every_recipe_is_tried() -> None:
    assert set(RECIPES) == {*SHRUNKEN, *DEMOS}


def test_rows_of_the_recipes_data_sets_are_read() -> None:
    """OpenThoughts-114k-math's columns, as its card says. Those of the others are in tests/test_prompts.py."""
    record = {
        "source": "olympiads",
        "problem": "1 + 1?",
        "solution": "2",
        "messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
        "system": "Think it through.",
        "conversations": [{"from": "user", "value": "Box it. 1 + 1?"}, {"from": "assistant", "value": "2"}],
        "generated_token_count": 12,
        "correct": True,
    }
    messages = to_conversation(record, "id", "source", 1).messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["1 + 1?"]


def vicuna() -> PreTrainedTokenizerFast:
    template = (ROOT / "recipes/templates/vicuna.jinja").read_text()
    return tiny_tokenizer(template, ["<unk>", "<s>", "</s>"])


def test_vicuna_template_writes_the_published_format() -> None:
    """FastChat's vicuna_v1.1: one blank behind system and user, </s> and nothing behind an answer."""
    turns = [("user", "Hello"), ("assistant", "World"), ("user", "Oops"), ("assistant", "Bingo Bingo")]
    messages = [{"role": role, "content": content} for role, content in turns]
    written = vicuna().apply_chat_template(messages, tokenize=False)
    assert written == f"<s>{VICUNA_SYSTEM} USER: Hello ASSISTANT: World</s>USER: Oops ASSISTANT: Bingo Bingo</s>"
    asked = vicuna().apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert asked == f"<s>{VICUNA_SYSTEM} USER: Hello ASSISTANT: World</s>USER: Oops ASSISTANT:"
    own = vicuna().apply_chat_template([{"role": "system", "content": "Be kind."}, messages[0]], tokenize=False)
    assert own == "<s>Be kind. USER: Hello "
    with pytest.raises(Exception, match="not tool"):
        vicuna().apply_chat_template([{"role": "tool", "content": "4"}], tokenize=False)


def test_vicuna_template_marks_what_the_model_writes() -> None:
    tokenizer = vicuna()
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
    ids, marked = render_marked(tokenizer, messages)
    assert tokenizer.decode([i for i, m in zip(ids, marked, strict=True) if m]) == " sat on the mat</s>"
    prompt = render_prompt(tokenizer, messages[:1])
    assert ids[: len(prompt)] == prompt and marked[: len(prompt)] == [False] * len(prompt)


DECODING_ROWS = [
    *("plain decoding", "plain decoding, int8 target", "eagle3.1, chain of 4", "prompt lookup", "sam"),
    *("sam + eagle3.1, router", "sam + eagle3.1, fused", "hierarchy", "eagle3.1, int8 target"),
]


def test_readmes_table_has_the_rows_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = (ROOT / "README.md").read_text().partition(" tau  ")[2].partition("*tau*")[0]
    names = [row.name for row in contenders_of(load_recipe("recipes/demo.yaml", ["output_dir=runs/none"]))]
    assert re.findall(r"^    (\S.*?) +\d\.\d\d\b", table, re.MULTILINE) == ["plain decoding", *names]


def test_decoding_demo_has_the_rows_that_its_head_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = [row.name for row in load_recipe("recipes/demo-decoding.yaml").eval.also]
    assert names == DECODING_ROWS[3:]
    head = (ROOT / "recipes/demo-decoding.yaml").read_text().split("\noutput_dir:")[0]
    assert re.findall(r"^#   (\S.*?) +\d\.\d\d\b", head, re.MULTILINE) == DECODING_ROWS


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


@pytest.mark.slow
def test_image_demo_runs_on_a_drafter_of_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = [
        *(f"output_dir={tmp_path}", f"data.conversations={tmp_path / 'conversations.jsonl'}", "data.max_prompts=12"),
        *("train.max_steps=2", "train.warmup_steps=1", "train.validation_conversations=1", "eval.max_prompts=2"),
    ]
    for script in (regenerate, rank_vocab, TRAINED_BY["eagle"], acceptance):
        run_main(script, "recipes/demo-lantern.yaml", *short)
    rows = json.loads((tmp_path / "eval/acceptance.json").read_text())["contenders"]
    names = [row.name or "" for row in load_recipe("recipes/demo-lantern.yaml").eval.also]
    assert list(rows)[2:] == names
    relaxed = {name for name, row in rows.items() if not row["lossless"]}
    assert relaxed == {name for name in names if "delta" in name or "lambda" in name}
    assert all((rows[name]["total_variation"] is None) == (name not in relaxed) for name in rows)
