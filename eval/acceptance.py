"""Measure how many drafted tokens the target accepts, and what that gains over plain decoding in the same run.

    python eval/acceptance.py recipes/demo.yaml
    python eval/acceptance.py recipes/demo.yaml eval.max_prompts=4 eval.tree.nodes=20     # a quick look
    python eval/acceptance.py recipes/demo.yaml --plan                                    # what it would do

Every prompt is decoded plainly and by each contender: the recipe's `eval.tree`, and those under `eval.also`. Writes
<eval.out>/acceptance.json, generations.jsonl and report.html, and prints a table; eval/report.py builds the latter two
again without decoding.
"""

import os
import platform
from collections import Counter
from datetime import datetime, timezone
from typing import Any

import torch

from draftsmith.eval.benchmarks import PLAIN, Bench, Question, load_questions
from draftsmith.eval.metrics import summarise_all
from draftsmith.eval.report import (
    generations_path,
    print_table,
    print_written,
    read_acceptance,
    write_acceptance,
    write_report,
)
from draftsmith.eval.speculator import Speculator, check_drafter
from draftsmith.models.chat import load_config
from draftsmith.models.checkpoint import provenance
from draftsmith.models.costs import decoding_lines, threads
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.prompt_lookup import PromptLookup
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.recipes.cli import parse_command, run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts import Rejects
from draftsmith.recipes.schema import ContenderSection, Recipe


def main() -> None:
    command = parse_command(__doc__)
    recipe, section = command.recipe, command.recipe.target
    if recipe.eval.prompts is None:
        raise UserError("eval.prompts: not given; name a prompt file, or stdlib:heldout")
    contenders = contenders_of(recipe)
    # A plan may come before the training; a drafter that the recipe names must be there.
    yet_to_train = command.plan and recipe.eval.drafter is None and not recipe.drafter_dir.exists()
    if not yet_to_train:
        check_drafter(section, recipe.eval_drafter_dir)
    rejects = Rejects(None if command.plan else recipe.eval_out / "prompts.rejects.jsonl")
    asked = load_questions(recipe.eval.prompts, rejects, recipe.eval.max_prompts, recipe.eval.turns == "first")
    if command.plan:
        print_plan(recipe, asked, contenders)
        return

    speculator = Speculator.load(section, recipe.eval_drafter_dir)
    target = speculator.target
    sampling = Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.eval.top_k)
    proposers: dict[str, Proposer | None] = {}
    for contender in contenders:
        proposers[contender.name] = (
            PromptLookup(contender.tree.nodes - 1, target.device)
            if contender.proposer == "prompt_lookup"
            else speculator.proposer(contender.tree, sampling)
        )
    bench = Bench(
        target,
        speculator.tokenizer,
        speculator.stop_ids,
        recipe.eval.max_new_tokens,
        target.config.max_position_embeddings,
        sampling,
        recipe.eval.seed,
    )
    shown = contenders[0].name
    recipe.eval_out.mkdir(parents=True, exist_ok=True)
    log = generations_path(recipe)
    partial = log.with_name(log.name + ".partial")  # an older run's numbers and answers stay together until this one's
    with partial.open("w", encoding="utf-8") as file:
        results = bench.run(asked, proposers, shown, file, rejects)
    numbers = summarise_all(results, PLAIN, recipe.eval.bootstrap_samples, recipe.eval.seed, not sampling.greedy)
    os.replace(partial, log)
    path = write_acceptance(recipe, numbers, shown, PLAIN, how_made(recipe, target))
    if rejects.total:
        print(rejects.summary())
    print_table(read_acceptance(path))
    print_written([path, log, *write_report(recipe)])


def contenders_of(recipe: Recipe) -> list[ContenderSection]:
    """The recipe's own tree first, then those under eval.also."""
    tree = recipe.eval.tree
    shape = f"chain of {tree.nodes - 1}" if tree.policy == "chain" else f"tree of {tree.nodes}"
    contenders = [ContenderSection(name=f"{recipe.drafter.kind}, {shape}", tree=tree), *recipe.eval.also]
    names = [PLAIN, *(contender.name for contender in contenders)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"eval.also: names must differ; {', '.join(map(repr, repeated))} stands more than once")
    return contenders


def how_made(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Where the numbers come from, for acceptance.json and the report."""
    cuda = target.device.type == "cuda"
    hardware = torch.cuda.get_device_name(target.device) if cuda else f"{platform.machine()}, {threads()}"
    files = {"drafter": recipe.eval_drafter_dir / "model.safetensors"}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "made": provenance(files) | {"date": now, "hardware": hardware},
    }


def print_plan(recipe: Recipe, asked: list[Question], contenders: list[ContenderSection]) -> None:
    prompts = Counter(question.benchmark for question in asked)
    turns = Counter(turn for question in asked for turn in [question.benchmark] * len(question.turns))
    for name in prompts:
        print(f"prompts      {name}: {prompts[name]} ({turns[name]} turns)")
    names = [PLAIN, *(contender.name for contender in contenders)]
    answers = turns.total() * len(names)
    print(f"decoded by   {'; '.join(names)}")
    print(f"answers      {answers}, of at most {recipe.eval.max_new_tokens} new tokens each")
    print(f"time         {likely_time(recipe, names, turns.total())}")
    there = recipe.eval_drafter_dir.exists()
    missing = "" if there else ": not there; train/eagle3.py comes first, with this recipe. Its memory is not counted"
    print(f"drafter      {recipe.eval_drafter_dir}{missing}")
    weights = sum(file.stat().st_size for file in recipe.eval_drafter_dir.glob("*.safetensors"))
    tokens = recipe.data.max_length + recipe.eval.max_new_tokens
    config = load_config(recipe.target)
    for line in decoding_lines(config, recipe.target, 1, tokens, weights):
        print(line)
    print(f"writes       acceptance.json, generations.jsonl and report.html in {recipe.eval_out}")
    positions = config.get_text_config().max_position_embeddings
    if recipe.eval.max_new_tokens >= positions:
        print(
            f"CANNOT WORK: eval.max_new_tokens {recipe.eval.max_new_tokens:,} leaves no room for a prompt in the "
            f"target's {positions:,} positions"
        )


def likely_time(recipe: Recipe, names: list[str], turns: int) -> str:
    """What can be said before anything is decoded: a bound from the speeds of the last run, if they are known."""
    try:
        last = read_acceptance(recipe.eval_out / "acceptance.json")
    except UserError:
        last = {"contenders": {}, "target": None}
    rates = [last["contenders"].get(name, {}).get("tokens_per_second") for name in names]
    if last["target"] != recipe.target.model or not all(rates):
        return "unknown until the first prompts are decoded; the progress bar then shows what is left"
    seconds = sum(turns * recipe.eval.max_new_tokens / rate for rate in rates)
    return (
        f"at most about {max(1, round(seconds / 60))} min, were every answer as long as allowed, at the speeds of the "
        f"last run in {recipe.eval_out} ({last['device']}, {last['dtype']}); prefills come on top"
    )


if __name__ == "__main__":
    run(main)
