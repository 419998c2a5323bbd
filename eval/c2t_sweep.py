"""Measure what a C2T classifier saves: tau against candidates over beta, compared with EAGLE-2 over its tree sizes.

    python eval/c2t_sweep.py recipes/demo.yaml
    python eval/c2t_sweep.py recipes/demo.yaml --betas 0.3 0.5 0.7 --nodes 16 60          # a quick look
    python eval/c2t_sweep.py recipes/demo.yaml eval.answers=runs/demo/eval/generations.jsonl eval.tree.draft_calls=6
    python eval/c2t_sweep.py recipes/demo.yaml --plan                                     # what it would do

Both use the same drafter, top_k and draft_calls (15 and 10 unless eval.tree says otherwise, arXiv 2502.13652, section
4.2), so the trees differ only in the nodes kept. `--beams` adds curves with other widths of the second pruning (`all`:
without it). A width may name its betas (`--beams 15:0.05,0.1,0.3 all`), because a wider beam keeps far larger trees at
the same beta. Acceptance comes from replay (`eval.recorded.replay`): the target reads each recorded answer only once.

    tau          tokens per verification, the bonus token included; the paper's excludes it: one less
    candidates   the paper's gamma: verified nodes, roots included, summed over all rounds of all answers

The comparison at equal tau gives, for each of EAGLE-2's trees, the candidates that C2T needs for the same tau, as a
share of EAGLE-2's. It interpolates along C2T's curve (linear in tau and the logarithm of the candidates; never beyond
the curve's ends). Intervals are 95 %, from resampling conversations, for all points of all curves together.

Writes <eval.out>/c2t_sweep.json and c2t_sweep.png. Answers are eval.answers, or those of the last decoding in eval.out.
Use none that the classifier or the drafter was trained on.
"""

from argparse import ArgumentParser, ArgumentTypeError

from draftsmith.recipes.command.cli import parse_command, run


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    from draftsmith.eval.measured import c2t_curves

    c2t_curves.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--betas", nargs="+", type=float, help="C2T's thresholds; default: 0.02 to 0.9")
    parser.add_argument(
        "--nodes", nargs="+", type=int, help="sizes of EAGLE-2's trees; default: 4 to 300, as far as possible"
    )
    parser.add_argument("--contender", metavar="NAME", help="a contender under eval.also; default: eval.drafter")
    parser.add_argument(
        "--beams",
        nargs="+",
        type=_beam,
        metavar="K2[:BETAS]",
        help="beam widths: K2, or all; default: eval.tree.c2t.beam",
    )


def _beam(text: str) -> tuple[int | None, tuple[float, ...] | None]:
    """K2 (None: all), and betas of its own."""
    beam, _, betas = text.partition(":")
    try:
        own = tuple(float(beta) for beta in betas.split(",")) if betas else None
        return None if beam == "all" else int(beam), own
    except ValueError:
        raise ArgumentTypeError(f"{text}: give K2 or all, or with betas of its own 15:0.05,0.1,0.3") from None


if __name__ == "__main__":
    run(main)
