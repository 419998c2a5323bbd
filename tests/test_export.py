"""Exports are the trained drafter for every engine that takes them, and every way of being another one is named."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.formats.engines import ENGINES, problems
from draftsmith.models.formats.exporting import Source, able_engines, differs, export, facts, target_embeddings
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
    "poss": [],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("exports") / "target").parent


def nothing_beside(_: Any) -> dict[str, str]:
    return {}


def source_of(name: str, home: Path) -> Source:
    directory = home / name
    return Source.read(directory) if directory.exists() else trained(directory, home / "target", drafter_named(name))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_engine_that_can_gets_the_trained_drafter(name: str, home: Path, tmp_path: Path) -> None:
    source = source_of(name, home)
    assert [engine.name for engine in able_engines(source) if engine.name != "llama.cpp"] == ABLE[name]
    for engine in able_engines(source):
        for dtype in (None, torch.bfloat16):
            out = tmp_path / engine.name
            serves = export(source, engine, out, dtype, nothing_beside)
            if engine.name == "llama.cpp":
                continue
            assert serves[0] is engine
            config = json.loads((out / "config.json").read_text())
            assert "null" not in (out / "config.json").read_text() and config["tie_word_embeddings"] is False
            names = load_file(out / "model.safetensors")
            assert ("d2t" in names) == ("t2d" in names) == (source.vocab.size < source.vocab.target_vocab_size)
            assert ("embed_tokens.weight" in names) == (engine.name == "speculators")
            assert differs(source, read_foreign(read_folder(out), facts(source)), dtype) is None
    for engine in ENGINES.values():
        if engine not in able_engines(source):
            with pytest.raises(UserError, match=r"can be exported to|no engine can"):
                export(source, engine, tmp_path / "refused", None, nothing_beside)
            assert not (tmp_path / "refused").exists()


def test_one_folder_serves_several_engines(home: Path, tmp_path: Path) -> None:
    for name, others in (("eagle3", ["vllm", "sglang", "tensorrt-llm"]), ("eagle", ["vllm"])):
        serves = export(source_of(name, home), ENGINES["vllm"], tmp_path / name, None, nothing_beside)
        assert [engine.name for engine in serves] == others


def test_states_in_both_spellings_and_the_target_s_rotation(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    own = {"rope_parameters": rope, "rms_norm_eps": 3e-5, "tie_word_embeddings": True}
    target = save_target(tmp_path / "target", sharded=True, **own)
    source = trained(tmp_path / "drafter", target, drafter_named("eagle3", **own), **own)
    for engine in ("vllm", "speculators"):
        export(source, ENGINES[engine], tmp_path / engine, None, nothing_beside)
    config = json.loads((tmp_path / "vllm/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["factor"] == 8.0 and config["rms_norm_eps"] == 3e-5
    assert config["rope_parameters"] == rope
    table = load_file(tmp_path / "speculators/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(table, target_of(**own).embedding_table)
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
        export(source, engine, tmp_path / engine.name, None, nothing_beside)
        back = read_foreign(read_folder(tmp_path / engine.name), facts(source))
        assert back.shape.embedding_scale == 1
        if name == "eagle3.1":  # the file's table holds the scale
            assert back.embeddings is not None
            assert torch.equal(back.embeddings, 12 * target_of(**SCALED).embedding_table)
            back = replace(back, shape=replace(back.shape, embedding_scale=12.0))
        found = probe_log_probs(back.drafter(head))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def keys(**changed: Any) -> Change:
    """Sets keys of config.json."""
    return lambda config, tensors: config.update(changed)


def inner(section: str, **changed: Any) -> Change:
    """Sets keys of one of its sections."""
    return lambda config, tensors: config[section].update(changed)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


Q = "midlayer.self_attn.q_proj.weight"
MUTATIONS: dict[str, tuple[Change, str]] = {
    "a lost tensor": (lambda config, tensors: tensors.pop("norm.weight"), "norm.weight is missing"),
    "a renamed one": (
        lambda config, tensors: tensors.update({"midlayer.norm.weight": tensors.pop("midlayer.hidden_norm.weight")}),
        "midlayer.norm.weight",
    ),
    "a transposed one": (tensor(Q, lambda weight: weight.T), r"q_proj.weight is \[64, 32\]"),
    "an integer weight": (tensor(Q, torch.Tensor.int), "q_proj.weight is of type I32"),
    "ids for offsets": (tensor("d2t", torch.Tensor.int), "d2t is of type I32"),
    "no d2t": (lambda config, tensors: tensors.pop("d2t"), "d2t is missing"),
    "a null": (keys(target_hidden_size=None), "target_hidden_size is null"),
    "another rope base": (
        lambda config, tensors: config["rope_parameters"].update(rope_theta=1e6) or config.update(rope_theta=1e6),
        "rope_parameters",
    ),
    "two rope bases": (keys(rope_theta=1e6), "rope_theta"),
    "another epsilon": (keys(rms_norm_eps=1e-5), "rms_norm_eps"),
    "a normed residual": (keys(norm_before_residual=True), "norm_before_residual"),
    "a norm before fc": (inner("eagle_config", norm_before_fc=True), "norm_before_fc"),
    "an output norm": (keys(norm_output=True), "norm_output"),
    "half a rotation": (inner("rope_parameters", partial_rotary_factor=0.5), "partial"),
    "half a rotation, above": (keys(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "two scalings": (keys(rope_scaling={"type": "linear", "factor": 4.0}), "rope_scaling is"),
    "a bias in the MLP": (keys(mlp_bias=True), "mlp_bias"),
    "another family": (keys(model_type="qwen2"), "model_type"),
    "a quantisation": (keys(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "another precision": (keys(dtype="bfloat16"), "dtype is 'bfloat16'"),
    "a tied head": (keys(tie_word_embeddings=True), "tie_word_embeddings"),
    "a whole number with a point": (keys(head_dim=16.0), "head_dim is 16.0"),
    "true for a number": (keys(num_hidden_layers=True), "num_hidden_layers is True"),
    "a state with a point": (
        lambda config, tensors: config["eagle_config"]["eagle_aux_hidden_state_layer_ids"].append(9.0),
        "eagle_config.eagle_aux_hidden_state_layer_ids",
    ),
    "layers without end": (keys(num_hidden_layers=2**31 - 1), "more than there are tensors"),
    "another architecture": (keys(architectures=["LlamaForCausalLM"]), "architectures"),
    "text for a number": (keys(hidden_size="32"), "hidden_size"),
    "another activation": (keys(hidden_act="gelu"), "hidden_act"),
    "a smaller vocabulary": (keys(draft_vocab_size=100), "draft_vocab_size"),
}


def mutated(source: Source, engine: str, change: Change, home: Path, tmp_path: Path) -> list[str]:
    out = home / f"mutated-{engine}"
    if not out.exists():
        export(source, ENGINES[engine], out, None, nothing_beside)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config, tensors)
    read = read_folder(write_folder(tmp_path / engine, config, tensors))
    return problems(ENGINES[engine], read.config, read.tensors, source.shape, source.target)


# What is mutated is checked by code that the engines share, except for where the residual is taken.
TO_CHECK = [(each, "vllm") for each in MUTATIONS] + [("a normed residual", each) for each in ("sglang", "tensorrt-llm")]


@pytest.mark.parametrize(("mutation", "engine"), TO_CHECK)
def test_the_checker_names_every_mutation(mutation: str, engine: str, home: Path, tmp_path: Path) -> None:
    source = source_of("eagle3", home)
    change, named = MUTATIONS[mutation]
    found = mutated(source, engine, change, home, tmp_path)
    assert any(re.search(named, problem) for problem in found), found


def test_a_shifted_layer_is_named_by_the_engine_that_reads_that_spelling(home: Path, tmp_path: Path) -> None:
    source, key = source_of("eagle3", home), "eagle_aux_hidden_state_layer_ids"
    for engine, change in (
        ("vllm", keys(**{key: [2, 3, 6]})),
        ("sglang", inner("eagle_config", **{key: [1, 2, 5]})),
        ("tensorrt-llm", inner("eagle_config", **{key: [1, 3, 6]})),
    ):
        found = mutated(source, engine, change, home, tmp_path / engine)
        assert [problem for problem in found if problem.startswith("capture_layers")], (engine, found)
        with pytest.raises(UserError, match="name different states"):
            read_foreign(read_folder(tmp_path / engine / engine), facts(source))
