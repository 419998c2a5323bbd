"""What a run counts between two lines of metrics.jsonl, over micro-batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.train.loss.unroll import UnrollSums, simulated_tau
from draftsmith.train.measure.clock import COUNTED


@dataclass
class Tally:
    """Sums over micro-batches, kept on the device until somebody looks."""

    loss: torch.Tensor
    columns: torch.Tensor
    reached: torch.Tensor
    correct: torch.Tensor
    tokens: torch.Tensor
    flops: torch.Tensor

    @classmethod
    def empty(cls, steps: int, device: torch.device) -> "Tally":
        vectors = ("reached", "correct")
        return cls(**{f.name: torch.zeros(steps if f.name in vectors else (), device=device) for f in fields(cls)})

    def add(self, sums: UnrollSums, tokens: int = 0, flops: torch.Tensor | float = 0.0) -> None:
        self.loss += sums.loss.detach()
        self.columns += sums.columns
        self.reached += sums.reached
        self.correct += sums.correct
        self.tokens += tokens
        self.flops += flops

    def merge(self, other: "Tally") -> None:
        for f in fields(self):
            getattr(self, f.name).add_(getattr(other, f.name))

    def of_ranks(self) -> list[dict[str, Any]]:
        """Every rank's sums, as numbers; `restore` takes them back exactly."""
        return gather_object([{f.name: getattr(self, f.name).tolist() for f in fields(self)}])

    def restore(self, of_ranks: Sequence[dict[str, Any]], accelerator: Accelerator) -> None:
        """To each rank its own: nothing is then added in another order. Of other processes rank 0 takes all."""
        rank = accelerator.process_index
        same = len(of_ranks) == accelerator.num_processes
        for sums in of_ranks[rank : rank + 1] if same else of_ranks if rank == 0 else ():
            for name, value in sums.items():
                sum_ = getattr(self, name)
                sum_ += torch.tensor(value, device=sum_.device)

    def over_ranks(self, accelerator: Accelerator) -> dict[str, Any]:
        """What the clock counts; where columns counted, loss per column, accuracy per unroll step, simulated tau."""
        sums: dict[str, Any] = {f.name: accelerator.reduce(getattr(self, f.name), "sum") for f in fields(self)}
        total = {name: value.tolist() for name, value in sums.items()}
        counts = {key: total[key] for key in COUNTED}
        if not counts["columns"]:  # every step was skipped
            return counts
        accuracy = [c / r if r else 0.0 for c, r in zip(total["correct"], total["reached"], strict=True)]
        return counts | {
            "loss": total["loss"] / total["columns"],
            "accuracy": [round(value, 5) for value in accuracy],
            "simulated_tau": round(simulated_tau(accuracy), 4),
        }


def counted_by_all(of_ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the clock goes by, over all ranks."""
    return {key: sum(sums[key] for sums in of_ranks) for key in COUNTED}
