"""Runs contenders over evaluation prompts, turn by turn: conversations from any file that `recipes.prompts` reads.

A vision-language target may be asked about pictures, in any user turn.

Answers in the file are dropped. A later turn's prompt has the target's own earlier answers, from plain decoding, so all
contenders get the same prompts. All contenders decode a batch of prompts before the next one, in a rotating order: if
the machine becomes slower, it slows all alike.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.eval.decoding.accept import Acceptance, acceptance_of
from draftsmith.eval.decoding.contenders import Contender, loaded_proposer, rule_of
from draftsmith.eval.decoding.decode import Generation, TargetVerifier, decode
from draftsmith.eval.decoding.proposers import PLAIN
from draftsmith.eval.measurement.generation_log import record_of, token_texts
from draftsmith.eval.measurement.metrics import tau
from draftsmith.models.chat import RenderError, answer_message, as_text, decode_answer, render_prompt
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.image_tokens import ImageTokens
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.prompt import Prompt
from draftsmith.models.quantize import precision_name
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vision import is_vision_language
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.picture_parts import data_url, pictures_of
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.prompt_reader import Rejects, questions, read_conversations
from draftsmith.recipes.prompts.sources import StorePicture, short_names
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.base import as_list

PICTURE_MARK = " [picture] "  # in the report's questions


def plain_of(contender: Contender) -> str:
    """The name of plain decoding in the contender's precision."""
    precision = precision_name(contender.quantization)
    return PLAIN if precision is None else f"{PLAIN}, {precision} target"


@dataclass(frozen=True)
class Question:
    """One conversation to be answered."""

    id: str
    source: str  # for rejects, with `line`
    line: int | None
    turns: list[list[dict[str, Any]]]  # the messages before each answer
    tools: list[Any] | None  # function schemas for the chat template
    benchmark: str
    category: str | None

    @property
    def pictures(self) -> int:
        """How many the user shows."""
        return len(pictures_of([message for turn in self.turns for message in turn]))


def recipe_questions(
    recipe: Recipe, files: TargetFiles, rejects: Rejects, store: StorePicture = data_url
) -> list[Question]:
    """`load_questions` of eval.prompts. `store` stores a picture that has no file, and returns its place."""
    section, sees = recipe.eval, is_vision_language(files.config)
    return load_questions(
        section.prompts or [], rejects, section.max_prompts, section.turns == "first", store if sees else None
    )


def load_questions(
    sources: str | list[str],
    rejects: Rejects,
    limit: int | None,
    first_turns_only: bool = False,
    store: StorePicture | None = None,
) -> list[Question]:
    """The first `limit` conversations of each source. Those that the target cannot read go to `rejects`.

    Args:
        store: as in `recipe_questions`, for a target that reads pictures; None: text only.

    Raises:
        UserError: nothing usable.
    """
    found, shown, unseen = [], short_names(as_list(sources)), False
    for source in as_list(sources):  # one by one: benchmarks number their questions, all from 0
        for conversation in read_conversations(source, rejects, limit, before="eval.prompts: ", store=store):
            try:
                if store is None:
                    as_text(conversation.messages, conversation.images)
                asked = conversation if store is None else with_named_pictures(conversation, store)
            except (RenderError, ValueError) as error:
                unseen |= store is None
                rejects.add_conversation(conversation, str(error))
            else:
                turns, meta = list(questions(asked.messages)), asked.meta
                benchmark, category = meta.get("benchmark"), meta.get("category")
                if not benchmark or benchmark == short_names([source])[source]:
                    benchmark = shown[source]  # differs from the short name where another source has the same one
                about = str(benchmark), None if category is None else str(category)
                turns = turns[:1] if first_turns_only else turns
                found.append(Question(asked.id, asked.source, asked.line, turns, meta.get("tools"), *about))
    if not found:
        advice = "; the target reads text only: name prompts of text, or a vision-language target" * unseen
        raise UserError(f"eval.prompts: nothing usable in {sources}; {rejects.summary()}{advice}")
    return found


def decode_all(
    models: LoadedModels,
    recipe: Recipe,
    contenders: Sequence[Contender],
    asked: Sequence[Question],
    file: IO[str],
    rejects: Rejects,
) -> dict[str, list[Generation]]:
    """Decodes every turn of every question plainly and with every contender. The first contender is the main one.

    eval.batch_size conversations are decoded side by side: first turns together, then second turns. The draws of an
    answer depend only on eval.seed, the turn and the contender.

    Args:
        file: receives all answers (`eval.measurement.generation_log`).
        rejects: receives turns without a valid prompt; the conversation ends there.

    Returns:
        One generation per turn for each name, `PLAIN` first, then plain decoding in other precisions; the same turns in
        the same order for all.
    """
    section, sampling, tokenizer = recipe.eval, Sampling.of(recipe.eval), models.files.tokenizer
    targets = {each.name: models.in_precision(each.quantization).target for each in contenders}
    # What decodes for each row of the table; plain decoding has no proposer.
    decoders: dict[str, tuple[Target, Proposer | None, Acceptance]] = {}
    decoders[PLAIN] = models.target, None, acceptance_of(sampling)
    decoders |= {plain_of(each): (targets[each.name], None, acceptance_of(sampling)) for each in contenders}
    for each in contenders:
        rule = rule_of(models, each, sampling, recipe.eval_out)
        decoders[each.name] = targets[each.name], loaded_proposer(models, each, sampling), rule
    names, shown = list(decoders), contenders[0].name
    images, folder = ImageTokens.of(models.target.model), recipe.eval_out / "generations.images"
    results: dict[str, list[Generation]] = {name: [] for name in names}

    def decoded(name: str, prompts: Sequence[Prompt], keys: Sequence[Hashable], budget: int) -> list[Generation]:
        target, proposer, acceptance = decoders[name]
        verifier, draws = TargetVerifier(target, proposer, acceptance), [SeededDraws(section.seed, key) for key in keys]
        with torch.inference_mode():
            return decode(verifier, proposer, prompts, models.files.stop_ids, budget, draws)

    batches = 0  # of turns
    answers = 0  # that the bar shows after the questions so far
    total = sum(len(question.turns) for question in asked) * len(names)
    with Bar(total=total, desc="decode", unit="answer") as progress:
        for start in range(0, len(asked), section.batch_size):
            talks = [_Talk(question) for question in asked[start : start + section.batch_size]]
            while turn := [talk for talk in talks if talk.asks(models, section.max_new_tokens, rejects)]:
                prompts = [talk.prompt for talk in turn]
                if not batches:  # the first forwards of a process and of a proposer are slow
                    for name in names:
                        decoded(name, prompts, ["warm-up"] * len(turn), min(16, section.max_new_tokens))
                first = batches % len(names)
                batches += 1
                done = {}
                for name in names[first:] + names[:first]:
                    done[name] = decoded(name, prompts, [talk.key(name) for talk in turn], section.max_new_tokens)
                    progress.update(len(turn))
                for row, talk in enumerate(turn):
                    for name in names:
                        generation = done[name][row]
                        talk.sign(generation)
                        if images is not None:
                            generation.image = images.stored(generation.token_ids, folder)
                        results[name].append(generation)
                        file.write(answer_line(tokenizer, generation, name, talk.words if name == shown else None))
                    talk.history.append(answer_message(tokenizer, done[PLAIN][row].token_ids))
                file.flush()
                if (so_far := tau(results[shown])) is not None:
                    progress.set_postfix_str(f"tau {so_far:.2f}", refresh=False)
            answers += sum(len(talk.question.turns) for talk in talks) * len(names)
            progress.update(answers - progress.n)  # rejected turns have no answers
    if not results[PLAIN]:
        raise UserError(f"eval.prompts: none of the {len(asked)} prompts could be used; {rejects.summary()}")
    return results


def answer_line(
    tokenizer: PreTrainedTokenizerBase, generation: Generation, contender: str, question: str | None = None
) -> str:
    """A line of generations.jsonl. `question` is given for the main contender; its lines have the report's texts."""
    shown: dict[str, Any] = {}
    if question is not None:
        shown = {"question": question, "token_texts": token_texts(tokenizer, generation.token_ids)}
    record = record_of(generation, contender, decode_answer(tokenizer, generation.token_ids), shown)
    return json.dumps(record) + "\n"


@dataclass
class _Talk:
    """A conversation in progress."""

    question: Question
    turn: int = 0  # asked so far
    history: list[dict[str, Any]] = field(default_factory=list)
    prompt: Prompt = field(default_factory=lambda: Prompt(()))  # of the turn

    def asks(self, models: LoadedModels, most: int, rejects: Rejects) -> bool:
        """Whether there is another turn; its prompt is then at hand. A turn without a valid one goes to `rejects`.

        Args:
            most: tokens of the answer.
        """
        question, positions = self.question, usable_positions(models.target.config)
        if self.turn == len(question.turns):
            return False
        self.history += question.turns[self.turn]
        self.turn += 1
        try:
            self.prompt = render_prompt(models.files.tokenizer, self.history, question.tools)
            if len(self.prompt) + most > positions:
                raise ValueError(
                    f"too long: {len(self.prompt)} prompt tokens and {most} new ones exceed the target's {positions} "
                    "positions"
                )
        except (RenderError, ValueError) as error:
            rejects.add(question.source, question.line, str(error), {"id": question.id, "turn": self.turn})
            self.turn = len(question.turns)
            return False
        return True

    @property
    def words(self) -> str:
        """The user's words in this turn, with a mark for each picture."""
        asked = [message["content"] for message in self.question.turns[self.turn - 1] if message["role"] == "user"][-1]
        parts = [{"type": "text", "text": asked}] if isinstance(asked, str) else asked
        return "".join(part["text"] if part["type"] == "text" else PICTURE_MARK for part in parts)

    def key(self, contender: str) -> Hashable:
        """Key of the answer's random numbers."""
        return self.question.benchmark, self.question.id, self.turn, contender

    def sign(self, generation: Generation) -> None:
        """Writes the turn into the generation."""
        question = self.question
        generation.benchmark, generation.category = question.benchmark, question.category
        generation.conversation_id, generation.turn = question.id, self.turn
        generation.pictures = [{key: part[key] for key in ("path", "sha256")} for part in pictures_of(self.history)]
