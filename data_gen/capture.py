"""Write the target's hidden states for a recipe's conversations to disk, to train from them without the target.

    python data_gen/capture.py recipes/demo.yaml
    python data_gen/capture.py recipes/demo.yaml data.capture.dtype=fp8 data.states=runs/demo/fp8     # half the size
    python data_gen/capture.py recipes/demo.yaml --plan                     # what it would write, and how much
    python data_gen/capture.py recipes/demo.yaml --verify                 # reads all files and rewrites damaged ones
    torchrun --nproc_per_node 8 data_gen/capture.py recipes/demo.yaml     # the same store, by eight GPUs
    accelerate launch train/eagle3.py recipes/demo.yaml data.states=runs/demo/states

Writes the states that the recipe's drafter reads to <data.states>, by default <output_dir>/states, for training and
validation rows alike. Those that data_gen/regenerate.py has stored with the answers are not computed again. A stopped
run resumes where it was. Other rows, another target, other layers or another dtype need another folder
(docs/training.md).
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.launch import check_all_started, first_one_reports
from draftsmith.recipes.command.stages import made_by, require_files


def main() -> None:
    check_all_started()
    with first_one_reports():
        said = "check the sha256 of every written file and rewrite damaged ones"
        command = parse_command(
            __doc__, extra=lambda parser: parser.add_argument("--verify", action="store_true", help=said)
        )
        if not command.plan or command.recipe.data.prompts is None:  # else regeneration may write them later
            require_files(made_by("regenerate", command.recipe))
        from draftsmith.data_gen.states import capturing

        capturing.main(command)


if __name__ == "__main__":
    run(main, many_processes=True)
