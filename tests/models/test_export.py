"""Exports are the trained drafter for every engine that takes them, and every way of being another one is named.

Then the command `export` as users call it: what it prints and writes, the model card, and mistakes.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.models import export as export_script
from draftsmith.models import import_drafter
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.formats import card as cards
from draftsmith.models.formats import exporting
from draftsmith.models.formats.engines import ENGINES
from draftsmith.models.formats.exporting import Source, able_engines, export, facts, target_embeddings
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.importing import read_foreign
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.reading import file_digest
from tests.conftest import make_tokenizer
from tests.evaluation_cases import MADE, MAIN, evaluate, make_recipe
from tests.export_cases import DRAFTERS, Tensors, drafter_named, save_target, target_of, trained, write_folder
from tests.training_runs import run_main, write_recipe

ABLE = {
    "eagle3": ["vllm", "sglang", "tensorrt-llm", "speculators", "llama.cpp"],
    "eagle3, whole vocabulary": ["vllm", "sglang", "tensorrt-llm", "speculators", "llama.cpp"],
    "eagle3, two layers": ["vllm", "sglang", "speculators"],
    "eagle3, biases": ["vllm"],
    "eagle3.1": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle3, normed output": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle": ["vllm", "sglang", "eagle"],
    "eagle, biases": [],
    "eagle, biased queries": [],
    "poss": [],
}


SourceOf = Callable[[str], Source]


@pytest.fixture
def source_of(tmp_path: Path, target_dir: Path) -> SourceOf:
    return lambda name: trained(tmp_path / "trained", target_dir, drafter_named(name))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_engine_that_can_gets_the_trained_drafter(name: str, source_of: SourceOf, tmp_path: Path) -> None:
    """`export` itself compares every tensor."""
    source = source_of(name)
    assert [engine.name for engine in able_engines(source)] == ABLE[name]
    for engine in ENGINES.values():
        if engine.name not in ABLE[name]:
            with pytest.raises(UserError, match=r"can be exported to|no engine can"):
                export(source, engine, tmp_path / engine.name, None, {})
            assert not (tmp_path / engine.name).exists()
        elif engine.name != "llama.cpp" or importlib.util.find_spec("gguf"):
            for dtype in (None, torch.bfloat16) if name == "eagle3" else (None,):
                export(source, engine, tmp_path / engine.name, dtype, {})


@pytest.mark.parametrize(
    ("engine", "changed", "reason"),
    [
        ("llama.cpp", {"capture_layers": (2, 5)}, "exactly 3 of the target's states"),
        ("llama.cpp", {"capture_layers": (2, 4, 7)}, "before the target's final norm"),
        ("llama.cpp", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "drafter has yarn"),
        ("sglang", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 2}}, "not read mscale"),
        ("sglang", {"attention_bias": True}, "no bias in q, k, v"),
        ("sglang", {"capture_layers": (2,)}, "one target state"),
        ("eagle", {"capture_layers": (1, 3, 4)}, r"always captures states \[2, 3, 4\], the drafter reads \[1, 3, 4\]"),
    ],
)
def test_what_an_engine_cannot_serve_is_a_reason(
    engine: str, changed: dict[str, Any], reason: str, source_of: SourceOf, tmp_path: Path
) -> None:
    source = source_of("eagle3")
    with pytest.raises(UserError, match=reason):
        export(replace(source, shape=replace(source.shape, **changed)), ENGINES[engine], tmp_path / "out", None, {})


# What engines read of config.json, and the read-back does not compare.
STATES = "eagle_aux_hidden_state_layer_ids"
EVERY = {"model_type": "llama", "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}
EAGLE_CONFIG = {"use_aux_hidden_state": True, STATES: [0, 2, 5], "norm_before_fc": False, "next_layer_regular": True}
EAGLE3 = {"norm_before_residual": False, "norm_before_fc": False, "dtype": "float32", STATES: [1, 3, 6]}
OF_EAGLE3 = EVERY | EAGLE3 | {"num_aux_hidden_states": 3, "target_hidden_size": 32, "eagle_config": EAGLE_CONFIG}
OF_EAGLE3 |= {"architectures": ["LlamaForCausalLMEagle3"], "bias": False}
OF_SPECULATORS = EAGLE3 | {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}


def of_eagle(architecture: str) -> dict[str, Any]:
    return EVERY | {"architectures": [architecture], "bias": False, "attention_bias": False}


NORMS = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
IDS, HEAD, TABLE = {"d2t", "t2d"}, {"norm.weight", "lm_head.weight"}, {"embed_tokens.weight"}


def layer(name: str, *norms: str) -> set[str]:
    projections = [*(f"self_attn.{each}" for each in "qkvo"), *(f"mlp.{each}" for each in ("gate", "up", "down"))]
    return {f"{name}.{each}_proj.weight" for each in projections} | {f"{name}.{norm}.weight" for norm in norms}


FIRST, SECOND = layer("midlayer", *NORMS) | HEAD, layer("layers.1", *NORMS)
BIASES = {f"{each}.self_attn.{p}_proj.bias" for each in ("midlayer", "layers.1") for p in "qkvo"}


@pytest.mark.parametrize(
    ("name", "engine", "said", "names"),
    [
        ("eagle3", "vllm", OF_EAGLE3, FIRST | IDS),
        ("eagle3", "speculators", OF_SPECULATORS, layer("layers.0", *NORMS) | HEAD | IDS | TABLE),
        ("eagle3, whole vocabulary", "tensorrt-llm", OF_EAGLE3, FIRST),
        ("eagle3, two layers", "sglang", OF_EAGLE3, FIRST | SECOND | IDS),
        ("eagle3, two layers", "speculators", OF_SPECULATORS,
         layer("layers.0", *NORMS) | layer("layers.1", *NORMS[1:]) | HEAD | IDS | TABLE),
        ("eagle3, biases", "vllm", OF_EAGLE3 | {"attention_bias": True}, FIRST | SECOND | IDS | BIASES),
        ("eagle3.1", "vllm", OF_EAGLE3, FIRST | IDS | {f"fc_norm.{i}.weight" for i in range(3)}),
        ("eagle", "vllm", of_eagle("EagleLlamaForCausalLM"), layer("layers.0", NORMS[2])),
        ("eagle", "sglang", of_eagle("LlamaForCausalLMEagle"), layer("layers.0", NORMS[2]) | {"fc.bias"}),
        ("eagle", "eagle", of_eagle("LlamaForCausalLM"), layer("layers.0", NORMS[2])),
    ],
)  # fmt: skip
def test_the_folder_has_what_the_engine_asks_for(
    name: str, engine: str, said: dict[str, Any], names: set[str], source_of: SourceOf, target_dir: Path, tmp_path: Path
) -> None:
    export(source_of(name), ENGINES[engine], tmp_path / "out", None, {})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: config.get(key) for key in said} == said and "null" not in (tmp_path / "out/config.json").read_text()
    if engine == "speculators":
        assert EVERY.items() <= config["transformer_layer_config"].items()
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(target_dir)
    assert load_file(tmp_path / "out/model.safetensors").keys() == names | {"fc.weight"}


def test_the_target_s_rotation_states_in_one_spelling_and_its_embeddings(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    own = {"rope_parameters": rope, "rms_norm_eps": 3e-5, "tie_word_embeddings": True}
    target = save_target(tmp_path / "target", sharded=True, **own)
    source = trained(tmp_path / "drafter", target, drafter_named("eagle3", **own), **own)
    for engine in ("vllm", "speculators"):
        export(source, ENGINES[engine], tmp_path / engine, None, {})
    config = json.loads((tmp_path / "vllm/config.json").read_text())
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["factor"] == 8.0 and config["rms_norm_eps"] == 3e-5
    assert config["rope_parameters"] == rope
    del config[STATES]  # SGLang's spelling alone, of layers' outputs
    folder = write_folder(tmp_path / "sglang", config, load_file(tmp_path / "vllm/model.safetensors"))
    assert read_foreign(read_folder(folder), facts(source)).shape.capture_layers == (1, 3, 6)
    table = load_file(tmp_path / "speculators/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(table, target_of(**own).embedding_table)
    with pytest.raises(UserError, match="is not the table that the drafter was trained with"):
        target_embeddings(source.target | {"embedding_digest": "another"})
    # A vision-language model's parameters have another prefix when they are loaded than in a file.
    layout = source.target["layout"] | {"embeddings": "model.language_model.embed_tokens.weight"}
    assert torch.equal(table, target_embeddings(source.target | {"layout": layout}))


# `test_import` has what the reader refuses in every foreign folder; these read well, as another drafter.
Q = "midlayer.self_attn.q_proj.weight"
ONE, OTHER = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
OTHERS: list[tuple[dict[str, Any] | Callable[[Tensors], Tensors], str]] = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}, "rope_parameters"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ({"norm_output": True}, "norm_output"),
    ({STATES: [2, 3, 6], "eagle_config": EAGLE_CONFIG | {STATES: [1, 2, 5]}}, "capture_layers"),
    (lambda t: t | {Q: t[Q] + 0.01}, f"another {Q}"),
    (lambda t: t | {ONE: t[OTHER], OTHER: t[ONE]}, "another midlayer"),
]


@pytest.mark.parametrize(("change", "named"), OTHERS)
def test_a_folder_of_another_drafter_gets_no_name(
    change: Any, named: str, source_of: SourceOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, engine = source_of("eagle3"), ENGINES["sglang"]
    exporting.write_folder(source, engine, tmp_path, None)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    config, tensors = (config | change, tensors) if isinstance(change, dict) else (config, change(tensors))
    folder = write_folder(tmp_path / "another", config, tensors)
    monkeypatch.setattr(exporting, "write_folder", lambda *given: shutil.copytree(folder, given[2], dirs_exist_ok=True))
    with pytest.raises(UserError, match=named):
        export(source, engine, tmp_path / "out", None, {})
    assert not (tmp_path / "out").exists()


# The command.

Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a script with the words behind it; returns what it prints."""

    def run(*words: str, script: Any = export_script) -> str:
        run_main(script, *words)
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """run/drafter, and recipe.yaml, in the working directory."""
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "target")
    trained(tmp_path / "run/drafter", "target", drafter_named("eagle3"))
    write_recipe(tmp_path, Path("target"), output_dir="run", drafter={}, train={}, export={"license": "mit"})
    return tmp_path / "run"


def measure(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """run/eval, measured with made-up answers."""
    digest = file_digest(run / "drafter/model.safetensors")
    made = MADE["made"] | {"data": {"drafter": {"file": "model.safetensors", "sha256": digest}}}  # type: ignore[operator]
    monkeypatch.setitem(MADE, "made", made)
    (run.parent / "measured").mkdir()
    recipe = make_recipe(run.parent / "measured", drafter="run/drafter")
    asked = [("ours", None, "a", 1), ("ours", None, "b", 1), ("theirs", None, "c", 1)]
    evaluate(recipe, asked, contenders=(MAIN, "rival"))
    content = json.loads((recipe.eval_out / "acceptance.json").read_text())
    content["contenders"]["rival"]["drafter"] = "run/another"
    (recipe.eval_out / "acceptance.json").write_text(json.dumps(content))
    recipe.eval_out.rename(run / "eval")
    return content


def test_a_card_has_what_was_measured_with_these_weights(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    measured = measure(run_dir, monkeypatch)
    call("recipe.yaml", "--plan")
    assert not (run_dir / "export").exists()
    said, out = call("recipe.yaml"), run_dir / "export/vllm"
    assert "SGLang, TensorRT-LLM read the same folder" in said
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "speculation_profile.json", "acceptance.png"),
    }
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "mit" and "base_model" not in head  # the target is a folder, which the Hub would refuse
    command = next(line.strip() for line in said.splitlines() if line.strip().startswith("vllm serve"))
    assert command in card and "draftsmith evaluate recipe.yaml" in card
    profile = json.loads((out / "speculation_profile.json").read_text())
    assert list(profile["drafts"]) == [MAIN]
    for benchmark, rows in measured["benchmarks"].items():
        row, mine = rows[MAIN], profile["drafts"][MAIN]["benchmarks"][benchmark]
        assert mine["acceptance_by_position"] == row["acceptance_by_position"]
        interval = "" if (ends := row["tau_interval"]) is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"
        assert f"| {MAIN} | {benchmark} | {row['prompts']} | {row['tau']:.2f} | {interval} |" in card

    trained(run_dir / "drafter", "target", drafter_named("eagle3.1"))
    assert "was measured with other weights" in call("recipe.yaml", "export.license=null")
    card = (out / "README.md").read_text()
    assert "Not measured yet" in card and "license" not in card.split("---\n")[1]
    assert not (out / "speculation_profile.json").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("Llama-3.1-8B-Instruct", "the Llama community licence"), ("CodeLlama-7b-hf", "the Llama community licence")),
        *(("gemma-2-2b-it", "Gemma's terms of use"), ("TinyLlama-1.1B", None), ("llava-1.5-7b-hf", None)),
    ],
)
def test_a_card_tells_a_licence_that_binds_the_drafter(name: str, said: str | None, source_of: SourceOf) -> None:
    source = source_of("eagle3")
    text = cards.card(replace(source, target=source.target | {"model": f"org/{name}"}), [], None, "x", True, None, None)
    assert (f"> **Licence**: {said}" in text) if said else "Licence" not in text


def test_a_plan_comes_before_the_training(run_dir: Path, call: Call) -> None:
    words = "recipe.yaml", "output_dir=new", "--plan"
    said = call(*words, "export.to=sglang")
    assert "yet to be trained" in said and "new/export/sglang  [new]" in said
    with pytest.raises(UserError, match="no engine can"):
        call(*words, "export.to=sglang", "drafter.kind=poss")
    save_target(run_dir.parent / "target", family="gemma2")  # scales its embeddings, which its config tells
    assert "engine         vLLM; also able: speculators\n" in call(*words, "drafter.fc_norm=true")


def test_a_checkpoint_is_exported_and_imported_without_a_recipe(run_dir: Path, call: Call) -> None:
    assert "acceptance     none" in call("run/drafter", "--to", "speculators", "--out", "served")
    words = ["served", "--target", "target", "--out", "back"]
    call(*words, "--plan", script=import_drafter)
    assert not Path("back").exists()
    call(*words, script=import_drafter)
    shape, target = read_drafter_config(Path("back"))
    assert shape == read_drafter_config(run_dir / "drafter")[0]
    assert target["tokenizer_fingerprint"] == tokenizer_fingerprint(make_tokenizer())


def test_what_an_engine_must_be_told_is_said(run_dir: Path, call: Call) -> None:
    config = run_dir / "drafter/config.json"
    content = json.loads(config.read_text())
    content["target"] |= {"adapter": "ad" * 32, "guidance": "scale 2, <null>"}
    config.write_text(json.dumps(content))
    said = call("recipe.yaml")
    card = (run_dir / "export/vllm/README.md").read_text()
    for text in (said, card):
        assert "with a LoRA adapter merged into it" in text and "vllm serve MERGED_TARGET" in text
        assert "under classifier-free guidance (scale 2, <null>)" in text
    assert "vllm serve target" not in said + card and "ad" * 32 in card
    with pytest.raises(UserError, match="would convert the target without its adapter"):
        call("recipe.yaml", "--to", "llama.cpp", "--with-target", "x.py")
