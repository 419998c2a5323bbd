"""Measure how many drafted tokens the target accepts, and what that gains over plain decoding in the same run.

    python eval/acceptance.py recipes/demo.yaml
    python eval/acceptance.py recipes/demo.yaml eval.max_prompts=4 eval.tree.nodes=20     # a quick look
    python eval/acceptance.py recipes/demo.yaml --plan                                    # what it would do

Every prompt is decoded plainly and by each contender: the recipe's `eval.tree`, and those under `eval.also`. Writes
<eval.out>/acceptance.json and generations.jsonl, and prints a table.
"""

from draftsmith.eval.benchmarks import PLAIN, Bench, Question, load_questions
from draftsmith.eval.metrics import summarise
from draftsmith.eval.policies import PolicyProposer
from draftsmith.eval.report import print_table, write_acceptance
from draftsmith.models.chat import load_config, load_tokenizer, stop_ids, tokenizer_fingerprint
from draftsmith.models.checkpoint import check_identity, config_identity, load_drafter, read_config, target_identity
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.eagle3 import Eagle3Drafting
from draftsmith.models.prompt_lookup import PromptLookup
from draftsmith.models.target import Target, load_causal_lm
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
    # Whatever is wrong with the drafter is told before the target is loaded.
    shape, trained_for = read_config(recipe.eval_drafter_dir)
    tokenizer = load_tokenizer(section)
    fingerprint = tokenizer_fingerprint(tokenizer)
    config = load_config(section).get_text_config()
    here = config_identity(config, section.model, section.revision, fingerprint)
    check_identity(recipe.eval_drafter_dir, trained_for, here)
    rejects = Rejects(None if command.plan else recipe.eval_out / "prompts.rejects.jsonl")
    asked = load_questions(recipe.eval.prompts, rejects, recipe.eval.max_prompts)
    if command.plan:
        print_plan(recipe, asked, contenders)
        return

    model = load_causal_lm(section)
    target = Target(model, shape.capture_layers)
    identity = target_identity(target, section.model, section.revision, fingerprint)
    drafter = load_drafter(recipe.eval_drafter_dir, target, identity)
    proposers: dict[str, Proposer | None] = {}
    for contender in contenders:
        tree = contender.tree
        proposers[contender.name] = (
            PromptLookup(tree.nodes - 1, target.device)
            if contender.proposer == "prompt_lookup"
            else PolicyProposer(Eagle3Drafting(drafter), tree.policy, tree.nodes, tree.calls, tree.top_k)
        )
    bench = Bench(
        target,
        tokenizer,
        frozenset(stop_ids(tokenizer, model.generation_config)),
        recipe.eval.max_new_tokens,
        target.config.max_position_embeddings,
    )
    shown = contenders[0].name
    recipe.eval_out.mkdir(parents=True, exist_ok=True)
    with (recipe.eval_out / "generations.jsonl").open("w") as file:
        results = bench.run(asked, proposers, shown, file, rejects)
    numbers = {
        name: summarise(generations, results[PLAIN], recipe.eval.bootstrap_samples, recipe.eval.seed)
        for name, generations in results.items()
    }
    path = write_acceptance(recipe, numbers, shown, target)
    if rejects.total:
        print(rejects.summary())
    print_table(numbers, shown)
    print(f"written: {path}, {path.with_name('generations.jsonl')}")


def contenders_of(recipe: Recipe) -> list[ContenderSection]:
    """The recipe's own tree first, then those under eval.also."""
    tree = recipe.eval.tree
    shape = f"chain of {tree.nodes - 1}" if tree.policy == "chain" else f"tree of {tree.nodes}"
    contenders = [ContenderSection(name=f"{recipe.drafter.kind}, {shape}", tree=tree), *recipe.eval.also]
    names = [PLAIN, *(contender.name for contender in contenders)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"eval.also: names must differ; {', '.join(map(repr, repeated))} stands more than once")
    return contenders


def print_plan(recipe: Recipe, asked: list[Question], contenders: list[ContenderSection]) -> None:
    turns = sum(len(question.turns) for question in asked)
    print(f"prompts      {len(asked)} ({turns} turns), at most {recipe.eval.max_new_tokens} new tokens each")
    print(f"decoded by   {PLAIN}, {', '.join(c.name for c in contenders)}: {turns * (len(contenders) + 1)} answers")
    print(f"drafter      {recipe.eval_drafter_dir}")
    print(f"writes       {recipe.eval_out / 'acceptance.json'}, {recipe.eval_out / 'generations.jsonl'}")


if __name__ == "__main__":
    run(main)
