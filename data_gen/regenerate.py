"""Let the target write its own training data: every assistant turn of a set of conversations, in order.

    python data_gen/regenerate.py recipes/demo.yaml
    python data_gen/regenerate.py recipes/demo.yaml data.max_prompts=20 output_dir=runs/try    # the smallest run
    python data_gen/regenerate.py recipes/demo.yaml --plan                                     # what it would do

The answers come from the target in this process, which a drafter may help (data.generator.drafter), or from
OpenAI-compatible servers that serve it (data.generator.kind openai; docs/regeneration.md).

Reads data.prompts, writes <output_dir>/conversations.jsonl, one line per conversation, with the token ids of every
answer, so that nothing is tokenised again. Stopped at any moment and started again, it goes on where it was: the file
itself says what is done, and what was asked, so that other prompts of the same ids are refused. Prompts that cannot be
asked go to conversations.rejects.jsonl beside it, with the reason.

- Of conversations that ask the same, only the first is asked, unless data.duplicates is `keep`.
- Every user turn gets one answer. The answers that the source holds are dropped; an assistant turn that calls tools is
  kept, with the results that follow it, and the answer is asked for behind them.
- An answer that is cut (finish_reason `length`) is kept and ends its conversation: the target never ended that turn, so
  what it would say next is not what it would say in use. A next prompt that does not fit data.max_length ends it too.
  Such lines say in `unasked_turns` how many user turns were not asked, and in `unasked_reason` why.
- What the servers could not answer in this run (gone, failing again and again) is not written and not rejected: it is
  counted, and the next run asks it again.
"""

import sys

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if command.recipe.data.prompts is None:
        raise UserError("data.prompts: not given; name a file, `stdlib:train` or `hf:org/name`")
    from draftsmith.data_gen.answers import regeneration

    if regeneration.main(command):
        sys.exit(1)  # what comes next would work with a part of the answers
    print_next(command, "regenerate")


if __name__ == "__main__":
    run(main)
