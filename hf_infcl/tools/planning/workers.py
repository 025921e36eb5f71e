"""The workers that load as many images as a GPU trains, for `infcl check`."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from .planner import Planner

ASSUMED_BATCH = 256  # pairs, where no options name a global batch


class Images(NamedTuple):
    """The images of a training set, as far as they were read."""

    rate: float  # per second and worker; 0 if none could be decoded
    smallest: int  # pixels of the shortest side of all; 0 if none is known
    side: int  # pixels to which they are scaled


def predict_workers(
    config: PretrainedConfig,
    options: argparse.Namespace,
    user_options: Collection[str],
    batch: int | None,
    images: Images,
    cores: int,
) -> tuple[str, list[str]]:
    """A line about the workers that one GPU needs, as `infcl plan` predicts its rate, and the options to add.

    ``batch`` is the global batch of the options; None if they name none. ``cores`` are those of this machine.
    """
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    assumed = ", as no options name one," if batch is None else ""
    of_plan = {"gpus": 1, "gpu": "h200" if "h200" in name else "h100", "gpu_memory": None, "measure": False}
    of_plan |= {"global_batch": batch or ASSUMED_BATCH, "use_cpu": False}
    try:
        planner = Planner(argparse.Namespace(**(vars(options) | of_plan)), user_options, config)
    except ValueError as error:
        return f"The workers that a GPU needs were not predicted. {error}", []
    if not images.rate:
        return "The workers that a GPU needs were not predicted, because no image could be decoded.", []
    choice, rate = planner.choice, planner.images_per_second
    needed, to_add = math.ceil(rate / images.rate), []
    line = (
        f"Workers: with a global batch of {choice.global_batch:,} pairs{assumed} in micro-batches of "
        f"{choice.per_device_train_batch_size:,}, an {planner.gpu.name} would train about {rate:,.0f} images per "
        "second. "
    )
    if needed > cores:
        line += (
            f"The {cores} cores of this machine read about {cores * images.rate:,.0f} "
            f"(--dataloader_num_workers {cores}), so the data limit the rate."
        )
        if importlib.util.find_spec("simplejpeg") is None:
            line += " `pip install simplejpeg` decodes JPEGs faster."
        if images.smallest >= 4 * images.side:
            to_add.append(f"--min_side {2 * images.side}")
    else:
        keep_up = "One worker like these keeps" if needed == 1 else f"{needed} workers like these keep"
        line += f"{keep_up} up (--dataloader_num_workers); this machine has {cores} cores."
    if options.dataloader_num_workers < min(needed, cores):
        to_add.append(f"--dataloader_num_workers {min(needed, cores)}")
    return line, to_add
