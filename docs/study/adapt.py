"""Adapt the study's drafter to a fine-tuned target: tau of the old, the LoRA-adapted and the fully trained drafter.

    draftsmith run docs/study/study.yaml                  # first: the drafter to adapt, in runs/study-demo
    OMP_NUM_THREADS=1 python -m docs.study.adapt          # everything, into runs/adapt; prints the table

The study's target writes code. Here a LoRA teaches it another kind of question, to document a function, from the
docstrings of the standard library's training modules. The fine-tuned target answers questions about these modules, and
the old drafter is trained on its answers in two ways for equal CPU time: LoRA alone, and all weights. All drafters are
measured on questions about held-out modules. A stopped study resumes where it was.
"""

import argparse
import ast
import hashlib
import inspect
import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.recipes.prompts.stdlib import parsed_files, split_of

TARGET = "docs/study/target"
DOCSTRING_CHARACTERS = (80, 320)  # as long as the study's answers
MOST_QUESTION_CHARACTERS = 600
# Peak learning rates, not searched: the study's for LoRA, half of it for trained weights.
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"learning_rate": 4e-3, "lora": {"r": 16, "alpha": 32}},
    "all weights": {"learning_rate": 2e-3, "lora": None},
}


def documented_functions() -> Iterator[tuple[str, str, str]]:
    """(module, source without docstring, docstring) of the standard library's functions, in sorted order."""
    for parts, _, tree in parsed_files({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}):
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if docstring := ast.get_docstring(function):
                function.body = function.body[1:] or [ast.Pass()]
                yield ".".join(parts), ast.unparse(function), inspect.cleandoc(docstring)


def write_questions(place: Path) -> None:
    """train.jsonl and heldout.jsonl: "Document this function", answered by its docstring."""
    lines: dict[str, list[str]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    shortest, longest = DOCSTRING_CHARACTERS
    for module, source, docstring in documented_functions():
        question = f"Document this function of `{module}`:\n{source}"
        if (
            shortest <= len(docstring) <= longest
            and len(question) <= MOST_QUESTION_CHARACTERS
            and docstring not in seen
        ):
            seen.add(docstring)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": docstring}]
            lines[split_of(module)].append(json.dumps({"id": f"document/{len(seen)}", "messages": messages}))
    for split, found in lines.items():
        found.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
        (place / f"{split}.jsonl").write_text("\n".join(found) + "\n")
        print(f"{split}: {len(found):,} questions")


def fine_tune(place: Path, steps: int, rows: int = 8) -> None:
    """Trains a LoRA of the target on the answers and writes it to adapter/."""
    torch.manual_seed(0)
    order = random.Random(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    base = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    examples = [json.loads(line)["messages"] for line in (place / "train.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        chosen = order.sample(examples, rows)
        prompts = [tokenizer.apply_chat_template(c[:1], tokenize=False, add_generation_prompt=True) for c in chosen]
        texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in chosen]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, prompt in enumerate(prompts):
            labels[row, : len(tokenizer(prompt, add_special_tokens=False)["input_ids"])] = -100
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.5 * steps))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"fine-tuning, step {step + 1}: {mean(losses[-20:]):.3f} nats per token", flush=True)
    model.save_pretrained(place / "adapter")


def recipe(place: Path, name: str, demo: Path, **train: Any) -> Path:
    """The study's recipe with the adapter, the new questions, and `output_dir` place/name."""
    content = yaml.safe_load(Path("docs/study/study.yaml").read_text())
    content["output_dir"] = str(place / name)
    content["target"]["adapter"] = str(place / "adapter")
    content["data"] |= {"prompts": str(place / "train.jsonl"), "conversations": str(place / "conversations.jsonl")}
    lora = train.pop("lora", None)
    content["drafter"] = {"kind": "eagle3", "vocab_size": 768, "init_from": str(demo / "drafter"), "lora": lora}
    content["train"] |= {"validation_conversations": 64, "eval_replay": 0, "warmup_steps": 10} | train
    content["train"] |= {"save_every_steps": 100_000, "validate_every_steps": 100_000}
    content["eval"] = {key: content["eval"][key] for key in ("max_prompts", "max_new_tokens", "tree")}
    content["eval"] |= {"prompts": str(place / "heldout.jsonl")}
    (place / name).mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(*words: str | Path) -> float:
    """Runs a `draftsmith` command; returns its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("$ draftsmith", *words, flush=True)
    program = [sys.executable, "-m", "draftsmith.recipes.command.console", *map(str, words)]
    subprocess.run(program, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(place: Path, name: str, demo: Path, **settings: Any) -> float:
    """Trains a drafter in place/name; returns its CPU seconds."""
    path = recipe(place, name, demo, **settings)
    record = place / name / "cpu_seconds"
    if not record.exists():
        shutil.copy(demo / "draft_vocab.safetensors", place / name)
        record.write_text(str(command("train", path)))
    return float(record.read_text())


def seconds_per_step(place: Path, method: str, demo: Path) -> float:
    """CPU seconds of one training step, from two short runs: starting costs the same in both."""
    short, long = (
        train(place, f"trial-{method.replace(' ', '-')}-{steps}", demo, max_steps=steps, **METHODS[method])
        for steps in (15, 45)
    )
    return (long - short) / 30


def tau(place: Path, name: str, demo: Path, drafter: Path) -> tuple[float, list[float]]:
    """(tau on the held-out questions, its 95 % interval)."""
    result = place / name / "eval/acceptance.json"
    if not result.exists():
        command("evaluate", recipe(place, name, demo), f"eval.drafter={drafter}")
    content = json.loads(result.read_text())
    return content["tau"], content["tau_interval"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/study-demo"), help="where that drafter is")
    parser.add_argument("--out", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--minutes", type=float, default=0.8, help="CPU minutes of each training, without its start")
    parser.add_argument("--fine-tuning-steps", type=int, default=90)
    parser.add_argument("--prompts", type=int, default=600, help="questions that the fine-tuned target answers")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    place, demo = args.out, args.demo
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "heldout.jsonl").exists():
        write_questions(place)
    if not (place / "adapter/adapter_model.safetensors").exists():
        fine_tune(place, args.fine_tuning_steps)
    command("regenerate", recipe(place, "old", demo), f"data.max_prompts={args.prompts}")
    table = [("old drafter", "", [tau(place, "old", demo, demo / "drafter")])]
    steps = {each: round(args.minutes * 60 / seconds_per_step(place, each, demo)) for each in METHODS}
    found: dict[str, list[tuple[float, list[float]]]] = {each: [] for each in METHODS}
    for seed in range(args.seeds):
        for method, settings in METHODS.items():
            name = f"{method.replace(' ', '-')}-{seed}"
            train(place, name, demo, max_steps=steps[method], seed=seed, **settings)
            found[method].append(tau(place, name, demo, place / name / "drafter"))
    table += [(f"{each}, {steps[each]} steps", f"{args.minutes:g}", found[each]) for each in METHODS]
    print("| drafter | CPU minutes | tau, by seed | mean |\n|---|---|---|---|")
    for name, minutes, values in table:
        each = ", ".join(f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, (low, high) in values)
        print(f"| {name} | {minutes} | {each} | {mean(value for value, _ in values):.2f} |")


if __name__ == "__main__":
    main()
