"""The proposers that contenders choose from: what each needs, and how it is made, named and described.

The section `eval` has their names (`ProposerName`) and the keys that go with each; a test compares the names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.decoding.sam import SamProposer, SamRouter
from draftsmith.models.causal_lm import CausalLMDrafting, of_draft_model
from draftsmith.models.checkpoint import check_identity, read_drafter_config, read_drafter_vocab
from draftsmith.models.draft_tree import Drafting, Proposer
from draftsmith.models.drafters import drafting_of
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.quantize import precision_name
from draftsmith.models.suffix_automaton import StaticAutomaton
from draftsmith.models.target import checked_capture_layers, device_name
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, cut_by_file
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import AcceptanceSection, RouterSection, SamSection, SamSources, TreeSection
from draftsmith.recipes.sections.target import QuantizationSection, TargetSection

PLAIN = "plain decoding"  # its row
MIN_DRAFT_LENGTH = 6  # SpecMQuant's


@dataclass(frozen=True)
class Contender:
    """One row of the table. `name` is empty until `named` fills it in."""

    name: str
    proposer: str  # its key in `proposers.PROPOSERS`
    tree: TreeSection
    place: str  # its key in the recipe, for messages
    kind: str = ""  # of the drafter, for its name
    drafter: Path | None = None  # directory
    draft_model: TargetSection | None = None  # of causal_lm and hierarchy
    token_counts: Path | None = None  # a tree's vocab_size ranks tokens by these
    relaxed: AcceptanceSection | None = None  # LANTERN in the place of the lossless rule
    sam: SamSection = field(default_factory=SamSection)
    router: RouterSection | None = None  # SAM beside the proposer
    min_draft_length: int = MIN_DRAFT_LENGTH  # of hierarchy
    quantization: QuantizationSection | None = None  # the target's for this row; None: as the recipe says

    @property
    def small(self) -> TargetSection:
        """The draft model of a proposer that has one."""
        assert self.draft_model is not None
        return self.draft_model

    @property
    def drafter_dir(self) -> Path:
        """The drafter's directory, of a proposer that has one."""
        assert self.drafter is not None
        return self.drafter

    def cut(self, vocab: DraftVocab, target: TargetFiles) -> DraftVocab | None:
        """The part of `vocab` that the tree drafts from; None: all of it."""
        if self.tree.vocab_size is None:
            return None
        assert self.token_counts is not None
        return cut_by_file(self.token_counts, target.fingerprint, vocab, self.tree.vocab_size, target.stop_ids)

    @property
    def entry(self) -> "ProposerEntry":
        return PROPOSERS[self.proposer]

    @property
    def model(self) -> str | None:
        """The drafter's directory or the small model's name; None for a proposer without a model."""
        return str(self.drafter) if self.drafter is not None else self.draft_model and self.draft_model.model


@dataclass(frozen=True)
class ProposerEntry:
    """One kind of proposer. It has either `drafting` or `make`."""

    name: Callable[[Contender], str]  # of a contender without a given name
    drafting: Callable[[LoadedModels, Contender], Drafting] | None = None  # policies grow trees from its distributions
    make: Callable[[LoadedModels, Contender], Proposer] | None = None  # it has no distributions and drafts by itself
    key: str = "eval.tree"  # of the recipe, to which problems of `check` belong
    # Raises UserError, before weights are loaded, if the contender cannot draft for the target.
    check: Callable[[TargetFiles, Contender], object] = lambda target, contender: None


# Checks.


def check_drafter(target: TargetFiles, directory: Path) -> None:
    """Raises UserError: no drafter there, its weights are missing or cut short, or it is for another target."""
    shape, trained_for = read_drafter_config(directory)
    check_identity(directory, trained_for, target.identity)
    try:
        checked_capture_layers(shape.capture_layers, target.text_config.num_hidden_layers, final=True)
    except UserError as error:
        raise UserError(f"{directory}: the drafter cannot read this target: {error}") from None
    read_drafter_vocab(directory, shape)


def check_draft_model(target: TargetFiles, draft_model: TargetSection) -> None:
    """Raises UserError: no such model, or its tokenizer, vocabulary size, positions or device are not the target's.

    It needs no chat template.
    """
    try:
        files = TargetFiles(draft_model)
        files.check_precision()
        if draft_model.guidance is not None:
            _ = files.tokenizer  # checks it
        size = files.text_config.vocab_size
        its_device, mine_device = (
            torch.empty(0, device=device_name(section.device)).device for section in (draft_model, target.section)
        )
        its = files.stored_tokenizer().get_vocab()
    except UserError as error:
        raise UserError(of_draft_model(error)) from None
    problems, wanted, name = [], target.text_config.vocab_size, f"the target {target.section.model}"
    if size != wanted:
        problems.append(f"has a vocabulary of {size} tokens, {name} one of {wanted}")
    if files.positions < target.positions:
        problems.append(
            f"has {files.positions:,} positions, {name} {target.positions:,}; behind its last one it cannot draft"
        )
    if its_device != mine_device:
        problems.append(f"is on {its_device}, {name} on {mine_device}; set draft_model.device to the same one")
    if its != target.tokenizer.get_vocab():
        problems.append(f"has another tokenizer than {name}")
    if problems:
        raise UserError([f"draft_model: {draft_model.model} {problem}" for problem in problems])


# Names.


def tree_name(tree: TreeSection) -> str:
    """Chains are counted in drafted tokens, trees in verified nodes."""
    shape = {
        "chain": f"{'sampled ' * (tree.draw == 'sampled')}chain of {tree.most - 1}",
        "svip": f"{'sampled ' * (tree.draw == 'sampled')}svip of up to {tree.most - 1}",
        "svip_tree": f"svip tree of {tree.most}",
        "static": f"{'sampled ' * (tree.draw == 'sampled')}static tree of {tree.most}",
        "eagle2": f"tree of {tree.most}",
        "ddd": f"ddd of {tree.most}",
        "c2t": f"c2t, beta {tree.c2t.beta:g}",
        "auto": "auto",
    }[tree.policy]
    return f"{shape}, {tree.vocab_size:,} tokens" if tree.vocab_size is not None else shape


def default_name(contender: Contender) -> str:
    """What drafts, its tree, and what else is not as usual."""
    name = contender.entry.name(contender)
    if contender.quantization is not None:
        name = f"{name}, {precision_name(contender.quantization)} target"
    if (router := contender.router) is not None:
        name = f"{name}, {'fused with' if router.fuse else 'routed with'} sam, {_looks_in(router)}"
    if (relaxed := contender.relaxed) is not None:
        bound = f"delta {relaxed.delta:g}" if relaxed.rule == "lantern" else f"lambda {relaxed.factor:g}"
        name = f"{name}, {relaxed.rule} {bound}, k {relaxed.k}"
    return name


def _looks_in(section: SamSources) -> str:
    return " and ".join(["dynamic"] * section.dynamic + ["static"] * (section.static is not None))


# The table.


def _drafter_drafting(models: LoadedModels, contender: Contender) -> Drafting:
    drafter = models.drafter(contender.drafter_dir)
    return drafting_of(drafter, contender.cut(drafter.vocab, models.files))


def _small_name(contender: Contender) -> str:
    name, precision = Path(contender.small.model).name, precision_name(contender.small.quantization)
    return name if precision is None else f"{name} in {precision}"


def _check_hierarchy(target: TargetFiles, contender: Contender) -> None:
    check_draft_model(target, contender.small)
    check_drafter(TargetFiles(contender.small, large=target), contender.drafter_dir)


def _hierarchy(models: LoadedModels, contender: Contender) -> Proposer:
    small = models.draft_model(contender.small)
    inner = PolicyProposer(_drafter_drafting(small, contender), policy_of(contender.tree))
    return HierarchicalProposer(small.target, inner, contender.min_draft_length)


def _causal_lm_drafting(models: LoadedModels, contender: Contender) -> Drafting:
    small = models.draft_model(contender.small).target
    return CausalLMDrafting(small, contender.cut(DraftVocab.full(small.vocab_size), models.files))


def sorted_corpus(target: TargetFiles, section: SamSources) -> StaticAutomaton | None:
    """The corpus that a section names, if any. Raises UserError: none there, or one of another tokenizer."""
    return None if section.static is None else StaticAutomaton.load(Path(section.static), target.fingerprint)


def _sam(
    models: LoadedModels,
    section: SamSection | RouterSection,
    nodes: int,
    alpha: float | None,
    width: int = 1,
    depth: int | None = None,
) -> SamProposer:
    static, stops = sorted_corpus(models.files, section), frozenset(models.files.stop_ids)
    bias = section.l_bias
    return SamProposer(models.target.device, nodes, alpha, static, section.dynamic, bias, width, depth, stops)


def _sam_alone(models: LoadedModels, contender: Contender) -> Proposer:
    tree, alpha = contender.tree, contender.sam.alpha
    shape = (1, tree.most - 1) if tree.policy == "chain" else (tree.width, tree.calls)
    return _sam(models, contender.sam, tree.most, alpha, *shape)


def routed(models: LoadedModels, router: RouterSection, other: Proposer) -> Proposer:
    """SAM beside another proposer. Raises UserError as `sorted_corpus`."""
    return SamRouter(_sam(models, router, router.nodes, None), other, router.l_threshold, router.fuse)


PROPOSERS = {
    "drafter": ProposerEntry(
        name=lambda contender: f"{contender.kind}, {tree_name(contender.tree)}",
        drafting=_drafter_drafting,
        key="eval.drafter",
        check=lambda target, contender: check_drafter(target, contender.drafter_dir),
    ),
    "prompt_lookup": ProposerEntry(
        name=lambda contender: f"prompt lookup of {contender.tree.most - 1}",
        make=lambda models, contender: PromptLookup(contender.tree.most - 1, models.target.device),
    ),
    "causal_lm": ProposerEntry(
        name=lambda contender: f"{_small_name(contender)}, {tree_name(contender.tree)}",
        drafting=_causal_lm_drafting,
        key="eval.draft_model",
        check=lambda target, contender: check_draft_model(target, contender.small),
    ),
    "hierarchy": ProposerEntry(
        name=lambda contender: (
            f"hierarchy over {_small_name(contender)}, {tree_name(contender.tree)}, chains of "
            f"{contender.min_draft_length} or more"
        ),
        make=_hierarchy,
        key="eval.draft_model",
        check=_check_hierarchy,
    ),
    "sam": ProposerEntry(
        name=lambda contender: f"sam, {_looks_in(contender.sam)}, {tree_name(contender.tree)}",
        make=_sam_alone,
        key="eval.sam.static",
        check=lambda target, contender: sorted_corpus(target, contender.sam),
    ),
}
