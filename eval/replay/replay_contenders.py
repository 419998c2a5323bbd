"""eval.mode=replay: the rounds of a recipe's contenders along recorded answers (`eval.replay.replay`).

Answers are eval.answers, or the generations.jsonl of the last decoding in eval.out. Each contender replays its own
answers if the file holds them, else plain decoding's (`Recording.of`). The target reads shared answers only once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.contenders import Contender, loaded_proposer
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.eval.replay import recorded_answers
from draftsmith.eval.replay.recorded_answers import RecordedAnswer, Recording, answer_tokens
from draftsmith.eval.replay.replay import Agreement, batches, head_bytes, plain_rounds, replay_all, replay_bytes
from draftsmith.eval.report_page.result_files import generations_path
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.prompt import Prompt
from draftsmith.models.sampling import Sampling
from draftsmith.models.sizes import device_here, gigabytes, plan_memory
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def recording_of(recipe: Recipe, files: TargetFiles, contenders: Sequence[Contender]) -> Recording:
    """The recorded answers, checked as far as possible before weights are loaded.

    Raises:
        UserError: no answers, damaged ones or another target's; contenders that cannot be replayed along them.
    """
    path = Path(recipe.eval.answers) if recipe.eval.answers else generations_path(recipe)
    section, sampling = recipe.eval, Sampling.of(recipe.eval)
    only, note = recorded_answers.not_trained_on(recipe, path)
    recording = recorded_answers.read_answers(path, section.max_prompts, sampling, section.turns == "first", only)
    recording.note = note
    recorded_answers.check_answers_before_loading(recording, files)
    placed = iter(recorded_answers.with_their_pictures(recording, files.tokenizer))
    recording.answers = {name: [next(placed) for _ in answers] for name, answers in recording.answers.items()}
    problems = []
    turns = [answer.key for answer in _baseline(recording, contenders)]
    for contender in contenders:
        own, place = recording.of(contender.name, PLAIN), contender.place
        if contender.relaxed is not None:
            problems.append(f"{place}: {contender.name!r} accepts tokens that the target would not write: decode")
        if contender.quantization is not None:
            problems.append(f"{place}: quantization: replay reads one target: set target.quantization instead")
        if contender.tree.draw == "sampled" and not all(a.sampling is not None and a.sampling.greedy for a in own):
            problems.append(
                f"{place}: draw: sampled cannot be replayed along answers that were drawn (or may have been): which "
                "tokens the drafter drew is not recorded; leave draw out, or decode"
            )
        if [answer.key for answer in own] != turns:
            problems.append(
                f"eval.answers: {path}: the answers of {contender.name!r} are not to the same turns as those of plain "
                "decoding, in the same order; nothing can be compared"
            )
    if problems:
        raise UserError(problems)
    return recording


def _baseline(recording: Recording, contenders: Sequence[Contender]) -> list[RecordedAnswer]:
    """Plain decoding's answers, or the only contender's."""
    return recording.of(PLAIN, contenders[0].name)


def as_replayed(recipe: Recipe, recording: Recording) -> Recipe:
    """The recipe as acceptance.json keeps it: with the answers' file and sampling, and eval.out's folder `replay`."""
    update: dict[str, Any] = {"answers": str(recording.path), "out": str(recipe.eval_out / "replay")}
    drawn = {answer.sampling for answer in recording}
    if len(drawn) == 1 and (sampling := drawn.pop()) is not None:
        update |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update=update)})


def replay_contenders(
    models: LoadedModels, contenders: Sequence[Contender], recording: Recording, batch_size: int, agreement: Agreement
) -> dict[str, list[Generation]]:
    """The rounds of every contender, plain decoding's first, as `decode_all` returns them but without times."""
    recorded_answers.check_recorded_from(recording, models.identity)
    along = {contender.name: recording.of(contender.name, PLAIN) for contender in contenders}
    groups: dict[tuple[tuple[Prompt, tuple[int, ...]], ...], list[Contender]] = {}  # by their answers
    for contender in contenders:
        told = tuple((Prompt.of(answer.prompt), tuple(answer.tokens)) for answer in along[contender.name])
        groups.setdefault(told, []).append(contender)
    found: dict[str, list[Generation]] = {}
    with Bar(total=sum(map(answer_tokens, along.values())), desc="replay", unit="token") as progress:
        for members in groups.values():
            proposers = {contender.name: loaded_proposer(models, contender) for contender in members}
            answers = along[members[0].name]
            found |= replay_all(models.target, proposers, answers, batch_size, agreement, progress.update)
    plain = [plain_rounds(answer) for answer in _baseline(recording, contenders)]
    return {PLAIN: plain} | {contender.name: found[contender.name] for contender in contenders}


def print_replay_plan(
    recipe: Recipe, files: TargetFiles, recording: Recording, contenders: Sequence[Contender]
) -> None:
    answers, size = _baseline(recording, contenders), files.size
    shapes = [read_drafter_config(c.drafter)[0] for c in contenders if c.drafter is not None and c.drafter.exists()]
    layers = {layer for shape in shapes for layer in shape.capture_layers}
    states = len(layers) * files.text_config.hidden_size * size.dtype.itemsize
    columns = max((shape.column_bytes for shape in shapes), default=0)  # one drafter works at a time
    rows = next(batches(answers, recipe.eval.replay_batch_size))  # the longest answers
    lengths = [len(answers[row].prompt) + len(answers[row].tokens) for row in rows]
    batch = replay_bytes(sum(lengths), len(rows), max(lengths), states, columns)
    batch += head_bytes(files.text_config.vocab_size)
    with PlanLines() as plan:
        plan.line("reads", f"{recording.path}: {len(answers):,} answers, {answer_tokens(answers):,} tokens", "counted")
        plan.line("replayed by", "; ".join(contender.name for contender in contenders))
        text = f"target {gigabytes(size.weight_bytes)} ({size.weight_basis}), states of "
        text += f"{recipe.eval.replay_batch_size} answers and drafters' columns {gigabytes(batch)}, besides drafters"
        plan_memory(plan, size.weight_bytes + batch, text, device_here(recipe.target.device))
        plan.line("time", "unknown until the first answers are replayed; the progress bar then shows what is left")
        plan.writes(*(recipe.eval_out / name for name in ("acceptance.json", "generations.jsonl", "report.html")))
