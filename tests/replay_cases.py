"""Targets, drafters and answers that the tests of replay share."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import C2T, PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target import Target
from draftsmith.recipes.sections.eval import TreeSection
from tests.pairs import blurred_copy, greedy, pair_of
from tests.scripted_drafting import linear_classifier

# The first four are taught; of the others a drafter knows nothing.
PROMPTS = (
    *([11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29], [7], [5, 6, 5, 6, 5, 6, 5]),
    *(list(range(30, 60)), [9, 9, 9, 9], [200, 13, 77]),
)
BUDGET = 34
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
}
POLICIES: dict[str, TreeSection] = {
    "chain": TreeSection(policy="chain", nodes=5),
    "static": TreeSection(policy="static"),
    "eagle2": TreeSection(nodes=14, draft_calls=4, top_k=4),
    "ddd": TreeSection.model_validate(
        {"policy": "ddd", "nodes": 14, "draft_calls": 6, "top_k": 4, "ddd": {"at": [2, 4], "threshold": -0.5}}
    ),
    "svip": TreeSection.model_validate({"policy": "svip", "svip": {"c": 0.15, "h": 0.5}, "draft_calls": 8}),
    "svip_tree": TreeSection.model_validate(
        {"policy": "svip_tree", "nodes": 14, "draft_calls": 6, "top_k": 4, "svip": {"c": 0.15, "h": 0.6}}
    ),
}
SAME = ("prompt_token_ids", "token_ids", "accepted_per_round", "last_round_cut", "tree_nodes", "draft_calls")


def policy(name: str) -> TreePolicy:
    if name == "c2t":
        return C2T(linear_classifier(20.0, -0.5, 0.25, 1.0), beta=0.5, beam=4, top_k=4, draft_calls=5)
    return policy_of(POLICIES[name])


def proposer_of(family: str, name: str) -> Proposer:
    _, drafter = pair_of(family, None, **FAMILIES[family])
    if name == "causal_lm":
        return PolicyProposer(CausalLMDrafting(blurred_copy(family, **FAMILIES[family])), policy("eagle2"))
    return PolicyProposer(FeatureDrafting(drafter), policy(name))


@cache
def stops_of(family: str) -> frozenset[int]:
    """Tokens that end some of the answers in the middle."""
    target, _ = pair_of(family, None, **FAMILIES[family])
    return frozenset({greedy(target, PROMPTS[0], 20)[14], greedy(target, PROMPTS[3], 20)[7]})


def recorded(generations: Sequence[Generation], sampling: Sampling | None = GREEDY) -> list[RecordedAnswer]:
    return [
        RecordedAnswer(g.prompt_token_ids, g.token_ids, sampling, conversation_id=str(i))
        for i, g in enumerate(generations)
    ]


def accepted_by(generations: Sequence[Generation]) -> int:
    return sum(sum(g.accepted_per_round) for g in generations)


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
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def generation_line(contender: str, conversation_id: str, tokens: list[int]) -> dict[str, Any]:
    whose = {"benchmark": "b", "category": None, "conversation_id": conversation_id, "turn": 1}
    return {"contender": contender} | whose | {"prompt_token_ids": [5], "token_ids": tokens, "other": 1.5}
