"""Every key of a recipe, with its default, unit and meaning.

The text under a field is its documentation, and the loader's error messages show it. Unknown keys and wrong types are
errors (`recipes.loader`). Only the scripts' builders see the recipe: models, losses and loops take plain keyword
arguments.
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from draftsmith.recipes.files.prompt_date import KeptDate, today
from draftsmith.recipes.server_urls import normalised_urls


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: Any) -> Any:
        return {} if values is None else values  # `train:` with nothing below it

    @property
    def meant(self) -> set[str]:
        """Keys that differ from the default. A resolved recipe names every key, so being named is not enough."""
        fields = type(self).model_fields
        return {key for key in self.model_fields_set if getattr(self, key) != fields[key].default}


def _number(value: Any) -> Any:
    """`1e-4`, which YAML 1.1 reads as text, as the number that it is."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value)
    return float(value) if is_number else value


def _date(value: Any) -> Any:
    """A day as text; YAML reads 2025-07-26 as a date."""
    if not isinstance(value, str | datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"expected a date, YYYY-MM-DD, got {str(value)!r}") from None


Number = Annotated[float, BeforeValidator(_number)]
# YAML 1.1 reads `no` and `off` as false.
OrNo = BeforeValidator(lambda value: "no" if value is False else value)
OrOff = BeforeValidator(lambda value: "off" if value is False else value)

# Upper bounds lie far beyond any sensible use and catch typing errors.
MOST_COUNTED = 1_000_000_000
MOST_FLOAT = 1e38  # what float32 holds
Count = Annotated[int, Field(ge=1, le=MOST_COUNTED)]  # of tokens, steps, rows, conversations
CountOrZero = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]  # of batches, vocabularies, matrices
Beam = Annotated[int, Field(ge=1, le=1000)]
Depth = Annotated[int, Field(ge=1, le=10_000)]  # of draft trees
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy takes no others
Positive = Annotated[Number, Field(gt=0, le=MOST_FLOAT)]
PositiveOrZero = Annotated[Number, Field(ge=0, le=MOST_FLOAT)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[Number, Field(gt=0, le=1e9)]


def as_list(sources: str | list[str] | None) -> list[str]:
    """The sources of a key that takes none, one or several."""
    return [sources] if isinstance(sources, str) else sources or []


class ImpossibleSettings(ValueError):
    """All contradictions in a section, for the loader to report at once.

    Each problem begins with the key to change, dotted below the section, and `: `.
    """

    def __init__(self, problems: Sequence[str]):
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class QuantizationSection(Section):
    bits: Literal[8, 4] = 4
    """Bits per weight. 8: one scale per row. 4: a scale and a zero per group of inputs."""
    group_size: Literal[32, 64, 128] = 64
    """With 4 bits: inputs of a row that share a scale and a zero. Smaller groups are more exact and take more
    memory."""
    fake: bool = False
    """Quantise the weights but keep them in the target's own dtype: the precision's effect without its speed, on any
    device."""

    @model_validator(mode="after")
    def _possible(self) -> "QuantizationSection":
        if self.bits == 8 and "group_size" in self.meant:
            raise ValueError("group_size: rows of 8 bits have one scale: leave it out, or set bits to 4")
        return self


PRECISIONS: dict[str, dict[str, Any]] = {"int8": {"bits": 8}, "int4": {"bits": 4}, "fake": {"bits": 4, "fake": True}}


def _precision(value: Any) -> Any:
    """The section that a precision's name stands for."""
    if not isinstance(value, str):
        return value
    if value not in PRECISIONS:
        raise ValueError(f"expected {', '.join(PRECISIONS)} or {{bits, group_size, fake}}, got {value!r}")
    return PRECISIONS[value]


Precision = Annotated[QuantizationSection | None, BeforeValidator(_precision)]


class GuidanceSection(Section):
    """Classifier-free guidance of a target that writes images from a caption (models/guidance.py)."""

    scale: PositiveOrZero
    """Logits are u + scale (c - u): c with the caption, u without it. 1 is no guidance."""
    null: Text = "<null>"
    """The token that replaces each token of the caption in the text without it, as in the target's training."""


class TargetSection(Section):
    model: str
    """Hugging Face id or local directory of the causal LM to draft for."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    adapter: str | None = None
    """Folder with a peft LoRA (safetensors), merged into the target when it is loaded: in regeneration, training,
    capture and evaluation (docs/adapting.md)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the target's weights; `auto`: as in its config. Exact equality with plain decoding needs float32."""
    quantization: Precision = None
    """Quantise the decoder's linear layers when the target is loaded: `int8`, `int4`, `fake` (int4's effect without its
    speed), or {bits, group_size, fake}. int8 and int4 are for CPUs and compute in bfloat16, which `dtype: auto` then
    means (docs/precision.md). Checkpoints that are already quantised do not need this key."""
    guidance: GuidanceSection | None = None
    """Classifier-free guidance, as part of the target's distribution in regeneration, training and evaluation."""
    device: str = "auto"
    """`auto`: the accelerator if there is one, else the CPU."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Leave it off unless you have read that code."""
    chat_template: str | None = None
    """A file with a Jinja chat template, for a base model without one or to replace the tokenizer's own."""
    thinking: bool | None = None
    """The thinking switch of chat templates that have one (Qwen3's `enable_thinking`, DeepSeek-V3.1's `thinking`), the
    same in regeneration, training and evaluation. None: the template's default."""
    template_args: dict[str, str | int | float | bool] = {}
    """Further variables of the chat template, for example {reasoning_effort: low} for gpt-oss."""
    date: Annotated[str, BeforeValidator(_date)] | None = None
    """The day (YYYY-MM-DD) that chat templates with `strftime_now` write into prompts (Llama 3.1, gpt-oss), the same in
    regeneration, training and evaluation. None: that of the run whose data.conversations or data.states are read, or
    else the day of the first prompt; <output_dir>/prompt_date.txt keeps it."""
    _kept_date: KeptDate | None = PrivateAttr(None)  # set by Recipe

    @model_validator(mode="before")
    @classmethod
    def _computed_in(cls, values: Any) -> Any:
        """The kernels' dtype in the place of `auto`."""
        kernels = isinstance(values, dict) and _by_kernels(values.get("quantization"))
        return {**values, "dtype": "bfloat16"} if kernels and values.get("dtype", "auto") == "auto" else values

    @model_validator(mode="after")
    def _in_the_kernels_dtype(self) -> "TargetSection":
        if _by_kernels(self.quantization) and self.dtype != "bfloat16":
            raise ImpossibleSettings(
                [
                    f"dtype: {self.dtype}, but int8 and int4 targets compute in bfloat16: set dtype to bfloat16, or "
                    "take quantization: {fake: true}"
                ]
            )
        return self

    @property
    def day(self) -> datetime.date:
        """The day that a chat template writes. Raises UserError for a damaged <output_dir>/prompt_date.txt."""
        if self.date is not None:
            return datetime.date.fromisoformat(self.date)
        return today() if self._kept_date is None else self._kept_date.read()

    def quantized(self, precision: QuantizationSection) -> "TargetSection":
        """The same target in this precision. Only a plain target can be quantised."""
        dtype = {"dtype": "bfloat16"} if _by_kernels(precision) else {}
        return self.model_copy(update={"quantization": precision} | dtype)


def _by_kernels(precision: Any) -> bool:
    """Whether a precision, given by name, mapping or section, is computed by kernels."""
    if isinstance(precision, dict):
        return precision.get("fake") is not True
    if isinstance(precision, QuantizationSection):
        return not precision.fake
    return precision in ("int8", "int4")


class GeneratorSection(Section):
    kind: Literal["transformers", "openai"] = "transformers"
    """Who writes the answers: the target in this process, or OpenAI-compatible servers that serve it and accept token
    ids in /v1/completions (docs/regeneration.md)."""
    batch_size: Size = 32
    """Conversations decoded side by side in this process."""
    drafter: str | None = None
    """A trained drafter, named as in eval.drafter, that speeds up the target's writing. The answers remain the
    target's: greedy ones token for token in float32, sampled ones in distribution. Only for kind transformers."""
    draft_tokens: Size = 3
    """Tokens that `drafter` proposes per forward pass of the target."""
    base_urls: list[str] = []
    """Servers for kind openai: [http://localhost:8000/v1, http://gpu2:8000/v1]."""
    served_model: str | None = None
    """The target's name on the servers. None: the only one that `/v1/models` lists."""
    concurrency: Size = 64
    """Simultaneous requests, over all servers."""
    timeout_seconds: Seconds = 600.0
    """Longest wait for an answer before the request is repeated."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key. The key itself is never written anywhere."""
    max_new_tokens: Count = 512
    """Most tokens of one assistant turn, its stop token included; a turn cut here is kept with finish_reason
    `length`."""
    temperature: PositiveOrZero | None = None
    """0 is greedy. None: the target's generation_config, or 1 if it has no temperature. For vision-language targets,
    None means temperature 1, top_p 1 and top_k off, because their configs are nearly greedy and drafters need sampled
    answers."""
    top_p: Number | None = Field(default=None, gt=0, le=1)
    """None: the target's generation_config, or 1."""
    top_k: CountOrZero | None = None
    """0 switches it off. None: the target's generation_config, or off."""
    seed: Seed = 0
    """Seed of the sampling."""

    @model_validator(mode="after")
    def _possible(self) -> "GeneratorSection":
        problems = normalised_urls(self.base_urls)[1] if self.kind == "openai" else []
        if self.drafter is None and "draft_tokens" in self.meant:
            problems.append("draft_tokens: needs a drafter: give one, or leave draft_tokens out")
        if self.drafter is not None and self.kind == "openai":
            problems.append(
                "drafter: drafts in this process, and servers have settings of their own: leave it out of kind openai"
            )
        if problems:
            raise ImpossibleSettings(problems)
        return self


class RankingSource(Section):
    source: str
    """Texts to count tokens in: `answers` (the target's own, in data.conversations), files by path, pattern or folder
    (.jsonl, .json, .parquet, all others as text; also .gz), or a dataset as `hf:org/name[:config]:split`."""
    weight: Positive = 1.0
    """The source's share of the blend, independent of its size: relative frequencies are added by weight."""
    text_field: str = "text"
    """Field of a record that holds its text. Conversations (`messages`, `conversations`) are read as conversations."""
    max_documents: Count | None = None
    """Most documents to read."""


class RankingSection(Section):
    """How tokens are ranked, for the draft vocabulary and for cuts while decoding (data_gen/rank_vocab.py)."""

    sources: list[RankingSource] = []
    """Empty: the target's own answers."""


class SamCorpusSection(Section):
    """The corpus of SAM-Decoding that data_gen/build_sam.py sorts."""

    sources: str | list[str] = "answers"
    """Files as in data.ranking.sources, Hub datasets (hf:org/name:split), and `answers`, the target's own in
    data.conversations. Only the assistant turns of conversations are taken."""
    text_field: str = "text"
    """Column that holds a record's text, unless the record is a conversation."""
    max_documents: Count | None = None
    """Most documents to read from each source."""
    out: str | None = None
    """The file. Default: <output_dir>/sam.safetensors."""

    @property
    def names(self) -> list[str]:
        return as_list(self.sources)


class CaptureSection(Section):
    """Hidden states on disk (data_gen/capture.py)."""

    dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16"
    """Precision of the stored states. fp8 (e4m3) keeps one scale per state and token."""
    shard_megabytes: Positive = 512
    """Approximate size of a shard. A kill loses at most one; capture keeps one in memory."""
    batch_tokens: Count = 8192
    """Tokens per forward pass of the target, padding included; a longer row is read alone."""


class RepromptSection(Section):
    """Prompts that ask for long answers about pictures, written by data_gen/reprompt.py (docs/pictures.md)."""

    sources: str | list[str] | None = None
    """Pictures with captions or instructions, in the formats of data.prompts or as COCO's caption file."""
    folder: str | None = None
    """Folder that relative paths of pictures start from. Default: the folder of the source that names them."""
    instructions: list[Text] = []
    """Phrasings of the instruction, for pictures that come without one. Empty: our own."""
    requests: list[Text] = []
    """Phrasings of the request for a long answer, in which {words} becomes min_words. Empty: our own."""
    min_words: Count = 1000
    """Least number of words that the prompts ask for; the target may write fewer."""
    max_prompts: Count | None = None
    """Most prompts to write. None: one for every usable record."""
    seed: Seed = 42
    """Seed of the prompts' order and phrasings."""
    out: str | None = None
    """File to write. Default: <output_dir>/prompts.jsonl."""


class DataSection(Section):
    prompts: str | list[str] | None = None
    """Conversations whose questions the target answers: a .jsonl, .json, .csv, .tsv (each also .gz) or .parquet file, a
    folder of such files or a pattern (parts/*.jsonl), or a dataset as `hf:org/name[:split]` or
    `hf:org/name:config:split`. Default: the file that reprompt writes, if reprompt.sources is set."""
    max_prompts: Count | None = None
    """Most conversations to read; dropped duplicates do not count."""
    duplicates: Literal["drop", "keep"] = "drop"
    """What to do with conversations that ask the same questions as an earlier one, whatever their ids and answers: drop
    and count them, or keep them, for several answers to one question at a temperature above 0."""
    conversations: str | None = None
    """File that regenerate writes and training reads. Default: <output_dir>/conversations.jsonl."""
    max_length: int = Field(default=2048, ge=8, le=MOST_COUNTED)
    """Most tokens of one training row, and never more than the target has positions. Regeneration ends answers there.
    Training leaves longer conversations out and counts them; it never cuts them."""
    contamination: Annotated[Literal["list", "remove", "off"], OrOff] = "list"
    """What to do with training conversations that ask a question of eval.prompts: list and count them, leave them out,
    or skip the check."""
    reprompt: RepromptSection = RepromptSection()
    generator: GeneratorSection = GeneratorSection()
    ranking: RankingSection = RankingSection()
    sam: SamCorpusSection = SamCorpusSection()
    states: str | None = None
    """Folder of hidden states. Regeneration in process writes them with the answers, data_gen/capture.py those that are
    missing. Training then reads them and never runs the target.
    None: the target runs beside the drafter, and capture writes to <output_dir>/states."""
    capture: CaptureSection = CaptureSection()

    @property
    def has_hub_prompts(self) -> bool:
        """Whether prompts come from a hub dataset. A plan reads only a sample of one, or nothing."""
        return any(name.startswith("hf:") for name in as_list(self.prompts))


class LoraSection(Section):
    """Trains only low-rank matrices on top of the drafter in drafter.init_from, and merges them into the result."""

    r: Size = 16
    """Rank of the matrices."""
    alpha: Positive = 32.0
    """Their product is scaled by alpha / r."""
    modules: list[str] | None = None
    """Linear layers to adapt, by the last part of their name: [q_proj, v_proj]. None: all, the head included."""


MOST_COMPRESSED = 4096
MOST_SPECIALISTS = 64  # also of positions of each; far more than a round drafts


class DrafterSection(Section):
    kind: Literal["eagle3", "eagle", "poss", "vispec"] = "eagle3"
    """`eagle3` (train/eagle3.py), `eagle`: EAGLE-1/2, and HASS with more than one train.ttt_steps (train/eagle.py),
    `poss`: position specialists (train/poss.py), or `vispec`, for vision-language targets (train/vispec.py)."""
    base: Literal["eagle", "eagle3"] = "eagle"
    """The drafter that position specialists or ViSpec extend. Both were published over EAGLE-1's layer, position
    specialists with HASS's training."""
    positions_per_specialist: int | None = Field(default=None, ge=1, le=MOST_SPECIALISTS)
    """For poss and vispec: number of consecutive draft positions per specialist (n of PosS-n). Default: 2."""
    specialists: int | None = Field(default=None, ge=1, le=MOST_SPECIALISTS)
    """For poss and vispec: number of specialists; the last one also drafts all later positions. Default: 4. If neither
    this key nor positions_per_specialist is set, vispec has no specialists."""
    match_specialists: int | None = Field(default=None, ge=2, le=MOST_SPECIALISTS)
    """For eagle and eagle3: widen the MLP of a single drafter until it has as many parameters as this many specialists,
    the baseline that position specialists must beat. intermediate_size is then the width of one specialist."""
    compressed_tokens: int | None = Field(default=None, ge=0, le=MOST_COMPRESSED)
    """For vispec: tokens that stand for a picture in the drafter's input. Default: 1. With 0 and global_vector: false,
    the drafter sees nothing of a picture; a drafter of kind eagle or eagle3 sees all of its tokens."""
    global_vector: bool = True
    """For vispec: also add one vector of the last picture to every later text token."""
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    """For eagle and eagle3: number of decoder layers, one above the other."""
    capture_layers: list[int] | None = None
    """Target states that EAGLE-3 fuses into features, as indices into `hidden_states` (0 is the embedding). Default:
    (2, L//2, L-3). EAGLE-1 reads the last state, after the target's final norm."""
    vocab_size: Size | None = None
    """Size of the draft vocabulary: the most frequent supervised tokens, and the lowest other ids if these are fewer.
    None: the target's whole vocabulary, the only choice for drafters that use the target's own head (eagle, and poss
    and vispec over it)."""
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
    init_head: Literal["random", "target", "target_with_norm"] = "random"
    """Initial weights of EAGLE-3's head. `random`; `target`: the target's rows (for short runs), with ones in the norm
    before it; `target_with_norm`: with the target's final norm there, too (which cost tau in docs/results.md)."""
    init_from: str | None = None
    """Trained drafter to start from, named as in eval.drafter: one of the same shape (its MLP may be narrower), or for
    poss and vispec a single drafter of the base. Every specialist then starts from that layer; vispec adds its adaptor
    to it. Vispec with specialists may also start from a drafter of kind poss, or from vispec without specialists. The
    draft vocabulary is taken from that drafter, so vocab_size may be left out."""
    lora: LoraSection | None = None
    """Train low-rank matrices on top of the frozen weights of init_from, instead of all weights."""

    @model_validator(mode="after")
    def _possible(self) -> "DrafterSection":
        extends, based = self.extends, self.over is not None
        owners = [
            (("base", "positions_per_specialist", "specialists"), based, "drafters of kind poss and vispec"),
            (("compressed_tokens", "global_vector"), self.kind == "vispec", "drafters of kind vispec"),
            (("match_specialists", "num_layers"), not based, "drafters of kind eagle and eagle3"),
            (("capture_layers", "fc_norm", "norm_output", "init_head"), extends == "eagle3", "EAGLE-3's drafters"),
            (("fc_bias",), extends == "eagle", "EAGLE-1's drafters"),
        ]
        this = f"kind is {self.kind}" + f" over {self.base}" * based
        problems = [
            f"{key}: it only works in {drafters}, and {this}: leave it out"
            for keys, owned, drafters in owners
            for key in keys
            if key in self.meant and not owned
        ]
        if extends == "eagle" and self.vocab_size is not None:
            problems.append(
                "vocab_size: EAGLE-1 drafts with the target's own head, from the whole vocabulary: leave it out here "
                "and cut while decoding, with eval.tree.vocab_size"
            )
        if self.lora is not None and self.init_from is None:
            problems.append(
                "lora: adapts a trained drafter: name it in init_from, or leave lora out to train all weights"
            )
        if self.init_from is not None and self.init_head != "random" and extends == "eagle3":
            problems.append(
                f"init_head: {self.init_head}, but init_from brings a head with it: leave one of the two out"
            )
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
        """Whether it has position specialists."""
        given = self.specialists is not None or self.positions_per_specialist is not None
        return self.kind == "poss" or (self.kind == "vispec" and given)

    @property
    def positions(self) -> int:
        """n of PosS-n."""
        return self.positions_per_specialist or 2

    @property
    def specialist_count(self) -> int:
        return self.specialists or 4


TokenObjective = Literal[
    "soft_ce", "forward_kl", "hard_ce", "reverse_kl", "total_variation", "log_acceptance", "hybrid"
]


StepWeights = Annotated[list[PositiveOrZero], Field(min_length=1)]
StepWeight = Annotated[Number, Field(gt=0, le=10)] | StepWeights | Literal["acceptance"]
Detach = bool | Literal["specialists"]


class TrainSection(Section):
    max_steps: Count | None = None
    """Optimiser steps. None: as many as `epochs` needs."""
    epochs: Number | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the training conversations, unless max_steps is set. Both None: 1."""
    batch_size: Size = 4
    """Conversations per micro-batch, in each process."""
    gradient_accumulation_steps: Size = 1
    """Micro-batches per optimiser step. Splitting a batch over them changes nothing but memory."""
    packing: bool = False
    """The target reads a micro-batch's conversations in one row without padding, each attending only to itself, instead
    of one per row padded to the longest. The drafter always reads them packed. Losses and gradients stay the same; time
    and memory change."""
    learning_rate: Positive = 1e-4
    """AdamW's learning rate after the warm-up. Small drafters need a higher one."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps of linear warm-up."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """Decay to zero after the warm-up, at the last step. A run that is resumed with more or fewer steps than it was
    begun with goes on at the rate that its new length asks for, and prints how far that lies from the last one."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's running mean of gradients."""
    adam_beta2: Number = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's running mean of squared gradients."""
    weight_decay: PositiveOrZero = 0.0
    """AdamW's weight decay: at every step, weights shrink by this times the learning rate."""
    max_skipped_steps: CountOrZero = 10
    """Steps that a run may skip because of a non-finite gradient; one more stops it."""
    max_grad_norm: Positive = 0.5
    """Limit on the gradient's global norm, or with clip: value on each of its elements."""
    clip: Literal["norm", "value"] = "norm"
    """How gradients are clipped. EAGLE-1, HASS and PosS were published with `value`."""
    ttt_steps: Annotated[int, Field(ge=1, le=MOST_SPECIALISTS**2)] = 7
    """Unroll steps: the depth of the chains trained on. Default: 7 for eagle3, 1 for eagle (more is HASS),
    positions_per_specialist * specialists with specialists, else 2 for vispec, but 7 over eagle3."""
    unroll: Literal["chains", "passes"] = "chains"
    """`chains`: as in drafting, a step reads drafted features below its chain's root and the target's features before
    it. `passes`: each step runs over all columns, and every column reads what the previous step drafted, even in
    prompts and after pictures (ViSpec's code). It costs more, and trains what drafting does not compute. Not for
    specialists."""
    step_weight: StepWeight = 0.8
    """The loss of unroll step k is weighted by step_weight**k. A list gives each step's weight. `acceptance` weights
    each step of each chain by its gain in decoding (train/loss/step_weights.py); a better drafter may then have a
    higher loss. Default: 0.8 for eagle3 and what extends it, else 1."""
    token_loss: PositiveOrZero = 1.0
    """Weight of `token_objective`, by default the soft cross-entropy with the target's distribution. Default: 1 for
    eagle3 and what extends it, 10 for vispec, else 0.1."""
    feature_loss: PositiveOrZero = 0.0
    """Weight of the smooth L1 distance between the drafted and the target's feature. Default: 1 for eagle and for poss
    over it, else 0."""
    top_k_loss: PositiveOrZero = 0.0
    """Weight of the cross-entropy over the target's `top_k_tokens` likeliest tokens (HASS: 1)."""
    top_k_tokens: Size = 10
    """Number of tokens in top_k_loss."""
    token_objective: TokenObjective = "soft_ce"
    """The objective that `token_loss` weights (train/loss/losses.py): a distance between the drafter's and the target's
    distribution. Default: soft_ce, for vispec total_variation."""
    rank_loss: PositiveOrZero = 0.0
    """Weight of ViSpec's ranking loss: the likelihood of the target's order of its `rank_tokens` likeliest tokens.
    Default: 0.05 for vispec, else 0."""
    rank_tokens: Size = 10
    """Number of tokens in rank_loss."""
    feature_noise: PositiveOrZero = 0.0
    """Width of the uniform noise on the target's features in the drafter's input, for rows of 512 tokens. Shorter rows
    get more, longer rows less. Default: 0 for eagle3 and what extends it, else 0.2."""
    detach_features: Detach = False
    """Stop gradients through drafted features from each step to the one before (HASS); `specialists`: only where a new
    specialist takes over from the one before (PosS). Default: true for eagle and poss, specialists for poss and
    for vispec with specialists over eagle3, else false."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16"], OrNo] = "auto"
    """`auto`: bf16 on accelerators with native bf16, else no (float32). On CPUs bf16 may be slower."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed's ZeRO: 1 shards AdamW's moments over the processes, 2 also gradients, 3 also weights. 0: every process
    holds everything (DistributedDataParallel). Kind vispec does not support 3."""
    offload_optimizer: bool = False
    """With zero_stage: keep AdamW's moments on the CPU and take its steps there."""
    shard_target: bool = False
    """For targets too large for one device: shard the frozen target's layers over the processes, too, and gather them
    one at a time (DeepSpeed's ZeRO-3, with any zero_stage). A run of one process holds the whole target."""
    attention: Literal["auto", "blocks"] = "auto"
    """How the drafter's attention is computed. `auto`: with the device's fused kernel if it passes a trial, else as
    with `blocks`. `blocks`: with plain matrix products, block by block."""
    gradient_checkpointing: bool = False
    """Recompute the drafter's layer in the backward pass: less memory, more time, same gradients."""
    seed: Seed = 0
    """Seed of the row order, the initial weights and the noise."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the last checkpoint in <output_dir>/checkpoints; `never` refuses to start if one exists."""
    save_every_steps: Count = 500
    """Optimiser steps between checkpoints."""
    keep_checkpoints: Size = 2
    """Number of checkpoints to keep; older ones are deleted."""
    log_every_steps: Count = 10
    """Optimiser steps per line of metrics.jsonl. A line covers all of them."""
    validation_conversations: CountOrZero = 64
    """Conversations kept out of training, at most a fifth of all, chosen by a hash of their id. 0: no validation."""
    validate_every_steps: Count = 200
    """Optimiser steps between validations."""
    eval_replay: CountOrZero = 0
    """Validation conversations to replay with eval.tree after every checkpoint. The resulting acceptance, which equals
    that of decoding, goes to metrics.jsonl. 0 switches it off."""
    keep_best: Literal["simulated_tau", "replay_tau"] | None = None
    """Also keep the checkpoint with the highest value of this metric on the validation conversations, and save its
    drafter at the end. replay_tau needs eval_replay; simulated_tau validates every checkpoint. None: save the last
    checkpoint's drafter."""
    trackers: list[str] = ["tensorboard"]
    """Trackers that also receive what goes to metrics.jsonl: tensorboard (in <output_dir>/tensorboard), wandb, trackio,
    or another of accelerate's trackers, by name."""


def is_default(key: str, value: Any) -> bool:
    """Whether `train.<name>` has the schema's default, which does not depend on the drafter."""
    section, _, name = key.partition(".")
    return section == "train" and name in TrainSection.model_fields and value == getattr(TrainSection(), name)


class LabelSection(Section):
    """Labelled draft trees (data_gen/label_trees.py), a C2T classifier's training data."""

    answers: str | None = None
    """Recorded answers of the target along which trees are drafted: a generations.jsonl, or regenerated conversations.
    Default: the conversations that training keeps for validation, because the drafter was trained on the others."""
    max_rows: Count | None = None
    """Stop after the answer that reaches this many rows. None: all answers."""
    top_k: Beam = 10
    """Children per expanded node, and width of the beam."""
    draft_calls: Depth = 11
    """Depth of the trees. top_k 10 and draft_calls 11 give 1,010 nodes below a root."""
    entropy_over: Size = 1000
    """Number of likeliest tokens in the entropy (the paper's M)."""
    batch_size: Size = 16
    """Answers processed side by side."""
    out: str | None = None
    """File of the rows. Default: <output_dir>/labelled_trees.safetensors."""

    @property
    def nodes(self) -> int:
        """Below a root; fewer if the draft vocabulary has fewer than top_k tokens."""
        return self.top_k + (self.draft_calls - 1) * self.top_k**2


class ClassifierSection(Section):
    """The C2T classifier (train/c2t.py)."""

    rows: str | None = None
    """File that data_gen/label_trees.py wrote. Default: <output_dir>/labelled_trees.safetensors."""
    hidden: Size = 48
    """Width of its one hidden layer. With init_from it is that one's."""
    negative_ratio: Positive | None = 10.0
    """Rejected rows kept for each accepted one. None: all. What a confidence threshold means depends on this ratio."""
    batch_size: Size = 1024
    """Rows per step."""
    learning_rate: Positive | None = None
    """Adam's learning rate. Default: 1e-3, or 1e-4 with init_from."""
    epochs: Count = 10
    """Passes over the rows. Use more for fewer rows than the paper's nine million."""
    validation_share: Number = Field(default=0.05, gt=0, lt=1)
    """Share of the trees kept for validation, as whole trees."""
    init_from: str | None = None
    """Directory of a trained classifier to calibrate for this target and drafter."""
    share: Number | None = Field(default=None, gt=0, le=1)
    """Share of the trees to read. Default: all, or a tenth with init_from."""
    seed: Seed = 0
    """Seed of the initial weights, the validation trees and the kept rejected rows."""
    out: str | None = None
    """Directory of the classifier. Default: <output_dir>/c2t."""


class DddSection(Section):
    threshold: Number = Field(default=-0.3, ge=-MOST_FLOAT, le=0)
    """Drafting ends once the log of the beam's total probability is below this. Tune it again for a cut vocabulary."""
    at: list[Depth] | Literal["every"] = [5, 7, 9]
    """Draft calls after which the beam is tested. Each test waits for the device, so the paper tests at three. On a
    CPU, `every` costs nothing."""


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
    """How draft trees grow and stop (eval/decoding/policies.py). `auto` measures this machine and takes the fastest
    tree."""
    nodes: int | None = Field(default=None, ge=2, le=1_000_000)
    """Most nodes that the target verifies in one forward pass, the root included. Default: 60; for a chain 6 (5 drafted
    tokens); for svip draft_calls + 1; for static all of paths; for c2t as many as the beam allows, or 1,024 without a
    beam, because such trees may be endless."""
    draft_calls: Depth | None = None
    """Most draft calls in a round, equal to the greatest depth of the tree. Default: nodes - 1 for a chain, 8 for
    eagle2, 11 for ddd and svip_tree, 40 for svip, 10 for c2t, the longest path for static."""
    top_k: Beam | None = None
    """Children proposed per node, and the beam width of eagle2, ddd and svip_tree; not for chains and static trees.
    Default: 10; 15 for c2t."""
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
    """How the tokens of a chain or a static tree are chosen if eval.temperature is above 0: the drafter's likeliest, or
    drawn from its distribution (siblings without replacement). Both are lossless."""

    @model_validator(mode="after")
    def _possible(self) -> "TreeSection":
        owners = {"paths": ["static"], "ddd": ["ddd"], "svip": ["svip", "svip_tree"], "c2t": ["c2t"]}
        for key, policies in owners.items():
            if key in self.meant and self.policy not in policies:
                raise ValueError(f"{key} is for policy {' or '.join(policies)}, but policy is {self.policy}")
        if self.policy == "auto":
            given = self.meant - {"policy", "vocab_size"}
            if given:
                raise ValueError(f"auto chooses {', '.join(sorted(given))} itself: leave it out, or name a policy")
            return self
        if self.top_k is not None and self.policy in CHAINS:
            raise ValueError(f"nodes of a {self.policy} have one child, top_k would do nothing: leave it out")
        if self.draw == "sampled" and self.policy not in (*CHAINS, "static"):
            raise ValueError(
                f"{self.policy} ranks nodes by their probability; draw: sampled is for chains and static trees"
            )
        if self.policy in CHAINS and None not in (self.nodes, self.draft_calls) and self.draft_calls != self.most - 1:
            raise ValueError(
                f"a chain of {self.nodes} nodes (root included) takes {self.most - 1} draft calls, "
                f"not {self.draft_calls}: leave one of the two out"
            )
        if self.policy == "static":
            self._check_paths()
        if self.policy == "ddd" and self.ddd.at != "every" and all(call >= self.calls for call in self.ddd.at):
            # A test after the last call would stop nothing.
            raise ValueError(
                f"ddd.at: {self.ddd.at} tests none of {self.calls} draft calls: name one below {self.calls}, or every"
            )
        if self.policy in ("eagle2", "ddd", "svip_tree"):
            possible = 1 + self.width + (self.calls - 1) * self.width**2
            if self.most > possible:
                raise ValueError(
                    f"{self.most} nodes cannot be drawn from {self.calls} draft calls with top_k {self.width}: "
                    f"at most {possible}"
                )
        if self.policy == "c2t" and self.c2t.classifier is None:
            raise ValueError("c2t needs c2t.classifier, the directory of a trained classifier")
        return self

    def _check_paths(self) -> None:
        given = [key for key in ("nodes", "draft_calls", "top_k") if getattr(self, key) is not None]
        if given:
            raise ValueError(f"a static tree is defined by its paths: leave {', '.join(given)} out")
        if self.paths is None:
            return
        known = {tuple(path) for path in self.paths}
        if len(known) < len(self.paths):
            raise ValueError("paths: a node is given twice")
        orphans = [list(path) for path in sorted(known) if len(path) > 1 and path[:-1] not in known]
        if orphans:
            raise ValueError(f"paths: {orphans[0]} is a child of {orphans[0][:-1]}, which is not in the tree")
        skipped = {(*path[:-1], path[-1] - 1) for path in known if path[-1] > 0} - known
        if skipped and self.draw == "sampled":
            raise ValueError(
                f"paths: siblings are drawn one after the other, so {list(min(skipped))} cannot be left out"
            )

    @property
    def most(self) -> int:
        """Most nodes verified in a round, the root included; for c2t without `nodes`, as many as the beam allows."""
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
    """Where SAM-Decoding looks for the newest tokens (models/sam.py)."""

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

    @model_validator(mode="before")
    @classmethod
    def _default_bound(cls, values: Any) -> Any:
        rule = str(values.get("rule")) if isinstance(values, dict) else ""
        own, most = {"lantern": ("delta", 0.1), "lantern++": ("lambda", 5.0)}.get(rule, (None, None))
        return values if own is None or values.get(own) is not None else {**values, own: most}

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.rule == "lantern" and self.factor is not None:
            raise ValueError("lambda is for lantern++; lantern's bound is delta")
        if self.rule == "lantern++" and self.delta is not None:
            raise ValueError("delta is for lantern; the bound of lantern++ is lambda")
        return self


def check_beside(acceptance: AcceptanceSection | None, tree: TreeSection) -> None:
    """Raises ValueError if a tree cannot be chosen for an acceptance rule."""
    if acceptance is not None and tree.policy == "auto":
        raise ValueError("policy auto predicts what exact acceptance takes: name a policy beside acceptance")


def with_papers_tree(values: Any) -> Any:
    """A row's values, missing keys of the trees of proposers sam (arXiv 2411.10666) and hierarchy (arXiv 2505.22179)
    filled with their papers'."""
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


def check_sam_settings(
    proposer: ProposerName, tree: TreeSection, sam: SamSection | None, router: RouterSection | None
) -> None:
    """Raises ValueError if a row's SAM-Decoding, alone or beside a proposer, cannot be."""
    if proposer == "sam" and (tree.policy not in ("eagle2", "chain") or tree.draw == "sampled"):
        raise ValueError("sam copies tokens: its tree is of policy eagle2 or chain, without draw")
    if proposer == "sam" and tree.vocab_size is not None:
        raise ValueError("sam has no vocabulary to cut: leave tree.vocab_size out")
    if sam is not None and proposer != "sam":
        raise ValueError(f"sam is for proposer sam, not {proposer}; beside it, sam is set under router")
    if router is not None and proposer == "sam":
        raise ValueError("router puts sam beside another proposer: leave it out, or name that proposer")
    if router is not None and router.fuse and tree.draw == "sampled":
        raise ValueError(
            "router.fuse: drawn tokens cannot get siblings that were not drawn and stay lossless; leave tree.draw or "
            "router.fuse out"
        )


class ContenderSection(Section):
    name: str
    """Its row in the table."""
    proposer: ProposerName = "drafter"
    """The trained drafter, prompt lookup (copies the tokens that followed the last n-gram earlier in the text), a small
    causal LM with the target's tokenizer, SAM-Decoding (copies what followed the longest known end of the text), or a
    hierarchy: a drafter's trees, verified by a small model, give the target a chain."""
    drafter: str | None = None
    """A trained drafter, named as in eval.drafter; in a hierarchy, it drafts for draft_model. None: eval.drafter."""
    draft_model: TargetSection | None = None
    """The small model of proposers causal_lm and hierarchy: another model with the target's tokenizer, or the target
    itself with `quantization`."""
    min_draft_length: Count | None = None
    """For a hierarchy: length at which its chain ends; it may exceed this by at most tree.draft_calls. Default: 6. Its
    tree has 30 nodes in 3 draft calls by default."""
    quantization: Precision = None
    """Precision of the target in this row. Plain decoding in that precision then gets its own row."""
    sam: SamSection | None = None
    """Settings of proposer sam. Its trees are of policy eagle2 (grown from a corpus's continuations; by default 60
    nodes of any depth, top_k 8) or chain."""
    router: RouterSection | None = None
    """SAM-Decoding beside the proposer. None: the proposer alone."""
    acceptance: AcceptanceSection | None = None
    """A relaxed acceptance rule. None: the lossless one, whatever eval.acceptance says."""
    tree: TreeSection = TreeSection()

    _papers_tree = model_validator(mode="before")(with_papers_tree)

    @model_validator(mode="after")
    def _plannable(self) -> Self:
        if self.quantization is not None and self.tree.policy == "auto":
            raise ValueError("policy auto plans for the recipe's own target: name a policy beside quantization")
        check_beside(self.acceptance, self.tree)
        return self

    @model_validator(mode="after")
    def _drafts_what_it_can(self) -> "ContenderSection":
        if self.min_draft_length is not None and self.proposer != "hierarchy":
            raise ValueError(f"min_draft_length is for proposer hierarchy, not {self.proposer}")
        if self.proposer == "hierarchy" and (self.tree.policy in ("auto", "c2t") or self.tree.draw == "sampled"):
            raise ValueError(
                "a hierarchy's drafter drafts ranked trees for its small model: name a policy other than auto and c2t, "
                "and leave draw out"
            )
        check_sam_settings(self.proposer, self.tree, self.sam, self.router)
        if self.proposer == "prompt_lookup" and self.tree.policy != "chain":
            raise ValueError("prompt lookup drafts chains: say tree: {policy: chain, nodes: 11}")
        if self.proposer == "prompt_lookup" and self.tree.draw == "sampled":
            raise ValueError("prompt lookup copies tokens and draws none: leave tree.draw out")
        if self.proposer == "prompt_lookup" and self.tree.vocab_size is not None:
            raise ValueError("prompt lookup has no vocabulary to cut: leave tree.vocab_size out")
        if self.proposer not in ("drafter", "hierarchy") and self.drafter is not None:
            raise ValueError(f"drafter is for proposers drafter and hierarchy, not {self.proposer}")
        if (self.proposer in ("causal_lm", "hierarchy")) != (self.draft_model is not None):
            raise ValueError("draft_model goes with proposer causal_lm or hierarchy: give both or neither")
        return self


class PlannerSection(Section):
    """Candidates of `policy: auto` and eval/plan.py, and the data to choose by."""

    answers: str | None = None
    """Recorded answers of the target from which tau is predicted: a generations.jsonl, or regenerated conversations.
    Default: the conversations that training keeps for validation."""
    max_answers: Count = 16
    """Recorded answers to replay for each candidate's tau."""
    candidates: list[TreeSection] = []
    """Trees to choose from. Empty: chains of 1 to 8 tokens, EAGLE-2 trees of 8 to 60 nodes in several depths, and DDD,
    SVIP and SVIP trees in two sizes or thresholds each."""
    seconds: Seconds = 60.0
    """Time to choose in. A first look at all candidates is always taken; the time left goes to the fastest ones."""
    context: Count | None = None
    """Number of committed tokens at which costs are measured. The timed rounds after them must also fit in the target's
    positions. None: the mean over the recorded answers, or as much of it as fits."""


class EvalSection(Section):
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
    """`decode` runs the target. `replay` finds the accepted tokens from its recorded answers: it is many times faster,
    but measures no speeds."""
    answers: str | None = None
    """Recorded answers to replay: a generations.jsonl, or regenerated conversations. Default: generations.jsonl in
    eval.out."""
    batch_size: Size = 1
    """Answers decoded side by side, by plain decoding, too. Speeds are then those of the batch."""
    replay_batch_size: Size = 64
    """Answers replayed side by side. Trades memory for speed; results do not change."""
    token_counts: str | None = None
    """Token counts that tree.vocab_size ranks by. Default: <output_dir>/token_counts.safetensors, written by
    data_gen/rank_vocab.py."""
    proposer: Literal["drafter", "sam"] = "drafter"
    """Who drafts in the recipe's own row of the table: the trained drafter, or SAM-Decoding alone."""
    tree: TreeSection = TreeSection()
    sam: SamSection | None = None
    """Settings of proposer sam. For its trees, see `also`."""
    router: RouterSection | None = None
    """SAM-Decoding beside the drafter. None: the drafter alone."""
    acceptance: AcceptanceSection | None = None
    """A relaxed acceptance rule. None: the lossless one."""
    planner: PlannerSection = PlannerSection()
    also: list[ContenderSection] = []
    """Further rows of the table, measured on the same prompts in the same run, interleaved."""
    bootstrap_samples: int = Field(default=2000, ge=100, le=100_000)
    """Resamplings of the prompts for each 95 % interval."""
    seed: Seed = 0
    """Seed of the bootstrap and, if temperature is above 0, of the sampling."""
    report_answers: CountOrZero = 12
    """Answers shown token by token in report.html."""
    out: str | None = None
    """Folder for acceptance.json, generations.jsonl and report.html. Default: <output_dir>/eval. Replay writes to its
    subfolder `replay`."""

    _papers_tree = model_validator(mode="before")(with_papers_tree)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_sam_settings(self.proposer, self.tree, self.sam, self.router)
        check_beside(self.acceptance, self.tree)
        return self


class ExportSection(Section):
    to: Literal["vllm", "sglang", "tensorrt-llm", "eagle", "speculators", "llama.cpp"] | None = None
    """Engine or format that `draftsmith run` exports the drafter to at its end. Several engines read the folder for
    vllm. None: the run does not export, and `draftsmith export` takes vllm."""
    dtype: Literal["trained", "float32", "bfloat16", "float16"] = "trained"
    """Precision of the exported weights. Engines cast them to their own."""
    license: str | None = None
    """Licence of the drafter for its model card, as an identifier of the Hub (apache-2.0, llama3.1). Drafters inherit
    obligations from their target and from their training data."""
    out: str | None = None
    """Folder to write. Default: <output_dir>/export/<engine>."""


HASS_TRAINING = {
    "step_weight": 1.0,
    "token_loss": 0.1,
    "feature_loss": 1.0,
    "feature_noise": 0.2,
    "detach_features": True,
}


# ViSpec's second stage as its code has it: 10 times the L1 distance of two distributions, which is 20 times their total
# variation, and 0.1 times the ranking loss, averaged over two passes: half of both at each. No loss on features. Its
# paper (arXiv 2509.15235) names a cross-entropy.
VISPEC_TRAINING: dict[str, Any] = {
    "ttt_steps": 2,
    "step_weight": 1.0,
    "token_objective": "total_variation",
    "token_loss": 10.0,
    "rank_loss": 0.05,
    "feature_noise": 0.2,
}


def published_training(drafter: dict[str, Any]) -> dict[str, Any]:
    """Keys of `train` in which a drafter's publication differs from the defaults, which are EAGLE-3's.

    Args:
        drafter: the recipe's section before validation.
    """
    kind, fused = drafter.get("kind"), drafter.get("base") == "eagle3"
    if kind == "eagle":
        return {"ttt_steps": 1, **HASS_TRAINING}
    per, count = drafter.get("positions_per_specialist"), drafter.get("specialists")
    if kind == "vispec" and per is None and count is None:
        return {} if fused else VISPEC_TRAINING
    if kind not in ("poss", "vispec"):
        return {}
    per, count = 2 if per is None else per, 4 if count is None else count
    # A value that is not a count is reported at its own key; a step number from it would repeat the report.
    countable = all(type(each) is int and 1 <= each <= MOST_SPECIALISTS for each in (per, count))
    steps = {"ttt_steps": per * count} if countable else {}
    if fused:
        return {"detach_features": "specialists"} | steps
    return (HASS_TRAINING if kind == "poss" else VISPEC_TRAINING) | steps


# Settings of PosS's own version over EAGLE-3 that differ from the defaults here.
POSS_EAGLE3: dict[str, Any] = {"step_weight": 0.9, "detach_features": False}


def other_than_published(drafter: DrafterSection, train: TrainSection) -> str | None:
    """A sentence about losses that differ from the drafter's publication; None if all agree.

    It warns users who change the drafter's kind in a recipe that names another kind's losses, as resolved recipes do.
    The number of unroll steps is a free choice, but an EAGLE-1 drafter with more than one is HASS.
    """
    defaults = TrainSection(**published_training(drafter.model_dump()))
    published = {key: getattr(defaults, key) for key in (*HASS_TRAINING, "top_k_loss", "token_objective", "rank_loss")}
    name = drafter.kind + " over eagle3" * (drafter.over == "eagle3")
    if name == "poss over eagle3":
        published |= {key: value for key, value in POSS_EAGLE3.items() if getattr(train, key) != published[key]}
    if drafter.kind == "eagle" and train.ttt_steps > 1:
        name = f"HASS (eagle with train.ttt_steps {train.ttt_steps})"
        published["top_k_loss"] = 1.0
    if train.ttt_steps == 1:  # neither has any effect on a single step
        del published["step_weight"], published["detach_features"]
    others = [
        f"train.{key} {_plain(given)} (published {_plain(value)})"
        for key, value in published.items()
        if (given := getattr(train, key)) != value
    ]
    return f"not as published for {name}: {', '.join(others)}" if others else None


def _plain(value: float | bool | str | list[float]) -> str:
    return str(value).lower() if isinstance(value, (bool, str, list)) else f"{value:g}"


def _with_picture_prompts(values: dict[str, Any]) -> dict[str, Any]:
    data, output = values.get("data") or {}, values.get("output_dir")
    reprompt = data.get("reprompt") if isinstance(data, dict) else None
    if not isinstance(reprompt, dict) or reprompt.get("sources") is None or not isinstance(output, str):
        return values
    prompts = reprompt.get("out") or str(Path(output) / PICTURE_PROMPTS)
    return {**values, "data": {**data, "prompts": data.get("prompts") or prompts}}


PICTURE_PROMPTS = "prompts.jsonl"


class Recipe(Section):
    output_dir: str
    """Folder for everything that a run writes."""
    target: TargetSection
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    labels: LabelSection = LabelSection()
    classifier: ClassifierSection = ClassifierSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        """Fills missing keys of `train` with the drafter's published settings, and data.prompts with the file that
        reprompt writes."""
        if not isinstance(values, dict):
            return values
        values = _with_picture_prompts(values)
        drafter, train = values.get("drafter") or {}, values.get("train") or {}
        if not isinstance(drafter, dict) or not isinstance(train, dict):
            return values  # validation reports it
        return {**values, "train": published_training(drafter) | train}

    @model_validator(mode="after")
    def _trainable(self) -> "Recipe":
        drafter, train, problems = self.drafter, self.train, []
        if train.keep_best is not None and not train.validation_conversations:
            problems.append("train.keep_best: needs validation conversations, but train.validation_conversations is 0")
        elif train.keep_best == "replay_tau" and not train.eval_replay:
            problems.append(
                "train.keep_best: replay_tau needs train.eval_replay, the number of conversations to replay; set that, "
                "or take simulated_tau"
            )
        if train.max_steps is not None and train.warmup_steps >= train.max_steps:
            problems.append(
                f"train.warmup_steps: {train.warmup_steps:,} is not shorter than the run of {train.max_steps:,} steps "
                "(train.max_steps): the learning rate never reaches train.learning_rate"
            )
        if drafter.lora is not None and train.zero_stage:
            problems.append("drafter.lora: its few weights are not trained under ZeRO: leave train.zero_stage out")
        if train.feature_loss and drafter.extends == "eagle3":
            problems.append(
                f"train.feature_loss: {train.feature_loss:g}, but the output of EAGLE-3's layer is not a feature of "
                "the target and cannot be compared with one: set it to 0, or take kind eagle, or another over eagle"
            )
        if not (train.token_loss or train.feature_loss or train.top_k_loss or train.rank_loss):
            problems.append(
                "train.token_loss: 0, as are feature_loss, top_k_loss and rank_loss: nothing would be learnt; give one "
                "a weight"
            )
        if isinstance(train.step_weight, list) and (
            len(train.step_weight) != train.ttt_steps or not any(train.step_weight)
        ):
            problems.append(
                f"train.step_weight: {_plain(train.step_weight)}; give each of the {train.ttt_steps} unroll steps a "
                "number, and one of them more than 0"
            )
        if train.detach_features == "specialists" and not drafter.specialised:
            problems.append(
                f"train.detach_features: specialists, but kind {drafter.kind} has none: set it to true (HASS) or false"
            )
        if train.unroll == "passes" and drafter.specialised:
            problems.append("train.unroll: passes know no position specialists: set it to chains, or leave it out")
        first = (drafter.specialist_count - 1) * drafter.positions  # drafted by the last specialist, counted from 0
        if drafter.specialised and train.ttt_steps <= first:
            problems.append(
                f"train.ttt_steps: {train.ttt_steps} steps train no further than position {train.ttt_steps}, and the "
                f"last of {drafter.specialist_count} specialists of {drafter.positions} each would begin at position "
                f"{first + 1} and learn nothing: set it to {first + 1} or more, or drafter.specialists to less"
            )
        if problems:
            raise ImpossibleSettings(problems)
        return self

    @model_validator(mode="after")
    def _dated(self) -> "Recipe":
        others = self.conversations_path.parent, self.states_dir.parent
        self.target._kept_date = KeptDate(Path(self.output_dir), others)
        return self

    def keep_date(self) -> None:
        """From now on, the date of prompts is kept in output_dir once it is asked for."""
        if self.target._kept_date is not None:
            self.target._kept_date.writes = True

    # Paths of a run's files, defaults resolved.

    @property
    def conversations_path(self) -> Path:
        """Regenerated conversations."""
        return Path(self.data.conversations or Path(self.output_dir) / "conversations.jsonl")

    @property
    def picture_prompts_path(self) -> Path:
        """Prompts about pictures."""
        return Path(self.data.reprompt.out or Path(self.output_dir) / PICTURE_PROMPTS)

    @property
    def reprompts(self) -> bool:
        """Whether the prompts for training are those that reprompt writes."""
        return self.data.reprompt.sources is not None and str(self.picture_prompts_path) in as_list(self.data.prompts)

    @property
    def training_rejects_path(self) -> Path:
        """Conversations without a training row, with the reason. rank_vocab and training leave out the same ones."""
        return Path(self.output_dir) / "conversations.training_rejects.jsonl"

    @property
    def contamination_path(self) -> Path:
        """Training conversations with questions of eval.prompts, one JSON line each."""
        return Path(self.output_dir) / "contamination.jsonl"

    @property
    def draft_vocab_path(self) -> Path:
        return Path(self.output_dir) / "draft_vocab.safetensors"

    @property
    def token_counts_path(self) -> Path:
        """Counts of each target token in supervised positions. FR-Spec's cuts rank by them."""
        return Path(self.eval.token_counts or Path(self.output_dir) / "token_counts.safetensors")

    @property
    def planner_costs_path(self) -> Path:
        return Path(self.output_dir) / "planner_costs.json"

    @property
    def sam_path(self) -> Path:
        """The sorted corpus that data_gen/build_sam.py writes."""
        return Path(self.data.sam.out or Path(self.output_dir) / "sam.safetensors")

    @property
    def static_sams(self) -> list[Path]:
        """The sorted corpora that contenders look in."""
        sections = [each for row in (self.eval, *self.eval.also) for each in (row.sam, row.router)]
        return [Path(section.static) for section in sections if section is not None and section.static is not None]

    @property
    def measures_drafter(self) -> bool:
        """Whether a contender drafts by eval.drafter."""
        if self.eval.proposer == "drafter":
            return True
        return any(row.proposer in ("drafter", "hierarchy") and row.drafter is None for row in self.eval.also)

    @property
    def drafter_dir(self) -> Path:
        """The final drafter of training."""
        return Path(self.output_dir) / "drafter"

    @property
    def states_dir(self) -> Path:
        """Hidden states that data_gen/capture.py writes."""
        return Path(self.data.states or Path(self.output_dir) / "states")

    @property
    def labelled_trees_path(self) -> Path:
        """Rows that data_gen/label_trees.py writes."""
        return Path(self.labels.out or Path(self.output_dir) / "labelled_trees.safetensors")

    @property
    def classifier_rows_path(self) -> Path:
        """Rows that the classifier is trained on."""
        return Path(self.classifier.rows or self.labelled_trees_path)

    @property
    def classifier_dir(self) -> Path:
        """The trained C2T classifier."""
        return Path(self.classifier.out or Path(self.output_dir) / "c2t")

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.output_dir) / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON line per logged training step."""
        return Path(self.output_dir) / "metrics.jsonl"

    @property
    def eval_drafter_dir(self) -> Path:
        """The measured drafter."""
        return Path(self.eval.drafter or self.drafter_dir)

    @property
    def eval_out(self) -> Path:
        """Folder of acceptance.json, generations.jsonl and report.html."""
        return Path(self.eval.out or Path(self.output_dir) / "eval")

    @property
    def imported_dir(self) -> Path:
        """Our copies of the foreign drafters that the recipe names."""
        return Path(self.output_dir) / "imported"

    def export_dir(self, engine: str) -> Path:
        """The drafter as an engine reads it."""
        return Path(self.export.out or Path(self.output_dir) / "export" / engine)
