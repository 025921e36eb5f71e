"""How much converted models differ from OpenCLIP's own: every config of the package that transformers has as well.

`python tests/open_clip_differences.py` writes results/open_clip_differences.csv again, in a quarter of an hour. Weights
are random. Towers have one layer, and tables of tokens 1,000 rows, unless the config is of OpenAI's CLIP.
"""

import csv
from typing import Any

import pytest
import torch
from helpers import open_clip_package
from helpers.open_clip_models import DIFFERENCES, load_processor
from tqdm import tqdm

from hf_infcl.models import open_clip as comparison
from hf_infcl.models import open_clip_names as towers
from hf_infcl.models import pretrained as folders
from hf_infcl.models.open_clip import from_open_clip, to_open_clip
from hf_infcl.models.open_clip_inputs import image_processor
from hf_infcl.models.open_clip_names import transformers_config

LAYERS, SEEDS, ROWS = 1, 2, 1000


def small_config(name: str) -> dict[str, Any] | None:
    """The config with fewer layers and tokens; None if transformers has no such model."""
    fields = folders.named_config(name)["model_cfg"]
    try:
        transformers_config(fields)
    except ValueError:
        return None
    fields["text_cfg"]["layers"] = LAYERS
    if fields["text_cfg"].get("hf_tokenizer_name"):
        fields["text_cfg"]["vocab_size"] = ROWS
    if "timm_model_name" not in fields["vision_cfg"]:
        fields["vision_cfg"]["layers"] = LAYERS
    return {"model_cfg": fields}


def know_short_towers(patch: pytest.MonkeyPatch) -> None:
    """Makes timm and the conversion build SigLIP's image towers with fewer layers."""
    from timm.models import _registry

    for name, tower in list(towers.TIMM_TOWERS.items()):
        build = _registry._model_entrypoints[name]
        patch.setitem(towers.TIMM_TOWERS, name, tower | {"num_hidden_layers": LAYERS})
        patch.setitem(
            _registry._model_entrypoints, name, lambda build=build, **options: build(**{**options, "depth": LAYERS})
        )


def drawn(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Random values of every parameter of a model of either library."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    weights = {name: torch.randn(tensor.shape, generator=generator) * 0.05 for name, tensor in state.items()}
    return weights | {"logit_scale": torch.full_like(state["logit_scale"], 2.3)}


def rows_of(open_clip: Any, name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    fields = {key: value for key, value in config["model_cfg"].items() if key != "custom_text"}
    custom = config["model_cfg"].get("custom_text")
    size = transformers_config(config).vision_config.image_size
    processor = load_processor("SigLIP" if "SigLIP" in name else "CLIP")
    processor.image_processor = image_processor({"resize_mode": "squash" if "SigLIP" in name else "shortest"}, size)
    for seed in range(SEEDS):
        theirs = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**fields)
        weights = drawn(theirs, seed)
        model, _ = from_open_clip(weights, config)
        to_ours = comparison.differences(model, weights, config)
        model.load_state_dict(drawn(model, seed + SEEDS), strict=False)
        to_theirs = comparison.differences(model, *to_open_clip(model, processor))
        for direction, (cosine, largest) in (("to transformers", to_ours), ("to OpenCLIP", to_theirs)):
            row = {"config": name, "class": type(model).__name__, "direction": direction, "seed": seed}
            rows.append(row | {"cosine": f"{cosine:.7f}", "largest": f"{largest:.1e}"})
    return rows


def main() -> None:
    open_clip = open_clip_package.imported()
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        know_short_towers(patch)
        for name in ("normal_", "trunc_normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"):
            patch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)  # `drawn` replaces the values
        for name in tqdm(open_clip.list_models()):
            if (config := small_config(name)) is not None:
                rows += rows_of(open_clip, name, config)
    with DIFFERENCES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
