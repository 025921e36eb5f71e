"""Layers of `fuse_layers`: the same values and gradients as those of transformers, from fewer tensors that are kept."""

from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.numerics import relative_error
from helpers.processes import on_ranks
from helpers.trainers import trained, trainer_for
from test_model_types import KINDS
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation
from transformers.models.clipseg.modeling_clipseg import CLIPSegDecoderLayer

from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.models.layers import PatchProduct, QuickGELU, RoundedLayerNorm, can_fuse, fuse_layers


def gradients(model: nn.Module, batch: Any, *, autocast: bool = False) -> tuple[list[Tensor], int]:
    """The embeddings and the gradients of their sum of squares, and the bytes that the forward keeps."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    encoder = DualEncoder(model)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            embeds = encoder.embed(model, batch)
        weights = torch.linspace(-1, 1, embeds[0].numel()).view_as(embeds[0])
        (embeds[0].float() * embeds[1].float() * weights).sum().backward()
    return [*embeds, *(p.grad for p in model.parameters() if p.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("kind", ["altclip", "blip", "chinese_clip", "clip", "metaclip_2", "owlvit", "siglip"])
def test_a_fused_model_has_the_same_embeddings_and_gradients(kind):
    torch.manual_seed(0)
    model, batch = KINDS[kind]().eval(), models.batch_for(kind)
    names = list(model.state_dict())
    expected, _ = gradients(model, batch)
    fuse_layers(model)
    fuse_layers(model)
    assert any(isinstance(module, RoundedLayerNorm) for module in model.modules())
    assert list(model.state_dict()) == names
    found, _ = gradients(model, batch)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (32, {"bias": False}),
        (8, {"padding": "valid"}),
        ((4, 8), {"dtype": torch.float64}),
    ],
)
def test_the_product_of_patches_is_the_convolution(size, options):
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 5, size, stride=size, **options)
    images = torch.randn(2, 3, 67, 75, dtype=convolution.weight.dtype).to(memory_format=torch.channels_last)
    results = []
    for _ in range(2):
        output = convolution(images)
        (weight,) = torch.autograd.grad(output.square().sum(), convolution.weight)
        results += [output, weight]
        fuse_layers(convolution)
    assert type(convolution) is PatchProduct
    assert output.flatten(2).transpose(1, 2).is_contiguous(), "as the embeddings of transformers read it"
    for expected, found in zip(results[:2], results[2:], strict=True):
        assert relative_error(found, expected) < 3e-6


@pytest.mark.parametrize("options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 3}, {"kernel_size": 1}])
def test_other_convolutions_stay(options):
    convolution = nn.Conv2d(**{"in_channels": 3, "out_channels": 3, "kernel_size": 2, "stride": 2} | options)
    fuse_layers(convolution)
    assert type(convolution) is nn.Conv2d


def test_a_norm_whose_output_is_added_up_is_not_rounded():
    own = nn.TransformerEncoderLayer(8, 2)
    own.layer_norm1 = own.norm1
    for layer in (own, CLIPSegDecoderLayer(transformers.CLIPSegConfig().vision_config)):
        fuse_layers(layer)
        assert type(layer.layer_norm1) is nn.LayerNorm


def test_under_autocast_it_keeps_less_and_is_as_near_to_fp32():
    torch.manual_seed(0)
    model, batch = models.clip().eval(), models.batch_for("clip")
    config = model.config.text_config
    tokens = batch["input_ids"].numel() + 5 * len(batch["pixel_values"])  # 4 patches and a class token
    exact, _ = gradients(model, batch)
    exact = [one.clone() for one in exact]
    plain, bytes_of_plain = gradients(model, batch, autocast=True)
    errors = [relative_error(torch.cat([t.flatten() for t in plain]), torch.cat([t.flatten() for t in exact]))]
    fuse_layers(model)
    fused, bytes_of_fused = gradients(model, batch, autocast=True)
    errors += [relative_error(torch.cat([t.flatten() for t in fused]), torch.cat([t.flatten() for t in exact]))]
    # Less by a gate, and by two of three copies of what the attention reads, in bf16 and one layer of each tower; and
    # by the weights of the patch embedding, which only a convolution keeps.
    of_patches = model.vision_model.embeddings.patch_embedding.weight.numel()
    of_layers = tokens * (config.intermediate_size + 2 * config.hidden_size)
    assert bytes_of_plain - bytes_of_fused == 2 * (of_layers + of_patches)
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_quick_gelu_of_any_layout(dtype):
    torch.manual_seed(0)
    x = (4 * torch.randn(3, 5, 7)).to(dtype).transpose(0, 2)
    weights = torch.randn(7, 5, 3).to(dtype).transpose(0, 1).reshape(5, 21).reshape(7, 5, 3)
    results = []
    for layer, precision in ((QuickGELUActivation(), torch.float64), (QuickGELU(), dtype)):
        leaf = x.to(precision).requires_grad_()
        y = layer(leaf)
        (y * weights.to(precision)).sum().backward()
        results.append((y, leaf.grad))
    assert results[1][0].dtype == dtype
    for found, expected in zip(*reversed(results), strict=True):
        assert relative_error(found, expected) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("weights", [torch.ones(7), torch.linspace(-1, 2, 7).requires_grad_()])
def test_quick_gelu_has_a_second_derivative(weights):
    """Also where the gradient of its output is a constant, which autograd would not refuse."""
    second = []
    for layer in (QuickGELUActivation(), QuickGELU()):
        x = torch.linspace(-3, 3, 14)[::2].requires_grad_()
        (first,) = torch.autograd.grad((layer(x) * weights).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second)


def test_layers_are_fused_where_triton_runs_and_is_wanted(monkeypatch):
    gpu, capability = torch.device("cuda", 0), [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert can_fuse(gpu)
    assert not can_fuse(gpu, "torch")
    assert not can_fuse(torch.device("cpu"))
    capability[0] = (7, 5)
    assert not can_fuse(gpu)


def test_a_trained_model_can_be_exported_and_traced():
    x = torch.linspace(-3, 3, 7)
    exported = torch.export.export(QuickGELU(), (x,)).module()
    traced = torch.jit.trace(QuickGELU(), x)
    assert "PythonOp" not in str(traced.graph)
    for layer in (exported, traced):
        assert torch.equal(layer(x), QuickGELUActivation()(x))


def test_a_training_on_a_cpu_has_the_layers_of_transformers(tmp_path):
    model = trained(trainer_for(tmp_path, max_steps=1)).model
    assert not any(isinstance(module, (QuickGELU, RoundedLayerNorm)) for module in model.modules())


@pytest.mark.gpu
@on_ranks(1, backend="nccl", timeout=300)
def test_a_training_on_a_gpu_fuses_layers(rank, world_size, tmp_path):
    for compiled in (False, True):
        options = {"max_steps": 1, "use_cpu": False, "bf16": True, "torch_compile": compiled}
        kinds = {type(module) for module in trained(trainer_for(tmp_path, **options)).model.modules()}
        assert kinds >= {PatchProduct, QuickGELU, RoundedLayerNorm}
        assert QuickGELUActivation not in kinds
