"""What the layout promises: every module is in the wheel, no file hides an installed module, imports run one way.

Each check is a function of a root folder that returns what is wrong. It is held against this tree, which must pass, and
against a small tree with the mistake, which must not.
"""

import ast
import configparser
import functools
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

from draftsmith.recipes.command.stages import SCRIPTS
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import DrafterSection

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
SCRIPT_ROOMS = ("data_gen", "train", "eval")
# Not installed by `make install`, but by users: extras of the package, trackers, engines.
OFTEN_INSTALLED = {
    *("PIL", "aim", "bitsandbytes", "clearml", "comet_ml", "deepspeed", "dvclive", "flash_attn", "mlflow", "openai"),
    *("peft", "sglang", "swanlab", "tensorboard", "torchvision", "trackio", "triton", "vllm", "wandb"),
}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(room, path) of every Python file of the package."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            yield room, path


def setup_options(root: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg")
    return parser


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Top-level module -> the distributions that bring it."""
    return importlib.metadata.packages_distributions()


def unpackaged(root: Path) -> list[str]:
    """Folders with Python files that setup.cfg does not name: they would be absent from the wheel, silently."""
    named = set(setup_options(root)["options"]["packages"].split())
    problems = []
    for folder in sorted({path.parent for _, path in modules(root)}):
        package = ".".join(["draftsmith", *folder.relative_to(root).parts])
        if package not in named:
            problems.append(f"{package} is missing from `packages` of setup.cfg")
        if not (folder / "__init__.py").exists():
            problems.append(f"{folder.relative_to(root)} has no __init__.py")
    return problems


def shadowing(root: Path) -> list[str]:
    """Files and folders beside scripts that bear the name of an importable module: a script's folder comes first on
    sys.path."""
    taken = set(sys.stdlib_module_names) | set(installed()) | OFTEN_INSTALLED
    problems = []
    for room, path in modules(root):
        named = path.parent if path.name == "__init__.py" else path
        if named.stem in taken and named.parent == root / room:
            problems.append(f"{path.relative_to(root)} hides the installed module {named.stem}")
    return problems


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, inside functions too; relative ones begin with a dot."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


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


def private_imports(root: Path) -> list[str]:
    """Names with an underscore that a module takes from another one of ours."""
    problems = []
    for _, path in modules(root):
        ours = {}  # modules of ours, by the name that they have in this file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "draftsmith":
                ours |= {alias.asname or alias.name: alias.name for alias in node.names}
        taken = [(line, name.rpartition(".")[2]) for line, name in imports(path) if name.startswith("draftsmith.")]
        taken += [
            (node.lineno, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours
        ]
        private = [(line, name) for line, name in taken if re.match("_[^_]", name)]
        problems += [f"{path.relative_to(root)}:{line}: {name} is private to its module" for line, name in private]
    return problems


def shared_names(root: Path) -> list[str]:
    """Public classes and functions that two modules define under one name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for _, path in modules(root):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                homes[node.name].append(str(path.relative_to(root)))
    return [
        f"{name} has two meanings, in {' and '.join(paths)}"
        for name, paths in homes.items()
        if len(paths) > 1 and name != "main"  # every command has one
    ]


def named_scripts(root: Path) -> list[str]:
    """Messages that name a script, which an installed package does not have, or a command that does not exist."""
    problems = []
    for _, path in modules(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                named = re.findall(rf"(?:{'|'.join(SCRIPT_ROOMS)})/\w+\.py(?=\W* \w)", node.value)
                named += [name for name in re.findall(r"`draftsmith ([\w-]+)", node.value) if name not in SCRIPTS]
                problems += [f"{path.relative_to(root)}:{node.lineno}: a message names {name}" for name in named]
    return problems


def not_scripts(root: Path) -> list[str]:
    """Modules at the top of a folder of scripts that `draftsmith` does not know: they belong into a sub-folder."""
    kinds = get_args(DrafterSection.model_fields["kind"].annotation)
    known = {script.path.format(kind=kind) for script in SCRIPTS.values() for kind in kinds}
    known |= {f"{room}/__init__.py" for room in SCRIPT_ROOMS}
    found = [str(path.relative_to(root)) for room in SCRIPT_ROOMS for path in sorted((root / room).glob("*.py"))]
    return [f"{path} is no script that draftsmith knows" for path in found if path not in known]


def undeclared(root: Path) -> list[str]:
    """Imports of packages that setup.cfg does not ask for, and that are there only because something else did."""
    options = setup_options(root)
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
            distributions = {distribution.lower() for distribution in installed().get(top, [top])}
            if not distributions & declared:
                problems.append(f"{path.relative_to(root)}:{line}: {top} is not in setup.cfg")
    return problems


CHECKS = [
    unpackaged,
    shadowing,
    forbidden_imports,
    private_imports,
    shared_names,
    named_scripts,
    not_scripts,
    undeclared,
]


@pytest.mark.parametrize("check", CHECKS)
def test_this_tree(check):
    assert sum(1 for _ in modules(ROOT)) > 10  # the check looked at something
    assert check(ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The layout of this tree with one harmless module a room."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
        (tmp_path / room / "inside").mkdir()
        (tmp_path / room / "inside" / "__init__.py").touch()
        fine = "import os\n\nfrom draftsmith.recipes.errors import UserError\n\nos._exit(UserError.__doc__)\n"
        (tmp_path / room / "inside" / "fine.py").write_text(fine)
    (tmp_path / "tests").mkdir()
    (tmp_path / "eval" / "report.py").touch()
    settings = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    packages = "".join(f"\n    draftsmith.{room}.inside" for room in ROOMS)
    (tmp_path / "setup.cfg").write_text(settings.replace("packages =", f"packages ={packages}"))
    return tmp_path


def test_small_tree_is_fine(tree: Path):
    assert [check(tree) for check in CHECKS] == [[]] * len(CHECKS)


def test_modules_that_are_no_scripts_are_caught(tree: Path):
    for path in ("eval/figures.py", "eval/eagle3.py", "train/eagle3.py", "train/inside/loop.py"):
        (tree / path).touch()
    assert not_scripts(tree) == [
        "eval/eagle3.py is no script that draftsmith knows",
        "eval/figures.py is no script that draftsmith knows",
    ]


def test_private_names_of_others_are_caught(tree: Path):
    (tree / "eval" / "wrong.py").write_text(
        "from draftsmith.models import vocab as words\n"
        "from draftsmith.models.vocab import _cut, cut\n"
        "def f(self):\n    return self._own + words._ranked + words.__name__ + words.size._x\n"
    )
    assert private_imports(tree) == [
        "eval/wrong.py:2: _cut is private to its module",
        "eval/wrong.py:4: _ranked is private to its module",
    ]


def test_names_with_two_meanings_are_caught(tree: Path):
    text = "class Shape:\n    def read(self): ...\n\ndef main(): ...\n\ndef _own(): ...\n\n"
    (tree / "eval" / "wrong.py").write_text(f"{text}def cut(): ...\n")
    (tree / "train" / "wrong.py").write_text(f"{text}async def cut(): ...\n\ndef read(): ...\n")
    assert shared_names(tree) == [
        "Shape has two meanings, in eval/wrong.py and train/wrong.py",
        "cut has two meanings, in eval/wrong.py and train/wrong.py",
    ]


def test_messages_that_name_scripts_are_caught(tree: Path):
    (tree / "eval" / "wrong.py").write_text(
        '"""Behind eval/plan.py, which plans."""\n\n'
        'FINE = "run `draftsmith plan` first"\nPATH = "eval/plan.py"\n'
        'UNKNOWN = "run `draftsmith prune`"\nWRONG = f"{FINE}: eval/plan.py writes it"\n'
    )
    assert named_scripts(tree) == [
        "eval/wrong.py:5: a message names prune",
        "eval/wrong.py:6: a message names eval/plan.py",
    ]


def test_missing_subpackage_is_caught(tree: Path):
    (tree / "train" / "kernels").mkdir()
    (tree / "train" / "kernels" / "fused.py").touch()
    assert unpackaged(tree) == [
        "draftsmith.train.kernels is missing from `packages` of setup.cfg",
        "train/kernels has no __init__.py",
    ]


@pytest.mark.parametrize("name", ["queue", "datasets", "yaml", "_pytest", "openai", "profile"])
def test_shadowed_module_is_caught(tree: Path, name: str):
    (tree / "eval" / f"{name}.py").touch()
    (tree / "models" / name / "sub").mkdir(parents=True)
    (tree / "models" / name / "__init__.py").touch()
    (tree / "models" / name / "sub" / f"{name}.py").touch()  # no script's folder
    assert shadowing(tree) == [
        f"models/{name}/__init__.py hides the installed module {name}",
        f"eval/{name}.py hides the installed module {name}",
    ]


@pytest.mark.parametrize(
    ("room", "line", "problem"),
    [
        ("recipes", "import draftsmith.models.vocab", "recipes must not import models"),
        ("models", "from draftsmith.eval import decode", "models must not import eval"),
        ("models", "from draftsmith import train", "models must not import train"),
        ("eval", "def f():\n    from draftsmith.data_gen.x import y", "eval must not import data_gen"),
        ("data_gen", "from draftsmith.train.x import y", "data_gen must not import train"),
        ("train", "from models.target import Target", "write draftsmith.models.target.Target"),
        ("train", "from . import fine", "write draftsmith.fine"),
        ("eval", "from docs.study import cells", "eval must not import docs"),
        ("recipes", "import tests.reference", "recipes must not import tests"),
        ("recipes", "from demos.stdlib import split_of", "recipes must not import demos"),
    ],
)
def test_import_against_the_direction_is_caught(tree: Path, room: str, line: str, problem: str):
    (tree / room / "wrong.py").write_text(line + "\n")
    assert forbidden_imports(tree) == [f"{room}/wrong.py:{line.count(chr(10)) + 1}: {problem}"]


def test_undeclared_package_is_caught(tree: Path):
    (tree / "tests" / "test_x.py").write_text(
        "import pygments\nimport pytest\nfrom fontTools import ttLib\nimport nowhere\n"
    )
    assert [problem.split(": ")[1] for problem in undeclared(tree)] == [
        "pygments is not in setup.cfg",
        "fontTools is not in setup.cfg",
        "nowhere is not in setup.cfg",
    ]


def test_type_checkers_find_every_room():
    links = {path.name: os.readlink(path) for path in (ROOT / ".typing" / "draftsmith").iterdir()}
    assert links == {room: f"../../{room}" for room in ROOMS}


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


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name files relative to it


@pytest.mark.parametrize("path", scripts(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_help_shows_commands_that_run(path: Path, at_root: None):
    """`--help` is the docstring (tests/test_command_line.py)."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    name = str(path.relative_to(ROOT))
    own = [words for words in shown_commands("\n".join(f"    {line}" for line in doc.splitlines())) if words[0] == name]
    assert any(words[1].startswith("recipes/") for words in own), "no example on a shipped recipe"
    assert any("--plan" in words for words in own) or path.name == "conversations.py"  # it writes nothing
    assert wrong_examples(ROOT, path, doc) == []


def test_recipes_show_commands_that_run(at_root: None):
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert len(recipes) > 10
    for path in recipes:
        head = path.read_text(encoding="utf-8").split("\noutput_dir:")[0]
        assert len(list(shown_commands(head))) >= 4
        assert wrong_examples(ROOT, path, head) == []


DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "study", ROOT / "recipes" / "demo_target")
    for path in folder.glob("*.md")
)


def anchors(text: str) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(place: Path) -> list[str]:
    """Links of a document to files or headings that do not exist."""
    text, problems = place.read_text(encoding="utf-8"), []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        other = place.parent / path if path else place
        if path.startswith(("http:", "https:")):
            continue
        if not other.exists():
            problems.append(f"{place.relative_to(ROOT)}: {link}: no such file")
        elif anchor and anchor not in anchors(other.read_text(encoding="utf-8")):
            problems.append(f"{place.relative_to(ROOT)}: {link}: no such heading")
    return problems


def missing_files(place: Path) -> list[str]:
    """Files of this repository that a text names and that do not exist."""
    text = place.read_text(encoding="utf-8")
    folders = "|".join([*ROOMS, *OUTSIDE])
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]+\.(?:py|md|yaml|jinja))\b", text)
    return [f"{place.relative_to(ROOT)}: {path}: no such file" for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("place", DOCUMENTS, ids=lambda place: str(place.relative_to(ROOT)))
def test_documents_show_commands_that_run_and_links_that_lead_somewhere(place: Path, at_root: None):
    assert wrong_links(place) == []
    if place.name != "LOG.md":  # its commands and files are those of their day
        assert missing_files(place) + wrong_examples(ROOT, place, place.read_text(encoding="utf-8")) == []


def test_the_readme_links_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))


def test_pages_that_code_and_recipes_name_exist():
    sources = [ROOT / "Makefile", *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "docs" / "study").glob("*.yaml")]
    sources += [path for room in (*ROOMS, *OUTSIDE) if room != "tests" for path in (ROOT / room).rglob("*.py")]
    named = {
        (path, page, anchor)
        for path in sources
        for page, anchor in re.findall(r"(?<![\w/.])(docs/[\w/-]+\.md|LOG\.md)(?:#([\w-]+))?", path.read_text("utf-8"))
    }
    assert len(named) > 40
    for path, page, anchor in named:
        assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}"
        assert not anchor or anchor in anchors((ROOT / page).read_text("utf-8")), f"{path.relative_to(ROOT)}: {anchor}"


def test_wrong_examples_are_caught(at_root: None):
    text = (
        "    python train/eagel.py recipes/demo.yaml\n"
        "    accelerate launch --num_processes 4 train/eagle3.py recipes/demo.yaml \\\n"
        "        train.max_step=4      # nothing\n"
        "    python eval/acceptance.py recipes/demo.yaml eval.drafter=runs/nowhere eval.answers=nowhere.jsonl\n"
    )
    problems = wrong_examples(ROOT, ROOT / "README.md", text)
    assert len(problems) == 2
    assert "train/eagel.py" in problems[0] and "no such script" in problems[0]
    assert "train.max_step" in problems[1]


@pytest.mark.slow
def test_wheel_holds_and_imports_every_module(tmp_path: Path):
    """Built from this tree, installed where nothing of this tree can be seen, beside the same dependencies."""
    source = tmp_path / "source"  # a copy: a stale build/ folder here could add modules that are long gone
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")

    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("draftsmith-")}
    # Whatever else lies in a room is data: recipes, templates, the demos' targets.
    files = [path for room in ROOMS for path in (source / room).rglob("*") if path.is_file()]
    expected = {f"draftsmith/{path.relative_to(source)}" for path in files}
    assert packaged == expected

    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clean)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(clean), "platbase": str(clean)}))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    # A folder named by a .pth file is searched, but its own .pth files are not read: the editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in expected if ".py" in name
    )
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    file = importlib.import_module(name).__file__\n"
        f"    assert file.startswith({str(site)!r}), file\n"
        "print('imported', len(sys.argv[1:]))\n"
    )
    result = subprocess.run(
        [str(clean / "bin" / "python"), "-I", "-c", code, *names], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"imported {len(names)}"
