"""Measure how many drafted tokens the target accepts, and what that gains over plain decoding in the same run.

    python eval/acceptance.py recipes/demo.yaml
    python eval/acceptance.py recipes/demo.yaml eval.max_prompts=4 eval.tree.nodes=20     # a quick look

Every prompt is decoded plainly and by each contender (the recipe's `eval.tree`, and those under `eval.also`) in turn,
in an order that rotates from prompt to prompt. Writes <eval.out>/acceptance.json and generations.jsonl, and a table.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from draftsmith.eval.benchmarks import Question, load_questions
from draftsmith.eval.decode import Generation, decode
from draftsmith.eval.metrics import summarise
from draftsmith.eval.policies import PolicyProposer
from draftsmith.models.chat import load_tokenizer, render_prompt, stop_ids, tokenizer_fingerprint
from draftsmith.models.checkpoint import load_drafter, read_config, target_identity
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.eagle3 import Eagle3Drafting
from draftsmith.models.prompt_lookup import PromptLookup
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.recipes.cli import parse_command, run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts import Rejects
from draftsmith.recipes.schema import ContenderSection, Recipe

PLAIN = "plain decoding"


def main() -> None:
    command = parse_command(__doc__)
    recipe = command.recipe
    if recipe.eval.prompts is None:
        raise UserError("eval.prompts: not given; name a prompt file, or stdlib:heldout")
    contenders = contenders_of(recipe)
    if any(c.proposer == "drafter" for c in contenders):
        config = read_config(recipe.eval_drafter_dir)  # a missing drafter is told before the target is loaded
        layers = config["drafter"]["capture_layers"]
    else:
        layers = recipe.drafter.capture_layers
    recipe.eval_out.mkdir(parents=True, exist_ok=True)
    rejects = Rejects(recipe.eval_out / "prompts.rejects.jsonl")
    questions = load_questions(recipe.eval.prompts, rejects, recipe.eval.max_prompts)
    if rejects.total:
        print(rejects.summary())
    if command.plan:
        print_plan(recipe, questions, contenders)
        return

    section = recipe.target
    tokenizer = load_tokenizer(section.model, section.revision, section.trust_remote_code)
    target = Target(
        load_causal_lm(section.model, section.revision, section.dtype, section.device, section.trust_remote_code),
        layers,
    )
    identity = target_identity(target, section.model, section.revision, tokenizer_fingerprint(tokenizer))
    drafter = None
    if any(c.proposer == "drafter" for c in contenders):
        drafter = load_drafter(recipe.eval_drafter_dir, target, identity)
    proposers: dict[str, Proposer | None] = {PLAIN: None}
    for contender in contenders:
        tree = contender.tree
        if contender.proposer == "prompt_lookup":
            proposers[contender.name] = PromptLookup(tree.nodes - 1, target.device)
        else:
            assert drafter is not None
            proposers[contender.name] = PolicyProposer(
                Eagle3Drafting(drafter), tree.policy, tree.nodes, tree.calls, tree.top_k
            )

    with (recipe.eval_out / "generations.jsonl").open("w") as file:
        results = measure(recipe, questions, target, tokenizer, proposers, file, contenders[0].name)
    if rejects.total:
        print(rejects.summary())
    report = {
        "contenders": {
            name: summarise(generations, results[PLAIN], recipe.eval.bootstrap_samples, recipe.eval.seed)
            for name, generations in results.items()
        }
    }
    write_report(recipe, report, contenders, target)
    print_table(report["contenders"], contenders[0].name)
    print(f"written: {recipe.eval_out / 'acceptance.json'}, {recipe.eval_out / 'generations.jsonl'}")


def contenders_of(recipe: Recipe) -> list[ContenderSection]:
    """The recipe's own tree first, then those under eval.also."""
    tree = recipe.eval.tree
    shape = f"chain of {tree.nodes - 1}" if tree.policy == "chain" else f"{tree.policy} tree, {tree.nodes} nodes"
    contenders = [ContenderSection(name=f"{recipe.drafter.kind}, {shape}", tree=tree), *recipe.eval.also]
    names = [PLAIN, *(c.name for c in contenders)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"eval.also: names must differ; {', '.join(map(repr, repeated))} stands more than once")
    return contenders


def measure(
    recipe: Recipe,
    questions: list[Question],
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    proposers: dict[str, Proposer | None],
    file: Any,
    main_name: str,
) -> dict[str, list[Generation]]:
    """Decodes every turn of every question by everyone; the main contender's answers go to `file`."""
    stops = frozenset(stop_ids(tokenizer, target.model.generation_config))
    settings = recipe.eval
    names = list(proposers)
    results: dict[str, list[Generation]] = defaultdict(list)
    # The first forwards of a process are slow; they are nobody's. A short answer by everyone warms all shapes.
    warm_up = render_prompt(tokenizer, next(iter(questions[0].turns())))
    for proposer in proposers.values():
        decode(target, proposer, warm_up, stops, min(16, settings.max_new_tokens))
    rotation = 0
    progress = tqdm(questions, desc="decode", unit="prompt")
    for question in progress:
        history: list[dict[str, Any]] = []
        for number, asked in enumerate(question.turns()):
            history += asked
            prompt = render_prompt(tokenizer, history)
            turn: dict[str, Generation] = {}
            for i in range(len(names)):
                name = names[(i + rotation) % len(names)]
                turn[name] = decode(target, proposers[name], prompt, stops, settings.max_new_tokens)
            rotation += 1
            for name, generation in turn.items():
                results[name].append(generation)
            generation = turn[main_name]
            record = {
                "id": question.id,
                "turn": number,
                "prompt_token_ids": generation.prompt_token_ids,
                "token_ids": generation.token_ids,
                "accepted_per_round": generation.accepted_per_round,
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
            answer = tokenizer.decode(turn[PLAIN].token_ids, skip_special_tokens=True)
            history.append({"role": "assistant", "content": answer})
        done = results[main_name]
        rounds = sum(g.rounds for g in done)
        if rounds:
            progress.set_postfix(tau=f"{sum(len(g.token_ids) - 1 for g in done) / rounds:.2f}")
    return results


def write_report(recipe: Recipe, report: dict, contenders: list[ContenderSection], target: Target) -> None:
    """acceptance.json: the main contender's numbers on top, every contender's under its name, and the recipe."""
    shared = {
        "lossless": True,  # greedy acceptance keeps only what plain decoding would have produced
        "temperature": recipe.eval.temperature,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
    }
    content = report["contenders"][contenders[0].name] | shared | report | {"recipe": dump_recipe(recipe)}
    path = recipe.eval_out / "acceptance.json"
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def print_table(contenders: dict[str, dict[str, Any]], main_name: str) -> None:
    """Fits 80 columns. Intervals are 95 %, resampled over prompts."""
    table = Table(caption="tau: tokens per verification, bonus included; [95 % intervals over prompts]")
    for heading in ("", "tau", "nodes", "tokens/s", "speed-up", "exact"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in contenders.items():
        table.add_row(
            f"[bold]{name}[/]" if name == main_name else name,
            _with_interval(row["tau"], row["tau_interval"]),
            f"{row['tree_nodes_per_round'] or 0:.1f}",
            f"{row['tokens_per_second'] or 0:.0f}",
            _with_interval(row["speedup"], row["speedup_interval"]),
            "yes" if row["matches_target"] else "no",
        )
    Console().print(table)


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{value:.2f} \\[{interval[0]:.2f} {interval[1]:.2f}]"


def print_plan(recipe: Recipe, questions: list[Question], contenders: list[ContenderSection]) -> None:
    turns = sum(1 for question in questions for _ in question.turns())
    print(f"prompts      {len(questions)} ({turns} turns), at most {recipe.eval.max_new_tokens} new tokens each")
    print(f"decoded by   {PLAIN}, {', '.join(c.name for c in contenders)}: {turns * (len(contenders) + 1)} answers")
    print(f"drafter      {recipe.eval_drafter_dir}")
    print(f"writes       {recipe.eval_out / 'acceptance.json'}, {recipe.eval_out / 'generations.jsonl'}")


if __name__ == "__main__":
    run(main)
