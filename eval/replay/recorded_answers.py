"""Recorded answers of a target, for replay (`eval.replay.replay`) and the planner.

The lines of a file show which of two kinds it is:

    generations.jsonl           every contender's answers, by eval/acceptance.py (`eval.measurement.generation_log`)
    regenerated conversations   every turn is an answer, by data_gen/regenerate.py

Both hold token ids, so nothing is tokenised again. Both name pictures, which `with_their_pictures` reads again. A
line that cannot be used is an error: skipping lines would select answers by accident.
"""

import heapq
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import FINGERPRINT_COVERS, reads_pictures, with_pictures
from draftsmith.models.prompt import Prompt, RenderError
from draftsmith.models.sampling import Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError, first_invalid, first_line
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.files.reading import DAMAGED, open_bytes
from draftsmith.recipes.prompts.picture_parts import pictures_of
from draftsmith.recipes.prompts.records import validation_rank
from draftsmith.recipes.schema import Recipe

EVERYONE = ""  # contender name of answers in conversations: they serve all contenders
# Keys that identify a target.
IDENTITY = ("tokenizer_fingerprint", "embedding_digest", "vision_digest", "adapter", "quantization", "guidance")
# What unusable JSON raises where it is read.
UNUSABLE = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError)


@dataclass(frozen=True)
class RecordedAnswer:
    """One turn: the target's prompt and its answer."""

    prompt: Sequence[int]  # a `Prompt` if it is more than tokens
    tokens: list[int]  # stop token included
    sampling: Sampling | None = None  # how the tokens were drawn; None: unknown
    benchmark: str = ""
    category: str | None = None
    conversation_id: str = ""
    turn: int = 1  # of its conversation, from 1
    place: str = ""  # file:line, for messages
    pictures: list[dict[str, str]] = field(default_factory=list)  # named in its line, `path` and `sha256`

    @property
    def key(self) -> tuple[str, str, int]:
        return self.benchmark, self.conversation_id, self.turn


@dataclass
class Recording:
    """The content of a file."""

    path: Path
    answers: dict[str, list[RecordedAnswer]] = field(default_factory=dict)  # by contender, in the order of the file
    identities: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (first place, identity)
    note: str = ""  # how the answers were chosen, if readers of the numbers must know
    relaxed: set[str] = field(default_factory=set)  # contenders with a rule that is not lossless; no answers are read

    def of(self, contender: str, plain: str) -> list[RecordedAnswer]:
        """A contender's own answers; else plain decoding's; else those of the only contender in the file.

        Greedy answers are the same for all. Of sampled ones only its own reproduce its rounds.

        Raises:
            UserError: the file has none of these, or the contender's own are not the target's.
        """
        if contender in self.relaxed:
            raise _not_lossless(f"{self.path}: the answers of {contender!r}")
        for name in (contender, plain, EVERYONE):
            if name in self.answers:
                return self.answers[name]
        if len(self.answers) == 1:
            return next(iter(self.answers.values()))
        raise UserError(
            f"eval.answers: {self.path} holds answers of {', '.join(map(repr, self.answers))}, none of {contender!r} "
            f"and none of {plain!r}"
        )

    def __iter__(self) -> Iterator[RecordedAnswer]:
        return (answer for answers in self.answers.values() for answer in answers)


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Picture(BaseModel):
    path: str
    sha256: str | None = None


class _Line(BaseModel):
    """A line of generations.jsonl, as far as it is read, and a turn of a conversation: fields of a `RecordedAnswer`."""

    contender: str
    benchmark: str
    category: str | None
    conversation_id: str
    turn: int
    prompt: Tokens = Field(alias="prompt_token_ids")
    tokens: Tokens = Field(alias="token_ids")
    pictures: list[_Picture] = []


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
        sampling: how the answers of a generations.jsonl were drawn, if no acceptance.json lies beside it.
        only: ids of the conversations to read; None: all.

    Raises:
        UserError: no such file, an unusable line, or no answer.
    """
    recording = Recording(path)
    seen: dict[tuple[str, str], set[str]] = {}
    drawn, recorded_from, relaxed = _beside(path)
    try:
        file = open_bytes(path)
    except OSError as error:
        raise UserError(
            f"eval.answers: {path} cannot be read ({error.strerror}); `draftsmith evaluate` writes a "
            "generations.jsonl, `draftsmith regenerate` conversations"
        ) from None
    with file:
        for number, line in _lines(file, path):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                contender, answers, identity = _answers_of(json_object(line), place, drawn or sampling)
            except ValidationError as error:
                raise UserError(f"eval.answers: {place}: {first_invalid(error)}") from None
            except ValueError as error:
                raise UserError(f"eval.answers: {place}: {error}") from None
            except UNUSABLE:
                raise UserError(
                    f"eval.answers: {place}: neither a line of generations.jsonl nor a regenerated conversation with "
                    "the token ids of its turns"
                ) from None
            if contender in relaxed:
                recording.relaxed.add(contender)
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
            identity = identity if contender == EVERYONE else recorded_from
            if identity and all(identity != known for _, known in recording.identities):
                recording.identities.append((place, identity))
    if not any(recording.answers.values()):
        raise _not_lossless(str(path)) if recording.relaxed else UserError(f"eval.answers: {path} holds no answers")
    return recording


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        yield from enumerate(file, start=1)
    except DAMAGED as error:
        raise UserError(f"eval.answers: {path} is damaged: {first_line(error)}") from None


def kept_for_validation(path: Path, most: int, of: int = 5) -> set[str]:
    """Ids of the conversations in a file of `data_gen.regenerate` that training on it keeps for validation.

    Args:
        most: train.validation_conversations.
        of: keeps at most one conversation in so many; training keeps one in five.

    Training leaves out more conversations that it cannot use. With few, the last id returned may be trained on.
    """
    ids = set()
    with open_bytes(path) as file:
        for _, line in _lines(file, path):
            with suppress(UserError, *UNUSABLE):  # `read_answers` reports it
                _, answers, _ = _answers_of(json_object(line), str(path), None)
                if any(len(answer.tokens) > 1 for answer in answers):  # a single token trains nothing
                    ids.add((validation_rank(answers[0].conversation_id), answers[0].conversation_id))
    return {each for _, each in heapq.nsmallest(min(most, len(ids) // of), ids)}


def not_trained_on(recipe: Recipe, path: Path) -> tuple[set[str] | None, str]:
    """(ids of the conversations in `path` to read, None: all; a note). Leaves out answers that the recipe trains on."""
    if not path.exists() or path.resolve() != recipe.conversations_path.resolve():
        return None, ""
    kept = kept_for_validation(path, recipe.train.validation_conversations)
    if not kept:
        return None, (
            f"{path} is what the recipe trains on, and train.validation_conversations keeps none of it out: the "
            "drafter has learnt these answers, so tau is higher than on others"
        )
    return kept, (
        f"{path} is what the recipe trains on: answers are taken from the {len(kept)} conversations that training "
        "keeps for validation"
    )


def answers_or_conversations(named: str | None, recipe: Recipe, key: str) -> Path:
    """The file that `key` names, or else the recipe's conversations. Raises UserError if there are none."""
    path = Path(named) if named is not None else recipe.conversations_path
    if named is None and not path.exists():
        raise UserError(
            f"{key}: not given, and there are no conversations in {path}; run `draftsmith regenerate` first, or "
            "name a generations.jsonl of `draftsmith evaluate`"
        )
    return path


def with_rounds(answers: Iterable[RecordedAnswer], path: Path, key: str) -> list[RecordedAnswer]:
    """Those of two tokens or more. Raises UserError if there are none."""
    found = [answer for answer in answers if len(answer.tokens) > 1]
    if not found:
        raise UserError(f"{key}: {path} every answer is a single token; at least two are needed")
    return found


@contextmanager
def errors_naming(key: str) -> Iterator[None]:
    """Replaces eval.answers by `key` in errors."""
    try:
        yield
    except UserError as error:
        raise UserError([problem.replace("eval.answers", key) for problem in error.problems]) from error


def _answers_of(
    record: dict[str, Any], place: str, sampling: Sampling | None
) -> tuple[str, list[RecordedAnswer], dict[str, Any]]:
    """(contender, answers, target identity) of a line. Raises UserError or one of UNUSABLE if it is unusable."""
    lines, identity = [record], dict[str, Any]()
    if "contender" not in record:
        generator, meta = record.get("generator", {}), record.get("meta") or {}
        if not generator.get("lossless", True):
            raise _not_lossless(place)
        identity, sampling = _known(generator), None
        if generator.get("temperature") is not None:
            sampling = Sampling(generator["temperature"], generator.get("top_p", 1.0), generator.get("top_k", 0))
        benchmark, category = (  # a user's own labels can be anything
            label if isinstance(label := meta.get(key), str) else None for key in ("benchmark", "category")
        )
        about = {"contender": EVERYONE, "benchmark": benchmark or "", "category": category}
        # All pictures of the conversation: a turn's prompt shows as many as it has placeholders.
        about |= {"conversation_id": record["id"], "pictures": pictures_of(record.get("messages", []))}
        lines = [
            about
            | {"turn": number, "prompt_token_ids": turn["prompt_token_ids"], "token_ids": turn["output_token_ids"]}
            for number, turn in enumerate(record["turns"], start=1)
        ]
    read = (_Line.model_validate(line, strict=True) for line in lines)
    fields = [line.model_dump(exclude={"contender"}, exclude_none=True) for line in read]
    answers = [RecordedAnswer(sampling=sampling, place=place, **turn) for turn in fields]
    return lines[0]["contender"], answers, identity


def other_sampling(answers: Iterable[RecordedAnswer], here: Sampling) -> str | None:
    """The answers' sampling, in words, if some were drawn with other settings than `here`; None: alike or unknown."""
    there = {answer.sampling for answer in answers} - {here, None}
    if not there or (here.greedy and all(each is not None and each.greedy for each in there)):
        return None
    return ", ".join(sorted("greedy" if each.greedy else f"temperature {each.temperature:g}" for each in there if each))


def _beside(path: Path) -> tuple[Sampling | None, dict[str, Any], set[str]]:
    """The sampling settings and the target of the answers, and the contenders with a rule that is not lossless,
    from acceptance.json beside a generations.jsonl. Replay would count wrong tokens of the
    latter as right."""
    beside = path.parent / "acceptance.json"
    try:
        content = json_object(beside.read_bytes())
        sampling = Sampling(content["temperature"], content["top_p"], content["top_k"])
        # Files from before there were other rules do not name theirs.
        relaxed = {name for name, row in content.get("contenders", {}).items() if not row.get("lossless", True)}
        return sampling, _known(content.get("target_identity", {})), relaxed
    except OSError:
        return None, {}, set()
    except UNUSABLE:
        raise UserError(
            f"eval.answers: {beside}: damaged, and says how the answers beside it were drawn, and of which target; run "
            "`draftsmith evaluate` again, or move it away"
        ) from None


def _known(identity: dict[str, Any]) -> dict[str, Any]:
    """What a file says of its target. A file that knows its target and names no adapter, quantisation or
    guidance had none."""
    known = {key: identity[key] for key in IDENTITY if identity.get(key)}
    return {"adapter": None, "quantization": None, "guidance": None, **known} if known else {}


def _not_lossless(answers: str) -> UserError:
    return UserError(
        f"eval.answers: {answers}: written by an acceptance rule that is not lossless; replay needs the target's own "
        "answers. Decode or regenerate them with a lossless rule"
    )


def with_their_pictures(answers: Iterable[RecordedAnswer], tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The answers, with each picture in the prompt that shows it. `tokenizer` is `TargetFiles.tokenizer`.

    Raises:
        UserError: a picture is missing or has changed, is not what the placeholders were written for, or the target
            reads text only.
    """
    found: list[RecordedAnswer] = []
    known: dict[Hashable, Prompt] = {}  # contenders share prompts
    sees = reads_pictures(tokenizer)
    for answer in answers:
        if not (sees or answer.pictures):
            found.append(answer)
            continue
        key = tuple(answer.prompt), *(tuple(sorted(picture.items())) for picture in answer.pictures)
        if key not in known:
            content = [{"type": "image"} | picture for picture in answer.pictures]
            try:
                known[key] = with_pictures(tokenizer, answer.prompt, [{"role": "user", "content": content}])
            except RenderError as error:
                raise UserError(f"eval.answers: {answer.place}: {error}") from None
        prompt = known[key]
        shown = answer.pictures[: len(prompt.inserts)]
        found.append(replace(answer, prompt=prompt, pictures=shown) if shown else answer)
    return found


# Checks against a target.


def check_answers_before_loading(recording: Recording, target: TargetFiles) -> None:
    """Raises UserError for the first line that the target, by its files, cannot have written."""
    check_recorded_from(recording, target.identity)
    vocab_size, positions = target.text_config.vocab_size, target.positions
    for answer in recording:
        highest, length = max(*answer.prompt, *answer.tokens), len(answer.prompt) + len(answer.tokens)
        if highest >= vocab_size:
            raise UserError(
                f"eval.answers: {answer.place}: token {highest} is outside the target's vocabulary of {vocab_size} "
                "tokens: these are another target's answers"
            )
        if length > positions:
            raise UserError(
                f"eval.answers: {answer.place}: prompt and answer are {length} tokens, the target has {positions} "
                "positions"
            )


def check_recorded_from(recording: Recording, here: dict[str, Any]) -> None:
    """Raises UserError for answers of another target than `here`, an identity as far as it is known."""
    for place, identity in recording.identities:
        for key, there in identity.items():
            if key in here and here[key] != there:
                covers = f" (a fingerprint covers {FINGERPRINT_COVERS})" if key == "tokenizer_fingerprint" else ""
                raise UserError(
                    f"eval.answers: {place}: recorded from another target: {key} {str(there)[:16]} there, "
                    f"{str(here[key])[:16]} here{covers}; decode or regenerate with this one"
                )


def answer_tokens(answers: Sequence[RecordedAnswer]) -> int:
    return sum(len(answer.tokens) for answer in answers)
