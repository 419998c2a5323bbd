"""What only EAGLE-1's training has: noise on what the drafter reads, never on what it is taught; and the single drafter
with as many parameters as specialists have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.models.alignment import Columns, Documents
from draftsmith.models.drafters import build_drafter, drafter_config, padded, trainable_parameters
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DrafterSection, TrainSection
from draftsmith.train.loss.head_loss import Teacher
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.loop import Loop
from draftsmith.train.run.settings import adamw_settings, loop_settings, loss_weights, schedule_of
from draftsmith.train.run.state_sources import OnlineStates
from tests.conftest import make_target
from tests.drafter_cases import CASES, drafter_of, make_rows, small_target, states_of

LENGTHS = [21, 16, 12, 19]


def rows_of(lengths: list[int]) -> list[TrainingRow]:
    ids, span = make_rows(lengths)
    rows = []
    for b, length in enumerate(lengths):
        marks = span[b, :length].tolist()
        spans = [(marks.index(n), length - marks[::-1].index(n)) for n in (1, 2)]
        rows.append(TrainingRow(f"c{b}", ids[b, :length].tolist(), [mark > 0 for mark in marks], spans))
    return rows


@dataclass
class Seen:
    """One call of the unroll."""

    captured: torch.Tensor
    ids: torch.Tensor
    columns: Columns
    teacher: Teacher
    documents: Documents | None

    def split(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(captured [T, F], ids [T]) of each document."""
        places = [(0, 0, self.ids.shape[1])] if self.documents is None else self.documents.places
        for row, start, tokens in places:
            here = slice(start, start + tokens)
            yield self.captured[row, here], self.ids[row, here]


def ids_of(inputs: DecoderInputs) -> torch.Tensor:
    """[B, T] the tokens that have these embeddings."""
    return (inputs.embeddings[:, :, None] == small_target().embedding_table).all(-1).float().argmax(-1)


class Recorder(TrainingTimeTest):
    """Keeps what it is called with."""

    def forward(
        self,
        captured_BTF: torch.Tensor,
        inputs_BT: DecoderInputs,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None = None,
    ) -> UnrollSums:
        self.seen.append(Seen(captured_BTF, ids_of(inputs_BT), columns, teacher, documents))
        return super().forward(captured_BTF, inputs_BT, columns, teacher, documents)

    seen: list[Seen]


def loop_of(tmp_path: Path, **settings: Any) -> tuple[Loop, Recorder]:
    """A loop over four rows, all of which are validation rows, too."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    section = TrainSection(**{"batch_size": 2, "max_steps": 2, "ttt_steps": 3, "feature_loss": 1.0, **settings})
    drafter, how = drafter_of(CASES["hass"]), {"weights": loss_weights(section), "detach": section.detach_features}
    trainee = Recorder(drafter, section.ttt_steps, section.step_weight, **how)
    trainee.seen = []
    target = Target(small_target().model, trainee.drafter.config.capture_layers)
    rows, accelerator = rows_of(LENGTHS), Accelerator(cpu=True)
    loop = Loop(
        Engine(accelerator, trainee, adamw_settings(section), bf16=False),
        target,
        OnlineStates(target),
        rows,
        rows,
        schedule_of(section, len(rows), 1),
        loop_settings(section),
        tmp_path,
        tmp_path / "metrics.jsonl",
        {},
    )
    loop.engine.start()
    return loop, trainee


def test_noise_is_on_what_is_read_never_on_what_is_taught(tmp_path: Path) -> None:
    """Of EAGLE-1, the feature that is read and the one that is taught are one tensor of the target."""
    loop, trainee = loop_of(tmp_path, feature_noise=0.2)
    loop._step(0)
    (seen,) = trainee.seen
    lasts = []
    for captured, ids in seen.split():
        clean, last = states_of(trainee.drafter, ids[None])
        torch.testing.assert_close(clean, last)
        bound = 0.2 * 512 / len(ids) / 2
        assert 0.9 * bound < (captured - clean[0]).abs().max() <= bound * (1 + 1e-5)
        lasts.append(last[0])
    assert sorted(map(len, lasts)) == sorted(len(loop.rows[b].input_ids) for b in loop.order.rows(0))
    read = seen.columns.gather(torch.cat(lasts)[None], 1)
    torch.testing.assert_close(seen.teacher.states, read)
    taught, _ = seen.teacher.of(seen.teacher.states.flatten(0, 1), trainee.drafter.vocab)
    torch.testing.assert_close(taught, torch.softmax(small_target().logits(read).flatten(0, 1), -1))


def test_validation_has_no_noise(tmp_path: Path) -> None:
    noisy, recorder = loop_of(tmp_path, feature_noise=0.2)
    found = noisy.validate()
    read = [each for seen in recorder.seen for each in seen.split()]
    assert sorted(len(ids) for _, ids in read) == sorted(LENGTHS)
    for captured, ids in read:
        torch.testing.assert_close(captured, states_of(recorder.drafter, ids[None])[0][0])
    assert found == noisy.validate() == loop_of(tmp_path, feature_noise=0.0)[0].validate()


def test_noise_hangs_on_seed_epoch_and_row_alone(tmp_path: Path) -> None:
    """Micro-batches of one row or of four, one epoch: each row reads the same noise; the next epoch's is another."""

    def by_row(**settings: Any) -> list[dict[int, torch.Tensor]]:
        """Of each epoch, what each row read, by its length."""
        loop, trainee = loop_of(tmp_path, feature_noise=0.2, learning_rate=1e-9, **settings)
        loop._step(0)
        loop._step(1)
        found: list[dict[int, torch.Tensor]] = [{}]
        for captured, ids in (each for seen in trainee.seen for each in seen.split()):
            if len(ids) in found[-1]:
                found.append({})
            found[-1][len(ids)] = captured
        return found

    one = by_row(batch_size=1, gradient_accumulation_steps=4)
    four = by_row(batch_size=4)
    assert [sorted(epoch) for epoch in one] == [sorted(epoch) for epoch in four] == [sorted(LENGTHS)] * 2
    for epoch in (0, 1):
        for length in LENGTHS:
            torch.testing.assert_close(one[epoch][length], four[epoch][length], rtol=1e-4, atol=1e-4)
    assert all((one[0][length] - one[1][length]).abs().max() > 1 for length in LENGTHS)
    assert all((one[0][n] - by_row(batch_size=4, seed=1)[0][n]).abs().max() > 1 for n in LENGTHS)


@pytest.mark.parametrize("specialists", [2, 4, 7])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_single_drafter_with_as_many_parameters(kind: Any, num_layers: int, specialists: int, bias: bool) -> None:
    """Equal to half a row of the MLP of each layer; a row has a weight in gate, up and down for each hidden unit."""
    config, layers = make_target().config, (2, 3, 4)
    alone = DrafterSection(kind=kind, num_layers=num_layers, match_specialists=specialists, attention_bias=bias)
    beside = DrafterSection(kind="poss", base=kind, specialists=specialists, attention_bias=bias)
    matched = drafter_config(alone, config, layers)
    difference = trainable_parameters(matched) - trainable_parameters(drafter_config(beside, config, layers))
    assert abs(difference) <= 3 * config.hidden_size * num_layers / 2
    narrow = drafter_config(alone.model_copy(update={"match_specialists": None}), config, layers)
    assert replace(matched, intermediate_size=narrow.intermediate_size) == narrow


def test_more_layers_than_specialists_have_narrower_mlps_or_are_refused() -> None:
    section, config = DrafterSection(kind="eagle", num_layers=3, match_specialists=2), make_target().config
    matched = drafter_config(section, config, ())
    assert matched.intermediate_size < config.intermediate_size
    beside = drafter_config(DrafterSection(kind="poss", specialists=2), config, ())
    assert abs(trainable_parameters(matched) - trainable_parameters(beside)) <= 3 * config.hidden_size * 3 / 2
    with pytest.raises(UserError, match=r"drafter.match_specialists: 2 .* 9 layers"):
        drafter_config(section.model_copy(update={"num_layers": 9}), config, ())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_wider_mlp_begins_as_the_narrow_one(kind: str) -> None:
    """The matched baseline may start where the specialists do: from a trained layer, whose outputs it then has."""
    target = Target(make_target())
    layers = () if kind == "eagle" else (2, 4, 5)
    narrow_section, wide_section = DrafterSection(kind=kind), DrafterSection(kind=kind, match_specialists=3)  # type: ignore[arg-type]
    vocab = DraftVocab.full(target.vocab_size)
    torch.manual_seed(0)
    narrow, wide = (
        build_drafter(drafter_config(section, target.config, layers), vocab, target.frozen_head)
        for section in (narrow_section, wide_section)
    )
    random_rows = wide.stacks[0][0].mlp.gate_proj.weight.detach().clone()
    wide.load_state_dict(padded(narrow.state_dict(), wide))
    width = narrow.config.intermediate_size
    assert wide.config.intermediate_size > width
    x = torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(wide.stacks[0][0].mlp(x), narrow.stacks[0][0].mlp(x))
    # What is new is not dead: its rows are random, and down learns to use them.
    assert torch.equal(wide.stacks[0][0].mlp.gate_proj.weight[width:], random_rows[width:])
    wide.stacks[0][0].mlp(x).square().sum().backward()
    gradient = wide.stacks[0][0].mlp.down_proj.weight.grad
    assert gradient is not None and gradient[:, width:].abs().min() > 0
