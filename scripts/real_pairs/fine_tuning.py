"""The fine-tunings of the experiments: a base trained on emoji, fine-tunings on clip art, and averages of both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_infcl.checkpoints.averages import interpolated

from .training import SETS, Row, Run, measure, new_model, train

EMOJI = ("openmoji", "fluent flat", "fluent modern", "twemoji")
CLIP_ART = ("openclipart", "tuxpaint")
AVERAGES = (0.25, 0.5, 0.75)  # of a fine-tuning's start and its end


def fine_tune(
    run: Run, data: dict, origin: Row, weights: Path, *, toy: bool = False, compiled: bool = False
) -> list[Row]:
    """Trains a base on the emoji's vendors, or fine-tunes it on clip art in the run's way; returns what was measured.

    What is gained is measured on clip art, what is kept on emoji.

    Args:
        weights: the file of the base's weights, which its training writes and its fine-tunings read.
        run, data, origin, toy, compiled: as for `train`; only the base is compiled.
    """
    data = {**data, "sets": sets_of_clip_art(data["sets"])}
    if run.way == "base":
        sources = run.sources.split(",") if run.sources else EMOJI
        rows, model = train(run, data, origin, sources=sources, toy=toy, compiled=compiled)
        torch.save(model.state_dict(), weights)
        return [row for row in rows if row["finished"]]
    model = new_model(data, run.seed, run.objective, toy=toy)
    model.load_state_dict(torch.load(weights, weights_only=True))
    tuned: Any = model
    start = copy.deepcopy(model.state_dict())
    if run.way == "LoRA":
        import peft

        rank = 16
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        tuned = peft.get_peft_model(model, config)
        tuned.base_model.model.logit_scale.requires_grad_(True)
    elif run.way == "locked image tower":
        tuned.vision_model.requires_grad_(False)
        tuned.visual_projection.requires_grad_(False)
    rows, tuned = train(run, data, origin, model=tuned, sources=CLIP_ART, toy=toy)
    (row,) = [row for row in rows if row["finished"]]
    return [row, *_averages(row, start, tuned.merge_and_unload() if run.way == "LoRA" else tuned, data)]


def _averages(row: Row, start: dict[str, Tensor], tuned: Any, data: dict) -> Iterator[Row]:
    """The row of a fine-tuning with what averages of its start and its end measure."""
    end = copy.deepcopy(tuned.state_dict())
    for alpha in AVERAGES:
        tuned.load_state_dict(interpolated(start, end, alpha))
        found = {**measure(tuned, data, SETS), "logit_scale": round(tuned.logit_scale.exp().item(), 4)}
        yield {**row, **found, "path": "line", "alpha": alpha}


def sets_of_clip_art(sets: dict) -> dict:
    """The sets of held-out concepts, of clip art in place of all; those of emoji are the guard."""
    found = dict(sets)
    for name in ("validation", "concepts"):
        values = dict(sets[name])
        chosen, swaps = values["clip_art"], values.pop("swaps")
        of_chosen = chosen[swaps["image"]]
        found[name] = {key: value[chosen] for key, value in values.items()}
        places = chosen.cumsum(0) - 1
        found[name]["swaps"] = {key: value[of_chosen] for key, value in swaps.items()}
        found[name]["swaps"]["image"] = places[swaps["image"][of_chosen]]
    return found
