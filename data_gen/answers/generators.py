"""Who writes the answers: prompts in, answers out, in whatever order they end.

One function shape, `generate(model, prompts, settings)`. This one decodes in process on the target itself, with a pool
of rows that never waits for its slowest member: a row that ends leaves, the next prompt takes its place.

    cache      row 0  p p p p a a a a . . .      p prompt, a answer, . free; every row has its own length
               row 1  p p a a a a a a a . .
               row 2  p p p p p p a . . . .
    mask              columns up to the row's own position

Keys and values are written where they stay: nothing is padded, shifted or copied when rows come and go, except one row
into the place of an ended one. Prompts are read in right-padded groups; causal attention keeps padding out of them. So
the answer of a prompt does not depend on its neighbours, up to the rounding of a batched matrix product.

Why not transformers' own loops: tests/bench/regenerate.py measures all three.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer

from draftsmith.eval.decoding.admission import taken, worth_a_prefill
from draftsmith.models.families import tried_attention
from draftsmith.models.sampling import Sampling, SeededDraws, pick
from draftsmith.recipes.errors import UserError

# Prompt tokens, padding included, that one prefill reads: bounds its activations, and the padding of unequal prompts.
PREFILL_TOKENS = 8192
# Columns by which the cache grows.
CACHE_COLUMNS = 256

Prompt = tuple[Hashable, list[int]]
Answer = tuple[Any, list[int], str]


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are drawn. Two runs with equal settings and prompts draw equal answers, in any order and batch; where
    a drafter helps (`drafted_answers`), with the same one and as many tokens of it."""

    max_new_tokens: int  # tokens of an answer, stop token included
    max_length: int  # tokens of prompt and answer together
    stop_ids: tuple[int, ...]
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    seed: int = 0
    batch_size: int = 32  # rows decoded side by side


def resolve_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, generation_config: GenerationConfig
) -> tuple[float, float, int]:
    """(temperature, top_p, top_k): what is None comes from the target's generation config, else 1, 1 and off.

    Raises:
        UserError: a number of the generation config is outside its range.
    """

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    sampling = (
        float(first(temperature, generation_config.temperature, 1.0)),
        float(first(top_p, generation_config.top_p, 1.0)),
        max(0, int(first(top_k, generation_config.top_k, 0))),  # -1 is how some servers say off
    )
    try:
        Sampling(*sampling)
    except ValueError as error:
        name = str(error).partition(":")[0]
        raise UserError(
            f"target.model: its generation_config.json has {error}; set data.generator.{name} in the recipe"
        ) from error
    return sampling


@torch.inference_mode()
def generate(model: Any, prompts: Iterator[Prompt | None], settings: GenerationSettings) -> Iterator[Answer]:
    """Answers of `model` to token prompts, each as soon as it ends.

    Args:
        model: a causal LM in evaluation mode, with full or sliding-window attention in every layer.
        prompts: (key, token ids); the key also seeds the prompt's draws. None says "nothing now, ask again after an
            answer", for prompts that are made of answers. Prompts must be shorter than settings.max_length.

    Yields:
        (key, token ids of the answer, finish reason). "stop": the last token is a stop token. "length": it was cut at
        max_new_tokens or max_length.

    Raises:
        UserError: the model keeps something else than keys and values.
    """
    rows: list[_Row] = []  # rows[i] lives in row i of the pool
    pool = _Pool(model, settings.batch_size)
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    device = pool.device
    exhausted = False
    while True:
        if not exhausted and worth_a_prefill(len(rows), settings.batch_size):
            new, exhausted = taken(prompts, settings.batch_size - len(rows))
            for group in _prefill_groups([_Row(*prompt, settings) for prompt in new]):
                pool.prefill([row.tokens for row in group])
                rows += group
        if not rows:
            if not exhausted:
                raise RuntimeError("the prompts wait for an answer, but none is being written")
            return
        logits_NV = pool.step([row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows])
        if sampling.greedy:
            tokens_N = logits_NV.argmax(-1)
        else:
            uniforms_N = torch.tensor([row.next_uniform() for row in rows], dtype=torch.float64, device=device)
            tokens_N = pick(sampling.probabilities(logits_NV), uniforms_N)
        for row, token in zip(rows, tokens_N.tolist(), strict=True):
            row.append(token, settings.stop_ids)
        ended = [row for row in rows if row.finish_reason is not None]
        if ended:
            rows = pool.keep(rows, [row.finish_reason is None for row in rows])
            for row in ended:
                yield row.key, row.tokens[row.prompt_length :], row.finish_reason  # type: ignore[misc]


def _prefill_groups(rows: list["_Row"]) -> Iterator[list["_Row"]]:
    """Rows of similar length together, each group at most PREFILL_TOKENS with its padding."""
    group: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.prompt_length):
        if group and (len(group) + 1) * row.prompt_length > PREFILL_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class _Row:
    """One answer in the making."""

    def __init__(self, key: Hashable, prompt_ids: list[int], settings: GenerationSettings):
        if not 0 < len(prompt_ids) < settings.max_length:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {settings.max_length}")
        self.key = key
        self.tokens = list(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.limit = min(self.prompt_length + settings.max_new_tokens, settings.max_length)
        self.finish_reason: str | None = None
        self._uniforms: list[float] = []  # none for greedy decoding
        if settings.temperature > 0:
            self._uniforms = SeededDraws(settings.seed, key).uniforms(self.limit - self.prompt_length).tolist()

    def next_uniform(self) -> float:
        return self._uniforms[len(self.tokens) - self.prompt_length]

    def append(self, token: int, stop_ids: tuple[int, ...]) -> None:
        self.tokens.append(token)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"


class _PoolLayer(DynamicLayer):
    """What a layer of the model sees of the pool."""

    def __init__(self, pool: "_Pool", index: int):
        super().__init__()
        self._pool, self._index = pool, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a token per active row [N, heads, 1, head_dim]; returns what they attend to, [N, heads, width, ..]."""
        pool, keys, values = self._pool, self._pool.keys[self._index], self._pool.values[self._index]
        rows_N = pool.row_index[: pool.active]
        keys[rows_N, :, pool.positions_N] = key_states[:, :, 0]
        values[rows_N, :, pool.positions_N] = value_states[:, :, 0]
        return keys[: pool.active, :, : pool.width], values[: pool.active, :, : pool.width]


class _Pool:
    """The rows' keys and values, and the two forward passes over them. Active rows are always the first ones."""

    def __init__(self, model: Any, size: int):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.kinds = tried_attention(model)
        self.device = model.get_input_embeddings().weight.device
        self.size = size
        self.active = 0
        # Per layer [size, heads, columns, head_dim]; the first prefill, which knows the shapes, makes them.
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.cache = Cache(layers=[_PoolLayer(self, i) for i in range(self.config.num_hidden_layers)])
        self.row_index = torch.arange(size, device=self.device)
        self.positions_N = self.row_index[:0]  # where this step's tokens stand
        self.width = 0  # columns that this step's attention reads

    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads all but the last token of each prompt into the next free rows; `step` reads the last one."""
        # A prompt of one token is read here and once more by `step`, to the same effect.
        width = max(1, *(len(prompt) - 1 for prompt in prompts))
        padded = [prompt[:width] + [0] * (width - len(prompt)) for prompt in prompts]
        read = DynamicCache()
        self.model.get_decoder()(
            input_ids=torch.tensor(padded, device=self.device), past_key_values=read, use_cache=True
        )
        new: list[tuple[Any, Any]] = [(keys, values) for keys, values, _ in read if keys is not None]
        if len(new) != len(self.cache.layers):
            raise UserError(
                f"target.model: {type(self.model).__name__} has {len(self.cache.layers)} layers but caches keys and "
                f"values in {len(new)}; regeneration in process needs them in every layer"
            )
        if not self.keys:
            self.keys = [keys.new_zeros(self.size, keys.shape[1], 0, keys.shape[3]) for keys, _ in new]
            self.values = [values.new_zeros(self.size, values.shape[1], 0, values.shape[3]) for _, values in new]
        self._reserve(width)
        behind = self.active + len(prompts)
        for layer, (keys, values) in enumerate(new):
            self.keys[layer][self.active : behind, :, :width] = keys
            self.values[layer][self.active : behind, :, :width] = values
        self.active = behind

    def step(self, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """One token further in every active row: logits [N, V] behind `tokens`, which stand at `positions`."""
        self.width = max(positions) + 1
        self._reserve(self.width)
        self.positions_N = torch.tensor(positions, device=self.device)
        output = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=self._masks(),
            position_ids=self.positions_N[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def keep(self, rows: list["_Row"], kept: list[bool]) -> list["_Row"]:
        """Drops rows: the last kept ones move into the gaps. The rows in their new order."""
        left = sum(kept)
        gaps = [i for i in range(left) if not kept[i]]
        movers = [i for i in range(left, len(rows)) if kept[i]]
        rows = list(rows)
        for gap, mover in zip(gaps, movers, strict=True):
            rows[gap] = rows[mover]
        if gaps:
            for states in (*self.keys, *self.values):
                states[gaps, :, : self.width] = states[movers, :, : self.width]
        self.active = left
        return rows[:left]

    def _masks(self) -> Any:
        """Additive mask [N, 1, 1, width], or one per kind of layer where only some of them see a window."""
        columns = torch.arange(self.width, device=self.device)
        distance = self.positions_N[:, None, None, None] - columns
        return self.kinds.masks(distance >= 0, distance, self.model.dtype)

    def _reserve(self, columns: int) -> None:
        """Room for `columns` columns in every row."""
        have = self.keys[0].shape[2]
        if columns > have:
            more = -(-columns // CACHE_COLUMNS) * CACHE_COLUMNS - have
            self.keys = [torch.nn.functional.pad(keys, (0, 0, 0, more)) for keys in self.keys]
            self.values = [torch.nn.functional.pad(values, (0, 0, 0, more)) for values in self.values]
