"""Drafting over several rounds, rows side by side, and trees: every distribution is the one that a fresh chain has."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from draftsmith.models.draft_tree import Committed
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.layers import grouped_attention
from draftsmith.train.loss.unroll import unroll
from tests.drafter_cases import (
    CASES,
    STRUCTURES,
    VOCAB_SIZE,
    Case,
    chain_of,
    column_alone,
    drafter_of,
    embedder_of,
    inputs_of,
    make_rows,
    states_of,
)
from tests.thinning import pairwise


def drafted_steps(case: Case) -> int:
    """As many as reach every specialist, and one more."""
    own = case.own.get("positions_per_specialist", 1) * case.own.get("specialists", 1)
    return max(4, own + 1)


def unrolled(
    drafter: FeatureDrafter, captured_TF: torch.Tensor, text: Sequence[int], drafted: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities [1 + drafted, Vd] below the text's last token and behind each drafted one, by the unroll.

    States of the target are known of all but the text's last token.
    """
    ids = torch.tensor([[*text, *drafted]])
    captured = torch.full((1, ids.shape[1], captured_TF.shape[1]), 1e3)  # of what is drafted, no state is ever read
    captured[0, : len(text) - 1] = captured_TF[: len(text) - 1]
    steps = len(drafted) + 1
    with torch.no_grad():
        outputs = unroll(drafter, captured, inputs_of(drafter, ids), column_alone(len(text) - 2, steps), steps)
        return torch.cat([torch.log_softmax(drafter.logits(output[0]), -1) for output in outputs])


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 3) for name in STRUCTURES), ("eagle, two layers", 1), ("poss3-1", 1)]
)
def test_several_rounds(name: str, rows: int) -> None:
    """Roots advance by what was accepted, and every round's chain is the unroll of the text so far.

    What a round drafted differs from the text behind the accepted tokens, so that nothing of it may stay. Rows advance
    differently; after two rounds one of them drops out, and another text with a long beginning takes its place, beside
    which the others have hardly anything new.
    """
    drafter, chance = drafter_of(CASES[name]), random.Random(4)
    steps = drafted_steps(CASES[name])
    lengths = [44, 52, 37][:rows]
    ids, _ = make_rows(lengths)
    captured, _ = states_of(drafter, ids)
    texts, read = [row.tolist() for row in ids], [3, 9, 5][:rows]  # tokens of each text; those known, the root included
    drafting = FeatureDrafting(drafter)
    drafting.set_rows([], rows)
    new = [count - 1 for count in read]
    for _round in range(4):
        features = torch.full((len(texts), max(new), captured.shape[2]), 1e3)
        for i, (count, done) in enumerate(zip(new, read, strict=True)):
            features[i, :count] = captured[i, done - 1 - count : done - 1]
        committed = [text[:done] for text, done in zip(texts, read, strict=True)]
        drafting.observe(Committed(embedder_of(drafter), committed, features, new))
        accepted = [chance.randint(0, steps - 1) for _ in texts]
        drafts = [
            [*text[done : done + a], *(chance.randrange(VOCAB_SIZE) for _ in range(steps - 1 - a))]
            for text, done, a in zip(texts, read, accepted, strict=True)
        ]
        found = [drafting.root_log_probs()]
        for depth in range(1, steps):
            tokens = torch.tensor([[draft[depth - 1]] for draft in drafts])
            found.append(drafting.expand(torch.full((len(texts), 1), depth - 1), tokens, depth)[:, 0])
        for i, text in enumerate(committed):
            expected = unrolled(drafter, captured[i], text, drafts[i])
            torch.testing.assert_close(torch.stack([each[i] for each in found]), expected, atol=5e-5, rtol=5e-5)
        new = [a + 1 for a in accepted]
        read = [done + count for done, count in zip(read, new, strict=True)]
        if rows > 1 and _round == 1:
            drafting.set_rows([2, 0], 1)
            texts, captured = [texts[2], texts[0], texts[1]], captured[[2, 0, 1]]
            read, new = [read[2], read[0], 36], [new[2], new[0], 35]
            assert 2 * sum(new) < len(new) * max(new)


# Parents of the nodes of each depth, as indices into the depth above (one tree for each of two rows), and a tree whose
# beginning is a chain.
TREES = {
    "wide": [
        [[0, 0, 0], [0, 0, 0]],
        [[0, 0, 2, 1], [2, 2, 2, 0]],
        [[3, 1], [0, 3]],
        [[0, 1, 0], [1, 1, 0]],
        [[2, 0], [1, 2]],
        [[1, 0], [0, 0]],
        [[0], [1]],
    ],
    "a chain at first": [
        [[0], [0]],
        [[0], [0]],
        [[0, 0], [0, 0]],
        [[1, 0], [1, 1]],
        [[0], [1]],
        [[0, 0], [0, 0]],
        [[1], [0]],
    ],
    "calls of the same depth": [[[0], [0]], [[0, 0], [0, 0]], [[1, 0, 1], [0, 0, 0]], [[2, 2], [1, 0]]],
}


@pytest.mark.parametrize(("name", "tree", "rows"), pairwise(STRUCTURES, TREES, [1, 2]))
def test_a_trees_distributions_are_those_of_its_paths_as_chains(name: str, tree: str, rows: int) -> None:
    """Two rounds; the second one stands where the first one's tree stood."""
    drafter, chance = drafter_of(CASES[name]), random.Random(5)
    parents = TREES[tree][: drafted_steps(CASES[name])]
    ids, _ = make_rows([16, 13][:rows])
    captured, _ = states_of(drafter, ids)
    drafting = FeatureDrafting(drafter)
    drafting.set_rows([], rows)
    for done, new in (([6, 9], [5, 8]), ([8, 12], [2, 3])):
        features = torch.full((rows, max(new[:rows]), captured.shape[2]), 1e3)
        for i in range(rows):
            features[i, : new[i]] = captured[i, done[i] - 1 - new[i] : done[i] - 1]
        texts = [ids[i, : done[i]].tolist() for i in range(rows)]
        drafting.observe(Committed(embedder_of(drafter), texts, features, new[:rows]))
        found = {0: drafting.root_log_probs()}
        ways: list[dict[int, list[int]]] = [{0: [0]} for _ in texts]  # of each slot, the slots from the root to it
        said: list[dict[int, int]] = [{} for _ in texts]  # the token of each slot
        above, leaves, slots = [0], [set[int]() for _ in texts], 1
        for depth, chosen in enumerate(parents, start=1):
            new_slots = list(range(slots, slots + len(chosen[0])))
            for i in range(rows):
                for slot, parent in zip(new_slots, chosen[i], strict=False):
                    ways[i][slot] = [*ways[i][above[parent]], slot]
                    said[i][slot] = chance.randrange(VOCAB_SIZE)
                    leaves[i] = leaves[i] - {above[parent]} | {slot}
            # All nodes of a depth in one call, or each in its own.
            for call in [[slot] for slot in new_slots] if tree.startswith("calls") else [new_slots]:
                wanted = torch.tensor([[way[slot][-2] for slot in call] for way in ways])
                tokens = torch.tensor([[each[slot] for slot in call] for each in said])
                log_probs = drafting.expand(wanted, tokens, depth)
                found |= {slot: log_probs[:, place] for place, slot in enumerate(call)}
            above, slots = new_slots, slots + len(new_slots)
        for i, text in enumerate(texts):
            for leaf in leaves[i]:
                way = ways[i][leaf]
                mine = torch.stack([found[slot][i] for slot in way])
                path = [said[i][slot] for slot in way[1:]]
                _, chain = chain_of(drafter, captured[i], [*text, *path], len(text) - 2)
                torch.testing.assert_close(mine, torch.stack(chain), atol=5e-5, rtol=5e-5)


def test_attention_takes_what_a_gpu_s_kernel_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads innermost in memory, unlike a CPU's: no view of it has the shape of the heads."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 5), (2, 5)))
    mask = torch.ones(2, 3, 5, dtype=torch.bool).tril(2)
    attend = functional.scaled_dot_product_attention
    expected = attend(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), attn_mask=mask[:, None])
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *given, **more: attend(*given, **more).transpose(1, 2).contiguous().transpose(1, 2),
    )
    torch.testing.assert_close(grouped_attention(query, keys, values, mask), expected)
