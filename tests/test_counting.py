"""The counted operations of a model are those that torch counts while the model trains."""

from typing import Any

import pytest
import torch
from helpers import models
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_infcl.models.counting import PEAKS, count_operations, count_window, peak_of
from hf_infcl.models.dual_encoder import NO_TEXTS, DualEncoder
from hf_infcl.models.layers import fuse_layers

ROWS = 4


def counted_while_trained(encoder: DualEncoder, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The operations of forward and backward, without the matrix of all pairs that a whole forward computes."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        embeds = encoder.embed(encoder.model, batch)
        forward = counter.get_total_flops()
        sum(one.sum() for one in embeds if one.requires_grad).backward()
    return forward - 2 * ROWS**2 * embeds[0].shape[1], counter.get_total_flops() - forward


@pytest.mark.parametrize("kind", models.BUILD)
def test_towers_are_counted_as_the_whole_model(kind):
    encoder, batch = DualEncoder(models.BUILD[kind]().train()), models.batch_for(kind, ROWS)
    encoder.freeze(None)
    state = torch.get_rng_state()
    towers = count_operations(encoder, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in encoder.model.parameters())
    forward, backward = counted_while_trained(encoder, batch)
    assert sum(of_forward for of_forward, _ in towers) == forward
    assert sum(of_backward for _, of_backward in towers) == backward


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: encoder.model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda encoder: fuse_layers(encoder.model),
        lambda encoder: encoder.model.to("meta"),
        lambda encoder: encoder.model.to(torch.bfloat16),
    ],
    ids=["checkpointing", "fused layers", "meta device", "bf16"],
)
def test_what_changes_no_product_changes_no_count(change):
    model: Any = models.clip(dropout=0.1)
    encoder, batch = DualEncoder(model.train()), models.batch_for("clip", ROWS)
    plain = count_operations(encoder, batch)
    change(encoder)
    assert count_operations(encoder, batch) == plain


def test_a_frozen_tower_has_no_backward():
    encoder, batch = DualEncoder(models.clip()), models.batch_for("clip", ROWS)
    plain = count_operations(encoder, batch)
    encoder.freeze("image")
    images, texts = count_operations(encoder, batch)
    assert images == (plain[0][0], 0)
    assert texts == plain[1]
    encoder.model.enable_input_require_grads()  # as reentrant checkpointing and peft do
    assert count_operations(encoder, batch) == [images, texts]


def test_micro_batches_of_a_window_add_up():
    """Their images are in uint8 until they are on the device; one of them has no texts of its own."""
    encoder, batch = DualEncoder(models.clip()), models.batch_for("clip", ROWS)
    images, texts = map(sum, count_operations(encoder, batch))
    raw = batch | {"pixel_values": torch.zeros(batch["pixel_values"].shape, dtype=torch.uint8), "new_images": 3}
    assert count_window(encoder, [raw, raw, raw | {NO_TEXTS: True}]) == 3 * images + 2 * texts


def test_a_model_that_needs_the_content_of_tensors_is_told():
    class Model(models.Own):
        def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return super().get_image_features(pixel_values[pixel_values.sum((1, 2, 3)) > 0])

    with pytest.raises(ValueError, match=r"The operations of a Model cannot be counted: .*Exception"):
        count_operations(DualEncoder(Model()), models.batch_for("clip", ROWS))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_of_a_chip(name, peak):
    assert peak_of(name) == peak


def test_a_later_row_of_the_table_is_hidden_by_none_before_it():
    assert [peak_of(part) for part, _ in PEAKS] == [peak * 1e12 for _, peak in PEAKS]
