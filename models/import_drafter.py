"""Read a drafter of another project, to measure it here or to train it further.

    python models/import_drafter.py runs/demo/export/vllm --target recipes/demo_target --out runs/imported
    python models/import_drafter.py ORG/EAGLE3-DRAFTER --target ORG/TARGET --out runs/imported --plan

Formats: EAGLE, EAGLE-3, HASS, SpecForge, SGLang, TensorRT-LLM and ModelOpt checkpoints, and speculators' (vLLM's own).
The draft vocabulary comes along. Writes a drafter folder. Recipes for the same target name it in eval.drafter or
drafter.init_from.
"""

import argparse
from pathlib import Path

from draftsmith.recipes.command.cli import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a folder, or a Hub id")
    parser.add_argument("--target", required=True, help="folder or Hub id of the target that it drafts for")
    parser.add_argument("--target-revision", help="branch, tag or commit of a target on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of a drafter on the Hub")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--allow-bin", action="store_true", help="read pytorch_model.bin with torch's weights_only reader"
    )
    parser.add_argument("--plan", action="store_true", help="check everything but the weights, and write nothing")
    arguments = parser.parse_args()
    from draftsmith.models.formats.commands import import_main

    import_main(arguments)


if __name__ == "__main__":
    run(main)
