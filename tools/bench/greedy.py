"""One greedy answer by the decoding loop. Benches run as scripts, so they cannot import `tests`."""

from collections.abc import Collection, Sequence

import torch

from draftsmith.eval.decoding import decode as loop
from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Generation, TargetVerifier
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.sampling import GREEDY
from draftsmith.models.target import Target


@torch.inference_mode()
def greedy_answer(
    target: Target, proposer: Proposer | None, prompt: Sequence[int], stop_ids: Collection[int], max_new_tokens: int
) -> Generation:
    verifier = TargetVerifier(target, proposer, acceptance_of(GREEDY))
    return loop.decode(verifier, proposer, [prompt], stop_ids, max_new_tokens)[0]
