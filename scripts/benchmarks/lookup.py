"""The look-up of a teacher's stored embeddings, beside what a worker does with an image.

    python scripts/benchmark.py lookup --rows 10000000

writes a file of so many embeddings of 768 dimensions in fp16 (15 GB for 10 million), which images and captions share,
and looks up those of pairs at random, as a worker does for a batch of 32. ``ms`` is the CPU time per pair, of its image
and its caption. ``ratio`` is its share of that of an image in a worker, a JPEG of 500 × 375 pixels that is cropped at
random. "first" are look-ups that read from the disk, "again" those of the same pairs from the page cache, as in a later
epoch of a table that fits into memory. The note has the wall time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers

from hf_infcl.data import ContrastiveCollator, ImageTextDataset
from hf_infcl.data.store import Store, hashed, of_caption
from hf_infcl.loading.sources import ROWS_OF_PART

from . import common
from .common import RESULTS, Row
from .data import COLUMNS, jpegs, processor, processor_name, seconds_per_image

WIDTH, BATCH = 768, 32
CAPTION = "a photograph of two people who walk along a beach at sunset"


def run(args: argparse.Namespace) -> None:
    environment = common.environment(torch.device("cpu"), "torchvision", "transformers", "pillow", "simplejpeg")
    environment |= {"device": processor_name(), "part": "lookup", "rounds": args.rounds}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in rows(args, Path(folder)):
            common.append(args.output, COLUMNS, environment | row)


def rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    table = datasets.Dataset.from_dict({"image": jpegs(args.images), "caption": ["a"] * args.images})
    collator = ContrastiveCollator(processor(transformers.CLIPImageProcessorPil()), uint8=True)
    cropped = ImageTextDataset(table, augmentation="crop")
    image = common.quantiles([seconds_per_image(cropped, collator, BATCH) for _ in range(args.rounds)])
    yield {"implementation": "hf_infcl, random crop", "note": "decoded by PIL", **image}
    drawn = np.random.default_rng(0)
    keys = [str(row) for row in drawn.permutation(args.rows)[: args.pairs * args.rounds]]
    parts = write(folder, args.rows, keys)
    times: dict[str, list[tuple[float, float]]] = {"first": [], "again": []}
    for first in range(0, len(keys), args.pairs):
        stored = {kind: Store(folder, kind, parts) for kind in ("images", "texts")}  # as a worker maps the files
        for found in times.values():
            found.append(seconds_per_pair(stored, keys[first : first + args.pairs]))
    for name, found in times.items():
        cpu, wall = (common.quantiles([one[place] for one in found]) for place in (0, 1))
        words = {"implementation": f"{args.rows:,} stored embeddings, {name}", "ratio_to": "hf_infcl, random crop"}
        yield words | cpu | {"ratio": round(cpu["ms"] / image["ms"], 4), "note": f"{wall['ms']:.3f} ms of wall time"}


def seconds_per_pair(stored: Mapping[str, Store], keys: Sequence[str]) -> tuple[float, float]:
    """The CPU and the wall time of the look-ups, for each pair."""
    captions = [of_caption(key, CAPTION) for key in keys]
    began = time.process_time(), time.perf_counter()
    for first in range(0, len(keys), BATCH):
        for kind, wanted in (("images", keys), ("texts", captions)):
            _, known = stored[kind].find(wanted[first : first + BATCH])
            assert known.all()
    return (time.process_time() - began[0]) / len(keys), (time.perf_counter() - began[1]) / len(keys)


def write(folder: Path, count: int, keys: Sequence[str]) -> int:
    """Embeddings of so many rows, among them those of the keys, none of which is in the page cache; their parts."""
    drawn = np.random.default_rng(1)
    sizes = [min(ROWS_OF_PART, count - first) for first in range(0, count, ROWS_OF_PART)]
    every = drawn.standard_normal((ROWS_OF_PART, WIDTH)).astype(np.float16)
    places = [(part << 32) + np.arange(size, dtype=np.uint64) for part, size in enumerate(sizes)]
    for kind, known in (("images", keys), ("texts", [of_caption(key, CAPTION) for key in keys])):
        hashes = drawn.integers(0, 2**64, count, dtype=np.uint64)
        hashes[: len(keys)] = hashed(known)
        index = np.stack((np.sort(hashes), drawn.permutation(np.concatenate(places))))
        np.save(folder / f"{kind}.index.npy", index)
        for part, size in enumerate(sizes):
            name = f"-{part:05}-of-{len(sizes):05}.npy"
            if kind == "texts":  # the same values, at other places
                os.link(folder / f"images{name}", folder / f"{kind}{name}")
            else:
                np.save(folder / f"{kind}{name}", every[:size])
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return len(sizes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=10_000_000, help="whose embeddings are stored")
    parser.add_argument("--pairs", type=int, default=4096, help="that are looked up in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=256, help="of a round, to compare with")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    parser.add_argument("--output", type=Path, default=RESULTS / "data.csv", help="appended to")
