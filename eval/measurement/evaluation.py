"""Decodes or replays a recipe's contenders and writes their numbers, behind eval/acceptance.py."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.contenders import Contender, check_contenders, describe
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.proposers import tree_name
from draftsmith.eval.measurement.benchmarks import PLAIN, answer_line, decode_all, plain_of, recipe_questions
from draftsmith.eval.measurement.compared import load_all
from draftsmith.eval.measurement.metrics import summarise_all
from draftsmith.eval.planner.planning import candidates_of, choose_tree, prepared, recipe_keys
from draftsmith.eval.replay.replay import Agreement
from draftsmith.eval.replay.replay_contenders import as_replayed, print_replay_plan, recording_of, replay_contenders
from draftsmith.eval.report_page import result_files
from draftsmith.models.chat import decode_answer
from draftsmith.models.checkpoint import read_drafter_config, weight_bytes
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.image_tokens import writes_images
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.quantize import precision_name
from draftsmith.models.sizes import plan_decoding
from draftsmith.models.target import device_name
from draftsmith.models.target_files import TargetFiles, longest_row, no_room
from draftsmith.models.turn_ends import answer_notes
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import partial_path, sync_to_disk
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.picture_parts import store_picture
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection


def main(command: Command) -> None:
    recipe, contenders = load_all(command.recipe_path, command.overrides, command.compare, command.plan)
    if recipe.eval.mode == "replay":
        evaluate_by_replay(recipe, contenders, command.plan)
    else:
        evaluate_by_decoding(recipe, contenders, command.plan)


def evaluate_by_decoding(recipe: Recipe, contenders: list[Contender], plan: bool) -> None:
    """Decodes every prompt plainly and with each contender. With `plan` it only prints the plan."""
    if recipe.eval.prompts is None:
        raise UserError("eval.prompts: not given; name a prompt file, or mt_bench")
    files = TargetFiles.read(recipe.target)
    check_contenders(recipe, files, contenders, plan)
    full = no_room(recipe, files)
    if plan:
        with PlanLines() as lines:
            lines.problems += [full] if full else []
            print_evaluation_plan(lines, recipe, files, contenders)
        return
    if full:
        raise UserError(full)
    check_automatic(recipe, files, contenders)
    device_name(recipe.target.device)  # refuses a device before anything is written
    recipe.keep_date()
    with alone_in(recipe.eval_out):
        rejects = Rejects(recipe.eval_out / "prompts.rejects.jsonl")
        # Pictures that have no file are stored beside the answers.
        store = partial(store_picture, folder=result_files.generations_path(recipe).with_suffix(".pictures"))
        asked = recipe_questions(recipe, files, rejects, store)
        for note in answer_notes(files):
            print(note)
        models = LoadedModels(files)
        asked_for, contenders = contenders, with_chosen_trees(models, recipe, contenders)
        pairs = zip(asked_for, contenders, strict=True)
        chosen = {before.name: recipe_keys(after.tree) for before, after in pairs if before.tree.policy == "auto"}
        with partial_log(recipe).open("w", encoding="utf-8") as file:
            results = decode_all(models, recipe, contenders, asked, file, rejects)
        notes = [*relaxed_notes(files, contenders), *precision_notes(models, contenders)]
        notes += [rejects.summary()] if rejects.total else []
        publish_results(recipe, models, contenders, results, {"chosen_trees": chosen}, notes)


def evaluate_by_replay(recipe: Recipe, contenders: list[Contender], plan: bool) -> None:
    """Replays every contender along recorded answers. With `plan` it only prints the plan."""
    contenders = with_trees_chosen_before(recipe, contenders)
    files = TargetFiles.read(recipe.target)
    check_contenders(recipe, files, contenders, plan)
    recording = recording_of(recipe, files, contenders)
    recipe = as_replayed(recipe, recording)
    if recording.note:
        print(f"note: {recording.note}")
    if plan:
        print_replay_plan(recipe, files, recording, contenders)
        return
    models = LoadedModels(files)
    agreement = Agreement.of(models.target)
    results = replay_contenders(models, contenders, recording, recipe.eval.replay_batch_size, agreement)
    print(f"answers of {recording.path}: {agreement}")
    with alone_in(recipe.eval_out):
        with partial_log(recipe).open("w", encoding="utf-8") as file:
            for name, generations in results.items():
                for generation in generations:
                    # Recorded answers may lack the question, so the report shows the prompt.
                    shown = name == contenders[0].name
                    question = decode_answer(files.tokenizer, generation.prompt_token_ids) if shown else None
                    file.write(answer_line(files.tokenizer, generation, name, question))
        about = {"file": str(recording.path), "agreement": str(agreement), "note": recording.note or None}
        publish_results(recipe, models, contenders, results, {"recorded_answers": about})


def publish_results(
    recipe: Recipe,
    models: LoadedModels,
    contenders: Sequence[Contender],
    results: dict[str, list[Generation]],
    about: dict[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Puts acceptance.json, generations.jsonl and report.html in place and prints the table.

    Args:
        contenders: the main one first.
        results: all answers; their lines are in the partial file of generations.jsonl.
        about: further keys of acceptance.json.
        notes: printed above the table.
    """
    main = contenders[0].name
    unlike = recipe.eval.mode == "replay" or recipe.eval.temperature > 0
    own_plain = {name: plain_of(each) for each in contenders for name in (each.name, plain_of(each))}
    numbers = summarise_all(results, PLAIN, recipe.eval.seed, unlike, main, own_plain)
    described = {
        plain_of(each): result_files.UNDRAFTED | {"quantization": precision_name(each.quantization)}
        for each in contenders
    }
    described |= {PLAIN: result_files.UNDRAFTED} | {contender.name: describe(contender) for contender in contenders}
    made = how_made(recipe, models, contenders) | about  # reads whole drafters: before a file takes its place
    _replace_answers(recipe)
    path = result_files.write_acceptance(recipe, numbers, described, main, PLAIN, made)
    for note in notes:
        print(note)
    result_files.print_table(result_files.read_acceptance(path))
    result_files.print_written(path, result_files.generations_path(recipe), result_files.write_report(recipe))


def precision_notes(models: LoadedModels, contenders: Sequence[Contender]) -> list[str]:
    """Sentences about drafters trained on the target in another precision, or otherwise guided, than they draft for."""
    notes = []
    for drafter, wanted in dict.fromkeys((c.drafter, c.quantization) for c in contenders if c.proposer == "drafter"):
        assert drafter is not None
        identities, said = (read_drafter_config(drafter)[1], models.in_precision(wanted).identity), []
        for identity in identities:
            precision, guidance = identity.get("quantization"), identity.get("guidance")
            said.append(f"in {precision}" if precision else "unquantised")
            said[-1] += f", guided ({guidance})" if guidance else ""
        if said[0] != said[1]:
            notes.append(
                f"note: {drafter} was trained on the states of the target {said[0]}; here it drafts for the target "
                f"{said[1]}"
            )
    return notes


def relaxed_notes(files: TargetFiles, contenders: Sequence[Contender]) -> list[str]:
    """Sentences about relaxed acceptance for a target that seems to write text. A file's tokens are taken for codes."""
    relaxed = dict.fromkeys(each.relaxed for each in contenders if each.relaxed and not writes_images(files.config))
    return [
        f"note: {section.rule} with {files.section.model}, which writes text: tokens give way to those with near "
        "embeddings, which need not mean the same"
        for section in relaxed
        if section.neighbours == "embedding"
    ]


def partial_log(recipe: Recipe) -> Path:
    """generations.jsonl while it is written; behind a link, in the folder of the file that it points to."""
    return partial_path(result_files.generations_path(recipe).resolve())


def _replace_answers(recipe: Recipe) -> None:
    """Puts the new generations.jsonl in place, after it has removed acceptance.json: replay believes what that says
    about the answers beside it, so a kill must not leave an older one there."""
    partial, acceptance = partial_log(recipe), (recipe.eval_out / "acceptance.json").resolve()
    sync_to_disk(partial)
    acceptance.unlink(missing_ok=True)
    sync_to_disk(acceptance.parent, inside=False)
    os.replace(partial, result_files.generations_path(recipe).resolve())


def check_automatic(recipe: Recipe, files: TargetFiles, contenders: Sequence[Contender], plan: bool = False) -> None:
    """Checks the candidates and answers for policy `auto` before weights are loaded."""
    for contender in contenders:
        if contender.tree.policy == "auto":
            prepared(recipe, files, contender, candidates_of(recipe, contender.tree), plan)


def with_chosen_trees(models: LoadedModels, recipe: Recipe, contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders with `auto` replaced by the fastest tree on this machine, in tree and name."""
    planned: list[tuple[Contender, TreeSection]] = []
    result = []
    for contender in contenders:
        if contender.tree.policy == "auto":
            alike = replace(contender, name="", place="", router=None)  # the planner plans the rounds beside a router
            tree = next((tree for other, tree in planned if other == alike), None)
            if tree is None:
                tree = choose_tree(models, recipe, contender)
                planned.append((alike, tree))
            contender = _with_tree(contender, tree)
        result.append(contender)
    return result


def _with_tree(contender: Contender, tree: TreeSection) -> Contender:
    """A contender with the tree that `auto` has become, in its name, too."""
    return replace(contender, tree=tree, name=f"{contender.name}: {tree_name(tree)}")


def with_trees_chosen_before(recipe: Recipe, contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders with `auto` replaced by the tree that the last decoding in eval.out chose. Those without such a
    tree are left out, with a note.

    Raises:
        UserError: none is left.
    """
    path, result, problems = recipe.eval_out / "acceptance.json", [], []
    try:
        chosen = result_files.read_acceptance(path).get("chosen_trees", {})
    except UserError:
        chosen = {}
    for contender in contenders:
        name, tree = contender.name, contender.tree
        if tree.policy == "auto" and name not in chosen:
            problems.append(
                f"{contender.place}: policy auto needs speeds, and replay measures none; {path} has no tree that a "
                f"decoding chose for {name!r}: decode first, or name a policy"
            )
        else:
            auto = tree.policy == "auto"
            result.append(_with_tree(contender, TreeSection(**chosen[name])) if auto else contender)
    if not result:
        raise UserError(problems)
    for problem in problems:
        print(f"note: left out: {problem}")
    return result


def how_made(recipe: Recipe, models: LoadedModels, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Provenance of the numbers, for acceptance.json and the report."""
    return models.made(
        {
            "drafter" if directory == recipe.eval_drafter_dir else str(directory): directory / "model.safetensors"
            for directory in dict.fromkeys(c.drafter for c in contenders if c.drafter is not None)
        }
    ) | {"target_identity": models.identity}


def print_evaluation_plan(plan: PlanLines, recipe: Recipe, files: TargetFiles, contenders: Sequence[Contender]) -> None:
    asked = recipe_questions(recipe, files, Rejects())
    for note in [*answer_notes(files), *relaxed_notes(files, contenders)]:
        print(note)
    turns = Counter[str]()
    for name in dict.fromkeys(question.benchmark for question in asked):
        of_it = [question for question in asked if question.benchmark == name]
        turns[name], pictures = sum(len(question.turns) for question in of_it), sum(each.pictures for each in of_it)
        shown = f", {pictures} pictures" if pictures else ""
        plan.line("prompts", f"{name}: {len(of_it)} ({turns[name]} turns{shown})", "counted")
    plain = list(dict.fromkeys([PLAIN, *map(plain_of, contenders)]))
    plan.line("decoded by", "; ".join(plain))
    for contender in contenders:
        plan.line("", f"{contender.name}: {tree_name(contender.tree)}")
    most, answers = recipe.eval.max_new_tokens, turns.total() * (len(plain) + len(contenders))
    text = f"{answers:,}, {recipe.eval.batch_size} side by side; at most {answers * most:,} tokens"
    plan.line("answers", text, "exact")
    plan.line("time", "unknown until the first prompts are decoded; the progress bar then shows what is left")
    weights, uncounted = 0, [c.draft_model.model for c in contenders if c.draft_model is not None]
    for directory in dict.fromkeys(c.drafter for c in contenders if c.drafter is not None):
        state = "yet to be imported" if yet_to_import(recipe, directory) else "`draftsmith train` writes it"
        plan.line("reads", f"{directory}", "there" if directory.exists() else state)
        uncounted += [] if directory.exists() else [str(directory)]
        weights += weight_bytes(directory)
    uncounted += [name.removeprefix(f"{PLAIN}, ") for name in plain[1:]]
    tokens = min(longest_row(recipe, files) + most, files.positions)
    sizes = recipe.eval.batch_size, tokens, weights
    plan_decoding(plan, files, *sizes, ["activations", *dict.fromkeys(uncounted)])
    plan.writes(*(recipe.eval_out / name for name in ("acceptance.json", "generations.jsonl", "report.html")))
    try:
        check_automatic(recipe, files, contenders, plan=True)
    except UserError as error:
        print(f"CANNOT WORK yet: policy auto: {'; '.join(error.problems)}")
