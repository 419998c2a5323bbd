"""The one training loop: accumulate, clip, log, validate, save, resume.

A step's loss is a sum over counted columns divided by their number in the global batch (all micro-batches, all ranks),
so splitting a batch differently changes no gradient. A step is a function of (weights, optimiser state, step number). A
run that is resumed from a checkpoint therefore continues bit for bit, on one process and on two (unless two tokens of
`LikeliestTokens` tie to within float32's rounding).
"""

import math
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.profiler import record_function

from draftsmith.data_gen.states.store import writing
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.measurement.metrics import summarise
from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import sync_to_disk
from draftsmith.recipes.schema import Recipe
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, add_noise, teacher_of
from draftsmith.train.measure.metrics_line import COUNTED, Tally, ThroughputMeter
from draftsmith.train.run.batches import BatchOrder, MicroBatch, collate
from draftsmith.train.run.checkpoints import (
    best_of,
    checkpoint_path,
    keep_last,
    list_checkpoints,
    publish_checkpoint,
    read_state,
    settle,
    step_of,
)
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.likeliest_tokens import LikeliestTokens
from draftsmith.train.run.processes import StopRequest, failing_together
from draftsmith.train.run.run_log import MetricsLog, Trackers, tracer
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.state_sources import OnlineStates, StateSource
from draftsmith.train.run.training_inputs import Inputs
from draftsmith.train.run.validation_replay import ValidationReplay

RESUME = "start again: training resumes from the last checkpoint"
LOSS_IS_NOT_FINITE = "its loss is not finite"
# train.keep_best: the key of the lines of metrics that it compares.
BEST_BY = {"simulated_tau": "validation_simulated_tau", "replay_tau": "replay_tau"}


def first_five(names: Sequence[str], joint: str = ", ") -> str:
    return joint.join(names[:5]) + f"{joint}and {len(names) - 5} more" * (len(names) > 5)


@dataclass
class Loop:
    """One run of training. It writes to the recipe's checkpoints, metrics.jsonl, profile and trackers only.

    Attributes:
        identity: what a resumed run must share (`train.run.checkpoints.run_identity`).
        replay: answers along which acceptance is measured at every checkpoint; None: it is not.
        peak_tokens_per_second: of one device at its peak, for the model FLOPs utilisation (MFU); None: no MFU.
        profile_steps: first steps to trace; None: none.
        target_identity: the target's identity and layout, for the drafter's config.json.
        skipped: steps with a gradient that was not finite.
        waiting: the newest checkpoint's line of metrics, until its replay is done. It is saved with the checkpoint.
        name: of the run, by which trackers find it again.
    """

    recipe: Recipe
    inputs: Inputs
    engine: Engine
    target: Target
    states: StateSource
    identity: dict[str, Any]
    replay: ValidationReplay | None
    peak_tokens_per_second: float | None
    profile_steps: int | None
    target_identity: dict[str, Any]

    def __post_init__(self) -> None:
        self.accelerator, self.section = self.engine.accelerator, self.recipe.train
        self.rows, self.validation_rows = self.inputs.rows, self.inputs.validation_rows
        self.checkpoints, self.metrics = self.recipe.checkpoints_dir, MetricsLog(self.recipe.metrics_path)
        self.schedule = Schedule(self.section, len(self.rows), self.accelerator.num_processes)
        drafter, self.unroll_steps = self.engine.alone.drafter, self.engine.alone.steps
        self.vocab, self.drafter_dtype = drafter.vocab, drafter.dtype
        lengths = [len(row.input_ids) for row in self.rows]
        self.order = self.states.ordered(BatchOrder(lengths, self.section.batch_size, self.section.seed))
        micro_batches = self.schedule.steps * self.schedule.micro_batches_per_step
        # Several ranks see other rows in each epoch. A target that runs rounds a row's states by its batch.
        again = (
            self.schedule.ranks == 1 and micro_batches > self.order.batches_per_epoch and self.inputs.store is not None
        )
        self.likeliest = LikeliestTokens.of(self.target, self.vocab) if again else None
        self.window = Tally.empty(self.unroll_steps, self.accelerator.device)  # since the last logged step
        peak = self.peak_tokens_per_second
        self.meter = ThroughputMeter(self.accelerator.device, peak and peak * self.schedule.ranks)
        self.skipped, self.name = 0, uuid.uuid4().hex[:8]
        self.waiting: dict[str, Any] | None = None
        self.trackers, self.stop_request = Trackers(self.recipe), StopRequest()

    def run(self) -> bool:
        """Trains from the last checkpoint (or from the start) to the last step.

        Returns:
            False if SIGTERM ended it early, with the current step finished and saved. A second SIGTERM, at another
            moment, ends it at once.

        Raises:
            KeyboardInterrupt: Ctrl-C; its message says where the next start will resume.
        """
        first = self._resume()
        total, main = self.schedule.steps, self.accelerator.is_main_process
        progress = Bar(total=total, initial=first, unit="step", desc="train", disable=not main, smoothing=0.1)
        tracing: Any = nullcontext()
        if self.profile_steps and first < total:
            folder, rank = Path(self.recipe.output_dir) / "profile", self.accelerator.process_index
            tracing = tracer(self.profile_steps, folder, rank, self.accelerator.print, first, total)
        try:
            # The bar is always closed: the next message needs its own line.
            with tracing as trace, self.stop_request, progress:
                return self._run(first, progress, trace)
        except KeyboardInterrupt:
            where = "no checkpoint yet: the same command starts again"
            if saved := list_checkpoints(self.checkpoints):
                where = f"the same command resumes from step {step_of(saved[-1]):,} ({saved[-1]})"
            raise KeyboardInterrupt(f"interrupted after step {progress.n:,}; {where}") from None
        finally:
            self.trackers.finish()

    def _run(self, first: int, progress: Bar, trace: torch.profiler.profile | None) -> bool:
        section = self.section
        self._complete()  # the last run may have ended before it did
        for done in range(first + 1, self.schedule.steps + 1):
            grad_norm, lr, stop = self._step(done - 1)
            if trace is not None:
                trace.step()
            self.meter.steps += 1
            progress.update()
            last = done == self.schedule.steps
            save = last or done % section.save_every_steps == 0
            due = last or done % section.validate_every_steps == 0 or (save and section.keep_best == "simulated_tau")
            validate, replay = bool(self.validation_rows) and due, self.replay is not None and save
            if last or validate or replay or done % section.log_every_steps == 0:
                line = self.window.over_ranks(self.accelerator)
                speed = self.meter.read({key: line.pop(key) for key in COUNTED}, self.schedule.steps - done)
                line = {"step": done, **line, "lr": lr, "skipped_steps": self.skipped, **speed}
                line["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None  # JSON has no NaN
                text = f"loss {line['loss']:.3f}, tau {line['simulated_tau']:.2f}, " if "loss" in line else ""
                text += f"{line['tokens_per_second']:,} tok/s, {line['data_wait']:.0%} waiting"
                progress.set_postfix_str(text)
                if validate:
                    line |= {f"validation_{k}": v for k, v in self.validate().items() if k not in COUNTED}
                if replay:
                    self.waiting = line
                else:
                    self._log(line)
                self.window = Tally.empty(self.unroll_steps, self.accelerator.device)
                self.meter.start()
            if save or stop:
                self._save(done)
            if stop and (replay or not last):  # without replay, which takes long
                progress.close()
                said = f"SIGTERM: stopped after step {done:,}, which is saved; the same command resumes from there"
                self.accelerator.print(said)
                return False
            if save:
                self._complete()
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
                tally.add(sums, len(batch.tokens_at))
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
        return [f"{self.section.seed}/{number // self.order.batches_per_epoch}/{row}" for row in rows]

    def _report_skipped(self, step: int, numbers: Sequence[int], chosen: Sequence[Sequence[int]]) -> None:
        """Names the rows that made a step's gradient not finite; all ranks call it. Raises UserError if training has
        diverged, or more than train.max_skipped_steps steps were skipped."""
        with self.engine.whole() as trainee, self.target.uneven_passes():
            found = [
                (self.rows[row].id, self._problem_of(trainee, row, self._draws(number, [row])))
                for number, rows in zip(numbers, chosen, strict=True)
                for row in rows
            ]
        everywhere = list(dict.fromkeys(gather_object(found)))
        told = first_five([f"{id_}: {problem}" for id_, problem in everywhere if problem], "; ")
        told = told or "no row alone gives such a number: their sum overflows"
        remedy = f"lower train.learning_rate or lengthen train.warmup_steps; {self.checkpoints} has the last good state"
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

    def _batch(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> tuple[MicroBatch, Columns]:
        """A micro-batch, and the columns of its `one_row`. Runs of columns are found before the columns go to the
        device: reading them there would wait for it."""
        first = 0 if rows is self.rows else len(self.rows)  # validation rows are numbered behind training rows
        batch = collate([rows[i] for i in indices], self.section.packing, [first + i for i in indices])
        columns = columns_of(batch.one_row.span, self.unroll_steps)
        columns = replace(columns, known_runs=tuple(columns.runs(batch.one_row.documents)))
        return batch.to(self.accelerator.device), columns.to(self.accelerator.device)

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
            if self.likeliest is not None:
                teacher = self.likeliest.informed(teacher, row.rows)
        if draws is not None and self.section.feature_noise:
            captured = add_noise(captured, self.section.feature_noise, row.lengths, draws, row.documents)
        with record_function("unroll and loss"):
            inputs = self.target.inputs(row.ids, row.position, row.inserts, self.drafter_dtype)
            sums = trainee(captured, inputs, columns, teacher, row.documents)
        if self.likeliest is not None:
            self.likeliest.keep(teacher, row, columns)
        return sums

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss, accuracy per step and simulated tau on the validation rows, which the ranks share. Names and leaves out
        rows with a loss that is not finite; `left_out`, if there, counts them."""
        tally, left_out = Tally.empty(self.unroll_steps, self.accelerator.device), []
        size, rows = self.section.batch_size, range(len(self.validation_rows))
        mine = [rows[i : i + size] for i in rows[self.accelerator.process_index * size :: size * self.schedule.ranks]]
        # Ranks may have unequal shares: no collectives in here.
        with self.engine.whole() as trainee, self.target.uneven_passes():
            for together in mine:
                sums = self._forward(trainee, *self._batch(self.validation_rows, together))
                if bool(torch.isfinite(sums.loss)):
                    tally.add(sums)
                elif len(together) > 1:
                    mine += [range(row, row + 1) for row in together]  # one by one, after all others
                else:
                    left_out.append(self.validation_rows[together[0]].id)
        found = tally.over_ranks(self.accelerator)
        if left_out := gather_object(left_out):
            self.accelerator.print(f"validation without {first_five(left_out)}: {LOSS_IS_NOT_FINITE}")
            found["left_out"] = len(left_out)
        return found

    def replayed(self) -> dict[str, Any]:
        """Acceptance along the answers of `replay`, which the ranks share (`eval.measurement.metrics`)."""
        assert self.replay is not None
        rank, ranks = self.accelerator.process_index, self.schedule.ranks
        with self.engine.whole() as trainee, self.target.uneven_passes():
            rounds = self.replay.share(self.target, trainee.drafter, rank, ranks, self.states)
        rounds = gather_object(rounds)
        numbers = summarise(rounds, rounds, seed=0, sampled=True)
        return {"replay_tau": numbers["tau"], "replay_accepted_by_position": numbers["acceptance_by_position"]}

    def _log(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.trackers.log(line)
            self.metrics.append(line)

    # Checkpoints.

    def best(self) -> tuple[Path, float] | None:
        """The whole checkpoint with the highest train.keep_best, and that value; on rank 0. None: it is not asked for,
        or none was validated."""
        if self.section.keep_best is None:
            return None
        return best_of(self.checkpoints, self.metrics.values(BEST_BY[self.section.keep_best]))

    def _save(self, step: int) -> None:
        """Writes a checkpoint folder, whole or not at all."""
        partial, windows = checkpoint_path(self.checkpoints, step).with_suffix(".partial"), self.window.of_ranks()
        with failing_together(), writing(partial, RESUME):
            self.engine.save(partial)
            if self.accelerator.is_main_process:
                state = {"step": step, "identity": self.identity, "windows": windows, "waiting": self.waiting}
                state |= {"skipped_steps": self.skipped, "name": self.name}
                state |= {"micro_batches": self.schedule.read_by(step), "steps": self.schedule.steps}
                sync_to_disk(self.metrics.path)  # a resumed run does not write earlier lines again
                publish_checkpoint(partial, state)

    def _complete(self) -> None:
        """What follows a checkpoint: the replay that its line of metrics waits for, the removal of checkpoints that
        need not be kept, and a new start of the meter."""
        if self.waiting is not None:
            self._log(self.waiting | (self.replayed() if self.replay is not None else {}))
            self.waiting = None
        with failing_together():
            if self.accelerator.is_main_process:
                best = self.best()
                keep_last(self.checkpoints, self.section.keep_checkpoints, best and best[0])
        sums = self.window.of_ranks()
        self.meter.start({key: sum(each[key] for each in sums) for key in COUNTED})

    def _resume(self) -> int:
        """Loads the last whole checkpoint, if there is one, and returns the number of steps done."""
        main = self.accelerator.is_main_process
        with failing_together():
            if main:
                settle(self.checkpoints)
        [last, *_] = gather_object(list_checkpoints(self.checkpoints)[-1:] or [None])  # rank 0 decides
        if last is None:
            self.engine.start()
            step = 0
        else:
            with failing_together():
                state = read_state(last, self.identity)
                self.schedule = self.schedule.resumed(state["step"], state["micro_batches"])
                if (step := state["step"]) > self.schedule.steps:
                    raise UserError(
                        f"{last} is beyond the {self.schedule.steps} steps of this recipe (train.max_steps, "
                        "train.epochs); ask for as many or more, or choose another output_dir"
                    )
            self.engine.start(last)
            self.skipped, self.name = state["skipped_steps"], state["name"]
            self.window.restore(state["windows"], self.accelerator)
            self.waiting = state.get("waiting")
            self.accelerator.print(f"resumed from {last}")
            if note := self.schedule.jump(step, state["steps"]):
                self.accelerator.print(note)
        if main:
            self.metrics.drop_after(step)
            self.trackers.start(step, self.name)
        if any(gather_object([main and step in self.metrics.values("step")])):
            self.waiting = None
        return step
