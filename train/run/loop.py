"""The one training loop: accumulate, clip, log, validate, save, resume.

A step's loss is a sum over counted columns divided by their number in the global batch (all micro-batches, all ranks),
so splitting a batch differently changes no gradient. All that a step does is a function of (weights, optimiser state,
step number); a run resumed from a checkpoint goes on bit for bit, on one process and on two.
"""

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.profiler import record_function

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.checkpoint import differences
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TrainSection, is_default
from draftsmith.train.loss.noise import add_noise
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, teacher_of
from draftsmith.train.measure.clock import COUNTED, Clock, peak_flops_per_second
from draftsmith.train.measure.step_flops import StepFlops
from draftsmith.train.measure.step_profile import StepProfile
from draftsmith.train.run.batches import Batch, BatchOrder, collate
from draftsmith.train.run.checkpoints import (
    best_of,
    checkpoint_path,
    damage,
    full_disk_is_told,
    keep_last,
    list_checkpoints,
    publish,
    settle,
    step_of,
)
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.metrics_log import MetricsLog
from draftsmith.train.run.processes import failing_together
from draftsmith.train.run.state_sources import OnlineStates, StateSource
from draftsmith.train.run.tally import Tally, counted_by_all
from draftsmith.train.run.trackers import Trackers, new_run
from draftsmith.train.run.validation_replay import ValidationReplay, in_numbers

# A scheduler signals all processes of a job, and a launcher among them does so again: two SIGTERMs ask for one stop.
SAME_SIGTERM_SECONDS = 5.0
LOSS_IS_NOT_FINITE = "its loss is not finite"
# What train.keep_best goes by, as lines of metrics call it.
BEST_BY = {"simulated_tau": "validation_simulated_tau", "replay_tau": "replay_tau"}


def learning_rate(step: int, total_steps: int, settings: TrainSection) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up, then cosine or linear decay to zero."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    decay = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * decay


def total_steps(settings: TrainSection, rows: int, processes: int, unread: int = 0) -> int:
    """Optimiser steps of a run: max_steps, or what the epochs need.

    Args:
        unread: micro-batches that earlier steps had room for and did not read.
    """
    if (all_of_them := micro_batches(settings, rows)) is None:
        assert settings.max_steps is not None
        return settings.max_steps
    return -(-(all_of_them + unread) // (settings.gradient_accumulation_steps * processes))


def micro_batches(settings: TrainSection, rows: int) -> int | None:
    """Micro-batches of a run that goes by epochs; the last step may have fewer than the others. None: max_steps counts,
    and every step is full."""
    if settings.max_steps is not None:
        return None
    return max(1, math.ceil((settings.epochs or 1) * -(-rows // settings.batch_size)))


def _in_words(line: Mapping[str, Any]) -> str:
    """What the bar says of a line of metrics."""
    words = [f"loss {line['loss']:.3f}, tau {line['simulated_tau']:.2f}"] if "loss" in line else []
    words += [f"{line['tokens_per_second']:,} tok/s", f"{line['columns_per_second']:,} col/s"]
    words += [f"{line['data_wait']:.0%} waiting", f"{line['memory_gib']:.1f} GiB"]
    words += [f"MFU {line['mfu']:.0%}"] if "mfu" in line else []
    return ", ".join(words)


class Loop:
    """One run of training. Everything it writes lies in `checkpoints` and `metrics_path`.

    Args:
        identity: what must be the same for a resumed run (data, order, drafter, target); compared, printed on refusal.
        bf16: whether products are in bfloat16.
        replay: along which answers acceptance is found at every checkpoint; None: nowhere.
        states: where the target's states come from; its rows are numbered as in `_batch`. None: from the target.
        trackers: are told what is logged; None: nobody else is.
        flops: counts operations, for the model FLOPs utilisation (MFU); None: it is not told.
        profile: looks at the first steps.
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
        trackers: Trackers | None = None,
        flops: StepFlops | None = None,
        profile: StepProfile | None = None,
    ):
        self.replay, self.trackers, self.flops, self.profile = replay, trackers, flops, profile
        self.accelerator, self.target, self.settings = accelerator, target, settings
        self.rows, self.validation_rows = rows, validation_rows
        self.checkpoints, self.metrics, self.identity = checkpoints, MetricsLog(metrics_path), identity
        self.vocab = trainee.drafter.vocab
        self.unroll_steps = trainee.steps
        self.states = OnlineStates(target) if states is None else states
        order = BatchOrder([len(row.input_ids) for row in rows], settings.batch_size, settings.seed)
        self.order = self.states.ordered(order, accelerator.num_processes, settings.gradient_accumulation_steps)
        self.total_steps = total_steps(settings, len(rows), accelerator.num_processes)
        self.micro_batches = micro_batches(settings, len(rows))
        self.unread = 0  # micro-batches that the last step had room for when the run was shorter than it is now
        self.engine = Engine(accelerator, trainee, settings, bf16)
        self.window = Tally.empty(self.unroll_steps, accelerator.device)  # since the last logged step
        peak = peak_flops_per_second(accelerator.device) if flops is not None else None
        self.clock = Clock(accelerator.device, peak and peak * accelerator.num_processes)
        self.skipped = 0  # steps of this run whose gradient was not finite
        self.name = new_run()  # by which trackers find it again
        self.stopping, self.asked_at = False, 0.0  # SIGTERM came, and when

    def run(self) -> bool:
        """Trains from the last checkpoint (or from the start) to the last step.

        False: SIGTERM ended it before, with the step under way finished and saved. Another one, not of the same moment,
        ends it at once.

        Raises:
            KeyboardInterrupt: Ctrl-C, with a message that says where the next start goes on.
        """
        first = self._resume()
        default = signal.signal(signal.SIGTERM, self._stop_soon)
        progress = Bar(
            total=self.total_steps,
            initial=first,
            unit="step",
            desc="train",
            disable=not self.accelerator.is_main_process,
            smoothing=0.1,
        )
        try:
            with progress:  # however it ends, what is printed next starts on a line of its own
                return self._run(first, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._interrupted_after(progress.n)) from None
        finally:
            # The launcher's SIGTERM of the same moment may be yet to come.
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.stopping else default or signal.SIG_DFL)
            if self.profile is not None:
                self.profile.finish()
            if self.trackers is not None:
                self.trackers.finish()

    def _stop_soon(self, *_: object) -> None:
        now = time.monotonic()
        if not self.stopping:
            self.stopping, self.asked_at = True, now
        elif now - self.asked_at > SAME_SIGTERM_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _again(self) -> str:
        """How a run that stops early goes on."""
        return "the same command" if self.settings.resume == "auto" else "train.resume=auto"

    def _interrupted_after(self, done: int) -> str:
        """What Ctrl-C after so many steps prints: where the next start goes on."""
        if saved := list_checkpoints(self.checkpoints):
            goes_on = f"{self._again} goes on from step {step_of(saved[-1]):,} ({saved[-1]})"
        else:
            first = min(self.settings.save_every_steps, self.total_steps)
            goes_on = f"no checkpoint yet (the first one comes at step {first:,}): the same command starts anew"
        return f"interrupted after step {done:,}; {goes_on}"

    def _run(self, first: int, progress: Bar) -> bool:
        self.clock.start(counted_by_all(self.window.of_ranks()))
        if self.profile is not None and first < self.total_steps:
            self.profile.start(first, self.total_steps)
        for step in range(first, self.total_steps):
            waiting: dict[str, Any] | None = None  # a line that is logged with what replay finds, after the checkpoint
            grad_norm, lr, stop = self._step(step)
            done = step + 1
            if self.profile is not None:
                self.profile.step()
            self.clock.step()
            progress.update()
            last = done == self.total_steps
            save = done % self.settings.save_every_steps == 0 or last
            due = done % self.settings.validate_every_steps == 0 or last
            due |= save and self.settings.keep_best == "simulated_tau"
            validate = bool(self.validation_rows) and due
            replay = self.replay is not None and save
            log = done % self.settings.log_every_steps == 0 or validate or replay or last
            if log:
                line = self.window.over_ranks(self.accelerator)
                clock = self.clock.read({key: line.pop(key) for key in COUNTED}, self.total_steps - done)
                line = {"step": done, **line, "lr": lr, "skipped_steps": self.skipped, **clock}
                line["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None  # JSON has no other word
                progress.set_postfix_str(_in_words(line))
                if validate:
                    line |= {f"validation_{k}": v for k, v in self.validate().items() if k not in COUNTED}
                if replay:
                    waiting = line
                else:
                    self._log(line)
                self.window = Tally.empty(self.unroll_steps, self.accelerator.device)
                self.clock.start()
            stop = stop and not last
            if save or stop:
                self.clock.start(self._save(done, waiting))
            if stop:  # replay takes its time; the next start catches up on it
                progress.close()
                self.accelerator.print(
                    f"SIGTERM: stopped after step {done:,}, which is saved; {self._again} goes on from there"
                )
                return False
            if waiting is not None:
                self._log(waiting | self.replayed())
                self.clock.start()
        progress.close()
        if self.accelerator.is_main_process and self.settings.keep_best is not None:
            self._keep(check=True)  # the last checkpoint was replayed after it was saved
        return True

    def _step(self, step: int) -> tuple[float, float, bool]:
        """One optimiser step: (gradient norm before clipping, learning rate, whether any rank got SIGTERM)."""
        accelerator, engine, count = self.accelerator, self.engine, self.settings.gradient_accumulation_steps
        begin = (step * accelerator.num_processes + accelerator.process_index) * count - self.unread
        numbers = [begin + i for i in range(count)]
        if self.micro_batches is not None:  # behind the last one it is this one again, and counts nothing
            numbers = [min(number, self.micro_batches - 1) for number in numbers]
        chosen = [self.order.rows(number) for number in numbers]
        with self.clock.waiting(), record_function("rows"):
            batches, columns = zip(*(self._batch(self.rows, rows) for rows in chosen), strict=True)
        counts = [number == begin + i for i, number in enumerate(numbers)]
        counted = torch.zeros((), device=accelerator.device)
        for batch_columns in compress(columns, counts):
            counted = counted + batch_columns.counted(0).sum()
        summed: Any = accelerator.reduce(counted, "sum")
        tally = Tally.empty(self.unroll_steps, accelerator.device)
        for i, (batch, batch_columns) in enumerate(zip(batches, columns, strict=True)):
            draws = self._draws(numbers[i], chosen[i])
            with engine.accumulating(last=i + 1 == count):
                sums = self._forward(engine.trainee, batch, batch_columns, draws)
                with record_function("backward"):
                    engine.backward(sums.loss * (counts[i] / summed.clamp(min=1)))
            if counts[i]:
                flops = 0.0 if self.flops is None else self.flops.of_batch(batch.one_row, batch_columns)
                tally.add(sums, batch.tokens, flops)
        lr = learning_rate(step, self.total_steps, self.settings)
        with record_function("optimizer"):
            done = engine.step(lr)
        if done.taken:
            self.window.merge(tally)
        else:
            self._tell_skipped(step, numbers, chosen)
        asked: Any = accelerator.reduce(torch.full_like(counted, float(self.stopping)), "sum")  # all stop, or none
        return done.grad_norm, lr, bool(asked)

    def _draws(self, number: int, rows: Sequence[int]) -> list[str]:
        """Names the random numbers of each row of a micro-batch: the same in every run, on every rank."""
        epoch = number // self.order.batches_per_epoch
        return [f"{self.settings.seed}/{epoch}/{row}" for row in rows]

    def _tell_skipped(self, step: int, numbers: Sequence[int], chosen: Sequence[Sequence[int]]) -> None:
        """Names the rows that a step was skipped for; all ranks call it.

        Raises:
            UserError: the drafter is lost, or it is one step more than train.max_skipped_steps.
        """
        with self.engine.whole() as trainee, self.target.uneven_passes():
            found = [
                (self.rows[row].id, self._problem_of(trainee, row, self._draws(number, [row])))
                for number, rows in zip(numbers, chosen, strict=True)
                for row in rows
            ]
        everywhere = list(dict.fromkeys(gather_object(found)))
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
        batch, columns = self._batch(self.rows, [row])
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
            columns: of its `one_row`.
            draws: names the random numbers of each row's feature noise; None: there is none.
        """
        # Reading states is waiting; computing them is not.
        reading = nullcontext() if isinstance(self.states, OnlineStates) else self.clock.waiting()
        # The head stays in the target's own precision: it is the teacher.
        with self.engine.autocast(), reading, record_function("target"):
            captured, last = (batch.in_one_row(each) for each in self.states.of(batch))
        row = batch.one_row
        with record_function("teacher"):
            teacher = teacher_of(self.target, last, row.ids, columns, self.vocab)
        if draws is not None and self.settings.feature_noise:
            captured = add_noise(captured, self.settings.feature_noise, row.lengths, draws, row.documents)
        with record_function("unroll and loss"):
            return trainee(captured, row.ids, columns, teacher, row.documents)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracy per step and simulated tau on the validation rows, shared among the ranks.

        Rows whose loss is not a finite number are named and left out; left_out says how many, if any.
        """
        tally, left_out = Tally.empty(self.unroll_steps, self.accelerator.device), []
        size, ranks, rows = self.settings.batch_size, self.accelerator.num_processes, self.validation_rows
        # Ranks may have unequal shares: no collectives inside.
        with self.engine.whole() as trainee, self.target.uneven_passes():
            for start in range(self.accelerator.process_index * size, len(rows), size * ranks):
                together = list(range(start, min(start + size, len(rows))))
                sums = self._validated(trainee, together)
                if bool(torch.isfinite(sums.loss)):
                    tally.add(sums)
                    continue
                for row in together:
                    sums = self._validated(trainee, [row])
                    if bool(torch.isfinite(sums.loss)):
                        tally.add(sums)
                    else:
                        left_out.append(rows[row].id)
        found = tally.over_ranks(self.accelerator)
        if left_out := gather_object(left_out):
            told = ", ".join(left_out[:5]) + f" and {len(left_out) - 5} more" * (len(left_out) > 5)
            self.accelerator.print(f"validation without {told}: {LOSS_IS_NOT_FINITE}")
            found["left_out"] = len(left_out)
        return found

    def _validated(self, trainee: TrainingTimeTest, rows: Sequence[int]) -> UnrollSums:
        return self._forward(trainee, *self._batch(self.validation_rows, rows))

    def replayed(self) -> dict[str, Any]:
        """Acceptance along the answers of `replay`, shared among the ranks."""
        assert self.replay is not None
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        with self.engine.whole() as trainee, self.target.uneven_passes():
            rounds = self.replay.share(self.target, trainee.drafter, rank, ranks, self.states)
        return in_numbers(gather_object(rounds))

    def _batch(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> tuple[Batch, Columns]:
        """And the columns of its `one_row`. Their numbers are looked at before they are on the device, which would have
        to be waited for."""
        first = 0 if rows is self.rows else len(self.rows)  # validation rows are numbered behind those of training
        numbers = [first + i for i in indices]
        batch = collate([rows[i] for i in indices], self.settings.packing, numbers)
        columns = columns_of(batch.one_row.span, self.unroll_steps)
        columns = replace(columns, known_runs=tuple(columns.runs(batch.one_row.documents)))
        return batch.to(self.accelerator.device), columns.to(self.accelerator.device)

    def _log(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            if self.trackers is not None:
                self.trackers.log(line)
            self.metrics.append(line)

    def best(self) -> tuple[Path, float] | None:
        """Of the checkpoints that there are, the one with the highest tau, and this; rank 0 knows.

        None: the recipe does not ask, or none was validated. Damaged ones are named and passed over.
        """
        if self.settings.keep_best is None:
            return None
        found = self.metrics.values(BEST_BY[self.settings.keep_best])
        for checkpoint in best_of(list_checkpoints(self.checkpoints), found):
            if (problem := damage(checkpoint)) is None:
                return checkpoint, found[step_of(checkpoint)]
            print(f"{checkpoint}: damaged: {problem}; passed over")
        return None

    def _keep(self, check: bool = False) -> None:
        """Removes checkpoints that are neither among the newest nor the best.

        Args:
            check: that the best is whole, which takes reading it; a damaged one must not cost the one behind it.
        """
        found = self.metrics.values(BEST_BY[self.settings.keep_best]) if self.settings.keep_best is not None else {}
        best = best_of(list_checkpoints(self.checkpoints), found)[:1]
        if check and best and (whole := self.best()) is not None:
            best = [whole[0]]
        keep_last(self.checkpoints, self.settings.keep_checkpoints, best)

    def _save(self, step: int, waiting: dict[str, Any] | None = None) -> dict[str, float]:
        """A checkpoint folder, whole or not there; older ones beyond keep_checkpoints go. Returns what was counted.

        Args:
            waiting: this step's line of metrics, which is yet to be replayed and logged; a kill until then must not
                lose it.
        """
        final = checkpoint_path(self.checkpoints, step)
        partial = final.with_suffix(".partial")
        windows = self.window.of_ranks()
        with failing_together():
            with full_disk_is_told(partial):
                self.engine.save(partial)
                if self.accelerator.is_main_process:
                    state = {"step": step, "identity": self.identity, "windows": windows, "waiting": waiting}
                    state |= {"skipped_steps": self.skipped, "name": self.name, "micro_batches": self._read_by(step)}
                    (partial / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
                    self.metrics.sync()  # what was logged before a checkpoint is not written again
                    publish(partial, final)
            if self.accelerator.is_main_process:
                self._keep()
        return counted_by_all(windows)

    @property
    def _per_step(self) -> int:
        """Micro-batches of all ranks."""
        return self.settings.gradient_accumulation_steps * self.accelerator.num_processes

    def _read_by(self, step: int) -> int:
        """Micro-batches that counted in the first so many steps."""
        room = step * self._per_step - self.unread
        return room if self.micro_batches is None else min(room, self.micro_batches)

    def _resume(self) -> int:
        """Loads the last whole checkpoint, if any, and returns the number of steps done."""
        with failing_together():
            if self.accelerator.is_main_process:
                self._settle()
        names = [path.name for path in list_checkpoints(self.checkpoints)]
        [name, *_] = gather_object(names[-1:] or [None])  # what rank 0 says
        if name is None:
            self._begin_log(0)
            self.engine.start()
            return 0
        last = self.checkpoints / name
        with failing_together():
            state = self._state_of(last)
        self.engine.load_weights(last)
        self.engine.start()
        self.engine.load_moments(last)
        self.skipped, self.name = state["skipped_steps"], state["name"]
        self.window.restore(state["windows"], self.accelerator)
        self._begin_log(state["step"])
        self.accelerator.print(f"resumed from {last}")
        self._log_waiting(state.get("waiting"))
        if self.accelerator.is_main_process:  # a kill may have come before the last save did
            self._keep(check=True)
        return state["step"]

    def _settle(self) -> None:
        existing = list_checkpoints(self.checkpoints)
        if existing and self.settings.resume == "never":
            raise UserError(
                f"train.resume is never, but {existing[-1]} exists: set train.resume=auto to go on from it, or choose "
                "another output_dir"
            )
        settle(self.checkpoints)

    def _state_of(self, checkpoint: Path) -> dict[str, Any]:
        """What stands beside the weights. Raises UserError where this run cannot go on from it."""
        try:
            state = json.loads((checkpoint / "trainer_state.json").read_text())
        except FileNotFoundError:
            raise UserError(
                f"{checkpoint}: rank 0 goes on from it, and another process does not see it: output_dir must be one "
                "folder that all of them see"
            ) from None
        if not {"windows", "name", "micro_batches"} <= state.keys():
            raise UserError(f"{checkpoint}: was written by an older version; choose another output_dir to start anew")
        here = json.loads(json.dumps(self.identity))  # as it was written: tuples are lists
        different = [
            f"{key}: the checkpoint has {theirs!r}, this run has {mine!r}"
            for key, theirs, mine in differences(state["identity"], here)
            if key in state["identity"] or not is_default(key, mine)  # of a version without the key
        ]
        if different:
            raise UserError(
                f"{checkpoint} belongs to another run ({'; '.join(different)}); restore these values, or choose "
                "another output_dir to start anew"
            )
        self.unread = state["step"] * self._per_step - state["micro_batches"]
        self.total_steps = total_steps(self.settings, len(self.rows), self.accelerator.num_processes, self.unread)
        if state["step"] > self.total_steps:
            raise UserError(
                f"{checkpoint} is beyond the {self.total_steps} steps of this recipe (train.max_steps, "
                "train.epochs); ask for as many or more, or choose another output_dir"
            )
        return state

    def _begin_log(self, step: int) -> None:
        """Where lines are appended behind those of `step`."""
        if self.accelerator.is_main_process:
            self.metrics.drop_after(step)
            if self.trackers is not None:
                self.trackers.start(step, self.name)

    def _log_waiting(self, line: dict[str, Any] | None) -> None:
        """Catches up on the line that a checkpoint left to be replayed, if the run ended before it was logged."""
        if line is None:
            return
        [is_logged, *_] = gather_object([self.accelerator.is_main_process and self.metrics.tells_of(line["step"])])
        if not is_logged:
            self._log(line | (self.replayed() if self.replay is not None else {}))
