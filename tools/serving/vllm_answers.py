"""Answers prompts with vLLM on a CPU, with or without a drafter, in an environment of its own (`make serve-check`).

    python vllm_answers.py asked.json answered.json

asked.json: {"target", "drafter" or null, "method", "draft_tokens", "max_new_tokens", "max_model_len",
    "prompts": [[token id]]}
answered.json: a list of {"token_ids", "rounds", "accepted_at"} in the order of the prompts, and the seconds of all.
`rounds` counts verifications with drafts; accepted_at[i] counts those that accepted the drafted token i.
"""

import json
import os
import sys
import time
from pathlib import Path

# pyright: reportMissingImports=false

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # so that OMP_NUM_THREADS counts
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams


def counts(llm: LLM, most: int) -> list[int]:
    """[rounds, accepted at position 0, 1, ...] so far."""
    found = [0] * (most + 1)
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found[0] = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found[1:] = [int(value) for value in metric.values]
    return found


def main(asked_file: str, answered_file: str) -> None:
    asked = json.loads(Path(asked_file).read_text())
    drafts = asked["draft_tokens"]
    speculative = {"model": asked["drafter"], "method": asked["method"], "num_speculative_tokens": drafts}
    llm = LLM(
        model=asked["target"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_model_len=asked["max_model_len"],
        max_num_seqs=1,
        speculative_config=speculative if asked["drafter"] else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=asked["max_new_tokens"])
    answers = []
    started = time.perf_counter()
    for prompt in asked["prompts"]:
        before = counts(llm, drafts)
        output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
        rounds, *accepted = (now - then for now, then in zip(counts(llm, drafts), before, strict=True))
        answers.append({"token_ids": list(output.token_ids), "rounds": rounds, "accepted_at": accepted})
    seconds = time.perf_counter() - started
    Path(answered_file).write_text(json.dumps({"answers": answers, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
