"""The workers that load as many images as a GPU trains, for `infcl check`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection

import torch
from transformers import PretrainedConfig

from .planner import Planner

ASSUMED_BATCH = 256  # pairs, where no options name a global batch


def predict_workers(
    config: PretrainedConfig,
    options: argparse.Namespace,
    user_options: Collection[str],
    *,
    batch: int | None,
    rate: float,
    smallest: int,
    side: int,
    cores: int,
) -> tuple[str, list[str]]:
    """A line about the workers that one GPU needs, as `infcl plan` predicts its rate, and the options to add.

    Both are empty for a training on a CPU, whose rate is not predicted.

    Args:
        batch: the global batch of the options; None if they name none.
        rate: the images that a worker reads per second; 0 if none could be decoded.
        smallest: the pixels of the shortest side of all images; 0 if none is known.
        side: the pixels to which they are scaled.
    """
    if options.use_cpu:
        return "", []
    has_h200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    of_plan = {"gpus": 1, "gpu": "h200" if has_h200 else "h100", "gpu_memory": None, "measure": False}
    of_plan["global_batch"] = batch or ASSUMED_BATCH
    try:
        if not rate:
            raise ValueError("No image could be decoded.")
        planner = Planner(argparse.Namespace(**(vars(options) | of_plan)), user_options, config)
    except ValueError as error:
        return f"The workers that a GPU needs were not predicted. {error}", []
    images, to_add = planner.images_per_second, []
    needed = math.ceil(images / rate)
    line = (
        f"Workers: with a global batch of {planner.choice.global_batch:,} pairs"
        f"{', as no options name one,' if batch is None else ''} in micro-batches of "
        f"{planner.choice.per_device_train_batch_size:,}, an {planner.gpu.name} would train about {images:,.0f} images "
        "per second. "
    )
    if needed <= cores:
        keep_up = "One worker like these keeps" if needed == 1 else f"{needed} workers like these keep"
        line += f"{keep_up} up (--dataloader_num_workers); this machine has {cores} cores."
    else:
        line += (
            f"The {cores} cores of this machine read about {cores * rate:,.0f} (--dataloader_num_workers {cores}), so "
            "the data limit the rate."
        )
        to_add += [f"--min_side {2 * side}"] if smallest >= 4 * side else []
    if options.dataloader_num_workers < min(needed, cores):
        to_add.append(f"--dataloader_num_workers {min(needed, cores)}")
    return line, to_add
