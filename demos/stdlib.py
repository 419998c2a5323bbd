"""Chat prompts made from the Python standard library of the running interpreter.

`demos.prompts` writes those of CPython 3.11 to files. Sources are only parsed with `ast`, never imported or executed.

There are two kinds of question, each answered by code alone:

    write      "Write the method `Queue.qsize(self)` of `queue`. Return the approximate size ..."
    complete   "Complete this function of `queue`:" + its first lines; the answer is the remaining lines

and, about held-out modules only and without answers, two kinds of conversation whose answers repeat what stands there:

    edit       "Repeat this method of `queue`:" + its code; "Rename `qsize` to `qsize_v2` in it."; "Add a docstring ..."
    again      a `write` question, the same for `qsize_v2`, and the first once more

Answers are normalised by `ast.unparse`: no comments, no docstrings, one quoting style. Train and held-out are split
**by top-level module**, so near-copies inside one package (`encodings.*`) are on one side. Held-out functions with the
normalised body of a training function are dropped.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

SPLITS = ("train", "heldout")
KINDS = ("write", "complete")
COPY_KINDS = ("edit", "again")

# Shorter answers are one-line stubs; the demo target does not finish longer ones.
MIN_ANSWER_CHARACTERS = 80
MAX_ANSWER_CHARACTERS = 320
MAX_QUESTION_CHARACTERS = 600

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_TEST_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}


@dataclass(frozen=True)
class SourceFunction:
    module: str  # dotted, for example "asyncio.events"
    qualified_name: str  # "AbstractEventLoop.run_forever" or "dedent"
    signature: str  # "run_forever(self)"
    summary: str  # first line of the docstring, or ""
    source: str  # normalised by ast.unparse, without its docstring; "" if this interpreter cannot write it back

    @property
    def id(self) -> str:
        return f"stdlib/{self.module}/{self.qualified_name}"

    @property
    def name(self) -> str:
        return self.qualified_name.rpartition(".")[2]

    @property
    def what(self) -> str:
        return "method" if "." in self.qualified_name else "function"


def split_of(module: str) -> str:
    """The split of a module. A hash holds one top-level module in ten out, on every machine the same."""
    top_level = module.split(".")[0]
    return "heldout" if hashlib.sha256(top_level.encode()).digest()[0] % 10 == 0 else "train"


def stdlib_conversations(split: str, kinds: tuple[str, ...] = KINDS) -> Iterator[dict]:
    """Conversations of one split, in a fixed shuffled order: `{"id", "messages": [user, assistant], "meta"}`.

    Each function is asked about once; a hash of its name draws the kind. The assistant's message is the library's own
    code, which the demo target was trained on. Regeneration replaces it.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
    for function in _deduplicated(split):
        kind = kinds[hashlib.sha256(b"kind" + function.id.encode()).digest()[0] % len(kinds)]
        conversation = conversation_of(function, kind)
        if conversation is not None:
            yield conversation


def copy_conversations() -> Iterator[dict]:
    """Conversations about held-out functions whose answers repeat a given source or an earlier answer.

    `{"id", "messages": [user, user, user], "meta"}`, in a fixed shuffled order; `meta["category"]` is one of COPY_KINDS
    in turn.
    """
    lengths = range(MIN_ANSWER_CHARACTERS, MAX_ANSWER_CHARACTERS + 1)
    functions = [f for f in _deduplicated("heldout") if len(f.source) in lengths]
    functions.sort(key=lambda f: hashlib.sha256(b"copy" + f.id.encode()).digest())
    for function, kind in zip(functions, cycle(COPY_KINDS), strict=False):
        yield {
            "id": f"{function.id}/{kind}",
            "messages": [{"role": "user", "content": question} for question in _copy_questions(function, kind)],
            "meta": {"module": function.module, "category": kind},
        }


def _copy_questions(function: SourceFunction, kind: str) -> list[str]:
    name = function.name
    if kind == "edit":
        return [
            f"Repeat this {function.what} of `{function.module}`:\n{function.source}",
            f"Rename `{name}` to `{name}_v2` in it.",
            "Add a docstring to it.",
        ]
    written = write_question(function, function.signature)
    return [written, write_question(function, function.signature.replace(name, f"{name}_v2", 1)), written]


def write_question(function: SourceFunction, signature: str) -> str:
    owner = function.qualified_name.rpartition(".")[0]
    name = f"{owner}.{signature}" if owner else signature
    question = f"Write the {function.what} `{name}` of `{function.module}`."
    return f"{question} {function.summary}" if function.summary else question


def conversation_of(
    function: SourceFunction, kind: str, max_answer_characters: int = MAX_ANSWER_CHARACTERS
) -> dict | None:
    """One question with the library's own answer, or None if a length is outside the limits."""
    if kind == "write":
        question, answer = write_question(function, function.signature), function.source
    elif kind == "complete":
        lines = function.source.split("\n")
        shown = max(2, len(lines) // 3)
        question = f"Complete this {function.what} of `{function.module}`:\n" + "\n".join(lines[:shown])
        answer = "\n".join(lines[shown:])
    else:
        raise ValueError(f"kind {kind!r}: one of {', '.join(KINDS)}")
    if not MIN_ANSWER_CHARACTERS <= len(answer) <= max_answer_characters or len(question) > MAX_QUESTION_CHARACTERS:
        return None
    return {
        "id": f"{function.id}/{kind}",
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        "meta": {"module": function.module, "kind": kind},
    }


@cache
def library_functions(include_tests: bool = False) -> tuple[SourceFunction, ...]:
    """Every function and method of the standard library, file by file in sorted order.

    Args:
        include_tests: also read the library's own test suite, if the interpreter ships it (Debian's does not).
    """
    skipped = _SKIPPED_FOLDERS if include_tests else _SKIPPED_FOLDERS | _TEST_FOLDERS
    root = Path(sysconfig.get_paths()["stdlib"])
    functions = list[SourceFunction]()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if skipped.intersection(parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old modules have invalid escapes
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue  # deliberately broken files of the test suite
        functions += _functions_in(tree, ".".join(part for part in parts if part != "__init__"), prefix="")
    return tuple(functions)


def _functions_in(node: ast.AST, module: str, prefix: str) -> Iterator[SourceFunction]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions_in(child, module, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(child):
                child.body = child.body[1:] or [ast.Pass()]
            signature = source = ""
            with suppress(ValueError):  # some nested f-strings
                signature, source = f"{child.name}({ast.unparse(child.args)})", ast.unparse(child)
            summary = (docstring or "").strip().split("\n")[0].strip()
            yield SourceFunction(module, f"{prefix}{child.name}", signature, summary, source)
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions_in(child, module, prefix)


def _deduplicated(split: str) -> Iterator[SourceFunction]:
    """Functions of one split in the order of their ids' digests: each id once, and no held-out body that a training
    module has."""
    functions = library_functions()
    of_training = {f.source for f in functions if split_of(f.module) == "train"} if split != "train" else set()
    by_id: dict[str, SourceFunction] = {}
    for function in functions:
        if split_of(function.module) == split:
            by_id.setdefault(function.id, function)
    for function in sorted(by_id.values(), key=lambda f: hashlib.sha256(f.id.encode()).digest()):
        if function.source not in of_training:
            yield function
