"""Let the target write its own training data: every assistant turn of a set of conversations, in order.

    python data_gen/regenerate.py recipes/demo.yaml
    python data_gen/regenerate.py recipes/demo.yaml data.max_prompts=20 output_dir=runs/try    # the smallest run
    python data_gen/regenerate.py recipes/demo.yaml --plan                                     # what it would do

Reads data.prompts and writes <output_dir>/conversations.jsonl: one line per conversation, with the token ids of every
answer. The target answers in this process or on servers (docs/prompts-and-answers.md), also about pictures
(docs/pictures.md). A stopped run resumes where it was, and asks again what failing servers left unanswered. The file
records what was asked, so other prompts with the same ids are refused. Prompts that cannot be asked go to
conversations.rejects.jsonl with the reason. With data.states, a target in this process also stores the hidden states
that training reads (docs/training.md).

- Every user turn gets one answer. The source's own answers are dropped. An assistant turn that calls tools is kept with
  the results that follow it, and the answer comes after them.
- An answer that is cut (finish_reason `length`) ends its conversation, and so does a next prompt that does not fit
  data.max_length. The line then says how many user turns were not asked (`unasked_turns`), and why (`unasked_reason`).
"""

import sys

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import made_by, print_next, require_files
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if command.recipe.data.prompts is None:
        raise UserError("data.prompts: not given; name a file, `hf:org/name`, `self`, or data.reprompt.sources")
    path = command.recipe.conversations_path
    if path.suffix.lower() not in (".jsonl", ".json"):  # what training reads as JSON lines
        raise UserError(f"data.conversations: {path}: regenerate writes JSON lines; name a .jsonl file")
    recipe = command.recipe
    for stage, wanted in (("reprompt", recipe.reprompts), ("self-prompt", recipe.prompts_itself)):
        if wanted:
            require_files(made_by(stage, recipe))
    from draftsmith.data_gen.answers import regeneration

    if regeneration.main(command):
        sys.exit(1)  # the next stage would work with a part of the answers
    print_next(command, "regenerate")


if __name__ == "__main__":
    run(main)
