"""What the training scripts share: a recipe, its rows, its drafter and the target, put together and trained.

The scripts (`train/eagle.py`, `train/eagle3.py`, `train/poss.py`) say which kind of drafter they train; all else is the
recipe's. The method is in `models` (the drafter) and `train.loss.unroll` (steps and losses).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from draftsmith.data_gen.rows.training_data import usable_rows
from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.data_gen.states.stored_target import StoredTarget, stored_bytes
from draftsmith.models.chat import (
    FINGERPRINT_COVERS,
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_ids,
    tokenizer_fingerprint,
)
from draftsmith.models.checkpoint import (
    check_identity,
    config_identity,
    file_digest,
    provenance,
    read_config,
    read_tensors,
    save_drafter,
    target_identity,
    written,
)
from draftsmith.models.checkpoint import read_vocab as read_drafter_vocab
from draftsmith.models.costs import device_here, shared_out, target_size
from draftsmith.models.drafters import build_drafter, drafter_config, padded, words_of_kind
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.feature_drafter import DrafterConfig, FeatureDrafter
from draftsmith.models.poss import specialists_of
from draftsmith.models.target import Target, checked_capture_layers, load_causal_lm
from draftsmith.models.vocab import DraftVocab, load_metadata
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.inputs import draft_vocab, need
from draftsmith.recipes.command.launch import rank, world_size
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import DrafterSection, Recipe, TrainSection, other_than_published
from draftsmith.recipes.validation import validation_rank
from draftsmith.train.loss.unroll import TrainingTimeTest, kernel_of
from draftsmith.train.measure.clock import peak_flops_per_second
from draftsmith.train.measure.plan import counted_data, expected_data, training_plan
from draftsmith.train.measure.step_flops import StepFlops
from draftsmith.train.measure.step_profile import StepProfile
from draftsmith.train.run.batches import efficiency
from draftsmith.train.run.checkpoints import full_disk_is_told, step_of
from draftsmith.train.run.engine import accelerator_of
from draftsmith.train.run.loop import Loop
from draftsmith.train.run.processes import check_ranks_agree, failing_together
from draftsmith.train.run.sharded_target import ShardedTarget, check_sharding, load_shared_out
from draftsmith.train.run.state_sources import OnlineStates, StateSource
from draftsmith.train.run.stored_states import StoredStates, store_of, words_of_store
from draftsmith.train.run.trackers import Trackers, check_trackers
from draftsmith.train.run.validation_replay import ValidationReplay, check_replay


def main(command: Command) -> bool:
    """Trains the drafter of the recipe on the command line (`train.run.command`); False where it is not finished."""
    recipe = command.recipe
    tokenizer = load_tokenizer(recipe.target)
    check_replay(recipe)
    check_sharding(recipe)
    check_trackers(recipe.train.trackers)
    speaks = rank() == 0  # all ranks read the same rows; one writes and prints
    if speaks and (note := other_than_published(recipe.drafter, recipe.train)):
        print(f"note: {note}")
    if command.plan:
        print_plan(recipe, tokenizer, command.flops, command.processes or world_size())
        return False
    rejects = Rejects(recipe.training_rejects_path if speaks else None)
    rows, validation_rows = read_rows(recipe, tokenizer, rejects)
    if rejects.total and speaks:
        print(rejects.summary())
    section = recipe.target
    config = load_config(section).get_text_config()
    shape = drafter_shape(recipe, config)
    vocab = read_vocab(recipe, config.vocab_size, tokenizer_fingerprint(tokenizer))
    if recipe.drafter.init_from is not None:
        here = config_identity(config, section.model, section.revision, tokenizer_fingerprint(tokenizer))
        check_start(Path(recipe.drafter.init_from), shape, vocab, here, yet_unknown=("embedding_scale",))

    every_row = [*rows, *validation_rows]
    store = store_of(recipe, config, shape.capture_layers, every_row, tokenizer_fingerprint(tokenizer))
    stops = stop_ids(tokenizer, load_generation_config(section))
    replay = ValidationReplay.of(recipe, validation_rows, vocab, tokenizer_fingerprint(tokenizer), stops)
    best_by = recipe.train.keep_best
    if best_by is not None and (not validation_rows or (best_by == "replay_tau" and replay is None)):
        raise UserError(
            f"train.keep_best: {best_by}, but of so few conversations none is kept for validation (a fifth at most); "
            "leave it out"
        )
    digests = {"training rows": rows_digest(rows), "validation rows": rows_digest(validation_rows)}

    set_seed(recipe.train.seed)
    accelerator = accelerator_of(recipe.train)
    settings = {"train": recipe.train.model_dump(), "drafter": recipe.drafter.model_dump(exclude={"init_from"})}
    check_ranks_agree({**digests, "draft vocabulary": file_digest(recipe.draft_vocab_path), **settings})
    cores = os.cpu_count() or 1
    if accelerator.device.type == "cpu" and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < cores:
        print(f"note: one thread on {cores} cores; accelerate launch --num_cpu_threads_per_process {cores} uses all")
    if store is None:
        if recipe.train.shard_target and accelerator.num_processes > 1:
            target = ShardedTarget(load_shared_out(section), shape.capture_layers)
        else:
            target = Target(load_causal_lm(section, str(accelerator.device)), shape.capture_layers)
        states: StateSource = OnlineStates(target)
    else:
        target = StoredTarget(store, config, accelerator.device)
        states = StoredStates(store, every_row, accelerator.device, target.dtype)
    if recipe.train.packing and store is None:
        target.try_documents()  # of a target that is shared out all processes have to, and each packs at another time
    shape = replace(shape, embedding_scale=target.embedding_scale)
    identity = target_identity(target, section.model, section.revision, tokenizer_fingerprint(tokenizer))
    drafter = new_drafter(recipe.drafter, shape, vocab, target, identity).to(accelerator.device)
    check_ranks_agree({"target": identity | {"dtype": str(target.dtype)}, "data.states": words_of_store(store)})
    trainee = TrainingTimeTest.of(drafter, recipe.train)
    flops = profile = None
    if peak_flops_per_second(accelerator.device) is not None:
        size = target_size(load_config(section), section.dtype, section.trust_remote_code)
        flops = StepFlops.of(trainee, config, size, states_are_read=store is not None)
    if command.profile:
        folder = Path(recipe.output_dir) / "profile"
        profile = StepProfile(command.profile, folder, accelerator.process_index, accelerator.print)
    loop = Loop(
        accelerator,
        trainee,
        target,
        rows,
        validation_rows,
        recipe.train,
        recipe.checkpoints_dir,
        recipe.metrics_path,
        identity=run_identity(recipe, drafter, identity, accelerator.num_processes, digests, words_of_store(store)),
        bf16=precision(recipe.train) == "bf16",
        replay=replay,
        states=states,
        trackers=Trackers(recipe.train.trackers, Path(recipe.output_dir), dump_recipe(recipe), recipe.model_dump()),
        flops=flops,
        profile=profile,
    )
    trainable = sum(p.numel() for p in drafter.parameters())
    products = torch.bfloat16 if precision(recipe.train) == "bf16" else drafter.dtype
    kernel = trainee.kernel or kernel_of(shape, accelerator.device, products)
    accelerator.print(
        f"{trainable / 1e6:.2f} M trainable parameters, draft vocabulary {drafter.vocab.size} of {target.vocab_size}, "
        f"target states {list(target.capture_layers)}, {len(rows)} rows, {len(validation_rows)} kept for validation, "
        f"attention by {kernel.name}\n"
        f"{efficiency(loop.order, rows, recipe.train.packing).in_words()} "
        f"({'packed' if recipe.train.packing else 'padded'} micro-batches, first epoch)"
    )
    if store is not None:
        accelerator.print(store.in_words())
    if isinstance(target, ShardedTarget):
        accelerator.print(target.in_words())
    with ExitStack() as held:
        with failing_together():
            if accelerator.is_main_process:
                held.enter_context(alone_in(Path(recipe.output_dir)))
        finished = loop.run()
        if finished:
            with loop.engine.whole() as trained:
                if accelerator.is_main_process:
                    best = loop.best()
                    if best is not None:
                        loop.engine.load_weights(best[0], trained)
                    save(recipe, trained.drafter, identity, best)
        accelerator.end_training()
    return finished


def save(
    recipe: Recipe, drafter: FeatureDrafter, identity: dict[str, Any], best: tuple[Path, float] | None = None
) -> None:
    """Writes the finished drafter.

    Args:
        best: the checkpoint that it is from, with its tau, where train.keep_best chose it.
    """
    data = {"conversations": recipe.conversations_path, "draft_vocab": recipe.draft_vocab_path}
    if recipe.drafter.init_from is not None:
        data["init_from"] = written(Path(recipe.drafter.init_from)) / "model.safetensors"
    made_by, chosen = provenance(data), ""
    if best is not None:
        checkpoint, tau = best
        made_by["checkpoint"] = {"step": step_of(checkpoint), str(recipe.train.keep_best): tau}
        chosen = f", of step {step_of(checkpoint):,}, which has the best {recipe.train.keep_best}: {tau:.2f}"
    with full_disk_is_told(recipe.drafter_dir):
        save_drafter(recipe.drafter_dir, drafter, identity, dump_recipe(recipe), made_by)
    print(f"drafter: {recipe.drafter_dir}{chosen}")


def precision(settings: TrainSection) -> str:
    """`auto` is bf16 on accelerators that multiply it natively, and float32 on CPUs: there bf16 gains little at best
    (docs/log.md), and float32 gives nearly the same losses on every machine."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "no"


def read_rows(recipe: Recipe, tokenizer: Any, rejects: Rejects) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """(training rows, validation rows). A conversation's rows stay on one side, chosen by a hash of its id."""
    usable = usable_rows(recipe, tokenizer, rejects)
    wanted = min(recipe.train.validation_conversations, len({row.id for row in usable}) // 5)
    ids = sorted({row.id for row in usable}, key=validation_rank)
    kept_out = set(ids[:wanted])
    training = [row for row in usable if row.id not in kept_out]
    if not training:
        raise UserError(
            f"data.conversations: {recipe.conversations_path} holds no answer of two tokens or more; there is nothing "
            "to train on"
        )
    return training, [row for row in usable if row.id in kept_out]


def read_vocab(recipe: Recipe, target_vocab_size: int, fingerprint: str) -> DraftVocab:
    """The run's draft vocabulary, checked against the recipe and the target.

    Raises:
        UserError: none there, or one for another target, tokenizer or drafter.vocab_size.
    """
    need(draft_vocab(recipe))
    path = recipe.draft_vocab_path
    vocab = DraftVocab.load(path)
    made_with = load_metadata(path).get("tokenizer_fingerprint", fingerprint)
    wanted = recipe.drafter.vocab_size or target_vocab_size
    problems = []
    if vocab.target_vocab_size != target_vocab_size:
        problems.append(f"it is for a target of {vocab.target_vocab_size} tokens, this one has {target_vocab_size}")
    if made_with != fingerprint:
        problems.append(
            f"its tokenizer has fingerprint {made_with[:16]}, the target's has {fingerprint[:16]} "
            f"(a fingerprint covers {FINGERPRINT_COVERS})"
        )
    if vocab.size != wanted:
        problems.append(f"it holds {vocab.size} draft tokens, drafter.vocab_size asks for {wanted}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; run data_gen/rank_vocab.py with this recipe")
    return vocab


def drafter_shape(recipe: Recipe, config: Any) -> DrafterConfig:
    """The drafter's shape for a target with this text config. Raises UserError where they do not fit."""
    fused = recipe.drafter.extends == "eagle3"
    layers = checked_capture_layers(recipe.drafter.capture_layers, config.num_hidden_layers) if fused else ()
    return drafter_config(recipe.drafter, config, layers)


def new_drafter(
    section: DrafterSection, shape: DrafterConfig, vocab: DraftVocab, target: Target, identity: dict[str, Any]
) -> FeatureDrafter:
    """A drafter with the weights that training starts from, on the CPU.

    Raises:
        UserError: drafter.init_from is for another target or of another shape.
    """
    drafter = build_drafter(shape, vocab, target.embedding_table, target.frozen_head)
    if section.init_head == "target" and isinstance(drafter, Eagle3Drafter):
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.head_weight[vocab.target_ids.to(target.device)])
    if section.init_from is not None:
        start_from(Path(section.init_from), drafter, identity)
    return drafter


def start_from(directory: Path, drafter: FeatureDrafter, identity: dict[str, Any]) -> None:
    """Copies a trained drafter's weights: of one of the same shape, of one with narrower MLPs (`drafters.padded`), or
    of a single layer into all specialists.

    Raises:
        UserError: what `check_start` finds.
    """
    given = check_start(directory, drafter.config, drafter.vocab, identity)
    tensors = read_tensors(directory)
    if given.kind != drafter.config.kind:
        tensors = specialists_of(tensors, drafter.config)
    drafter.load_state_dict(padded(tensors, drafter))


def check_start(
    directory: Path,
    shape: DrafterConfig,
    vocab: DraftVocab,
    identity: dict[str, Any],
    yet_unknown: Sequence[str] = (),
) -> DrafterConfig:
    """The shape of the drafter in `directory`, which one of `shape` can start from.

    Args:
        identity: of the target, as far as it is known by now.
        yet_unknown: what of `shape` is not.

    Raises:
        UserError: it is not there, for another target, of another kind, shape or draft vocabulary; what differs is
            named.
    """
    try:
        given, trained_for = read_config(directory)
        check_identity(directory, trained_for, identity)
        its_vocab = read_drafter_vocab(directory, given)
    except UserError as error:
        raise UserError([f"drafter.init_from: {problem}" for problem in error.problems]) from None
    has, wants = given.to_dict(), shape.to_dict()
    if shape.kind == "poss" and given.kind == shape.base:
        wants = {key: value for key, value in wants.items() if key not in ("positions_per_specialist", "specialists")}
    elif (given.kind, given.base) != (shape.kind, shape.base):
        also = f", which may also start from a single {shape.base}" * (shape.kind == "poss")
        raise UserError(
            f"drafter.init_from: {directory} is a drafter of kind {words_of_kind(given)}, the recipe asks for "
            f"{words_of_kind(shape)}{also}"
        )
    if different := [
        f"{key} is {has.get(key)!r} there, {value!r} here"
        for key, value in wants.items()
        if key not in yet_unknown and has.get(key) != value
        if not (key == "intermediate_size" and has[key] < value)  # a wider MLP can begin as a narrow one
    ]:
        raise UserError(
            f"drafter.init_from: {directory} has another shape: {'; '.join(different)}; ask for what is there"
        )
    if not its_vocab.same_as(vocab.to(its_vocab.target_ids.device)):
        raise UserError(
            f"drafter.init_from: {directory} has another draft vocabulary than draft_vocab.safetensors of this run; "
            "copy the one of the run that it comes from"
        )
    return given


# What may change between a run and the run that goes on with it: how long, how often it writes, and who is told.
MAY_CHANGE = {
    "max_steps",
    "epochs",
    "resume",
    "save_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "validate_every_steps",
    "eval_replay",
    "keep_best",
    "trackers",
    "gradient_checkpointing",
    "attention",
    "gradient_accumulation_steps",  # "micro-batches a step" is compared instead
    "zero_stage",
    "offload_optimizer",
    "shard_target",
    "max_skipped_steps",
    "packing",
}


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Says which rows these are, in their order: their number, and sha256 of their ids and lengths."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, len(row.input_ids)]).encode() + b"\n")
    return f"{len(rows)} rows, sha256 {digest.hexdigest()}"


def run_identity(
    recipe: Recipe,
    drafter: FeatureDrafter,
    target: dict[str, Any],
    processes: int,
    digests: dict[str, str],
    states: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on with: data, order, settings, drafter, target.

    Args:
        digests: of the rows that are left after all checks: what eval.prompts hold may have changed in between.
        states: of the store that they are read from; None: from the target.
    """
    start = recipe.drafter.init_from
    settings = {f"train.{key}": value for key, value in recipe.train.model_dump().items() if key not in MAY_CHANGE}
    return {
        "target": {key: value for key, value in target.items() if key not in ("model", "revision")},
        "drafter": drafter.config.to_dict(),
        "drafter.init_head": recipe.drafter.init_head,
        "drafter.init_from": None if start is None else file_digest(written(Path(start)) / "model.safetensors"),
        "draft_vocab_sha256": file_digest(recipe.draft_vocab_path),
        "conversations_sha256": file_digest(recipe.conversations_path),
        "data.states": states,
        "data.max_length": recipe.data.max_length,
        "left out for asking what is asked in": recipe.eval.prompts if recipe.data.contamination == "remove" else None,
        "micro-batches a step": processes * recipe.train.gradient_accumulation_steps,
    } | (digests | settings)


def print_plan(recipe: Recipe, tokenizer: Any, tera_flops_per_second: float | None, processes: int) -> None:
    """What training would take, from what is there: conversations and vocabulary, or else the prompts.

    Raises:
        UserError: what is there does not fit the recipe; or there is nothing to plan from.
    """
    if rank() > 0:
        return
    section = recipe.target
    config = load_config(section)
    text_config = config.get_text_config()
    shape = drafter_shape(recipe, text_config)
    vocab_is_there = recipe.draft_vocab_path.exists()
    if vocab_is_there:
        vocab = read_vocab(recipe, text_config.vocab_size, tokenizer_fingerprint(tokenizer))
        if recipe.drafter.init_from is not None:
            here = config_identity(text_config, section.model, section.revision, tokenizer_fingerprint(tokenizer))
            check_start(Path(recipe.drafter.init_from), shape, vocab, here, yet_unknown=("embedding_scale",))
    if recipe.conversations_path.exists() or recipe.data.prompts is None:
        rejects = Rejects()
        rows, validation_rows = read_rows(recipe, tokenizer, rejects)
        every_row, fingerprint = [*rows, *validation_rows], tokenizer_fingerprint(tokenizer)
        store = store_of(recipe, text_config, shape.capture_layers, every_row, fingerprint)
        data = counted_data(rows, validation_rows, recipe.train)
        if rejects.total:
            print(rejects.summary())
    else:
        store, data = None, expected_data(recipe, tokenizer)
    size = target_size(config, section.dtype, section.trust_remote_code)
    if store is not None:
        print(store.in_words())
        size = replace(size, weight_bytes=stored_bytes(store), weight_basis="its head and embeddings, exact")
    if recipe.train.shard_target:
        size = shared_out(size, processes)
    lines = training_plan(
        recipe,
        shape,
        text_config,
        size,
        data,
        vocab_is_there,
        precision(recipe.train) == "bf16",
        device_here(section.device),
        processes,
        tera_flops_per_second and tera_flops_per_second * 1e12,
    )
    for text in lines:
        print(text)
