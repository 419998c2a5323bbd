"""The unroll is chain drafting, for every kind of drafter, and equals its slow twin. Every parameter is trained.
Neither checkpointing nor how documents are laid out in rows changes anything.
"""

from dataclasses import replace

import pytest
import torch

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.alignment import columns_of
from draftsmith.models.layers import GatedMLP, RmsNorm, rotary
from draftsmith.models.prompt import DecoderInputs
from draftsmith.train.attention.kernels import BLOCKS, FLASH_CPU, Kernel
from draftsmith.train.loss.head_loss import Teacher
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, add_noise, kernel_of, teacher_of, unroll
from draftsmith.train.run.batches import MicroBatch, collate, collate_as
from tests.drafter_cases import (
    CASES,
    SPECIALISTS,
    STRUCTURES,
    VOCAB_SIZE,
    assert_same_gradients,
    chain_of,
    drafter_of,
    gradients,
    inputs_of,
    make_rows,
    small_target,
    states_of,
    sums_of,
    trainee_of,
)
from tests.slow_drafters import SlowDrafter, slow_loss
from tests.thinning import a_few, pairwise

# What is summed over a batch depends on the losses and on the weights of steps, too. Noise is drawn for a row.
LESSONS = ["hass", "eagle, log acceptance", "eagle3, hybrid and rank"]
LAID_OUT = [*((name, False) for name in STRUCTURES + LESSONS), ("hass", True), ("eagle3.1", True)]


@pytest.mark.parametrize("name", STRUCTURES)
def test_unroll_equals_drafting_a_chain_with_a_cache(name: str) -> None:
    """At every step and column: the same outputs as the decoder's cache, whose prefix comes from target states."""
    case, drafter = CASES[name], drafter_of(CASES[name])
    steps = max(case.steps, 4)
    ids, span = make_rows([19, 12])
    columns = columns_of(span, steps)
    captured, _ = states_of(drafter, ids)
    compared = 0
    with torch.no_grad():
        outputs = list(unroll(drafter, captured, inputs_of(drafter, ids), columns, steps))
        for b, c in columns.counted(0).nonzero().tolist():
            t, depth = int(columns.index[b, c]), int(columns.depth[b, c])
            drafting, log_probs = chain_of(drafter, captured[b], ids[b, : t + 1 + depth].tolist(), t)
            assert len(log_probs) == depth
            for step in range(depth):
                torch.testing.assert_close(drafting.outputs[0, step], outputs[step][b, c], atol=2e-5, rtol=2e-5)
                expected = torch.log_softmax(drafter.logits(outputs[step][b, c]), -1)
                torch.testing.assert_close(log_probs[step], expected, atol=5e-5, rtol=5e-5)
                compared += 1
    assert compared == int(columns.depth.sum()) > 40
    assert int(columns.depth.max()) == steps


@pytest.mark.parametrize("name", a_few(CASES, *STRUCTURES[::2], "eagle3, hybrid and rank", marks=pytest.mark.slow))
def test_unroll_equals_the_slow_twin_in_value_and_gradient(name: str) -> None:
    """The whole loss in float64, column by column from the definition, against the batched one.

    The product has rotary tables, the teacher and the distance of features in float32, whatever the weights'
    precision: hence the tolerance.
    """
    case, target = CASES[name], small_target()
    drafter = drafter_of(case).double()
    lengths = [15, 11] if case.steps > 4 else [10, 8]  # the twin takes its time
    ids, span = make_rows([19, 11] if case.steps > 7 else lengths)  # a span of as many steps
    captured, last = states_of(drafter, ids)
    captured, last = captured.double(), last.double()
    columns = columns_of(span, case.steps)
    trainee = trainee_of(case, drafter)
    teacher = teacher_of(target, last.float(), ids, columns, drafter.vocab)
    sums = trainee(captured, inputs_of(drafter, ids), columns, teacher)
    sums.loss.backward()

    weights = {key: p.detach().clone().requires_grad_() for key, p in drafter.named_parameters()}
    table, head = target.embedding_table.detach().double(), target.head_weight.detach().double()
    slow = SlowDrafter(weights, table, head, drafter.config)
    states, chosen = (list(captured), list(last @ head.T), list(last)), drafter.vocab.target_ids.tolist()
    loss, reached, trained, correct = slow_loss(slow, *states, ids.tolist(), span.tolist(), chosen, trainee)
    loss.backward()
    assert int(sums.columns) == int((columns.depth > 0).sum())  # what the loss is divided by
    assert (sums.reached.tolist(), sums.trained.tolist(), sums.correct.tolist()) == (reached, trained, correct)
    assert min(reached) > 0
    if case.draft_tokens is not None:  # some likeliest tokens are outside the draft vocabulary, most inside
        assert 0 < sum(trained) < sum(reached) < int(columns.depth.sum())
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=1e-5)
    found = {key: weight.grad for key, weight in weights.items() if weight.grad is not None}
    assert_same_gradients(gradients(drafter), found)


@pytest.mark.parametrize("name", STRUCTURES + LESSONS)
def test_every_parameter_is_trained_with_and_without_checkpointing(name: str) -> None:
    case, drafter = CASES[name], drafter_of(CASES[name])
    ids, span = make_rows([20, 16])
    sums_of(trainee_of(case, drafter), ids, span).loss.backward()
    plain = gradients(drafter)
    assert set(plain) == {key for key, _ in drafter.named_parameters()}
    # A bias of the keys adds the same to all scores but for the turn of its rotation: small, not nothing.
    assert all(gradient.abs().max() > 1e-6 for gradient in plain.values())
    sums_of(trainee_of(case, drafter, checkpointing=True), ids, span).loss.backward()
    assert_same_gradients(gradients(drafter), plain, tolerance=1e-6)


@pytest.mark.parametrize("name", SPECIALISTS)
def test_a_specialist_that_no_step_reaches_gets_no_gradient(name: str) -> None:
    case, drafter = CASES[name], drafter_of(CASES[name])
    ids, span = make_rows([20, 16])
    trainee = trainee_of(case, drafter)
    trainee.steps = drafter.positions_per_stack
    sums_of(trainee, ids, span).loss.backward()
    assert {key.split(".")[1] for key in gradients(drafter) if key.startswith("specialists")} == {"0"}


# Documents that share a row. Three of two turns each; one in which a single column counts, one in which none does.
DOCUMENTS = [27, 21, 14]


def training_rows(seed: int = 2) -> list[TrainingRow]:
    ids, span = make_rows(DOCUMENTS, seed)
    rows = [TrainingRow(str(b), ids[b, :n].tolist(), [(2, n // 3), (n // 3 + 2, n)]) for b, n in enumerate(DOCUMENTS)]
    assert all(span[b, start:end].min() > 0 for b, row in enumerate(rows) for start, end in row.spans)
    tokens = torch.randint(1, VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    # The first begins with a span; behind the second nothing counts. Neighbours' spans touch.
    return [*rows, TrainingRow("3", tokens[:3], [(0, 3)]), TrainingRow("4", tokens[3:], [(2, 3)])]


LAYOUTS = {
    "padded": [[0], [1], [2], [3], [4]],
    "packed": [[0, 1, 2, 3, 4]],
    "packed in another order": [[3, 2, 4, 0, 1]],
    "some packed, some padded": [[4, 1], [0], [2, 3]],
    "a row in which nothing counts": [[4], [2, 0, 3, 1]],
}


def sums_of_batch(trainee: TrainingTimeTest, batch: MicroBatch, noisy: bool = False) -> UnrollSums:
    """As the loop does it."""
    target, drafter = small_target(), trainee.drafter
    states = target.states(batch.ids, drafter.config.capture_layers, batch.documents)
    columns = columns_of(batch.span, trainee.steps)
    teacher = teacher_of(target, states.last, batch.ids, columns, drafter.vocab)
    captured = states.captured
    if noisy:
        draws = [f"0/0/{row}" for row in batch.rows]
        captured = add_noise(captured, 0.2, batch.lengths, draws, batch.documents)
    return trainee(captured, inputs_of(drafter, batch.ids, batch.documents), columns, teacher, batch.documents)


def tallies(sums: UnrollSums) -> torch.Tensor:
    return torch.cat((sums.columns[None], sums.reached, sums.correct, sums.trained)).long()


@pytest.mark.parametrize(
    ("name", "noisy"), a_few(LAID_OUT, *LAID_OUT[:8:3], ("eagle3.1", True), marks=pytest.mark.slow)
)
def test_any_layout_gives_the_loss_and_gradient_of_one_document_at_a_time(name: str, noisy: bool) -> None:
    """Within what float32 makes of sums in another order: a millionth or so of the largest, ten times that allowed.
    Noise makes the softmax peaked, and its gradient a difference of numbers far larger: a hundred thousandth.
    """
    case, drafter = CASES[name], drafter_of(CASES[name])
    trainee, rows = trainee_of(case, drafter), training_rows()
    alone = [sums_of_batch(trainee, collate([row], indices=[i]), noisy) for i, row in enumerate(rows)]
    for sums in alone:
        sums.loss.backward()
    loss = torch.stack([sums.loss.detach() for sums in alone]).sum()
    expected_tallies = torch.stack([*map(tallies, alone)]).sum(0)
    expected = gradients(drafter)
    for name_of_layout, layout in LAYOUTS.items():
        for checkpointing in (False, True) if name_of_layout == "packed" else (False,):
            trainee = trainee_of(case, drafter, checkpointing)
            sums = sums_of_batch(trainee, collate_as(rows, layout), noisy)
            sums.loss.backward()
            assert torch.equal(tallies(sums), expected_tallies), name_of_layout
            torch.testing.assert_close(sums.loss.detach(), loss, rtol=1e-5, atol=1e-5)
            assert_same_gradients(gradients(drafter), expected, 1e-4 if noisy else 2e-5)


def test_positions_restart_with_each_document() -> None:
    """Rotary positions are distances, but for scalings that begin at a length: no document here reaches that of the
    drafter, all of them together do."""
    case, drafter = CASES["eagle3"], drafter_of(CASES["eagle3"])
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    drafter.rotary = rotary(dynamic, drafter.config.head_dim, max_position_embeddings=32)
    assert max(DOCUMENTS) + case.steps <= 32 < sum(DOCUMENTS)
    short, long = (drafter.rotary(torch.zeros(1), torch.arange(n)[None])[0][0, 9] for n in (32, 33))
    assert (short - long).abs().max() > 1e-2
    with torch.no_grad():
        padded, packed = (sums_of_batch(trainee_of(case, drafter), collate(training_rows(), p)) for p in (False, True))
    torch.testing.assert_close(packed.loss, padded.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", a_few(CASES, "hass", "eagle3"))
@pytest.mark.parametrize("kernel", [BLOCKS, FLASH_CPU], ids=lambda kernel: kernel.name)
def test_products_in_bfloat16_teach_the_same(name: str, kernel: Kernel) -> None:
    """As on GPUs: gradients are in float32 and near those of float32, checkpointed or not the very same.

    A product's rounding is 2^-9; through a layer and up to eight steps of it gradients differ by two hundredths.
    Those of acceptance by six: they jump where q = p, and rounding moves tokens to the other side.
    """
    case, drafter = CASES[name], drafter_of(CASES[name])
    ids, span = make_rows([20, 16])
    found = {}
    for bf16, checkpointing in ((False, False), (True, False), (True, True)):
        trainee = trainee_of(case, drafter, checkpointing=checkpointing)
        trainee.bf16, trainee.kernel = bf16, kernel
        sums_of(trainee, ids, span).loss.backward()
        found[bf16, checkpointing] = gradients(drafter)
    for key, expected in found[False, False].items():
        own = found[True, False][key]
        assert own.dtype == torch.float32
        tolerance = 0.1 if case.weights.objective == "log_acceptance" else 0.05
        assert 0 < (own - expected).norm() <= tolerance * expected.norm(), key
        torch.testing.assert_close(found[True, True][key], own, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "bf16", "packed"), pairwise(["hass", "eagle3", "poss3-2"], [False, True], [False, True])
)
def test_the_unroll_on_a_gpu_is_the_cpu_s(name: str, bf16: bool, packed: bool) -> None:
    """By plain blocks in float32, by a fused kernel in bfloat16, whose products round to 2^-9."""
    case, drafter, device = CASES[name], drafter_of(CASES[name]), torch.device("cuda")
    batch = collate(training_rows(), packed)
    sums_of_batch(trainee_of(case, drafter), batch).loss.backward()
    expected = gradients(drafter)
    states = small_target().states(batch.ids, drafter.config.capture_layers, batch.documents)
    embeddings = inputs_of(drafter, batch.ids).embeddings
    columns = columns_of(batch.span, case.steps)
    columns = replace(columns, known_runs=tuple(columns.runs(batch.documents)))
    teacher = teacher_of(small_target(), states.last, batch.ids, columns, drafter.vocab)
    head = small_target().head_weight.detach().to(device)
    teacher = Teacher(teacher.states.to(device), lambda given: given @ head.T, teacher.label_drafted.to(device))
    trainee = trainee_of(case, drafter.to(device))
    trainee.bf16 = bf16
    fused = kernel_of(drafter.config, device, torch.bfloat16 if bf16 else torch.float32).forward is not BLOCKS.forward
    assert fused == bf16
    there = batch.to(device)
    inputs = DecoderInputs(embeddings.to(device), there.position)
    trainee(states.captured.to(device), inputs, columns.to(device), teacher, there.documents).loss.backward()
    for key, own in gradients(drafter).items():
        assert (own.cpu() - expected[key]).norm() <= (0.05 if bf16 else 1e-3) * expected[key].norm(), key


def test_a_batch_in_which_nothing_counts_gives_zero() -> None:
    for name in ("eagle", "eagle3", "poss-2"):
        drafter = drafter_of(CASES[name])
        ids, span = make_rows([8])
        sums = sums_of(trainee_of(CASES[name], drafter), ids, torch.zeros_like(span))
        sums.loss.backward()
        assert sums.loss.item() == 0 and sums.columns.item() == 0
        given = [p.grad for p in drafter.parameters() if p.grad is not None]
        assert given and all((grad == 0).all() for grad in given)


@pytest.mark.parametrize("rows", [(3, 5), (7,)])
def test_the_norm_is_pytorch_s_in_value_and_gradient_and_keeps_its_input_alone(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mine, its = RmsNorm(6, eps=1e-5).double(), torch.nn.RMSNorm(6, eps=1e-5).double()
    with torch.no_grad():
        mine.weight.add_(torch.randn(6))
        its.weight.copy_(mine.weight)
    x, grad = torch.randn(*rows, 6, dtype=torch.float64, requires_grad=True), torch.randn(*rows, 6).double()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = mine(x)
    assert sum(tensor.shape == x.shape for tensor in kept) == 1
    found, expected = ((y, *torch.autograd.grad(y, (x, norm.weight), grad)) for y, norm in ((out, mine), (its(x), its)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(mine(x), its(x))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_mlp_is_its_formula_in_value_and_gradient(activation: str) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(6, 10, activation).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    gate, up, down = weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    act = getattr(torch.nn.functional, activation)
    expected = (act(x @ gate.T) * (x @ up.T)) @ down.T
    grad = torch.randn_like(expected)
    found, wanted = ((y, *torch.autograd.grad(y, [x, *weights], grad)) for y in (mlp(x), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
    down.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(mlp(x), x, grad)[0], found[1])
