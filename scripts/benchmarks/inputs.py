"""Models and batches for the benchmarks: CLIPs whose random weights are always the same, and random inputs."""

import copy
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from . import common


def tower(width: int, hidden: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    """The config of a tower with this width, and so many ``hidden`` units in its MLPs."""
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, **more}


# ViTs as OpenAI's and OpenCLIP's; tiny is for trying the benchmark out.
MODELS: dict[str, dict[str, Any]] = {
    "vit-b-16": {
        "vision_config": tower(768, 3072, 12, 12, patch_size=16, image_size=224),
        "text_config": tower(512, 2048, 12, 8, max_position_embeddings=77),
        "projection_dim": 512,
    },
    "vit-l-14": {
        "vision_config": tower(1024, 4096, 24, 16, patch_size=14, image_size=224),
        "text_config": tower(768, 3072, 12, 12, max_position_embeddings=77),
        "projection_dim": 768,
    },
    "small": {  # of the corpus in `real_pairs`
        "vision_config": tower(320, 1280, 7, 5, patch_size=8, image_size=64),
        "text_config": tower(320, 1280, 3, 5, vocab_size=8192, eos_token_id=8191, max_position_embeddings=77),
        "projection_dim": 256,
    },
    "tiny": {
        "vision_config": tower(16, 32, 1, 2, patch_size=8, image_size=16),
        "text_config": tower(16, 32, 1, 2, max_position_embeddings=8),
        "projection_dim": 16,
    },
}
MODELS["vit-b-32"] = MODELS["vit-b-16"] | {"vision_config": MODELS["vit-b-16"]["vision_config"] | {"patch_size": 32}}

Batch = dict[str, Tensor]


def sizes_of(name: str, image_size: int | None = None) -> dict[str, Any]:
    """The keyword arguments of the config of a model, for images of its own or of another size.

    Raises:
        SystemExit: the size is no multiple of the model's patches.
    """
    sizes = MODELS[name]
    vision = sizes["vision_config"]
    size, patch = image_size or vision["image_size"], vision["patch_size"]
    if size % patch:
        raise SystemExit(f"--image-size {size} is no multiple of the patches of {name}, which are of {patch} pixels.")
    return sizes | {"vision_config": vision | {"image_size": size}}


def build(name: str, image_size: int | None = None) -> transformers.CLIPModel:
    """A new model whose random weights are the same every time."""
    return copy.deepcopy(_initial(name, image_size))


@functools.cache
def _initial(name: str, image_size: int | None) -> transformers.CLIPModel:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(**sizes_of(name, image_size))
    return transformers.AutoModel.from_config(config, attn_implementation="sdpa")


def make_pool(
    name: str,
    count: int,
    rows: int,
    pixel_dtype: torch.dtype,
    *,
    image_size: int | None = None,
    tokens: int | str | None = None,
) -> list[Batch]:
    """Different micro-batches of random images and captions in host memory, pinned if there is a GPU.

    The captions have the full length of the model, so many tokens, or with "web" 24 in the mean: each batch has one of
    the full length, to which the others are padded.
    """
    config = transformers.CLIPConfig(**sizes_of(name, image_size))
    positions = config.text_config.max_position_embeddings
    size, length = config.vision_config.image_size, tokens if isinstance(tokens, int) else positions
    g = torch.Generator().manual_seed(common.rank())
    last = config.text_config.eos_token_id
    pool = []
    for _ in range(count):
        texts = torch.randint(3, last - 1, (rows, length), generator=g)
        lengths = torch.full((rows,), length)
        if tokens == "web":
            lengths = (length * torch.rand(rows, generator=g) ** 2.5).long().clamp(5, length)
            lengths[0] = length
        places = torch.arange(length)
        texts[places == lengths[:, None] - 1] = last
        texts[places >= lengths[:, None]] = config.text_config.pad_token_id
        mask = (places < lengths[:, None]).long()
        shape = rows, 3, size, size
        if pixel_dtype == torch.uint8:
            images = torch.randint(256, shape, dtype=torch.uint8, generator=g)
        else:
            images = torch.randn(shape, generator=g).to(pixel_dtype)
        batch = {"pixel_values": images, "input_ids": texts, "attention_mask": mask}
        pool.append({k: v.pin_memory() if torch.cuda.is_available() else v for k, v in batch.items()})
    return pool


class Loader:
    """Yields a given number of batches from a pool, over and over.

    With a device, each batch is a separate copy on it, as from a data loader, so a window takes its full memory. With
    ``rows``, a batch has so many images, a multiple or a divisor of what the batches of the pool have; it also has what
    the collator of a training says of it (``more``).
    """

    def __init__(
        self, pool: list[Batch], length: int, device: torch.device | None, rows: int | None = None, **more: bool
    ) -> None:
        own = len(pool[0]["pixel_values"])
        if rows is not None and rows > own:
            count = rows // own
            groups = [[pool[(i + j) % len(pool)] for j in range(count)] for i in range(len(pool))]
            pool = [{name: torch.cat([batch[name] for batch in group]) for name in pool[0]} for group in groups]
            if device is not None and device.type == "cuda":
                pool = [{name: value.pin_memory() for name, value in batch.items()} for batch in pool]
        elif rows is not None and rows < own:
            pool = [{name: value[:rows] for name, value in batch.items()} for batch in pool]
        self._pool, self._length, self._device, self._more = pool, length, device, more

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self._length):
            batch = self._pool[index % len(self._pool)]
            if self._device is not None:
                batch = {name: value.to(self._device, non_blocking=True, copy=True) for name, value in batch.items()}
            yield {**batch, **self._more}  # trainers remove what they have used from the batch


def stored_teacher(sides: Sequence[str]) -> Any:
    """A teacher whose embeddings of these sides are in the batch."""
    return SimpleNamespace(sides=sides, partial=False, width=None, options={}, words="stored")


def collator(*, in_uint8: bool, padded: bool) -> Any:
    """What InfCLTrainer needs of `ContrastiveCollator`, for uint8 images, and for texts of one length."""
    parts: dict[str, Any] = {"text_options": {"padding": "max_length"}} if padded else {}
    if in_uint8:
        parts["normalise"] = lambda pixel_values: pixel_values.float().div_(127.5).sub_(1)
    return SimpleNamespace(**parts)
