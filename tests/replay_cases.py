"""Recorded answers, conversations, and files of lines."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target import Target
from tests.pairs import greedy

SAME = ("prompt_token_ids", "token_ids", "accepted_per_round", "last_round_cut", "tree_nodes", "draft_calls")


def recorded(generations: Sequence[Generation], sampling: Sampling | None = GREEDY) -> list[RecordedAnswer]:
    return [
        RecordedAnswer(g.prompt_token_ids, g.token_ids, sampling, conversation_id=str(i))
        for i, g in enumerate(generations)
    ]


def assert_same_rounds(replayed: Sequence[Generation], decoded: Sequence[Generation]) -> None:
    for mine, its in zip(replayed, decoded, strict=True):
        for name in SAME:
            assert getattr(mine, name) == getattr(its, name), name


def conversation(number: int, target: Target | None = None, **generator: Any) -> dict[str, Any]:
    """As regenerate writes them: two turns, greedy answers."""
    turns, history = [], []
    for turn in range(2):
        prompt = [*history, 2, 11 + number, 12 + turn, 4, 3]
        answer = greedy(target, prompt, 12) if target else [9, 8, 4]
        turns.append({"prompt_token_ids": prompt, "output_token_ids": answer, "finish_reason": "stop"})
        history = prompt + answer
    return {
        "id": f"c{number}",
        "messages": [{"role": "user", "content": "x"}] * 2,
        "turns": turns,
        "meta": {"benchmark": "mine", "category": "maths"},
        "generator": {"kind": "transformers", "temperature": 0.0, "top_p": 1.0, "top_k": 0} | generator,
    }


def write_lines(path: Path, *lines: Any) -> Path:
    """Text as it is, all else as JSON; packed if the path ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
