"""Answers prompts with a llama-server on loopback, with or without a drafter.

    python llamacpp_answers.py asked.json answered.json

asked.json: {"server": path of llama-server, "target", "drafter" (GGUF files; drafter may be null), "draft_tokens",
    "max_new_tokens", "max_model_len", "threads", "cache": "f32" or "f16", "prompts": [[token id]]}
answered.json: {"answers": [{"token_ids", "accepted_per_round"}] in the order of the prompts,
    "seconds": of all answers, prompts included, as the server measures it, "decode_seconds": without prompts}

The server's answer only has totals; its log (LLAMA_TRACE) has the accepted tokens of each round.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROUND = re.compile(r"task (\d+) \| accepted +(\d+)/ *\d+ draft tokens")
END = re.compile(r"task (\d+) \| stop processing")
SECONDS_TO_START = 60


def command(asked: dict[str, Any], port: int) -> list[str]:
    common = {
        "-m": asked["target"],
        "--host": "127.0.0.1",
        "--port": port,
        "-t": asked["threads"],
        "-c": asked["max_model_len"],
        "-np": 1,
        "-fa": "off",
        "-ctk": asked["cache"],
        "-ctv": asked["cache"],
    }
    drafting = {
        "-md": asked["drafter"],
        "--spec-type": "draft-eagle3",
        "--spec-draft-n-max": asked["draft_tokens"],
        "--spec-draft-p-min": 0,
        "-td": asked["threads"],
        "-ctkd": asked["cache"],
        "-ctvd": asked["cache"],
    }
    options = common | (drafting if asked["drafter"] else {})
    return [asked["server"], *(str(part) for pair in options.items() for part in pair), "--no-warmup"]


def post(url: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError if the server ends, or is not ready in time."""
    for _ in range(SECONDS_TO_START * 10):
        if server.poll() is not None:
            break
        try:
            post(f"{url}/health")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server did not start (exit status {server.poll()})")


def main(asked_file: str, answered_file: str) -> None:
    asked = json.loads(Path(asked_file).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(answered_file).with_suffix(".log")
    answers: list[dict[str, Any]] = []
    seconds = decode_seconds = 0.0
    with log.open("wb") as written:
        server = subprocess.Popen(
            command(asked, port), stdout=written, stderr=subprocess.STDOUT, env=os.environ | {"LLAMA_TRACE": "1"}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, server)
            for prompt in asked["prompts"]:
                answer = post(
                    f"{url}/completion",
                    {
                        "prompt": prompt,
                        "n_predict": asked["max_new_tokens"],
                        "return_tokens": True,
                        "cache_prompt": False,
                        "temperature": 0,
                        "top_k": 1,
                    },
                )
                times = answer["timings"]
                seconds += (times["prompt_ms"] + times["predicted_ms"]) / 1000
                decode_seconds += times["predicted_ms"] / 1000
                answers.append({"token_ids": answer["tokens"]})
        finally:
            server.terminate()
            server.wait()
    text = log.read_text(errors="replace")
    rounds: dict[str, list[int]] = {task: [] for task in END.findall(text)}
    for task, accepted in ROUND.findall(text):
        rounds[task].append(int(accepted))
    for answer, per_round in zip(answers, rounds.values(), strict=True):
        answer["accepted_per_round"] = per_round
    found = {"answers": answers, "seconds": seconds, "decode_seconds": decode_seconds}
    Path(answered_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
