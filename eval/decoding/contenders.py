"""Who is measured: from a recipe's trees and drafters to named proposers on one loaded target.

A contender is one row of the table: who drafts, with which tree, from which vocabulary. Everything that can be wrong
with one is told by `check_contenders`, before weights are loaded; `Lineup` then loads each model once, however many
contenders share it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.models.c2t import check_made_for, drafter_words
from draftsmith.models.causal_lm import CausalLMDrafting, check_vocabulary, load_draft_model
from draftsmith.models.chat import (
    first_line,
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_ids,
    tokenizer_fingerprint,
)
from draftsmith.models.checkpoint import (
    check_identity,
    config_identity,
    load_drafter,
    read_config,
    read_vocab,
    target_identity,
)
from draftsmith.models.draft_tree import Drafting, Proposer
from draftsmith.models.drafters import kind_in_words, kind_text
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target import Target, checked_capture_layers, load_causal_lm
from draftsmith.models.vocab import DraftVocab, always_inside, check_counted, check_counts, cut, load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import ContenderSection, ProposerName, Recipe, TargetSection, TreeSection


@dataclass(frozen=True)
class Contender:
    """One row of the table. `name` is empty until `named` has given it one."""

    name: str
    proposer: ProposerName
    tree: TreeSection
    place: str  # where it stands, for messages
    kind: str = ""  # of the drafter, for its name
    drafter: Path | None = None  # its directory
    draft_model: TargetSection | None = None  # of causal_lm
    token_counts: Path | None = None  # what tree.vocab_size ranks by

    @property
    def has_distributions(self) -> bool:
        """Whether trees are grown from probabilities, or the drafted tokens are all that there is."""
        return PROPOSERS[self.proposer].drafting is not None


def contender_of(recipe: Recipe, section: ContenderSection, place: str) -> Contender:
    """What a recipe's section describes; directories that it leaves out are the recipe's."""
    drafter = Path(section.drafter) if section.drafter else recipe.eval_drafter_dir
    return Contender(
        section.name,
        section.proposer,
        section.tree,
        place,
        _kind_of(recipe, drafter),
        drafter if section.proposer == "drafter" else None,
        section.draft_model,
        recipe.token_counts_path if section.tree.vocab_size is not None else None,
    )


def _kind_of(recipe: Recipe, directory: Path) -> str:
    """What kind of drafter lies there; of one that is yet to be trained, or cannot be read, what the recipe says."""
    try:
        return kind_text(read_config(directory)[0])
    except UserError:
        section = recipe.drafter
        return kind_in_words(section.kind, section.base, section.positions)


def main_contender(recipe: Recipe, place: str = "eval.tree") -> Contender:
    """The recipe's own tree, without a name."""
    return contender_of(recipe, ContenderSection(name="", tree=recipe.eval.tree), place)


def contenders_of(recipe: Recipe, rivals: Sequence[Contender] = ()) -> list[Contender]:
    """The recipe's own tree first, those under eval.also, then `rivals`; all with names.

    Raises:
        UserError: two of the names that were given are equal.
    """
    also = [contender_of(recipe, section, f"eval.also.{i}") for i, section in enumerate(recipe.eval.also)]
    return named([main_contender(recipe), *also, *rivals])


def describe(contender: Contender) -> dict[str, Any]:
    """What acceptance.json says of it: `nodes` and `draft_calls` are the most of a round, `vocab_size` is that asked
    for (null: the drafter's own)."""
    tree = contender.tree
    shape: dict[str, Any] = {"policy": tree.policy, "vocab_size": tree.vocab_size}
    if tree.policy != "auto":
        shape |= {"nodes": tree.most, "draft_calls": tree.calls, "top_k": tree.width}
    own = {"ddd": "ddd", "svip": "svip", "svip_tree": "svip", "c2t": "c2t"}.get(tree.policy)
    if own is not None:
        shape[own] = getattr(tree, own).model_dump()
    if tree.policy in ("chain", "svip"):
        shape["draw"] = tree.draw
    who = contender.draft_model.model if contender.draft_model else contender.drafter
    return {"proposer": contender.proposer, "drafter": None if who is None else str(who), "tree": shape}


def _most(tree: TreeSection) -> int | None:
    """None: C2T without a limit of its own, whose trees mostly end where its classifier says."""
    return None if tree.policy == "c2t" and tree.nodes is None and tree.c2t.beam is None else tree.most


def contender_named(recipe: Recipe, name: str | None) -> Contender:
    """The one of that name among the recipe's own and those under eval.also, for `--contender`; None: the recipe's own.

    Raises:
        UserError: nobody has that name.
    """
    if name is None:
        return main_contender(recipe)
    contenders = {contender.name: contender for contender in contenders_of(recipe)}
    if name not in contenders:
        raise UserError(f"--contender: nobody is called {name!r}; there are {', '.join(map(repr, contenders))}")
    return contenders[name]


# Names.


def named(contenders: Sequence[Contender]) -> list[Contender]:
    """The same, each with a name of its own: the given one, or one that says who drafts what.

    Where such names are equal, they also say in what the contenders differ; where they differ in nothing, they count.

    Raises:
        UserError: two of the names that were given are equal.
    """
    if repeated := repeated_names([(contender.name, contender.place) for contender in contenders]):
        raise UserError(repeated)
    plain_names = [contender.name or _words(contender) for contender in contenders]
    result: list[Contender] = []
    taken = {PLAIN} | {contender.name for contender in contenders if contender.name}
    for contender, name in zip(contenders, plain_names, strict=True):
        if not contender.name:
            alike = [c for c, other in zip(contenders, plain_names, strict=True) if other == name]
            facts = [_facts(other) for other in alike]
            mine = _facts(contender)
            differing = [words for key, words in mine.items() if any(fact.get(key) != words for fact in facts)]
            name = ", ".join([name, *filter(None, differing)])
            numbered = (f"{name} ({i})" for i in range(2, len(contenders) + 2))
            name = name if name not in taken else next(n for n in numbered if n not in taken)
            taken.add(name)
        result.append(replace(contender, name=name))
    return result


def repeated_names(given: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with given names, as problems. `given`: (name, place) of each contender; without a name: ""."""
    names = [PLAIN, *(name for name, _ in given if name)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not repeated:
        return []
    places = ", ".join(place for name, place in given if name in repeated)
    return [f"{places}: names must differ; {', '.join(map(repr, repeated))} stands more than once"]


def _words(contender: Contender) -> str:
    """Who drafts what, in a few words."""
    if not contender.has_distributions:
        return f"prompt lookup of {contender.tree.most - 1}"
    who = Path(contender.draft_model.model).name if contender.draft_model else contender.kind
    return f"{who}, {tree_in_words(contender.tree)}"


def tree_in_words(tree: TreeSection) -> str:
    """A chain is counted in drafted tokens, a tree in verified nodes."""
    shape = {
        "chain": f"{'sampled ' * (tree.draw == 'sampled')}chain of {tree.most - 1}",
        "svip": f"{'sampled ' * (tree.draw == 'sampled')}svip of up to {tree.most - 1}",
        "svip_tree": f"svip tree of {tree.most}",
        "static": f"static tree of {tree.most}",
        "eagle2": f"tree of {tree.most}",
        "ddd": f"ddd of {tree.most}",
        "c2t": f"c2t, beta {tree.c2t.beta:g}",
        "auto": "auto",
    }[tree.policy]
    return f"{shape}, {tree.vocab_size:,} tokens" if tree.vocab_size is not None else shape


def _facts(contender: Contender) -> dict[str, str]:
    """Whatever else can differ, in words by key."""
    tree = contender.tree
    facts = {
        "drafter": str(contender.drafter or ""),
        "draft_model": contender.draft_model.model if contender.draft_model else "",
        "counts": str(contender.token_counts or ""),
    }
    if tree.policy != "auto":
        facts |= {"calls": f"{tree.calls} calls", "top_k": f"top {tree.width}"}
    if tree.policy == "ddd":
        at = tree.ddd.at if isinstance(tree.ddd.at, str) else " ".join(map(str, tree.ddd.at))
        facts |= {"threshold": f"threshold {tree.ddd.threshold:g}", "at": f"at {at}"}
    if tree.policy in ("svip", "svip_tree"):
        facts |= {"c": f"c {tree.svip.c:g}", "h": f"h {tree.svip.h:g}"}
    if tree.policy == "c2t":
        facts |= {"nodes": f"{_most(tree) or 'all'} nodes", "beam": f"beam {tree.c2t.beam or 'all'}"}
        facts |= {"classifier": str(tree.c2t.classifier)}
    return facts


# Checks before anything large is loaded.


def check_drafter(target: TargetSection, directory: Path) -> PreTrainedTokenizerBase:
    """Whatever is wrong with a drafter for this target, told before weights are loaded; the target's tokenizer.

    Raises:
        UserError: no drafter there, one whose weights are missing or cut short, or one for another target.
    """
    shape, trained_for = read_config(directory)
    tokenizer = load_tokenizer(target)
    config = load_config(target).get_text_config()
    here = config_identity(config, target.model, target.revision, tokenizer_fingerprint(tokenizer))
    check_identity(directory, trained_for, here)
    try:
        checked_capture_layers(shape.capture_layers, config.num_hidden_layers, final=True)
    except UserError as error:
        raise UserError(f"{directory}: the drafter cannot read this target: {error}") from None
    read_vocab(directory, shape)
    return tokenizer


def check_classifier(contender: Contender, vocab: DraftVocab | None, target: TargetSection) -> None:
    """C2T's classifier must have learnt from the nodes of the drafter that it serves.

    Args:
        vocab: as `words_of` takes it.

    Raises:
        UserError: it was trained for another one.
    """
    if contender.tree.policy == "c2t" and contender.tree.c2t.classifier is not None:
        check_made_for(contender.tree.c2t.classifier, words_of(contender, vocab, target))


def words_of(contender: Contender, vocab: DraftVocab | None, target: TargetSection) -> dict[str, Any]:
    """`drafter_words` of a contender's drafter.

    Args:
        vocab: what a contender with a cut drafts from (`vocab_of`); without a cut it says nothing and may be None.
    """
    cut_to = None if contender.tree.vocab_size is None else vocab
    assert cut_to is not None or contender.tree.vocab_size is None
    return drafter_words(contender.drafter, contender.draft_model, cut_to, target)


def vocab_of(contender: Contender, target: TargetSection) -> DraftVocab:
    """What a contender drafts from, before weights are loaded.

    Raises:
        UserError: no such drafter or counts, counts of another tokenizer, or no such cut.
    """
    tokenizer, config = load_tokenizer(target), load_config(target).get_text_config(decoder=True)
    stops = stop_ids(tokenizer, load_generation_config(target))
    return _vocab_of(contender, config.vocab_size, tokenizer_fingerprint(tokenizer), stops)


def check_draft_model(target: TargetSection, draft_model: TargetSection) -> None:
    """A causal LM drafts token ids: they must mean the same to both. It needs no chat template.

    Raises:
        UserError: no such model, another tokenizer, or a vocabulary of another size; both sides named.
    """
    try:
        small = load_config(draft_model).get_text_config(decoder=True)
        its = AutoTokenizer.from_pretrained(
            draft_model.model, revision=draft_model.revision, trust_remote_code=draft_model.trust_remote_code
        ).get_vocab()
    except UserError as error:
        told = [problem.replace("target.model", "draft_model.model", 1) for problem in error.problems]
        raise UserError(told) from None
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(
            f"draft_model.model: cannot load a tokenizer from {draft_model.model!r}: {first_line(error)}"
        ) from error
    large = load_config(target).get_text_config(decoder=True)
    problems = []
    if small.vocab_size != large.vocab_size:
        problems.append(
            f"draft_model: {draft_model.model} has a vocabulary of {small.vocab_size} tokens, the target "
            f"{target.model} one of {large.vocab_size}"
        )
    if small.max_position_embeddings < large.max_position_embeddings:
        problems.append(
            f"draft_model: {draft_model.model} has {small.max_position_embeddings:,} positions, the target "
            f"{target.model} {large.max_position_embeddings:,}; behind its last one it cannot draft"
        )
    mine = load_tokenizer(target).get_vocab()
    if mine != its:
        token = min(mine.items() ^ its.items(), key=lambda item: (item[1], item[0]))[0]
        problems.append(
            f"draft_model: {draft_model.model} has another tokenizer than the target {target.model}: {token!r} is "
            f"token {its.get(token, 'none')} of the one and {mine.get(token, 'none')} of the other"
        )
    if problems:
        raise UserError(problems)


def check_contenders(recipe: Recipe, contenders: Sequence[Contender], plan: bool = False) -> None:
    """Refuses what cannot be measured, before weights are loaded: all problems at once.

    Args:
        plan: the recipe's own drafter need not be there; a plan may come before the training.

    Raises:
        UserError: the target, or a drafter, classifier, draft model or list of token counts that is not there, not
            readable or another target's; a cut that a drafter's vocabulary does not hold; a tree that exceeds the
            target's positions.
    """
    section = recipe.target
    tokenizer, config = load_tokenizer(section), load_config(section).get_text_config(decoder=True)
    fingerprint, stops = tokenizer_fingerprint(tokenizer), stop_ids(tokenizer, load_generation_config(section))
    sampling = Sampling.of(recipe.eval)
    places: dict[str, list[str]] = {}  # of each problem, in order
    may_be_untrained = plan and recipe.eval.drafter is None and not recipe.drafter_dir.exists()
    untrained = recipe.drafter_dir if may_be_untrained else None

    for contender in contenders:

        def holds(key: str, check: Any, *arguments: Any, contender: Contender = contender) -> bool:
            try:
                check(*arguments)
                return True
            except UserError as error:
                for told in error.problems:
                    problem = f"eval.{told}" if told.startswith("tree.") else told
                    known = any(problem.startswith(f"{start}{end}") for start in KEYS for end in ".: ")
                    places.setdefault(problem if known else f"{key}: {problem}", []).append(contender.place)
                return False

        tree, drafter = contender.tree, contender.drafter
        there = drafter is None or drafter != untrained
        if drafter is not None and there:
            there = holds("eval.drafter", check_drafter, section, drafter)
        if contender.draft_model is not None:
            holds("draft_model", check_draft_model, section, contender.draft_model)
        known = True
        if tree.policy != "auto":
            known = holds("eval.tree.c2t.classifier", policy_of, tree, sampling)
            holds("eval.tree", check_size, tree, config.max_position_embeddings)
        if there and contender.has_distributions:
            told_of = (contender, config.vocab_size, fingerprint, stops)
            if holds("eval.token_counts", _check_vocab, *told_of) and known:
                holds("eval.tree.c2t.classifier", check_classifier, contender, _vocab_of(*told_of), section)
    if places:
        raise UserError([_placed(problem, where) for problem, where in places.items()])


KEYS = ("eval.drafter", "eval.tree", "eval.token_counts", "draft_model")  # what problems of contenders begin with


def _placed(problem: str, places: Sequence[str]) -> str:
    """The problem with the place of the first contender that has it, in the words of its recipe."""
    place, others = places[0], len(places) - 1
    if place.startswith("eval.planner.candidates.") and problem.startswith("eval.tree"):
        told = f"{place}{problem.removeprefix('eval.tree')}"
    elif place.startswith("eval.also.") and not problem.startswith("eval.token_counts"):
        told = f"{place}.{problem.removeprefix('eval.')}"
    else:
        told = problem if place == "eval.tree" else f"{place}: {problem}"
    return f"{told} (and so for {others} other contender{'s' if others > 1 else ''})" if others else told


def check_size(tree: TreeSection, positions: int) -> None:
    """A tree near the end of the context is pruned while decoding; one that exceeds the whole of it is a mistake."""
    most, calls = _most(tree), tree.calls
    if calls >= positions or (most or 0) > positions:
        raise UserError(
            f"eval.tree: {f'{most:,} nodes, ' if most else ''}{calls:,} draft calls deep, in a target of "
            f"{positions:,} positions; set nodes and draft_calls to less"
        )


def _vocab_of(contender: Contender, vocab_size: int, fingerprint: str, stops: Sequence[int]) -> DraftVocab:
    vocab = DraftVocab.full(vocab_size)
    if contender.drafter is not None:
        vocab = read_vocab(contender.drafter, read_config(contender.drafter)[0])
    return _cut_of(contender, vocab, fingerprint, stops) or vocab


def _cut_of(contender: Contender, vocab: DraftVocab, fingerprint: str, stops: Iterable[int]) -> DraftVocab | None:
    if contender.tree.vocab_size is None:
        return None
    assert contender.token_counts is not None
    counts, metadata = load_token_counts(contender.token_counts)
    check_counts(contender.token_counts, metadata, fingerprint)
    wanted = vocab, counts, contender.tree.vocab_size, always_inside(metadata).union(stops)
    kept = cut(*wanted)
    check_counted(*wanted)
    return kept


def _check_vocab(contender: Contender, vocab_size: int, fingerprint: str, stops: Sequence[int]) -> None:
    """The cut that is asked for, and the ranks of a static tree: what is drafted from must hold them."""
    vocab, tree = _vocab_of(contender, vocab_size, fingerprint, stops), contender.tree
    greatest = max(map(max, tree.static_paths)) if tree.policy == "static" else 0
    if greatest >= vocab.size:
        raise UserError(
            f"eval.tree.paths: rank {greatest} is none of a draft vocabulary of {vocab.size:,} tokens: ranks begin at "
            f"0; name {vocab.size - 1:,} at most"
        )


# Models.


class Lineup:
    """A loaded target, and everyone who drafts for it, each model loaded once.

    Args:
        section: the target.

    Raises:
        UserError: no such target.
    """

    def __init__(self, section: TargetSection):
        self.section = section
        self.tokenizer = load_tokenizer(section)
        model = load_causal_lm(section)
        # Decoding captures what each proposer reads; the target's own list is for training.
        self.target = Target(model, capture_layers=(0,))
        self.stop_ids = frozenset(stop_ids(self.tokenizer, model.generation_config))
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        self.drafters: dict[Path, FeatureDrafter] = {}
        self.draft_models: dict[str, Target] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """What drafters and recorded answers must find again: `checkpoint.target_identity`."""
        return target_identity(self.target, self.section.model, self.section.revision, self.fingerprint)

    def proposer(self, contender: Contender, sampling: Sampling = GREEDY) -> Proposer:
        """A fresh proposer for answers drawn by `sampling`. Its policy must be chosen: `auto` is none.

        Raises:
            UserError: a model or file of its is not there, or another target's.
        """
        if (alone := PROPOSERS[contender.proposer].alone) is not None:
            return alone(self, contender)
        drafting = self.drafting(contender)
        check_classifier(contender, drafting.vocab, self.section)
        return PolicyProposer(drafting, policy_of(contender.tree, sampling))

    def drafting(self, contender: Contender) -> Drafting:
        """The drafter of `proposer`, with its vocabulary cut as the tree says."""
        make = PROPOSERS[contender.proposer].drafting
        assert make is not None
        return make(self, contender)

    def drafter(self, directory: Path) -> FeatureDrafter:
        if directory not in self.drafters:
            shape, _ = read_config(directory)
            self.drafters[directory] = load_drafter(directory, self.target, self.identity, shape.capture_layers)
        return self.drafters[directory]

    def draft_model(self, section: TargetSection) -> Target:
        key = section.model_dump_json()
        if key not in self.draft_models:
            self.draft_models[key] = load_draft_model(section)
            check_vocabulary(self.draft_models[key], self.target)
        return self.draft_models[key]

    def cut(self, contender: Contender, vocab: DraftVocab) -> DraftVocab | None:
        """What `contender` drafts from instead of `vocab`; None: all of it."""
        return _cut_of(contender, vocab, self.fingerprint, self.stop_ids)


# Who can propose. A new one needs its name in `schema.ProposerName`, and a line here.


@dataclass(frozen=True)
class ProposerKind:
    """How a contender's proposer is made: from distributions that any policy grows trees from, or as it is.

    Exactly one of the two is given.
    """

    drafting: Callable[[Lineup, Contender], Drafting] | None = None
    alone: Callable[[Lineup, Contender], Proposer] | None = None


def _by_drafter(lineup: Lineup, contender: Contender) -> Drafting:
    assert contender.drafter is not None
    drafter = lineup.drafter(contender.drafter)
    return FeatureDrafting(drafter, lineup.cut(contender, drafter.vocab))


def _by_causal_lm(lineup: Lineup, contender: Contender) -> Drafting:
    assert contender.draft_model is not None
    small = lineup.draft_model(contender.draft_model)
    return CausalLMDrafting(small, lineup.cut(contender, DraftVocab.full(small.vocab_size)))


def _by_lookup(lineup: Lineup, contender: Contender) -> Proposer:
    return PromptLookup(contender.tree.most - 1, lineup.target.device)


PROPOSERS: dict[ProposerName, ProposerKind] = {
    "drafter": ProposerKind(drafting=_by_drafter),
    "causal_lm": ProposerKind(drafting=_by_causal_lm),
    "prompt_lookup": ProposerKind(alone=_by_lookup),
}
