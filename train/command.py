"""The command line of the scripts that train drafters: `train/eagle.py`, `train/eagle3.py`, `train/poss.py`."""

from argparse import ArgumentParser, ArgumentTypeError

from draftsmith.recipes.cli import parse_command
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.inputs import conversations, draft_vocab, need


def train(doc: str | None, kind: str) -> None:
    """Trains the drafter of the recipe on the command line.

    Args:
        doc: the script's docstring, its `--help`.
        kind: of the drafters that the script trains.
    """
    command = parse_command(doc, extra=_options)
    recipe = command.recipe
    if recipe.drafter.kind != kind:
        raise UserError(f"drafter.kind: {recipe.drafter.kind}, which train/{recipe.drafter.kind}.py trains")
    if not command.plan:
        need(conversations(recipe), draft_vocab(recipe))
    from draftsmith.train import trainer

    trainer.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--flops", type=float, metavar="TFLOPS", help="what one device reaches, in TFLOP/s, for the time in --plan"
    )
    parser.add_argument(
        "--profile", type=_count, metavar="N", help="trace N steps after a warm-up, into <output_dir>/profile"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of steps")
    return int(text)
