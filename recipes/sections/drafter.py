"""The section `drafter`: its kind, shape and initial weights."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftsmith.recipes.sections.base import ImpossibleSettings, Positive, Section, Size


class LoraSection(Section):
    """Trains only low-rank matrices on top of the drafter in drafter.init_from, and merges them into the result."""

    r: Size = 16
    """Rank of the matrices."""
    alpha: Positive = 32.0
    """Their product is scaled by alpha / r."""
    modules: list[str] | None = None
    """Linear layers to adapt, by the last part of their name: [q_proj, v_proj]. None: all, the head included."""


MOST_SPECIALISTS = 64  # also of positions of each; far more than a round drafts


class DrafterSection(Section):
    kind: Literal["eagle3", "eagle", "poss", "vispec"] = "eagle3"
    """`eagle3` (train/eagle3.py), `eagle`: EAGLE-1/2, and HASS with more than one train.ttt_steps (train/eagle.py),
    `poss`: position specialists (train/poss.py), or `vispec`, for vision-language targets (train/vispec.py)."""
    base: Literal["eagle", "eagle3"] = "eagle"
    """The drafter that position specialists or ViSpec extend. Both were published over EAGLE-1's layer."""
    positions_per_specialist: int | None = Field(default=None, ge=1, le=MOST_SPECIALISTS)
    """For poss and vispec: number of consecutive draft positions per specialist (n of PosS-n). Default: 2."""
    specialists: int | None = Field(default=None, ge=1, le=MOST_SPECIALISTS)
    """For poss and vispec: number of specialists; the last one also drafts all later positions. Default: 4. If neither
    this key nor positions_per_specialist is set, vispec has no specialists."""
    compressed_tokens: int | None = Field(default=None, ge=0, le=4096)
    """For vispec: tokens that stand for a picture in the drafter's input. Default: 1. With 0 and global_vector: false,
    it sees nothing of a picture; kinds eagle and eagle3 see all of its tokens."""
    global_vector: bool = True
    """For vispec: also add one vector of the last picture to every later text token."""
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    """For eagle and eagle3: number of decoder layers, one above the other."""
    capture_layers: list[int] | None = None
    """`hidden_states` of the target (0 is the embedding) that EAGLE-3 fuses. Default: (2, L//2, L-3)."""
    vocab_size: Size | None = None
    """Size of the draft vocabulary: the most frequent supervised tokens, and the lowest other ids if these are fewer.
    None: the whole vocabulary, the only choice with the target's own head (eagle; poss and vispec over it)."""
    num_attention_heads: Size | None = None
    """None: the target's."""
    num_key_value_heads: Size | None = None
    """None: the target's."""
    intermediate_size: Size | None = None
    """Width of the drafter's MLP. None: the target's."""
    attention_bias: bool = False
    """Whether the query, key and value projections have biases."""
    fc_bias: bool = True
    """Whether EAGLE-1's projection of embedding and feature has a bias; EAGLE-3's fusion has none."""
    fc_norm: bool = False
    """EAGLE-3.1: an RMSNorm for each captured state before the fusion."""
    norm_output: bool = False
    """EAGLE-3.1: feed back the normed output, which the head also reads."""
    init_head: Literal["random", "target"] = "random"
    """Initial weights of EAGLE-3's head. `random`; `target`: the target's rows (for short runs)."""
    init_from: str | None = None
    """Trained drafter to start from, named as in eval.drafter, with its draft vocabulary: one of the same shape, or for
    poss and vispec a single drafter of the base. Every specialist then starts from that layer; vispec adds its adaptor.
    Vispec with specialists may also start from a drafter of kind poss, or from vispec without specialists."""
    lora: LoraSection | None = None
    """Train low-rank matrices on top of the frozen weights of init_from, instead of all weights."""

    @model_validator(mode="after")
    def _possible(self) -> "DrafterSection":
        extends, based = self.extends, self.over is not None
        owners = [
            (("base", "positions_per_specialist", "specialists"), based, "drafters of kind poss and vispec"),
            (("compressed_tokens", "global_vector"), self.kind == "vispec", "drafters of kind vispec"),
            (("num_layers",), not based, "drafters of kind eagle and eagle3"),
            (("capture_layers", "fc_norm", "norm_output", "init_head"), extends == "eagle3", "EAGLE-3's drafters"),
            (("fc_bias",), extends == "eagle", "EAGLE-1's drafters"),
        ]
        this = f"kind is {self.kind}" + f" over {self.base}" * based
        problems = [
            f"{key}: it only works in {drafters}, and {this}: leave it out"
            for keys, owned, drafters in owners
            for key in keys
            if key in self.changed_keys and not owned
        ]
        if extends == "eagle" and self.vocab_size is not None:
            problems.append(
                "vocab_size: EAGLE-1 drafts with the target's own head: cut while decoding, with eval.tree.vocab_size"
            )
        if self.lora is not None and self.init_from is None:
            problems.append("lora: adapts a trained drafter: name it in init_from, or leave lora out")
        if self.init_from is not None and self.init_head != "random" and extends == "eagle3":
            problems.append("init_head: init_from brings a head with it: leave one of the two out")
        if problems:
            raise ImpossibleSettings(problems)
        return self

    @property
    def over(self) -> Literal["eagle", "eagle3"] | None:
        """The base, of kinds that have one."""
        return self.base if self.kind in ("poss", "vispec") else None

    @property
    def extends(self) -> Literal["eagle", "eagle3"]:
        """The drafter kind with the same features and head."""
        return self.base if self.kind in ("poss", "vispec") else self.kind

    @property
    def reads_picture_states(self) -> bool:
        """Whether it reads the target's states of pictures. ViSpec reads their input embeddings alone."""
        return self.kind != "vispec"

    @property
    def specialised(self) -> bool:
        given = self.specialists is not None or self.positions_per_specialist is not None
        return self.kind == "poss" or (self.kind == "vispec" and given)

    @property
    def positions(self) -> int:
        """n of PosS-n."""
        return self.positions_per_specialist or 2

    @property
    def specialist_count(self) -> int:
        return self.specialists or 4
