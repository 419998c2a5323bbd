"""Reads a recipe: YAML file + `key.path=value` overrides -> `schema.Recipe`, with every problem reported at once.

Each problem names its place, `recipe.yaml:12` or `override 'train.seed=x'`, and the expected and the given value.
"""

import difflib
import os
import re
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.prompts.benchmarks import BENCHMARKS, benchmark_of
from draftsmith.recipes.prompts.sources import check_source, file_sources
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.base import ImpossibleSettings

KeyPath = tuple[str | int, ...]

EXPECTED = {
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a section of `key: value` lines",
    "literal_error": "one of {expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le:,}",
}
"""pydantic's error types in words; the braces are filled from the error's context."""

PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key in `<<: *defaults`
TEXT_TAG = "tag:yaml.org,2002:str"

# Far beyond any recipe, and read in a second. Few characters can expand to endlessly many values, because aliases may
# name lists of aliases.
MOST_CHARACTERS = 60_000
MOST_VALUES = 10_000
MOST_DIGITS = 400
MOST_PROBLEMS = 50
PASSWORD = re.compile(r"//[^/\s]*@")  # and user name, in a URL
PACKAGE = Path(__file__).parents[1]  # holds the folder `recipes`
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
    problems = list(dict.fromkeys(source.problems))  # an alias repeats a section's
    if len(problems) > MOST_PROBLEMS:
        raise UserError([*problems[:MOST_PROBLEMS], f"{path}: and more problems; fix these first"])
    if problems or recipe is None:
        raise UserError(problems)
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
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; name a recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{path}: too long for a recipe, which has at most {MOST_CHARACTERS:,} characters")
    source = _Source(places={(): str(path)})
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
    recipes/demo.yaml, is found there unless the working directory has it.
    """
    if text.startswith("recipes/") and not os.path.exists(text) and os.path.exists(PACKAGE / text):
        return str(PACKAGE / text)
    before = BEFORE_PATH.match(text)
    return text if before is None else before[0] + os.path.expanduser(text[before.end() :])


def _refused(mark: yaml.Mark, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _read_yaml(source: _Source, text: str, path: KeyPath, place: Callable[[int], str]) -> Any:
    """The value of YAML `text` at `path`. Notes places and repeated keys in `source`."""
    loader = yaml.SafeLoader(text)
    count = 0

    def value_of(node: yaml.Node, path: KeyPath, key_line: int) -> Any:
        nonlocal count
        count += 1
        source.places[path] = place(key_line)
        if count > MOST_VALUES:
            raise _refused(node.start_mark, f"more than {MOST_VALUES:,} values, those that aliases repeat included")
        if isinstance(node, yaml.ScalarNode):
            if node.tag != TEXT_TAG and len(node.value) > MOST_DIGITS:
                raise _refused(node.start_mark, f"a value of {len(node.value):,} characters that is not text")
            try:
                value = loader.construct_object(node)
                return placed(value) if isinstance(value, str) else value
            except (ValueError, KeyError, AttributeError) as error:  # 2024-13-45, !!bool maybe, !!timestamp abc
                why = error if isinstance(error, ValueError) else f"{node.value!r} is not a {node.tag.split(':')[-1]}"
                raise _refused(node.start_mark, str(why)) from None
        if node.tag not in PLAIN_TAGS:
            raise _refused(node.start_mark, f"unknown tag {node.tag}")
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, (*path, index), item.start_mark.line + 1) for index, item in enumerate(node.value)]
        merged: dict[str, Any] = {}
        own: dict[str, tuple[yaml.Node, int]] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == MERGE_TAG:
                # The first of several sections has priority.
                for each in reversed(value_node.value) if isinstance(value_node, yaml.SequenceNode) else (value_node,):
                    if not isinstance(each, yaml.MappingNode):
                        raise _refused(each.start_mark, "`<<` takes a section or a list of sections")
                    merged |= value_of(each, path, key_line)
            elif not isinstance(key_node, yaml.ScalarNode):
                source.problems.append(f"{place(line)}: a key must be a single word")
            else:
                if key_node.value in own:
                    name, first = _dotted((*path, key_node.value)), place(own[key_node.value][1])
                    source.problems.append(f"{place(line)}: `{name}` is given twice, first at {first}")
                own[key_node.value] = value_node, line
        return merged | {key: value_of(value, (*path, key), line) for key, (value, line) in own.items()}

    try:
        node = loader.get_single_node()
        return None if node is None else value_of(node, path, node.start_mark.line + 1)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply, or an alias that contains itself") from None
    finally:
        loader.dispose()


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
    key: Any = None
    parent: Any = source.values
    for depth, name in enumerate(names):
        if isinstance(parent, list) and name.isdecimal() and len(name) < 10 and int(name) < len(parent):
            key = int(name)
        elif isinstance(parent, dict):
            key = name
        else:
            what = f"a list of {len(parent)}" if isinstance(parent, list) else _given(parent)
            source.problems.append(f"{where}: `{_dotted(path)}` is {what}, it has no `{_cut(name)}`")
            return
        path = (*path, key)
        if depth < len(names) - 1:
            if isinstance(parent, dict) and parent.get(name) is None:
                parent[name] = {}
                source.places[path] = where
            parent = parent[key]
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
    unions: dict[KeyPath, list[str]] = {}
    given: dict[KeyPath, str] = {}
    problems: list[str | KeyPath] = []
    for item in error.errors()[: 4 * MOST_PROBLEMS]:  # a union has several for one place; suggestions take time
        kind, location = item["type"], item["loc"]
        if kind == "missing":
            problems.append(f"{source.place(location)}: `{_dotted(location)}` is missing{_meaning(location)}")
        elif kind == "extra_forbidden":
            problems.append(f"{source.place(location)}: unknown key `{_dotted(location)}`{_suggestion(location)}")
        elif kind == "value_error":
            raised = item["ctx"]["error"]  # type: ignore[typeddict-item]
            if isinstance(raised, ImpossibleSettings):
                parts = (problem.partition(": ") for problem in raised.problems)
                problems += [source.at((*location, *_path_below(key)), said) for key, _, said in parts]
            else:
                problems.append(source.at(location, str(raised)))
        else:
            path = _value_path(source, location)
            words = EXPECTED[kind].format(**item.get("ctx", {})) if kind in EXPECTED else item["msg"]
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


def _path_below(dotted: str) -> KeyPath:
    return tuple(int(key) if key.isdecimal() else key for key in dotted.split("."))


def _given(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _cut(f"the number {value}")
    if isinstance(value, str):
        return f"the text '{_cut(value)}'"
    return {dict: "a section", list: "a list"}.get(type(value), f"the {type(value).__name__} {value}")


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


def _meaning(path: KeyPath) -> str:
    info = _keys(_section_at(path[:-1])).get(str(path[-1]))
    return f": {info.description}" if info and info.description else ""


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
        problems["target", "model"] = f"no such directory: {model} (a hub model is written org/name)"
    template = _raw(source, ("target", "chat_template"))
    if isinstance(template, str) and not Path(template).is_file():
        problems["target", "chat_template"] = f"no such file: {template}"
    conversations, output = _raw(source, ("data", "conversations")), _raw(source, ("output_dir",))
    written = _identified(str(conversations or Path(str(output)) / "conversations.jsonl"))
    for key in ("data", "eval"):
        seen: dict[str, str] = {}
        given = _raw(source, (key, "prompts"))
        for index, name in enumerate(given if isinstance(given, list) else [given]):
            if not isinstance(name, str):
                continue
            problem = check_source(name)
            for part in file_sources(name):
                if (same := _identified(part)) in seen:
                    problem = f"{part} is given twice, first as {seen[same]}"
                elif same == written and (conversations or part != name):
                    problem = f"{part} is data.conversations, too; name another file there, regenerate writes to it"
                seen[same] = name
            problems[(key, "prompts", index) if isinstance(given, list) else (key, "prompts")] = problem
    for path in (("output_dir",), ("data", "conversations"), ("data", "reprompt", "out"), ("eval", "out")):
        if isinstance(written := _raw(source, path), str):
            problems[path] = output_problem(Path(written), folder=path[0] != "data")
    return [source.at(path, problem) for path, problem in problems.items() if problem is not None]


def _identified(name: str) -> str:
    """A text that is equal for two spellings of the same source."""
    named = benchmark_of(name)
    if named is not None and named[1] is None:
        return named[0]
    if name.startswith("hf:"):
        return name
    return str(Path(named[1] if named and named[1] else name).resolve())


def output_problem(path: Path, folder: bool) -> str | None:
    """Why `path` cannot be made, or None."""
    if "\0" in str(path):
        return f"{quoted(str(path))} is not a valid path"
    try:
        if folder and path.is_file():
            return f"{path} is a file; name a folder"
        if not folder and path.is_dir():
            return f"{path} is a folder; name a file"
        above = next((parent for parent in path.absolute().parents if parent.exists()), None)
    except OSError as error:
        return f"{quoted(str(path))} is not a valid path: {error.strerror}"
    if above is not None and not above.is_dir():
        return f"{path} cannot be made: {above} is a file"
    if path.exists() or above is None:
        return None
    try:  # permissions are not enough: nobody can create files in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".draftsmith-", dir=above))
    except OSError as error:
        return f"{path} cannot be made: nothing can be written to {above} ({error.strerror})"
    return None


def _raw(source: _Source, path: KeyPath) -> Any:
    value: Any = source.values
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
