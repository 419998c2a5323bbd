"""Let the target write the prompts, too, so that nobody needs a data set to begin.

    python data_gen/self_prompt.py recipes/demo.yaml data.prompts=self
    python data_gen/self_prompt.py recipes/demo.yaml data.prompts=self data.self_prompts.count=5000
    python data_gen/self_prompt.py recipes/demo.yaml data.prompts=self --plan   # its opening; what it would take

Where data.prompts names `self`, alone or among others, the target continues its own template's opening of a user turn,
as in Magpie (Xu et al. 2024, arXiv 2406.08464), and writes a question. Those that are cut, empty, go round in circles
or were written before are left out and counted.

Writes <output_dir>/self_prompts.jsonl, which regenerate reads, from every draw in self_prompts.drawn.jsonl. A draw
depends on data.self_prompts.seed and its number alone, so a stopped run resumes, and a larger count goes on from a
smaller one. By whom: the target in this process, or data.generator's servers.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if not command.recipe.prompts_itself:
        raise UserError("data.prompts: does not name `self`, so there are no prompts to write")
    from draftsmith.data_gen.answers import self_prompts

    self_prompts.main(command)
    print_next(command, "self-prompt")


if __name__ == "__main__":
    run(main)
