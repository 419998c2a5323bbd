"""Make prompts that ask for long answers about pictures, from pictures with any captions or instructions.

    python data_gen/reprompt.py recipes/demo.yaml data.reprompt.sources=blip_laion_cc_sbu_558k.json \\
        data.reprompt.max_prompts=68000
    python data_gen/reprompt.py recipes/demo.yaml data.reprompt.sources=captions.json data.reprompt.folder=train2017 \\
        --plan                                                               # reads a sample, writes nothing

Reads data.reprompt.sources (docs/pictures.md lists the formats) and writes <output_dir>/prompts.jsonl. Each prompt is
[instruction, picture, request for an answer of at least 1,000 words]. The source's captions and answers are dropped:
captions are short, and drafters for vision-language targets need long answers (ViSpec, Kang et al. 2025, arXiv
2509.15235, "Data synthesis").

A prompt names its picture by path and sha256; the picture stays where it is. Every picture is decoded once. Those that
cannot be used, and placeholders without a picture, go to prompts.rejects.jsonl with the reason. The same recipe and
pictures give the same file; a stopped run leaves the previous file as it was.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if command.recipe.data.reprompt.sources is None:
        raise UserError("data.reprompt.sources: not given; name a file of pictures with captions, or `hf:org/name`")
    from draftsmith.data_gen.reprompting import long_answers

    long_answers.main(command)
    print_next(command, "reprompt")


if __name__ == "__main__":
    run(main)
