"""Unusable images, captions, ids, processors, checkpoints, arguments and folders are refused with the reason.

Unusual but usable input trains like any other.
"""

import contextlib
import itertools
import json
import math
import os
import struct
import sys
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import models
from helpers.pictures import file_of
from helpers.processors import LENGTH, clip_processor
from helpers.shards import write_tar
from helpers.trainers import arguments, trained, trainer_for
from PIL import Image

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.data import ContrastiveCollator, ImageTextDataset, ImageTextStream
from hf_infcl.data.images import read_encoded
from hf_infcl.data.pairs import as_pair_id
from hf_infcl.data.transforms import ImageTransform
from hf_infcl.models.dual_encoder import DualEncoder

RED, GREEN = (255, 0, 0), (0, 255, 0)


def png(width: int, height: int, depth: int, pixels: bytes) -> bytes:
    """An RGB PNG with a size or depth that PIL cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def red(mode: str = "RGB", size: tuple[int, int] = (4, 4)) -> Image.Image:
    return Image.new("RGB", size, RED).convert(mode)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))

# Bytes that are refused, and the reason.
BAD_IMAGES = {
    "empty": (b"", "its 0 bytes are not an image of a known format"),
    "not an image": (b"<html>404</html>", "its 16 bytes are not an image of a known format"),
    "no width": (png(0, 5, 8, b""), "its 65 bytes are not an image of a known format"),
    "truncated PNG": (file_of(NOISE)[:5000], "image file is truncated"),
    "truncated JPEG": (file_of(NOISE, "JPEG")[:1000], "image file is truncated"),
    "20,000 pixels a side": (png(20_000, 20_000, 8, b""), "400000000 pixels.* exceeds limit"),
    "without its pixels": (png(9_000, 9_000, 8, b""), "image file is truncated"),
    "floating point": (file_of(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "floating point .* not known"),
}
# Bytes of images whose first pixel, at least, is red.
GOOD_IMAGES = {
    "one pixel": file_of(red(size=(1, 1))),
    "CMYK": file_of(red("CMYK"), "TIFF"),
    "palette": file_of(red("P")),
    "alpha": file_of(red("RGBA")),
    "16 bits": png(1, 1, 16, b"\0" + struct.pack(">3H", 0xFFFF, 0, 0xFF)),
    "animated GIF": file_of(red(), "GIF", save_all=True, append_images=[Image.new("RGB", (4, 4), GREEN)]),
    "animated WebP": file_of(
        red(), "WEBP", lossless=True, save_all=True, append_images=[Image.new("RGB", (4, 4), GREEN)]
    ),
    "broken EXIF data": file_of(red(), exif=b"Exif\0\0junk"),
    "a column": file_of(red(size=(1, 20_000))),
    "a row": file_of(red(size=(20_000, 1))),
}


def rows(images: Any, captions: Any = None, **columns: Any) -> Dataset:
    images = list(images)
    return Dataset.from_dict({"image": images, "caption": captions or ["a"] * len(images), **columns})


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_with_its_row_and_skipped_if_asked(kind):
    content, reason = BAD_IMAGES[kind]
    dataset = rows([GOOD_IMAGES["one pixel"], content])
    with pytest.raises(ValueError, match=f"Row 1 of the dataset .* is bad: column 'image': .*{reason}"):
        ImageTextDataset(dataset)[1]
    replaced = ImageTextDataset(dataset, on_bad_sample="skip")[1]
    assert replaced["skipped"] > 0
    assert tuple(replaced["image"][0, 0]) == RED


def test_a_bad_image_is_named_by_its_file_and_its_row_of_the_whole_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a chair.png").write_bytes(b"no image")
    dataset = ImageTextDataset(rows([str(tmp_path / "a chair.png"), "missing.png", str(tmp_path / "missing.png")]))
    with pytest.raises(ValueError, match=f"column 'image': '{tmp_path}/a chair.png': UnidentifiedImageError: its 8"):
        dataset[0]
    with pytest.raises(ValueError, match=r"'missing.png': FileNotFoundError: No such file or directory in the working"):
        dataset[1]
    with pytest.raises(ValueError, match=f"'{tmp_path}/missing.png': FileNotFoundError: No such file or directory. R"):
        dataset[2]
    part = ImageTextDataset(rows([str(tmp_path / "a chair.png")]))
    part.whole, part.numbers = dataset, np.array([7])
    with pytest.raises(ValueError, match="Row 7 of the dataset"):
        part[0]
    secret = ImageTextDataset(rows(["https://me:key@127.0.0.1:9/chair.png?token=key"]))
    with pytest.raises(ValueError, match=r"'https://\*\*\*@127.0.0.1:9/chair.png\?\*\*\*': ") as told:
        secret[0]
    assert "key" not in str(told.value)


def test_a_file_that_is_missing_belongs_to_the_fingerprint(tmp_path):
    dataset = ImageTextDataset(rows([str(tmp_path / "chair.png")]))
    before = dataset.image_fingerprint()
    assert before == dataset.image_fingerprint()
    (tmp_path / "chair.png").write_bytes(GOOD_IMAGES["one pixel"])
    assert before != dataset.image_fingerprint()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", GOOD_IMAGES)
def test_an_unusual_image_is_used(kind):
    item = ImageTextDataset(rows([GOOD_IMAGES[kind]]))[0]
    assert tuple(item["image"][0, 0]) == RED
    batch = ContrastiveCollator(clip_processor(), uint8=True)([item])
    assert batch["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_or_device_in_place_of_an_image_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(OSError, match=f"{path} is not a regular file"):
            read_encoded({"bytes": None, "path": path})


def test_a_strip_is_not_resized_as_a_whole(monkeypatch):
    strip = np.repeat(np.arange(20_000) % 251, 3).reshape(1, 20_000, 3).astype(np.uint8)
    transform = ImageTransform.of(clip_processor().image_processor)
    assert transform is not None
    resize, sizes = torch.nn.functional.interpolate, []
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *args, **options: sizes.append(args[1]) or resize(*args, **options)
    )
    middle = strip[:, 10_000 - 20 : 10_000 + 20]
    difference = transform(strip).int() - transform(np.ascontiguousarray(middle)).int()
    assert difference.abs().max() <= 1
    assert sizes == [(16, 16 * 64), (16, 16 * 40)], "as a whole it would be (16, 16 * 20_000)"


# ---- Captions and ids ----


@pytest.mark.parametrize("caption", [None, "", " \t\n", "\x00\x01\x1b", "\u200f\u202e\ufeff", "\ud83d"], ids=repr)
def test_a_caption_that_shows_nothing_is_refused(caption):
    dataset = ImageTextDataset(rows([GOOD_IMAGES["one pixel"]] * 2, ["a", "b"]))
    dataset.table = [{"image": {"bytes": GOOD_IMAGES["one pixel"]}, "caption": caption}]  # Arrow has no surrogates
    with pytest.raises(
        ValueError, match=r"Row 0 .* is bad: it has no caption in column 'caption'.*, or pass on_bad_sample=\"skip\""
    ):
        dataset[0]


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("a " * 2**19, [2] * (LENGTH - 1) + [1]),  # a megabyte
        ("a\x00b", [2, 0, 3, 1]),
        ("كلب في الحديقة", [0, 0, 0, 1]),
        ("\u202ea b", [0, 2, 3, 1]),
        ("🐕", [0, 1]),
    ],
    ids=["megabyte", "control character", "right to left", "mark of direction", "emoji"],
)
def test_an_unusual_caption_is_used(caption, tokens):
    item = ImageTextDataset(rows([GOOD_IMAGES["one pixel"]], [caption]))[0]
    assert ContrastiveCollator(clip_processor())([item])["input_ids"].tolist() == [tokens]


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_pair_id_that_overflows_is_refused(value):
    with pytest.raises(ValueError, match=f"the pair id {value} does not fit into 64 bits"):
        as_pair_id(value)


@pytest.mark.parametrize("value", [0.5, True, [1], {"id": 1}])
def test_a_pair_id_of_another_type_is_refused(value):
    with pytest.raises(ValueError, match=r"the pair id .* is neither an integer nor a string"):
        as_pair_id(value)


@pytest.mark.parametrize("caption", [{"a": 1}, 5, math.nan, ["a", ["b"]], [1.0] * 100])
def test_a_caption_of_another_type_is_refused(tmp_path, caption):
    good, bad = (json.dumps({"caption": text}).encode() for text in ("a", caption))
    files = [("0.png", file_of(red())), ("0.json", good), ("1.png", file_of(red())), ("1.json", bad)]
    stream = ImageTextStream(str(write_tar(tmp_path / "0.tar", files)), shuffle_buffer=1)
    with pytest.raises(ValueError, match=r"Sample '1' .* is bad: the caption .{1,90} is neither a string nor a list"):
        list(itertools.islice(stream, 2))


# ---- Components that do not match ----

DATA = rows([file_of(red())] * 8)


def processor_with_added_tokens() -> Any:
    processor = clip_processor()
    processor.tokenizer.add_tokens([f"token{number}" for number in range(models.VOCABULARY)])
    assert len(processor.tokenizer) > models.VOCABULARY
    return processor


@pytest.mark.parametrize("collator", ["default", "own", "of a stream"])
def test_a_token_without_an_embedding_is_refused(tmp_path, collator):
    """In trainings and evaluations. A tokenizer that never produces its last tokens is accepted."""
    processor = processor_with_added_tokens()
    options: dict[str, Any] = {"processing_class": processor}
    if collator == "own":
        own = ContrastiveCollator(processor)
        options = {"data_collator": lambda items: own(items)}

    def table(caption: str) -> ImageTextDataset:
        return ImageTextDataset(rows([file_of(red())] * 8, [caption] * 8))

    def data(caption: str) -> Any:
        if collator != "of a stream":
            return table(caption)
        files = [
            (f"{n}{kind}", content)
            for n in range(8)
            for kind, content in ((".png", file_of(red())), (".txt", caption.encode()))
        ]
        return ImageTextStream(str(write_tar(tmp_path / f"{caption}.tar", files)))

    message = (
        r"returns the token 78, but the model has 64 token embeddings, from 0 to 63\. .*"
        r"text_model\.resize_token_embeddings"
    )
    known = trained(InfCLTrainer(models.clip(), arguments(tmp_path), train_dataset=data("token3 a"), **options))
    unknown = InfCLTrainer(models.clip(), arguments(tmp_path), train_dataset=data("token50 a"), **options)
    with pytest.raises(ValueError, match=message):
        unknown.train()
    with pytest.raises(ValueError, match=message):
        known.evaluate(table("token50 a"))
    unknown.model.text_model.resize_token_embeddings(len(processor.tokenizer))
    unknown.train()


def test_images_of_another_size_are_refused(tmp_path):
    large = clip_processor()
    large.image_processor.size, large.image_processor.crop_size = {"shortest_edge": 32}, {"height": 32, "width": 32}
    message = r"batch have 32 × 32 pixels, and the model takes 16 × 16\. Load processor and model from one checkpoint"
    for model in (models.clip(), models.siglip()):
        trainer = InfCLTrainer(model, arguments(tmp_path), train_dataset=ImageTextDataset(DATA), processing_class=large)
        with pytest.raises(ValueError, match=message):
            trainer.train()
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(ImageTextDataset(DATA))
    of_any_size = {"align", "clipseg", "siglip2", "tipsv2", "dinov2"}
    for kind, build in {**models.BUILD, "dinov2": models.vision_text_dinov2}.items():
        batch = models.batch_for("clip" if kind == "dinov2" else kind)
        if kind != "siglip2":
            side = batch["pixel_values"].shape[-1] // 2 if kind == "align" else 32
            batch["pixel_values"] = torch.zeros(5, 3, side, side)
        with contextlib.nullcontext() if kind in of_any_size else pytest.raises(ValueError, match=message):
            DualEncoder(build()).encode_images(batch)


# ---- Arguments and folders ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a whole number of at least 1, got 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be a whole number of at least 1, got 0"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers must be a whole number of at least 0, got -1"),
        ({"ddp_timeout": 0}, "ddp_timeout must be a number of at least 1, got 0"),
        ({"skip_nonfinite": -1}, "skip_nonfinite must be a whole number of at least 0, got -1"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number of at least 0, got nan"),
        ({"learning_rate": -1e-3}, "learning_rate must be a finite number of at least 0, got -0.001"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number of at least 0, got -0.1"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be a number of at least 0 and less than 1, got 1.0"),
        ({"max_grad_norm": math.nan}, r"max_grad_norm must be a number of at least 0 \(0 disables clipping\), got nan"),
        ({"logging_steps": -1}, "logging_steps must be more than 0 with logging_strategy='steps', got -1"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha=5 is not supported: it adds noise"),
        ({"max_steps": -1, "num_train_epochs": 0}, "otherwise nothing is trained, got 0 and -1"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps must be more than 0 with save_strategy='steps'"),
        ({"eval_strategy": "steps", "eval_steps": 0}, "eval_steps must be more than 0 with eval_strategy='steps'"),
        ({"bf16": True, "fp16": True}, "At most one of fp16 and bf16 can be True"),
        # What a training would count without an end.
        ({"global_batch_size": 10**30}, "global_batch_size must be less than 1,099,511,627,776, .* got 1,000,000,0"),
        ({"max_steps": 2**40}, "max_steps must be less than 1,099,511,627,776, which no training counts up to, got"),
        ({"max_steps": 0}, "max_steps must be more than 0, or -1 to train num_train_epochs, got 0"),
        ({"max_grad_norm": None}, r"max_grad_norm must be a number of at least 0 \(0 disables clipping\), got None"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a finite number of at least 0, got '1e-3'"),
        (
            {"gradient_accumulation_steps": 2.0},
            "gradient_accumulation_steps must be a whole number of at least 1, got 2.0",
        ),
        ({"save_total_limit": 0}, "save_total_limit must be a whole number of at least 1, got 0"),
        ({"warmup_steps": math.nan}, "warmup_steps must be a finite number of at least 0, got nan"),
        # Options that would not do what they say.
        ({"dataloader_in_order": False}, "dataloader_in_order=False is not supported: evaluations would lose rows"),
        ({"prediction_loss_only": True}, "prediction_loss_only=True"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object=True"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported: it leaves the model's weights in bf16"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True is not supported: Liger has no kernels for dual encoders"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True is not supported: it would train rows of an epoch again"),
        ({"include_for_metrics": ["inputs", "loss"]}, "include_for_metrics may have 'inputs' only, got 'loss'"),
        (
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            "eval_strategy=no exclude .*: it saves after eval",
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            "type=constant exclude .*: it has no warm-up",
        ),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}},
            "{'a': 1} and .* exclude each other: it takes none",
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "checkpointing_kwargs=.* has no effect without"),
        (
            {"optim_target_modules": "all-linear"},
            "optim=adamw_torch_fused exclude each other: only GaLore",
        ),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "changes the weights in every"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_meant_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


@pytest.mark.parametrize(
    ("steps", "world_size", "message"),
    [
        (1, 1, "texts_at_once=4 and gradient_accumulation_steps=1 exclude each other: a step has no texts of"),
        (1, 3, "texts_at_once=4 and gradient_accumulation_steps=1 exclude each other: a step has no texts of"),
        (2, 1, None),
        (2, 3, "texts_at_once=4 and gradient_accumulation_steps=2 exclude each other: with several processes the last"),
        (3, 3, None),
    ],
)
def test_texts_at_once_needs_micro_batches_whose_texts_it_can_put_together(tmp_path, steps, world_size, message):
    with (
        mock.patch.object(InfCLTrainingArguments, "world_size", world_size),
        pytest.raises(ValueError, match=message) if message else contextlib.nullcontext(),
    ):
        arguments(tmp_path, gradient_accumulation_steps=steps, texts_at_once=4)


def test_features_of_a_tower_that_trains_cannot_be_cached(tmp_path):
    trainer = trainer_for(tmp_path, data=ImageTextDataset(DATA), cache_features=str(tmp_path / "_features"))
    with pytest.raises(ValueError, match="cache_features"):
        trainer.train()


# Root can write to folders without write permission, but nobody can write to /proc.
PROC = pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc")


@PROC
def test_a_folder_for_features_that_cannot_be_written_is_refused(tmp_path):
    options = {"cache_features": "/proc/self", "freeze": "image"}
    trainer = trainer_for(tmp_path, data=ImageTextDataset(DATA), **options)
    with pytest.raises(ValueError, match=r"Nothing can be written to cache_features /proc/self/\w+: "):
        trainer.train()


@pytest.mark.parametrize(
    "folder", [pytest.param("/proc/no-such-folder", marks=PROC), pytest.param("/proc/self", marks=PROC), "file"]
)
def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path, folder):
    if folder == "file":
        (tmp_path / "file").write_text("a file of this name")
        folder = str(tmp_path / "file")
    with pytest.raises(ValueError, match=f"Nothing can be written to output_dir {folder}"):
        trainer_for(folder)
