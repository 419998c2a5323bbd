"""The one training loop: accumulate, clip, log, validate, save, resume.

A step's loss is a sum over counted columns divided by their number in the global batch (all micro-batches, all ranks),
so splitting a batch differently changes no gradient. All that a step does is a function of (weights, optimiser state,
step number); a run resumed from a checkpoint goes on bit for bit on one process.
"""

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from draftsmith.data_gen.conversations import TrainingRow
from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.checkpoint import differences, sync_to_disk
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.lines import append_line
from draftsmith.recipes.schema import TrainSection
from draftsmith.train.batches import Batch, BatchOrder, collate
from draftsmith.train.checkpoints import (
    checkpoint_path,
    full_disk_is_told,
    keep_last,
    list_checkpoints,
    publish,
    settle,
)
from draftsmith.train.noise import add_noise
from draftsmith.train.unroll import TrainingTimeTest, UnrollSums, simulated_tau, teacher_of
from draftsmith.train.validation_replay import ValidationReplay, in_numbers


def learning_rate(step: int, total_steps: int, settings: TrainSection) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up, then cosine or linear decay to zero."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    decay = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * decay


def total_steps(settings: TrainSection, rows: int, processes: int) -> int:
    """Optimiser steps of a run: max_steps, or what the epochs need."""
    if settings.max_steps is not None:
        return settings.max_steps
    micro_batches = -(-rows // settings.batch_size)
    per_step = settings.gradient_accumulation_steps * processes
    return max(1, math.ceil((settings.epochs or 1) * micro_batches / per_step))


@dataclass
class Tally:
    """Sums over micro-batches, kept on the device until somebody looks."""

    loss: torch.Tensor
    columns: torch.Tensor
    reached: torch.Tensor
    correct: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def empty(cls, steps: int, device: torch.device) -> "Tally":
        vectors = ("reached", "correct")
        return cls(**{f.name: torch.zeros(steps if f.name in vectors else (), device=device) for f in fields(cls)})

    def add(self, sums: UnrollSums, tokens: int) -> None:
        self.loss += sums.loss.detach()
        self.columns += sums.columns
        self.reached += sums.reached
        self.correct += sums.correct
        self.tokens += tokens

    def merge(self, other: "Tally") -> None:
        for f in fields(self):
            getattr(self, f.name).add_(getattr(other, f.name))

    def summed(self, accelerator: Accelerator) -> dict[str, Any]:
        """The sums over all ranks, as numbers; `restore` takes them back exactly."""
        sums: dict[str, Any] = {f.name: accelerator.reduce(getattr(self, f.name), "sum") for f in fields(self)}
        return {name: value.tolist() for name, value in sums.items()}

    def restore(self, sums: dict[str, Any]) -> None:
        for name, value in sums.items():
            getattr(self, name).copy_(torch.tensor(value))

    def over_ranks(self, accelerator: Accelerator) -> dict[str, Any]:
        """loss per counted column, accuracy per unroll step, simulated tau, tokens."""
        total = self.summed(accelerator)
        accuracy = [c / r if r else 0.0 for c, r in zip(total["correct"], total["reached"], strict=True)]
        return {
            "loss": total["loss"] / max(1.0, total["columns"]),
            "accuracy": [round(value, 5) for value in accuracy],
            "simulated_tau": round(simulated_tau(accuracy), 4),
            "tokens": int(total["tokens"]),
            "columns": int(total["columns"]),
        }


class Loop:
    """One run of training. Everything it writes lies in `checkpoints` and `metrics_path`.

    Args:
        identity: what must be the same for a resumed run (data, order, drafter, target); compared, printed on refusal.
        bf16: whether products are in bfloat16.
        replay: along which answers acceptance is found at every checkpoint; None: nowhere.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        trainee: TrainingTimeTest,
        target: Target,
        rows: Sequence[TrainingRow],
        validation_rows: Sequence[TrainingRow],
        settings: TrainSection,
        checkpoints: Path,
        metrics_path: Path,
        identity: dict[str, Any],
        bf16: bool = False,
        replay: ValidationReplay | None = None,
    ):
        self.replay = replay
        self.accelerator, self.target, self.settings = accelerator, target, settings
        self.rows, self.validation_rows = rows, validation_rows
        self.checkpoints, self.metrics_path, self.identity = checkpoints, metrics_path, identity
        self.vocab = trainee.drafter.vocab
        self.unroll_steps, self.wants_features = trainee.steps, trainee.wants_features
        self.order = BatchOrder([len(row.input_ids) for row in rows], settings.batch_size, settings.seed)
        self.total_steps = total_steps(settings, len(rows), accelerator.num_processes)
        self.engine = Engine(accelerator, trainee, settings, bf16)
        self.window = Tally.empty(self.unroll_steps, accelerator.device)  # since the last logged step
        self.skipped = 0  # steps of this run whose gradient was not finite
        self.stopping = False  # SIGTERM came

    def run(self) -> bool:
        """Trains from the last checkpoint (or from the start) to the last step.

        False: SIGTERM ended it before, with the step under way finished and saved. A second SIGTERM ends it at once.
        """
        first = self._resume()
        default = signal.signal(signal.SIGTERM, self._stop_soon)
        try:
            return self._run(first)
        finally:
            signal.signal(signal.SIGTERM, default)

    def _stop_soon(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.stopping = True

    def _run(self, first: int) -> bool:
        logged_at, tokens_before = time.perf_counter(), int(self.window.tokens)
        main = self.accelerator.is_main_process
        progress = tqdm(
            total=self.total_steps, initial=first, unit="step", desc="train", disable=not main, smoothing=0.1
        )
        for step in range(first, self.total_steps):
            waiting: dict[str, Any] | None = None  # a line that is logged with what replay finds, after the checkpoint
            grad_norm, lr, stop = self._step(step)
            done = step + 1
            progress.update()
            last = done == self.total_steps
            validate = bool(self.validation_rows) and (done % self.settings.validate_every_steps == 0 or last)
            save = done % self.settings.save_every_steps == 0 or last
            replay = self.replay is not None and save
            log = done % self.settings.log_every_steps == 0 or validate or replay or last
            if log:
                line = self.window.over_ranks(self.accelerator)
                clock = self.clock.read(line.pop("tokens"), line.pop("columns"))
                line = {"step": done, **line, "grad_norm": grad_norm, "lr": lr, "skipped_steps": self.skipped, **clock}
                progress.set_postfix(
                    loss=f"{line['loss']:.3f}", tau=f"{line['simulated_tau']:.2f}", tok_s=f"{rate:.0f}"
                )
                if validate:
                    line |= {f"validation_{k}": v for k, v in self.validate().items() if k != "tokens"}
                if replay:
                    waiting = line
                else:
                    self._log(line)
                self.window = Tally.empty(self.unroll_steps, self.accelerator.device)
                logged_at, tokens_before = time.perf_counter(), 0
            stop = self._agree_to_stop(log) and not last
            if save or stop:
                self._save(done, waiting)
            if stop:  # replay takes its time; the next start catches up on it
                progress.close()
                self.accelerator.print(f"SIGTERM: stopped after step {done}, which is saved; start again to go on")
                return False
            if waiting is not None:
                self._log(waiting | self.replayed())
                logged_at = time.perf_counter()
        progress.close()
        return True

    def _step(self, step: int) -> tuple[torch.Tensor, float]:
        """One optimiser step: (gradient norm before clipping, learning rate)."""
        accelerator, count = self.accelerator, self.settings.gradient_accumulation_steps
        begin = (step * accelerator.num_processes + accelerator.process_index) * count
        chosen = [self.order.rows(begin + i) for i in range(count)]
        batches = [self._batch(self.rows, rows) for rows in chosen]
        columns = [columns_of(batch.span, self.unroll_steps) for batch in batches]
        counted = sum((c.counted(0).sum() for c in columns), torch.zeros((), device=accelerator.device))
        counted = accelerator.reduce(counted, "sum").clamp(min=1)  # type: ignore[union-attr]
        for i, (batch, batch_columns) in enumerate(zip(batches, columns, strict=True)):
            epoch = (begin + i) // self.order.batches_per_epoch
            draws = [f"{self.settings.seed}/{epoch}/{row}" for row in chosen[i]]
            with accelerator.no_sync(self.trainee) if i + 1 < count else nullcontext():
                sums = self._forward(self.trainee, batch, batch_columns, draws)
                # Wrappers average gradients over ranks; the sum is wanted.
                accelerator.backward(sums.loss * (accelerator.num_processes / counted))
            self.window.add(sums, batch.tokens)
        grad_norm = self._clip()
        self.window.nonfinite += ~torch.isfinite(grad_norm)
        lr = learning_rate(step, self.total_steps, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm, lr

    def _clip(self) -> torch.Tensor:
        """The gradient's norm, before it is clipped."""
        if self.settings.clip == "norm":
            return torch.as_tensor(self.accelerator.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.accelerator.clip_grad_value_(self.parameters, self.settings.max_grad_norm)
        return norm

    def _forward(
        self, trainee: torch.nn.Module, batch: Batch, columns: Columns, draws: Sequence[str] | None = None
    ) -> UnrollSums:
        """The target's pass, the teacher and the drafter's unroll on one micro-batch.

        Args:
            draws: names the random numbers of each row's feature noise; None: there is none.
        """
        with self.accelerator.autocast():  # the head stays in the target's own precision: it is the teacher
            states = self.target.states(batch.ids, documents=batch.documents)
        teacher = teacher_of(self.target, states.last, batch.ids, columns, self.vocab, self.wants_features)
        captured = states.captured
        if draws is not None and self.settings.feature_noise:
            captured = add_noise(captured, self.settings.feature_noise, batch.lengths, draws, batch.documents)
        return trainee(captured, batch.ids, columns, teacher, batch.documents)

    def _refuse_nonfinite(self, step: int) -> None:
        """Before anything is logged or saved: weights that such a gradient has touched are lost."""
        if float(self.window.nonfinite) or not bool(torch.isfinite(self.window.loss)):
            raise UserError(
                f"a loss or gradient is not a finite number, at step {step} or shortly before: lower "
                f"train.learning_rate or lengthen train.warmup_steps; {self.checkpoints} holds the last good state"
            )

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracy per step and simulated tau on the validation rows, shared among the ranks."""
        trainee = self.accelerator.unwrap_model(self.trainee)  # ranks may have unequal shares: no collectives inside
        trainee.eval()
        tally = Tally.empty(self.unroll_steps, self.accelerator.device)
        size, ranks = self.settings.batch_size, self.accelerator.num_processes
        for start in range(self.accelerator.process_index * size, len(self.validation_rows), size * ranks):
            batch = self._batch(self.validation_rows, range(start, min(start + size, len(self.validation_rows))))
            tally.add(self._forward(trainee, batch, columns_of(batch.span, self.unroll_steps)), 0)
        trainee.train()
        return tally.over_ranks(self.accelerator)

    def replayed(self) -> dict[str, Any]:
        """Acceptance along the answers of `replay`, shared among the ranks."""
        assert self.replay is not None
        trainee, accelerator = self.accelerator.unwrap_model(self.trainee), self.accelerator
        trainee.eval()
        rounds = self.replay.share(self.target, trainee.drafter, accelerator.process_index, accelerator.num_processes)
        trainee.train()
        return in_numbers(gather_object(rounds))

    def _batch(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> Batch:
        return collate([rows[i] for i in indices], self.settings.packing, indices).to(self.accelerator.device)

    def _log(self, line: dict[str, Any]) -> None:
        flat = {
            f"{key}/{i}" if isinstance(value, list) else key: item
            for key, value in line.items()
            for i, item in enumerate(value if isinstance(value, list) else [value])
        }
        self.accelerator.log(flat, step=line["step"])
        if self.accelerator.is_main_process:
            with self.metrics_path.open("ab", buffering=0) as file:
                append_line(file, self.metrics_path, (json.dumps(line) + "\n").encode())

    def _save(self, step: int, waiting: dict[str, Any] | None = None) -> None:
        """A checkpoint folder, whole or not there; older ones beyond keep_checkpoints go.

        Args:
            waiting: this step's line of metrics, which is yet to be replayed and logged; a kill until then must not
                lose it.
        """
        self._refuse_nonfinite(step)
        final = checkpoint_path(self.checkpoints, step)
        partial = final.with_suffix(".partial")
        with full_disk_is_told(partial):
            self.accelerator.save_state(str(partial))
        window = self.window.summed(self.accelerator)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            state = {"step": step, "identity": self.identity, "window": window, "waiting": waiting}
            with full_disk_is_told(partial):
                (partial / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
                sync_to_disk(self.metrics_path)  # what was logged before a checkpoint is not written again
                publish(partial, final)
            keep_last(self.checkpoints, self.settings.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> int:
        """Loads the last whole checkpoint, if any, and returns the number of steps done."""
        existing = list_checkpoints(self.checkpoints)
        if existing and self.settings.resume == "never":
            raise UserError(
                f"train.resume is never, but {existing[-1]} exists: set train.resume=auto to go on from it, or choose "
                "another output_dir"
            )
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            settle(self.checkpoints)
        self.accelerator.wait_for_everyone()
        existing = list_checkpoints(self.checkpoints)
        if not existing:
            self._drop_metrics_after(0)
            return 0
        state = json.loads((existing[-1] / "trainer_state.json").read_text())
        here = json.loads(json.dumps(self.identity))  # as it was written: tuples are lists
        different = [
            f"{key}: the checkpoint has {theirs!r}, this run has {mine!r}"
            for key, theirs, mine in differences(state["identity"], here)
        ]
        if different:
            raise UserError(
                f"{existing[-1]} belongs to another run ({'; '.join(different)}); restore these values, or choose "
                "another output_dir to start anew"
            )
        if state["step"] > self.total_steps:
            raise UserError(
                f"{existing[-1]} is beyond the {self.total_steps} steps of this recipe (train.max_steps, "
                "train.epochs); ask for as many or more, or choose another output_dir"
            )
        self.accelerator.load_state(str(existing[-1]))
        if self.accelerator.is_main_process:
            self.window.restore(state["window"])
        self._drop_metrics_after(state["step"])
        if self.accelerator.is_main_process:  # a kill may have come before the last save did
            keep_last(self.checkpoints, self.settings.keep_checkpoints)
        self.accelerator.print(f"resumed from {existing[-1]}")
        self._log_waiting(state.get("waiting"))
        return state["step"]

    def _log_waiting(self, line: dict[str, Any] | None) -> None:
        """Catches up on the line that a checkpoint left to be replayed, if the run ended before it was logged."""
        if line is None:
            return
        lines = self.metrics_path.read_bytes().split(b"\n") if self.accelerator.is_main_process else []
        [is_logged, *_] = gather_object([line["step"] in map(_step_of, lines)])  # what rank 0 says
        if not is_logged:
            self._log(line | (self.replayed() if self.replay is not None else {}))

    def _drop_metrics_after(self, step: int) -> None:
        """Lines of steps that a killed run logged but did not save would stand twice; what is no line goes, too."""
        if not self.accelerator.is_main_process:
            return
        self.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        *lines, rest = self.metrics_path.read_bytes().split(b"\n") if self.metrics_path.exists() else [b""]
        lines += [rest] if rest.endswith(b"}") else []  # else a kill cut it off: it was never a line
        steps = [_step_of(line) for line in lines]
        if damaged := [number for number, at in enumerate(steps, start=1) if at is None]:
            print(f"{self.metrics_path}: damaged lines dropped: {len(damaged)}, the first is line {damaged[0]}")
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        partial = self.metrics_path.with_suffix(".partial")
        partial.write_bytes(b"".join(line + b"\n" for line in kept))
        sync_to_disk(partial)
        os.replace(partial, self.metrics_path)


def _step_of(line: bytes) -> int | None:
    """The step that a line of metrics.jsonl tells of; None if it is none."""
    try:
        step = json.loads(line.decode("utf-8"))["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
