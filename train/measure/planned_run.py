"""The facts known before a run starts. Its data is counted in the conversations, or expected from the prompts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.data_gen.answers.prompt_sizes import planned, sampled
from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.data_gen.states.store import length_of, taught_tokens
from draftsmith.eval.decoding.target_facts import longest_row
from draftsmith.models.costs import Device, TargetSize
from draftsmith.models.drafters import trainable_parameters
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.recipes.prompts.reader import Rejects, read_training_prompts
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.batches import BatchOrder, efficiency


@dataclass(frozen=True)
class DataSize:
    """Sizes of the training data.

    Attributes:
        rows: None: not known; tokens and supervised likewise.
        longest_tokens: of a row, up to its last supervised token; longest_columns: counted columns of a row.
        mean_padded_tokens: of a row in its micro-batch.
        basis: how the numbers were found, in words.
        counted: in the rows; otherwise they are upper bounds (`bounded`) or about right.
        validation_answers: known where counted.
        prompts_without_room: share of the prompts that leave no token to an answer.
    """

    rows: int | None
    validation_rows: int
    tokens: int | None
    supervised: int | None
    longest_tokens: int
    longest_columns: int
    mean_padded_tokens: float
    mean_columns: float
    basis: str
    counted: bool
    bounded: bool = True
    distinct_supervised: int | None = None
    validation_answers: int = 0
    prompts_without_room: float = 0.0

    @property
    def bound(self) -> str:
        """The words before a number."""
        return "" if self.counted else "at most " if self.bounded else "about "


def counted_data(
    rows: Sequence[TrainingRow], validation_rows: Sequence[TrainingRow], batch_size: int, seed: int, packing: bool
) -> DataSize:
    """The sizes of these rows, read in micro-batches of `batch_size` rows."""
    columns = [taught_tokens(row.spans) for row in rows]
    order = BatchOrder([len(row.input_ids) for row in rows], batch_size, seed)
    return DataSize(
        rows=len(rows),
        validation_rows=len(validation_rows),
        tokens=sum(len(row.input_ids) for row in rows),
        supervised=sum(end - start for row in rows for start, end in row.spans),
        longest_tokens=max(map(length_of, rows)),
        longest_columns=max(columns),
        mean_padded_tokens=efficiency(order, rows, packing).computed / len(rows),
        mean_columns=sum(columns) / len(rows),
        basis="counted",
        counted=True,
        validation_answers=sum(len(row.spans) for row in validation_rows),
        distinct_supervised=len(
            {t for row in [*rows, *validation_rows] for start, end in row.spans for t in row.input_ids[start:end]}
        ),
    )


def expected_data(recipe: Recipe, tokenizer: Any) -> DataSize:
    """The sizes that the prompts allow, if regenerate has not run yet: upper bounds where all prompts are rendered.

    Of many prompts a sample is rendered. Hub datasets are not read: only data.max_prompts is known of them, and every
    conversation is assumed to be one row, as long as data.max_length allows.
    """
    limit, longest = recipe.data.max_prompts, longest_row(recipe)
    if recipe.data.has_hub_prompts:
        tokens = None if limit is None else limit * longest
        return DataSize(
            rows=limit,
            validation_rows=min(recipe.train.validation_conversations, (limit or 0) // 5),
            tokens=tokens,
            supervised=tokens,
            longest_tokens=longest,
            longest_columns=longest,
            mean_padded_tokens=longest,
            mean_columns=longest,
            basis=f"assumed: data.max_prompts rows of {longest:,} tokens, all supervised; a template that rewrites its "
            " history makes a row of every turn",
            counted=False,
            bounded=False,
        )
    conversations = list(read_training_prompts(recipe.data, Rejects(), limit))
    sample = sampled(conversations)
    answer = recipe.data.generator.max_new_tokens
    sizes = [size for c in sample if (size := planned(tokenizer, c, answer, longest)) is not None]
    kept_out = min(recipe.train.validation_conversations, len(conversations) // 5)
    scale = len(conversations) / max(1, len(sample))
    left_out = int(kept_out / scale)

    def total(counts: Iterable[int]) -> int:
        """Over the training conversations. The smallest ones are assumed to be kept out, which gives an upper bound."""
        return int(sum(sorted(counts)[left_out:]) * scale)

    rows = sum(size.rows for size in sizes)
    tokens, columns = sum(size.tokens for size in sizes), sum(sum(size.answers) for size in sizes)
    everything = len(sample) == len(conversations)
    largest = max(
        (min(longest, p + a) for size in sizes for p, a in zip(size.prompts, size.answers, strict=True)), default=1
    )
    most_columns = min(longest, max((sum(size.answers) for size in sizes), default=1))
    mean_prompt = sum(sum(size.prompts) for size in sizes) / max(1, rows)
    return DataSize(
        rows=max(1, total(size.rows for size in sizes)),
        validation_rows=int(sum(sorted((size.rows for size in sizes), reverse=True)[:left_out]) * scale),
        tokens=total(size.tokens for size in sizes),
        supervised=total(sum(size.answers) for size in sizes),
        longest_tokens=largest if everything else longest,
        longest_columns=most_columns if everything else longest,
        mean_padded_tokens=max(1.0, tokens / max(1, rows)),
        mean_columns=max(1.0, columns / max(1, rows)),
        basis=f"assumed: {len(conversations):,} conversations, a row for each turn, prompts of "
        f"{mean_prompt:.0f} tokens with the history{'' if everything else ' (sampled)'}, "
        f"answers of max_new_tokens {answer}",
        counted=False,
        bounded=everything,
        prompts_without_room=sum(size.first_prompt >= longest for size in sizes) / max(1, len(sizes)),
    )


@dataclass(frozen=True)
class PlannedRun:
    """The facts for a plan.

    Attributes:
        target_config: the target's text config.
        bf16: whether products are in bfloat16.
        flops_per_second: of one device, from the user; None: unknown.
        refusals: why the run could not resume from the checkpoints that are there.
    """

    recipe: Recipe
    shape: DrafterConfig
    target_config: Any
    size: TargetSize
    data: DataSize
    vocab_is_there: bool
    bf16: bool
    device: Device
    processes: int = 1
    flops_per_second: float | None = None
    refusals: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """Trained parameters."""
        return trainable_parameters(self.shape)

    @property
    def device_type(self) -> str:
        return "cpu" if self.device.is_cpu else "cuda"

    @property
    def reads_states(self) -> bool:
        """Whether the target's states come from a store."""
        return self.recipe.data.states is not None
