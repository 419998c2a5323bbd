"""Sort a corpus for SAM-Decoding, which drafts what followed the newest tokens in it.

    python data_gen/build_sam.py recipes/demo.yaml                              # the target's own answers
    python data_gen/build_sam.py recipes/demo.yaml data.sam.sources='[answers, "docs/*.md", src.jsonl]'
    python data_gen/build_sam.py recipes/demo.yaml --plan                       # what it would do
    python eval/acceptance.py recipes/demo.yaml eval.router='{static: runs/demo/sam.safetensors}'

Reads the files and datasets that data.ranking reads (docs/prompts-and-answers.md), and the answers that `regenerate`
wrote, as their token ids; in other conversations, the chat template renders the assistant turns. Documents are split
after stop tokens, and duplicates count once. Writes <output_dir>/sam.safetensors; a stopped run starts again.
Contenders name the file in sam.static or router.static (docs/decoding.md).
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import made_by, print_next, require_files


def main() -> None:
    command = parse_command(__doc__)
    if not command.plan and "answers" in command.recipe.data.sam.names:
        require_files(made_by("regenerate", command.recipe))
    from draftsmith.data_gen.vocabulary import sam_corpus

    sam_corpus.main(command)
    print_next(command, "build-sam")


if __name__ == "__main__":
    run(main)
