"""What tests/train/test_processes.py runs as several processes: a shared-out target beside the whole one, in each.

torchrun --nproc_per_node 3 tests/sharded_ranks.py DIRECTORY DTYPE ...       pairs; prints one line from each rank
"""

import contextlib
import sys
from typing import Any

import torch
from torch import distributed

from draftsmith.models.alignment import Documents
from draftsmith.models.sizes import shared_out, target_size
from draftsmith.models.target import Target, tensor_digest
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run.sharded_target import ShardedTarget, load_sharded


def check(model: str, dtype: Any, rank: int, ranks: int) -> None:
    def held(target: Target) -> list[int]:
        """Elements of each layer's weights that are here, whole."""
        return [sum(p.numel() for p in layer.parameters()) for layer in target.layers]

    section = TargetSection(model=model, dtype=dtype, device="cpu")
    mine, whole = ShardedTarget(load_sharded(TargetFiles(section))), Target(TargetFiles(section).load_model())
    sizes = held(whole)
    assert held(mine) == [0] * len(sizes)

    # What drafters read is there, without any other process.
    assert tensor_digest(mine.embedding_table) == tensor_digest(whole.embedding_table)
    assert torch.equal(mine.head_weight, whole.head_weight)
    assert (mine.head_weight is mine.embedding_table) == (whole.head_weight is whole.embedding_table)
    assert mine.embedding_scale == whole.embedding_scale and mine.kinds == whole.kinds
    assert not any(p.requires_grad for p in mine.model.parameters())
    alone = torch.randn(3, mine.hidden_size).to(mine.dtype)
    assert torch.equal(mine.logits(alone), whole.logits(alone))

    # A layer's weights are whole while it runs, and no other's.
    seen: list[list[int]] = []
    watches = [layer.register_forward_pre_hook(lambda *_: seen.append(held(mine))) for layer in mine.layers]
    ids = torch.randint(5, 320, (2, 9), generator=torch.Generator().manual_seed(rank))  # of each rank others
    states = mine.states(ids)
    assert seen == [[size * (i == at) for i, size in enumerate(sizes)] for at in range(len(sizes))]
    for watch in watches:
        watch.remove()
    assert held(mine) == [0] * len(sizes)

    # The same states, whole or packed, captured as training and as replay capture them.
    wanted = whole.states(ids)
    assert torch.equal(states.last, wanted.last) and torch.equal(states.captured, wanted.captured)
    assert torch.equal(mine.captured_states(ids, (1, 3)), whole.captured_states(ids, (1, 3)))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), ((0, 0, 4), (0, 4, 5), (1, 0, 4), (1, 4, 5)))
    assert torch.equal(mine.states(ids, documents=documents).last, whole.states(ids, documents=documents).last)

    # Passes that one rank has more of than another, of both kinds; what is asked of all ranks comes between.
    for passes in (rank, 0, 2 * (rank == 1), ranks - rank):
        with mine.uneven_passes():
            for _ in range(passes):
                assert torch.equal(mine.states(ids).last, wanted.last)
                assert torch.equal(mine.captured_states(ids, (1, 3)), whole.captured_states(ids, (1, 3)))
        distributed.all_reduce(torch.zeros(()))
    assert torch.equal(mine.states(ids).last, wanted.last)

    # A pass that fails in all ranks leaves no layer behind.
    with contextlib.suppress(RuntimeError):
        mine.decoder(inputs_embeds=torch.zeros(1, 2, mine.hidden_size + 1, dtype=mine.dtype), use_cache=False)
        raise AssertionError("embeddings of another width were read")
    assert held(mine) == [0] * len(sizes)
    assert torch.equal(mine.states(ids).last, wanted.last)

    # What --plan says of it: pieces are padded to the same length on every rank.
    size = target_size(mine.model.config, section)
    rest = sum(p.nbytes for p in mine.model.parameters() if not hasattr(p, "ds_tensor"))
    planned = shared_out(size, ranks).weight_bytes - max(size.layer_parameters) * mine.dtype.itemsize
    padding = len(list(mine.layers.parameters())) * mine.dtype.itemsize
    assert planned <= mine.piece_bytes + rest <= planned + padding
    assert mine.piece_bytes + rest < size.weight_bytes


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for model, dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(model, dtype, rank, ranks)
    print(f"rank {rank} of {ranks} has seen it all")
    distributed.barrier()
    distributed.destroy_process_group()
