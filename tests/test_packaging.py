"""What the layout promises: every module is in the wheel, no file hides an installed module, imports run one way.

Each check is a function of a root folder that returns what is wrong. It is held against this tree, which must pass, and
against a small tree with mistakes.
"""

import ast
import configparser
import functools
import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith.recipes.command.stages import SCRIPTS
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "recipes": set(),
    "models": {"recipes"},
    "eval": {"models", "recipes"},
    "data_gen": {"models", "eval", "recipes"},
    "train": {"models", "eval", "recipes", "data_gen"},
}
ROOMS = tuple(MAY_IMPORT)
OUTSIDE = ("demos", "docs", "tests", "tools")  # import the package and are no part of it
# Not installed by `make install`, but by users: extras of the package, trackers, engines.
OFTEN_INSTALLED = {
    *("PIL", "aim", "bitsandbytes", "clearml", "comet_ml", "deepspeed", "dvclive", "flash_attn", "mlflow", "openai"),
    *("peft", "sglang", "swanlab", "tensorboard", "torchvision", "trackio", "triton", "vllm", "wandb"),
}
INSTALLED = importlib.metadata.packages_distributions()  # top-level module -> the distributions that bring it


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(room, path) of every Python file of the package."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            yield room, path


def shadowing(root: Path) -> list[str]:
    """Files and folders beside scripts that bear the name of an importable module: a script's folder comes first on
    sys.path."""
    taken = set(sys.stdlib_module_names) | set(INSTALLED) | OFTEN_INSTALLED
    problems = []
    for room, path in modules(root):
        named = path.parent if path.name == "__init__.py" else path
        if named.stem in taken and named.parent == root / room:
            problems.append(f"{path.relative_to(root)} hides the installed module {named.stem}")
    return problems


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, inside functions too; relative ones begin with a dot."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def forbidden_imports(root: Path) -> list[str]:
    """Imports against the direction recipes <- models <- eval <- data_gen <- train, from OUTSIDE, or not by the full
    name."""
    problems = []
    for room, path in modules(root):
        for line, name in imports(path):
            first, *rest = name.split(".")
            where = f"{path.relative_to(root)}:{line}"
            if first in ("", *ROOMS):
                problems.append(f"{where}: write draftsmith.{name.lstrip('.')}")
            elif first in OUTSIDE:
                problems.append(f"{where}: {room} must not import {first}")
            elif first == "draftsmith" and rest[0] != room and rest[0] not in MAY_IMPORT[room]:
                problems.append(f"{where}: {room} must not import {rest[0]}")
    return problems


def undeclared(root: Path) -> list[str]:
    """Imports of packages that setup.cfg does not ask for, and that are there only because something else did."""
    options = configparser.ConfigParser()
    options.read(root / "setup.cfg")
    wanted = "\n".join([options["options"]["install_requires"], *options["options.extras_require"].values()])
    declared = {
        line.strip().split(">")[0].split("[")[0].split("=")[-1].strip().lower() for line in wanted.splitlines() if line
    }
    declared |= {name.replace("-", "_") for name in declared}  # as one that is not installed is imported
    declared |= {"pyarrow", "numpy", "jinja2"}  # what datasets, torch and transformers cannot be without
    tests = [("tests", path) for path in sorted((root / "tests").glob("*.py"))]
    problems = []
    for _, path in [*modules(root), *tests]:
        for line, name in imports(path):
            top = name.split(".")[0]
            if top in ("", "draftsmith", *OUTSIDE) or top in sys.stdlib_module_names:
                continue
            distributions = {distribution.lower() for distribution in INSTALLED.get(top, [top])}
            if not distributions & declared:
                problems.append(f"{path.relative_to(root)}:{line}: {top} is not in setup.cfg")
    return problems


CHECKS = [shadowing, forbidden_imports, undeclared]


@pytest.mark.parametrize("check", CHECKS)
def test_this_tree(check: Callable[[Path], list[str]]) -> None:
    assert sum(1 for _ in modules(ROOT)) > 10  # the check looked at something
    assert check(ROOT) == []


# A small tree with a mistake or two for each check, after which it says so.
WRONG = {
    "eval/queue.py": "",
    "models/wrong.py": "def f():\n    from draftsmith.train import loop",
    "data_gen/wrong.py": "import tests.reference",
    "train/wrong.py": "from models.target import Target\nfrom . import fine",
    "tests/test_x.py": "import pytest\nfrom fontTools import ttLib",
}
TOLD = {
    shadowing: ["eval/queue.py hides"],
    forbidden_imports: ["models/wrong.py:2", "data_gen/wrong.py:1", "train/wrong.py:1", "train/wrong.py:2"],
    undeclared: ["tests/test_x.py:2: fontTools", "train/wrong.py:1: models"],
}


def test_mistakes_are_caught_in_a_small_tree_that_is_fine_without_them(tmp_path: Path) -> None:
    for folder in (*ROOMS, "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert [check(tmp_path) for check in CHECKS] == [[]] * len(CHECKS)
    for name, text in WRONG.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for check in CHECKS:
        told = check(tmp_path)
        assert len(told) == len(TOLD[check]) and all(any(said in each for each in told) for said in TOLD[check]), told


# Scripts tell by example how they are called. What they show must be what they take.


def scripts(root: Path) -> list[Path]:
    """Files that read a recipe from the command line."""
    calls = re.compile(r"^    .*(parse_command|parse_arguments|train_kind)\(__doc__", re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8") for _, path in modules(root)}
    # recipes/command/cli.py shows such a call in its docstring.
    return [path for path, text in texts.items() if calls.search(text) and path != root / "recipes/command/cli.py"]


def shown_commands(text: str) -> Iterator[list[str]]:
    """Words of the commands shown in a docstring or a recipe's head, without the launcher and what follows a #."""
    unfolded = re.sub(r"\\\\?\n#?\s*", " ", text)
    for line in unfolded.splitlines():
        if found := re.match(r"[#\s]+(?:python|accelerate launch|(draftsmith))\s+(.*)", line):
            words = shlex.split(found[2], comments=True)
            if found[1]:
                words[0] = SCRIPTS[words[0]].module.removeprefix("draftsmith.").replace(".", "/") + ".py"
            while words and words[0].startswith("--"):  # of the launcher, with its value
                words = words[2:]
            if words[0] != "-m":  # a module: of the demos, the study or another project
                yield words


def wrong_examples(root: Path, place: Path, text: str) -> list[str]:
    """Commands that name another script than there is, or overrides that its recipe does not take. That a file is not
    there yet is no mistake: another command makes it."""
    problems = []
    for script, *words in shown_commands(text):
        where = f"{place.relative_to(root)}: {script} {' '.join(words)}"
        if not (root / script).exists():
            problems.append(f"{where}: no such script")
        recipes = [word for word in words if word.startswith("recipes/") and word.endswith(".yaml")]
        overrides = [word for word in words if re.match(r"[a-z_0-9.]+=", word)]
        for recipe in recipes:
            try:
                load_recipe(root / recipe, overrides)
            except UserError as error:
                problems += [f"{where}: {problem}" for problem in error.problems if not ABSENT.search(problem)]
    return problems


ABSENT = re.compile("(no such|does not exist|is missing|is not there|nothing there)")


@pytest.mark.parametrize("path", scripts(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_help_shows_commands_that_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--help` is the docstring (tests/recipes/test_command_line.py)."""
    monkeypatch.chdir(ROOT)  # recipes name files relative to it
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    name = str(path.relative_to(ROOT))
    own = [words for words in shown_commands("\n".join(f"    {line}" for line in doc.splitlines())) if words[0] == name]
    assert any(words[1].startswith("recipes/") for words in own), "no example on a shipped recipe"
    assert any("--plan" in words for words in own) or path.name == "conversations.py"  # it writes nothing
    assert wrong_examples(ROOT, path, doc) == []


def test_recipes_show_commands_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        head = path.read_text(encoding="utf-8").split("\noutput_dir:")[0]
        assert len(list(shown_commands(head))) >= 4 and wrong_examples(ROOT, path, head) == []


DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "study", ROOT / "recipes" / "demo_target")
    for path in folder.glob("*.md")
)


def anchors(text: str) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(place: Path, text: str) -> list[str]:
    """Links of a document to files or headings that do not exist."""
    problems = []
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        other = place.parent / path if path else place
        if not other.exists() or (anchor and anchor not in anchors(other.read_text(encoding="utf-8"))):
            problems.append(f"{place.relative_to(ROOT)}: {path}#{anchor}: no such file or heading")
    return problems


def missing_files(place: Path, text: str) -> list[str]:
    """Files of this repository that a document names and that do not exist."""
    folders = "|".join([*ROOMS, *OUTSIDE])
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]+\.(?:py|md|yaml|jinja))\b", text)
    return [f"{place.relative_to(ROOT)}: {path}: no such file" for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("place", DOCUMENTS, ids=lambda place: str(place.relative_to(ROOT)))
def test_documents_show_commands_that_run_and_links_that_lead_somewhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = place.read_text(encoding="utf-8")
    assert wrong_links(place, text) == []
    if place.name != "LOG.md":  # its commands and files are those of their day
        assert missing_files(place, text) + wrong_examples(ROOT, place, text) == []


def test_pages_are_linked_from_the_readme_and_those_that_code_and_recipes_name_exist():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    sources = [ROOT / "Makefile", *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "docs" / "study").glob("*.yaml")]
    sources += [path for room in (*ROOMS, *OUTSIDE) if room != "tests" for path in (ROOT / room).rglob("*.py")]
    named = re.compile(r"(?<![\w/.])(docs/[\w/-]+\.md|LOG\.md)(?:#([\w-]+))?")
    for path in sources:
        for page, anchor in named.findall(path.read_text("utf-8")):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}"
            assert not anchor or anchor in anchors((ROOT / page).read_text("utf-8")), (
                f"{path.relative_to(ROOT)}: {anchor}"
            )


@pytest.mark.slow
def test_wheel_holds_and_imports_every_module(tmp_path: Path) -> None:
    """Built from this tree, installed where nothing of this tree can be seen, beside the same dependencies."""
    source, site = tmp_path / "source", tmp_path / "site"
    for room in ROOMS:  # a copy: a stale build/ folder here could add modules that are long gone
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(pip, check=True)
    packaged = {str(path.relative_to(site)) for path in (site / "draftsmith").rglob("*") if path.is_file()}
    # Whatever else lies in a room is data: recipes, templates, the demos' targets.
    files = [path for room in ROOMS for path in (source / room).rglob("*") if path.is_file()]
    assert {name for name in packaged if "__pycache__" not in name} == {
        f"draftsmith/{path.relative_to(source)}" for path in files
    }
    names = sorted(name.removesuffix(".py").replace("/", ".") for name in packaged if name.endswith(".py"))
    code = (
        "import importlib, sys\n"
        # A folder that is named here is searched, but its .pth files are not read: the editable install stays out.
        f"sys.path += [{str(site)!r}, {sysconfig.get_path('purelib')!r}]\n"
        f"for name in {names!r}:\n"
        f"    assert importlib.import_module(name).__file__.startswith({str(site)!r}), name\n"
    )
    # -S: neither site-packages nor its .pth files.
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, check=True)
