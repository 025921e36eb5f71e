"""A zero-shot evaluation beside the forward that it cannot do without: images per second, and what bf16 changes.

    python scripts/benchmark.py evaluation
    python scripts/benchmark.py evaluation --model vit-b-16 --images 50000 --workers 14

``forward``: the image tower over batches that lie on the device, and nothing else. ``evaluate, pool``: `InfCLTrainer`
evaluates a `ZeroShotDataset` whose images are decoded arrays in host memory. ``evaluate, jpeg``: the workers decode
JPEGs of 500 × 375 pixels. ``per_second`` are images per second of the whole evaluation, with its prompts (--classes ×
--templates), workers and metrics. ``start_s`` is the time of an evaluation of a single batch, and ``loop_per_second``
the rate of the images after it, with their share of the intervals. ``ratio`` is that rate relative to ``forward``.
``error`` is the largest difference of a cosine between bf16 and fp32, for random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers.pre_tokenizers import Whitespace

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.data import ContrastiveCollator, ZeroShotDataset
from hf_infcl.data import images as decoding

from . import common, data, inputs
from .common import RESULTS, Row

COLUMNS = (
    *("date", "commit", "device", "torch", "transformers", "model", "dtype", "images", "batch", "classes", "templates"),
    *("implementation", "per_second", "loop_per_second", "ratio", "start_s", "peak_gib", "error", "note"),
)


class Images(ZeroShotDataset):
    """Labelled images from a small pool, which are decoded where they are encoded."""

    def __init__(self, pool: list[Any], length: int, classes: int, templates: int) -> None:
        self.pool, self._length = pool, length
        self.class_names = [f"class {number}" for number in range(classes)]
        self.templates = [f"picture {number} of a {{}}" for number in range(templates)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.pool[index % len(self.pool)]
        image = decoding.decode_rgb(image) if isinstance(image, bytes) else image
        return {"image": image, "label": index % len(self.class_names)}


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = common.environment(device, "transformers") | {"model": args.model, "batch": args.batch}
    row |= {"images": args.images, "classes": args.classes, "templates": args.templates}
    for found in measured(args, device):
        common.append(args.output, COLUMNS, row | found)


def measured(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Rows of the forward and of the evaluations, for each dtype."""
    side = inputs.MODELS[args.model]["vision_config"]["image_size"]
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = data.processor(images)
    processor.tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()  # a token for each word of a prompt
    collator = ContrastiveCollator(processor, uint8=True)
    files = data.jpegs(256)
    cropped = images([decoding.decode_rgb(file) for file in files], do_rescale=False, do_normalize=False)
    arrays = [array.transpose(1, 2, 0).astype(np.uint8) for array in cropped["pixel_values"]]
    pools = {"pool": arrays, "jpeg": files}
    model = inputs.build(args.model).to(device).eval()
    pixels = torch.rand(args.batch, 3, side, side, device=device)
    exact = embeddings(model, pixels[:64], "fp32")
    for dtype in args.dtypes:
        error = float((embeddings(model, pixels[:64], dtype) @ exact.T - exact @ exact.T).abs().max())
        forward = images_per_second(model, pixels, dtype, args.images)
        yield {"implementation": "forward", "dtype": dtype, "per_second": round(forward, 1), "ratio": 1, "error": error}
        for name, pool in pools.items():
            row = evaluated(args, model, collator, pool, dtype)
            ratio = round(row["loop_per_second"] / forward, 3)
            yield {"implementation": f"evaluate, {name}", "dtype": dtype, "ratio": ratio} | row


def embeddings(model: Any, pixels: torch.Tensor, dtype: str) -> torch.Tensor:
    with torch.no_grad(), torch.autocast(pixels.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return F.normalize(model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)


def images_per_second(model: Any, pixels: torch.Tensor, dtype: str, images: int) -> float:
    for _ in range(3):
        embeddings(model, pixels, dtype)
    began, batches = now(pixels.device), max(2, images // len(pixels))
    for _ in range(batches):
        embeddings(model, pixels, dtype)
    return batches * len(pixels) / (now(pixels.device) - began)


def evaluated(args: argparse.Namespace, model: Any, collator: Any, pool: list[Any], dtype: str) -> Row:
    """The columns of an evaluation, after a short one that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = InfCLTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=args.batch,
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype == "bf16",
            dataloader_num_workers=args.workers,
            dataloader_prefetch_factor=4 if args.workers else None,
            report_to="none",
            disable_tqdm=True,
        )
        device = arguments.device
        trainer = InfCLTrainer(model, arguments, collator)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.evaluate(Images(pool, 4 * args.batch, 4, 2))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for images in (args.batch, args.images):
            began = now(device)
            trainer.evaluate(Images(pool, images, args.classes, args.templates))
            seconds.append(now(device) - began)
        rate = args.images / seconds[1]
    loop = (args.images - args.batch) / (seconds[1] - seconds[0])
    found: Row = {"per_second": round(rate, 1), "loop_per_second": round(loop, 1), "start_s": round(seconds[0], 2)}
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / common.GIB, 2)
    return found | {"note": f"{args.workers} workers"}


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="vit-b-16", choices=inputs.MODELS)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--templates", type=int, default=80)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--output", type=Path, default=RESULTS / "evaluation.csv", help="appended to")
