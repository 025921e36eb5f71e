"""`ContrastiveLoss` is called like OpenCLIP's losses, and its gradient under DDP is that of the whole batch."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.numerics import features, relative_error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_infcl import ContrastiveLoss
from hf_infcl.loss import reference

WORLD_SIZE, ROWS = 2, 12


class OpenClipLike(nn.Module):
    """Returns what OpenCLIP's models return in training."""

    def __init__(self, objective: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.images, self.texts = nn.Linear(16, 8), nn.Linear(16, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0)) if objective == "sigmoid" else None

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        outputs = {
            "image_features": F.normalize(self.images(images), dim=-1),
            "text_features": F.normalize(self.texts(texts), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }
        return outputs if self.logit_bias is None else {**outputs, "logit_bias": self.logit_bias}


def step(loss: Any, objective: str, rank: int, world_size: int) -> tuple[float, dict[str, Tensor]]:
    """The lines of OpenCLIP's `train_one_epoch` under DDP."""
    model = OpenClipLike(objective)
    images, texts = (part.chunk(world_size)[rank] for part in features(ROWS, 16))
    ddp = DistributedDataParallel(model)
    model_out = ddp(images, texts)
    losses = loss(**model_out, output_dict=True)
    total_loss = sum(losses.values())
    losses["loss"] = total_loss
    total_loss.backward()
    return losses["contrastive_loss"].item(), {name: p.grad for name, p in model.named_parameters()}


def whole_batch(objective: str) -> tuple[float, dict[str, Tensor]]:
    model = OpenClipLike(objective)
    outputs = model(*features(ROWS, 16))
    loss = reference.contrastive_loss(*outputs.values(), objective=objective)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def rank_step(rank: int, world_size: int, objective: str) -> tuple[float, dict[str, Tensor]]:
    return step(ContrastiveLoss(objective), objective, rank, world_size)


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_in_openclip_s_loop_it_gives_the_gradient_of_the_whole_batch(ranks, objective):
    loss, gradients = whole_batch(objective)
    for seen_loss, seen in ranks.run(rank_step, WORLD_SIZE, objective):
        assert seen_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert relative_error(seen[name], gradient) < 1e-5, name


def test_the_call():
    images, texts = features(6, 8)
    loss = ContrastiveLoss("sigmoid", backend="torch")
    value = loss(images, texts, 10.0, -5.0)
    torch.testing.assert_close(value, reference.contrastive_loss(images, texts, 10.0, -5.0, objective="sigmoid"))
    assert loss(images, texts, logit_scale=10.0, logit_bias=-5.0, output_dict=True) == {"contrastive_loss": value}
    with pytest.raises(ValueError, match="objective must be one of"):
        ContrastiveLoss("hinge")(images, texts, 10.0)


# ---- Compared with the originals, if open_clip_torch is installed ----


def originals() -> Any:
    """OpenCLIP's module of losses, imported alone because the package itself needs torchvision."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        pytest.skip("compares with OpenCLIP's own code, so open_clip_torch has to be installed")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).with_name("loss.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_originals(rank: int, world_size: int) -> dict[str, Any]:
    module = originals()
    here = {"rank": rank, "world_size": world_size}
    flags = {"": {}, "local": {"local_loss": True}, "gather": {"gather_with_grad": True}}
    flags["local gather"] = {**flags["local"], **flags["gather"]}
    seen = {name: step(module.ClipLoss(**here, **given), "softmax", rank, world_size) for name, given in flags.items()}
    for exchange in ("bidir", "shift", "reduce", "gather"):
        loss = module.SigLipLoss(**here, dist_impl=exchange)
        seen[f"siglip {exchange}"] = step(loss, "sigmoid", rank, world_size)
    return seen


def test_openclip_s_own_losses_give_the_gradients_that_the_guide_says(fresh_ranks):
    """The table of hf_infcl/loss/README.md. Processes are new, since `torch.distributed.nn` keeps its first group."""
    module = originals()
    for original in (module.ClipLoss, module.SigLipLoss):
        theirs = inspect.signature(original.forward).parameters
        ours = inspect.signature(ContrastiveLoss.forward).parameters
        assert list(theirs) == list(ours)
    by_rank = fresh_ranks.run(rank_originals, WORLD_SIZE)
    for name in by_rank[0]:
        loss, truth = whole_batch("sigmoid" if "siglip" in name else "softmax")
        per_rank = [results[name][0] for results in by_rank]
        assert sum(per_rank) / WORLD_SIZE == pytest.approx(loss, rel=1e-5)
        assert (per_rank[0] == pytest.approx(loss, rel=1e-5)) == (name in ("", "gather")), name
        for parameter, gradient in truth.items():
            seen = by_rank[0][name][1][parameter]
            if name == "" and parameter.startswith(("images", "texts")):
                assert relative_error(seen, gradient / WORLD_SIZE) < 1e-5
            elif name == "local" and parameter.startswith(("images", "texts")):
                cosine = F.cosine_similarity(seen.flatten(), gradient.flatten(), dim=0)
                assert cosine < 0.999, "another direction"
            else:
                assert relative_error(seen, gradient) < 1e-5, (name, parameter)
