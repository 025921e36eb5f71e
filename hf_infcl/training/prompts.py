"""The vectors of the classes of a zero-shot evaluation, from their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import evaluation
from ..data import ContrastiveCollator, ZeroShotDataset
from ..encoders.sharding import failures_announced_unless_sharded
from ..processes.batches import gather_rows
from ..processes.collectives import Processes
from ..refusals import check_tokens
from ..windows.setup import Context
from ..windows.texts import widened

MOST_PROMPTS = 8  # the most batches of prompts that are encoded at once

Tokenize = Callable[[list[str]], dict[str, Tensor]]


def class_vectors(dataset: ZeroShotDataset, context: Context, processing_class: object) -> Tensor:
    """A vector [C, D] fp32 for each class, on every process; collective.

    Args:
        context: its data collator tokenizes the prompts if it has a method ``tokenize``.
        processing_class: the processor, which tokenizes them otherwise.

    Raises:
        ValueError: neither of them has a tokenizer, or a token has no embedding.
    """
    tokenize, (prompts, places) = _tokenizer(context, processing_class), evaluation.distinct(dataset.prompts())
    size = context.args.per_device_eval_batch_size
    with failures_announced_unless_sharded(context.accelerator):
        padding = context.collator.text_padding if isinstance(context.collator, ContrastiveCollator) else None
        batches_at_once = 1
        if padding is not None:
            # A forward of few tokens takes as long as its kernels take to be launched, so one has as many prompts as
            # have the tokens of a batch of the longest captions.
            longest = tokenize([max(prompts, key=len)])
            if longest.keys() <= padding.keys():  # a tokenizer of one's own may return what cannot be padded
                width = longest["input_ids"].shape[1]
                batches_at_once = min(MOST_PROMPTS, max(1, context.collator.max_length // width))

        def encode(part: list[str]) -> Tensor:
            # A few at a time, because Python's garbage collector would go through long lists again and again.
            batches = [tokenize(part[start : start + size]) for start in range(0, len(part), size)]
            return _encoded(batches[0] if len(batches) == 1 else _joined(batches, padding or {}), context)

        share = encode_share(prompts, encode, size * batches_at_once)
    texts = gather_rows(share)[places]
    return evaluation.zero_shot_classifier(texts, num_templates=len(dataset.templates))


def _tokenizer(context: Context, processing_class: Any) -> Tokenize:
    if callable(tokenize := getattr(context.collator, "tokenize", None)):
        return tokenize
    if hasattr(processing_class, "tokenizer"):
        config = getattr(context.encoder.model, "config", None)
        return ContrastiveCollator.for_model(processing_class, config).tokenize
    raise ValueError(
        "Zero-shot evaluation must tokenize the prompts of the classes, but the data collator, a "
        f"{type(context.collator).__name__}, has no method tokenize(texts), and the processing_class, a "
        f"{type(processing_class).__name__}, has no tokenizer. Pass "
        "processing_class=AutoProcessor.from_pretrained(...), in addition to any data_collator."
    )


def encode_share(prompts: list[str], encode: Callable[[list[str]], Tensor], batch_size: int) -> Tensor:
    """This rank's share of the embeddings of all prompts; every rank has the same number of rows.

    All ranks encode equally often, because under FSDP a forward communicates. The shares follow the order of the ranks,
    and the last prompt is repeated to fill the last shares. The first ``len(prompts)`` rows of the gathered shares are
    therefore the embeddings of all prompts in their order.
    """
    processes = Processes()
    size = -(-len(prompts) // processes.world_size)
    filled = prompts + prompts[-1:] * (size * processes.world_size - len(prompts))
    share = filled[processes.rank * size : (processes.rank + 1) * size]
    return torch.cat([encode(share[start : start + batch_size]) for start in range(0, size, batch_size)])


def _joined(batches: list[dict[str, Tensor]], padding: Mapping[str, int]) -> dict[str, Tensor]:
    """Tokens of several batches as one, padded to the longest of their texts."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    return {name: torch.cat([widened(batch[name], longest, padding[name]) for batch in batches]) for name in batches[0]}


def _encoded(tokens: dict[str, Tensor], context: Context) -> Tensor:
    """The embeddings [n, D] fp32 of n texts, on the device."""
    check_tokens(tokens["input_ids"], context.encoder.vocabulary)  # on the host, where nothing is waited for
    context.encoder.check_texts(tokens)
    batch = context.prepare_inputs(tokens)
    with torch.no_grad(), context.accelerator.autocast():
        return context.encoder.encode_texts(batch, checked=True).float()
