"""The one training loop: accumulate, clip, log, validate, save, resume.

A step's loss is a sum over counted columns divided by their number in the global batch (all micro-batches, all ranks),
so splitting a batch differently changes no gradient. A step is a function of (weights, optimiser state, step number). A
run that is resumed from a checkpoint therefore continues bit for bit, on one process and on two.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.profiler import record_function

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import sync_to_disk
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, add_noise, teacher_of
from draftsmith.train.measure.metrics_line import COUNTED, Tally, ThroughputMeter, counted_by_all
from draftsmith.train.run.batches import BatchOrder, MicroBatch, collate
from draftsmith.train.run.checkpoints import (
    STATE,
    best_of,
    checkpoint_path,
    damage,
    disk_errors_as_user_errors,
    keep_last,
    list_checkpoints,
    publish_checkpoint,
    read_state,
    settle,
    step_of,
)
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.metrics_log import MetricsLog
from draftsmith.train.run.processes import StopRequest, failing_together
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.state_sources import OnlineStates, StateSource
from draftsmith.train.run.trackers import Trackers, new_run
from draftsmith.train.run.validation_replay import ValidationReplay, replay_metrics

LOSS_IS_NOT_FINITE = "its loss is not finite"
# train.keep_best: the key of the lines of metrics that it compares.
BEST_BY = {"simulated_tau": "validation_simulated_tau", "replay_tau": "replay_tau"}


def bar_text(line: Mapping[str, Any]) -> str:
    """The progress bar's text for a line of metrics."""
    words = [f"loss {line['loss']:.3f}, tau {line['simulated_tau']:.2f}"] if "loss" in line else []
    words += [f"{line['tokens_per_second']:,} tok/s", f"{line['columns_per_second']:,} col/s"]
    words += [f"{line['data_wait']:.0%} waiting", f"{line['memory_gib']:.1f} GiB"]
    words += [f"MFU {line['mfu']:.0%}"] if "mfu" in line else []
    return ", ".join(words)


@dataclass
class Loop:
    """One run of training. It writes to `checkpoints` and `metrics_path` only.

    Attributes:
        states: source of the target's states; it numbers rows as `_batch` does.
        identity: properties that a resumed run must share (data, order, drafter, target). Differences are printed
            when a checkpoint is refused.
        replay: answers along which acceptance is measured at every checkpoint; None: it is not.
        trackers: are given every line that is logged.
        peak_tokens_per_second: of one device at its peak, for the model FLOPs utilisation (MFU); None: no MFU.
        profile: traces the first steps, given the first and the last number (`train.measure.step_profile.tracer`).
        skipped: steps with a gradient that was not finite.
        name: of the run, by which trackers find it again.
    """

    engine: Engine
    target: Target
    states: StateSource
    rows: Sequence[TrainingRow]
    validation_rows: Sequence[TrainingRow]
    schedule: Schedule
    checkpoints: Path
    metrics_path: Path
    identity: dict[str, Any]
    replay: ValidationReplay | None = None
    trackers: Trackers | None = None
    peak_tokens_per_second: float | None = None
    profile: Callable[[int, int], torch.profiler.profile] | None = None

    def __post_init__(self) -> None:
        self.accelerator, self.metrics = self.engine.accelerator, MetricsLog(self.metrics_path)
        drafter, self.section = self.engine.alone.drafter, self.schedule.section
        self.vocab, self.drafter_dtype, self.unroll_steps = drafter.vocab, drafter.dtype, self.engine.alone.steps
        lengths = [len(row.input_ids) for row in self.rows]
        self.order = self.states.ordered(BatchOrder(lengths, self.section.batch_size, self.section.seed))
        self.window = Tally.empty(self.unroll_steps, self.accelerator.device)  # since the last logged step
        peak = self.peak_tokens_per_second
        self.meter = ThroughputMeter(self.accelerator.device, peak and peak * self.schedule.ranks)
        self.skipped, self.name = 0, new_run()
        self.stop_request = StopRequest()

    def run(self) -> bool:
        """Trains from the last checkpoint (or from the start) to the last step.

        Returns:
            False if SIGTERM ended it early, with the current step finished and saved. A second SIGTERM, at another
            moment, ends it at once.

        Raises:
            KeyboardInterrupt: Ctrl-C; its message says where the next start will resume.
        """
        first = self._resume()
        total, quiet = self.schedule.steps, not self.accelerator.is_main_process
        progress = Bar(total=total, initial=first, unit="step", desc="train", disable=quiet, smoothing=0.1)
        tracing = nullcontext() if self.profile is None or first >= total else self.profile(first, total)
        try:
            # The bar is always closed: the next message needs its own line.
            with tracing as tracer, self.stop_request, progress:
                return self._run(first, progress, tracer)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._interrupted_after(progress.n)) from None
        finally:
            if self.trackers is not None:
                self.trackers.finish()

    @property
    def _again(self) -> str:
        """How a run that stopped early is resumed, in words."""
        return "the same command" if self.section.resume == "auto" else "train.resume=auto"

    def _interrupted_after(self, done: int) -> str:
        """The message of Ctrl-C after `done` steps: where the next start will resume."""
        if saved := list_checkpoints(self.checkpoints):
            resumption = f"{self._again} resumes from step {step_of(saved[-1]):,} ({saved[-1]})"
        else:
            first = min(self.section.save_every_steps, self.schedule.steps)
            resumption = f"no checkpoint yet (the first one comes at step {first:,}): the same command starts again"
        return f"interrupted after step {done:,}; {resumption}"

    def _run(self, first: int, progress: Bar, tracer: torch.profiler.profile | None) -> bool:
        self.meter.start(counted_by_all(self.window.of_ranks()))
        for step in range(first, self.schedule.steps):
            waiting: dict[str, Any] | None = None  # a line to be logged after the checkpoint, with replay's numbers
            grad_norm, lr, stop = self._step(step)
            done = step + 1
            if tracer is not None:
                tracer.step()
            self.meter.step()
            progress.update()
            last = done == self.schedule.steps
            save = done % self.section.save_every_steps == 0 or last
            due = done % self.section.validate_every_steps == 0 or last
            due |= save and self.section.keep_best == "simulated_tau"
            validate = bool(self.validation_rows) and due
            replay = self.replay is not None and save
            log = done % self.section.log_every_steps == 0 or validate or replay or last
            if log:
                line = self.window.over_ranks(self.accelerator)
                speed = self.meter.read({key: line.pop(key) for key in COUNTED}, self.schedule.steps - done)
                line = {"step": done, **line, "lr": lr, "skipped_steps": self.skipped, **speed}
                line["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None  # JSON has no NaN
                progress.set_postfix_str(bar_text(line))
                if validate:
                    line |= {f"validation_{k}": v for k, v in self.validate().items() if k not in COUNTED}
                if replay:
                    waiting = line
                else:
                    self._log(line)
                self.window = Tally.empty(self.unroll_steps, self.accelerator.device)
                self.meter.start()
            stop = stop and not last
            if save or stop:
                self.meter.start(self._save(done, waiting))
            if stop:  # without replay, which takes long; the next start makes up for it
                progress.close()
                text = f"SIGTERM: stopped after step {done:,}, which is saved; {self._again} resumes from there"
                self.accelerator.print(text)
                return False
            if waiting is not None:
                self._log(waiting | self.replayed())
                self.meter.start()
        progress.close()
        if self.accelerator.is_main_process and self.section.keep_best is not None:
            self._keep(check=True)  # the last checkpoint was replayed after it was saved
        return True

    def _step(self, step: int) -> tuple[float, float, bool]:
        """One optimiser step: (gradient norm before clipping, learning rate, whether any rank got SIGTERM)."""
        accelerator, engine = self.accelerator, self.engine
        numbers, counts = zip(*self.schedule.numbers(step, accelerator.process_index), strict=True)
        chosen = [self.order.rows(number) for number in numbers]
        epoch = numbers[-1] // self.order.batches_per_epoch  # the order keeps the batches of one epoch
        ahead = self.schedule.ahead(step, accelerator.process_index)
        later = [self.order.rows(number) for number in ahead if number // self.order.batches_per_epoch == epoch]
        self.states.expect([row for rows in (*chosen, *later) for row in rows])
        with self.meter.waiting(), record_function("rows"):
            batches, columns = zip(*(self._batch(self.rows, rows) for rows in chosen), strict=True)
        counted = torch.zeros((), device=accelerator.device)
        for batch_columns in compress(columns, counts):
            counted = counted + batch_columns.counted(0).sum()
        summed: Any = accelerator.reduce(counted, "sum")
        tally = Tally.empty(self.unroll_steps, accelerator.device)
        for i, (batch, batch_columns) in enumerate(zip(batches, columns, strict=True)):
            draws = self._draws(numbers[i], chosen[i])
            with engine.accumulating(last=i + 1 == len(batches)):
                sums = self._forward(engine.trainee, batch, batch_columns, draws)
                with record_function("backward"):
                    engine.backward(sums.loss * (counts[i] / summed.clamp(min=1)))
            if counts[i]:
                tally.add(sums, batch.tokens)
        lr = self.schedule.learning_rate(step)
        with record_function("optimizer"):
            done = engine.step(lr)
        if done.taken:
            self.window.merge(tally)
        else:
            self._report_skipped(step, numbers, chosen)
        # All ranks stop, or none.
        asked: Any = accelerator.reduce(torch.full_like(counted, float(self.stop_request.came)), "sum")
        return done.grad_norm, lr, bool(asked)

    def _draws(self, number: int, rows: Sequence[int]) -> list[str]:
        """Names of the random numbers of each row of a micro-batch: the same in every run, on every rank."""
        epoch = number // self.order.batches_per_epoch
        return [f"{self.section.seed}/{epoch}/{row}" for row in rows]

    def _report_skipped(self, step: int, numbers: Sequence[int], chosen: Sequence[Sequence[int]]) -> None:
        """Names the rows that made a step's gradient not finite; all ranks call it.

        Raises:
            UserError: training has diverged, or more than train.max_skipped_steps steps were skipped.
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
        told = told or "no row alone gives such a number: their sum overflows"
        remedy = (
            f"lower train.learning_rate or lengthen train.warmup_steps; {self.checkpoints} holds the last good state"
        )
        if len(everywhere) > 1 and all(problem == LOSS_IS_NOT_FINITE for _, problem in everywhere):
            raise UserError(f"step {step + 1}: the loss of every row is NaN or inf, training has diverged: {remedy}")
        self.skipped += 1
        self.accelerator.print(f"step {step + 1} skipped: its gradient is not finite ({told})")
        if self.skipped > self.section.max_skipped_steps:
            raise UserError(
                f"{self.skipped} steps had gradients that are not finite, train.max_skipped_steps allows "
                f"{self.section.max_skipped_steps}; the last one: {told}. Look at these rows, or {remedy}"
            )

    def _problem_of(self, trainee: TrainingTimeTest, row: int, draws: Sequence[str]) -> str | None:
        """Which numbers of a training row are not finite; None: all are finite."""
        batch, columns = self._batch(self.rows, [row])
        with torch.no_grad(), self.engine.autocast():
            captured, _ = self.states.of(batch)
        if not bool(torch.isfinite(captured).all()):
            return "the target's captured states are not finite"
        with torch.no_grad():
            sums = self._forward(trainee, batch, columns, draws)
        return None if bool(torch.isfinite(sums.loss)) else LOSS_IS_NOT_FINITE

    def _forward(
        self, trainee: torch.nn.Module, batch: MicroBatch, columns: Columns, draws: Sequence[str] | None = None
    ) -> UnrollSums:
        """The target's pass, the teacher and the drafter's unroll on one micro-batch.

        Args:
            columns: of `batch.one_row`.
            draws: names of the random numbers of each row's feature noise; None: no noise.
        """
        # Reading states counts as waiting; computing them does not.
        reading = nullcontext() if isinstance(self.states, OnlineStates) else self.meter.waiting()
        # The head stays in the target's own precision: it is the teacher.
        with self.engine.autocast(), reading, record_function("target"):
            captured, last = (batch.in_one_row(each) for each in self.states.of(batch))
        row = batch.one_row
        with record_function("teacher"):
            teacher = teacher_of(self.target, last, row.ids, columns, self.vocab)
        if draws is not None and self.section.feature_noise:
            captured = add_noise(captured, self.section.feature_noise, row.lengths, draws, row.documents)
        with record_function("unroll and loss"):
            inputs = self.target.inputs(row.ids, row.position, row.inserts, self.drafter_dtype)
            return trainee(captured, inputs, columns, teacher, row.documents)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracy per step and simulated tau on the validation rows, which the ranks share.

        Names and leaves out rows with a loss that is not finite; `left_out`, if there, counts them.
        """
        tally, left_out = Tally.empty(self.unroll_steps, self.accelerator.device), []
        size, ranks, rows = self.section.batch_size, self.schedule.ranks, self.validation_rows
        # Ranks may have unequal shares: no collectives in here.
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
        """Acceptance along the answers of `replay`, which the ranks share."""
        assert self.replay is not None
        rank, ranks = self.accelerator.process_index, self.schedule.ranks
        with self.engine.whole() as trainee, self.target.uneven_passes():
            rounds = self.replay.share(self.target, trainee.drafter, rank, ranks, self.states)
        return replay_metrics(gather_object(rounds))

    def _batch(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> tuple[MicroBatch, Columns]:
        """A micro-batch, and the columns of its `one_row`. Runs of columns are found before the columns go to the
        device: reading them there would wait for it."""
        first = 0 if rows is self.rows else len(self.rows)  # validation rows are numbered behind training rows
        numbers = [first + i for i in indices]
        batch = collate([rows[i] for i in indices], self.section.packing, numbers)
        columns = columns_of(batch.one_row.span, self.unroll_steps)
        columns = replace(columns, known_runs=tuple(columns.runs(batch.one_row.documents)))
        return batch.to(self.accelerator.device), columns.to(self.accelerator.device)

    def _log(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            if self.trackers is not None:
                self.trackers.log(line)
            self.metrics.append(line)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the highest tau, and its tau; on rank 0.

        None: it is not asked for, or no checkpoint was validated. Damaged checkpoints are named and skipped.
        """
        if self.section.keep_best is None:
            return None
        found = self.metrics.values(BEST_BY[self.section.keep_best])
        for checkpoint in best_of(list_checkpoints(self.checkpoints), found):
            if (problem := damage(checkpoint)) is None:
                return checkpoint, found[step_of(checkpoint)]
            print(f"{checkpoint}: damaged ({problem}); skipped")
        return None

    def _keep(self, check: bool = False) -> None:
        """Removes checkpoints that are neither among the newest nor the best.

        Args:
            check: read the best one to see that it is whole: while a damaged one passes for the best, the best whole
                one would be removed.
        """
        found = self.metrics.values(BEST_BY[self.section.keep_best]) if self.section.keep_best is not None else {}
        best = best_of(list_checkpoints(self.checkpoints), found)[:1]
        if check and best and (whole := self.best()) is not None:
            best = [whole[0]]
        keep_last(self.checkpoints, self.section.keep_checkpoints, best)

    def _save(self, step: int, waiting: dict[str, Any] | None = None) -> dict[str, float]:
        """Writes a checkpoint folder, whole or not at all, and removes those that need not be kept. Returns the counted
        sums since the last line of metrics.

        Args:
            waiting: this step's line of metrics, to be logged after replay. A kill before that must not lose it.
        """
        final = checkpoint_path(self.checkpoints, step)
        partial = final.with_suffix(".partial")
        windows = self.window.of_ranks()
        with failing_together():
            with disk_errors_as_user_errors(partial):
                self.engine.save(partial)
                if self.accelerator.is_main_process:
                    state = {"step": step, "identity": self.identity, "windows": windows, "waiting": waiting}
                    state |= {"skipped_steps": self.skipped, "name": self.name}
                    state |= {"micro_batches": self.schedule.read_by(step), "steps": self.schedule.steps}
                    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
                    sync_to_disk(self.metrics_path)  # a resumed run does not write earlier lines again
                    publish_checkpoint(partial, final)
            if self.accelerator.is_main_process:
                self._keep()
        return counted_by_all(windows)

    def _resume(self) -> int:
        """Loads the last whole checkpoint, if there is one, and returns the number of steps done."""
        with failing_together():
            if self.accelerator.is_main_process:
                self._settle()
        names = [path.name for path in list_checkpoints(self.checkpoints)]
        [name, *_] = gather_object(names[-1:] or [None])  # rank 0 decides
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
        if note := self.schedule.jump(state["step"], state["steps"]):
            self.accelerator.print(note)
        self._log_waiting(state.get("waiting"))
        if self.accelerator.is_main_process:  # the last run may have been killed before it did
            self._keep(check=True)
        return state["step"]

    def _settle(self) -> None:
        existing = list_checkpoints(self.checkpoints)
        if existing and self.section.resume == "never":
            raise UserError(
                f"train.resume is never, but {existing[-1]} exists: set train.resume=auto to resume from it, or choose "
                "another output_dir"
            )
        settle(self.checkpoints)

    def _state_of(self, checkpoint: Path) -> dict[str, Any]:
        """The checkpoint's state. Raises UserError if this run cannot be resumed from it."""
        state = read_state(checkpoint, self.identity)
        self.schedule = self.schedule.resumed(state["step"], state["micro_batches"])
        if state["step"] > self.schedule.steps:
            raise UserError(
                f"{checkpoint} is beyond the {self.schedule.steps} steps of this recipe (train.max_steps, "
                "train.epochs); ask for as many or more, or choose another output_dir"
            )
        return state

    def _begin_log(self, step: int) -> None:
        """Prepares metrics and trackers for lines behind `step`."""
        if self.accelerator.is_main_process:
            self.metrics.drop_after(step)
            if self.trackers is not None:
                self.trackers.start(step, self.name)

    def _log_waiting(self, line: dict[str, Any] | None) -> None:
        """Replays and logs the line that a checkpoint left waiting, unless it was logged before the run ended."""
        if line is None:
            return
        [is_logged, *_] = gather_object([self.accelerator.is_main_process and self.metrics.has_step(line["step"])])
        if not is_logged:
            self._log(line | (self.replayed() if self.replay is not None else {}))
