"""A decoding session that keeps the target's states of all committed tokens, encoded, in the host's memory.

    prefill    states of the prompts           kept at once
    round      states of the committed path    gathered on the device; encoded and moved when a row ends or begins

Shapes: B rows, n tokens, U captured layers of width H, R recorded ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.data_gen.states.store import Encoded, Encoding
from draftsmith.models.target import Target
from draftsmith.models.target_session import TargetSession

ROUNDS = 64  # kept on the device, at most


@dataclass
class _Row:
    prompt: Sequence[int]
    parts: list[Encoded] = field(default_factory=list)


class RecordingSession(TargetSession):
    """A session whose caller gets the states of `capture`, while those of `recorded` are kept until they are taken."""

    def __init__(self, target: Target, capture: Sequence[int], recorded: Sequence[int], encoding: Encoding):
        super().__init__(target, sorted({*capture, *recorded}))
        self._asked, self._recorded, self._encoding = tuple(capture), tuple(recorded), encoding
        self._rows: list[_Row] = []
        self._untaken: dict[int, _Row] = {}  # by the prompt's id
        self._appended: torch.Tensor | None = None  # [B, n, U H] of the last forward
        self._rounds: list[tuple[torch.Tensor, list[int]]] = []  # committed, not yet in rows: states, counts

    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int = 256, at_once: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._settle()
        logits_BV, states = super().prefill(prompts, room, at_once)
        assert states is not None
        for prompt, states_nF in zip(prompts, states, strict=True):
            row = _Row(prompt, [self._encoded(states_nF[: len(prompt)])])
            self._rows.append(row)
            self._untaken[id(prompt)] = row
        return logits_BV, self._for_caller(states)

    def append(
        self, tokens_Bn: torch.Tensor, depths_BS: torch.Tensor, visible_BnS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        last, self._appended = super().append(tokens_Bn, depths_BS, visible_BnS)
        assert self._appended is not None
        return last, self._for_caller(self._appended)

    def commit(self, counts: Sequence[int], path_BA: torch.Tensor | None = None) -> None:
        super().commit(counts, path_BA)
        states, most = self._appended, max(counts)
        assert states is not None
        if path_BA is not None:
            states = states[torch.arange(len(states), device=states.device)[:, None], path_BA[:, :most]]
        self._rounds.append((states[:, :most], list(counts)))
        self._appended = None
        if len(self._rounds) >= ROUNDS:
            self._settle()

    def keep(self, rows: Sequence[int]) -> None:
        self._settle()
        super().keep(rows)
        self._rows = [self._rows[row] for row in rows]

    def take(self, prompt: Sequence[int]) -> Encoded:
        """The states [n, R, H] of a row's committed tokens, by the object that `prefill` was given. They are forgotten
        here."""
        self._settle()
        row = self._untaken.pop(id(prompt))
        values, scales = zip(*row.parts, strict=True)
        row.parts.clear()
        return torch.cat(values), None if scales[0] is None else torch.cat(scales)

    def _settle(self) -> None:
        """Moves the rounds into their rows."""
        if not self._rounds:
            return
        values, scales = self._encoded(torch.cat([states for states, _ in self._rounds], dim=1))
        ends = torch.tensor([states.shape[1] for states, _ in self._rounds]).cumsum(0).tolist()
        for b, row in enumerate(self._rows):
            own = [
                column
                for end, (states, counts) in zip(ends, self._rounds, strict=True)
                for column in range(end - states.shape[1], end - states.shape[1] + counts[b])
            ]
            row.parts.append((values[b, own], None if scales is None else scales[b, own]))
        self._rounds.clear()

    def _encoded(self, states: torch.Tensor) -> Encoded:
        values, scales = self._encoding.encode(self._layers(states, self._recorded))
        return values.cpu(), None if scales is None else scales.cpu()

    def _for_caller(self, states: torch.Tensor) -> torch.Tensor | None:
        return self._layers(states, self._asked).flatten(-2) if self._asked else None

    def _layers(self, states: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """[..., len(layers), H]"""
        each = states.unflatten(-1, (len(self.capture), -1))
        if tuple(layers) == self.capture:
            return each
        return each.index_select(-2, torch.tensor([self.capture.index(layer) for layer in layers], device=each.device))
