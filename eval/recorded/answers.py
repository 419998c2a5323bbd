"""Recorded answers of a target: what replay drafts along (`eval.recorded.replay`), and the planner predicts from.

Two files are read, and told apart by their lines:

    generations.jsonl           every contender's answers, by eval/acceptance.py (`eval.measured.generation_log`)
    regenerated conversations   every turn is an answer, by data_gen/regenerate.py

Both hold token ids, so that nothing is tokenised again. Nothing of a file is skipped: a line that cannot be used is an
error, for a number over answers that nobody chose would be nobody's.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from draftsmith.eval.page.file_shapes import Count, Shape, Text, check, load
from draftsmith.models.chat import FINGERPRINT_COVERS, load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from draftsmith.recipes.validation import validation_rank

SHOWN_FAULTS = 3
EVERYONE = ""  # whose answers those of conversations are
IDENTITY = ("tokenizer_fingerprint", "embedding_digest")  # what a target is known by, where it was written down


@dataclass(frozen=True)
class RecordedAnswer:
    """One turn: what the target read, and what it wrote."""

    prompt: Sequence[int]  # a `Prompt` where it is more than tokens
    tokens: list[int]  # stop token included
    sampling: Sampling | None = None  # how they were drawn; None: not known
    benchmark: str = ""
    category: str | None = None
    conversation_id: str = ""
    turn: int = 1  # of its conversation, from 1
    place: str = ""  # file:line, for messages

    @property
    def key(self) -> tuple[str, str, int]:
        return self.benchmark, self.conversation_id, self.turn

    @property
    def known_greedy(self) -> bool:
        return self.sampling is not None and self.sampling.greedy


@dataclass
class Recording:
    """What a file holds."""

    path: Path
    answers: dict[str, list[RecordedAnswer]] = field(default_factory=dict)  # by contender, in the order of the file
    # What is written of the target that answered, each kind once, and where it stands first.
    identities: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    note: str = ""  # what a reader of the numbers must know of the choice of answers

    def of(self, contender: str, plain: str) -> list[RecordedAnswer]:
        """A contender's own answers; of one who has none, plain decoding's, or those of the only one there is.

        Greedy answers are the same for all. Sampled ones are not, and only its own repeat what it accepted.

        Raises:
            UserError: none of these is there.
        """
        for name in (contender, plain, EVERYONE):
            if name in self.answers:
                return self.answers[name]
        if len(self.answers) == 1:
            return next(iter(self.answers.values()))
        raise UserError(
            f"eval.answers: {self.path} holds answers of {', '.join(map(repr, self.answers))}, none of {contender!r} "
            f"and none of {plain!r}, whose serve for everyone"
        )

    def described(self, agreement: str) -> dict[str, Any]:
        """For files of numbers that rest on these answers."""
        return {"file": str(self.path), "agreement": agreement, "note": self.note or None}

    def __iter__(self) -> Iterator[RecordedAnswer]:
        return (answer for answers in self.answers.values() for answer in answers)


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class _GenerationLine(Shape):
    contender: Text
    benchmark: Text
    category: Text | None
    conversation_id: Text
    turn: Count
    prompt_token_ids: Tokens
    token_ids: Tokens


class _Turn(Shape):
    prompt_token_ids: Tokens
    output_token_ids: Tokens


class _Generator(Shape):
    tokenizer_fingerprint: str | None = None
    embedding_digest: str | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0


class _ConversationLine(Shape):
    id: Text
    turns: Annotated[list[_Turn], Field(min_length=1)]
    generator: _Generator = _Generator()
    meta: dict[str, Any] | None = None


def read_answers(
    path: Path,
    limit: int | None = None,
    sampling: Sampling | None = None,
    first_turns_only: bool = False,
    only: Collection[str] | None = None,
) -> Recording:
    """All answers in a file.

    Args:
        limit: conversations to read, of each benchmark (or source) and contender.
        sampling: how the answers of a generations.jsonl were drawn, where acceptance.json beside it does not say.
        only: ids of the conversations to read; None: all.

    Raises:
        UserError: no such file, lines that are neither kind, damaged or there twice, or nothing in it.
    """
    recording = Recording(path)
    seen: dict[tuple[str, str], set[str]] = {}
    places: dict[tuple[str, tuple[str, str, int]], str] = {}  # of each contender's answer to each turn
    faults: list[str] = []
    drawn, whose = _beside(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(
            f"eval.answers: {path} cannot be read ({error.strerror}); eval/acceptance.py writes a generations.jsonl, "
            "data_gen/regenerate.py conversations"
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                contender, answers, identity = _answers_of(_loaded(line), place, drawn or sampling)
                for answer in answers:
                    if (before := places.setdefault((contender, answer.key), place)) != place:
                        raise ValueError(
                            f"{_whose(contender)}answer to turn {answer.turn} of {answer.conversation_id!r} stands "
                            f"there twice, first at {before}"
                        )
            except ValueError as error:
                faults.append(f"eval.answers: {place}: {error}")
                continue
            first = answers[0]
            if only is not None and first.conversation_id not in only:
                continue
            conversations = seen.setdefault((contender, first.benchmark), set())
            if limit is not None and first.conversation_id not in conversations and len(conversations) == limit:
                continue
            conversations.add(first.conversation_id)
            recording.answers.setdefault(contender, []).extend(
                answer for answer in answers if answer.turn == 1 or not first_turns_only
            )
            identity = identity if contender == EVERYONE else whose
            if identity and all(identity != known for _, known in recording.identities):
                recording.identities.append((place, identity))
    if faults:
        more = [f"eval.answers: {path}: {len(faults):,} lines cannot be used; these are the first {SHOWN_FAULTS}"]
        raise UserError([*(more if len(faults) > SHOWN_FAULTS else []), *faults[:SHOWN_FAULTS]])
    if not any(recording.answers.values()):
        raise UserError(f"eval.answers: {path} holds no answer")
    return recording


def _loaded(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError where there is none."""
    try:
        return load(line)
    except ValueError:
        if line.endswith(b"\n"):
            raise
        raise ValueError(
            "the file is cut off: its last line is not whole; delete that line, or have the file written to its end"
        ) from None


def _whose(contender: str) -> str:
    return "the " if contender == EVERYONE else f"{contender!r}: the "


def kept_for_validation(path: Path, most: int, of: int = 5) -> set[str]:
    """Ids of the conversations in a file of `data_gen.regenerate` that training on it keeps for validation.

    Args:
        most: train.validation_conversations.
        of: one in so many conversations at most; training keeps one in five.

    Training does not count those that it cannot use for other
    reasons than short answers; where there are such, and few conversations, the last of these may be trained on.
    """
    ids = set()
    with path.open("rb") as file:
        for line in file:
            try:
                record = load(line)
                check(record, _ConversationLine)
            except ValueError:  # `read_answers` tells it
                continue
            if any(len(turn["output_token_ids"]) > 1 for turn in record["turns"]):  # one token alone trains nothing
                ids.add(record["id"])
    return set(heapq.nsmallest(min(most, len(ids) // of), ids, key=validation_rank))


def _answers_of(
    record: dict[str, Any], place: str, sampling: Sampling | None
) -> tuple[str, list[RecordedAnswer], dict[str, Any]]:
    """(contender, answers, what is said of the target) of a line. Raises ValueError where it is of neither kind."""
    if "contender" in record:
        check(record, _GenerationLine)
        whose = (record["benchmark"], record["category"], record["conversation_id"], record["turn"])
        answer = RecordedAnswer(record["prompt_token_ids"], record["token_ids"], sampling, *whose, place)
        return record["contender"], [answer], {}
    if not isinstance(record.get("turns"), list):
        raise ValueError(
            "neither a line of generations.jsonl nor a regenerated conversation with the token ids of its turns"
        )
    check(record, _ConversationLine)
    generator, meta = record.get("generator") or {}, record.get("meta") or {}
    temperature = generator.get("temperature")
    if temperature is not None:
        sampling = Sampling(temperature, generator.get("top_p", 1.0), generator.get("top_k", 0))
    else:
        sampling = None
    benchmark, category = meta.get("benchmark", ""), meta.get("category")
    answers = [
        RecordedAnswer(
            turn["prompt_token_ids"],
            turn["output_token_ids"],
            sampling,
            benchmark if isinstance(benchmark, str) else "",
            category if isinstance(category, str) else None,
            record["id"],
            turn_number,
            place,
        )
        for turn_number, turn in enumerate(record["turns"], start=1)
    ]
    return EVERYONE, answers, {key: generator[key] for key in IDENTITY if generator.get(key)}


def drawn_unlike(answers: Iterable[RecordedAnswer], here: Sampling) -> str | None:
    """How answers were drawn, in words, where some were drawn otherwise than `here`; None: alike, or nobody knows."""
    there = {answer.sampling for answer in answers} - {here, None}
    if not there or (here.greedy and all(each is not None and each.greedy for each in there)):
        return None
    return ", ".join(sorted("greedy" if each.greedy else f"temperature {each.temperature:g}" for each in there if each))


def _beside(path: Path) -> tuple[Sampling | None, dict[str, Any]]:
    """What acceptance.json beside a generations.jsonl says: how answers were drawn, and of which target they are."""
    try:
        content = load((path.parent / "acceptance.json").read_bytes())
        sampling = Sampling(float(content["temperature"]), float(content["top_p"]), int(content["top_k"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None, {}
    identity = content.get("target_identity")
    identity = identity if isinstance(identity, dict) else {}
    return sampling, {key: identity[key] for key in IDENTITY if identity.get(key)}


# Do they belong to this target?


def check_answers(recording: Recording, vocab_size: int, positions: int) -> None:
    """Tokens and lengths that the target cannot have written; known before it is loaded.

    Raises:
        UserError: naming the first one's line.
    """
    for answer in recording:
        highest = max(*answer.prompt, *answer.tokens)
        if highest >= vocab_size:
            raise UserError(
                f"eval.answers: {answer.place}: token {highest} is outside the target's vocabulary of {vocab_size} "
                "tokens: these are another target's answers"
            )
        length = len(answer.prompt) + len(answer.tokens)
        if length > positions:
            raise UserError(
                f"eval.answers: {answer.place}: prompt and answer are {length} tokens, the target has {positions} "
                "positions"
            )


def check_answers_before_loading(recording: Recording, target: TargetSection) -> int:
    """`check_recorded_from` and `check_answers`, by the target's config and tokenizer alone; returns its positions."""
    config = load_config(target).get_text_config(decoder=True)
    fingerprint = tokenizer_fingerprint(load_tokenizer(target))
    check_recorded_from(recording, config_identity(config, target.model, target.revision, fingerprint))
    check_answers(recording, config.vocab_size, config.max_position_embeddings)
    return config.max_position_embeddings


def check_recorded_from(recording: Recording, here: dict[str, Any]) -> None:
    """Refuses answers of which it is written that another target gave them.

    Args:
        here: what is known of this target so far, as `models.checkpoint.target_identity` names it.

    Raises:
        UserError: both sides named.
    """
    for place, identity in recording.identities:
        for key, there in identity.items():
            if key in here and here[key] != there:
                covers = f" (a fingerprint covers {FINGERPRINT_COVERS})" if key == "tokenizer_fingerprint" else ""
                raise UserError(
                    f"eval.answers: {place}: recorded from another target: {key} {str(there)[:16]} there, "
                    f"{str(here[key])[:16]} here{covers}; decode or regenerate with this one"
                )


def tokens_of(answers: Sequence[RecordedAnswer]) -> int:
    return sum(len(answer.tokens) for answer in answers)
