"""Which tensors of OpenCLIP's models are which tensors of transformers' models: one table for both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..shards.values import counted

KINDS = ("weight", "bias")
# What each library calls the parts of a block of its transformers.
BLOCK = (
    ("ln_1", "layer_norm1"),
    ("attn.out_proj", "self_attn.out_proj"),
    ("ln_2", "layer_norm2"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)
TIMM_BLOCK = (
    ("norm1", "layer_norm1"),
    ("attn.proj", "self_attn.out_proj"),
    ("norm2", "layer_norm2"),
    ("mlp.fc1", "mlp.fc1"),
    ("mlp.fc2", "mlp.fc2"),
)

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _unchanged(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _transposed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.T for tensor in tensors]


@dataclass(frozen=True)
class Row:
    """Tensors of OpenCLIP's model that are, after a change of shape, tensors of transformers' model."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Change = _unchanged
    to_theirs: Change = _unchanged


def to_transformers(rows: Sequence[Row], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under transformers' names.

    Raises:
        ValueError: a tensor is missing, or one is left over.
    """
    return _renamed([(row.theirs, row.ours, row.to_ours) for row in rows], tensors)


def to_open_clip(rows: Sequence[Row], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under OpenCLIP's names; raises as `to_transformers`."""
    return _renamed([(row.ours, row.theirs, row.to_theirs) for row in rows], tensors)


def _renamed(
    changes: Sequence[tuple[tuple[str, ...], tuple[str, ...], Change]], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    known = {name for sources, _, _ in changes for name in sources}
    _refuse("lacks tensors that its config implies", known - tensors.keys())
    _refuse("has tensors that its config does not imply", tensors.keys() - known)
    renamed: dict[str, Tensor] = {}
    for sources, targets, change in changes:
        # Copies, because files of safetensors must not hold two views of one storage.
        changed = [
            tensor.clone(memory_format=torch.contiguous_format) for tensor in change([tensors[s] for s in sources])
        ]
        renamed |= zip(targets, changed, strict=True)
    return renamed


def _refuse(what: str, names: set[str]) -> None:
    if names:
        some = ", ".join(sorted(names)[:5]) + (f" and {counted(len(names) - 5, 'other')}" if len(names) > 5 else "")
        raise ValueError(
            f"The checkpoint {what}: {some}. The config is of another architecture, or the weights are incomplete; "
            "take both from one place."
        )


def scalar(name: str, shape: tuple[int, ...]) -> Row:
    """A scale or a bias, which is of shape [] in OpenCLIP and of ``shape`` in transformers."""
    return Row((name,), (name,), lambda tensors: [tensors[0].reshape(shape)], lambda tensors: [tensors[0].reshape(())])


def _layer(theirs: str, ours: str) -> Iterator[Row]:
    """A layer with weight and bias."""
    return (Row((f"{theirs}.{kind}",), (f"{ours}.{kind}",)) for kind in KINDS)


def _block(theirs: str, ours: str, parts: Sequence[tuple[str, str]], joined: str) -> Iterator[Row]:
    """A block of a transformer, in which OpenCLIP has one matrix for queries, keys and values, in this order."""
    for their, our in parts:
        yield from _layer(f"{theirs}.{their}", f"{ours}.{our}")
    for kind in KINDS:
        yield Row(
            (f"{theirs}.{joined}{kind}",),
            tuple(f"{ours}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            lambda tensors: tensors[0].chunk(3),
            lambda tensors: [torch.cat(list(tensors))],
        )


def _native(theirs: str, ours: str, layers: int) -> Iterator[Row]:
    for i in range(layers):
        blocks = f"{theirs}transformer.resblocks.{i}", f"{ours}.encoder.layers.{i}"
        yield from _block(*blocks, BLOCK, "attn.in_proj_")


def _text(prefix: str, layers: int) -> Iterator[Row]:
    embeddings = "text_model.embeddings"
    yield Row((f"{prefix}token_embedding.weight",), (f"{embeddings}.token_embedding.weight",))
    yield Row((f"{prefix}positional_embedding",), (f"{embeddings}.position_embedding.weight",))
    yield from _native(prefix, "text_model", layers)
    yield from _layer(f"{prefix}ln_final", "text_model.final_layer_norm")


def clip_rows(prefix: str, text_layers: int, image_layers: int) -> list[Row]:
    """The tensors of CLIP, in OpenCLIP with a prefix of the text tower: "", or "text." in a model with custom_text."""
    embeddings = "vision_model.embeddings"
    projections = (("visual.proj", "visual_projection"), (f"{prefix}text_projection", "text_projection"))
    return [
        *_text(prefix, text_layers),
        Row(("visual.class_embedding",), (f"{embeddings}.class_embedding",)),
        Row(("visual.conv1.weight",), (f"{embeddings}.patch_embedding.weight",)),
        Row(("visual.positional_embedding",), (f"{embeddings}.position_embedding.weight",)),
        *_layer("visual.ln_pre", "vision_model.pre_layrnorm"),  # transformers' spelling
        *_native("visual.", "vision_model", image_layers),
        *_layer("visual.ln_post", "vision_model.post_layernorm"),
        *(Row((theirs,), (f"{ours}.weight",), _transposed, _transposed) for theirs, ours in projections),
        scalar("logit_scale", ()),
    ]


def siglip_rows(text_layers: int, image_layers: int) -> list[Row]:
    """The tensors of SigLIP, whose image tower in OpenCLIP is one of timm."""
    trunk, head = "visual.trunk", "vision_model.head"
    rows = [
        *_text("text.", text_layers),
        *_layer("text.text_projection", "text_model.head"),
        *_layer(f"{trunk}.patch_embed.proj", "vision_model.embeddings.patch_embedding"),
        Row(
            (f"{trunk}.pos_embed",),
            ("vision_model.embeddings.position_embedding.weight",),
            lambda tensors: [tensors[0].squeeze(0)],
            lambda tensors: [tensors[0].unsqueeze(0)],
        ),
    ]
    for i in range(image_layers):
        rows += _block(f"{trunk}.blocks.{i}", f"vision_model.encoder.layers.{i}", TIMM_BLOCK, "attn.qkv.")
    pool = f"{trunk}.attn_pool"
    rows += [
        *_layer(f"{trunk}.norm", "vision_model.post_layernorm"),
        Row((f"{pool}.latent",), (f"{head}.probe",)),
        *_layer(f"{pool}.proj", f"{head}.attention.out_proj"),
        *_layer(f"{pool}.norm", f"{head}.layernorm"),
        *_layer(f"{pool}.mlp.fc1", f"{head}.mlp.fc1"),
        *_layer(f"{pool}.mlp.fc2", f"{head}.mlp.fc2"),
        scalar("logit_scale", (1,)),
        scalar("logit_bias", (1,)),
    ]
    for kind in KINDS:  # queries of one matrix, keys and values of another; transformers has them in one
        rows.append(
            Row(
                (f"{pool}.q.{kind}", f"{pool}.kv.{kind}"),
                (f"{head}.attention.in_proj_{kind}",),
                lambda tensors: [torch.cat(list(tensors))],
                lambda tensors: tensors[0].split([len(tensors[0]) // 3, len(tensors[0]) // 3 * 2]),
            )
        )
    return rows
