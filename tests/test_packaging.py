"""What layout and documents promise: every module is in the wheel, imports run one way, shown commands run."""

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
from collections.abc import Iterator
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


def modules() -> Iterator[tuple[str, Path]]:
    """(room, path) of every Python file of the package."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


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


def test_no_file_hides_an_installed_module() -> None:
    """A script's folder comes first on sys.path."""
    taken = set(sys.stdlib_module_names) | set(INSTALLED) | OFTEN_INSTALLED
    for room in ROOMS:
        assert not taken & {path.stem for path in (ROOT / room).iterdir()}, room


def test_imports_run_from_train_to_recipes_by_full_names() -> None:
    """recipes <- models <- eval <- data_gen <- train, and nothing from OUTSIDE."""
    for room, path in modules():
        for line, name in imports(path):
            first, *rest = name.split(".")
            assert first not in ("", *ROOMS, *OUTSIDE), f"{path}:{line}: {name}"
            assert first != "draftsmith" or rest[0] in (room, *MAY_IMPORT[room]), f"{path}:{line}: {name}"


def test_imported_packages_are_declared() -> None:
    """In setup.cfg, not there only because something else asked for them."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    wanted = "\n".join([options["options"]["install_requires"], *options["options.extras_require"].values()])
    declared = {
        line.strip().split(">")[0].split("[")[0].split("=")[-1].strip().lower() for line in wanted.splitlines() if line
    }
    declared |= {name.replace("-", "_") for name in declared}  # as one that is not installed is imported
    declared |= {"pyarrow", "numpy", "jinja2"}  # what datasets, torch and transformers cannot be without
    for path in [*(path for _, path in modules()), *sorted((ROOT / "tests").glob("*.py"))]:
        for line, name in imports(path):
            top = name.split(".")[0]
            if top not in ("draftsmith", *OUTSIDE) and top not in sys.stdlib_module_names:
                distributions = {distribution.lower() for distribution in INSTALLED.get(top, [top])}
                assert distributions & declared, f"{path}:{line}: {top} is not in setup.cfg"


# Scripts tell by example how they are called. What they show must be what they take.


def scripts() -> list[Path]:
    """Files that read a recipe from the command line."""
    calls = re.compile(r"^    .*(parse_command|parse_arguments|train_kind)\(__doc__", re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8") for _, path in modules()}
    # recipes/command/cli.py shows such a call in its docstring.
    return [path for path, text in texts.items() if calls.search(text) and path != ROOT / "recipes/command/cli.py"]


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


def wrong_examples(place: Path, text: str) -> list[str]:
    """Commands that name another script than there is, or overrides that its recipe does not take. That a file is not
    there yet is no mistake: another command makes it."""
    problems = []
    for script, *words in shown_commands(text):
        where = f"{place.relative_to(ROOT)}: {script} {' '.join(words)}"
        if not (ROOT / script).exists():
            problems.append(f"{where}: no such script")
        recipes = [word for word in words if word.startswith("recipes/") and word.endswith(".yaml")]
        overrides = [word for word in words if re.match(r"[a-z_0-9.]+=", word)]
        for recipe in recipes:
            try:
                load_recipe(ROOT / recipe, overrides)
            except UserError as error:
                problems += [f"{where}: {problem}" for problem in error.problems if not ABSENT.search(problem)]
    return problems


ABSENT = re.compile("(no such|does not exist|is missing|is not there|nothing there)")


@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_help_shows_commands_that_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--help` is the docstring (tests/recipes/test_console.py)."""
    monkeypatch.chdir(ROOT)  # recipes name files relative to it
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    name = str(path.relative_to(ROOT))
    own = [words for words in shown_commands("\n".join(f"    {line}" for line in doc.splitlines())) if words[0] == name]
    assert any(words[1].startswith("recipes/") for words in own), "no example on a shipped recipe"
    assert any("--plan" in words for words in own) or path.name == "conversations.py"  # it writes nothing
    assert wrong_examples(path, doc) == []


DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "study", ROOT / "recipes" / "demo_target")
    for path in folder.glob("*.md")
)
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


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


def missing(place: Path, text: str, ending: str = "py|md|yaml|jinja") -> list[str]:
    """Files of this repository, and headings in them, that a document or a source names and that do not exist."""
    named = re.findall(
        rf"(?<![\w/.])((?:(?:{'|'.join([*ROOMS, *OUTSIDE])})/[\w/.-]+|LOG)\.(?:{ending}))\b(?:#([\w-]+))?", text
    )
    return [
        f"{place.relative_to(ROOT)}: {path}#{anchor}: no such file or heading"
        for path, anchor in named
        if not (ROOT / path).exists() or (anchor and anchor not in anchors((ROOT / path).read_text("utf-8")))
    ]


@pytest.mark.parametrize("place", [*DOCUMENTS, *RECIPES], ids=lambda place: str(place.relative_to(ROOT)))
def test_documents_and_recipes_show_commands_that_run_and_links_that_lead_somewhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = place.read_text(encoding="utf-8").split("\noutput_dir:")[0]  # a recipe's head
    assert wrong_links(place, text) == []
    if place.name != "LOG.md":  # its commands and files are those of their day
        assert missing(place, text) + wrong_examples(place, text) == []
    assert place not in RECIPES or len(list(shown_commands(text))) >= 4


def test_pages_are_linked_from_the_readme_and_those_that_code_and_recipes_name_exist():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    sources = [ROOT / "Makefile", *RECIPES, *(ROOT / "docs" / "study").glob("*.yaml")]
    sources += [path for room in (*ROOMS, *OUTSIDE) if room != "tests" for path in (ROOT / room).rglob("*.py")]
    assert [problem for path in sources for problem in missing(path, path.read_text("utf-8"), "md")] == []


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
