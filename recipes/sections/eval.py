"""The sections `eval` and `export`: trees, contenders, prompts and sampling; who serves the drafter."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from draftsmith.recipes.sections.base import (
    MOST_FLOAT,
    Beam,
    Count,
    CountOrZero,
    Depth,
    ImpossibleSettings,
    Number,
    Positive,
    PositiveOrZero,
    Seconds,
    Section,
    Seed,
    Size,
    Text,
)
from draftsmith.recipes.sections.target import Precision, TargetSection


class DddSection(Section):
    threshold: Number = Field(default=-0.3, ge=-MOST_FLOAT, le=0)
    """Drafting ends once the log of the beam's total probability is below this. Tune it again for a cut vocabulary."""
    at: list[Depth] | Literal["every"] = [5, 7, 9]
    """Draft calls after which the beam is tested. Each test waits for the device; on a CPU, `every` costs nothing."""


class SvipSection(Section):
    c: Positive = 0.15
    h: Positive = 0.3
    """Drafting ends after a token whose distribution has entropy H (nats) with c * H > h^2."""


class C2tSection(Section):
    classifier: str | None = None
    """Directory of the trained classifier."""
    beta: Number = Field(default=0.5, ge=0, le=1)
    """Nodes below this confidence are neither verified nor expanded."""
    beam: Size | None = 15
    """Most nodes kept per level, by confidence (the paper's K2). null: all that reach beta."""


Policy = Literal["chain", "static", "eagle2", "ddd", "svip", "svip_tree", "c2t"]
PolicyOrAuto = Literal[Policy, "auto"]  # one list in messages
CHAINS = ("chain", "svip")  # policies whose trees are chains
ENDLESS_TREE = 1024  # most nodes of a c2t tree without beam and nodes: memory grows with their square
DRAFT_CALLS = {"eagle2": 8, "ddd": 11, "svip": 40, "svip_tree": 11, "c2t": 10}  # defaults


class TreeSection(Section):
    policy: PolicyOrAuto = "eagle2"
    """How draft trees grow and stop (eval/decoding/policies.py). `auto` takes the fastest tree on this machine."""
    nodes: int | None = Field(default=None, ge=2, le=1_000_000)
    """Most nodes that the target verifies in one forward pass, the root included. Default: 60; for a chain 6; for svip
    draft_calls + 1; for static all of paths; for c2t as many as the beam allows, or 1,024 without a beam."""
    draft_calls: Depth | None = None
    """Most draft calls in a round, equal to the greatest depth of the tree. Default: nodes - 1 for a chain, 8 for
    eagle2, 11 for ddd and svip_tree, 40 for svip, 10 for c2t, the longest path for static."""
    top_k: Beam | None = None
    """Children per node, and the beam width of eagle2, ddd and svip_tree. Default: 10; 15 for c2t."""
    paths: Annotated[list[Annotated[list[CountOrZero], Field(min_length=1)]], Field(min_length=1)] | None = None
    """The nodes of a static tree below the root, each as the child ranks that lead to it: [[0], [1], [0, 0]] is the
    likeliest child, the second likeliest, and the likeliest child of the first. Default: EAGLE-1's 25 nodes."""
    vocab_size: Size | None = None
    """FR-Spec: draft only from this many of the drafter's tokens, the most frequent ones in eval.token_counts."""
    ddd: DddSection = DddSection()
    """Settings of ddd."""
    svip: SvipSection = SvipSection()
    """Settings of svip and svip_tree."""
    c2t: C2tSection = C2tSection()
    """Settings of c2t."""
    draw: Literal["likeliest", "sampled"] = "likeliest"
    """Tokens of a chain or a static tree if eval.temperature is above 0: the drafter's likeliest, or drawn from its
    distribution (siblings without replacement). Both are lossless."""

    @model_validator(mode="after")
    def _possible(self) -> "TreeSection":
        owners = {"paths": ["static"], "ddd": ["ddd"], "svip": ["svip", "svip_tree"], "c2t": ["c2t"]}
        for key, policies in owners.items():
            if key in self.changed_keys and self.policy not in policies:
                raise ValueError(f"{key} is for policy {' or '.join(policies)}, but policy is {self.policy}")
        if self.policy == "auto":
            given = self.changed_keys - {"policy", "vocab_size"}
            if given:
                raise ValueError(f"auto chooses {', '.join(sorted(given))} itself: leave it out, or name a policy")
            return self
        if self.top_k is not None and self.policy in CHAINS:
            raise ValueError(f"nodes of a {self.policy} have one child, top_k would do nothing: leave it out")
        if self.draw == "sampled" and self.policy not in (*CHAINS, "static"):
            raise ValueError(f"draw: sampled is for chains and static trees, but policy is {self.policy}")
        if self.policy in CHAINS and None not in (self.nodes, self.draft_calls) and self.draft_calls != self.most - 1:
            calls = f"{self.most - 1} draft calls, not {self.draft_calls}"
            raise ValueError(f"a chain of {self.nodes} nodes (root included) takes {calls}: leave one of the two out")
        if self.policy == "static":
            self._check_paths()
        calls, width = self.calls, self.width
        if self.policy == "ddd" and self.ddd.at != "every" and all(call >= calls for call in self.ddd.at):
            # A test after the last call would stop nothing.
            raise ValueError(f"ddd.at: tests none of {calls} draft calls: name one below {calls}, or every")
        possible = 1 + width + (calls - 1) * width**2
        if self.policy in ("eagle2", "ddd", "svip_tree") and self.most > possible:
            raise ValueError(f"{calls} draft calls with top_k {width} give at most {possible} nodes, not {self.most}")
        if self.policy == "c2t" and self.c2t.classifier is None:
            raise ValueError("c2t needs c2t.classifier, the directory of a trained classifier")
        return self

    def _check_paths(self) -> None:
        given = [key for key in ("nodes", "draft_calls", "top_k") if getattr(self, key) is not None]
        if given:
            raise ValueError(f"a static tree is defined by its paths: leave {', '.join(given)} out")
        known = {tuple(path) for path in self.static_paths}
        if len(known) < len(self.static_paths):
            raise ValueError("paths: a node is given twice")
        orphans = [list(path) for path in sorted(known) if len(path) > 1 and path[:-1] not in known]
        if orphans:
            raise ValueError(f"paths: {orphans[0]} is a child of {orphans[0][:-1]}, which is not in the tree")
        skipped = {(*path[:-1], path[-1] - 1) for path in known if path[-1] > 0} - known
        if skipped and self.draw == "sampled":
            raise ValueError(f"paths: siblings are drawn in order, so {list(min(skipped))} cannot be left out")

    @property
    def most(self) -> int:
        """Most nodes verified in a round, the root included."""
        if self.nodes is not None:
            return self.nodes
        if self.policy in CHAINS:
            return (self.draft_calls or DRAFT_CALLS.get(self.policy, 5)) + 1
        if self.policy == "static":
            return len(self.static_paths) + 1
        if self.policy == "c2t":
            level = possible = 1
            for _ in range(self.calls):
                level = min(level * self.width, self.c2t.beam or ENDLESS_TREE)
                possible += level
            return possible if self.c2t.beam else min(possible, ENDLESS_TREE)
        return 60

    @property
    def width(self) -> int:
        """Children proposed per node."""
        return self.top_k or (15 if self.policy == "c2t" else 10)

    @property
    def calls(self) -> int:
        """Most draft calls in a round."""
        if self.policy == "static":
            return max(map(len, self.static_paths))
        if self.policy in CHAINS:
            return self.most - 1
        return self.draft_calls or DRAFT_CALLS[self.policy]

    @property
    def static_paths(self) -> list[list[int]]:
        """`paths`, or EAGLE-1's tree (arXiv 2401.15077: 25 nodes below the root, 5 deep)."""
        return self.paths if self.paths is not None else EAGLE1_PATHS


EAGLE1_PATHS = [
    *([0], [1], [2], [3]),
    *([0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]),
    *([0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]),
    *([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]),
    *([0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
]


ProposerName = Literal["drafter", "prompt_lookup", "causal_lm", "sam", "hierarchy"]  # made by `eval.decoding.proposers`


class SamSources(Section):
    """Where SAM-Decoding looks for the newest tokens (models/suffix_automaton.py)."""

    static: str | None = None
    """A corpus to look in, as data_gen/build_sam.py writes it (<output_dir>/sam.safetensors). None: none."""
    dynamic: bool = True
    """Look in the answer's own text, its prompt included."""

    @model_validator(mode="after")
    def _looks_somewhere(self) -> Self:
        if not (self.dynamic or self.static):
            raise ValueError("dynamic: false leaves nothing to look in; name a corpus in static")
        return self


class SamSection(SamSources):
    """SAM-Decoding alone."""

    alpha: Positive = 4.0
    """Drafted tokens for each matched one, up to tree.nodes - 1."""
    l_bias: CountOrZero = 0
    """How much longer a match in the corpus must be than one in the text; a tie goes to the text."""


class RouterSection(SamSources):
    """SAM-Decoding beside a drafter: in each round, the length of the match decides which of the two drafts."""

    nodes: int = Field(default=40, ge=2, le=1_000_000)
    """Nodes of SAM's chains, the root included."""
    l_threshold: Count = 5
    """SAM drafts if its match is at least this long."""
    l_bias: CountOrZero = 5
    """How much longer a match in the corpus must be than one in the text, and than l_threshold."""
    fuse: bool = False
    """Verify SAM's chain and the drafter's tree as one tree, instead of one of the two."""


class AcceptanceSection(Section):
    """Relaxed acceptance for targets that write images (eval/decoding/lantern.py). It changes the target's output."""

    rule: Literal["lantern", "lantern++"]
    """LANTERN (arXiv 2410.03355) is bounded by delta, LANTERN++ (arXiv 2502.06352) by lambda."""
    delta: Number | None = Field(default=None, ge=0, le=1)
    """lantern: largest total variation between a token's distribution and the target's. Default: 0.1. 0 is exact."""
    factor: Number | None = Field(default=None, ge=1, le=MOST_FLOAT, alias="lambda")
    """lantern++: largest factor by which a token's probability may grow. Default: 5. 1 is exact."""
    k: Size = 1000
    """Most neighbours that a token may stand for, the nearest first."""
    neighbours: Text = "codebook"
    """Where distances between tokens come from: `codebook`, the target's own (Emu3); `embedding`, its input embeddings;
    or a safetensors file with `codebook` [C, d] and `token_ids` [C]."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        own, other, default = ("delta", "factor", 0.1) if self.rule == "lantern" else ("factor", "delta", 5.0)
        if getattr(self, other) is not None:
            raise ValueError("lambda is the bound of lantern++, delta that of lantern")
        if getattr(self, own) is None:
            vars(self)[own] = default  # the section is frozen from here on
        return self


class ContenderSection(Section):
    """What drafts for the target, and how: a row of the table."""

    name: Text | None = None
    """Its name in the table. None: what drafts, and the tree."""
    proposer: ProposerName = "drafter"
    """The trained drafter, prompt lookup (copies what followed the last n-gram earlier in the text), a small causal LM
    with the target's tokenizer, SAM-Decoding (copies what followed the longest known end of the text), or a hierarchy:
    a drafter's trees, verified by a small model, give the target a chain."""
    drafter: str | None = None
    """A trained drafter, named as in eval.drafter; in a hierarchy, it drafts for draft_model. None: eval.drafter."""
    draft_model: TargetSection | None = None
    """The small model of causal_lm and hierarchy: with the target's tokenizer, or the target itself, quantised."""
    min_draft_length: Count | None = None
    """For a hierarchy, whose tree has 30 nodes in 3 calls by default: least length of its chain. Default: 6."""
    quantization: Precision = None
    """Precision of the target for this contender. Plain decoding in that precision then gets its own row."""
    sam: SamSection | None = None
    """Settings of proposer sam. Its trees are of policy eagle2 (by default 60 nodes of any depth, top_k 8) or chain."""
    router: RouterSection | None = None
    """SAM-Decoding beside the proposer. None: the proposer alone."""
    acceptance: AcceptanceSection | None = None
    """A relaxed acceptance rule. None: the lossless one."""
    tree: TreeSection = TreeSection()

    @model_validator(mode="before")
    @classmethod
    def _published_tree_defaults(cls, values: Any) -> Any:
        """Missing keys of the trees of sam (arXiv 2411.10666) and hierarchy (arXiv 2505.22179) are their papers'."""
        if not isinstance(values, dict) or values.get("proposer") not in ("sam", "hierarchy"):
            return values
        tree = values.get("tree") or {}
        possible = ("eagle2", "chain") if values["proposer"] == "sam" else ("eagle2",)
        if not isinstance(tree, dict) or tree.get("policy", "eagle2") not in possible:
            return values  # validation reports it
        if values["proposer"] == "hierarchy":
            return {**values, "tree": {"nodes": 30, "draft_calls": 3} | tree}
        nodes = tree.get("nodes", 60)
        defaults: dict[str, Any] = {} if "draft_calls" in tree and tree.get("policy") == "chain" else {"nodes": 60}
        if tree.get("policy") != "chain" and isinstance(nodes, int):
            defaults |= {"draft_calls": nodes - 1, "top_k": 8}
        return {**values, "tree": defaults | tree}

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        """Refuses trees that the proposer cannot draft, and keys that are another proposer's."""
        proposer, tree, router = self.proposer, self.tree, self.router
        if tree.policy == "auto" and (self.quantization or self.acceptance):
            raise ValueError("policy auto plans for the recipe's own target and exact acceptance: name another policy")
        if self.min_draft_length is not None and proposer != "hierarchy":
            raise ValueError(f"min_draft_length is for proposer hierarchy, not {proposer}")
        if proposer == "hierarchy" and (tree.policy in ("auto", "c2t") or tree.draw == "sampled"):
            raise ValueError("a hierarchy drafts ranked trees: name a policy other than auto and c2t, without draw")
        if proposer == "sam" and (tree.policy not in ("eagle2", "chain") or tree.draw == "sampled"):
            raise ValueError("sam copies tokens: its tree is of policy eagle2 or chain, without draw")
        if proposer == "prompt_lookup" and (tree.policy != "chain" or tree.draw == "sampled"):
            raise ValueError("prompt lookup copies chains and draws none: say tree: {policy: chain, nodes: 11}")
        if proposer in ("sam", "prompt_lookup") and tree.vocab_size is not None:
            raise ValueError(f"{proposer} has no vocabulary to cut: leave tree.vocab_size out")
        if self.sam is not None and proposer != "sam":
            raise ValueError(f"sam is for proposer sam, not {proposer}; beside it, sam is set under router")
        if router is not None and proposer == "sam":
            raise ValueError("router puts sam beside another proposer: leave it out, or name that proposer")
        if router is not None and router.fuse and tree.draw == "sampled":
            raise ValueError("router.fuse: drawn tokens can have only drawn siblings: leave tree.draw or this out")
        if (proposer in ("causal_lm", "hierarchy")) != (self.draft_model is not None):
            raise ValueError("draft_model goes with proposer causal_lm or hierarchy: give both or neither")
        return self

    @property
    def drafts_by_drafter(self) -> bool:
        return self.proposer in ("drafter", "hierarchy")


class PlannerSection(Section):
    """Candidates of `policy: auto` and eval/plan_tree.py, and the data to choose by."""

    answers: str | None = None
    """Recorded answers from which tau is predicted: a generations.jsonl, or regenerated conversations. Default: the
    conversations that training keeps for validation."""
    max_answers: Count = 16
    """Recorded answers to replay for each candidate's tau."""
    candidates: list[TreeSection] = []
    """Trees to choose from. Empty: chains of 1 to 8 tokens, EAGLE-2 trees of 8 to 60 nodes, DDD, SVIP and its trees."""
    seconds: Seconds = 60.0
    """Time to choose in. A first look at all candidates is always taken; the time left goes to the fastest ones."""


class EvalSection(ContenderSection):
    """The main contender, and what is the same for all."""

    drafter: str | None = None
    """Directory of the drafter, or its Hub id (USER/NAME, or USER/NAME@REVISION). Drafters of other projects
    (docs/serving.md) are imported once, into <output_dir>/imported. Default: <output_dir>/drafter."""
    prompts: str | list[str] | None = None
    """Conversations to answer, in the formats of data.prompts, or benchmarks by name (mt_bench, humaneval, gsm8k,
    spec_bench; `mt_bench:path.jsonl` reads your copy)."""
    max_prompts: Count | None = None
    """Most conversations to read from each source."""
    turns: Literal["all", "first"] = "all"
    """Answer every user turn of a conversation, or only the first."""
    max_new_tokens: Count = 512
    """Most tokens of one answer, its stop token included."""
    temperature: PositiveOrZero = 0.0
    """0 is greedy. Above 0, answers are drawn losslessly from the target's distribution."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """1 switches it off."""
    top_k: CountOrZero = 0
    """0 switches it off."""
    mode: Literal["decode", "replay"] = "decode"
    """`decode` runs the target. `replay` takes its recorded answers: many times faster, but measures no speeds."""
    answers: str | None = None
    """What to replay: a generations.jsonl, or regenerated conversations. Default: generations.jsonl in eval.out."""
    batch_size: Size = 1
    """Answers decoded side by side, by plain decoding, too. Speeds are then those of the batch."""
    replay_batch_size: Size = 64
    """Answers replayed side by side. Trades memory for speed; results do not change."""
    token_counts: str | None = None
    """Token counts that tree.vocab_size ranks by. Default: <output_dir>/token_counts.safetensors."""
    planner: PlannerSection = PlannerSection()
    also: list[ContenderSection] = []
    """Further contenders, measured on the same prompts in the same run, interleaved."""
    seed: Seed = 0
    """Seed of the bootstrap and, if temperature is above 0, of the sampling."""
    out: str | None = None
    """Folder of the results; replay writes to its subfolder `replay`. Default: <output_dir>/eval."""

    @model_validator(mode="after")
    def _drafters_are_used(self) -> Self:
        if problems := [
            f"also.{index}.drafter: is for proposers drafter and hierarchy, not {each.proposer}"
            for index, each in enumerate(self.also)
            if each.drafter is not None and not each.drafts_by_drafter
        ]:
            raise ImpossibleSettings(problems)
        return self

    @property
    def contenders(self) -> list[ContenderSection]:
        return [self, *self.also]


class ExportSection(Section):
    to: Literal["vllm", "sglang", "tensorrt-llm", "eagle", "speculators", "llama.cpp"] | None = None
    """Engine or format that `draftsmith run` exports to at its end. Several engines read the folder for vllm. None: the
    run does not export, and `draftsmith export` takes vllm."""
    dtype: Literal["trained", "float32", "bfloat16", "float16"] = "trained"
    """Precision of the exported weights. Engines cast them to their own."""
    license: str | None = None
    """The model card's, by its name on the Hub (apache-2.0). Target and training data bring obligations with them."""
    out: str | None = None
    """Folder to write. Default: <output_dir>/export/<engine>."""
