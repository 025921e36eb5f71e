"""A zero-shot evaluation beside the forward that it cannot do without: images per second, and what bf16 changes.

    python scripts/benchmark.py evaluation
    python scripts/benchmark.py evaluation --model vit-b-16 --images 50000 --workers 14

``forward``: only the image tower over batches on the device. ``workers, jpeg``: only the workers, which decode JPEGs of
500 × 375 pixels. ``evaluate``: `InfCLTrainer` evaluates a `ZeroShotDataset` of these, or of decoded arrays (``pool``).

``per_second`` are images per second of the whole evaluation, with its prompts (--classes × --templates), workers and
metrics. ``start_s`` is the time until the first batch is encoded, and ``loop_per_second`` the rate from then until the
last one is. ``ratio`` is that rate relative to ``forward``: of ``pool`` it is what the main process allows; of ``jpeg``
it is higher than the workers' rate for few images, as up to four batches for each worker load within ``start_s``. The
note has the seconds for the prompts while no worker loads, those after the last batch, and those in which blocks of
pinned memory were allocated. ``error`` is the largest difference of a cosine between bf16 and fp32, for random weights.
In rows before 2026-11-26, ``start_s`` is that of an evaluation of one batch, and ``loop_per_second`` counts the rest.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.data import ContrastiveCollator, ZeroShotDataset
from hf_infcl.data import images as decoding
from hf_infcl.models.layers import can_fuse, fuse_layers
from hf_infcl.trainer.evaluating import class_vectors

from . import common, data, inputs
from .common import Row, now

COLUMNS = """
    date commit device torch transformers model dtype images batch classes templates implementation per_second
    loop_per_second ratio start_s peak_gib error note
""".split()


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


def run(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = common.environment(device, "transformers") | {"model": args.model, "batch": args.batch}
    row |= {"images": args.images, "classes": args.classes, "templates": args.templates}
    for found in measured(args, device):
        yield row | found


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
    pools = {"jpeg": files, "pool": arrays}
    note = f"{args.workers} workers, decoded by {'PIL' if decoding.simplejpeg is None else 'simplejpeg'}"
    loaded = {"per_second": round(loaded_per_second(args, collator, files), 1), "note": note}
    yield {"implementation": "workers, jpeg"} | loaded
    model = inputs.build(args.model).to(device).eval()
    fuse_layers(model, wanted=can_fuse(device))  # as the trainer does
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


def loaded_per_second(args: argparse.Namespace, collator: Any, pool: list[Any]) -> float:
    """The images per second that the workers load after the first batch, as long as nothing else happens."""
    images = Images(pool, args.images, args.classes, args.templates)
    options: dict[str, Any] = {"prefetch_factor": 4} if args.workers else {}
    batches = iter(DataLoader(images, args.batch, num_workers=args.workers, collate_fn=collator, **options))
    next(batches)
    began = time.perf_counter()
    return sum(len(batch["labels"]) for batch in batches) / (time.perf_counter() - began)


class Ends(transformers.TrainerCallback):
    """Waits until the first and until the last batch of an evaluation are encoded, and notes these times."""

    def __init__(self, batches: int) -> None:
        self._batches, self._done = batches, 0
        self.times: list[float] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done += 1
        self.times += [now(args.device) for end in (1, self._batches) if self._done == end]


def evaluated(args: argparse.Namespace, model: Any, collator: Any, pool: list[Any], dtype: str) -> Row:
    """The columns of an evaluation, after a short one that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dataloader_num_workers": args.workers, "bf16": dtype == "bf16", "report_to": "none"}
        options |= {"dataloader_prefetch_factor": 4 if args.workers else None, "disable_tqdm": True}
        options |= {"per_device_eval_batch_size": args.batch, "use_cpu": not torch.cuda.is_available()}
        arguments = InfCLTrainingArguments(output_dir=folder, **options)
        device = arguments.device
        trainer = InfCLTrainer(model, arguments, collator)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.evaluate(Images(pool, 4 * args.batch, 4, 2))
        images, began = Images(pool, args.images, args.classes, args.templates), now(device)
        class_vectors(images, trainer.context, None)
        prompts = now(device) - began
        ends = Ends(-(-args.images // args.batch))
        trainer.add_callback(ends)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        allocated, began = pinned_blocks(), now(device)
        trainer.evaluate(images)
        first, last, end = (time - began for time in (*ends.times, now(device)))
    found: Row = {"per_second": round(args.images / end, 1), "start_s": round(first, 2)}
    found["loop_per_second"] = round((args.images - args.batch) / (last - first), 1)
    found["note"] = f"{args.workers} workers; {prompts:.2f} s for the prompts alone"
    found["note"] += f"; {end - last:.2f} s after the last batch"
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / common.GIB, 2)
        blocks, seconds = (after - before for before, after in zip(allocated, pinned_blocks(), strict=True))
        found["note"] += f"; {seconds:.2f} s to allocate {blocks:.0f} blocks of pinned memory"
    return found


def pinned_blocks() -> tuple[float, float]:
    """The blocks of pinned memory that this process has allocated so far, and the seconds that this took."""
    found = torch.cuda.host_memory_stats() if torch.cuda.is_available() else {}
    return found.get("num_host_alloc", 0), found.get("host_alloc_time.total", 0) / 1e6  # from microseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="vit-b-16", choices=inputs.MODELS)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--templates", type=int, default=80)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
