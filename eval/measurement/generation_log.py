"""generations.jsonl: one JSON line per turn and contender, read by the report and by replay.

    benchmark, category, conversation_id, turn     the turn; turn counts from 1, category may be null
    contender                                      its name; plain decoding is one of them
    prompt_token_ids, token_ids                    the target's input and output, the stop token included
    pictures                                       those of the prompt in order, `path` and `sha256` of each; only where
                                                   there are some
    accepted_per_round, tree_nodes, draft_calls, tried
                                                   a number per round: drafted tokens in the answer, verified nodes
                                                   (root included), forward passes of the drafter, draft positions that
                                                   were tried
    inner_accepted                                 of a hierarchy: drafted tokens that its small model accepted, in
                                                   each of its rounds
    drafted_by                                     of proposers with several sources: of each round, how many of the
                                                   accepted tokens each source drafted that took part, in their order
    moved                                          of a relaxed rule: probability moved onto drafted tokens, summed over
                                                   each round's tokens (eval/decoding/lantern.py)
    image                                          the picture that the answer's tokens make, `path` and `sha256`, of
                                                   targets that write images; no key: none, or no whole one
    last_round_cut                                 the answer's end cut tokens off the last round
    *_seconds                                      prefill, draft, verify, decode
    text                                           the answer as the next turn's prompt has it
    question, token_texts                          main contender only: the last user message, [picture] for each of
                                                   its pictures; each token's part of the text, special tokens written
                                                   out

The first of `token_ids` comes from the prefill; round i then adds accepted_per_round[i] drafted tokens and one bonus
token of the target. Only the last round may lack it (last_round_cut).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.eval.decoding.decode import Generation
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.json_text import json_object

NEEDED = ("benchmark", "conversation_id", "turn", "accepted_per_round", "tree_nodes")
UNUSABLE = (
    "it is damaged, or of another run or version: run `draftsmith evaluate` again, or move the file away for a report "
    "without answers"
)
LEFT_OUT = ("pictures", "inner_accepted", "drafted_by", "moved", "image")  # where they are empty
WINDOW = 4  # most tokens per character: UTF-8 has at most four bytes


def record_of(generation: Generation, contender: str, text: str, shown: dict[str, Any]) -> dict[str, Any]:
    """A line of generations.jsonl. `shown` is the main contender's `question` and `token_texts`."""
    fields = {key: value for key, value in vars(generation).items() if value or key not in LEFT_OUT}
    return {"contender": contender} | fields | {"text": text} | shown


def read_generations(path: Path, contender: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of one contender, in order. Files of large runs do not fit into memory.

    Raises:
        UserError: a line is damaged.
    """
    beginning = json.dumps({"contender": contender})[:-1].encode() + b","  # others need not be parsed
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith(beginning):
                try:
                    record = json_object(line, *NEEDED)
                except ValueError as error:
                    raise UserError(f"{path}:{number}: {error}; {UNUSABLE}") from None
                yield record


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Each token's part of the text. Joined they are the answer with its special tokens written out.

    A token's text depends on its neighbours (SentencePiece's blanks, bytes of a character), so each is the difference
    of two decodings. A character with bytes in several tokens belongs to the last of them.
    """

    def decode(first: int, end: int) -> str:
        return str(
            tokenizer.decode(list(ids[first:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    texts: list[str] = []
    before, first = 0, 0  # decoding begins at `before`; tokens up to `first` have their text
    known = ""  # the decoding of before:first
    for end in range(1, len(ids) + 1):
        text = decode(before, end)
        if text.endswith("\ufffd") and end - first < WINDOW and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before, first = first, end
        known = decode(before, first)
    return texts
