"""The one training loop: accumulate, clip, log, validate, save, resume.

A step's loss is a sum over counted columns divided by their number in the global batch (all micro-batches, all ranks),
so splitting a batch differently changes no gradient. All that a step does is a function of (weights, optimiser state,
step number); a run resumed from a checkpoint goes on bit for bit on one process.
"""

import json
import math
import os
import signal
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
from draftsmith.train.clock import Clock
from draftsmith.train.engine import MOMENTS_FILE, Engine
from draftsmith.train.noise import add_noise
from draftsmith.train.states import OnlineStates, StateSource
from draftsmith.train.unroll import TrainingTimeTest, UnrollSums, simulated_tau, teacher_of
from draftsmith.train.validation_replay import ValidationReplay, in_numbers

LOSS_IS_NOT_FINITE = "its loss is not finite"


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
        """tokens and counted columns; where there are any, loss per column, accuracy per unroll step, simulated tau."""
        total = self.summed(accelerator)
        counts = {"tokens": int(total["tokens"]), "columns": int(total["columns"])}
        if not counts["columns"]:  # every step was skipped
            return counts
        accuracy = [c / r if r else 0.0 for c, r in zip(total["correct"], total["reached"], strict=True)]
        return counts | {
            "loss": total["loss"] / total["columns"],
            "accuracy": [round(value, 5) for value in accuracy],
            "simulated_tau": round(simulated_tau(accuracy), 4),
        }


class Loop:
    """One run of training. Everything it writes lies in `checkpoints` and `metrics_path`.

    Args:
        identity: what must be the same for a resumed run (data, order, drafter, target); compared, printed on refusal.
        bf16: whether products are in bfloat16.
        replay: along which answers acceptance is found at every checkpoint; None: nowhere.
        states: where the target's states come from; its rows are numbered as in `_batch`. None: from the target.
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
        states: StateSource | None = None,
    ):
        self.replay = replay
        self.accelerator, self.target, self.settings = accelerator, target, settings
        self.rows, self.validation_rows = rows, validation_rows
        self.checkpoints, self.metrics_path, self.identity = checkpoints, metrics_path, identity
        self.vocab = trainee.drafter.vocab
        self.unroll_steps, self.wants_features = trainee.steps, trainee.wants_features
        self.states = OnlineStates(target) if states is None else states
        order = BatchOrder([len(row.input_ids) for row in rows], settings.batch_size, settings.seed)
        self.order = self.states.ordered(order, accelerator.num_processes, settings.gradient_accumulation_steps)
        self.total_steps = total_steps(settings, len(rows), accelerator.num_processes)
        self.engine = Engine(accelerator, trainee, settings, bf16)
        self.window = Tally.empty(self.unroll_steps, accelerator.device)  # since the last logged step
        self.clock = Clock(accelerator.device)
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
        self.clock.start(int(self.window.tokens), int(self.window.columns))
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
                line = {"step": done, **line, "lr": lr, "skipped_steps": self.skipped, **clock}
                line["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None  # JSON has no other word
                if "loss" in line:
                    loss, tau = f"{line['loss']:.3f}", f"{line['simulated_tau']:.2f}"
                    progress.set_postfix(loss=loss, tau=tau, tok_s=clock["tokens_per_second"])
                if validate:
                    line |= {f"validation_{k}": v for k, v in self.validate().items() if k not in ("tokens", "columns")}
                if replay:
                    waiting = line
                else:
                    self._log(line)
                self.window = Tally.empty(self.unroll_steps, self.accelerator.device)
                self.clock.start()
            stop = stop and not last
            if save or stop:
                self._save(done, waiting)
                self.clock.start(int(self.window.tokens), int(self.window.columns))
            if stop:  # replay takes its time; the next start catches up on it
                progress.close()
                self.accelerator.print(f"SIGTERM: stopped after step {done}, which is saved; start again to go on")
                return False
            if waiting is not None:
                self._log(waiting | self.replayed())
                self.clock.start()
        progress.close()
        return True

    def _step(self, step: int) -> tuple[float, float, bool]:
        """One optimiser step: (gradient norm before clipping, learning rate, whether any rank got SIGTERM)."""
        accelerator, engine, count = self.accelerator, self.engine, self.settings.gradient_accumulation_steps
        begin = (step * accelerator.num_processes + accelerator.process_index) * count
        chosen = [self.order.rows(begin + i) for i in range(count)]
        with self.clock.waiting():
            batches = [self._batch(self.rows, rows) for rows in chosen]
        columns = [columns_of(batch.span, self.unroll_steps) for batch in batches]
        counted = sum((c.counted(0).sum() for c in columns), torch.zeros((), device=accelerator.device))
        asked = torch.full_like(counted, float(self.stopping))
        summed: Any = accelerator.reduce(torch.stack((counted, asked)), "sum")
        tally = Tally.empty(self.unroll_steps, accelerator.device)
        for i, (batch, batch_columns) in enumerate(zip(batches, columns, strict=True)):
            draws = self._draws(begin + i, chosen[i])
            with engine.accumulating(last=i + 1 == count):
                sums = self._forward(engine.trainee, batch, batch_columns, draws)
                engine.backward(sums.loss / summed[0].clamp(min=1))
            tally.add(sums, batch.tokens)
        lr = learning_rate(step, self.total_steps, self.settings)
        done = engine.step(lr)
        if done.taken:
            self.window.merge(tally)
        else:
            self._tell_skipped(step, begin, chosen)
        alone = accelerator.num_processes == 1  # several processes stop together, after the step that all know of it
        return done.grad_norm, lr, self.stopping if alone else bool(summed[1])

    def _draws(self, number: int, rows: Sequence[int]) -> list[str]:
        """Names the random numbers of each row of a micro-batch: the same in every run, on every rank."""
        epoch = number // self.order.batches_per_epoch
        return [f"{self.settings.seed}/{epoch}/{row}" for row in rows]

    def _tell_skipped(self, step: int, begin: int, chosen: Sequence[Sequence[int]]) -> None:
        """Names the rows that a step was skipped for; all ranks call it.

        Raises:
            UserError: the drafter is lost, or it is one step more than train.max_skipped_steps.
        """
        with self.engine.whole() as trainee, self.target.uneven_passes():
            found = [
                (self.rows[row].id, self._problem_of(trainee, row, self._draws(number, [row])))
                for number, rows in enumerate(chosen, start=begin)
                for row in rows
            ]
        everywhere = gather_object(found)
        rows = [f"{id_}: {problem}" for id_, problem in everywhere if problem]
        told = "; ".join(rows[:5]) + f"; and {len(rows) - 5} more" * (len(rows) > 5)
        told = told or "no row alone gives such a number: it is the sum that overflows"
        remedy = (
            f"lower train.learning_rate or lengthen train.warmup_steps; {self.checkpoints} holds the last good state"
        )
        if len(everywhere) > 1 and all(problem == LOSS_IS_NOT_FINITE for _, problem in everywhere):
            raise UserError(
                f"step {step + 1}: the loss of every row is not a finite number, the drafter is lost: {remedy}"
            )
        self.skipped += 1
        self.accelerator.print(f"step {step + 1} skipped: its gradient is not finite ({told})")
        if self.skipped > self.settings.max_skipped_steps:
            raise UserError(
                f"{self.skipped} steps had gradients that are not finite, train.max_skipped_steps allows "
                f"{self.settings.max_skipped_steps}; the last one: {told}. Look at these rows, or {remedy}"
            )

    def _problem_of(self, trainee: TrainingTimeTest, row: int, draws: Sequence[str]) -> str | None:
        """What of one row is not finite."""
        batch = self._batch(self.rows, [row])
        columns = columns_of(batch.span, self.unroll_steps)
        with torch.no_grad(), self.engine.autocast():
            captured, _ = self.states.of(batch)
        if not bool(torch.isfinite(captured).all()):
            return "the target's captured states are not finite"
        with torch.no_grad():
            sums = self._forward(trainee, batch, columns, draws)
        return None if bool(torch.isfinite(sums.loss)) else LOSS_IS_NOT_FINITE

    def _forward(
        self, trainee: torch.nn.Module, batch: Batch, columns: Columns, draws: Sequence[str] | None = None
    ) -> UnrollSums:
        """The target's pass, the teacher and the drafter's unroll on one micro-batch.

        Args:
            draws: names the random numbers of each row's feature noise; None: there is none.
        """
        # Reading states is waiting; computing them is not.
        reading = nullcontext() if isinstance(self.states, OnlineStates) else self.clock.waiting()
        with self.engine.autocast(), reading:  # the head stays in the target's own precision: it is the teacher
            captured, last = self.states.of(batch)
        teacher = teacher_of(self.target, last, batch.ids, columns, self.vocab, self.wants_features)
        if draws is not None and self.settings.feature_noise:
            captured = add_noise(captured, self.settings.feature_noise, batch.lengths, draws, batch.documents)
        return trainee(captured, batch.ids, columns, teacher, batch.documents)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracy per step and simulated tau on the validation rows, shared among the ranks."""
        tally = Tally.empty(self.unroll_steps, self.accelerator.device)
        size, ranks = self.settings.batch_size, self.accelerator.num_processes
        with self.engine.whole() as trainee, self.target.uneven_passes():  # no other collectives inside
            for start in range(self.accelerator.process_index * size, len(self.validation_rows), size * ranks):
                batch = self._batch(self.validation_rows, range(start, min(start + size, len(self.validation_rows))))
                tally.add(self._forward(trainee, batch, columns_of(batch.span, self.unroll_steps)), 0)
        return tally.over_ranks(self.accelerator)

    def replayed(self) -> dict[str, Any]:
        """Acceptance along the answers of `replay`, shared among the ranks."""
        assert self.replay is not None
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        with self.engine.whole() as trainee, self.target.uneven_passes():
            rounds = self.replay.share(self.target, trainee.drafter, rank, ranks)
        return in_numbers(gather_object(rounds))

    def _batch(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> Batch:
        first = 0 if rows is self.rows else len(self.rows)  # validation rows are numbered behind those of training
        numbers = [first + i for i in indices]
        return collate([rows[i] for i in indices], self.settings.packing, numbers).to(self.accelerator.device)

    def _log(self, line: dict[str, Any]) -> None:
        flat = {
            f"{key}/{i}" if isinstance(value, list) else key: item
            for key, value in line.items()
            for i, item in enumerate(value if isinstance(value, list) else [value])
            if item is not None
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
        final = checkpoint_path(self.checkpoints, step)
        partial = final.with_suffix(".partial")
        with full_disk_is_told(partial):
            self.engine.save(partial)
        window = self.window.summed(self.accelerator)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            state = {"step": step, "identity": self.identity, "window": window, "waiting": waiting}
            state["skipped_steps"] = self.skipped
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
            self.engine.start()
            return 0
        if not (existing[-1] / MOMENTS_FILE).exists():
            raise UserError(f"{existing[-1]}: was written by an older version; choose another output_dir to start anew")
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
        self.engine.load_weights(existing[-1])
        self.engine.start()
        self.engine.load_moments(existing[-1])
        self.skipped = state["skipped_steps"]
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
