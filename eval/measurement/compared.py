"""--compare: each argument adds a contender, from another recipe or from overrides of the first.

    B.yaml                                       the main contender of that recipe (same target required)
    "eval.tree.nodes=16"                         the first recipe's with these overrides, any number of them
    "wide: eval.tree.top_k=16 eval.tree.nodes=100"                  with a name for its row; "wide: B.yaml", too

Contenders may differ only in the keys CONTENDER_KEYS. Prompts, lengths and sampling are those of the first recipe.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.contenders import Contender, contenders_of, main_contender
from draftsmith.models.formats.named_drafters import with_measured_drafters
from draftsmith.recipes.errors import UserError, collecting_problems
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import ContenderSection
from draftsmith.recipes.sections.target import TargetSection

CONTENDER_KEYS = *(f"eval.{key}" for key in ContenderSection.model_fields if key != "name"), "eval.token_counts"
NAME = re.compile(r"\s*([^=]*\S):\s+(?=\S)")
NEXT_KEY = re.compile(r"\s+(?=[A-Za-z_][\w.]*=)")  # values may contain blanks: eval.tree.paths=[[0], [1]]


def load_all(
    path: str, overrides: Sequence[str], compared: Sequence[str], plan: bool = False
) -> tuple[Recipe, list[Contender]]:
    """(the first recipe, all contenders with names).

    Args:
        path, overrides: the first recipe; the overrides do not apply to the other files.
        compared: the arguments of --compare.
        plan: download and import no drafters.

    Raises:
        UserError: all problems of all recipes and overrides.
    """
    problems: list[str] = []
    recipe = _loaded(path, overrides, plan, problems)
    of_first = set(problems)
    others: list[Contender] = []
    for argument in compared:
        place, (name, settings) = f"--compare {argument!r}", split_overrides(argument)
        found: list[str] = []
        if "=" in argument and not Path(settings[0]).exists():
            other = _loaded(path, [*overrides, *settings], plan, found)
            found += _shared(settings)
            if other is not None:
                others.append(replace(main_contender(other, place), name=name))
        elif (other := _loaded(settings[0], (), plan, found)) is not None:
            if recipe is not None:
                found += [f"another target than {path}'s: {d}" for d in _different_targets(other.target, recipe.target)]
            others.append(replace(main_contender(other, place), name=name or other.eval.name or ""))
        problems += [f"{place}: {problem}" for problem in found if problem not in of_first]
    if recipe is None or problems:
        raise UserError(problems)
    return recipe, contenders_of(recipe, others)


def _loaded(path: str, overrides: Sequence[str], plan: bool, problems: list[str]) -> Recipe | None:
    """The recipe with folders of ours for all drafters; None if it cannot be read or a drafter cannot be had."""
    with collecting_problems(problems):
        return with_measured_drafters(load_recipe(path, overrides), plan)
    return None


def split_overrides(argument: str) -> tuple[str, list[str]]:
    """("wide", ["eval.tree.nodes=16", "eval.tree.top_k=4"]) of "wide: eval.tree.nodes=16 eval.tree.top_k=4"."""
    name = ""
    if (match := NAME.match(argument)) is not None:
        name, argument = match[1], argument[match.end() :]
    return name, NEXT_KEY.split(argument.strip())


def _shared(settings: Sequence[str]) -> list[str]:
    """Problems with overrides of keys that are the same for all contenders."""
    keys = [setting.partition("=")[0].strip() for setting in settings]
    return [
        f"{key} is the same for all contenders; they may differ only in {', '.join(CONTENDER_KEYS)}; give it before "
        "--compare to set it for all"
        for key in keys
        if not any(key == each or key.startswith(f"{each}.") for each in CONTENDER_KEYS)
    ]


def _different_targets(there: TargetSection, here: TargetSection) -> list[str]:
    """All differences, with both sides. The first recipe's device counts for both."""
    fields = [name for name in TargetSection.model_fields if name != "device"]
    return [
        f"target.{name} is {getattr(there, name)!r} there, {getattr(here, name)!r} here"
        for name in fields
        if _resolved(getattr(there, name)) != _resolved(getattr(here, name))
    ]


def _resolved(value: Any) -> Any:
    """A value that is equal for two spellings of the same path."""
    return Path(value).resolve() if isinstance(value, str) and Path(value).exists() else value
