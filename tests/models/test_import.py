"""Foreign drafters: published ones draft here, exports come back as they were, hostile ones are refused by name.

Recipes that name them, or drafters on the Hub, measure and train on them like our own.
"""

import itertools
import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import rank_vocab
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.models.checkpoint import read_drafter_config, read_weights
from draftsmith.models.drafters import drafting_of
from draftsmith.models.formats import named_drafters
from draftsmith.models.formats.eagle_format import AUX_IDS as AUX
from draftsmith.models.formats.engines import ENGINES
from draftsmith.models.formats.exporting import able_engines, export, facts
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.importing import import_drafter, read_foreign
from draftsmith.models.formats.named_drafters import with_measured_drafters, with_start, with_writing_drafter
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import VOCAB_SIZE
from tests.decoding import decode_batch
from tests.evaluation_cases import save_untrained
from tests.export_cases import (
    CUT,
    SCALED,
    Tensors,
    drafted,
    drafter_named,
    loaded,
    published_eagle,
    published_eagle3,
    save_target,
    target_of,
    trained,
    write_folder,
)
from tests.models.test_hub import FakeHub
from tests.models.test_hub import checkpoint as checkpoint
from tests.models.test_hub import files_of as contents_of
from tests.models.test_hub import hub as hub
from tests.thinning import a_few
from tests.training_runs import no_dry_run as no_dry_run
from tests.training_runs import recipe_path as recipe_path
from tests.training_runs import run_main, train, write_recipe

PROMPTS = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26]]


def imported(folder: Path, target_dir: Path, allow_bin: bool = False) -> Path:
    """The drafter in a foreign folder as one of ours, beside it."""
    out = folder.with_name(f"{folder.name}, imported")
    section = TargetSection(model=str(target_dir), device="cpu", dtype="float32")
    import_drafter(read_folder(folder, allow_bin), TargetFiles(section), out)
    return out


def rounds(directory: Path) -> list[list[int]]:
    """Accepted tokens of every round with the drafter in `directory`."""
    target = target_of()
    proposer = PolicyProposer(drafting_of(loaded(directory)), policy_of(TreeSection(nodes=12, draft_calls=3, top_k=4)))
    plain = decode_batch(target, None, PROMPTS, {-1}, 16)
    answers = decode_batch(target, proposer, PROMPTS, {-1}, 16)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    return [answer.accepted_per_round for answer in answers]


@pytest.mark.parametrize(
    ("name", "engine"),
    a_few(
        itertools.product(
            ["eagle3", "eagle3, two layers", "eagle3, biases", "eagle3.1", "eagle"], ["vllm", "sglang", "speculators"]
        ),
        *(("eagle3, two layers", "vllm"), ("eagle3.1", "speculators"), ("eagle", "sglang")),
    ),
)
def test_an_export_comes_back_with_the_same_acceptance(
    name: str, engine: str, target_dir: Path, tmp_path: Path
) -> None:
    source = trained(tmp_path / "own", target_dir, drafter_named(name))
    if ENGINES[engine].reasons(source.shape, source.target):
        return
    export(source, ENGINES[engine], tmp_path / "export", None, {})
    assert rounds(imported(tmp_path / "export", target_dir)) == rounds(tmp_path / "own")


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
def test_an_export_makes_up_for_the_target_s_scaled_embeddings_and_comes_back(
    name: str, able: list[str], tmp_path: Path
) -> None:
    source = trained(tmp_path / "own", save_target(tmp_path / "target", **SCALED), drafter_named(name, **SCALED))
    wanted = drafted(source.shape, source.tensors)
    assert [engine.name for engine in able_engines(source)] == able
    for engine in (ENGINES[each] for each in able if each != "llama.cpp"):
        export(source, engine, tmp_path / engine.name, None, {})
        served = read_foreign(read_folder(tmp_path / engine.name), facts(source))
        assert served.shape.embedding_scale == 1
        if name == "eagle3.1":  # the file's table holds the scale
            assert served.embeddings is not None
            assert torch.equal(served.embeddings, 12 * target_of(**SCALED).embedding_table)
            served = replace(served, shape=replace(served.shape, embedding_scale=12.0))
        torch.testing.assert_close(drafted(served.shape, served.tensors), wanted, rtol=1e-5, atol=2e-5)
    back = imported(tmp_path / "vllm", tmp_path / "target")
    shape = read_drafter_config(back)[0]
    assert shape.embedding_scale == 12 and shape.rms_norm_eps == pytest.approx(0.3, rel=1e-5)
    torch.testing.assert_close(drafted(shape, read_weights(back)), wanted, rtol=1e-5, atol=2e-5)
    if name == "eagle3.1":  # without its table
        tensors = load_file(tmp_path / "vllm/model.safetensors")
        del tensors["embed_tokens.weight"]
        save_file(tensors, tmp_path / "vllm/model.safetensors")
        with pytest.raises(UserError, match=r"scales its embeddings by 12, .* with fc_norm cannot be rewritten"):
            imported(tmp_path / "vllm", tmp_path / "target")


def test_published_checkpoints_draft_here(target_dir: Path, tmp_path: Path) -> None:
    published_eagle3(tmp_path / "three")
    given = published_eagle(tmp_path / "two")
    three, two = (imported(tmp_path / name, target_dir) for name in ("three", "two"))
    shape = read_drafter_config(three)[0]
    assert shape.capture_layers == (2, 3, 4) and shape.draft_vocab_size == CUT  # the published default of 7 layers
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0} and shape.rms_norm_eps == 1e-5
    back = read_weights(two)
    assert all(torch.equal(back[name], tensor) for name, tensor in given.items() if name != "embed_tokens.weight")
    for directory in (three, two):
        assert sum(map(len, rounds(directory))) >= 2


def test_draft_ids_in_any_order_keep_their_rows(target_dir: Path, tmp_path: Path) -> None:
    tensors = published_eagle3(tmp_path / "ascending")
    config = json.loads((tmp_path / "ascending/config.json").read_text())
    order = torch.randperm(CUT)
    ids = (tensors["d2t"] + torch.arange(CUT))[order]
    shuffled = tensors | {"d2t": ids - torch.arange(CUT), "lm_head.weight": tensors["lm_head.weight"][order]}
    write_folder(tmp_path / "shuffled", config, shuffled)
    one, other = (read_weights(imported(tmp_path / name, target_dir)) for name in ("ascending", "shuffled"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_sharded_checkpoint_is_read_whole(tmp_path: Path) -> None:
    tensors = published_eagle3(tmp_path / "one")
    folder = write_folder(tmp_path / "two", json.loads((tmp_path / "one/config.json").read_text()), {})
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    read = read_folder(folder)
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())


# Keys of config.json, and what is told.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "which was it"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "whole heads"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; drafters here rotate by default, linear"),
    ({"eagle_config": {AUX: [1, 2.5, 3]}}, r"eagle_aux_hidden_state_layer_ids.1 is 2.5"),
    ({AUX: [1, 2, 3], "eagle_config": {AUX: [1, 2, 3]}}, "name different states"),
    ({"hidden_size": 16, "target_hidden_size": 32}, "is of width 16, the target's 32; .* Only drafters as wide"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"vocab_size": VOCAB_SIZE + 8}, "vocab_size is 328, the target's 320"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"norm_before_residual": True}, "norm_before_residual is True"),
]
# A tensor, what becomes of it, and what is told.
TENSORS: list[tuple[str, Callable[[Tensors], torch.Tensor] | None, str]] = [
    ("fc.weight", lambda t: t["fc.weight"] * torch.nan, "numbers that are not finite"),
    ("fc.weight", lambda t: t["fc.weight"][:, :5], r"fc.weight is \[32, 5\], not \[32, 96\]"),
    ("midlayer.mlp.up_proj.weight", None, "midlayer.mlp.up_proj.weight is missing"),
    ("d2t", None, "there is no d2t"),
    ("t2d", lambda t: ~t["t2d"], "t2d marks other target tokens"),
    ("d2t", lambda t: torch.cat((t["d2t"][:1], t["d2t"][:1] - 1, t["d2t"][2:])), "target_ids must ascend"),
    ("midlayer.self_attn.o_proj.bias", lambda t: torch.ones(32), "o_proj.bias has no place in eagle3"),
    ("embed_tokens.weight", lambda t: torch.randn(VOCAB_SIZE, 32), "not the target's table"),
]
WEIGHTS = "model.safetensors"


def of_index(places: Any) -> Callable[[Path], object]:
    return lambda at: at.with_suffix(".safetensors.index.json").write_text(json.dumps({"weight_map": places}))


# A file that is taken away, what is made in its place, and what is told.
FILES: list[tuple[str, Callable[[Path], object], str]] = [
    (WEIGHTS, lambda at: at.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "not a whole safetensors file: .*header"),
    ("config.json", lambda at: at.write_bytes(b" " * (1 << 25)), "no drafter's is that large"),
    (WEIGHTS, of_index({"fc.weight": "../outside.safetensors"}), "plain names in its folder"),
    (WEIGHTS, of_index({"fc.weight": "gone.safetensors"}), "gone.safetensors, which is missing"),
    (WEIGHTS, lambda at: at.symlink_to(at.parents[1] / "outside"), "a link that leads out of the folder"),
    (WEIGHTS, os.mkfifo, "not a regular file"),
]


@pytest.mark.parametrize("case", [*CONFIGS, *TENSORS, *FILES], ids=lambda case: case[-1])
def test_a_hostile_or_damaged_checkpoint_is_refused_by_name(case: Any, target_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    tensors, config = published_eagle3(folder), json.loads((folder / "config.json").read_text())
    match case:
        case dict() as keys, named:
            write_folder(folder, config | keys, tensors)
        case name, make, named if (folder / name).exists():
            (folder / name).rename(tmp_path / "outside")
            make(folder / name)
        case name, None, named:
            del tensors[name]
            write_folder(folder, config, tensors)
        case name, change, named:
            write_folder(folder, config, tensors | {name: change(tensors)})
    with pytest.raises(UserError, match=named):
        imported(folder, target_dir)
    assert not (tmp_path / "hostile, imported").exists()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("exploded", "w"))


def test_a_pickle_is_read_only_on_request_and_runs_nothing(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = published_eagle3(tmp_path / "bin")
    (tmp_path / "bin/model.safetensors").unlink()
    torch.save(tensors, tmp_path / "bin/pytorch_model.bin")
    with pytest.raises(UserError, match="--allow-bin"):
        read_folder(tmp_path / "bin")
    imported(tmp_path / "bin", target_dir, allow_bin=True)
    for content in ({"fc.weight": Bomb()}, [1, 2]):
        with (tmp_path / "bin/pytorch_model.bin").open("wb") as file:
            pickle.dump(content, file)
        with pytest.raises(UserError, match=r"weights_only reader refuses it|not a table of tensors"):
            read_folder(tmp_path / "bin", allow_bin=True)
    assert not (tmp_path / "exploded").exists()


# Recipes that name them.


@pytest.fixture
def place(tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a foreign drafter and a recipe that measures."""
    monkeypatch.chdir(tmp_path)
    published_eagle3(tmp_path / "foreign")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "a mat"}\n')
    tree = {"nodes": 12, "draft_calls": 3, "top_k": 4}
    measure = {"prompts": "prompts.jsonl", "max_new_tokens": 12, "tree": tree}
    write_recipe(tmp_path, target_dir, output_dir="run", eval=measure)
    return tmp_path


def measured(place: Path, drafter: str, plan: bool = False) -> str | None:
    return with_measured_drafters(load_recipe("recipe.yaml", [f"eval.drafter={drafter}"]), plan).eval.drafter


@pytest.mark.slow
def test_a_foreign_folder_is_measured_as_its_import(place: Path) -> None:
    run_main(acceptance, "recipe.yaml", "eval.drafter=foreign")
    report = json.loads((place / "run/eval/acceptance.json").read_text())
    [imported] = (place / "run/imported").glob("foreign-*")
    assert report["drafter"] == str(imported.relative_to(place)) and "drafter" in report["made"]["data"]
    assert report["matches_target"] is True


def test_an_import_is_made_once_for_each_content_and_target(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured(place, "foreign")
    changed = json.loads((place / "foreign/config.json").read_text()) | {"rms_norm_eps": 1e-4}
    with monkeypatch.context() as patch:
        patch.setattr(named_drafters, "import_drafter", lambda *_: pytest.fail("it was imported again"))
        assert measured(place, "foreign") == measured(place, str(place / "foreign")) == first
    (place / "foreign/config.json").write_text(json.dumps(changed))
    second = measured(place, "foreign")
    assert second != first and read_drafter_config(Path(str(second)))[0].rms_norm_eps == 1e-4
    for other in ("target.dtype=bfloat16", "target.revision=v2"):
        recipe = load_recipe("recipe.yaml", ["eval.drafter=foreign", other])
        assert with_measured_drafters(recipe, plan=True).eval.drafter not in (first, second)


def test_names_on_the_hub(hub: FakeHub, place: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add_repo("me/ours", contents_of(checkpoint))
    foreign = hub.add_repo("me/foreign", contents_of(place / "foreign"))
    commit = foreign.oid()
    foreign.commit("another", {"config.json": b"{}"})
    name = f"me/foreign@{commit}"
    for each in ("me/ours", name):
        run_main(acceptance, "recipe.yaml", f"eval.drafter={each}", "--plan")
        assert f"run/imported/{re.sub('[/@]', '--', each)}  [yet to be imported]" in capsys.readouterr().out
    assert hub.asked == 0 and not (place / "run").exists()
    # In the Hub's cache: nothing to import
    assert contents_of(Path(str(measured(place, "me/ours")))) == contents_of(checkpoint)
    imported = Path(str(measured(place, name)))
    assert imported.parent == Path("run/imported") and imported.name.startswith(f"me--foreign--{commit}-")
    tensors, theirs = read_weights(imported), load_file(place / "foreign/model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())
    before = hub.asked
    assert measured(place, name, plan=True) == str(imported) and hub.asked == before  # from the cache
    rivals = json.dumps([{"name": "theirs", "drafter": name}])
    [rival] = with_measured_drafters(load_recipe("recipe.yaml", [f"eval.also={rivals}"]), plan=False).eval.also
    writing = with_writing_drafter(load_recipe("recipe.yaml", [f"data.generator.drafter={name}"]), plan=False)
    assert rival.drafter == writing.data.generator.drafter == str(imported)
    before = hub.asked
    save_untrained(place / "me/ours", Path(load_recipe("recipe.yaml").target.model))
    assert measured(place, "me/ours") == "me/ours" and hub.asked == before  # a local folder wins


def test_what_cannot_be_had_is_told_at_its_key(hub: FakeHub, place: Path) -> None:
    hub.add_repo("me/pickle", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    rivals = "eval.also=[{name: x, drafter: me/pickle}, {name: y, drafter: nowhere}]"
    with pytest.raises(UserError) as told:
        run_main(acceptance, "recipe.yaml", "eval.drafter=me/gone", rivals)
    gone, pickle = told.value.problems
    assert gone.startswith(f"eval.drafter: 'me/gone' is no folder in {place}, and the Hub has no model of this name")
    assert pickle.startswith("eval.also.0.drafter: me/pickle: this repository of the Hub has no config.json with safe")
    with pytest.raises(UserError, match=r"^drafter.init_from: 'me/gone' is no folder"):
        with_start(load_recipe("recipe.yaml", ["drafter.init_from=me/gone"]), plan=False)


@pytest.mark.usefixtures("no_dry_run")
def test_a_foreign_drafter_is_trained_further_with_its_vocabulary(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = published_eagle3(tmp_path / "foreign", rope_theta=123.0)
    run = tmp_path / "run"
    start = ["drafter.init_from=" + str(tmp_path / "foreign"), "drafter.intermediate_size=24", "train.max_steps=1"]
    with pytest.raises(UserError, match=r"^drafter.vocab_size: 160, but drafter.init_from .* 200 tokens with it"):
        train(recipe_path, *start)
    (run / "draft_vocab.safetensors").unlink()
    start += ["drafter.vocab_size=null"]
    run_main(rank_vocab, recipe_path, *start)
    assert torch.equal(load_file(run / "draft_vocab.safetensors")["d2t"], tensors["d2t"])
    assert "the draft vocabulary is that of drafter.init_from" in capsys.readouterr().out
    train(recipe_path, *start, "--plan")
    train(recipe_path, *start, "train.learning_rate=1e-9")
    trained = load_file(run / "drafter/model.safetensors")
    assert torch.equal(trained["d2t"], tensors["d2t"])
    torch.testing.assert_close(trained["fc.weight"], tensors["fc.weight"])
    shape = read_drafter_config(run / "drafter")[0]
    assert shape.rms_norm_eps == 1e-5 and shape.draft_vocab_size == CUT  # its own; the target's are others
    assert shape.rope_parameters["rope_theta"] == 123
