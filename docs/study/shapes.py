"""Which shapes of a small target are worth drafting for: costs of a round, with random weights.

    python -m docs.study.shapes                        # on a machine that does nothing else; 1 minute a shape
    python -m docs.study.shapes --shapes 8x256 24x192  # layers x width

Costs depend on shapes alone, so nothing is trained: a Llama of each shape, with the demo target's vocabulary and ratios
of widths, and an EAGLE-3 drafter for it. The planner's own measurement (eval/planner/cost_model.py) times real rounds
of the decoding loop. The last columns are what its formula then gives to a drafter of that tau.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaForCausalLM

from docs.study.make_demo_target import llama_config
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.planner.cost_model import Costs, family, measure_costs, shape_of
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import TreeSection

SHAPES = ((8, 256), (12, 256), (16, 256), (16, 192), (24, 192), (28, 192), (32, 192), (32, 128))  # layers, width
VOCAB = 1024
CONTEXT = 150
NODES = (5, 8, 16, 60)  # verified
CHAIN = TreeSection.model_validate({"policy": "chain", "nodes": 17})
TREE = TreeSection.model_validate({"policy": "eagle2", "nodes": 60, "draft_calls": 8, "top_k": 10})
# Of each drafter: its tree, nodes, draft calls, and a tau that the demo's drafters reach.
DRAFTERS = {"chain of 4, tau 2.3": (CHAIN, 5, 4, 2.3), "tree of 60, tau 3": (TREE, 60, 8, 3.0)}


def shape(text: str) -> tuple[int, int]:
    """(layers, width) of such words as 24x192. Raises ArgumentTypeError for others."""
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal() and int(layers) >= 7 and int(width) > 0 == int(width) % 64):
        raise argparse.ArgumentTypeError(f"{text}: give layers (7 or more) x width (a multiple of 64), as in 24x192")
    return int(layers), int(width)


def costs_of(model: Any) -> Costs:
    """The costs of rounds with this target and an EAGLE-3 drafter for it."""
    target = Target(model)
    vocab = DraftVocab.full(VOCAB)
    drafter = Eagle3Drafter(Eagle3Config.for_target(target.config, VOCAB, target.capture_layers, VOCAB), vocab).eval()
    texts = torch.randint(5, VOCAB, (4, CONTEXT), generator=torch.Generator().manual_seed(0)).tolist()

    def proposer_of(tree: TreeSection) -> PolicyProposer:
        return PolicyProposer(FeatureDrafting(drafter), policy_of(tree))

    return measure_costs(target, proposer_of, [CHAIN, TREE], texts, CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=shape, default=SHAPES, metavar="LAYERSxWIDTH", help="targets to measure"
    )
    options = parser.parse_args()
    verified = " | ".join(f"T_v({nodes}) / T_t" for nodes in NODES)
    print(f"| layers x width | MB in bfloat16 | T_t, ms | draft call / T_t | {verified} | {' | '.join(DRAFTERS)} |")
    print("|" + "---|" * (4 + len(NODES) + len(DRAFTERS)))
    for layers, width in options.shapes:
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_config(VOCAB, layers, width, width * 11 // 4)).eval()
        costs = costs_of(model)
        megabytes = 2e-6 * sum(each.numel() for each in model.parameters())
        call = float(costs.draft[family(CHAIN)]([16]).item()) / 16
        verify = [float(costs.verify["chain" if n <= CHAIN.most else "tree"]([n]).item()) / costs.plain for n in NODES]
        gains = []
        for tree, nodes, calls, tau in DRAFTERS.values():
            kind = shape_of(tree)
            parts = (costs.draft[family(tree)]([calls]), costs.verify[kind]([nodes]), costs.rest[kind]([nodes]))
            gains.append(tau * costs.plain / sum(float(part.item()) for part in parts))
        numbers = [f"{1e3 * costs.plain:.1f}", *(f"{each:.2f}" for each in [call / costs.plain, *verify, *gains])]
        note = " (busy)" if costs.busy else ""
        print(f"| {layers} x {width} | {megabytes:.1f} | {' | '.join(numbers)} |{note}", flush=True)


if __name__ == "__main__":
    main()
