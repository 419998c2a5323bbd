"""The section `data`: prompts, answers, what is counted and stored of them."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from draftsmith.recipes.sections.base import (
    MOST_COUNTED,
    Count,
    CountOrZero,
    ImpossibleSettings,
    Number,
    OrOff,
    Positive,
    PositiveOrZero,
    Seconds,
    Section,
    Seed,
    Size,
    as_list,
)


def server_url(text: str) -> str:
    """The URL with /v1 at its end. Raises ValueError if it is none, or holds a password."""
    parts = urlsplit(text.strip())
    if "@" in parts.netloc:
        raise ValueError(
            "holds a user name or password; put the key into an environment variable and set "
            "data.generator.api_key_env to its name"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.port == 0:
        raise ValueError("must be like http://host:8000/v1")
    return text.strip().rstrip("/").removesuffix("/v1") + "/v1"


class GeneratorSection(Section):
    kind: Literal["transformers", "openai"] = "transformers"
    """Who writes the answers: the target in this process, or OpenAI-compatible servers that serve it and accept token
    ids in /v1/completions (docs/prompts-and-answers.md)."""
    batch_size: Size = 32
    """Conversations decoded side by side in this process."""
    drafter: str | None = None
    """For kind transformers: a trained drafter, named as in eval.drafter, that speeds the target up. The answers remain
    the target's: greedy ones token for token in float32, sampled ones in distribution."""
    base_urls: list[Annotated[str, AfterValidator(server_url)]] = []
    """Servers for kind openai: [http://localhost:8000/v1, http://gpu2:8000/v1]."""
    served_model: str | None = None
    """The target's name on the servers. None: the only one that `/v1/models` lists."""
    concurrency: Size = 64
    """Simultaneous requests, over all servers."""
    timeout_seconds: Seconds = 600.0
    """Longest wait for an answer before the request is repeated."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key. The key itself is never written anywhere."""
    max_new_tokens: Count = 512
    """Most tokens of an assistant turn, with its stop token; a turn cut here is kept with finish_reason `length`."""
    temperature: PositiveOrZero | None = None
    """0 is greedy. None: the target's generation_config, or 1. For vision-language targets, None means temperature 1,
    top_p 1 and top_k off, because their configs are nearly greedy and drafters need sampled answers."""
    top_p: Number | None = Field(default=None, gt=0, le=1)
    """None: the target's generation_config, or 1."""
    top_k: CountOrZero | None = None
    """0 switches it off. None: the target's generation_config, or off."""
    seed: Seed = 0
    """Seed of the sampling."""

    @model_validator(mode="after")
    def _possible(self) -> "GeneratorSection":
        problems = []
        if self.kind == "openai" and not self.base_urls:
            problems.append("base_urls: none given; kind openai needs one, like [http://localhost:8000/v1]")
        if len(set(self.base_urls)) < len(self.base_urls):
            problems.append("base_urls: a server is named twice")
        if self.drafter is not None and self.kind == "openai":
            problems.append("drafter: drafts in this process, not on servers: leave it out of kind openai")
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
    min_words: Count = 1000
    """Least number of words that the prompts ask for; the target may write fewer."""
    max_prompts: Count | None = None
    """Most prompts to write. None: one for every usable record."""
    seed: Seed = 42
    """Seed of the prompts' order and phrasings."""
    out: str | None = None
    """File to write. Default: <output_dir>/prompts.jsonl."""


class SelfPromptsSection(Section):
    """Prompts that the target writes, where data.prompts names `self` (data_gen/self_prompt.py)."""

    count: Count = 1000
    """Prompts to write."""
    temperature: Positive = 1.0
    top_p: Number = Field(default=1.0, gt=0, le=1)
    seed: Seed = 0
    max_new_tokens: Count = 256
    """A prompt that is not at its end by then is left out."""


class DataSection(Section):
    prompts: str | list[str] | None = None
    """Conversations whose questions the target answers: a .jsonl, .json, .csv, .tsv (each also .gz) or .parquet file, a
    folder of such files or a pattern (parts/*.jsonl), a dataset as `hf:org/name[:split]` or `hf:org/name:config:split`,
    or `self`: the target writes them (data.self_prompts). Default: the file that reprompt writes, if reprompt.sources
    is set."""
    max_prompts: Count | None = None
    """Most conversations to read; dropped duplicates do not count."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Of conversations that ask the same: keep them for several answers to one question at a temperature above 0."""
    conversations: str | None = None
    """File that regenerate writes and training reads. Default: <output_dir>/conversations.jsonl."""
    max_length: int = Field(default=2048, ge=8, le=MOST_COUNTED)
    """Most tokens of a training row, and never more than the target has positions. Regeneration ends answers there.
    Training leaves longer conversations out and counts them."""
    contamination: Annotated[Literal["list", "remove", "off"], OrOff] = "list"
    """Training conversations that ask a question of eval.prompts: list and count them, leave them out, or skip this."""
    self_prompts: SelfPromptsSection = SelfPromptsSection()
    reprompt: RepromptSection = RepromptSection()
    generator: GeneratorSection = GeneratorSection()
    ranking: RankingSection = RankingSection()
    sam: SamCorpusSection = SamCorpusSection()
    states: str | None = None
    """Folder of hidden states, which regeneration in process writes with the answers, or data_gen/capture.py later, and
    training reads. None: the target runs beside the drafter; capture writes to <output_dir>/states."""
    capture: CaptureSection = CaptureSection()

    @property
    def has_hub_prompts(self) -> bool:
        """Whether prompts come from a hub dataset. A plan reads only a sample of one, or nothing."""
        return any(name.startswith("hf:") for name in as_list(self.prompts))
