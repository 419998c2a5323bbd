"""Asks an engine what an evaluation asked, and compares answers and rounds.

    python compare.py ask runs/demo/eval/generations.jsonl "eagle3, chain of 4" asked.json target=t.gguf ...
    python llamacpp_answers.py asked.json answered.json
    python compare.py tell runs/demo/eval/generations.jsonl "eagle3, chain of 4" answered.json

`ask` writes the contender's prompts and the given keys; numbers and null are read as such.
"""

import json
import sys
from pathlib import Path
from typing import Any


def recorded(generations: str, contender: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(generations).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["contender"] == contender]


def ask(generations: str, contender: str, asked_file: str, *keys: str) -> None:
    asked: dict[str, Any] = {"draft_tokens": 4, "max_new_tokens": 256, "max_model_len": 1024, "threads": 2}
    for key, value in (each.split("=", 1) for each in keys):
        asked[key] = json.loads(value) if value == "null" or value.isdecimal() else value
    asked["prompts"] = [row["prompt_token_ids"] for row in recorded(generations, contender)]
    Path(asked_file).write_text(json.dumps(asked))


def tell(generations: str, contender: str, answered_file: str) -> None:
    answered = json.loads(Path(answered_file).read_text())
    pairs = list(zip(answered["answers"], recorded(generations, contender), strict=True))
    same = [theirs["token_ids"] == ours["token_ids"] for theirs, ours in pairs]
    print(f"answers equal           {sum(same)} of {len(pairs)}")
    for i, (theirs, ours) in enumerate(pairs):
        if not same[i]:
            both = zip(theirs["token_ids"], ours["token_ids"], strict=False)
            at = next((place for place, (one, other) in enumerate(both) if one != other), "the end")
            print(f"    prompt {i}: first other token at {at}")
    tokens = sum(len(theirs["token_ids"]) for theirs, _ in pairs)
    print(f"tokens                  {tokens:,}, {tokens / answered['seconds']:,.0f} a second")
    if "processor_seconds" in answered:
        speed = tokens / answered["processor_seconds"]
        print(f"                        {speed:,.0f} a second of processor time, prompts included")
    if any(theirs.get("accepted_at") for theirs, _ in pairs):
        _tell_places(pairs)
    if not any(theirs.get("drafted") for theirs, _ in pairs):
        return
    rounds = [(theirs["accepted_per_round"], ours["accepted_per_round"]) for theirs, ours in pairs]
    count, accepted = ([sum(map(each, side)) for side in zip(*rounds, strict=True)] for each in (len, sum))
    print(f"rounds                  {count[0]:,}; ours {count[1]:,}")
    print(f"drafted                 {sum(theirs['drafted'] for theirs, _ in pairs):,}")
    print(f"accepted                {accepted[0]:,}; ours {accepted[1]:,}")
    equal = sum(theirs == ours for theirs, ours in rounds)
    # An accepted end token before the end of the draft: llama.cpp does not count it.
    ended = sum(
        theirs != ours and theirs[:-1] == ours[:-1] and len(theirs) == len(ours) and theirs[-1] + 1 == ours[-1]
        for theirs, ours in rounds
    )
    print(f"every round equal       {equal} answers; {ended} but for an end token at the last accepted place")


def _tell_places(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Rounds, and how many of them accepted the drafted token of each place, for an engine that counts by place."""
    mine = [
        (len(ours["accepted_per_round"]), [sum(n > i for n in ours["accepted_per_round"]) for i in range(len(at))])
        for theirs, ours in pairs
        if (at := theirs["accepted_at"])
    ]
    counted = [(theirs["rounds"], theirs["accepted_at"]) for theirs, _ in pairs]
    for name, side in (("its", counted), ("our", mine)):
        by_place = [sum(place) for place in zip(*(accepted for _, accepted in side), strict=True)]
        print(f"{name} rounds              {sum(count for count, _ in side):,}")
        print(f"{name} accepted            {sum(by_place):,}, by place {by_place}")
    print(f"every count equal       {sum(one == other for one, other in zip(counted, mine, strict=True))} answers")


if __name__ == "__main__":
    {"ask": ask, "tell": tell}[sys.argv[1]](*sys.argv[2:])
