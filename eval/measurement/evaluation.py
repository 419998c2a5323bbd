"""Decodes or replays a recipe's contenders and writes their numbers, behind eval/acceptance.py."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from draftsmith.eval.decoding.contenders import Contender, check_contenders, describe
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.neighbours import warning
from draftsmith.eval.decoding.proposers import rule_name, tree_name
from draftsmith.eval.measurement.benchmarks import PLAIN, Question, answer_line, decode_all, plain_of, recipe_questions
from draftsmith.eval.measurement.compared import load_all
from draftsmith.eval.measurement.metrics import BOOTSTRAP_SAMPLES, summarise_all
from draftsmith.eval.planner.command import choose_tree
from draftsmith.eval.planner.search import candidates_of, prepared, recipe_keys
from draftsmith.eval.replay.replay import Agreement
from draftsmith.eval.replay.replay_contenders import as_replayed, print_replay_plan, recording_of, replay_contenders
from draftsmith.eval.report_page.files import (
    UNDRAFTED,
    generations_path,
    print_table,
    print_written,
    read_acceptance,
    write_acceptance,
    write_report,
)
from draftsmith.models.chat import decode_answer
from draftsmith.models.checkpoint import precision_note, weight_bytes
from draftsmith.models.context_limits import longest_row, no_room
from draftsmith.models.costs import duration, plan_decoding
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.quantize import precision_name
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.turn_ends import answer_notes
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import partial_path, sync_to_disk
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.picture_files import data_url, store_picture
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection


def main(command: Command) -> None:
    recipe, contenders, notes = load_all(command.recipe_path, command.overrides, command.compare, command.plan)
    for note in notes:
        print(f"note: {note}")
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
    if full and not plan:
        raise UserError(full)
    if not plan:
        check_automatic(recipe, files, contenders)
        make_out(recipe)
    with nullcontext() if plan else alone_in(recipe.eval_out):
        rejects = Rejects(None if plan else recipe.eval_out / "prompts.rejects.jsonl")
        # Pictures that have no file are stored beside the answers.
        folder = generations_path(recipe).with_suffix(".pictures")
        asked = recipe_questions(recipe, files, rejects, data_url if plan else partial(store_picture, folder=folder))
        for note in answer_notes(files):
            print(note)
        if plan:
            with PlanLines() as lines:
                lines.problems += [full] if full else []
                print_evaluation_plan(lines, recipe, files, asked, contenders)
                try:
                    check_automatic(recipe, files, contenders, plan)
                except UserError as error:
                    print(f"CANNOT WORK yet: policy auto: {'; '.join(error.problems)}")
            return
        models = LoadedModels(files)
        asked_for, contenders = contenders, with_chosen_trees(models, recipe, contenders)
        pairs = zip(asked_for, contenders, strict=True)
        chosen = {before.name: recipe_keys(after.tree) for before, after in pairs if before.tree.policy == "auto"}
        with keeping_answers(partial_log(recipe)) as file:
            results = decode_all(models, recipe, contenders, asked, file, rejects)
            file.close()
            notes = [*relaxed_notes(files, contenders), *precision_notes(models, contenders)]
            notes += [rejects.summary()] if rejects.total else []
            publish_results(recipe, models, contenders, results, {"chosen_trees": chosen}, notes)


def evaluate_by_replay(recipe: Recipe, contenders: list[Contender], plan: bool) -> None:
    """Replays every contender along recorded answers. With `plan` it only prints the plan."""
    if not plan:
        make_out(recipe)
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
    make_out(recipe)
    with alone_in(recipe.eval_out), keeping_answers(partial_log(recipe)) as file:
        for name, generations in results.items():
            for generation in generations:
                # Recorded answers may lack the question, so the report shows the prompt.
                shown = name == contenders[0].name
                question = decode_answer(models.files.tokenizer, generation.prompt_token_ids) if shown else None
                file.write(answer_line(models.files.tokenizer, generation, name, question))
        file.close()
        publish_results(recipe, models, contenders, results, {"recorded_answers": recording.described(str(agreement))})


def publish_results(
    recipe: Recipe,
    models: LoadedModels,
    contenders: Sequence[Contender],
    results: dict[str, list[Generation]],
    about: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Puts acceptance.json, generations.jsonl and report.html in place and prints the table.

    Args:
        contenders: the main one first.
        results: all answers; their lines are in the partial file of generations.jsonl.
        about: further keys of acceptance.json.
        notes: printed above the table.
    """
    main, log = contenders[0].name, generations_path(recipe)
    unlike = recipe.eval.mode == "replay" or recipe.eval.temperature > 0
    own_plain = {name: plain_of(each) for each in contenders for name in (each.name, plain_of(each))}
    numbers = summarise_all(results, PLAIN, BOOTSTRAP_SAMPLES, recipe.eval.seed, unlike, main, own_plain)
    described = {plain_of(each): UNDRAFTED | {"quantization": precision_name(each.quantization)} for each in contenders}
    described |= {PLAIN: UNDRAFTED} | {contender.name: describe(contender) for contender in contenders}
    made = how_made(recipe, models, contenders) | (about or {})  # reads whole drafters: before a file takes its place
    _replace_answers(recipe)
    path = write_acceptance(recipe, numbers, described, main, PLAIN, made)
    for note in notes:
        print(note)
    print_table(read_acceptance(path))
    print_written([path, log, write_report(recipe)])


def precision_notes(models: LoadedModels, contenders: Sequence[Contender]) -> list[str]:
    """Sentences about drafters that draft for the target in another precision than they were trained on."""
    pairs = dict.fromkeys((c.drafter, c.quantization) for c in contenders if c.proposer == "drafter")
    notes = (precision_note(d, models.in_precision(precision).identity) for d, precision in pairs if d is not None)
    return [f"note: {note}" for note in notes if note is not None]


def relaxed_notes(files: TargetFiles, contenders: Sequence[Contender]) -> list[str]:
    """Sentences about relaxed acceptance where it makes little sense."""
    rules = {contender.relaxed: None for contender in contenders if contender.relaxed is not None}
    return [f"note: {note}" for note in (warning(rule, files) for rule in rules) if note]


def partial_log(recipe: Recipe) -> Path:
    """generations.jsonl while it is written; behind a link, in the folder of the file that it points to."""
    return partial_path(generations_path(recipe).resolve())


def _replace_answers(recipe: Recipe) -> None:
    """Puts the new generations.jsonl in place, after it has removed acceptance.json.

    Replay believes what acceptance.json says about the answers beside it. A kill must not leave an older one there.
    """
    partial, acceptance = partial_log(recipe), (recipe.eval_out / "acceptance.json").resolve()
    sync_to_disk(partial)
    acceptance.unlink(missing_ok=True)
    sync_to_disk(acceptance.parent, inside=False)
    os.replace(partial, generations_path(recipe).resolve())


def make_out(recipe: Recipe) -> None:
    """Makes eval.out, and keeps the date of the prompts. Raises UserError if it cannot be made or written to."""
    out, key = recipe.eval_out, "eval.out" if recipe.eval.out is not None else "output_dir"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: {out} cannot be made: {error.strerror}; name another folder") from None
    if not os.access(out, os.W_OK):
        raise UserError(f"{key}: nothing can be written to {out}; name another folder, or fix its permissions")
    recipe.keep_date()


@contextmanager
def keeping_answers(partial: Path) -> Iterator[IO[str]]:
    """The file `partial`, open for writing. If the run ends early, prints where it is, or removes it if empty."""
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
    except BaseException:
        if partial.exists() and partial.stat().st_size:
            print(f"answers decoded so far: {partial} (the next run starts over and replaces them)", file=sys.stderr)
        else:
            partial.unlink(missing_ok=True)
        raise


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
        if contender.tree.policy != "auto":
            result.append(contender)
            continue
        alike = replace(contender, name="", place="", router=None)  # the planner plans the rounds beside a router
        tree = next((tree for other, tree in planned if other == alike), None)
        if tree is None:
            tree = choose_tree(models, recipe, contender)
            planned.append((alike, tree))
        result.append(_with_tree(recipe, contender, tree))
    return result


def _with_tree(recipe: Recipe, contender: Contender, tree: TreeSection) -> Contender:
    """A contender with the tree that `auto` has become, in its name, too."""
    counts = recipe.token_counts_path if tree.vocab_size is not None else None
    return replace(contender, tree=tree, token_counts=counts, name=f"{contender.name}: {tree_name(tree)}")


def with_trees_chosen_before(recipe: Recipe, contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders with `auto` replaced by the tree that the last decoding in eval.out chose. Those without such a
    tree are left out, with a note.

    Raises:
        UserError: none is left.
    """
    path, result, problems = recipe.eval_out / "acceptance.json", [], []
    try:
        chosen = read_acceptance(path).get("chosen_trees", {})
    except UserError:
        chosen = {}
    for contender in contenders:
        if contender.tree.policy != "auto":
            result.append(contender)
        elif contender.name in chosen:
            result.append(_with_tree(recipe, contender, TreeSection.model_validate(chosen[contender.name])))
        else:
            problems.append(
                f"{contender.place}: policy auto needs speeds, and replay measures none; {path} has no tree that a "
                f"decoding chose for {contender.name!r}: decode first, or name a policy"
            )
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


def print_evaluation_plan(
    plan: PlanLines, recipe: Recipe, files: TargetFiles, asked: list[Question], contenders: Sequence[Contender]
) -> None:
    prompts = Counter(question.benchmark for question in asked)
    turns = Counter(turn for question in asked for turn in [question.benchmark] * len(question.turns))
    pictures = Counter(name for question in asked for name in [question.benchmark] * question.pictures)
    for name in prompts:
        shown = f", {pictures[name]} pictures" if pictures[name] else ""
        plan.line("prompts", f"{name}: {prompts[name]} ({turns[name]} turns{shown})", "counted")
    plain = list(dict.fromkeys([PLAIN, *map(plain_of, contenders)]))
    plan.line("decoded by", "; ".join(plain))
    for contender in contenders:
        plan.line("", f"{contender.name}: {limits_text(contender)}")
    for note in relaxed_notes(files, contenders):
        print(note)
    names, most = [*plain, *(contender.name for contender in contenders)], recipe.eval.max_new_tokens
    answers = turns.total() * len(names)
    text = f"{answers:,}, {recipe.eval.batch_size} side by side; at most {answers * most:,} tokens"
    plan.line("answers", text, "exact")
    plan.line("time", *likely_time(recipe, names, turns.total() * most))
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


def limits_text(contender: Contender) -> str:
    """A contender's policy and the most that its trees may hold, for the plan."""
    tree = describe(contender)["tree"]
    if tree["policy"] == "auto":
        return "the fastest tree on this machine, measured first"
    nodes = f"at most {tree['nodes']:,} nodes"
    calls = "" if not contender.has_distributions else f", at most {tree['draft_calls']} draft calls"
    cut_to = f", from {tree['vocab_size']:,} tokens" if tree["vocab_size"] is not None else ""
    rule = "" if contender.relaxed is None else f"; {rule_name(contender.relaxed)}, not lossless"
    return f"{tree['policy']}, {nodes}{calls}{cut_to}{rule}"


def likely_time(recipe: Recipe, names: list[str], tokens: int) -> tuple[str, str]:
    """(the most that `tokens` by each row take, its basis), if the last evaluation in eval.out measured all rows."""
    try:
        last = read_acceptance(recipe.eval_out / "acceptance.json")
        seconds = sum(tokens / last["contenders"][name]["tokens_per_second"] for name in names)
    except (UserError, KeyError, TypeError):
        return "unknown until the first prompts are decoded; the progress bar then shows what is left", ""
    return f"at most {duration(seconds)}, and prefills", f"measured: speeds of the last run, {last['device']}"
