"""Prompts with images, for models that see: their token ids, and what the model takes beside ids.

The processor of a model repeats an image's placeholder in the ids of a prompt, once for each of its embeddings. Here
these placeholders are *named* by negative numbers (`swift.data.image_store`), and turned back when the model is called.
"""

from __future__ import annotations

import inspect
import io
import itertools
import math
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor, nn

from swift.data.image_store import images_named, name_of, remember, remember_shown
from swift.data.images import digest_of, open_image
from swift.errors import ConfigError, RefusedChat, counted, first_line, unusable
from swift.models.attention.interface import transformers_model
from swift.models.attention.spans import Span
from swift.models.multimodal import seeing
from swift.models.transfer import to_device
from swift.types import Image, ShownImage

KEPT_BYTES = 1 << 30
"""Processed images that are kept, so that a step need not process them again."""

OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor returns for tokens, and not for images."""

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a processor beside those of its tokenizer."""

SPEAKERS = "spk_dict.pt"
"""Voices of Qwen2.5-Omni, without which transformers does not load it; never read here."""

TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Inputs of models that say which tokens stand for an image."""

SEE_THEMSELVES = {"gemma3"}
"""Architectures in which the tokens of an image see each other, and all else what is before it (arXiv:2503.19786)."""

PLACEHOLDERS = tuple(f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index"))
"""Settings of configs: tokens that the model replaces by embeddings of something else."""


def placeholder_ids(config: Any) -> list[int]:
    """Tokens that a model replaces by embeddings of images, video or audio; [] for a language model.

    A completion must not have one: there would be no embedding for it. So they have no probability, neither for the
    transformers engine nor in training.
    """
    values = (getattr(seeing(config), name, None) for name in PLACEHOLDERS)
    size = config.get_text_config().vocab_size
    return sorted({value for value in values if isinstance(value, int) and 0 <= value < size})


def placeholder_of(config: Any) -> int:
    """The token that a model replaces by an embedding of an image; -1 if its config names none."""
    known = (getattr(seeing(config), name, None) for name in PLACEHOLDERS[:2])
    return next((value for value in known if value is not None), -1)


def forbid_placeholders(model: nn.Module, logits_RV: Tensor) -> Tensor:
    """Logits in which the placeholders of `model` have no probability."""
    banned = placeholder_ids(transformers_model(model).config)
    if not banned:
        return logits_RV
    return logits_RV.index_fill(-1, to_device(banned, logits_RV.device), lowest(logits_RV.dtype))


def possible(model: nn.Module, logits_RV: Tensor) -> Tensor:
    """The logits of tokens that are no placeholders of `model`."""
    banned = placeholder_ids(transformers_model(model).config)
    kept = [token for token in range(logits_RV.shape[-1]) if token not in banned] if banned else []
    return logits_RV.index_select(-1, to_device(kept, logits_RV.device)) if banned else logits_RV


def lowest(dtype: torch.dtype) -> float:
    """A logit without probability that is finite, also over a small temperature: -inf times 0 is NaN in an entropy."""
    return max(torch.finfo(dtype).min / 4, -1e30)


def has_images(ids: Iterable[int]) -> bool:
    """Whether a prompt has named placeholders."""
    return any(token < 0 for token in ids)


class Vision:
    """The images of a model's prompts.

    Args:
        folder: of the model.
        processor: transformers' processor of the model.
        config: of the model.
        render: text of a chat, as the model is prompted with it.
        max_pixels: larger images are made smaller, in the same proportions; None leaves them to the processor.
    """

    def __init__(
        self,
        folder: Path,
        processor: Any,
        config: Any,
        render: Callable[[Sequence[Any]], str],
        *,
        max_pixels: int | None = None,
    ) -> None:
        self.folder = folder
        self.processor, self.max_pixels = processor, max_pixels
        self._render = render
        self._banned = set(placeholder_ids(config))
        self.placeholder = placeholder_of(config)
        if self.placeholder < 0:
            raise ConfigError(
                f"--model: {folder}: config.json names no token that stands for an image; use a model of another family"
            )
        added = [token.content for token in processor.tokenizer.added_tokens_decoder.values()]
        self.mark = mark = self._found_mark()
        """What a text has for an image."""
        self._marks = {token: mark.count(token) for token in added if token in mark} or {mark: 1}
        """What the chat template writes for an image -> how often; texts around it may number the images."""
        self._made: OrderedDict[tuple[int, ...], tuple[int, dict[str, Tensor]]] = OrderedDict()
        """Of the images of a prompt: how many placeholders they have, and what the model takes."""
        self._lock = threading.Lock()
        self._drawn: dict[str, Tensor] = {}
        self._takes: set[str] = set()
        self.model_type: str = config.model_type
        self.see_themselves = self.model_type in SEE_THEMSELVES
        """Whether the tokens of an image see each other."""
        self._rope_index: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __deepcopy__(self, _: Any) -> Vision:
        """Itself: a copy of a model sees the same images."""
        return self

    def show(self, model: nn.Module) -> None:
        """Let another model of the same kind, which gets the same inputs, find this as `vision_of`."""
        transformers_model(model)._swift_vision = self

    def attach(self, model: nn.Module) -> None:
        """Let `model`, possibly under PEFT, find this as `vision_of`."""
        self.show(model)
        base = transformers_model(model)
        self._takes = set(inspect.signature(type(base.base_model).forward).parameters)
        self._rope_index = getattr(base.base_model, "get_rope_index", None)

    @property
    def identity(self) -> list[Any]:
        """What token ids of images depend on."""
        files = [self.folder / name for name in FILES]
        return [self.max_pixels, *(file.read_text(encoding="utf-8") for file in files if file.is_file())]

    # --- token ids ----------------------------------------------------------------------------------------------

    def encode(self, pieces: Sequence[str], images: Sequence[Image]) -> list[list[int]]:
        """Token ids of the pieces of a rendered chat with these images, whose placeholders are named.

        The processor gets all pieces as one text, since an image may look different among others; pad tokens separate
        them.

        Raises:
            RefusedChat: the text does not show each image once, or the processor cannot take them.
        """
        text = str(self.processor.tokenizer.pad_token).join(pieces)
        for mark, times in self._marks.items():
            if (found := text.count(mark)) != times * len(images):
                raise RefusedChat(
                    f"messages: {mark} is {found} times in the prompt of {counted(len(images), 'image')}; write it in "
                    "another way in texts, and use a chat template that shows each image"
                )
        ids, features = self._processed(text, images)
        self.check_text(token for token in ids if token != self.placeholder)
        remember(images)
        if shown := self._shown(text, ids, images):
            remember_shown(shown)
        with self._lock:
            self._keep(name_of(images), ids.count(self.placeholder), features)
        name = itertools.cycle(name_of(images))
        return self._cut([next(name) if token == self.placeholder else token for token in ids], pieces)

    def example(self, *, number: int = 1, size: tuple[int, int] = (96, 64), text: str = "a 1") -> list[int]:
        """Token ids of a prompt with drawn images of a width and height, for trials and plans."""
        drawn = io.BytesIO()
        PIL.Image.linear_gradient("L").resize(size).convert("RGB").save(drawn, "PNG")
        image = Image(digest_of(drawn.getvalue()), content=drawn.getvalue())
        parts = [{"type": "image"} for _ in range(number)] + [{"type": "text", "text": text}]
        return self.encode([self._render([{"role": "user", "content": parts}])], [image] * number)[0]

    def drawn(self) -> dict[str, Tensor]:
        """What the model takes of the image of `example`."""
        self._drawn = self._drawn or self.features([self.example()], "cpu")
        return self._drawn

    def check_text(self, ids: Iterable[int]) -> None:
        """Raises RefusedChat: a text has the token of an image or the like."""
        stray = next((token for token in ids if token in self._banned), None)
        if stray is not None:
            token = self.processor.tokenizer.convert_ids_to_tokens(stray)
            raise RefusedChat(f"messages: {token} in a text stands for an image; write it in another way")

    def visible(self, ids: Iterable[int]) -> list[int]:
        """Token ids as the model takes them."""
        return [self.placeholder if token < 0 else token for token in ids]

    def _cut(self, ids: list[int], pieces: Sequence[str]) -> list[list[int]]:
        """The ids of each piece."""
        tokenizer = self.processor.tokenizer
        places = [place for place, token in enumerate(ids) if token == tokenizer.pad_token_id]
        within = [piece.count(tokenizer.pad_token) for piece in pieces]
        if len(places) != sum(within) + len(pieces) - 1:
            raise RefusedChat(f"messages: the turns around images cannot be told apart by {tokenizer.pad_token}")
        cuts = [places[number + sum(within[: number + 1])] for number in range(len(pieces) - 1)]
        return [ids[start + 1 : stop] for start, stop in itertools.pairwise([-1, *cuts, len(ids)])]

    def fits(self, ids: Iterable[int]) -> bool:
        """Whether a prompt, made elsewhere, has as many placeholders as its images have here."""
        return sum(token < 0 for token in ids) == self._made_of(ids)[0]

    # --- what the model takes -----------------------------------------------------------------------------------

    def features(self, prompts: Iterable[Sequence[int]], device: torch.device | str) -> dict[str, Tensor]:
        """The pixels of prompts in their order, as keyword arguments of the model; {} if none has images."""
        found = [self._made_of(ids)[1] for ids in prompts if has_images(ids)]
        if not found:
            return {}
        assert all(one.keys() == found[0].keys() for one in found), "processed images of different kinds"
        return {name: to_device(_joined([features[name] for features in found]), device) for name in found[0]}

    def token_kinds(self, rows: Sequence[Sequence[int]], device: torch.device | str) -> dict[str, Tensor]:
        """Which tokens of rows stand for an image, as the argument that the model takes; {} if it takes none."""
        name = next((name for name in TOKEN_KINDS if name in self._takes), None)
        if name is None or not any(map(has_images, rows)):
            return {}
        return {name: to_device([[int(token < 0) for token in row] for row in rows], device)}

    def kinds_of(self, ids: Tensor) -> dict[str, Tensor]:
        """`token_kinds` of rows of ids as the model takes them."""
        name = next((name for name in TOKEN_KINDS if name in self._takes), None)
        seen = ids == self.placeholder
        return {name: seen.long()} if name is not None and bool(seen.any()) else {}

    def spans(self, ids: Iterable[int], start: int = 0) -> tuple[Span, ...]:
        """Where tokens see each other in a prompt that begins at `start` of a stream; () if images do not."""
        if not self.see_themselves:
            return ()
        spans: list[Span] = []
        for shows, run in itertools.groupby(ids, lambda token: token < 0 or token == self.placeholder):
            length = sum(1 for _ in run)
            spans += [Span(start, length)] if shows else []
            start += length
        return tuple(spans)

    def positions(self, ids: Sequence[int]) -> tuple[list[list[int]], int]:
        """Positions of a prompt's tokens, a row for each axis that differs, and the position of the next token."""
        if self._rope_index is None or not has_images(ids):
            return [list(range(len(ids)))], len(ids)
        grids = {name: value for name, value in self._made_of(ids)[1].items() if name.endswith("grid_thw")}
        kinds = torch.tensor([[int(token < 0) for token in ids]])
        places, delta = self._rope_index(torch.tensor([self.visible(ids)]), mm_token_type_ids=kinds, **grids)
        return places[:, 0].tolist(), len(ids) + int(delta)

    # --- processing ---------------------------------------------------------------------------------------------

    def _shown(self, text: str, ids: list[int], images: Sequence[Image]) -> list[ShownImage]:
        """The tokens of each image in a prompt; [] where they cannot be told from those around.

        Args:
            text: of the prompt.
            ids: what the processor makes of it.
            images: of the prompt.
        """
        written: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        marks = [self.placeholder, *self.processor.tokenizer.convert_tokens_to_ids(list(self._marks))]
        mark = next((mark for mark in marks if written.count(mark) == len(images)), None)
        if mark is None:
            return []
        if len(images) == 1:
            before = written.index(mark)
            end = len(ids) - (len(written) - before - 1)
            found = [_shown_as(images[0], mark, ids[before:end], self.placeholder)]
        else:
            chats = [self._render([{"role": "user", "content": [{"type": "image"}]}]) for _ in images]
            pairs = zip(chats, images, strict=True)
            found = [
                one for chat, image in pairs for one in self._shown(chat, self._processed(chat, [image])[0], [image])
            ]
        if len(found) != len(images):
            return []
        tokens = iter(found)
        again = [inner for token in written for inner in (next(tokens).token_ids if token == mark else (token,))]
        return found if [-1 if token == self.placeholder else token for token in ids] == again else []

    def _made_of(self, ids: Iterable[int]) -> tuple[int, dict[str, Tensor]]:
        images = images_named(ids)
        name = name_of(images)
        with self._lock:
            if name in self._made:
                self._made.move_to_end(name)
                return self._made[name]
        parts = [{"type": "image"} for _ in images]
        written, features = self._processed(self._render([{"role": "user", "content": parts}]), images)
        with self._lock:
            self._keep(name, written.count(self.placeholder), features)
            return self._made[name]

    def _processed(self, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids with placeholders as they are, and what the processor makes of the images."""
        opened = [resized(open_image(image), self.max_pixels) for image in images]
        try:
            made = self.processor(text=[text], images=opened, add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # processors fail in types of their own
            raise RefusedChat(f"messages: the model's processor refuses the images: {first_line(error)}") from error
        features = {name: value for name, value in made.items() if name not in OF_TOKENS}
        ids = made["input_ids"][0].tolist()
        if self.placeholder not in ids:
            raise RefusedChat("messages: the model's processor makes no tokens for the images")
        if strange := [name for name, value in features.items() if value.shape[1:2] == (len(ids),)]:
            raise ConfigError(
                f"--model: {self.folder}: its processor makes {strange[0]}, for tokens; use another model"
            )
        return ids, features

    def _keep(self, name: tuple[int, ...], count: int, features: dict[str, Tensor]) -> None:
        self._made[name] = count, features
        held = sum(value.nbytes for _, one in self._made.values() for value in one.values())
        while held > KEPT_BYTES and len(self._made) > 1:
            _, (_, oldest) = self._made.popitem(last=False)
            held -= sum(value.nbytes for value in oldest.values())

    def _found_mark(self) -> str:
        """What the chat template writes for an image."""
        before, after = "before it", "after it"
        parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
        text = self._render([{"role": "user", "content": parts}])
        _, _, rest = text.partition(before)
        mark, found, _ = rest.partition(after)
        if not found or not mark.strip():
            raise RefusedChat("messages: the chat template shows no images")
        return mark.strip()


def without_chat(processor: Any) -> Callable[[Sequence[Any]], str]:
    """A rendering for a model without a chat template: texts, and the token that its processor replaces by an image."""
    mark = str(getattr(processor, "boi_token", None) or processor.image_token)

    def render(messages: Sequence[Any]) -> str:
        return "".join(part.get("text", mark) for turn in messages for part in turn["content"])

    return render


def vision_of(model: nn.Module) -> Vision | None:
    """What `model` sees images with; None for a language model."""
    return getattr(transformers_model(model), "_swift_vision", None)


def resized(image: PIL.Image.Image, max_pixels: int | None) -> PIL.Image.Image:
    """An image of at most that many pixels, in the same proportions."""
    if max_pixels is None or image.width * image.height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (image.width * image.height))
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def _shown_as(image: Image, mark: int, ids: Iterable[int], placeholder: int) -> ShownImage:
    return ShownImage(image, mark, tuple(-1 if token == placeholder else token for token in ids))


def as_written(ids: Sequence[int], images: Sequence[ShownImage]) -> list[int]:
    """Token ids of a prompt as its chat template wrote it: a mark where the processor put the tokens of an image.

    Raises ValueError: it is not known which tokens those are.
    """
    written: list[int] = []
    done = 0
    for shown in images:
        if not shown.token_ids:
            raise ValueError("the tokens of its images cannot be told from those around them")
        start = next(i for i in range(done, len(ids)) if ids[i] < 0) - shown.token_ids.index(-1)
        written += [*ids[done:start], shown.mark]
        done = start + len(shown.token_ids)
    return [*written, *ids[done:]]


def once_per_image(ids: Sequence[int], placeholder: int) -> list[int]:
    """Token ids of a prompt with one placeholder in place of those of an image, which must not touch another's."""
    runs = itertools.groupby(ids, key=lambda token: token < 0)
    return [token for named, run in runs for token in ([placeholder] if named else run)]


def copy_files(model: Path, folder: Path) -> None:
    """Copy the settings of a model's processor, and voices, to the folder of a checkpoint."""
    for name in (*FILES, SPEAKERS):
        if (file := model / name).is_file():
            shutil.copyfile(file, folder / name)


def image_processor(folder: Path) -> Any:
    """The processor of images in a model's folder, which computes with Pillow."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


def load_processor(folder: Path, config: Any, tokenizer: Any) -> Any:
    """The processor in a model's folder, of texts and images only; Pillow makes images ready, on any machine alike.

    Raises:
        ConfigError: files are missing.
    """
    from transformers import PROCESSOR_MAPPING

    kind = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None:
        raise ConfigError(f"--model: {folder}: transformers has no processor for {config.model_type}; use a text model")

    class TextAndImages(kind):  # type: ignore[misc, valid-type]
        """Without the processors of video and audio, which need other packages."""

        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            parts = {"tokenizer": tokenizer, "image_processor": images}
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None if value is None else super().check_argument_for_proper_class(name, value)

    TextAndImages.__name__ = kind.__name__
    with unusable(f"--model: {folder}: its processor of images cannot be loaded"):
        images = image_processor(folder)
        made = TextAndImages.from_pretrained(folder, local_files_only=True)
    if hasattr(made, "video_processor"):
        made.video_processor = images  # Qwen2.5-Omni's asks it for its merge_size, which is the same
    return made


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other; other axes are filled with zeros to the longest."""
    sizes = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].ndim)]
    padded = []
    for part in parts:
        missing = [size - have for size, have in zip(sizes, part.shape[1:], strict=True)]
        if any(missing):
            widths = [width for size in reversed(missing) for width in (0, size)]
            part = nn.functional.pad(part, widths)
        padded.append(part)
    return torch.cat(padded)
