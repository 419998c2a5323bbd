"""ViSpec: pictures as compressed tokens and a global vector, against the slow twin, the text base and the decoder."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.checkpoint import read_drafter, save_drafter
from draftsmith.models.draft_tree import Committed
from draftsmith.models.drafters import build_drafter, config_class
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.prompt import DecoderInputs, EmbeddingInsert, Prompt
from draftsmith.models.vispec import VisionDrafter
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.train.loss.unroll import UnrollSums, teacher_of, unroll
from draftsmith.train.run.batches import MicroBatch, collate
from draftsmith.train.run.initial_drafter import start_from
from tests.decoding import decode, decode_batch
from tests.drafter_cases import (
    EAGLE,
    EAGLE3,
    HASS,
    VOCAB_SIZE,
    Case,
    assert_same_gradients,
    column_alone,
    drafter_of,
    embedder_of,
    gradients,
    small_target,
    trainee_of,
)
from tests.slow_drafters import SlowVispec, slow_loss
from tests.thinning import a_few, thinned

ONE_EACH = {"positions_per_specialist": 1, "specialists": 2}
TWO_EACH = {"positions_per_specialist": 2, "specialists": 2}
EYES: dict[str, tuple[str, dict[str, Any], int, Any, Any]] = {  # base, own, steps, detached, losses
    "one token": ("eagle", {"compressed_tokens": 1}, 3, True, HASS),
    "three tokens": ("eagle", {"compressed_tokens": 3, "attention_bias": True}, 2, False, HASS),
    "none": ("eagle", {"compressed_tokens": 0, "fc_bias": False}, 2, True, HASS),
    "two layers": ("eagle", {"compressed_tokens": 2, "num_layers": 2}, 2, False, HASS),
    "over eagle3": ("eagle3", {"compressed_tokens": 2, "fc_norm": True}, 3, False, EAGLE3),
    "over eagle3, none": ("eagle3", {"compressed_tokens": 0, "norm_output": True}, 2, False, EAGLE3),
    "over eagle3, two layers": ("eagle3", {"num_layers": 2, "attention_bias": True}, 2, False, EAGLE3),
    "specialists": ("eagle", {"compressed_tokens": 2, **ONE_EACH}, 3, "specialists", EAGLE),
    "over eagle3, specialists": ("eagle3", TWO_EACH | {"norm_output": True}, 3, False, EAGLE3),
}
CASES = {name: Case("vispec", *case) for name, case in EYES.items()}
for name in ("over eagle3", "over eagle3, specialists"):
    CASES[name] = replace(CASES[name], step_weight=0.8, draft_tokens=36)
each_case = pytest.mark.parametrize("name", a_few(CASES, "three tokens", "two layers", "over eagle3", "specialists"))
PLACEHOLDER = 1
# Of each text: its tokens, and (first, tokens) of its pictures. Two of them touch; one begins its text; one has fewer
# columns than three compressed tokens; one text has none.
TEXTS = [(14, [(2, 4)]), (17, [(0, 5), (5, 3), (10, 2)]), (9, []), (12, [(1, 1), (4, 3)])]
ANSWER = 4  # supervised tokens at each text's end


def drafter_with_eyes(name: str) -> VisionDrafter:
    """Weights that read pictures: those at the start do not."""
    drafter = drafter_of(CASES[name])
    assert isinstance(drafter, VisionDrafter)
    with torch.no_grad():
        for key, parameter in drafter.named_parameters():
            if key.startswith("img_"):
                parameter += 0.2 * torch.randn_like(parameter)
        drafter.img_adaptor.query.mul_(3)
    return drafter


def make_prompts(texts: Sequence[tuple[int, Sequence[tuple[int, int]]]] = TEXTS, seed: int = 3) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length, pictures in texts:
        ids = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        inserts = []
        for first, tokens in pictures:
            ids[first : first + tokens] = [PLACEHOLDER] * tokens
            rows = torch.randn(tokens, small_target().hidden_size, generator=generator)
            inserts.append(EmbeddingInsert(first, rows))
        prompts.append(Prompt(ids, tuple(inserts)))
    return prompts


def laid_out(prompts: Sequence[Prompt], packed: bool) -> MicroBatch:
    """One prompt a row, or all in one."""
    rows = [TrainingRow("", list(each), [(len(each) - ANSWER, len(each))], inserts=each.inserts) for each in prompts]
    return collate(rows, packed)


def states_of(
    drafter: FeatureDrafter, prompts: Sequence[Prompt], packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = laid_out(prompts, packed)
    states = small_target().states(batch.ids, drafter.config.capture_layers, batch.documents, batch.inserts)
    return states.captured, states.last


def inputs_of(drafter: FeatureDrafter, prompts: Sequence[Prompt], packed: bool = False) -> DecoderInputs:
    batch = laid_out(prompts, packed)
    return embedder_of(drafter).inputs(batch.ids, batch.position if packed else None, batch.inserts, drafter.dtype)


def sums_of(name: str, drafter: FeatureDrafter, prompts: Sequence[Prompt], packed: bool, **how: bool) -> UnrollSums:
    case, bf16 = CASES[name], how.pop("bf16", False)
    batch = laid_out(prompts, packed)
    captured, last = states_of(drafter, prompts, packed)
    columns = columns_of(batch.span, case.steps)
    teacher = teacher_of(small_target(), last, batch.ids, columns, drafter.vocab)
    trainee = trainee_of(case, drafter, **how)
    trainee.bf16 = bf16
    return trainee(captured.to(drafter.dtype), inputs_of(drafter, prompts, packed), columns, teacher, batch.documents)


KEY_BIAS = "img_adaptor.k_proj.bias"


def without_key_bias(drafter: FeatureDrafter) -> dict[str, torch.Tensor]:
    """Gradients but that of the keys' bias, which is rounding: it adds the same to all of a query's scores."""
    found = gradients(drafter)
    if KEY_BIAS in found:
        assert float(found.pop(KEY_BIAS).abs().max()) < 1e-5
    return found


@pytest.mark.parametrize("name", a_few(CASES, "over eagle3"))
def test_the_loss_is_that_of_the_slow_twin_in_value_and_gradient(name: str) -> None:
    """Several rows, several pictures each; the tolerance is that of tests/train/test_unroll.py."""
    case, target, drafter = CASES[name], small_target(), drafter_with_eyes(name).double()
    prompts = make_prompts()
    sums = sums_of(name, drafter, prompts, packed=False)
    sums.loss.backward()

    weights = {key: p.detach().clone().requires_grad_() for key, p in drafter.named_parameters()}
    table, head = target.embedding_table.detach().double(), target.head_weight.detach().double()
    slow = SlowVispec(weights, table, head, drafter.config)
    batch = laid_out(prompts, packed=False)
    ids, span = batch.ids.tolist(), batch.span.tolist()
    slow.pictures = {
        tuple(row): [(each.first, target.read_insert(each).double()) for each in prompt.inserts]
        for row, prompt in zip(ids, prompts, strict=True)
    }
    captured, last = (each.double() for each in states_of(drafter, prompts, packed=False))
    chosen = drafter.vocab.target_ids.tolist()
    trainee = trainee_of(case, drafter)
    loss, reached, trained, correct = slow_loss(
        slow, list(captured), list(last @ head.T), list(last), ids, span, chosen, trainee
    )
    loss.backward()
    assert [sums.reached.tolist(), sums.trained.tolist(), sums.correct.tolist()] == [reached, trained, correct]
    assert min(trained) > 0
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=1e-5)
    found = {key: weight.grad for key, weight in weights.items() if weight.grad is not None}
    assert {"img_adaptor.query", "img_fc.weight"} <= found.keys()
    assert_same_gradients(without_key_bias(drafter), {key: found[key] for key in found if key != KEY_BIAS})


@each_case
def test_packed_rows_teach_as_padded_ones(name: str) -> None:
    drafter, found = drafter_with_eyes(name), []
    for packed in (False, True):
        sums = sums_of(name, drafter, make_prompts(), packed)
        sums.loss.backward()
        found.append((sums.loss, sums.correct.tolist(), without_key_bias(drafter)))
    (loss, correct, its), (packed_loss, packed_correct, others) = found
    torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=1e-5)
    assert packed_correct == correct
    assert_same_gradients(others, its, tolerance=5e-5)


def test_checkpointed_steps_and_bfloat16_teach_the_same() -> None:
    """To the bit; and up to the rounding of products, 2^-9, through a layer and a few steps."""
    drafter, found = drafter_with_eyes("three tokens"), []
    for how in ({}, {"checkpointing": True}, {"bf16": True}):
        sums_of("three tokens", drafter, make_prompts(), True, **how).loss.backward()
        found.append(gradients(drafter))
    whole, again, rounded = found
    for key, expected in whole.items():
        assert torch.equal(again[key], expected) and rounded[key].dtype == torch.float32, key
        if key != KEY_BIAS:
            assert 0 < (rounded[key] - expected).norm() <= 0.05 * expected.norm(), key


def committed(drafter: FeatureDrafter, prompts: Sequence[Prompt], before: list[int], read: list[int]) -> Committed:
    """Positions before[b] to read[b] - 1 of each row, the token behind them the root."""
    captured, _ = states_of(drafter, prompts)
    rows = [captured[row, start:end] for row, (start, end) in enumerate(zip(before, read, strict=True))]
    features = pad_sequence(rows, batch_first=True, padding_value=1e3)
    tokens = [list(prompt.token_ids[: end + 1]) for prompt, end in zip(prompts, read, strict=True)]
    return Committed(embedder_of(drafter), tokens, features, [len(row) for row in rows], prompts)


@each_case
def test_decoding_drafts_what_the_unroll_drafts(name: str) -> None:
    """Whole prompts at once and in portions, also ones that cut a picture, after a rollback, and beside other rows."""
    drafter = drafter_with_eyes(name)
    prompts, steps = make_prompts(), 3
    ends = [len(prompt) - 1 - steps for prompt in prompts]
    captured, _ = states_of(drafter, prompts)
    expected = []
    with torch.no_grad():
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
            states = captured[row : row + 1, : len(prompt)].clone()
            states[:, end:] = 1e3  # of what is drafted, no state is ever read
            outputs = unroll(drafter, states, inputs_of(drafter, [prompt]), column_alone(end - 1, steps), steps)
            expected.append(torch.stack([torch.log_softmax(drafter.logits(output[0, 0]), -1) for output in outputs]))
    drafting, every = FeatureDrafting(drafter), list(range(len(prompts)))

    def check(order: Sequence[int], begin: list[int]) -> None:
        """Goes on with these rows behind so many positions."""
        drafting.rollback(begin)
        read = [ends[i] for i in order]
        drafting.observe(committed(drafter, [prompts[i] for i in order], begin, read))
        found = [drafting.root_log_probs()]
        for depth in range(1, steps):
            tokens = torch.tensor([[prompts[i][ends[i] + depth]] for i in order])
            found.append(drafting.expand(torch.full((len(order), 1), depth - 1), tokens, depth)[:, 0])
        for place, i in enumerate(order):
            mine = torch.stack([each[place] for each in found])
            torch.testing.assert_close(mine, expected[i], atol=5e-5, rtol=5e-5)

    drafting.set_rows([], len(prompts))
    check(every, [0] * len(prompts))
    for kept in (3, 1, 2):  # positions; the next token is the picture's first one, in it, or behind it
        check(every, [min(kept + row, end - 1) for row, end in enumerate(ends)])
    drafting.set_rows([3, 2], 1)
    check([3, 2, 0], [ends[3] - 1, ends[2] - 1, 0])


@pytest.mark.parametrize("base", ["eagle", "eagle3"])
def test_at_the_start_it_is_the_text_base(base: str) -> None:
    """To the bit: on text; and with pictures but no compressed tokens, on the columns that remain."""
    own = {"compressed_tokens": 0, "global_vector": True}
    case = Case("vispec", base, own, 3, False, EAGLE3)
    drafter = drafter_of(case)
    assert isinstance(drafter, VisionDrafter)
    text = build_drafter(
        config_class(base)(**{k: v for k, v in drafter.config.to_dict().items() if k not in own}),  # type: ignore[misc]
        drafter.vocab,
        small_target().frozen_head,
    )
    text.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("img_")})
    picture, plain = make_prompts([(14, [(2, 4)]), (14, [])])
    span = torch.zeros(1, 14, dtype=torch.long)
    span[0, 9:] = 1
    columns = columns_of(span, 3)
    for grad in (False, True):  # with gradients, the idle adaptor takes part
        captured, inputs = states_of(drafter, [plain])[0], inputs_of(drafter, [plain])
        with torch.set_grad_enabled(grad):
            found, wanted = (unroll(each, captured, inputs, columns, 3) for each in (drafter, text))
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    # The picture's columns 1 to 4 are gone: column 5 follows on column 0, and token 6 on token 1.
    captured, inputs = states_of(drafter, [picture])[0], inputs_of(drafter, [picture])
    states, tokens = [0, *range(5, 14)], [0, 1, *range(6, 14)]
    cut = DecoderInputs(inputs.embeddings[:, tokens], inputs.positions[:, states])
    with torch.no_grad():
        found = list(unroll(drafter, captured, inputs, columns, 3))
        left = Columns((columns.index - 4).clamp(min=0), columns.depth)
        wanted = list(unroll(text, captured[:, states], cut, left, 3))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        drafter.img_fc.weight[:, small_target().hidden_size :].add_(0.1)
        assert not torch.equal(next(iter(unroll(drafter, captured, inputs, columns, 1))), found[0])


@pytest.mark.parametrize(("base", "given"), thinned(["eagle", "eagle3"], ["single", "poss", "vispec"]))
def test_with_specialists_it_starts_from_each_part_of_it(given: str, base: str, tmp_path: Path) -> None:
    """From one layer, from specialists that read text, and from one layer that sees. Through files."""
    identity = {"num_layers": small_target().num_layers}
    eyes, many = {"compressed_tokens": 3}, {"positions_per_specialist": 1, "specialists": 2}
    starts = {"single": (base, None, {}), "poss": ("poss", base, many), "vispec": ("vispec", base, eyes)}
    kind, its_base, own = starts[given]
    start = drafter_of(Case(kind, its_base, own, 2, False, EAGLE3), seed=7)
    save_drafter(tmp_path / "start", start, identity, "", {})
    again, its = read_drafter(tmp_path / "start", small_target().frozen_head), start.state_dict()
    assert again.config == start.config
    assert all(torch.equal(again.state_dict()[key], value) for key, value in its.items())
    drafter = drafter_of(Case("vispec", base, eyes | many, 2, False, EAGLE3))
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    start_from(tmp_path / "start", drafter, identity)
    first = ("midlayer.", "layers.0.")[base == "eagle"]
    for key, value in drafter.state_dict().items():
        if key.startswith("specialists.") and given != "poss":
            wanted = its[first + key.split(".", 2)[2]]
        else:
            wanted = before[key] if key.startswith("img_") and given != "vispec" else its[key]
        assert torch.equal(value, wanted), key
    if own:
        other = drafter_of(Case("vispec", base, {"specialists": 3, "compressed_tokens": 2}, 2, False, EAGLE3))
        with pytest.raises(UserError, match="specialists is 2 there, 3" if given == "poss" else "tokens is 3 there, 2"):
            start_from(tmp_path / "start", other, identity)


@pytest.mark.parametrize("name", a_few(["one token", "over eagle3", "over eagle3, specialists"], "over eagle3"))
def test_decoding_with_pictures_is_lossless(name: str) -> None:
    """Rows with pictures beside one without: the target's own tokens, whatever the drafter says. Replay likewise."""
    drafter, target, prompts = drafter_with_eyes(name), small_target(), make_prompts()
    rounded = deepcopy(drafter)
    rounded.round_weights(torch.bfloat16)  # as on a GPU
    policy = policy_of(TreeSection(nodes=12, draft_calls=3, top_k=4))
    plain = [decode(target, None, prompt, {-1}, 12).token_ids for prompt in prompts]
    recorded = [RecordedAnswer(prompt, tokens) for prompt, tokens in zip(prompts, plain, strict=True)]
    for each in (drafter, rounded):
        proposer = PolicyProposer(FeatureDrafting(each), policy)
        drafted = decode_batch(target, proposer, prompts, {-1}, 12)
        assert [answer.token_ids for answer in drafted] == plain
        accepted = [answer.accepted_per_round for answer in drafted]
        assert sum(map(sum, accepted)) > 2
        assert [answer.accepted_per_round for answer in replay(target, proposer, recorded, 2)] == accepted
    other = make_prompts(seed=5)[0]
    assert decode(target, None, Prompt(prompts[0].token_ids, other.inserts), {-1}, 12).token_ids != plain[0]
