"""Turns a recipe's trees and drafters into named proposers on one loaded target.

A contender is one row of the table: a drafter, a tree and a vocabulary. `check_contenders` reports everything that can
be wrong with contenders before weights are loaded. `loaded_proposer` then makes a proposer of loaded models.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval.decoding.accept import Acceptance, acceptance_of
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation, check_neighbours, neighbours_of
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.proposers import MIN_DRAFT_LENGTH, PLAIN, Contender, default_name, routed, sorted_corpus
from draftsmith.models.c2t import check_made_for
from draftsmith.models.checkpoint import read_drafter_config, read_drafter_vocab
from draftsmith.models.draft_tree import Drafting, Proposer
from draftsmith.models.drafters import kind_name, kind_text
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.quantize import precision_name
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, always_inside, fill_text, load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import ContenderSection, SamSection, TreeSection


def contender_of(recipe: Recipe, section: ContenderSection, place: str) -> Contender:
    """The contender that a section describes. Missing directories default to the recipe's."""
    drafter = Path(section.drafter) if section.drafter else recipe.eval_drafter_dir
    return Contender(
        section.name or "",
        section.proposer,
        section.tree,
        place,
        _kind_of(recipe, drafter),
        drafter if section.drafts_by_drafter else None,
        section.draft_model,
        recipe.token_counts_path,
        sam=section.sam or SamSection(),
        router=section.router,
        min_draft_length=section.min_draft_length or MIN_DRAFT_LENGTH,
        quantization=section.quantization,
        relaxed=section.acceptance,
    )


def _kind_of(recipe: Recipe, directory: Path) -> str:
    """The drafter's kind in words; the recipe's if the drafter is not trained yet or cannot be read."""
    try:
        return kind_text(read_drafter_config(directory)[0])
    except UserError:
        section = recipe.drafter
        positions = section.positions if section.specialised else None
        return kind_name(section.kind, section.base, positions, section.fc_norm and section.norm_output)


def main_contender(recipe: Recipe, place: str = "eval.tree") -> Contender:
    """The contender that the keys of `eval` describe."""
    return contender_of(recipe, recipe.eval, place)


def contenders_of(recipe: Recipe, compared: Sequence[Contender] = ()) -> list[Contender]:
    """Contenders with names: the main one, those under eval.also, then `compared`. UserError: two share a name."""
    also = [contender_of(recipe, section, f"eval.also.{i}") for i, section in enumerate(recipe.eval.also)]
    return named([main_contender(recipe), *also, *compared])


def describe(contender: Contender) -> dict[str, Any]:
    """The contender's entry in acceptance.json.

    `nodes` and `draft_calls` are the most per round, `vocab_size` is the requested one (null: the drafter's own).
    """
    tree = contender.tree
    shape: dict[str, Any] = {"policy": tree.policy, "vocab_size": tree.vocab_size}
    if tree.policy != "auto":
        shape |= {"nodes": tree.most, "draft_calls": tree.calls, "top_k": tree.width}
    own = {"ddd": "ddd", "svip": "svip", "svip_tree": "svip", "c2t": "c2t"}.get(tree.policy)
    if own is not None:
        shape[own] = getattr(tree, own).model_dump()
    if tree.policy in ("chain", "svip", "static"):
        shape["draw"] = tree.draw
    described = {
        "proposer": contender.proposer,
        "drafter": contender.model,
        "tree": shape,
        "lossless": contender.relaxed is None,
    }
    if contender.proposer == "sam":
        described["sam"] = contender.sam.model_dump()
    if contender.router is not None:
        described["router"] = contender.router.model_dump()
    if contender.proposer == "hierarchy":
        described["hierarchy"] = {
            "draft_model": contender.small.model,
            "quantization": precision_name(contender.small.quantization),
            "min_draft_length": contender.min_draft_length,
        }
    if contender.quantization is not None:
        described["quantization"] = precision_name(contender.quantization)
    if contender.relaxed is not None:
        described["acceptance"] = contender.relaxed.model_dump(by_alias=True)
    return described


# Names.


def named(contenders: Sequence[Contender]) -> list[Contender]:
    """Each with a name: the given one, or what drafts and its tree. Raises UserError where two have the same."""
    result = [replace(contender, name=contender.name or default_name(contender)) for contender in contenders]
    places = {PLAIN: [PLAIN]}
    for contender in result:
        places.setdefault(contender.name, []).append(contender.place)
    problems = [
        f"{', '.join(found)}: all are called {name!r}; give each its own name (`name: wide`, --compare 'wide: ...')"
        for name, found in places.items()
        if len(found) > 1
    ]
    if problems:
        raise UserError(problems)
    return result


# Checks before anything large is loaded.


def drafter_identity(contender: Contender, vocab: DraftVocab) -> dict[str, Any]:
    """What is known, before weights are loaded, of the drafter whose nodes a C2T classifier judges.

    Args:
        vocab: its vocabulary, of which a cut changes every probability.
    """
    cut, weights = None, None
    if contender.tree.vocab_size is not None:
        ids = vocab.target_ids.sort().values.to("cpu", torch.int64)
        cut = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    if contender.drafter is not None:
        path = current_folder(contender.drafter) / "model.safetensors"
        weights = _digest(path, path.stat().st_mtime_ns)
    return {"proposer": contender.proposer, "weights_sha256": weights, "vocab_sha256": cut}


@lru_cache(maxsize=64)  # many contenders share one drafter
def _digest(path: Path, changed: int) -> str:
    return file_digest(path)


def vocab_of(contender: Contender, target: TargetFiles) -> DraftVocab:
    """The contender's draft vocabulary. Raises UserError if it cannot be had, or lacks the ranks of a static tree."""
    vocab, tree = DraftVocab.full(target.text_config.vocab_size), contender.tree
    if contender.drafter is not None:
        vocab = read_drafter_vocab(contender.drafter, read_drafter_config(contender.drafter)[0])
    vocab = contender.cut(vocab, target) or vocab
    greatest = max(map(max, tree.static_paths)) if tree.policy == "static" else 0
    if greatest >= vocab.size:
        raise UserError(
            f"eval.tree.paths: rank {greatest} exceeds a draft vocabulary of {vocab.size:,} tokens: ranks begin at "
            f"0; name {vocab.size - 1:,} at most"
        )
    return vocab


def check_contenders(recipe: Recipe, files: TargetFiles, contenders: Sequence[Contender], plan: bool = False) -> None:
    """Checks all contenders before weights are loaded; one UserError has all problems. Prints notes on their cuts.

    Args:
        plan: the recipe's own drafter may be missing, because a plan may come before the training; so may foreign ones.
    """
    sampling = Sampling.of(recipe.eval)
    places: dict[str, list[str]] = {}  # of each problem, in order
    notes: dict[str, None] = {}
    may_be_untrained = plan and recipe.eval.drafter is None and not recipe.drafter_dir.exists()
    to_come = {c.drafter for c in contenders if plan and yet_to_import(recipe, c.drafter)}
    to_come |= {recipe.drafter_dir} if may_be_untrained else set()

    for contender in contenders:

        def collect(key: str, check: Any, *arguments: Any, contender: Contender = contender) -> bool:
            """Whether the check passes; else its problems are kept, under `key` unless they name another."""
            try:
                check(*arguments)
                return True
            except UserError as error:
                for raised in error.problems:
                    short = raised.removeprefix("target.") if key == "eval.quantization" else raised
                    problem = f"eval.{short}" if short.startswith(("tree.", "draft_model", "quantization")) else short
                    has_key = re.match(r"eval\.[\w.]+: ", problem)
                    places.setdefault(problem if has_key else f"{key}: {problem}", []).append(contender.place)
                return False

        tree, drafter = contender.tree, contender.drafter
        there = drafter is None or drafter not in to_come
        if there:
            there = collect(contender.entry.key, contender.entry.check, files, contender) or drafter is None
        known = True
        if tree.policy != "auto":
            known = collect("eval.tree.c2t.classifier", policy_of, tree, sampling)
            collect("eval.tree", check_size, tree, files.positions)
        if contender.quantization is not None:
            quantized = TargetFiles(recipe.target.quantized(contender.quantization))
            collect("eval.quantization", quantized.check_precision)
        if contender.router is not None:
            collect("eval.router.static", sorted_corpus, files, contender.router)
        if contender.relaxed is not None:
            collect("eval.acceptance.neighbours", check_neighbours, contender.relaxed, files)
        has_vocab = contender.entry.drafting is not None or contender.proposer == "hierarchy"
        if there and has_vocab and collect("eval.token_counts", vocab_of, contender, files) and known:
            vocab = vocab_of(contender, files)
            if tree.policy == "c2t":
                identity = drafter_identity(contender, vocab)
                collect("eval.tree.c2t.classifier", check_made_for, tree.c2t.classifier, identity)
            if tree.vocab_size is not None and contender.token_counts is not None:
                counts, metadata = load_token_counts(contender.token_counts)
                if fill := fill_text(vocab, counts, always_inside(metadata).union(files.stop_ids)):
                    notes[f"note: eval.tree.vocab_size: {fill}"] = None
    if places:
        raise UserError([_placed(problem, where) for problem, where in places.items()])
    for note in notes:
        print(note)


def _placed(problem: str, places: Sequence[str]) -> str:
    """The problem at the key of the first contender that has it."""
    place, others = places[0], len(places) - 1
    if place.startswith("eval.planner.candidates.") and problem.startswith("eval.tree"):
        text = f"{place}{problem.removeprefix('eval.tree')}"
    elif place.startswith("eval.also.") and not problem.startswith("eval.token_counts"):
        text = f"{place}.{problem.removeprefix('eval.')}"
    else:
        text = problem if place == "eval.tree" else f"{place}: {problem}"
    return f"{text} (also affects {others} other contender{'s' if others > 1 else ''})" if others else text


def check_size(tree: TreeSection, positions: int) -> None:
    """Raises UserError if a tree exceeds the whole context. Decoding prunes trees near the context's end."""
    unlimited = tree.policy == "c2t" and tree.nodes is None and tree.c2t.beam is None  # the classifier ends most trees
    if tree.calls >= positions or (not unlimited and tree.most > positions):
        raise UserError(
            f"eval.tree: {tree.most:,} nodes, {tree.calls:,} draft calls deep, in a target of {positions:,} positions; "
            "set nodes and draft_calls to less"
        )


# Contenders of loaded models.


def loaded_proposer(models: LoadedModels, contender: Contender, sampling: Sampling = GREEDY) -> Proposer:
    """A fresh proposer for answers drawn by `sampling`. Policy `auto` must be resolved before.

    Raises UserError if one of its models or files is missing, or was made for another target.
    """
    models = models.in_precision(contender.quantization)
    if contender.entry.make is not None:
        proposer = contender.entry.make(models, contender)
    else:
        drafting = loaded_drafting(models, contender)
        if (classifier := contender.tree.c2t.classifier) is not None:
            check_made_for(classifier, loaded_identity(models, contender, drafting.vocab))
        proposer = PolicyProposer(drafting, policy_of(contender.tree, sampling))
    return proposer if contender.router is None else routed(models, contender.router, proposer)


def rule_of(models: LoadedModels, contender: Contender, sampling: Sampling, kept_in: Path | None = None) -> Acceptance:
    """The rule that accepts the contender's drafted tokens, for answers drawn by `sampling`.

    Args:
        kept_in: folder where LANTERN's table of neighbours is looked for and kept; None: it is computed.
    """
    section = contender.relaxed
    if section is None:
        return acceptance_of(sampling)
    key = section.neighbours, section.k
    if key not in models.neighbours:
        models.neighbours[key] = neighbours_of(models.target, section, kept_in)
    return LanternAcceptance(sampling, Relaxation(models.neighbours[key], section.delta, section.factor))


def loaded_drafting(models: LoadedModels, contender: Contender) -> Drafting:
    """The contender's drafter, with its vocabulary cut as the tree says."""
    assert contender.entry.drafting is not None
    return contender.entry.drafting(models, contender)


def loaded_identity(models: LoadedModels, contender: Contender, vocab: DraftVocab) -> dict[str, Any]:
    """All of `drafter_identity`: of a causal LM, which may serve several targets, also both models'."""
    identity, small = drafter_identity(contender, vocab), contender.draft_model
    if small is None:
        return identity
    return identity | {"draft_model": models.draft_model(small).identity, "target": models.identity}
