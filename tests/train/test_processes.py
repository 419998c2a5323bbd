"""Many processes are one: DistributedDataParallel and ZeRO take the steps that one process takes, save what one process
saves, with the target whole or sharded, and part without waiting for each other. What launchers start, and what of
DeepSpeed's settings is followed or refused.

Real processes over gloo, on CPUs. Sums over two ranks are added in another order than one process adds them, which
after six steps of AdamW shows in the sixth digit of a float32.
"""

import contextlib
import functools
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import LlamaForCausalLM

from draftsmith.models.alignment import Documents
from draftsmith.models.sizes import TargetSize, shared_out, target_size
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.run.accelerator import accelerator_of, launcher_plugin, with_recipe_settings
from draftsmith.train.run.sharded_target import ShardedTarget, check_sharding, load_sharded
from tests.conftest import make_target
from tests.evaluation_cases import write_lines
from tests.ranks import run_ranks
from tests.thinning import a_few
from tests.training_runs import SIX_STEPS, TRAINED_BY, fresh_accelerator, metrics, run_main, to_train, write_recipe

# Without keep_group this hangs before the thirtieth time, mostly before the tenth, where two ranks share a core.
PARTING = """
import os, sys
import torch
from torch import distributed
from draftsmith.train.run import processes

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rank = int(os.environ["RANK"])
for time in range(40):
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store{time}", rank=rank, world_size=2)
    processes.keep_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    distributed.barrier()
    distributed.destroy_process_group()
    del model
    processes._KEPT.clear()
print("parted")
"""


@pytest.mark.slow
def test_processes_part_again_and_again(tmp_path: Path) -> None:
    script = tmp_path / "parting.py"
    script.write_text(PARTING)
    assert run_ranks(2, str(script), [str(tmp_path)], timeout=120).count("parted") == 2


# Name: (drafter, train). Together: both heads, several stacks, noise, clipping by norm and by value.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({"kind": "eagle3", "vocab_size": 160, "num_layers": 2}, {}),
    "hass": ({"kind": "eagle"}, {"top_k_loss": 1.0, "clip": "value", "max_grad_norm": 0.01}),
    "poss": (
        {"kind": "poss", "base": "eagle3", "positions_per_specialist": 1, "specialists": 3, "vocab_size": 160},
        {"feature_noise": 0.1},
    ),
}
STEPS = 6
MICRO_BATCHES = 4  # of a step: two ranks accumulate two each
MEASURED = {"loss", "validation_loss", "validation_accuracy", "replay_tau", "replay_accepted_by_position"}


class Place:
    """Recipes, and the runs made with them. Where there is `poison`, conversation c5 alone has this token."""

    def __init__(self, folder: Path, target: Path, poison: int | None = None):
        self.folder, self.target, self.poison = folder, target, poison

    def run(self, name: str, label: str, processes: int, *overrides: str, launcher: Sequence[str] = ()) -> Path:
        """Four micro-batches a step, however many processes there are: one alone runs in this process."""
        drafter, settings = RUNS[name]
        output = self.folder / re.sub(r"\W+", "-", f"{name}-{label}")
        # Of 22 conversations 19 are to train: the last batch of an epoch is smaller.
        path = to_train(output, 22, drafter.get("vocab_size", 320)) / "conversations.jsonl"
        if self.poison is not None:
            lines = [*map(json.loads, re.sub(rf"\b{self.poison}\b", "5", path.read_text()).splitlines())]
            lines[5]["turns"][-1]["output_token_ids"][1] = self.poison
            write_lines(path, *lines)
        # Validation leaves one of two ranks with less to do, or with nothing.
        own = {"batch_size": 2, "eval_replay": 3, "validation_conversations": 3}
        own |= {"gradient_accumulation_steps": MICRO_BATCHES // processes}
        sections = {"train": SIX_STEPS | own | settings, "eval": {"tree": {"policy": "chain", "nodes": 4}}}
        path = write_recipe(output, self.target, output_dir=str(output), drafter=drafter, **sections)
        if processes == 1 and not any(re.match(r"train\.zero_stage=[123]", each) for each in overrides):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                run_main(TRAINED_BY[drafter["kind"]], path, *overrides)
            self.said = said.getvalue()
        else:
            self.said = run_ranks(processes, f"train/{drafter['kind']}.py", [str(path), *overrides], launcher=launcher)
        return output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    return Place(tmp_path_factory.mktemp("processes"), target_dir)


@pytest.fixture(scope="module")
def of_one(place: Place) -> Callable[[str], Path]:
    """What one process does, without ZeRO."""
    return functools.cache(lambda name: place.run(name, "one", 1))


def check_same(mine: Path, one: Path, steps: int = STEPS) -> None:
    """The same lines of metrics, and a drafter and checkpoints that one process could have written."""
    for here, there in zip(metrics(mine), metrics(one), strict=True):
        assert here.keys() == there.keys()
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
        assert here["accuracy"] == there["accuracy"]
        for key in MEASURED & there.keys():
            assert here[key] == pytest.approx(there[key], rel=1e-5)
    for file in ("drafter/model.safetensors", f"checkpoints/step-{steps:08d}/model.safetensors"):
        torch.testing.assert_close(load_file(mine / file), load_file(one / file), rtol=1e-4, atol=2e-5)


TOGETHER = [
    *(("poss", "zero_stage=0"), ("eagle3", "zero_stage=0"), ("hass", "zero_stage=0"), ("eagle3", "zero_stage=1")),
    *(("eagle3", "zero_stage=2"), ("eagle3", "zero_stage=3 offload_optimizer=true")),
    *(("hass", "zero_stage=2 offload_optimizer=true"), ("hass", "zero_stage=3"), ("poss", "zero_stage=3")),
    *(("eagle3", f"zero_stage={stage} shard_target=true") for stage in range(4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), a_few(TOGETHER, TOGETHER[0], *TOGETHER[5:7], ("eagle3", "zero_stage=3 shard_target=true"))
)
def test_two_ranks_follow_the_trajectory_of_one(
    name: str, settings: str, place: Place, of_one: Callable[[str], Path]
) -> None:
    output = place.run(name, settings, 2, *settings_of(settings))
    assert place.said.count("the target's layers are sharded over 2 processes") == int("shard_target" in settings)
    check_same(output, of_one(name))


def settings_of(text: str) -> list[str]:
    return [f"train.{each}" for each in text.split()]


GOING_ON = [
    ((1, "zero_stage=0"), (2, "zero_stage=3")),
    ((2, "zero_stage=3"), (1, "zero_stage=0")),
    ((2, "zero_stage=1"), (2, "zero_stage=2")),
    ((1, "zero_stage=3"), (2, "zero_stage=0")),
    ((2, "shard_target=true"), (1, "shard_target=true")),  # one that is asked to share holds the target whole
    ((1, "shard_target=true"), (2, "shard_target=true")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), a_few(GOING_ON, GOING_ON[0], GOING_ON[4]))
def test_a_run_goes_on_under_another_stage_and_other_processes(
    first: tuple[int, str], then: tuple[int, str], place: Place, of_one: Callable[[str], Path]
) -> None:
    """(processes, settings); the number of micro-batches a step is the same."""
    label = f"{first}, then {then}"
    output = place.run("eagle3", label, first[0], *settings_of(first[1]))
    shutil.rmtree(output / "checkpoints/step-00000006")
    shutil.rmtree(output / "drafter")
    place.run("eagle3", label, then[0], *settings_of(then[1]))
    assert "resumed from" in place.said
    assert ("are sharded over" in place.said) == (then == (2, "shard_target=true"))
    check_same(output, of_one("eagle3"))
    state = json.loads((output / "checkpoints/step-00000006/trainer_state.json").read_text())
    assert state["identity"]["micro-batches a step"] == MICRO_BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("stage", a_few([0, 3], 0))
def test_an_epoch_that_leaves_a_rank_without_rows_is_that_of_one_process(stage: int, place: Place) -> None:
    """19 conversations are ten micro-batches: the last step has two for rank 0, and none for rank 1."""
    epoch = ["train.max_steps=null", "train.epochs=1"]
    one = place.run("eagle3", "epoch-one", 1, *epoch)
    two = place.run("eagle3", f"epoch-two-{stage}", 2, *epoch, f"train.zero_stage={stage}")
    assert len(metrics(one)) == 3
    check_same(two, one, steps=3)


POISON = 317


@pytest.fixture(scope="module")
def poisoned_place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    """A target that one token drives out of all bounds."""
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(target_dir, folder / "target")
    path = folder / "target/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    return Place(folder, folder / "target", POISON)


@pytest.mark.parametrize(("processes", "stage"), a_few([(1, 0), (2, 0), (2, 2), (2, 3)], (1, 0)))
def test_a_step_that_is_not_finite_is_skipped_and_its_row_named(
    processes: int, stage: int, poisoned_place: Place
) -> None:
    settings = [f"train.zero_stage={stage}", "train.max_steps=2", "train.eval_replay=0", "train.save_every_steps=1"]
    settings += ["train.seed=1"]  # c5 is read in the second step
    output = poisoned_place.run("eagle3", f"{processes}-{stage}", processes, *settings)
    lines = metrics(output)
    [skipped] = [i for i, line in enumerate(lines) if line["grad_norm"] is None]
    assert [line["skipped_steps"] for line in lines] == [int(i >= skipped) for i in range(2)]
    said = f"step {skipped + 1} skipped: its gradient is not finite (c5: the target's captured states are not finite)"
    assert poisoned_place.said.count(said) == 1
    assert [line.get("loss", math.nan) > 0 for line in lines] == [i != skipped for i in range(2)]
    before, after = (
        load_file(output / f"checkpoints/step-{step:08d}/model.safetensors") for step in (skipped, skipped + 1)
    )
    assert all(torch.equal(before[name], after[name]) for name in after)


# A target that the processes share out.


@pytest.mark.slow
def test_a_shared_out_target_is_the_whole_one(tmp_path: Path) -> None:
    """On three ranks, among which no weight divides evenly: tied and scaled embeddings, windows, experts, bfloat16."""
    families: list[tuple[str, dict[str, Any], str]] = [
        ("mixtral", {"num_local_experts": 4}, "float32"),
        ("gemma3_text", {"sliding_window": 6, "tie_word_embeddings": True}, "bfloat16"),
    ]
    arguments = []
    for family, settings, dtype in families:
        make_target(family, **settings).save_pretrained(tmp_path / family)
        arguments += [str(tmp_path / family), dtype]
    as_module = ["tests.train.test_processes", *arguments]
    assert run_ranks(3, "--module", as_module, timeout=900).count("has seen it all") == 3


def check_shared_out(model: str, dtype: Any, rank: int, ranks: int) -> None:
    """In each of several processes: a shared-out target beside the whole one."""

    def held(target: Target) -> list[int]:
        """Elements of each layer's weights that are here, whole."""
        return [sum(p.numel() for p in layer.parameters()) for layer in target.layers]

    section = TargetSection(model=model, dtype=dtype, device="cpu")
    mine, whole = ShardedTarget(load_sharded(TargetFiles(section))), Target(TargetFiles(section).load_model())
    sizes = held(whole)
    assert held(mine) == [0] * len(sizes)

    # What drafters read is there, without any other process.
    assert torch.equal(mine.embedding_table, whole.embedding_table) and torch.equal(mine.head_weight, whole.head_weight)
    assert (mine.head_weight is mine.embedding_table) == (whole.head_weight is whole.embedding_table)
    assert mine.embedding_scale == whole.embedding_scale and mine.kinds == whole.kinds
    assert not any(p.requires_grad for p in mine.model.parameters())
    alone = torch.randn(3, mine.hidden_size).to(mine.dtype)
    assert torch.equal(mine.logits(alone), whole.logits(alone))

    # A layer's weights are whole while it runs, and no other's.
    seen: list[list[int]] = []
    watches = [layer.register_forward_pre_hook(lambda *_: seen.append(held(mine))) for layer in mine.layers]
    ids = torch.randint(5, 320, (2, 9), generator=torch.Generator().manual_seed(rank))  # of each rank others
    states = mine.states(ids)
    assert seen == [[size * (i == at) for i, size in enumerate(sizes)] for at in range(len(sizes))]
    for watch in watches:
        watch.remove()
    assert held(mine) == [0] * len(sizes)

    # The same states, whole or packed, captured as training and as replay capture them.
    wanted = whole.states(ids)
    assert torch.equal(states.last, wanted.last) and torch.equal(states.captured, wanted.captured)
    assert torch.equal(mine.captured_states(ids, (1, 3)), whole.captured_states(ids, (1, 3)))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), ((0, 0, 4), (0, 4, 5), (1, 0, 4), (1, 4, 5)))
    assert torch.equal(mine.states(ids, documents=documents).last, whole.states(ids, documents=documents).last)

    # Passes that one rank has more of than another, of both kinds; what is asked of all ranks comes between.
    for passes in (rank, 0, 2 * (rank == 1), ranks - rank):
        with mine.uneven_passes():
            for _ in range(passes):
                assert torch.equal(mine.states(ids).last, wanted.last)
                assert torch.equal(mine.captured_states(ids, (1, 3)), whole.captured_states(ids, (1, 3)))
        distributed.all_reduce(torch.zeros(()))
    assert torch.equal(mine.states(ids).last, wanted.last)

    # A pass that fails in all ranks leaves no layer behind.
    with contextlib.suppress(RuntimeError):
        mine.decoder(inputs_embeds=torch.zeros(1, 2, mine.hidden_size + 1, dtype=mine.dtype), use_cache=False)
        raise AssertionError("embeddings of another width were read")
    assert held(mine) == [0] * len(sizes)
    assert torch.equal(mine.states(ids).last, wanted.last)

    # What --plan says of it: pieces are padded to the same length on every rank.
    size = target_size(mine.model.config, section)
    rest = sum(p.nbytes for p in mine.model.parameters() if not hasattr(p, "ds_tensor"))
    planned = shared_out(size, ranks).weight_bytes - max(size.layer_parameters) * mine.dtype.itemsize
    padding = len(list(mine.layers.parameters())) * mine.dtype.itemsize
    assert planned <= mine.piece_bytes + rest <= planned + padding
    assert mine.piece_bytes + rest < size.weight_bytes


def test_a_process_holds_its_share_of_the_layers_and_the_largest_one_gathered() -> None:
    size = TargetSize(100, 0, 90, 200.0, "", torch.bfloat16, False, (10, 30, 20))
    assert shared_out(size, 4).weight_bytes == 2 * (40 + 60 / 4 + 30)
    assert shared_out(size, 1).weight_bytes == 200


@pytest.fixture
def check(tmp_path: Path, target_dir: Path) -> Callable[..., None]:
    """Checks a recipe with overrides, for a copy of the target in tmp_path/target."""
    shutil.copytree(target_dir, tmp_path / "target")
    path = write_recipe(tmp_path, tmp_path / "target", train={"shard_target": True})

    def checked(*overrides: str) -> None:
        recipe = load_recipe(path, overrides)
        check_sharding(recipe, TargetFiles(recipe.target))

    return checked


def test_weights_that_stay_in_float32_are_not_rounded(
    check: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of Ernie in any case, which ZeRO-3 would round; some families' weights beside float16 alone."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["o_proj"])
    check("target.dtype=bfloat16")
    with pytest.raises(UserError, match="keeps weights in float32"):
        check("target.dtype=float16")
    target = make_target("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
    target.save_pretrained(tmp_path / "target")
    whole = TargetFiles(TargetSection(model=str(tmp_path / "target"), dtype="bfloat16", device="cpu")).load_model()
    [name, *_] = [name for name, p in whole.named_parameters() if p.dtype == torch.float32]
    with pytest.raises(UserError, match=rf"ernie4_5_moe keeps weights in float32 .* \({name}\)"):
        check("target.dtype=bfloat16")
    check()


def test_what_cannot_be_shared_out_is_refused(check: Callable[..., None], tmp_path: Path) -> None:
    check()  # this one can
    config_path = tmp_path / "target/config.json"
    config = json.loads(config_path.read_text())
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    unnamed = {key: value for key, value in config.items() if key != "dtype"}
    for content, override, why in (
        (config, f"data.states={tmp_path}", r"data\.states"),
        (quantised, "target.dtype=float32", "is quantised"),
        (unnamed, "target.dtype=auto", r"target\.dtype: auto"),
    ):
        config_path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=why):
            check(override)


# Launchers.

# A module's objects are destroyed in the interpreter's finalization.
LEAVING = """
import atexit
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError

class Late:
    def __del__(self):
        print("finalized")

late = Late()

def main():
    atexit.register(print, "a handler of a library")
    print("the last word", end="")
    {end}

run(main, many_processes=True)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise UserError('no')", 2), ("1 / 0", 1), ("raise SystemExit('no')", 1)],
)
def test_one_of_several_processes_ends_before_finalization(end: str, status: int) -> None:
    """Worker threads of process groups abort a process that is being finalized, now and then."""
    script = LEAVING.format(end=end)
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "the last worda handler of a library\n")
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


@pytest.mark.slow
def test_a_deepspeed_config_of_ones_own_is_followed(
    tmp_path: Path, place: Place, of_one: Callable[[str], Path]
) -> None:
    """Stage 3 with the target shared out beside it; what the recipe decides is auto, or left out."""
    deepspeed = {
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "deepspeed.json").write_text(json.dumps(deepspeed))
    launcher = ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"]
    launcher += ["--deepspeed_config_file", str(tmp_path / "deepspeed.json"), "--zero3_init_flag", "false"]
    check_same(place.run("eagle3", "own-config", 2, "train.shard_target=true", launcher=launcher), of_one("eagle3"))


STARTS = """
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.command.launch import check_all_started
run(lambda: [check_all_started(), print("it starts")] and None, many_processes=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment", "starts"),
    [
        (["--num_processes", "2"], {}, 0),
        (["--num_processes", "1"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1),  # a cluster's, not its own
        (["--multi_gpu", "--num_processes", "2"], {}, 2),
    ],
)
def test_a_launcher_that_starts_fewer_than_asked_is_noticed(
    options: list[str], environment: dict[str, str], starts: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(STARTS)
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, str(tmp_path / "script.py")]
    env = os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count("it starts") == starts
    assert ("error: accelerate launch was asked for several processes" in done.stderr) == (starts == 0), done.stderr


def test_processes_that_would_each_train_by_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a device for which accelerate makes no process group: a Mac's GPU."""
    fresh_accelerator()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^2 processes were started \(WORLD_SIZE\), and this run would have 1: "):
        accelerator_of(TrainSection())


def test_a_stage_or_offload_that_the_launcher_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    section = TrainSection(zero_stage=3, offload_optimizer=True)
    with pytest.raises(UserError) as refused:
        with_recipe_settings(launcher_plugin(section), section)
    assert [problem.partition(", ")[0] for problem in refused.value.problems] == [
        "train.zero_stage is 3",
        "train.offload_optimizer is true",
    ]


@pytest.mark.parametrize(
    ("config", "recipe", "named"),
    [
        ({"train_batch_size": "auto", "fp16": {"enabled": "auto"}}, {}, None),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
            {"zero_stage": 2},
            None,
        ),
        ({"bf16": {"enabled": True}}, {}, "DeepSpeed's bf16"),
        ({"gradient_clipping": 1.0}, {}, "DeepSpeed's gradient_clipping is 1.0"),
        ({"gradient_clipping": 0.5}, {"clip": "value"}, "DeepSpeed's gradient_clipping is 0.5"),
        ({"train_batch_size": 64}, {}, "DeepSpeed's train_batch_size is 64"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, {}, "DeepSpeed's optimizer"),
        ({}, {"zero_stage": 3}, "train.zero_stage is 3"),
        ({}, {"offload_optimizer": True}, "train.offload_optimizer is true"),
    ],
)
def test_a_config_that_trains_as_the_recipe_says_is_taken_another_refused(
    config: dict[str, Any], recipe: dict[str, Any], named: str | None
) -> None:
    section = TrainSection(**{"gradient_accumulation_steps": 2, "batch_size": 4, "max_grad_norm": 0.5} | recipe)
    given = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"} | config
    with pytest.raises(UserError, match=f"^{named}") if named else contextlib.nullcontext():
        with_recipe_settings(DeepSpeedPlugin(hf_ds_config=given), section)


if __name__ == "__main__":  # as one of the processes of `test_a_shared_out_target_is_the_whole_one`
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    for its_model, its_dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check_shared_out(its_model, its_dtype, distributed.get_rank(), distributed.get_world_size())
    print("it has seen it all")
    distributed.barrier()
    distributed.destroy_process_group()
