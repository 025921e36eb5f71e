"""The workers that load as many images as a GPU trains, for `infcl check`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection

from transformers import PretrainedConfig

from ...shards.values import counted
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

    Both are empty for a training on a CPU, whose rate is not predicted, and if no image could be decoded.

    Args:
        batch: the global batch of the options; None if they name none.
        rate: the images that a worker reads per second.
        smallest: the pixels of the shortest side of all images; 0 if none is known.
        side: the pixels to which they are scaled.
    """
    if options.use_cpu or not rate:
        return "", []
    of_plan = {"gpus": 1, "gpu": "h100", "gpu_memory": None, "measure": False, "global_batch": batch or ASSUMED_BATCH}
    try:
        planner = Planner(argparse.Namespace(**(vars(options) | of_plan)), user_options, config)
    except ValueError as error:
        return f"The workers that a GPU needs were not predicted. {error}", []
    images = planner.images_per_second
    needed = math.ceil(images / rate)
    enough, to_add = min(needed, cores), []
    found = f"{counted(needed, 'worker')} like these can read them; this machine has {cores} cores."
    if needed > cores:
        found = f"The {cores} cores of this machine read about {cores * rate:,.0f}, so the data limit the rate."
        to_add += [f"--min_side {2 * side}"] if smallest >= 4 * side else []
    if options.dataloader_num_workers < enough:
        to_add.append(f"--dataloader_num_workers {enough}")
    return (
        f"Workers: with a global batch of {planner.choice.global_batch:,} pairs, an {planner.gpu.name} would train "
        f"about {images:,.0f} images per second. {found}"
    ), to_add
