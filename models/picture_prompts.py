"""Messages with pictures to a vision-language target's prompt.

The chat template writes one placeholder token for each picture. Here it becomes as many as the target has embeddings
of the picture, and gets an insert with the picture:

    messages      user: [text "What is it?", picture a]
    template      <|user|> What is it? <image> <|end|>
    prompt        <|user|> What is it? <image> <image> <image> <image> <|end|>        insert: a, 4 tokens

Image processors are used in their version for Pillow, which needs no torchvision and gives the same pixels on every
machine. A prompt keeps a picture's source, and reads it again when the target needs its pixels.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image

from draftsmith.models.prompt import Insert, RenderError
from draftsmith.models.vision import SUPPORTED, PictureInsert
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.prompts.picture_parts import PICTURE_TYPES, places_of
from draftsmith.recipes.prompts.pictures import UnusablePicture, decoded_picture, read_picture, upright_rgb

if TYPE_CHECKING:
    from draftsmith.models.target_files import TargetFiles

HELD_PICTURES = 8  # processed ones that are kept: a prompt is often read soon after it was made
# Why pictures of these families, and of LLaVA with Pixtral's tower, cannot be inserts that a causal decoder reads.
_TEXT_BETWEEN = "their prompts have text between the parts of a picture"
_UNREADABLE = {
    "idefics3": _TEXT_BETWEEN,
    "smolvlm": _TEXT_BETWEEN,
    "pixtral": _TEXT_BETWEEN,
    "gemma3": "the tokens of a picture attend to one another in both directions",
}


class PlacedPicture(NamedTuple):
    """A picture as a prompt names it."""

    place: str  # as for `read_picture`
    digest: str  # sha256 of the file's bytes


class PictureProcessor:
    """A vision-language target's image processor, with its placeholder."""

    def __init__(self, files: "TargetFiles"):
        self.files, self.config = files, files.config
        self.placeholder: int = self.config.image_token_id
        self._held: OrderedDict[str, Mapping[str, torch.Tensor]] = OrderedDict()
        # By width and height, on which the number depends alone: processing takes far longer than reading a picture.
        self._tokens: dict[tuple[int, int], int] = {}

    def expanded(
        self, ids: Sequence[int], marks: Sequence[int], sources: Sequence[Any]
    ) -> tuple[list[int], list[int], tuple[Insert, ...]]:
        """Token ids, their marks, and inserts, with all placeholders of each picture; given with one for each.

        Raises RenderError if there are fewer placeholders or sources (see `opened`), or if a picture cannot be read.
        """
        if sources:
            check_family(self.config)
        if (written := list(ids).count(self.placeholder)) != len(sources):
            raise RenderError(
                f"pictures and placeholders differ: {len(sources)} and {written}; give each picture as a part "
                '{"type": "image", "path": ...} of a message that the chat template shows pictures of, and write no '
                "placeholder in its text"
            )
        tokens, kept, inserts = list[int](), list[int](), list[Insert]()
        for token, mark in zip(ids, marks, strict=True):
            count = 1
            if token == self.placeholder:
                inserts.append(self.insert(len(tokens), sources[len(inserts)]))
                count = inserts[-1].length
            tokens += [token] * count
            kept += [mark] * count
        return tokens, kept, tuple(inserts)

    def placed(self, ids: Sequence[int], sources: Sequence[Any]) -> tuple[Insert, ...]:
        """The inserts of a prompt with all its placeholders; sources may go on. Raises as `expanded` does."""
        if sources:
            check_family(self.config)
        inserts, end = list[Insert](), 0
        for at, token in enumerate(ids):
            if token != self.placeholder or at < end:
                continue
            if len(inserts) == len(sources):
                raise RenderError(f"pictures and placeholders differ: token {at} belongs to none of {len(sources)}")
            insert = self.insert(at, sources[len(inserts)])
            end = at + insert.length
            if (written := list(ids[at:end]).count(self.placeholder)) < insert.length:
                raise RenderError(
                    f"pictures and placeholders differ: {written} placeholders at token {at} for a picture of "
                    f"{insert.length}; has it, or the target's processor, changed since the prompt was written?"
                )
            inserts.append(insert)
        return tuple(inserts)

    def insert(self, first: int, source: Any) -> PictureInsert:
        """A picture whose first placeholder is at column `first`. Raises RenderError if it cannot be read."""
        picture = opened(source)
        content = self._digest(picture)
        if picture.size not in self._tokens:
            self._tokens[picture.size] = embeddings_of(self.config, self._processed(picture, content))
        return PictureInsert(first, self._tokens[picture.size], content, partial(self.pixels, source, content))

    def pixels(self, source: Any, content: str) -> Mapping[str, torch.Tensor]:
        """What the vision tower reads of a picture.

        Raises UserError if the source shows none now, or another one than that with the digest `content`.
        """
        if content in self._held:
            return self._held[content]
        try:
            picture = opened(source)
        except RenderError as error:
            raise UserError(f"a prompt's picture is no longer there: {error}") from error
        if self._digest(picture) != content:
            raise UserError(
                f"the picture {quoted(str(source))} has changed since its prompt was made; put the former one back, or "
                "answer its prompt again"
            )
        return self._processed(picture, content)

    def _processed(self, picture: Image.Image, content: str) -> Mapping[str, torch.Tensor]:
        pixels = dict(self.files.image_processor(images=[picture], return_tensors="pt"))
        self._held[content] = pixels
        if len(self._held) > HELD_PICTURES:
            self._held.popitem(last=False)
        return pixels

    @cached_property
    def _settings(self) -> bytes:
        processor = self.files.image_processor
        settings = [type(processor).__name__, processor.to_dict()]
        return json.dumps(settings, sort_keys=True, default=str).encode()

    def _digest(self, picture: Image.Image) -> str:
        size = f"{picture.width}x{picture.height} ".encode()
        return hashlib.sha256(self._settings + size + picture.tobytes()).hexdigest()


def opened(source: Any) -> Image.Image:
    """A picture in RGB, upright (`recipes.prompts.pictures` says how). Raises RenderError if it is not usable.

    Args:
        source: a place as for `read_picture`, alone or with its digest; a file's bytes; or a Pillow image.
    """
    try:
        if isinstance(source, Image.Image):
            return upright_rgb(source)
        if isinstance(source, bytes):
            return decoded_picture(source, "a picture given as bytes")
        place, digest = source if isinstance(source, PlacedPicture) else (str(source), None)
        return read_picture(place, Path(), digest).image
    except UnusablePicture as error:
        raise RenderError(str(error)) from error
    except (OSError, ValueError, SyntaxError) as error:  # a Pillow image that is read only now
        raise RenderError(f"picture unreadable: {str(error) or type(error).__name__}") from error


def check_family(config: Any) -> None:
    """Raises UserError if pictures of this family are not supported. Its prompts of text are."""
    family, tower = config.model_type, config.vision_config
    known = family in ("llava", "llava_next") or hasattr(tower, "spatial_merge_size")  # Qwen2.5-VL, Qwen3-VL
    why = _UNREADABLE.get(family) or _UNREADABLE.get(tower.model_type)
    if why or not known:
        raise UserError(
            f"target.model: pictures of {family} are not supported: "
            f"{why or 'how many tokens a picture has is not known here'}; those of {SUPPORTED} are. Leave prompts with "
            "pictures out, or name another target"
        )


def embeddings_of(config: Any, pixels: Mapping[str, torch.Tensor]) -> int:
    """Number of embeddings that a target with this whole config makes of a picture. UserError: another's pixels."""
    vision, tiled, found = config.vision_config, config.model_type == "llava_next", None
    if config.model_type not in ("llava", "llava_next"):
        if "image_grid_thw" in pixels:  # patches are merged into squares
            found = int(pixels["image_grid_thw"].prod()) // vision.spatial_merge_size**2
    elif pixels["pixel_values"].dim() == 4 + tiled:
        # One for each patch of the tower, and CLIP's class token where it is kept.
        height, width = pixels["pixel_values"].shape[-2:]
        classes = (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")
        patches = (height // vision.patch_size) * (width // vision.patch_size) + classes
        found = _of_tiles(config, pixels, patches) if tiled else patches
    if found is None:
        made = ", ".join(f"{name} of shape {list(each.shape)}" for name, each in pixels.items())
        raise UserError(
            f"target.model: the image processor makes {made} of a picture, which a {config.model_type} with this "
            "config does not read; is preprocessor_config.json another model's?"
        )
    return found


def _of_tiles(config: Any, pixels: Mapping[str, torch.Tensor], patches: int) -> int | None:
    """Number of embeddings that LLaVA-NeXT makes of a picture with so many patches a tile; None: it cannot read it.

    It reads the whole picture in one tile, then the parts of an enlarged one, whose padding it cuts off again, and adds
    a newline to each row of patches. The model's own code counts, on tensors without content.
    """
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches

    size, tiles = pixels.get("image_sizes"), pixels["pixel_values"].shape[-4]
    side, pinpoints = config.vision_config.image_size, config.image_grid_pinpoints
    if size is None or tiles != image_size_to_num_patches(size[0], pinpoints, side):
        return None
    features, newline = torch.empty(tiles, patches, 1, device="meta"), torch.empty(1, device="meta")
    model: Any = SimpleNamespace(config=config)
    try:
        (placed,), _ = LlavaNextModel.pack_image_features(
            model, [features], size, config.vision_feature_select_strategy, newline
        )
    except RuntimeError:  # tiles of another size than the config's
        return None
    return len(placed)


def in_parts(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages with every content as a list of parts, pictures without their sources, and these in order.

    Raises RenderError for a part that is neither text nor a picture, or a picture without a source.
    """
    sources: list[Any] = []

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] not in PICTURE_TYPES:
            if given["type"] != "text":
                raise RenderError(f"neither text nor picture: {given['type']}")
            return given
        places = places_of(given)
        if not places:
            raise RenderError("a picture without a path")
        digest = given.get("sha256")
        if digest is not None and not (isinstance(places[0], str) and isinstance(digest, str)):
            raise RenderError(
                f"wrong type: path and sha256 of a picture must be text, not {places[0]!r:.80} and {digest!r:.80}"
            )
        sources.append(places[0] if digest is None else PlacedPicture(places[0], digest))
        return {"type": "image"}

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [part(each) for each in content] if isinstance(content, list) else content

    return [message | {"content": parts(message.get("content"))} for message in messages], sources
