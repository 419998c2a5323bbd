"""Turns a recipe's trees and drafters into named proposers on one loaded target.

A contender is one row of the table: a drafter, a tree and a vocabulary. `check_contenders` reports everything that can
be wrong with contenders before weights are loaded. `Lineup` then loads each model once.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval.decoding.accept import Acceptance
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation
from draftsmith.eval.decoding.neighbours import check_neighbours, neighbours_of
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.proposers import (
    MIN_DRAFT_LENGTH,
    Contender,
    check_sam,
    model_name,
    routed,
    router_name,
    rule_name,
)
from draftsmith.eval.decoding.target_facts import TargetFacts
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.models.blocked import block_layers, block_linears
from draftsmith.models.c2t import check_made_for
from draftsmith.models.causal_lm import check_vocabulary, load_draft_model
from draftsmith.models.chat import (
    load_tokenizer,
    tokenizer_fingerprint,
)
from draftsmith.models.checkpoint import (
    load_drafter,
    provenance,
    read_drafter_config,
    read_drafter_vocab,
    target_identity,
)
from draftsmith.models.costs import hardware
from draftsmith.models.draft_tree import Drafting, Proposer
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.drafters import kind_name, kind_text
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.guidance import loaded_target
from draftsmith.models.quantize import precision_name, target_changes
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target import Target, check_precision
from draftsmith.models.turn_ends import stop_ids
from draftsmith.models.vocab import DraftVocab, always_inside, cut_by_file, fill_text, load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import written
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.schema import (
    ContenderSection,
    QuantizationSection,
    Recipe,
    SamSection,
    TargetSection,
    TreeSection,
)


def drafting_dtype(target: Target) -> torch.dtype | None:
    """The precision that a drafter's weights are rounded to. None: they stay as they were trained.

    On a GPU it is the target's, as in serving engines: a draft call takes about as long as reading the weights. On a
    CPU bfloat16 is not always the faster one (docs/log.md).
    """
    return None if target.device.type == "cpu" else target.dtype


def contender_of(recipe: Recipe, section: ContenderSection, place: str) -> Contender:
    """The contender that a section describes. Missing directories default to the recipe's."""
    drafter = Path(section.drafter) if section.drafter else recipe.eval_drafter_dir
    return Contender(
        section.name,
        section.proposer,
        section.tree,
        place,
        _kind_of(recipe, drafter),
        drafter if section.proposer in ("drafter", "hierarchy") else None,
        section.draft_model,
        recipe.token_counts_path if section.tree.vocab_size is not None else None,
        sam=section.sam or SamSection(),
        router=section.router,
        min_draft_length=section.min_draft_length or MIN_DRAFT_LENGTH,
        quantization=section.quantization,
        relaxed=section.acceptance,
    )


def _kind_of(recipe: Recipe, directory: Path) -> str:
    """The drafter's kind, in words. Takes the recipe's kind if the drafter is not trained yet or cannot be read."""
    try:
        return kind_text(read_drafter_config(directory)[0])
    except UserError:
        section = recipe.drafter
        positions = section.positions if section.specialised else None
        return kind_name(section.kind, section.base, positions, section.fc_norm and section.norm_output)


def main_contender(recipe: Recipe, place: str = "eval.tree") -> Contender:
    """The recipe's own proposer, tree, router and acceptance rule, without a name."""
    keys = ("proposer", "tree", "sam", "router", "acceptance")
    own = ContenderSection(name="", **{key: getattr(recipe.eval, key) for key in keys})
    return contender_of(recipe, own, place)


def contenders_of(recipe: Recipe, rivals: Sequence[Contender] = ()) -> list[Contender]:
    """Contenders with names: the recipe's own tree, those under eval.also, then `rivals`.

    Raises:
        UserError: two given names are equal.
    """
    also = [contender_of(recipe, section, f"eval.also.{i}") for i, section in enumerate(recipe.eval.also)]
    return named([main_contender(recipe), *also, *rivals])


def describe(contender: Contender, sampling: Sampling = GREEDY) -> dict[str, Any]:
    """The contender's entry in acceptance.json, for answers drawn by `sampling`.

    `nodes` and `draft_calls` are the most per round, `vocab_size` is the requested one (null: the drafter's own).
    `lossless` is what its acceptance rule promises.
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
        "lossless": contender.lossless(sampling),
    }
    if contender.proposer == "sam":
        described["sam"] = contender.sam.model_dump()
    if contender.router is not None:
        described["router"] = contender.router.model_dump()
    if contender.proposer == "hierarchy" and contender.draft_model is not None:
        described["hierarchy"] = {
            "draft_model": contender.draft_model.model,
            "quantization": precision_name(contender.draft_model.quantization),
            "min_draft_length": contender.min_draft_length,
        }
    if contender.quantization is not None:
        described["quantization"] = precision_name(contender.quantization)
    if contender.relaxed is not None:
        described["acceptance"] = contender.relaxed.model_dump(by_alias=True)
    return described


def _node_limit(tree: TreeSection) -> int | None:
    """None for C2T without a limit: its classifier ends most trees."""
    return None if tree.policy == "c2t" and tree.nodes is None and tree.c2t.beam is None else tree.most


# Names.


def named(contenders: Sequence[Contender]) -> list[Contender]:
    """The same contenders, each with a unique name: the given one, or the drafter and its tree.

    Equal names get the settings that differ, and then numbers.

    Raises:
        UserError: two given names are equal.
    """
    if repeated := repeated_names([(contender.name, contender.place) for contender in contenders]):
        raise UserError(repeated)
    plain_names = [contender.name or _default_name(contender) for contender in contenders]
    result: list[Contender] = []
    taken = {PLAIN} | {contender.name for contender in contenders if contender.name}
    for contender, name in zip(contenders, plain_names, strict=True):
        if not contender.name:
            alike = [c for c, other in zip(contenders, plain_names, strict=True) if other == name]
            details = [_details(other) for other in alike]
            mine = _details(contender)
            differing = [words for key, words in mine.items() if any(other.get(key) != words for other in details)]
            name = ", ".join([name, *filter(None, differing)])
            numbered = (f"{name} ({i})" for i in range(2, len(contenders) + 2))
            name = name if name not in taken else next(n for n in numbered if n not in taken)
            taken.add(name)
        result.append(replace(contender, name=name))
    return result


def _default_name(contender: Contender) -> str:
    own = contender.entry.name(contender)
    if contender.quantization is not None:
        own = f"{own}, {precision_name(contender.quantization)} target"
    if contender.router is not None:
        own = f"{own}, {router_name(contender.router)}"
    return own if contender.relaxed is None else f"{own}, {rule_name(contender.relaxed)}"


def repeated_names(given: Sequence[tuple[str, str]]) -> list[str]:
    """A problem if given names repeat. `given`: (name or "", place) of each contender."""
    names = [PLAIN, *(name for name, _ in given if name)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not repeated:
        return []
    places = ", ".join(place for name, place in given if name in repeated)
    return [f"{places}: names must differ; {', '.join(map(repr, repeated))} is given twice"]


def _details(contender: Contender) -> dict[str, str]:
    """Settings that the default name leaves out, in words by key."""
    tree = contender.tree
    facts = {
        "drafter": str(contender.drafter or ""),
        "draft_model": model_name(contender.draft_model) if contender.draft_model else "",
        "counts": str(contender.token_counts or ""),
    }
    if contender.relaxed is not None:
        facts["neighbours"] = f"neighbours by {contender.relaxed.neighbours}"
    if contender.proposer == "sam":
        facts |= {"static": contender.sam.static or "", "alpha": f"alpha {contender.sam.alpha:g}"}
        facts |= {"l_bias": f"l_bias {contender.sam.l_bias}"}
    if (router := contender.router) is not None:
        facts |= {"static": router.static or "", "sam nodes": f"sam chains of {router.nodes - 1}"}
        facts |= {"l_threshold": f"l_threshold {router.l_threshold}", "l_bias": f"l_bias {router.l_bias}"}
    if tree.policy != "auto":
        facts |= {"calls": f"{tree.calls} calls", "top_k": f"top {tree.width}"}
    if tree.policy == "ddd":
        at = tree.ddd.at if isinstance(tree.ddd.at, str) else " ".join(map(str, tree.ddd.at))
        facts |= {"threshold": f"threshold {tree.ddd.threshold:g}", "at": f"at {at}"}
    if tree.policy in ("svip", "svip_tree"):
        facts |= {"c": f"c {tree.svip.c:g}", "h": f"h {tree.svip.h:g}"}
    if tree.policy == "c2t":
        facts |= {"nodes": f"{_node_limit(tree) or 'all'} nodes", "beam": f"beam {tree.c2t.beam or 'all'}"}
        facts |= {"classifier": str(tree.c2t.classifier)}
    return facts


# Checks before anything large is loaded.


def drafter_identity(contender: Contender, vocab: DraftVocab) -> dict[str, Any]:
    """What is known, before weights are loaded, of the drafter whose nodes a C2T classifier judges.

    Args:
        vocab: from `vocab_of`. A cut of it changes every probability.
    """
    cut, weights = None, None
    if contender.tree.vocab_size is not None:
        ids = vocab.target_ids.sort().values.to("cpu", torch.int64)
        cut = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    if contender.drafter is not None:
        path = written(contender.drafter) / "model.safetensors"
        weights = _digest(path, path.stat().st_mtime_ns)
    return {"proposer": contender.proposer, "weights_sha256": weights, "vocab_sha256": cut}


@lru_cache(maxsize=64)  # many contenders share one drafter
def _digest(path: Path, changed: int) -> str:
    return file_digest(path)


def vocab_of(contender: Contender, target: TargetFacts) -> DraftVocab:
    """The contender's draft vocabulary.

    Raises:
        UserError: no such drafter or counts, counts of another tokenizer, no such cut, or a vocabulary without the
            ranks of a static tree.
    """
    vocab, tree = DraftVocab.full(target.config.vocab_size), contender.tree
    if contender.drafter is not None:
        vocab = read_drafter_vocab(contender.drafter, read_drafter_config(contender.drafter)[0])
    vocab = cut_of(contender, vocab, target.fingerprint, target.stop_ids) or vocab
    greatest = max(map(max, tree.static_paths)) if tree.policy == "static" else 0
    if greatest >= vocab.size:
        raise UserError(
            f"eval.tree.paths: rank {greatest} exceeds a draft vocabulary of {vocab.size:,} tokens: ranks begin at "
            f"0; name {vocab.size - 1:,} at most"
        )
    return vocab


def cut_of(contender: Contender, vocab: DraftVocab, fingerprint: str, stops: Iterable[int]) -> DraftVocab | None:
    """The part of `vocab` that the contender's tree drafts from; None: all of it.

    Args:
        fingerprint, stops: of the target's tokenizer.
    """
    if contender.tree.vocab_size is None:
        return None
    assert contender.token_counts is not None
    return cut_by_file(contender.token_counts, fingerprint, vocab, contender.tree.vocab_size, stops)


def fill_of(contender: Contender, cut: DraftVocab, target: TargetFacts) -> str | None:
    """`fill_text` of a contender's cut; None also where its tree cuts nothing."""
    if contender.tree.vocab_size is None or contender.token_counts is None:
        return None
    counts, metadata = load_token_counts(contender.token_counts)
    return fill_text(cut, counts, always_inside(metadata).union(target.stop_ids))


def check_contenders(recipe: Recipe, contenders: Sequence[Contender], plan: bool = False) -> None:
    """Checks all contenders before weights are loaded and reports all problems at once. Prints notes on their cuts.

    Args:
        plan: the recipe's own drafter may be missing, because a plan may come before the training; so may foreign ones.

    Raises:
        UserError: the target, a drafter, classifier, draft model or file of token counts is missing, unreadable or
            another target's; a cut exceeds a drafter's vocabulary; a tree exceeds the target's positions.
    """
    target, sampling = TargetFacts.read(recipe.target), Sampling.of(recipe.eval)
    places: dict[str, list[str]] = {}  # of each problem, in order
    notes: dict[str, None] = {}
    may_be_untrained = plan and recipe.eval.drafter is None and not recipe.drafter_dir.exists()
    to_come = {c.drafter for c in contenders if plan and yet_to_import(recipe, c.drafter)}
    to_come |= {recipe.drafter_dir} if may_be_untrained else set()

    for contender in contenders:

        def passes(key: str, check: Any, *arguments: Any, contender: Contender = contender) -> bool:
            try:
                check(*arguments)
                return True
            except UserError as error:
                for raised in error.problems:
                    problem = f"eval.{raised}" if raised.startswith("tree.") else raised
                    problem = problem.removeprefix("target.") if key == "quantization" else problem
                    known = any(problem.startswith(f"{start}{end}") for start in KEYS for end in ".: ")
                    places.setdefault(problem if known else f"{key}: {problem}", []).append(contender.place)
                return False

        tree, drafter = contender.tree, contender.drafter
        there = drafter is None or drafter not in to_come
        if there:
            there = passes(contender.entry.key, contender.entry.check, target, contender) or drafter is None
        known = True
        if tree.policy != "auto":
            known = passes("eval.tree.c2t.classifier", policy_of, tree, sampling)
            passes("eval.tree", check_size, tree, target.positions)
        if contender.quantization is not None:
            passes("quantization", check_precision, recipe.target.quantized(contender.quantization))
        if contender.router is not None:
            passes("eval.router.static", check_sam, target, contender.router)
        if contender.relaxed is not None:
            passes("eval.acceptance.neighbours", check_neighbours, contender.relaxed, target)
        has_vocab = contender.has_distributions or contender.proposer == "hierarchy"
        if there and has_vocab and passes("eval.token_counts", vocab_of, contender, target) and known:
            vocab = vocab_of(contender, target)
            if tree.policy == "c2t":
                identity = drafter_identity(contender, vocab)
                passes("eval.tree.c2t.classifier", check_made_for, tree.c2t.classifier, identity)
            if fill := fill_of(contender, vocab, target):
                notes[f"note: eval.tree.vocab_size: {fill}"] = None
    if places:
        raise UserError([_placed(problem, where) for problem, where in places.items()])
    for note in notes:
        print(note)


# A contender's problem begins with one of these.
KEYS = (
    *("eval.drafter", "eval.tree", "eval.token_counts", "eval.sam", "eval.router", "eval.acceptance"),
    *("draft_model", "quantization"),
)


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
    most, calls = _node_limit(tree), tree.calls
    if calls >= positions or (most or 0) > positions:
        raise UserError(
            f"eval.tree: {f'{most:,} nodes, ' if most else ''}{calls:,} draft calls deep, in a target of "
            f"{positions:,} positions; set nodes and draft_calls to less"
        )


# Models.


class Lineup:
    """A loaded target and its drafters, each model loaded once.

    Raises:
        UserError: no such target.
    """

    def __init__(self, section: TargetSection):
        self.section = section
        self.tokenizer = load_tokenizer(section)
        # Decoding captures the layers that each proposer reads. The target's own list is for training.
        self.target = loaded_target(section, capture_layers=(0,))
        block_linears(self.target.layers)
        self.stop_ids = frozenset(stop_ids(self.tokenizer))
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        self.drafters: dict[tuple[Path, str | None], Drafter] = {}  # by directory and a hierarchy's small model
        self.draft_models: dict[str, Target] = {}
        self.precisions: dict[str | None, Lineup] = {}
        self.neighbours: dict[tuple[str, int], torch.Tensor] = {}  # by their source and number

    def in_precision(self, precision: QuantizationSection | None) -> "Lineup":
        """The same target in this precision, loaded once; None: this one."""
        if precision is None:
            return self
        name = precision_name(precision)
        if name not in self.precisions:
            self.precisions[name] = Lineup(self.section.quantized(precision))
        return self.precisions[name]

    @property
    def identity(self) -> dict[str, Any]:
        """`checkpoint.target_identity`, which drafters and recorded answers must match."""
        return self._identity_of(self.target, self.section)

    def _identity_of(self, model: Target, section: TargetSection) -> dict[str, Any]:
        return target_identity(model, section.model, section.revision, self.fingerprint, target_changes(section))

    def made(self, files: dict[str, Path] | None = None) -> dict[str, Any]:
        """How numbers of this target were made: device, precision, versions, date, and the digests of `files`."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return {
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "made": provenance(files or {}) | {"date": now, "hardware": hardware(self.target.device)},
        }

    def proposer(self, contender: Contender, sampling: Sampling = GREEDY) -> Proposer:
        """A fresh proposer for answers drawn by `sampling`. Policy `auto` must be resolved before.

        Raises:
            UserError: one of its models or files is missing, or was made for another target.
        """
        if contender.quantization is not None:
            own = self.in_precision(contender.quantization)
            return own.proposer(replace(contender, quantization=None), sampling)
        if contender.entry.make is not None:
            proposer = contender.entry.make(self, contender)
        else:
            drafting = self.drafting(contender)
            if (classifier := contender.tree.c2t.classifier) is not None:
                check_made_for(classifier, self.drafter_identity(contender, drafting.vocab))
            proposer = PolicyProposer(drafting, policy_of(contender.tree, sampling))
        return proposer if contender.router is None else routed(self, contender.router, proposer)

    def acceptance(self, contender: Contender, sampling: Sampling, kept_in: Path | None = None) -> Acceptance:
        """The rule that accepts the contender's drafted tokens, for answers drawn by `sampling`.

        Args:
            kept_in: folder where LANTERN's table of neighbours is looked for and kept; None: it is computed.

        Raises:
            UserError: no such codebook.
        """
        section = contender.relaxed
        if section is None:
            return contender.rule(sampling)
        key = section.neighbours, section.k
        if key not in self.neighbours:
            self.neighbours[key] = neighbours_of(self.target, section, kept_in)
        return LanternAcceptance(sampling, Relaxation(self.neighbours[key], section.delta, section.factor))

    def drafting(self, contender: Contender) -> Drafting:
        """The drafter of `proposer`, with its vocabulary cut as the tree says."""
        assert contender.entry.drafting is not None
        return contender.entry.drafting(self, contender)

    def drafter_identity(self, contender: Contender, vocab: DraftVocab) -> dict[str, Any]:
        """All of `drafter_identity`: of a causal LM, which may serve several targets, also both models'."""
        identity, small = drafter_identity(contender, vocab), contender.draft_model
        if small is None:
            return identity
        return identity | {"draft_model": self._identity_of(self.draft_model(small), small), "target": self.identity}

    def drafter(self, directory: Path, small: TargetSection | None = None) -> Drafter:
        """A drafter of the target; of `small`, a hierarchy's small model, where that is given."""
        model, section = (self.target, self.section) if small is None else (self.draft_model(small), small)
        key = directory, small and small.model_dump_json()
        if key not in self.drafters:
            shape, _ = read_drafter_config(directory)
            identity = self._identity_of(model, section)
            self.drafters[key] = load_drafter(directory, model, identity, shape.capture_layers)
            if (dtype := drafting_dtype(model)) is not None:
                self.drafters[key].round_weights(dtype)
            block_layers(self.drafters[key])
        return self.drafters[key]

    def draft_model(self, section: TargetSection) -> Target:
        key = section.model_dump_json()
        if key not in self.draft_models:
            self.draft_models[key] = load_draft_model(section)
            block_linears(self.draft_models[key].layers)
            check_vocabulary(self.draft_models[key], self.target)
        return self.draft_models[key]

    def cut(self, contender: Contender, vocab: DraftVocab) -> DraftVocab | None:
        """The contender's cut of `vocab`; None: no cut."""
        return cut_of(contender, vocab, self.fingerprint, self.stop_ids)
