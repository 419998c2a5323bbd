"""Regenerates prompts by servers that are killed once, and compares the token ids with the in-process writer's.

    python tools/serving/regeneration_check.py recipes/demo.yaml --work runs/regeneration_check --vllm ~/vllm/bin/python
    python tools/serving/regeneration_check.py recipes/demo.yaml --work runs/regeneration_check \
      --llama-server ~/llama.cpp/build/bin/llama-server --target-gguf target.gguf

The target must be a folder; it runs in float32, and answers are greedy. With pictures (recipes/demo-vision.yaml), vLLM
needs torchvision. Each server runs on loopback and is killed (SIGKILL, with all its processes) when a third of the
conversations is written and a request is on its way, then started again on the same port. The exit code is 1 if any
answer differs, or if the kill interrupted no request.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from draftsmith.recipes.loader import load_recipe

SECONDS_TO_START = 300
CPU_ONLY = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class RestartableServer:
    """A server in a process group of its own."""

    def __init__(self, command: list[str], url: str, log: Path):
        self.command, self.url, self.log = command, url, log

    def start(self) -> None:
        """Raises RuntimeError if the server ends, or is not ready in time."""
        with self.log.open("ab") as written:
            self.process = subprocess.Popen(
                self.command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=os.environ | CPU_ONLY,
                start_new_session=True,
            )
        for _ in range(SECONDS_TO_START * 10):
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.command[0]} did not start: see {self.log}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def regeneration(recipe: str, out: Path, prompts: int, *overrides: str) -> list[str]:
    common = [
        f"output_dir={out}",
        f"data.conversations={out / 'conversations.jsonl'}",
        f"data.max_prompts={prompts}",
        "target.dtype=float32",
        "data.generator.temperature=0",
    ]
    return [sys.executable, "-m", "draftsmith.data_gen.regenerate", recipe, *common, *overrides]


def with_published_names(target: str, copy: Path) -> str:
    """A LLaVA with its tower's tensors named as in published checkpoints, which vLLM asks for; others as they are."""
    path, tower, published = Path(target) / "model.safetensors", "vision_tower.", "vision_tower.vision_model."
    tensors = load_file(path) if path.exists() else {}
    if not any(name.startswith(tower) for name in tensors) or any(name.startswith(published) for name in tensors):
        return target
    shutil.copytree(target, copy)
    named = {name.replace(tower, published, 1) if name.startswith(tower) else name: t for name, t in tensors.items()}
    save_file(named, copy / path.name, metadata={"format": "pt"})
    return str(copy)


def records(out: Path) -> dict[str, dict[str, Any]]:
    """Conversations by their ids."""
    path = out / "conversations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def written(out: Path) -> int:
    path = out / "conversations.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def regenerate_with_a_kill(server: RestartableServer, command: list[str], out: Path, prompts: int) -> None:
    """Raises RuntimeError if regeneration ends before the kill, or fails."""
    server.start()
    try:
        with (out / "regenerate.log").open("wb") as log:
            writer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            while written(out) < max(1, prompts // 3):
                if writer.poll() is not None:
                    raise RuntimeError(f"regeneration ended with {writer.returncode}: see {log.name}")
                time.sleep(0.002)
            server.kill()
            print(f"  killed with {written(out)} conversations written; started again on {server.url}")
            server.start()
            if writer.wait():
                raise RuntimeError(f"regeneration ended with {writer.returncode}: see {log.name}")
    finally:
        server.kill()


def differences(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    found = [f"{name}: only one side has it" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        for one, other in zip(ours[name]["turns"], theirs[name]["turns"], strict=True):
            for key in ("prompt_token_ids", "output_token_ids", "finish_reason"):
                if one[key] != other[key]:
                    found.append(f"{name}: {key}: {one[key]} in process, {other[key]} by the server")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is written; emptied first")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--vllm", help="the python of an environment with vllm or vllm-cpu")
    parser.add_argument("--llama-server")
    parser.add_argument("--target-gguf", help="the target for llama-server, in float32")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe)
    target, length = recipe.target.model, str(recipe.data.max_length)

    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    commands: dict[str, list[str]] = {}
    if options.vllm:
        target = with_published_names(target, options.work / "target")
        # What `vllm serve` runs. In vllm-cpu 0.32.0 the command itself looks for a package named vllm and fails.
        commands["vllm"] = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        commands["vllm"] += ["--dtype", "float32", "--enforce-eager"]
        commands["vllm"] += ["--max-model-len", length, "--max-num-seqs", "2", "--no-enable-prefix-caching"]
    if options.llama_server:
        commands["llama.cpp"] = [options.llama_server, "-m", options.target_gguf, "-t", "1", "-np", "2", "-fa", "off"]
        commands["llama.cpp"] += ["-c", str(2 * int(length)), "-ctk", "f32", "-ctv", "f32", "--no-warmup"]

    in_process = options.work / "in_process"
    subprocess.run(regeneration(options.recipe, in_process, options.prompts), check=True, stdout=subprocess.DEVNULL)
    ours = records(in_process)
    failed = False
    for name, command in commands.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        out, url = options.work / name, f"http://127.0.0.1:{port}"
        out.mkdir()
        server = RestartableServer([*command, "--host", "127.0.0.1", "--port", port], url, out / "server.log")
        generator = {"kind": "openai", "base_urls": f"[{url}]", "concurrency": "2"}
        asked = [f"data.generator.{key}={value}" for key, value in generator.items()]
        print(name)
        regenerate_with_a_kill(server, regeneration(options.recipe, out, options.prompts, *asked), out, options.prompts)
        theirs = records(out)
        turns = [turn for record in theirs.values() for turn in record["turns"]]
        found = differences(ours, theirs)
        different = {line.split(":")[0] for line in found}
        interrupted = (
            "failed tries" in (said := (out / "regenerate.log").read_text()) and ", 0 failed tries" not in said
        )
        print(f"  {len(ours) - len(different)} of {len(ours)} conversations have the in-process tokens")
        print(f"  {sum(len(turn['output_token_ids']) for turn in turns):,} tokens, ", end="")
        print(f"{sum(turn.get('retokenised', False) for turn in turns)} of {len(turns)} answers from text alone")
        print(
            *(f"  {line.strip()}" for line in said.splitlines() if url in line and "answers" in line), *found, sep="\n"
        )
        failed = failed or bool(found) or not interrupted
    sys.exit(failed)


if __name__ == "__main__":
    main()
