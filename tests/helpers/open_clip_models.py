"""Small models of OpenCLIP, and the embeddings that OpenCLIP itself computed for them.

`python tests/helpers/open_clip_models.py` writes results/open_clip.json again with the installed OpenCLIP.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_infcl.models import open_clip_inputs as tokenizing
from hf_infcl.models import open_clip_names as towers
from hf_infcl.models import pretrained as folders
from hf_infcl.models.open_clip import load_open_clip
from hf_infcl.models.open_clip_inputs import image_processor

from .pictures import LETTERS, write_folder
from .processors import tokenizer

RESULTS = Path(__file__).parents[1] / "results/open_clip.json"
DIFFERENCES = RESULTS.with_name("open_clip_differences.csv")  # written by tests/open_clip_differences.py
LARGEST = 1e-6  # difference of an entry of two embeddings
TIMM = "vit_small_patch8_siglip_16"  # of no checkpoint: small, for the tests
TOWER = towers.timm_tower(TIMM, (32, 2, 2, 104), patch=8, image=16)
IMAGE = {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "mlp_ratio": 3.28, "patch_size": 8}
TEXT = {"context_length": 8, "vocab_size": 28, "width": 24, "heads": 2, "layers": 2, "hf_tokenizer_name": "."}
CLIP: dict[str, Any] = {"embed_dim": 16, "vision_cfg": IMAGE, "text_cfg": TEXT}
TANH = {"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": {"eps": 1e-3}}
SIGLIP_TEXT = TEXT | TANH | {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
SIGLIP: dict[str, Any] = {
    "embed_dim": 32,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {"image_size": 16, "timm_model_name": TIMM, "timm_pool": "map", "timm_proj": "none"},
    "text_cfg": SIGLIP_TEXT | {"tokenizer_kwargs": {"clean": "canonicalize"}},
}
CASES: dict[str, dict[str, Any]] = {
    "CLIP": CLIP,
    "QuickGELU": CLIP | {"quick_gelu": True},
    "tanh": CLIP | {"vision_cfg": IMAGE | TANH, "text_cfg": TEXT | TANH},
    "custom text": CLIP | {"custom_text": True},
    "end of text": CLIP | {"text_cfg": TEXT | {"pool_type": "eos", "eos_id": 1}},
    "MetaCLIP 2": CLIP | {"text_cfg": TEXT | {"pool_type": "eos", "eos_id": 2}},
    "SigLIP": SIGLIP,
    "SigLIP without a bias": SIGLIP | {"text_cfg": SIGLIP_TEXT | {"proj_bias": False}},
}
# In this, transformers has a parameter more than OpenCLIP.
COMPLETED = {"SigLIP without a bias"}


def config(case: str) -> dict[str, Any]:
    preprocess = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25], "interpolation": "bilinear"}
    if case.startswith("SigLIP"):
        preprocess["resize_mode"] = "squash"
    return copy.deepcopy({"model_cfg": CASES[case], "preprocess_cfg": preprocess})


def recorded() -> dict[str, dict[str, Any]]:
    """Of each case: shapes [..] by name, and normalised embeddings of images [4, D] and texts [4, D]."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def weights(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, with the logarithm of 10 as the scale."""
    random = np.random.default_rng(seed)
    drawn = {name: torch.tensor(random.normal(0, 0.2, shape), dtype=torch.float32) for name, shape in shapes.items()}
    return drawn | {"logit_scale": torch.tensor(10.0).log()}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [4, 3, 16, 16], and ids [4, 8] in which 1, 2 and 27 stand at different positions."""
    random = np.random.default_rng(1)
    ids = torch.tensor(random.integers(3, 27, (4, 8)))
    for row in range(4):
        ids[row, row + 1], ids[row, 7 - row], ids[row, 2 * row] = 1, 2, 27
    ids[2, 2], ids[3, 0] = 1, 2
    return torch.tensor(random.normal(0, 1, (4, 3, 16, 16)), dtype=torch.float32), ids


def tensors(case: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a case."""
    return weights(recorded()[case]["shapes"], seed)


def load_processor(case: str) -> Any:
    """The processor of transformers that belongs to a case, with the tokenizer of one-letter words."""
    images = image_processor(config(case)["preprocess_cfg"], 16)
    kind = transformers.SiglipProcessor if case.startswith("SigLIP") else transformers.CLIPProcessor
    return kind(
        image_processor=images, tokenizer=tokenizing.prepared(tokenizer(), config(case)["model_cfg"]["text_cfg"])
    )


def folder_of(case: str, folder: Path) -> Path:
    """Writes a case into the folder, in OpenCLIP's format."""
    folders.write(folder, tensors(case), config(case), tokenizer())
    return folder


def letter_pairs(folder: Path, rows: int) -> Path:
    """Writes noise of the size of the small models with captions of letters, the splits train and test."""
    captions = [" ".join(np.random.default_rng(row).choice([*LETTERS], 4)) for row in range(rows)]
    for split in ("train", "test"):
        write_folder(folder / split, captions, (16, 16))
    return folder


def of_package(case: str) -> Any:
    """OpenCLIP's own model of a case, untrained."""
    import open_clip

    fields = config(case)["model_cfg"]
    return (open_clip.CustomTextCLIP if fields.pop("custom_text", False) else open_clip.CLIP)(**fields).eval()


def know_the_small_tower(patch: pytest.MonkeyPatch) -> None:
    """Makes the conversion know `TIMM`, and timm itself where it is installed."""
    patch.setitem(towers.TIMM_TOWERS, TIMM, TOWER)
    try:
        from timm.models import _registry, vision_transformer
    except ModuleNotFoundError:
        return

    def build(pretrained: bool = False, **options: Any) -> Any:
        sizes = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 3.28, "img_size": 16}
        of_model = {key: value for key, value in options.items() if key in ("num_classes", "global_pool", "img_size")}
        return vision_transformer.VisionTransformer(class_token=False, **sizes | of_model)

    patch.setitem(_registry._model_entrypoints, TIMM, build)


@torch.no_grad()
def main() -> None:
    record = {}
    with pytest.MonkeyPatch.context() as patch:
        know_the_small_tower(patch)
        for case in CASES:
            model = of_package(case)
            shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
            model.load_state_dict(weights(shapes))
            pixels, ids = inputs()
            both = model.encode_image(pixels, normalize=True), model.encode_text(ids, normalize=True)
            images, texts = ([[round(x, 7) for x in row] for row in rows.tolist()] for rows in both)
            record[case] = {"shapes": shapes, "images": images, "texts": texts}
    RESULTS.write_text("{\n" + ",\n".join(f'"{case}": {json.dumps(r)}' for case, r in record.items()) + "\n}\n")


if __name__ == "__main__":
    main()


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_of_open_clip(folder: Path, model: Any) -> bool:
    """Whether OpenCLIP's files in a folder have the weights of a model, but for positions that no text reaches."""
    seen, processor = load_open_clip(folder)
    expected = model.state_dict()
    positions = "text_model.embeddings.position_embedding.weight"
    expected[positions] = expected[positions][: processor.tokenizer.model_max_length]
    return all(torch.equal(seen.state_dict()[name], tensor) for name, tensor in expected.items())
