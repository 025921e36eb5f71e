"""The files by which sentence-transformers loads a dual encoder of transformers, and encodes to its embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin

MODULES, MODULE_CONFIG = "modules.json", "sentence_bert_config.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
SENTENCE_FILES = (MODULES, SENTENCE_CONFIG, MODULE_CONFIG)


def write_sentence_files(
    folder: str | Path,
    model_type: str,
    processor: ProcessorMixin,
    *,
    max_length: int,
    padding: str,
    matryoshka_dims: Sequence[int] | None = None,
) -> None:
    """Writes three small files beside a model and its processor, which transformers does not read.

    Without them, sentence-transformers does not normalise the embeddings, and pads the captions of SigLIP, whose
    embeddings depend on the padding, to the longest of a batch.

    Args:
        model_type: of the model's config.
        processor: has an `image_processor` and a `tokenizer`.
        max_length: tokens per caption.
        padding: "max_length" if all captions are padded to it, "longest" if to the longest of a batch.
        matryoshka_dims: where the embeddings may be cut; the values for ``SentenceTransformer(..., truncate_dim=...)``.
    """
    tokenizer, images = processor.tokenizer, processor.image_processor
    # Releases before 5.4 have only this module for images, and no place for options.
    legacy = model_type == "clip" and tokenizer.model_max_length <= max_length
    modules = ("CLIPModel" if legacy else "Transformer", "Normalize")
    text = {
        "padding": padding if padding == "max_length" else True,
        "max_length": max_length,
        "truncation": True,
        "return_attention_mask": "attention_mask" in tokenizer.model_input_names,
    }
    # The processor of SigLIP 2 for variable patches passes its own values to its image processor.
    image = {name: getattr(images, name) for name in ("patch_size", "max_num_patches") if hasattr(images, name)}
    package = "sentence_transformers.models"
    output = {"method_output_name": "pooler_output"}
    kinds = {kind: {"method": f"get_{kind}_features", **output} for kind in ("text", "image")}
    contents: dict[str, Any] = {
        MODULES: [
            {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"{package}.{name}"}
            for n, name in enumerate(modules)
        ],
        MODULE_CONFIG: {
            "transformer_task": "feature-extraction",
            "modality_config": kinds,
            "module_output_name": "sentence_embedding",
            "processing_kwargs": {"text": text, "image": image} if image else {"text": text},
        },
        SENTENCE_CONFIG: {"similarity_fn_name": "cosine", "prompts": {}},
    }
    if matryoshka_dims:
        contents[SENTENCE_CONFIG]["matryoshka_dims"] = list(matryoshka_dims)
    for name, content in contents.items():
        Path(folder, name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
