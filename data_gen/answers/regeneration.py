"""Answers conversations for training, behind data_gen/regenerate.py."""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from draftsmith.data_gen.answers.conversation_log import NAMED_AT_MOST, ConversationLog, LogContent, not_done, read_log
from draftsmith.data_gen.answers.generators import DRAFT_TOKENS, GenerationSettings, Writer, resolve_sampling
from draftsmith.data_gen.answers.open_conversations import OpenConversations
from draftsmith.data_gen.server_client.generator import Servers, Unanswered
from draftsmith.data_gen.server_client.server_answers import Vocabulary
from draftsmith.data_gen.states.answer_states import storing, wanted_states
from draftsmith.data_gen.states.capturing import WantedStates, complete
from draftsmith.data_gen.training_rows.overlap import screen
from draftsmith.eval.decoding.proposers import check_drafter
from draftsmith.models.chat import RenderError, prompt_date, reads_pictures, render_prompt, template_variables
from draftsmith.models.checkpoint import weight_bytes
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.formats.named_drafters import with_writing_drafter, yet_to_import
from draftsmith.models.sizes import free_bytes, gigabytes, plan_decoding
from draftsmith.models.target_files import TargetFiles, bounded_rows, check_evaluation, longest_row, weight_digests
from draftsmith.models.turn_ends import answer_notes
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, collecting_problems, naming_problems
from draftsmith.recipes.loader import portable
from draftsmith.recipes.prompts.picture_parts import data_url, store_picture
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.prompt_reader import DUPLICATE, Conversation, Rejects, questions, read_training_prompts
from draftsmith.recipes.schema import Recipe

SAMPLED = 500  # conversations whose first prompts are rendered to know their length
HUB_SAMPLE = 50  # conversations of a hub dataset that a plan fetches
BYTES_A_TOKEN = 12  # of an answer on disk: its id in JSON, and its text
CUT_SHARE = 0.5  # share of cut answers above which the summary gives advice


def main(command: Command) -> int:
    """Writes the answers and returns the number of conversations that the next run has to ask again."""
    recipe = with_writing_drafter(command.recipe, command.plan)
    files = TargetFiles(recipe.target)
    check_export(recipe, files)
    if not command.plan:
        check_evaluation(recipe, files)
    settings = generation_settings(recipe, files)
    identity = generator_identity(recipe, settings, files)
    if note := bounded_rows(recipe, files):
        print(note)
    drafter = recipe.data.generator.drafter
    if drafter is not None and not yet_to_import(recipe, drafter):
        with naming_problems("data.generator.drafter: "):
            check_drafter(files, Path(drafter))
    path = recipe.conversations_path
    rejects = Rejects(None if command.plan else path.with_suffix(".rejects.jsonl"))
    conversations = asked_conversations(recipe, files, rejects, command.plan)
    for note in answer_notes(files):
        print(note)
    if command.plan:
        with PlanLines() as plan:
            print_regeneration_plan(plan, recipe, files, settings, conversations, read_log(path, identity))
            plan.line("rejected", rejects.summary())
            if recipe.data.generator.kind == "openai":
                with open_servers(recipe, settings, files) as servers:
                    plan.line("servers", f"reached, and serving {servers.connect(ask=False)}; nothing was asked")
        return 0
    with ConversationLog(path, identity) as log, sigterm_exits():
        todo = not_done(conversations, log.content)
        done = len(conversations) - len(todo)
        if others := len(log.content.done) - done:
            print(f"{path}: conversations that are not in data.prompts: {others:,}; kept")
        if not todo:
            print(f"all {done:,} conversations are done; {rejects.summary()}")
            complete(recipe)
            return 0
        if done:
            print(f"{path}: {done:,} of {len(conversations):,} conversations are done, going on")
        if recipe.data.generator.kind == "openai":
            with open_servers(recipe, settings, files) as servers:
                log.identify("served_model", servers.connect())
                return regenerate(servers, files.tokenizer, todo, log, rejects)
        if (asked := wanted_states(recipe, files)) is not None:
            check_room_for_states(asked, recipe, files, todo, len(todo), log.content)
        writer = Writer.of(recipe, files, settings)
        for name, digest in weight_digests(writer.target).items():
            log.identify(name, digest)
        if drafter is not None:
            log.generator["drafted_by"] = {"drafter": drafter, "draft_tokens": DRAFT_TOKENS}
        with contextlib.ExitStack() as held:
            if asked is not None:
                writer.states = held.enter_context(storing(recipe, asked, files, writer.target))
            unanswered = regenerate(writer, files.tokenizer, todo, log, rejects)
        if asked is not None or not log.appended:
            complete(recipe, writer.target)
        return unanswered


def asked_conversations(recipe: Recipe, files: TargetFiles, rejects: Rejects, plan: bool) -> list[Conversation]:
    """The recipe's conversations. Of a hub dataset a plan reads a few, and does not compare them with eval.prompts."""
    limit, sample_only = recipe.data.max_prompts, plan and recipe.data.has_hub_prompts
    if sample_only:
        limit = min(limit or HUB_SAMPLE, HUB_SAMPLE)
    conversations = list(read_training_prompts(recipe.data, rejects, limit))
    if not reads_pictures(files.tokenizer) and all(each.images or each.other_parts for each in conversations):
        raise UserError(
            f"data.prompts: {recipe.target.model} reads text only, and all prompts have pictures: name prompts of "
            "text, or a vision-language target"
        )
    if (dropped := rejects.counts[DUPLICATE]) > 0:
        print(f"data.prompts: repeated questions dropped: {dropped:,} (data.duplicates=keep keeps them)")
    return conversations if sample_only else screen(recipe, conversations, rejects, write=not plan)


def regenerate(
    writer: Writer | Servers,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    log: ConversationLog,
    rejects: Rejects,
) -> int:
    """Answers `conversations` and appends each to `log` after its last turn. Returns how many got no answer.

    Raises UserError if nothing was answered, now or earlier.
    """
    store = partial(store_picture, folder=log.path.with_suffix(".pictures"))
    asked = OpenConversations(conversations, tokenizer, writer.settings.max_length, rejects, store)
    bar, ended = Bar(total=len(conversations), desc="regenerating", unit="conversation"), False
    try:
        with bar:
            for answer in writer(asked.prompts()):
                finished = None
                if isinstance(answer, Unanswered):
                    finished = asked.give_up(answer)
                elif answer is not None:
                    finished = asked.take(answer)
                if finished is not None:
                    if writer.states is not None:
                        writer.states.store(finished["id"])
                    log.append(finished)
                bar.update(log.appended + asked.rejected + len(asked.failed) - bar.n)
                rate = f"{writer.tokens_received / max(bar.seconds, 1e-3):,.0f} tokens/s"
                bar.set_postfix_str(rate + writer.load, refresh=answer is None)
        if not log.appended and not log.content.done:
            reasons = [f"{name}: {reason}" for name, reason in asked.failed.items()][:1] or [rejects.summary()]
            raise UserError(f"data.prompts: none of {len(conversations):,} conversations was answered; {reasons[0]}")
        ended = True
    finally:
        if ended or asked.counts:  # after an interrupt as well, but not after an error before the first answer
            print(
                f"{log.appended:,} of {len(conversations):,} conversations written"
                + f", {asked.rejected:,} rejected" * (asked.rejected > 0)
                + f", {len(asked.failed):,} without an answer" * (len(asked.failed) > 0)
            )
            print("\n".join([*_summary(asked.counts, writer.settings, bar.seconds), *writer.summary()]))
            if rejects.total:
                print(rejects.summary())
            if asked.failed:
                first, reason = next(iter(asked.failed.items()))
                named = ", ".join(list(asked.failed)[:NAMED_AT_MOST]) + ", ..." * (len(asked.failed) > NAMED_AT_MOST)
                print(f"without an answer: {named}; {first}: {reason}. The same command asks them again")
    return len(asked.failed)


def _summary(counts: Counter[str], settings: GenerationSettings, seconds: float) -> Iterator[str]:
    """Of `OpenConversations.counts`, with advice if most answers were cut."""
    answers, tokens, cut = counts["answers"], counts["tokens"], counts["cut"] / max(counts["answers"], 1)
    yield (
        f"{answers:,} answers, {tokens:,} tokens, {tokens / max(seconds, 1e-3):,.0f} tokens/s"
        + f", {cut:.1%} of the answers cut by length" * (cut > 0)
        + f", {counts['unasked']:,} user turns not asked" * (counts["unasked"] > 0)
        + f", {counts['retokenised']:,} answers tokenised again from text" * (counts["retokenised"] > 0)
    )
    if cut > CUT_SHARE:
        yield (
            f"note: {cut:.0%} of the answers were cut, at data.generator.max_new_tokens {settings.max_new_tokens:,} or "
            f"with their prompts at data.max_length {settings.max_length:,}. A cut answer ends its conversation, and a "
            "drafter does not learn from it how answers end: raise these, with another output_dir"
        )


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Ends the run on SIGTERM as on Ctrl-C, with exit code 143: answers are written and the summary is printed."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    default = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, default)


def open_servers(recipe: Recipe, settings: GenerationSettings, files: TargetFiles) -> Servers:
    """The recipe's servers, not yet connected."""
    tokenizer = files.tokenizer
    vocabulary = Vocabulary(tokenizer, max(files.text_config.vocab_size, len(tokenizer)), settings.stop_ids)
    day = None if "date_string" in recipe.target.template_args else prompt_date(tokenizer)  # Llama's variable for it
    return Servers(recipe.data.generator, settings, vocabulary, template_variables(recipe.target), day)


def generation_settings(recipe: Recipe, files: TargetFiles) -> GenerationSettings:
    """The recipe's settings, completed by the target's generation config and limited by its context."""
    asked = recipe.data.generator
    # ViSpec's training answers are sampled, and configs of vision-language models are nearly greedy (Qwen2.5-VL: 1e-6).
    defaults = GenerationConfig() if reads_pictures(files.tokenizer) else files.generation_config
    return GenerationSettings(
        max_new_tokens=asked.max_new_tokens,
        max_length=longest_row(recipe, files),
        stop_ids=files.stop_ids,
        sampling=resolve_sampling(asked.temperature, asked.top_p, asked.top_k, defaults),
        seed=asked.seed,
        batch_size=asked.batch_size,
    )


def generator_identity(recipe: Recipe, settings: GenerationSettings, files: TargetFiles) -> dict[str, Any]:
    """Settings that every line of the file must share. The drafter is left out: it does not change the distribution."""
    section, kind = recipe.target, recipe.data.generator.kind
    dtype = section.dtype
    if dtype == "auto":
        dtype = str(files.config.dtype or "float32").removeprefix("torch.")
    return {
        "kind": kind,
        "target": portable(section.model),
        "revision": section.revision,
        "dtype": dtype if kind == "transformers" else None,  # unknown for servers; the log records `served_model`
        "tokenizer_fingerprint": files.fingerprint,
        **files.changes,
        "template_args": template_variables(section),
        "date": prompt_date(files.tokenizer),
        **asdict(settings.sampling),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "max_length": settings.max_length,
        "stop_ids": list(settings.stop_ids),
    }


def check_room_for_states(
    asked: WantedStates, recipe: Recipe, files: TargetFiles, todo: list[Conversation], count: int, log: LogContent
) -> None:
    """Raises UserError if the states of `count` conversations like `todo` do not fit on the disk.

    Counts the first prompt of each, and one answer of the mean length so far.
    """
    prompts = []
    for conversation in todo[:: -(-len(todo) // SAMPLED) or 1]:
        with contextlib.suppress(ValueError, RenderError):  # it cannot be asked
            if reads_pictures(files.tokenizer):
                conversation = with_named_pictures(conversation, data_url)
            turn = next(questions(conversation.messages))
            prompts.append(len(render_prompt(files.tokenizer, turn, conversation.meta.get("tools"))))
    answer = log.answer_tokens / log.answers if log.answers else 1
    least = count * asked.bytes_of(sum(prompts) / max(1, len(prompts)) + answer, answer)
    if least > (free := free_bytes(recipe.states_dir)):
        raise UserError(
            f"data.states: at least {gigabytes(least)} are to be written to {recipe.states_dir} with the answers, and "
            f"{gigabytes(free)} are free there: make room, name another folder, or take data.capture.dtype=fp8 or a "
            "smaller data.max_length"
        )


def print_regeneration_plan(
    plan: PlanLines,
    recipe: Recipe,
    files: TargetFiles,
    settings: GenerationSettings,
    conversations: list[Conversation],
    log: LogContent,
) -> None:
    """Prints what a run would do. Of a hub dataset, `conversations` are the first ones."""
    todo, generator = not_done(conversations, log), recipe.data.generator
    count, answers = len(todo), sum(len(list(questions(conversation.messages))) for conversation in todo)
    plan.line("reads", f"{recipe.data.prompts}: {len(conversations):,} conversations, {len(log.done):,} done")
    if recipe.data.has_hub_prompts:
        plan.line("", "a sample: hub datasets are not read for a plan, and not compared with eval.prompts")
        if recipe.data.max_prompts is not None:
            left = max(0, recipe.data.max_prompts - len(log.done))
            count, answers = left, answers * left // max(1, count)
    how = f"{settings.batch_size} conversations side by side"
    if generator.kind == "openai":
        how = f"{generator.concurrency} requests at a time over {len(generator.base_urls)} servers"
    drawn = ", ".join(f"{name} {value:g}" for name, value in asdict(settings.sampling).items())
    plan.line("target", f"{recipe.target.model}, {drawn}, {how}")
    if generator.drafter is not None:
        plan.line("drafter", f"{generator.drafter}, {DRAFT_TOKENS} tokens for each pass of the target")
    plan.line("to do", f"{count:,} conversations, {answers:,} answers", "counted")
    about, each = ("about", log.answer_tokens / log.answers) if log.answers else ("at most", settings.max_new_tokens)
    plan.line("tokens", f"{about} {answers * each:,.0f} of answers, {each:,.0f} each")
    size = gigabytes(BYTES_A_TOKEN * answers * each)
    plan.line("disk", f"{about} {size} of answers, besides the prompts", f"assumed: {BYTES_A_TOKEN} bytes a token")
    if (states := wanted_states(recipe, files)) is not None:
        size = gigabytes(count * states.bytes_of(settings.max_length, settings.max_length))
        free = gigabytes(free_bytes(recipe.states_dir))
        text = f"{list(states.layers)}{' and the last' * states.has_last}, in {recipe.data.capture.dtype}: "
        text += f"at most {size} in {recipe.states_dir}, a row of {settings.max_length:,} tokens each; {free} are free"
        plan.line("states", text)
        with collecting_problems(plan.problems):
            check_room_for_states(states, recipe, files, todo, count, log)
    if generator.kind == "openai":
        plan.line("memory", "of the servers")
    else:
        beside = 0 if generator.drafter is None else weight_bytes(Path(generator.drafter))
        rows = min(settings.batch_size, max(1, count))
        plan_decoding(plan, files, rows, settings.max_length, beside)
    plan.line("time", "unknown until the first answers are written; the progress bar then shows what is left")
    plan.writes(log.path)
