"""Images on their way to the model: the costs of a worker and of reading shards.

    python scripts/benchmark.py data

``worker``: a DataLoader worker turns JPEGs of 500 × 375 pixels into a batch of 224 × 224. ``ms`` is its CPU time per
image, including its share of passing on the batch, ``per_second`` 1000 / ms. Quantiles are over rounds in which all
implementations take turns, so that other load affects all of them. OpenCLIP's transforms are those of open_clip_torch
if it can be imported, which needs a torchvision that matches torch; otherwise they are written out with PIL.
``tar``: samples with an image, a text and a JSON file are read from a tar shard. ``ms`` is the CPU time per sample.
"""

import argparse
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from hf_infcl.data import ContrastiveCollator, ImageTextDataset
from hf_infcl.data import images as decoding

from . import common
from .common import Row

COLUMNS = """
    date commit device torch torchvision transformers pillow simplejpeg open_clip_torch part implementation rounds ms
    ms_p10 ms_p90 per_second ratio ratio_to peak_gib note
""".split()
OPEN_CLIP = "OpenCLIP, training"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def run(args: argparse.Namespace) -> Iterator[Row]:
    packages = ("torchvision", "transformers", "pillow", "simplejpeg", "open_clip_torch")
    environment = common.environment(torch.device("cpu"), *packages) | {"device": processor_name()}
    for part in args.parts:
        for row in PARTS[part](args):
            yield environment | {"part": part, "rounds": args.rounds} | row


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"CPU ({names[0]})" if names else "CPU"


def jpegs(count: int, seed: int = 0) -> list[bytes]:
    """Pictures of 500 × 375 pixels with smooth colours and some noise, about 54 kB each at quality 90."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.float32)
        noisy = (smooth + rng.normal(0, 4.7, smooth.shape)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


# ---- The cost of a worker ----


class Timed:
    """A collate function that adds to each batch the CPU time that its worker has used so far."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> tuple[Any, float]:
        return self._collate(items), time.process_time()


class Transformed(Dataset[torch.Tensor]):
    """JPEGs as prepared by OpenCLIP's loader: PIL decodes the file, and a transform creates the tensor."""

    def __init__(self, files: Sequence[bytes], transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self._files, self._transform = files, transform

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._transform(Image.open(io.BytesIO(self._files[row])).convert("RGB"))


def open_clip_transforms() -> tuple[dict[str, Callable[[Image.Image], torch.Tensor]], str]:
    """OpenCLIP's transforms for training and evaluation, and their origin."""
    try:
        from open_clip.transform import image_transform
    except Exception as error:
        note = f"written out with PIL, since open_clip cannot be imported: {type(error).__name__}"
        return {OPEN_CLIP: _random_crop_with_pil, "OpenCLIP, evaluation": _center_crop_with_pil}, note
    return {
        OPEN_CLIP: image_transform(224, is_train=True),
        "OpenCLIP, evaluation": image_transform(224, is_train=False),
    }, "open_clip's own"


def _random_crop_with_pil(picture: Image.Image) -> torch.Tensor:
    from random import Random

    from hf_infcl.data.pairs import _random_box

    top, left, height, width = _random_box(picture.height, picture.width, Random())
    cropped = picture.crop((left, top, left + width, top + height))
    return _to_tensor(cropped.resize((224, 224), Image.Resampling.BICUBIC))


def _center_crop_with_pil(picture: Image.Image) -> torch.Tensor:
    short = min(picture.size)
    size = [int(224 * side / short) for side in picture.size]
    left, top = (round((side - 224) / 2) for side in size)
    return _to_tensor(picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224)))


def _to_tensor(picture: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
    return pixels.sub_(torch.tensor(MEAN)[:, None, None]).div_(torch.tensor(STD)[:, None, None])


def processor(image_processor: Any) -> Any:
    """A CLIPProcessor whose tokenizer knows only single letters, so that texts cost next to nothing."""
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", model_max_length=77)
    return transformers.CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer)


def worker(args: argparse.Namespace) -> Iterator[Row]:
    import datasets
    import transformers

    files = jpegs(args.images)
    rows = datasets.Dataset.from_dict({"image": files, "caption": ["a"] * len(files)})
    ours = ContrastiveCollator(processor(transformers.CLIPImageProcessorPil()), uint8=True)
    transforms, note = open_clip_transforms()
    ways: dict[str, tuple[Any, Any, str]] = {
        name: (Transformed(files, transform), default_collate, note) for name, transform in transforms.items()
    }
    for augmentation in ("none", "crop"):
        dataset = ImageTextDataset(rows, augmentation=augmentation)
        label = "center crop" if augmentation == "none" else "random crop"
        ways[f"hf_infcl, {label}"] = dataset, ours, "decoded by PIL"
        if decoding.simplejpeg is not None:
            ways[f"hf_infcl[fast], {label}"] = dataset, ours, "decoded by simplejpeg"
    times: dict[str, list[float]] = {name: [] for name in ways}
    fast = decoding.simplejpeg
    for _ in range(args.rounds):
        for name, (dataset, collate, note) in ways.items():
            decoding.simplejpeg = None if note == "decoded by PIL" else fast  # the worker is a fork of this process
            times[name].append(seconds_per_image(dataset, collate, args.batch))
    decoding.simplejpeg = fast
    reference = float(np.median(times[OPEN_CLIP]))
    kilobytes = round(float(np.mean([len(file) for file in files])) / 1000)
    for name, (_, _, note) in ways.items():
        row = common.quantiles(times[name])
        row |= {"per_second": round(1000 / row["ms"]), "ratio": round(1000 * reference / row["ms"], 3)}
        row["note"] = f"{note}; {kilobytes} kB an image".removeprefix("; ")
        yield {"implementation": name, "ratio_to": OPEN_CLIP} | row


def seconds_per_image(dataset: Any, collate: Any, batch: int) -> float:
    """The CPU time of one worker per image, from its first batch to its last."""
    loader = DataLoader(dataset, batch, num_workers=1, collate_fn=Timed(collate), drop_last=True)
    stamps = [stamp for _, stamp in loader]
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1) / batch


# ---- Reading shards ----


def write_tar(path: str, files: Sequence[bytes], samples: int) -> None:
    """Writes a shard of samples with .jpg, .txt and .json, whose images repeat."""
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            caption = f"caption {number}".encode()
            parts = {"jpg": files[number % len(files)], "txt": caption, "json": json.dumps({"id": number}).encode()}
            for extension, data in parts.items():
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def tar(args: argparse.Namespace) -> Iterator[Row]:
    from hf_infcl.shards.readers import Columns, TarReader

    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/00000.tar"
        write_tar(url, jpegs(24), 4000)
        reader = TarReader(Columns("image", "caption"), [url])
        times: dict[str, list[float]] = {"hf_infcl": [], "tarfile": []}
        for _ in range(args.rounds):
            began = time.process_time()
            count = sum(len(reader.row(sample)) > 0 for _, _, sample in reader.samples(url))
            times["hf_infcl"].append((time.process_time() - began) / count)
            began = time.process_time()
            with tarfile.open(url) as archive:
                count = sum(len(file.read()) > 0 for member in archive if (file := archive.extractfile(member)))
            times["tarfile"].append((time.process_time() - began) / (count / 3))
    for name, values in times.items():
        row = common.quantiles(values)
        ratio = float(np.median(times["tarfile"]) / np.median(values))
        row |= {"per_second": round(1 / float(np.median(values))), "ratio": round(ratio, 3), "ratio_to": "tarfile"}
        yield {"implementation": name} | row


PARTS = {"worker": worker, "tar": tar}


def plot(table: Path) -> None:
    """Plots the images per second of a core by implementation; smaller images than the others' have no bars."""
    rows = common.newest(table, ("part", "implementation"), lambda row: row["part"] in PARTS)
    if not rows:
        return
    titles = {
        "worker": "JPEG 500 × 375 to 224 × 224, images per second and core",
        "tar": "tar shard, samples per second and core",
    }
    parts = [part for part in titles if any(row["part"] == part for row in rows)]
    figure, axes = common.subplots(len(parts), 1, (8.5, 2.4))
    for (axis,), part in zip(axes, parts, strict=True):
        group = [row for row in rows if row["part"] == part and "pixels" not in row["implementation"]]
        values = {row["implementation"]: float(row["per_second"]) for row in group}
        common.draw_bars(axis, values, {name: f"{value:,.0f}" for name, value in values.items()})
        axis.set(title=titles[part])
    common.save(figure, table.with_suffix(".png"), rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="in which all implementations take turns")
    parser.add_argument("--images", type=int, default=256, help="of a round of the part worker")
    parser.add_argument("--batch", type=int, default=32, help="of the part worker")
