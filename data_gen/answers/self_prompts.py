"""Prompts that the target writes itself, behind data_gen/self_prompt.py.

    <|im_start|>system You are ... <|im_end|> <|im_start|>user | What is a prime number? <|im_end|>
    the template's opening of a user turn                      | drawn                   stop

Magpie (Xu et al. 2024, arXiv 2406.08464) writes such openings by hand, one per family; here the chat template is asked
(`turn_ends.user_turn`).
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.answers.conversation_log import ConversationLog, read_log
from draftsmith.data_gen.answers.generators import Asked, GenerationSettings, Writer
from draftsmith.data_gen.answers.regeneration import (
    generation_settings,
    generator_identity,
    open_servers,
    sigterm_exits,
)
from draftsmith.data_gen.server_client.generator import Servers, Unanswered
from draftsmith.models.chat import decode_answer
from draftsmith.models.formats.named_drafters import with_writing_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.sizes import plan_decoding
from draftsmith.models.target_files import TargetFiles, weight_digests
from draftsmith.models.turn_ends import user_turn
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write, json_line
from draftsmith.recipes.schema import Recipe

Record = dict[str, Any]
MOST, LEAST = 4, 64  # draws for each prompt that is asked for, and of a run, before it gives up
SPARE = 8  # draws beyond those that the share of good ones so far asks for
GRAM, CIRCLES = (
    3,
    0.5,
)  # fewer distinct runs of so many words or characters than this share: the text goes round in circles


def main(command: Command) -> None:
    """Writes the prompts. Raises UserError if too few of MOST draws each can be asked."""
    recipe = with_writing_drafter(command.recipe, command.plan)
    section, out, files = recipe.data.self_prompts, recipe.self_prompts_path, TargetFiles(recipe.target)
    opening, ends = user_turn(files.tokenizer)
    settings = replace(
        generation_settings(recipe, files),
        max_new_tokens=section.max_new_tokens,
        stop_ids=tuple(sorted({*files.stop_ids, ends})),
        sampling=Sampling(section.temperature, section.top_p),
        seed=section.seed,
    )
    log_path, identity = out.with_suffix(".drawn.jsonl"), generator_identity(recipe, settings, files)
    if command.plan:
        with PlanLines() as plan:
            done, each = len(read_log(log_path, identity).done), settings.max_new_tokens
            plan.line("prompts", f"{section.count:,} by {recipe.target.model}, {done:,} drawn already")
            plan.line("opening", json.dumps(files.tokenizer.decode(opening), ensure_ascii=False))
            plan.line("tokens", f"at most {section.count * each:,}, {each} each, and those of prompts left out")
            if recipe.data.generator.kind == "transformers":
                plan_decoding(plan, files, settings.batch_size, len(opening) + each, 0)
            plan.writes(out)
        return
    with ConversationLog(log_path, identity) as log, sigterm_exits():
        drawn = {record["id"]: record for record in map(json.loads, log_path.read_bytes().splitlines())}
        total, most = section.count, max(LEAST, MOST * section.count)
        good, left_out = usable(drawn, settings, total)
        if len(good) < section.count:
            with _writer(recipe, files, settings, log) as writer:
                while True:
                    _draw(writer, files.tokenizer, opening, total, drawn, log)
                    good, left_out = usable(drawn, settings, total)
                    short = section.count - len(good)
                    if short <= 0 or total == most:
                        break
                    share = max(len(good) / total, 1 / MOST)
                    total = min(most, total + int(short / share) + SPARE)
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in left_out.most_common()) or "none"
    if len(good) < section.count:
        raise UserError(
            f"data.self_prompts: of {total:,} draws only {len(good):,} can be asked, {section.count:,} are wanted; "
            f"left out: {reasons}. Is the target a chat model? Ask for fewer (count), longer ones (max_new_tokens), or "
            "name a file in data.prompts"
        )
    prompts = good[: section.count]
    atomic_write(out, b"".join(map(json_line, prompts)))
    print(f"{out}: {len(prompts):,} prompts; left out: {reasons}")


@contextmanager
def _writer(
    recipe: Recipe, files: TargetFiles, settings: GenerationSettings, log: ConversationLog
) -> Iterator[Writer | Servers]:
    """Who draws; the log knows them from then on."""
    if recipe.data.generator.kind == "openai":
        with open_servers(recipe, settings, files) as servers:
            log.identify("served_model", servers.connect())
            yield servers
        return
    writer = Writer.of(recipe, files, settings)
    for name, digest in weight_digests(writer.target).items():
        log.identify(name, digest)
    yield writer


def _draw(
    writer: Writer | Servers,
    tokenizer: PreTrainedTokenizerBase,
    opening: list[int],
    total: int,
    drawn: dict[str, Record],
    log: ConversationLog,
) -> None:
    """Adds the draws up to number `total` that are not in `drawn` to it and to the log."""
    todo = [name for name in names(writer.settings, total) if name not in drawn]
    asked: list[Asked] = [((name, 0), opening) for name in todo]
    with Bar(total=len(todo), desc="drawing prompts", unit="prompt") as bar:
        for answer in writer(iter(asked)):
            if isinstance(answer, Unanswered):
                raise UserError(f"data.self_prompts: {answer.reason}; the same command goes on from {log.path}")
            if answer is not None:
                (name, _), ids, reason, _ = answer
                message = {"role": "user", "content": decode_answer(tokenizer, ids).strip()}
                turn = {"output_token_ids": ids, "finish_reason": reason}
                drawn[name] = {"id": name, "messages": [message], "turns": [turn], "asked_digest": ""}
                log.append(drawn[name])
                bar.update()
            bar.set_postfix_str(f"{writer.tokens_received / max(bar.seconds, 1e-3):,.0f} tokens/s{writer.load}")


def names(settings: GenerationSettings, total: int) -> list[str]:
    """Of the first draws; a name also seeds its draw, with the seed before it."""
    return [f"self.{settings.seed}.{number}" for number in range(total)]


def usable(drawn: dict[str, Record], settings: GenerationSettings, total: int) -> tuple[list[Record], Counter[str]]:
    """(those of the first `total` draws that can be asked, as records of a prompts file; why others cannot be)."""
    seen, good, left_out = set[str](), list[Record](), Counter[str]()
    for name in names(settings, total):
        if (record := drawn.get(name)) is None:
            continue
        text, turn = record["messages"][0]["content"], record["turns"][0]
        words = text.casefold().split()
        units = words if len(words) > GRAM else [*text.casefold()]  # of scripts without blanks
        runs = list(zip(*(units[start:] for start in range(GRAM)), strict=False))
        if turn["finish_reason"] == "length":
            left_out[f"cut at {settings.max_new_tokens} tokens"] += 1
        elif not any(map(str.isalnum, text)):
            left_out["empty"] += 1
        elif len(set(runs)) < CIRCLES * len(runs):
            left_out["in circles"] += 1
        elif (same := " ".join(words)) in seen:
            left_out["repeated"] += 1
        else:
            seen.add(same)
            good.append({"id": name, "messages": record["messages"], "meta": {"seed": settings.seed}})
    return good, left_out
