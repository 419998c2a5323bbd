"""Write a trained drafter in the format of a serving engine, and check that the engine would read it as it was trained.

    python models/export.py recipes/demo.yaml --to vllm
    python models/export.py recipes/demo.yaml --to vllm --plan                   # check everything, write nothing
    python models/export.py runs/demo/drafter --to sglang --out served/demo      # a checkpoint instead of a recipe
    python models/export.py recipes/demo.yaml --to vllm --push-to-hub me/demo-eagle3.1 --public
    python models/export.py my.yaml --to llama.cpp --with-target ~/llama.cpp     # drafter.gguf and target.gguf; EAGLE-3

Engines: vllm, sglang, tensorrt-llm, eagle (the reference code), speculators, llama.cpp. Some share a format:
the command says which others serve the same folder. If an engine would serve another drafter than the trained one, the
export is refused with the reason.

Writes config.json, model.safetensors (for llama.cpp: drafter.gguf), a model card (README.md) with the measured
acceptance, and speculation_profile.json into <output_dir>/export/<engine>, and prints the command that serves it.
"""

from argparse import ArgumentParser
from pathlib import Path

from draftsmith.recipes.command.cli import parse_arguments, run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe


def main() -> None:
    command = parse_arguments(__doc__, extra=_options)
    given = Path(command.recipe_path)
    if not given.exists() and given.suffix not in (".yaml", ".yml"):
        raise UserError(f"{given}: no such folder; name a drafter's folder, or a recipe file")
    recipe = None if given.is_dir() else load_recipe(command.recipe_path, command.overrides)
    from draftsmith.models.formats import commands

    commands.export_main(command, recipe)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--to", metavar="ENGINE", help="default: the recipe's export.to, or vllm")
    parser.add_argument("--out", type=Path, help="folder to write; default: <output_dir>/export/<engine>")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--with-target",
        type=Path,
        metavar="LLAMA_CPP",
        help="also write target.gguf, with the converter in this folder of llama.cpp's sources",
    )
    target.add_argument("--target-gguf", type=Path, metavar="FILE", help="copy the tokenizer from the target's GGUF")
    parser.add_argument("--dry-run", dest="plan", action="store_true", help="the same as --plan")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="also upload the folder to this repository")
    visible = parser.add_mutually_exclusive_group()
    visible.add_argument(
        "--private", dest="private", action="store_true", default=True, help="keep the repository private (default)"
    )
    visible.add_argument("--public", dest="private", action="store_false", help="let everyone see the repository")
    parser.add_argument("--revision", help="branch of the repository to upload to; default: its main branch")


if __name__ == "__main__":
    run(main)
