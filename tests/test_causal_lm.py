"""A small causal LM as a drafter: its cache stays right whatever the target accepts."""

import random

import pytest
import torch

from draftsmith.eval.decoding.policies import Chain, PolicyProposer
from draftsmith.models.causal_lm import CausalLMDrafting, check_vocabulary, load_draft_model
from draftsmith.models.draft_tree import Committed
from draftsmith.models.key_values import SlotTree
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from tests import reference
from tests.conftest import make_target
from tests.decoding import decode_batch
from tests.thinning import pairwise

SHAPES = [[3, 4, 2], [1, 1, 1, 1], [1, 2, 1], [2, 1, 1, 3]]  # new slots of each depth


def small_lm(family: str = "llama", num_layers: int = 2, seed: int = 11, **overrides) -> Target:
    return Target(make_target(family, num_layers, seed, **overrides), capture_layers=(0,))


@pytest.mark.parametrize(
    ("family", "lengths", "cut"), pairwise(["llama", "qwen3", "gemma3_text"], [(9,), (5, 17, 1)], [None, 50])
)
def test_log_probs_equal_a_plain_forward_over_every_path(
    family: str, lengths: tuple[int, ...], cut: int | None
) -> None:
    """Random trees, of which a random path is accepted, round after round; rows end, others go on.

    Some accepted tokens were drafted, some were not, some rounds drafted nothing.
    """
    settings = (
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]} if "gemma" in family else {}
    )
    lm = small_lm(family, **settings)
    chance = random.Random(7)
    vocab = None
    if cut is not None:
        vocab = DraftVocab(torch.tensor(sorted(chance.sample(range(320), cut))), 320)
    drafting = CausalLMDrafting(lm, vocab)

    def same(ours: torch.Tensor, path: list[int]) -> None:
        # Float32 against float32: masked and in one go against alone.
        expected = reference.log_probs_after(lm.model, path, None if vocab is None else vocab.target_ids.tolist())
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-5)

    committed = [[chance.randrange(5, 320) for _ in range(length)] for length in lengths]
    drafting.set_rows([], len(committed))
    fed: list[int] = []
    most_missing = 0
    lm.decoder.register_forward_pre_hook(
        lambda _module, _args, inputs: fed.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    for round_number in range(9):
        fed.clear()
        drafting.observe(Committed(lm, committed, None, []))
        if round_number:
            assert fed == [most_missing], "drafted tokens that were accepted are fed again"
        for row, path in enumerate(committed):
            same(drafting.root_log_probs()[row], path)
        # paths[row][slot] is the text up to that slot; few tokens, so that siblings repeat some.
        paths: list[list[list[int]]] = [[list(path)] for path in committed]
        levels = [list(range(1))] * len(committed)
        for depth, count in enumerate(SHAPES[round_number % 4] if round_number != 5 else [], start=1):
            parents = [[chance.choice(level) for _ in range(count)] for level in levels]
            tokens = [[chance.randrange(5, 12) for _ in range(count)] for _ in levels]
            log_probs = drafting.expand(torch.tensor(parents), torch.tensor(tokens), depth)
            for row, known in enumerate(paths):
                first = len(known)
                known += [[*known[p], t] for p, t in zip(parents[row], tokens[row], strict=True)]
                levels[row] = list(range(first, first + count))
                for i in range(count):
                    same(log_probs[row, i], known[first + i])
        missing: list[int] = []
        for row, known in enumerate(paths):
            begin, accepted = len(committed[row]), list(chance.choice(known))
            # Without a token of its own, the new root is a drafted one.
            fewest = 1 if len(accepted) == begin else 0
            also = [chance.randrange(5, 320) for _ in range(chance.randrange(fewest, 3))]
            committed[row] = [*accepted, *also]
            # What stands in no slot must be fed, and the last token in any case.
            drafted = {tuple(path) for path in known}
            held = begin
            while tuple(committed[row][: held + 1]) in drafted and held + 1 < len(committed[row]):
                held += 1
            missing.append(len(committed[row]) - held)
        if round_number == 4 and len(committed) > 1:
            going = [2, 0]
            drafting.set_rows(going)
            committed = [committed[row] for row in going]
            missing = [missing[row] for row in going]
        most_missing = max(missing)


@pytest.mark.parametrize("counts", [[1, 1, 3, 1], [2, 5, 1], [1, 1, 1], [150, 1]])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafted_slots_see_their_ancestors_and_themselves(rows: int, counts: list[int]) -> None:
    chance = random.Random(2)
    slots = SlotTree(rows, torch.device("cpu"), capacity=4)
    lines: list[list[set[int]]] = [[set()] for _ in range(rows)]  # of each row and slot: its ancestors and itself
    levels = [[0]] * rows
    for depth, count in enumerate(counts, start=1):
        parents = [[chance.choice(level) for _ in range(count)] for level in levels]
        seen = slots.extend(torch.tensor(parents), depth)
        for row, line in enumerate(lines):
            levels[row] = list(range(len(line), len(line) + count))
            line += [line[parent] | {slot} for parent, slot in zip(parents[row], levels[row], strict=True)]
        if seen is None:
            assert all(line[-1] == set(range(1, len(line))) for line in lines)
        else:
            assert seen.shape == (rows, count, slots.count)
            assert [[set((s.nonzero().flatten() + 1).tolist()) for s in row] for row in seen] == [
                line[-count:] for line in lines
            ]


def test_learned_positions_end_and_drafting_does_not_fall_over_their_edge() -> None:
    """The target's answer fills its 32 positions; the small LM has as many, and drafts beyond them."""
    target, small = Target(make_target(max_position_embeddings=32)), small_lm("gpt2", max_position_embeddings=32)
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14]]
    for proposer in (PolicyProposer(CausalLMDrafting(small), Chain(6)), None):
        answers = decode_batch(target, proposer, prompts, {-1}, 27)
        assert [len(prompt + out.token_ids) for prompt, out in zip(prompts, answers, strict=True)] == [30, 32]


def test_another_vocabulary_is_refused() -> None:
    target, small = Target(make_target()), small_lm(vocab_size=300)
    with pytest.raises(UserError, match=r"300 tokens.* 320"):
        check_vocabulary(small, target)
    with pytest.raises(UserError, match=r"300 tokens.* 320"):
        CausalLMDrafting(small, DraftVocab(torch.arange(5), 320))
    check_vocabulary(small_lm(), target)


def test_loading_takes_any_number_of_layers(tmp_path) -> None:
    """EAGLE-3's default capture layers, which small models are too shallow for, are not asked for."""
    make_target(num_layers=1).save_pretrained(tmp_path)
    small = load_draft_model(TargetFiles(TargetSection(model=str(tmp_path), dtype="float32", device="cpu")))
    assert small.num_layers == 1 and small.vocab_size == 320
    with pytest.raises(UserError, match=r"^draft_model\.model"):
        load_draft_model(TargetFiles(TargetSection(model=str(tmp_path / "nothing"))))
