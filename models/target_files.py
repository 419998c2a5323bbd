"""What a target's files tell before any weight is read, and how it is loaded. Only this module opens a target's files,
in a folder or in the Hub's cache.
"""

import copy
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import logging
from transformers.utils.hub import cached_file

from draftsmith.models.chat import attach, listed_stops, set_template, tokenizer_fingerprint
from draftsmith.models.families import attention_kinds, auto_class, positions_text, rotations, usable_positions
from draftsmith.models.gguf_target import gguf_digest, gguf_file, with_weights, without_weights
from draftsmith.models.guidance import GuidedTarget
from draftsmith.models.image_tokens import unconditional_ids
from draftsmith.models.picture_prompts import PictureProcessor
from draftsmith.models.quantize import check_quantization, precision_name, quantize_layers
from draftsmith.models.sizes import TargetSize, target_size, torch_dtype
from draftsmith.models.target import Target, decoder_layers, device_name, tensor_digest
from draftsmith.models.target_lora import adapter_digest, merged
from draftsmith.models.target_trials import scale_without_weights
from draftsmith.models.turn_ends import stop_ids
from draftsmith.models.vision import is_vision_language
from draftsmith.recipes.command.launch import note_crowd
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.command.stages import INSIDE_RUN, stages_of
from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.files.hub_fetch import check_model
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.loader import portable
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection

BORDER = "original_max_position_embeddings"
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    "max_position_embeddings",
)
ROTARY_NUMBERS = ("rope_theta", "factor", BORDER, "low_freq_factor", "high_freq_factor")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class TargetFiles:
    """The target of a recipe's section. Each file is read when it is first asked for, and once.

    All raise UserError where there is no such target, or none that can be used here. Models beside a target
    (draft models, and itself in another precision) have its tokenizer: `large`.
    """

    def __init__(self, section: TargetSection, large: "TargetFiles | None" = None):
        self.section, self.large = section, large

    @classmethod
    def read(cls, section: TargetSection) -> "TargetFiles":
        """With config and tokenizer read: other checks then meet no mistake in them."""
        files = cls(section)
        _ = files.config, files.fingerprint
        return files

    # Where they are.

    @cached_property
    def gguf(self) -> Path | None:
        """The GGUF file that the section names; None: a folder or a Hub id."""
        return gguf_file(self.section.model)

    @cached_property
    def place(self) -> str:
        """The folder or Hub id of all files but the weights."""
        return self.section.model if self.gguf is None else without_weights(self.gguf)

    @cached_property
    def weights_place(self) -> str:
        return self.section.model if self.gguf is None else with_weights(self.gguf, self.dtype)

    # The config.

    @cached_property
    def config(self) -> Any:
        """The whole config, of a family that is supported (`families.attention_kinds`)."""
        model = self.section.model
        if (Path(model) / "adapter_config.json").exists():
            raise UserError(
                f"target.model: {model!r} holds an adapter (adapter_config.json), not a whole model; name its "
                "base as target.model and this folder as target.adapter (docs/training.md)"
            )
        self._check_there()
        try:
            config = AutoConfig.from_pretrained(self.place, **self._where)
        except StrictDataclassError as error:
            wrong = str(error.__cause__ or first_line(error)).partition(". Errors: ")[0]
            raise UserError(
                f"target.model: the config.json of {model!r} has a value that transformers refuses: {wrong}; "
                "correct it (in a copy of the model's folder)"
            ) from error
        except ZeroDivisionError as error:  # hidden_size % num_attention_heads
            raise UserError(
                f"target.model: the config.json of {model!r} has a size that is 0, such as num_attention_heads"
            ) from error
        except (OSError, ValueError, KeyError) as error:
            reason = first_line(error)
            if Path(model).is_dir() and not (Path(model) / "config.json").exists():
                reason = "the directory has no config.json"
            elif not Path(model).is_dir() and not re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?", model):
                reason = "no such directory"
            raise UserError(f"target.model: no model at {model!r}: {reason}") from error
        _check_numbers(model, config.get_text_config(decoder=True))
        attention_kinds(config)
        return config

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def positions(self) -> int:
        return usable_positions(self.text_config)

    @property
    def dtype(self) -> torch.dtype:
        """Of the loaded weights."""
        return torch_dtype(self.config, self.section.dtype)

    @cached_property
    def size(self) -> TargetSize:
        return target_size(self.config, self.section)

    def skeleton(self) -> Any:
        """The model on torch's meta device; None for what is no causal LM, which `load` will say."""
        with suppress(ValueError), torch.device("meta"):
            return self._built()

    def _built(self) -> Any:
        config = copy.deepcopy(self.config)  # building a model writes into it
        return auto_class(config).from_config(config, trust_remote_code=self.section.trust_remote_code)

    @property
    def planned_embedding_scale(self) -> float:
        """`Target.embedding_scale`, before any weight is read; 1 for what is no causal LM."""
        try:
            with init_empty_weights(include_buffers=False):
                model = self._built()
        except ValueError:
            return 1.0
        return scale_without_weights(model, decoder_layers(model)[0])

    def check_precision(self, device: str | None = None) -> None:
        """`quantize.check_quantization` of target.quantization, before any weight is read."""
        if self.section.quantization is None or (model := self.skeleton()) is None:
            return
        where = device or device_name(self.section.device)
        check_quantization(self.section.quantization, self.config, decoder_layers(model), where)

    # Tokenizer, generation config and image processor.

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """With the recipe's chat template and variables, and with what `chat` and `turn_ends` ask of a target."""
        if self.large is not None:
            return self.large.tokenizer
        section, tokenizer = self.section, self.stored_tokenizer()
        if section.chat_template is not None:
            try:
                tokenizer.chat_template = Path(section.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"target.chat_template: cannot read {section.chat_template}: {first_line(error)}"
                ) from error
        if not tokenizer.chat_template:
            raise UserError(
                f"target.model: the tokenizer of {section.model!r} has no chat template, so conversations cannot be "
                "written as its tokens; name a file with the template it was tuned with in target.chat_template"
            )
        set_template(tokenizer, section)
        rows = self.text_config.vocab_size
        attach(
            tokenizer,
            beyond=_without_embedding(tokenizer, rows),
            # The model cannot write others.
            stops=frozenset(i for i in listed_stops(self.generation_config.eos_token_id) if 0 <= i < rows),
            pictures=PictureProcessor(self) if is_vision_language(self.config) else None,  # type: ignore[arg-type]
        )
        if section.guidance is not None:
            unconditional_ids(section, tokenizer, self.config)
        return tokenizer

    def stored_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy as it is stored, without the recipe's changes. LLaVA's takes the processor's chat template."""
        model, _ = self.section.model, self.config  # which tokenizers read, too
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.place, **self._where)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise UserError(
                f"target.model: cannot load a tokenizer from {model!r} ({first_line(error)}); are the target's "
                "tokenizer.json and tokenizer_config.json there?"
            ) from error
        if not tokenizer.chat_template:
            with suppress(OSError, ValueError, KeyError):  # no such file, or none that can be read
                processor = ProcessorMixin.get_processor_dict(self.place, revision=self.section.revision)[0]
                tokenizer.chat_template = processor.get("chat_template")
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer (`turn_ends.stop_ids`)."""
        return stop_ids(self.tokenizer)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """Raises UserError also for an eos_token_id that is no token id."""
        model = self.section.model
        try:
            config = GenerationConfig.from_pretrained(self.place, revision=self.section.revision or "main")
        except OSError:  # no generation_config.json
            config = GenerationConfig.from_model_config(self.config)
        if wrong := [i for i in listed_stops(config.eos_token_id) if type(i) is not int]:
            raise UserError(
                f"target.model: the generation_config.json of {model!r} has eos_token_id {quoted(wrong[0])}, not a "
                "whole number; write token ids as numbers there (in a copy of the model's folder)"
            )
        return config

    @cached_property
    def image_processor(self) -> Any:
        """transformers' image processor, in its version for Pillow."""
        section = self.section
        settings = self._where | {"revision": section.revision or "main"}
        try:
            return AutoImageProcessor.from_pretrained(section.model, **settings, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"target.model: cannot load an image processor from {section.model!r} "
                f"({first_line(error)}); copy the target's preprocessor_config.json or "
                "processor_config.json there"
            ) from error

    def save_without_weights(self, directory: Path) -> None:
        """Writes config, tokenizer and image processor, without the recipe's changes to the template."""
        parts = [self.config, self.generation_config, self.stored_tokenizer()]
        if is_vision_language(self.config):
            with suppress(UserError):  # without a processor it reads text only
                parts.append(self.image_processor)
        for part in parts:
            try:
                part.save_pretrained(directory)
            except Exception as error:  # tokenizers has no kind of its own for a full disk
                raise UserError(
                    f"{directory}: the target's files cannot be written ({first_line(error)}); make room, or name "
                    "another place"
                ) from error

    # What tells it from other targets.

    @cached_property
    def changes(self) -> dict[str, Any]:
        """What the recipe changes in the checkpoint's weights or its law, by name."""
        guidance = self.section.guidance
        return {
            "gguf": self.gguf and gguf_digest(self.gguf),
            "adapter": adapter_digest(self.section),
            "quantization": precision_name(self.section.quantization),
            "guidance": guidance and f"scale {guidance.scale:g}, {guidance.null}",
        }

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What drafters, recorded answers and stored states must agree with, as far as it is known without weights."""
        config = self.text_config
        return {
            "model": portable(self.section.model),
            "revision": self.section.revision,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "tokenizer_fingerprint": self.fingerprint,
            **self.changes,
        }

    def identity_of(self, target: Target) -> dict[str, Any]:
        """All of `identity`, of this target loaded."""
        return self.identity | weight_digests(target)

    def layout(self, dtype: torch.dtype) -> dict[str, Any]:
        """Facts that exports of a drafter need, to work without the target that had this dtype.

        `embeddings` and `head` name these parameters in the loaded model; files of some families abbreviate them.
        """
        config, model = self.config, self.skeleton()
        names = {id(module): name for name, module in model.named_modules()}
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        return {
            "architectures": list(config.architectures or [type(model).__name__]),
            "model_type": config.model_type,
            "dtype": str(dtype).removeprefix("torch."),
            "embeddings": f"{names[id(embeddings)]}.weight",
            "head": f"{names[id(head)]}.weight",
            "tied": embeddings.weight is head.weight,
        }

    # Weights.

    def load(self, capture_layers: Sequence[int] | None = None, device: str | None = None) -> Target:
        """The target, guided if the section says so."""
        guidance = self.section.guidance
        if guidance is None:
            return Target(self.load_model(device), capture_layers)
        ids = unconditional_ids(self.section, self.tokenizer, self.config)
        return GuidedTarget(self.load_model(device), ids, guidance.scale, capture_layers)

    def load_model(self, device: str | None = None) -> Any:
        """The model in evaluation mode, all parameters frozen, on `device` (None: the section's)."""
        where = device_name(device or self.section.device)
        self.check_precision(where)
        if where == "cpu":
            note_crowd(torch.get_num_threads())
        model = self.read_model()
        if self.section.quantization is not None:
            quantize_layers(decoder_layers(model), self.section.quantization)
        return model.to(where)

    def read_model(self) -> Any:
        """Like `load_model`, in the checkpoint's precision, on the CPU or wherever transformers puts the weights."""
        section, config = self.section, self.config
        # Older releases have no such hook and keep their own bars.
        getattr(logging, "set_tqdm_hook", lambda hook: None)(_bar)
        try:
            loaded, report = auto_class(config).from_pretrained(
                self.weights_place,
                **self._where,
                dtype=section.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise UserError(self._why_not_loaded(error)) from error
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"target.model: {section.model!r} lacks {len(missing)} of its tensors ({', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}); is it a causal LM's checkpoint, whole and with its head?"
            )
        return merged(loaded, section).eval().requires_grad_(False)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint, by the name of `layout`."""
        self._check_there()
        try:
            index = self._file(INDEX)
            places = {} if index is None else parse_json(Path(index).read_bytes())["weight_map"]
            file = self._file(places.get(_stored_name(name, places), WEIGHTS))
            if file is None:
                raise OSError("no file of weights")
            with safe_open(file, framework="pt") as weights:
                return weights.get_tensor(_stored_name(name, weights.keys()))
        except (KeyError, OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{self.section.model}: its checkpoint has no readable {name}: {error}") from None

    def _file(self, name: str) -> str | None:
        """A file, downloaded where it is on the Hub; None: there is none of this name."""
        revision = self.section.revision
        return cached_file(self.weights_place, name, revision=revision, _raise_exceptions_for_missing_entries=False)

    @property
    def _where(self) -> dict[str, Any]:
        """For transformers' `from_pretrained`."""
        return {"revision": self.section.revision, "trust_remote_code": self.section.trust_remote_code}

    def _check_there(self) -> None:
        """Raises UserError for a model that is neither here nor on the Hub."""
        if self.gguf is None:
            check_model(self.section.model, self.section.revision)

    def _why_not_loaded(self, error: Exception) -> str:
        model = self.section.model
        pickled = sorted(path.name for path in Path(model).glob("pytorch_model*.bin"))
        if pickled:
            return (
                f"target.model: {model!r} holds pickled weights only ({pickled[0]}); reading those can run code, "
                "so safetensors are the one format read here. If you trust the file, load it with transformers once "
                "and save it again with save_pretrained"
            )
        reason = first_line(error)
        if reason.startswith("Unrecognized configuration class"):
            reason = f"transformers has no causal LM of family {self.config.model_type}"
        return f"target.model: cannot load {model!r} as a causal LM: {reason}"


def weight_digests(target: Target) -> dict[str, str]:
    """`embedding_digest`, and `vision_digest` of a target that reads pictures.

    They tell fine-tunes with other embeddings, tower or projector from each other, not those with other layers.
    """
    vision = {} if target.vision_digest is None else {"vision_digest": target.vision_digest}
    return {"embedding_digest": tensor_digest(target.embedding_table)} | vision


# Lengths that a recipe asks for, against the positions that its target has.


def longest_row(recipe: Recipe, files: TargetFiles) -> int:
    """Most tokens of a row: data.max_length, or the target's positions where they are fewer."""
    return min(recipe.data.max_length, files.positions)


def no_room(recipe: Recipe, files: TargetFiles) -> str | None:
    """A problem if no prompt of the evaluation fits beside its answer, else None."""
    if recipe.eval.max_new_tokens < files.positions:
        return None
    positions = positions_text(files.text_config)
    return f"eval.max_new_tokens {recipe.eval.max_new_tokens:,} leaves no room for a prompt in the target's {positions}"


def check_evaluation(recipe: Recipe, files: TargetFiles) -> None:
    """Raises UserError if `draftsmith run` would end in an evaluation that is refused, as far as configs tell."""
    evaluates = "evaluate" in stages_of(recipe) and recipe.eval.mode != "replay"
    if INSIDE_RUN in os.environ and evaluates and (problem := no_room(recipe, files)):
        raise UserError(problem)


def bounded_rows(recipe: Recipe, files: TargetFiles) -> str | None:
    """A note if the target has fewer positions than data.max_length has tokens, else None."""
    if (longest := longest_row(recipe, files)) == recipe.data.max_length:
        return None
    return (
        f"note: data.max_length is {recipe.data.max_length:,}, and the target has {positions_text(files.text_config)}: "
        f"no row is longer than {longest:,} tokens"
    )


def _check_numbers(model: str, config: Any) -> None:
    """Raises UserError for impossible numbers, which transformers would meet while it builds the model."""
    own = [config.attribute_map.get(key, key) for key in SIZES]  # GPT-2 has n_head
    wrong = [
        f"{key} {value}, not a number above 0"
        for key in own
        if isinstance(value := vars(config).get(key), int) and value < 1
    ]
    wrong += [
        f"{name} {quoted(value)} among its rope_parameters, not a number above 0"
        for rope in rotations(config)
        for name in ROTARY_NUMBERS
        if (value := rope.get(name)) is not None or (name, rope["rope_type"]) == (BORDER, "longrope")
        if not (isinstance(value, (int, float)) and 0 < value < math.inf)
    ]
    if wrong:
        raise UserError(f"target.model: the config.json of {model!r} has {'; '.join(wrong)}")


def _without_embedding(tokenizer: PreTrainedTokenizerBase, rows: int) -> frozenset[int]:
    """Special tokens beyond the model's embedding of so many rows. Raises UserError for ordinary tokens there.

    They are common (an image token shared by a family's text models). Rendering refuses texts with one.
    """
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows}
    added = tokenizer.added_tokens_decoder
    if any(i not in added or not added[i].special for i in beyond):
        raise UserError(
            f"target.model: its tokenizer knows tokens up to {max(beyond)} ({beyond[max(beyond)]!r}), its embedding "
            f"has {rows} rows: one of the two is not this model's"
        )
    return frozenset(beyond)


def _stored_name(wanted: str, names: Iterable[str]) -> str:
    """A parameter's name in a checkpoint: vision-language models load embeddings under another prefix than in files."""
    alike = [name for name in names if name.split(".")[-2:] == wanted.split(".")[-2:]]
    return alike[0] if len(alike) == 1 else wanted


def _bar(factory: Any, args: Any, settings: Any) -> Any:
    """One of transformers' progress bars in the style of ours."""
    if not logging.is_progress_bar_enabled():
        return factory(*args, **settings)
    return Bar(*args, **{"unit": "tensor", "leave": False, **settings})
