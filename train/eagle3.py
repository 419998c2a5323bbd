"""Train an EAGLE-3 drafter by training-time test, with the target in the same process.

    accelerate launch train/eagle3.py recipes/demo.yaml
    python train/eagle3.py recipes/demo.yaml train.max_steps=20 output_dir=runs/try     # the smallest run that works
    python train/eagle3.py recipes/demo.yaml --plan                                     # what it would do

Reads <output_dir>/conversations.jsonl (data_gen/regenerate.py) and <output_dir>/draft_vocab.safetensors
(data_gen/rank_vocab.py). Writes checkpoints/, metrics.jsonl and, at the end, drafter/. Started again, it goes on from
the last whole checkpoint. SIGTERM saves one and exits with 0; Ctrl-C exits at once, with 130; a kill harms nothing.
"""

import hashlib
import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object, set_seed

from draftsmith.data_gen.contamination import left_out_of_training
from draftsmith.data_gen.conversations import TrainingRow, training_rows
from draftsmith.models.chat import (
    FINGERPRINT_COVERS,
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_ids,
    tokenizer_fingerprint,
)
from draftsmith.models.checkpoint import file_digest, provenance, save_drafter, target_identity
from draftsmith.models.costs import device_here, target_size
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.target import Target, checked_capture_layers, load_causal_lm
from draftsmith.models.vocab import DraftVocab, load_metadata
from draftsmith.recipes.cli import parse_command, run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts import Rejects
from draftsmith.recipes.schema import Recipe, TrainSection
from draftsmith.recipes.validation import validation_rank
from draftsmith.train.checkpoints import full_disk_is_told
from draftsmith.train.loop import Loop
from draftsmith.train.plan import counted_data, expected_data, training_plan
from draftsmith.train.unroll import TrainingTimeTest
from draftsmith.train.validation_replay import ValidationReplay, check_replay


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    recipe = command.recipe
    tokenizer = load_tokenizer(recipe.target)
    check_replay(recipe)
    if command.plan:
        print_plan(recipe, tokenizer, command.flops)
        return
    speaks = os.environ.get("RANK", "0") == "0"  # all ranks read the same rows; one writes and prints
    rejects = Rejects(recipe.training_rejects_path if speaks and not command.plan else None)
    rows, validation_rows = read_rows(recipe, tokenizer, rejects)
    if rejects.total and speaks:
        print(rejects.summary())
    section = recipe.target
    config = load_config(section).get_text_config()
    shape = drafter_shape(recipe, config)
    vocab = read_vocab(recipe, config.vocab_size, tokenizer_fingerprint(tokenizer))

    stops = stop_ids(tokenizer, load_generation_config(section))
    replay = ValidationReplay.of(recipe, validation_rows, vocab, tokenizer_fingerprint(tokenizer), stops)
    digests = {"training rows": rows_digest(rows), "validation rows": rows_digest(validation_rows)}

    set_seed(recipe.train.seed)
    accelerator = Accelerator(
        # Buffers are constants (the vocabulary, the target's embeddings): equal on all ranks from the start.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        mixed_precision=precision(recipe.train),
        log_with=list(recipe.train.trackers) or None,
        project_dir=recipe.output_dir,
    )
    check_ranks_agree(digests)
    cores = os.cpu_count() or 1
    if accelerator.device.type == "cpu" and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < cores:
        print(f"note: one thread on {cores} cores; accelerate launch --num_cpu_threads_per_process {cores} uses all")
    if recipe.train.trackers:
        accelerator.init_trackers("draftsmith", config={"recipe": dump_recipe(recipe)})
    target = Target(load_causal_lm(section, str(accelerator.device)), shape.capture_layers)
    shape = replace(shape, embedding_scale=target.embedding_scale)
    identity = target_identity(target, section.model, section.revision, tokenizer_fingerprint(tokenizer))
    drafter = Eagle3Drafter(shape, vocab, target.embedding_table)
    if recipe.drafter.init_head == "target":
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.head_weight[vocab.target_ids.to(target.device)])
    drafter = drafter.to(accelerator.device)
    loop = Loop(
        accelerator,
        TrainingTimeTest(
            drafter, recipe.train.ttt_steps, recipe.train.step_weight, recipe.train.gradient_checkpointing
        ),
        target,
        rows,
        validation_rows,
        recipe.train,
        recipe.checkpoints_dir,
        recipe.metrics_path,
        identity=run_identity(recipe, drafter, identity, accelerator.num_processes, digests),
        replay=replay,
    )
    trainable = sum(p.numel() for p in drafter.parameters())
    accelerator.print(
        f"{trainable / 1e6:.2f} M trainable parameters, draft vocabulary {drafter.vocab.size} of {target.vocab_size}, "
        f"target states {list(target.capture_layers)}, {len(rows)} rows, {len(validation_rows)} kept for validation"
    )
    if loop.run() and accelerator.is_main_process:
        data = {"conversations": recipe.conversations_path, "draft_vocab": recipe.draft_vocab_path}
        with full_disk_is_told(recipe.drafter_dir):
            save_drafter(recipe.drafter_dir, drafter, identity, dump_recipe(recipe), provenance(data))
        print(f"drafter: {recipe.drafter_dir}")
    accelerator.end_training()


def precision(settings: TrainSection) -> str:
    """`auto` is bf16 where the machine multiplies it natively; elsewhere it would only be slower."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif torch.accelerator.is_available():
        native = False
    else:
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if native else "no"


def read_rows(recipe: Recipe, tokenizer: Any, rejects: Rejects) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """(training rows, validation rows). A conversation's rows stay on one side, chosen by a hash of its id."""
    path = recipe.conversations_path
    if not path.exists():
        raise UserError(f"data.conversations: {path} does not exist; data_gen/regenerate.py writes it")
    rows = list(training_rows(path, tokenizer, recipe.data.max_length, rejects, left_out_of_training(recipe)))
    usable = [row for row in rows if any(end - start >= 2 for start, end in row.spans)]
    wanted = min(recipe.train.validation_conversations, len({row.id for row in usable}) // 5)
    ids = sorted({row.id for row in usable}, key=validation_rank)
    kept_out = set(ids[:wanted])
    training = [row for row in usable if row.id not in kept_out]
    if not training:
        raise UserError(
            f"data.conversations: {path} holds no answer of two tokens or more; there is nothing to train on"
        )
    return training, [row for row in usable if row.id in kept_out]


def read_vocab(recipe: Recipe, target_vocab_size: int, fingerprint: str) -> DraftVocab:
    """The run's draft vocabulary, checked against the recipe and the target.

    Raises:
        UserError: none there, or one for another target, tokenizer or drafter.vocab_size.
    """
    path = recipe.draft_vocab_path
    if not path.exists():
        raise UserError(f"draft vocabulary: {path} does not exist; data_gen/rank_vocab.py writes it")
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


def drafter_shape(recipe: Recipe, config: Any) -> Eagle3Config:
    """The drafter's shape for a target with this text config. Raises UserError where they do not fit."""
    section = recipe.drafter
    if section.vocab_size is not None and section.vocab_size > config.vocab_size:
        raise UserError(
            f"drafter.vocab_size: {section.vocab_size} is more than the target's vocabulary of {config.vocab_size} "
            "tokens"
        )
    return Eagle3Config.for_target(
        config,
        config.vocab_size,
        checked_capture_layers(section.capture_layers, config.num_hidden_layers),
        section.vocab_size or config.vocab_size,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads,
        intermediate_size=section.intermediate_size,
    )


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
    "trackers",
    "gradient_checkpointing",
}


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Says which rows these are, in their order: their number, and sha256 of their ids and lengths."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, len(row.input_ids)]).encode() + b"\n")
    return f"{len(rows)} rows, sha256 {digest.hexdigest()}"


def check_ranks_agree(digests: dict[str, str]) -> None:
    """Every rank reads its rows itself; a source that one of them cannot read now would give it others.

    Raises:
        UserError: the rows differ.
    """
    by_rank = gather_object([digests])
    others = [rank for rank, found in enumerate(by_rank) if found != by_rank[0]]
    if others:
        raise UserError(
            f"the processes do not train on the same rows: rank 0 has {by_rank[0]}, rank {others[0]} has "
            f"{by_rank[others[0]]}; do all of them see the same conversations and the same eval.prompts?"
        )


def run_identity(
    recipe: Recipe, drafter: Eagle3Drafter, target: dict[str, Any], processes: int, digests: dict[str, str]
) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on with: data, order, settings, drafter, target.

    Args:
        digests: of the rows that are left after all checks: what eval.prompts hold may have changed in between.
    """
    settings = {f"train.{key}": value for key, value in recipe.train.model_dump().items() if key not in MAY_CHANGE}
    return {
        "target": {key: value for key, value in target.items() if key not in ("model", "revision")},
        "drafter": drafter.config.to_dict(),
        "drafter.init_head": recipe.drafter.init_head,
        "draft_vocab_sha256": file_digest(recipe.draft_vocab_path),
        "conversations_sha256": file_digest(recipe.conversations_path),
        "data.max_length": recipe.data.max_length,
        "left out for asking what is asked in": recipe.eval.prompts if recipe.data.contamination == "remove" else None,
        "processes": processes,
    } | (digests | settings)


def print_plan(recipe: Recipe, tokenizer: Any, tera_flops_per_second: float | None) -> None:
    """What training would take, from what is there: conversations and vocabulary, or else the prompts.

    Raises:
        UserError: what is there does not fit the recipe; or there is nothing to plan from.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    section = recipe.target
    config = load_config(section)
    text_config = config.get_text_config()
    shape = drafter_shape(recipe, text_config)
    vocab_is_there = recipe.draft_vocab_path.exists()
    if vocab_is_there:
        read_vocab(recipe, text_config.vocab_size, tokenizer_fingerprint(tokenizer))
    if recipe.conversations_path.exists() or recipe.data.prompts is None:
        rejects = Rejects()
        data = counted_data(*read_rows(recipe, tokenizer, rejects), recipe.train)
        if rejects.total:
            print(rejects.summary())
    else:
        data = expected_data(recipe, tokenizer)
    lines = training_plan(
        recipe,
        shape,
        text_config,
        target_size(config, section.dtype, section.trust_remote_code),
        data,
        vocab_is_there,
        precision(recipe.train) == "bf16",
        device_here(section.device),
        int(os.environ.get("WORLD_SIZE", "1")),
        tera_flops_per_second and tera_flops_per_second * 1e12,
    )
    for text in lines:
        print(text)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--flops", type=float, metavar="TFLOPS", help="what one device reaches, in TFLOP/s, for the time in --plan"
    )


if __name__ == "__main__":
    run(main)
