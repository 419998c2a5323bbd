"""Exports are the trained drafter for every engine that takes them, and every way of being another one is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.formats.engines import ENGINES
from draftsmith.models.formats.exporting import (
    Source,
    able_engines,
    differs,
    export,
    facts,
    prove,
    target_embeddings,
)
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.foreign import Foreign, probe_head, probe_log_probs, read_foreign
from draftsmith.recipes.errors import UserError
from tests.export_cases import DRAFTERS, SCALED, drafter_named, save_target, target_of, trained, write_folder

ABLE = {
    "eagle3": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle3, whole vocabulary": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle3, two layers": ["vllm", "sglang", "speculators"],
    "eagle3, biases": ["vllm"],
    "eagle3.1": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle3, normed output": ["vllm", "sglang", "tensorrt-llm", "speculators"],
    "eagle": ["vllm", "sglang", "eagle"],
    "eagle, biases": [],
    "eagle, biased queries": [],
    "poss": [],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("exports") / "target").parent


def source_of(name: str, home: Path) -> Source:
    directory = home / name
    return Source.read(directory) if directory.exists() else trained(directory, home / "target", drafter_named(name))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_engine_that_can_gets_the_trained_drafter(name: str, home: Path, tmp_path: Path) -> None:
    source = source_of(name, home)
    assert [engine.name for engine in able_engines(source) if engine.name != "llama.cpp"] == ABLE[name]
    for engine in able_engines(source):
        for dtype in (None, torch.bfloat16) if name == "eagle3" else (None,):
            out = tmp_path / engine.name
            export(source, engine, out, dtype, {})
            if engine.name == "llama.cpp":
                continue
            config = json.loads((out / "config.json").read_text())
            assert "null" not in (out / "config.json").read_text() and config["tie_word_embeddings"] is False
            names = load_file(out / "model.safetensors")
            assert ("d2t" in names) == ("t2d" in names) == (source.vocab.size < source.vocab.target_vocab_size)
            assert ("embed_tokens.weight" in names) == (engine.name == "speculators")
            assert differs(source, read_foreign(read_folder(out), facts(source)), dtype) is None
    for engine in ENGINES.values():
        if engine not in able_engines(source):
            with pytest.raises(UserError, match=r"can be exported to|no engine can"):
                export(source, engine, tmp_path / "refused", None, {})
            assert not (tmp_path / "refused").exists()


# What config.json says of a drafter beyond its sizes, which the read-back compares.
PLAIN = {"model_type": "llama", "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}
STATES = "eagle_aux_hidden_state_layer_ids"
OURS = {"dtype": "float32", "norm_before_residual": False, STATES: [1, 3, 6], "tie_word_embeddings": False}
OF_VLLM = {"attention_bias": False, "bias": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
OF_VLLM |= {"num_aux_hidden_states": 3, "target_hidden_size": 32, "architectures": ["LlamaForCausalLMEagle3"]}
EAGLE_CONFIG = {"use_aux_hidden_state": True, STATES: [0, 2, 5], "norm_before_fc": False, "next_layer_regular": True}
SAID: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("eagle3", PLAIN | OURS | OF_VLLM | {"eagle_config": EAGLE_CONFIG}),
    "sglang": ("eagle", PLAIN | {"architectures": ["LlamaForCausalLMEagle"], "bias": False, "attention_bias": False}),
    "eagle": ("eagle", PLAIN | {"architectures": ["LlamaForCausalLM"], "bias": False}),
    "speculators": ("eagle3", OURS | {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}),
}


@pytest.mark.parametrize("engine", SAID)
def test_the_config_says_what_the_engine_reads(engine: str, home: Path, tmp_path: Path) -> None:
    name, said = SAID[engine]
    export(source_of(name, home), ENGINES[engine], tmp_path / "out", None, {})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: config.get(key) for key in said} == said
    if engine == "speculators":
        layer = config["transformer_layer_config"]
        assert {key: layer.get(key) for key in PLAIN} == PLAIN
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(home / "target")


LAYER = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
NORMS = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]


def layer(name: str, *norms: str) -> set[str]:
    return {f"{name}.{each}.weight" for each in (*LAYER, *norms)}


@pytest.mark.parametrize(
    ("name", "engine", "names"),
    [
        ("eagle3", "vllm", layer("midlayer", *NORMS) | {"d2t", "t2d"}),
        ("eagle3", "speculators", layer("layers.0", *NORMS) | {"d2t", "t2d", "embed_tokens.weight"}),
        ("eagle3, whole vocabulary", "tensorrt-llm", layer("midlayer", *NORMS)),
        ("eagle3, two layers", "sglang", layer("midlayer", *NORMS) | layer("layers.1", *NORMS) | {"d2t", "t2d"}),
        ("eagle3, two layers", "speculators", layer("layers.0", *NORMS) | layer("layers.1", *NORMS[1:])
         | {"d2t", "t2d", "embed_tokens.weight"}),
        ("eagle3, biases", "vllm", layer("midlayer", *NORMS) | layer("layers.1", *NORMS) | {"d2t", "t2d"}
         | {f"{each}.self_attn.{p}_proj.bias" for each in ("midlayer", "layers.1") for p in "qkvo"}),
        ("eagle3.1", "vllm", layer("midlayer", *NORMS) | {"d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}),
        ("eagle", "vllm", layer("layers.0", NORMS[2])),
        ("eagle", "sglang", layer("layers.0", NORMS[2]) | {"fc.bias"}),
        ("eagle", "eagle", layer("layers.0", NORMS[2])),
    ],
)  # fmt: skip
def test_the_file_has_the_tensors_that_the_engine_asks_for(
    name: str, engine: str, names: set[str], home: Path, tmp_path: Path
) -> None:
    export(source_of(name, home), ENGINES[engine], tmp_path / "out", None, {})
    own = {"norm.weight", "lm_head.weight"} if name.startswith("eagle3") else set()
    assert load_file(tmp_path / "out/model.safetensors").keys() == names | own | {"fc.weight"}


def test_states_in_both_spellings_and_the_target_s_rotation(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    own = {"rope_parameters": rope, "rms_norm_eps": 3e-5, "tie_word_embeddings": True}
    target = save_target(tmp_path / "target", sharded=True, **own)
    source = trained(tmp_path / "drafter", target, drafter_named("eagle3", **own), **own)
    for engine in ("vllm", "speculators"):
        export(source, ENGINES[engine], tmp_path / engine, None, {})
    config = json.loads((tmp_path / "vllm/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["factor"] == 8.0 and config["rms_norm_eps"] == 3e-5
    assert config["rope_parameters"] == rope
    del config["eagle_aux_hidden_state_layer_ids"]  # SGLang's spelling alone, of layers' outputs
    folder = write_folder(tmp_path / "sglang", config, load_file(tmp_path / "vllm/model.safetensors"))
    assert read_foreign(read_folder(folder), facts(source)).shape.capture_layers == (1, 3, 6)
    table = load_file(tmp_path / "speculators/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(table, target_of(**own).embedding_table)
    with pytest.raises(UserError, match="is not the table that the drafter was trained with"):
        target_embeddings(source.target | {"embedding_digest": "another"})
    # A vision-language model's parameters have another prefix when they are loaded than in a file.
    layout = source.target["layout"] | {"embeddings": "model.language_model.embed_tokens.weight"}
    assert torch.equal(table, target_embeddings(source.target | {"layout": layout}))


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("eagle3", ["vllm", "sglang", "speculators", "llama.cpp"]),
        ("eagle3, two layers", ["vllm", "sglang", "speculators"]),
        ("eagle3, normed output", ["vllm", "sglang", "speculators"]),
        ("eagle3.1", ["vllm", "speculators"]),
        ("eagle", ["vllm", "sglang", "eagle"]),
    ],
)
def test_an_export_makes_up_for_the_target_s_scaled_embeddings(name: str, able: list[str], tmp_path: Path) -> None:
    source = trained(tmp_path / "drafter", save_target(tmp_path / "target", **SCALED), drafter_named(name, **SCALED))
    assert [engine.name for engine in able_engines(source)] == able
    head = probe_head(source.shape)
    wanted = probe_log_probs(Foreign(source.shape, source.vocab, source.tensors, None).drafter(head))
    for engine in (ENGINES[each] for each in able if each != "llama.cpp"):
        export(source, engine, tmp_path / engine.name, None, {})
        back = read_foreign(read_folder(tmp_path / engine.name), facts(source))
        assert back.shape.embedding_scale == 1
        if name == "eagle3.1":  # the file's table holds the scale
            assert back.embeddings is not None
            assert torch.equal(back.embeddings, 12 * target_of(**SCALED).embedding_table)
            back = replace(back, shape=replace(back.shape, embedding_scale=12.0))
        found = probe_log_probs(back.drafter(head))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


# `test_import` has what the reader refuses in every foreign folder; these read well, as another drafter.
KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("sglang", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}, "rope_parameters"),
    ("sglang", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("sglang", {"norm_output": True}, "norm_output"),
    ("sglang", {"eagle_config": EAGLE_CONFIG | {"norm_before_fc": True}}, "norm_before_fc"),
    ("sglang", {STATES: [2, 3, 6]}, "name different states"),
    ("sglang", {STATES: [2, 3, 6], "eagle_config": EAGLE_CONFIG | {STATES: [1, 2, 5]}}, "capture_layers"),
    ("sglang", {"hidden_act": "gelu"}, "hidden_act"),
    # What our own reader forgives, and vLLM does not.
    ("vllm", {"model_type": "qwen2"}, "model_type"),
    ("vllm", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("vllm", {"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    ("vllm", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("vllm", {"architectures": ["LlamaForCausalLM"]}, "architectures"),
]
Q = "midlayer.self_attn.q_proj.weight"
ONE, OTHER = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
Tensors = dict[str, torch.Tensor]
TENSORS: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("sglang", lambda t: {name: t[name] for name in t if name != "norm.weight"}, "norm.weight is missing"),
    ("sglang", lambda t: t | {"midlayer.norm.weight": t[ONE].clone()}, "midlayer.norm.weight has no place"),
    ("sglang", lambda t: t | {Q: t[Q] + 0.01}, "logits up to"),
    ("sglang", lambda t: t | {ONE: t[OTHER], OTHER: t[ONE]}, "logits up to"),
    ("sglang", lambda t: t | {"d2t": t["d2t"] + torch.arange(len(t["d2t"]))}, "d2t must hold|another draft vocab"),
    ("sglang", lambda t: {name: t[name] for name in t if name != "d2t"}, "there is no d2t"),
    ("vllm", lambda t: t | {"midlayer.self_attn.o_proj.bias": torch.zeros(32)}, "o_proj.bias is unknown"),
]


@pytest.mark.parametrize(("engine", "change", "named"), [*KEYS, *TENSORS])
def test_a_folder_of_another_drafter_is_refused(
    engine: str, change: dict[str, Any] | Callable[[Tensors], Tensors], named: str, home: Path, tmp_path: Path
) -> None:
    source, out = source_of("eagle3", home), home / f"mutated-{engine}"
    if not out.exists():
        export(source, ENGINES[engine], out, None, {})
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    folder = tmp_path / engine
    if isinstance(change, dict):
        write_folder(folder, config | change, tensors)
    else:
        write_folder(folder, config, change(tensors))
    with pytest.raises(UserError, match=named):
        prove(source, ENGINES[engine], folder, None)
