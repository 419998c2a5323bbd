"""Named benchmarks of recipes: their place on the hub and the prompts of their rows.

    mt_bench      80 conversations of two turns in eight categories (Zheng et al. 2023, arXiv 2306.05685)
    humaneval     164 Python functions to complete (Chen et al. 2021, arXiv 2107.03374)
    gsm8k         1,319 school-maths questions, the test split (Cobbe et al. 2021, arXiv 2110.14168)
    spec_bench    480 conversations of six tasks (Xia et al. 2024, arXiv 2401.07851)

`mt_bench` is fetched and cached by the `datasets` library; `mt_bench:path/to/file` is your copy, JSON lines or parquet,
in any published form:

    question_id, category, turns, reference      MT-bench, Spec-Bench, and EAGLE's files for all of them
    task_id, prompt, canonical_solution          HumanEval: HUMANEVAL_REQUEST, then the prompt, which is code
    question, answer                             GSM8K: the question

A conversation's id is <benchmark>/<number of the question>. One of Spec-Bench's six tasks is MT-bench: its questions
have meta["category"] `mt_bench`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.hub_fetch import check_dataset
from draftsmith.recipes.files.json_text import whole_number


@dataclass(frozen=True)
class Benchmark:
    """Arguments of `datasets.load_dataset`."""

    hub_id: str
    split: str
    config: str | None = None
    files: tuple[str | None, ...] = (None,)  # read one by one, because their columns differ; None: the default


BENCHMARKS = {
    "mt_bench": Benchmark("philschmid/mt-bench", "train"),
    "humaneval": Benchmark("openai/openai_humaneval", "test"),
    "gsm8k": Benchmark("openai/gsm8k", "test", config="main"),
    # Spec-Bench itself is not on the hub; these six files are its question.jsonl, split by task.
    "spec_bench": Benchmark(
        "RedHatAI/speculator_benchmarks",
        "train",
        files=tuple(
            f"{task}.jsonl" for task in ("question", "translation", "summarization", "qa", "math_reasoning", "rag")
        ),
    ),
}

MT_BENCH_CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]

# A chat model may continue or explain bare code. Files with `turns` have their own request.
HUMANEVAL_REQUEST = "Complete this Python function. Answer with the whole function and nothing else.\n\n"


def benchmark_of(source: str) -> tuple[str, str | None] | None:
    """(benchmark, file or None) of `mt_bench` or `mt_bench:file`; None for any other source."""
    name, colon, path = source.partition(":")
    if name not in BENCHMARKS:
        return None
    return name, path if colon else None


def fetch(name: str) -> Iterator[Any]:
    """The rows of a benchmark from the hub. Raises UserError if they cannot be fetched."""
    import datasets

    benchmark = BENCHMARKS[name]
    check_dataset(benchmark.hub_id)
    try:
        parts = [
            datasets.load_dataset(benchmark.hub_id, benchmark.config, split=benchmark.split, data_files=files)
            for files in benchmark.files
        ]
    except Exception as error:  # many kinds: no network, no such name, no access, a changed dataset
        raise UserError(
            f"{name}: datasets cannot fetch {benchmark.hub_id}: {type(error).__name__}: {first_line(error)}; "
            f"if you have the benchmark as a file, write {name}:path/to/file.jsonl (or .parquet)"
        ) from None
    for part in parts:
        yield from part


def known_forms(name: str, record: Any, line: int) -> Any:
    """A row of benchmark `name` as a record for `recipes.prompts.records`, with `line` where it has no number."""
    if not isinstance(record, dict):
        return record
    record = dict(record)
    numbers = (whole_number(record.get(key)) for key in ("question_id", "task_id", "id"))
    given = next((number for number in numbers if number is not None), line)
    if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
        record["id"] = f"{name}/{str(given).removeprefix('HumanEval/').removeprefix(f'{name}/')}"
    prompt = record.get("prompt")
    if name == "humaneval" and isinstance(prompt, str) and prompt.strip():
        record["prompt"] = HUMANEVAL_REQUEST + f"```python\n{prompt.strip()}\n```"
    meta = record.get("meta")
    if meta is None or isinstance(meta, dict):
        record["meta"] = (meta or {}) | {"benchmark": name}
        if name == "spec_bench" and record.get("category") in MT_BENCH_CATEGORIES:
            record["category"] = "mt_bench"
    return record
