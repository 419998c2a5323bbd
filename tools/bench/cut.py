"""What FR-Spec's cut saves of a draft call, by the size of the vocabulary and the width of the drafter.

    python tools/bench/cut.py
    python tools/bench/cut.py --hidden 4096 --vocab 128256 --device cuda --dtype bfloat16

A random EAGLE-3 drafter expands `--nodes` nodes at `--context` committed tokens, with its whole head and with cuts of
it, in turn; medians over `--repeats`. A call is everything from tokens to log-probabilities. What a cut costs of tau
only a trained drafter tells: `eval.tree.vocab_size`.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from draftsmith.models.draft_tree import Committed
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.onednn_linear import head_product
from draftsmith.models.prompt import DecoderInputs, PlacedInsert
from draftsmith.models.vocab import DraftVocab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--cuts", type=int, nargs="+", default=[65_536, 32_768, 16_384, 8_192])
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    torch.manual_seed(wanted.seed)
    drafter = random_drafter(wanted.hidden, wanted.vocab).to(wanted.device, getattr(torch, wanted.dtype))
    drafter.head_product = head_product(drafter.lm_head.weight)  # as `LoadedModels` gives it
    draftings = {"whole": FeatureDrafting(drafter)} | {
        f"{size:,}": FeatureDrafting(drafter, DraftVocab(torch.arange(size), wanted.vocab)) for size in wanted.cuts
    }
    features = torch.randn(
        1, wanted.context, drafter.fc.in_features, device=wanted.device, dtype=drafter.fc.weight.dtype
    )
    tokens = [column % wanted.vocab for column in range(wanted.context + 1)]
    target = Embeddings(torch.randn(wanted.vocab, wanted.hidden, dtype=features.dtype, device=wanted.device))
    fed = torch.arange(wanted.nodes, device=wanted.device)[None]
    seconds: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        for repeat in range(wanted.repeats + 2):  # the first two warm up
            for name, drafting in draftings.items():
                drafting.set_rows([], 1)
                drafting.observe(Committed(target, [tokens], features, [wanted.context]))
                _wait(wanted.device)
                began = time.perf_counter()
                drafting.expand(torch.zeros_like(fed), fed, 1)
                _wait(wanted.device)
                if repeat >= 2:
                    seconds[name].append(time.perf_counter() - began)
    whole = statistics.median(seconds["whole"])
    print(f"hidden {wanted.hidden}, {wanted.vocab:,} tokens, {wanted.nodes} nodes, {wanted.device}, {wanted.dtype}")
    print(f"{'tokens':>10}  {'ms a call':>9}  {'of the whole':>12}")
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{name:>10}  {1e3 * median:9.2f}  {median / whole:12.2f}")


class Embeddings:
    """A table of embeddings in a target's place."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def embed(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.table[ids].to(dtype or self.table.dtype)

    def inputs(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        inserts: Sequence[PlacedInsert] = (),
        dtype: torch.dtype | None = None,
    ) -> DecoderInputs:
        places = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        return DecoderInputs(self.embed(ids, dtype), places)


def random_drafter(hidden: int, vocab_size: int) -> Eagle3Drafter:
    """Llama-3's proportions: heads of 128, four query heads to a key head, an MLP of 3.5 times the width."""
    heads = max(1, hidden // 128)
    config = Eagle3Config(
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        capture_layers=(0, 1, 2),
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
    )
    drafter = Eagle3Drafter(config, DraftVocab.full(vocab_size))
    return drafter.requires_grad_(False)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
