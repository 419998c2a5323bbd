"""The steps of drafters that read their own outputs (EAGLE, HASS, PosS, ViSpec): a chain below every column at once.

The query of column t at step k sees, as a chain drafted below root x[t+1] would (EAGLE-3, section 3.2):

    step-0 keys of columns 0..t         made from the target's states         one causal part, the same at every step
    its own column's keys of steps 1..k made from its own earlier outputs     k single scores

so one softmax runs over t + 1 + k scores. No [T, k*T] mask exists. (The published HASS and PosS code multiplies masked
scores by 0, which leaves exp(0) in its denominator for every masked column.) Columns that do not count need only a
step-0 key and value, because they are never queried. With several draft layers, the lower ones run step 0 on all
columns.

Documents that share a row (`models.alignment.Documents`) never see each other: attention runs on one document's prefix
after another.

Each stack of layers has keys and values of its own. Where the stack changes (`models.poss`), the new one computes them
from the same step-0 features and from the drafted features of steps 1..k-1, which it gets without their history:

    step               0     1     2     3          two positions a stack: gradients of step 3 end at this line |
    stack              0     0     1     1
    feature            f[t]  a_0 | a_1   a_2        a_1 | is cut off, and a_0 is when stack 1 reads it again

Shapes: B rows, T tokens, F captured states, C counted columns, A query heads, G key/value heads, D head dimension,
H hidden size, W entry width.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.models.alignment import Columns, Documents, Run, runs_of_documents
from draftsmith.models.drafter_base import Attend, DraftLayer
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.layers import for_products
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target_columns import TextColumns
from draftsmith.recipes.sections.train import Detach

# For each layer: keys and values of steps 1, 2, ... of the counted columns, [B, G, C, D] each.
OwnColumns = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


def chain_steps(
    drafter: FeatureDrafter,
    captured_BTF: torch.Tensor,
    inputs_BT: DecoderInputs,
    columns: Columns,
    steps: int,
    attend: Attend,
    gradient_checkpointing: bool = False,
    detach: Detach = False,
    documents: Documents | None = None,
) -> Iterator[torch.Tensor]:
    """Yields outputs [B, C, H] of steps 0 to `steps` - 1 for the counted columns (`models.alignment`).

    At step k only columns with `columns.counted(k)` are meaningful; the others must be masked.

    Args:
        inputs_BT: the tokens as the target's first layer reads them.
        detach: where gradients end between drafted positions: True: at each step (HASS); "specialists": where the stack
            changes; False: nowhere.
        documents: packed documents; None: every row is one.
    """
    rows, tokens = captured_BTF.shape[:2]
    places = documents.places if documents is not None else [(row, 0, tokens) for row in range(rows)]
    # A document's last column never counts, so what stands behind it does not matter.
    read = drafter.target_columns(captured_BTF, inputs_BT.following(), [TextColumns(*place) for place in places])
    columns, documents = read.renumbered(columns, documents)
    entry_BTW = drafter.entry_in_context(drafter.fuse(read.captured), read.embeddings, *read.context)

    def run(function, *args):
        # Not the reentrant form: it gives outputs inside containers no gradient.
        return checkpoint(function, *args, use_reentrant=False) if gradient_checkpointing else function(*args)

    def entry_of(feature: torch.Tensor, step: int) -> torch.Tensor:
        context = (columns.gather(each) for each in read.context)
        return drafter.entry_in_context(feature, columns.gather(read.embeddings, step), *context)

    stack = drafter.stack_of(0)
    common = entry_BTW, read.positions, columns, documents, columns.runs(documents), attend
    chains = _Chains(drafter, drafter.stacks[stack], *common)
    output = run(chains.first_step)
    yield output
    drafted: list[torch.Tensor] = []  # features of steps 1, 2, ... for the next stack
    for step in range(1, steps):
        feature = drafter.feedback(output)
        handed = feature.detach() if detach else feature
        if drafter.stack_of(step) != stack:
            stack, feature = drafter.stack_of(step), handed
            chains = _Chains(drafter, drafter.stacks[stack], *common)
            for earlier, its_feature in enumerate(drafted, start=1):
                chains.read(entry_of(its_feature, earlier), earlier)
        elif detach is True:
            feature = handed
        output, chains.own = run(
            lambda f, k, own, c=chains: c.later_step(entry_of(f, k), k, own), feature, step, chains.own
        )
        if len(drafter.stacks) > 1:
            drafted.append(handed)
        yield output


class _Chains:
    """The keys and values of one stack of layers, for all counted columns at once. `entry_BTW`: inputs of step 0."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        layers: Sequence[DraftLayer],
        entry_BTW: torch.Tensor,
        position_BT: torch.Tensor,
        columns: Columns,
        documents: Documents | None,
        runs: Sequence[Run],
        attend: Attend,
    ):
        self.drafter, self.layers = drafter, layers
        self.runs, self.attend = runs, attend
        rows, tokens = entry_BTW.shape[:2]
        self.position = columns.gather(position_BT)  # [B, C]
        rotary = drafter.rotary(entry_BTW, position_BT)
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer: [B, G, T, D] keys and values
        h = entry_BTW
        for layer in layers:
            x, residual = _enter(layer, h)
            keys, values = layer.self_attn.keys_values(x, *rotary)
            self.prefix.append((keys, values))
            if layer is not layers[-1]:  # the layer above needs a key of every column
                whole = runs_of_documents(documents, rows, tokens)
                query = layer.self_attn.queries(x, *rotary)
                h = layer.finish(residual, attend(query, keys, values, [], [], whole))
        # Only the counted columns query the last layer.
        self.first_input = columns.gather(x), columns.gather(residual)
        self.own: OwnColumns = [([], []) for _ in layers]

    def first_step(self) -> torch.Tensor:
        """Outputs [B, C, H] of step 0."""
        layer, (x, residual) = self.layers[-1], self.first_input
        query = layer.self_attn.queries(x, *self.drafter.rotary(residual, self.position))
        return layer.finish(residual, self.attend(query, *self.prefix[-1], [], [], self.runs))

    def read(self, entry_BCW: torch.Tensor, step: int) -> None:
        """Adds keys and values of a step that another stack drafted."""
        [layer], [(keys, values)] = self.layers, self.own
        x = _enter(layer, entry_BCW)[0]
        key, value = layer.self_attn.keys_values(x, *self.drafter.rotary(entry_BCW, self.position + step))
        self.own = [([*keys, key], [*values, value])]

    def later_step(self, entry_BCW: torch.Tensor, step: int, own: OwnColumns) -> tuple[torch.Tensor, OwnColumns]:
        """Outputs [B, C, H] of a step above 0, and `own` with its keys and values added.

        `own` is passed in and returned: a checkpointed step must read the same when it runs again.
        """
        grown: OwnColumns = []
        h = entry_BCW
        cos, sin = self.drafter.rotary(h, self.position + step)
        for layer, prefix, (own_keys, own_values) in zip(self.layers, self.prefix, own, strict=True):
            x, residual = _enter(layer, h)
            key, value = layer.self_attn.keys_values(x, cos, sin)
            query = layer.self_attn.queries(x, cos, sin)
            keys, values = [*own_keys, key], [*own_values, value]
            h = layer.finish(residual, self.attend(query, *prefix, keys, values, self.runs))
            grown.append((keys, values))
        return h, grown


def _enter(layer: DraftLayer, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the attention's input in the precision of products, the residual stream in its own)."""
    x, residual = layer.enter(entry)
    return for_products(x), residual
