"""A step of `ExactContrastiveLoss` beside the cached loss of sentence-transformers, in one run.

    python scripts/benchmark.py embedders
    torchrun --nproc-per-node 2 scripts/benchmark.py embedders --implementations theirs "ours, graphs that fit"

Models have random weights: 12 layers of width 384, pooled by the mean (as MiniLM), and a decoder of 0.5 billion
parameters, pooled at the last token (as Qwen2). Texts have 64 tokens, or 24 on average and 128 at most. A step is the
loss of all rows of all processes and its backward, without an optimizer, under autocast in bf16 in both passes.
``ms`` is the median, ``peak_gib`` the peak of torch's allocator, ``ratio`` the rate relative to the better of theirs.

Mini-batches of both have the same memory, ``tokens`` with padding: theirs has as many rows as reach it with the longest
text, or as many tokens as these rows have on average (with equal lengths the same mini-batches). Attention is without
cuDNN, which would take a second for each new shape; theirs would take it in each step with other lengths.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_infcl import ExactContrastiveLoss

from . import common
from .common import GIB, Row

COLUMNS = """
    date commit device torch transformers sentence-transformers world_size model lengths batch_size tokens
    implementation ms ms_p10 ms_p90 peak_gib ratio note
""".split()
VOCABULARY, LONGEST = 30_000, 128
WARM = 3  # steps of a quarter of the rows before the timed ones: graphs that fit are counted in the second and third


class Encoder(nn.Module):
    """A model of transformers and its pooling, as one module of sentence-transformers."""

    def __init__(self, model: nn.Module, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.auto_model, self.pool = model, pool

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        inputs = {k: v for k, v in features.items() if k in ("input_ids", "attention_mask", "position_ids")}
        with torch.autocast(features["input_ids"].device.type, torch.bfloat16):  # as accelerate does, in both passes
            states = self.auto_model(**inputs).last_hidden_state
            return {**features, "sentence_embedding": self.pool(states, features["attention_mask"]).float()}


def mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def last(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, -1]  # padding is on the left


def make_model(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if name == "MiniLM":
        sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536}
        bert = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes), add_pooling_layer=False)
        return nn.Sequential(Encoder(bert, mean)).to(device)
    sizes = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864}
    config = transformers.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    return nn.Sequential(Encoder(transformers.Qwen2Model(config), last)).to(device)


def make_features(name: str, rows: int, lengths: str, device: torch.device) -> list[dict[str, Tensor]]:
    """Anchors and positives of this process."""
    g = torch.Generator().manual_seed(common.rank())
    columns = []
    for _ in range(2):
        drawn = torch.empty(rows).exponential_(1 / 21, generator=g).long().add(4).clamp_max(LONGEST)
        counts = drawn if lengths == "mixed" else torch.full((rows,), 64)
        places = torch.arange(int(counts.max()))
        mask = (places >= len(places) - counts[:, None]) if name != "MiniLM" else (places < counts[:, None])
        tokens = torch.randint(5, VOCABULARY, mask.shape, generator=g) * mask
        columns.append({"input_ids": tokens.to(device), "attention_mask": mask.long().to(device)})
    return columns


def implementations(model: nn.Module, tokens: int, lengths: str) -> Iterator[tuple[str, nn.Module]]:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Theirs

    rows = tokens // (64 if lengths == "equal" else LONGEST)
    gather = {"gather_across_devices": common.world_size() > 1}
    yield "theirs", Theirs(model, mini_batch_size=rows, **gather)
    if lengths == "mixed":
        yield "theirs, by tokens", Theirs(model, mini_batch_size=rows, mini_batch_num_tokens=24 * rows, **gather)
    yield "ours, one graph", ExactContrastiveLoss(model, mini_batch_num_tokens=tokens)
    yield "ours, graphs that fit", ExactContrastiveLoss(model, mini_batch_num_tokens=tokens, retain_graphs="auto")


def run(args: argparse.Namespace) -> Iterator[Row]:
    device = common.start_processes()
    torch.backends.cuda.enable_cudnn_sdp(False)
    w = common.world_size()
    environment = common.environment(device, "transformers", "sentence-transformers") | {"world_size": w}
    for name in args.models:
        model = make_model(name, device)
        ddp = model
        if w > 1:
            ddp = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
        for batch in args.batch_sizes:
            for lengths in args.lengths:
                features = make_features(name, batch // w, lengths, device)
                best = 0.0
                for implementation, loss in implementations(model, args.tokens, lengths):
                    if args.implementations and implementation not in args.implementations:
                        continue
                    loss.model = ddp  # theirs looks into the model before it is wrapped
                    row: Row = {"model": name, "lengths": lengths, "batch_size": batch, "tokens": args.tokens}
                    row |= environment | {"implementation": implementation} | measured(loss, features, device, args)
                    best = min(best or row["ms"], row["ms"]) if implementation.startswith("theirs") else best
                    row["ratio"] = round(best / row["ms"], 3) if best else ""
                    yield row
        del model, ddp


def measured(loss: nn.Module, features: list[dict[str, Tensor]], device: torch.device, args: argparse.Namespace) -> Row:
    def step(rows: int | None = None) -> None:
        loss.model.zero_grad()
        loss([{name: value[:rows] for name, value in column.items()} for column in features], None).backward()

    for _ in range(WARM if getattr(loss, "retain_graphs", 1) == "auto" else 1):
        step(len(features[0]["input_ids"]) // 4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [common.over_processes(common.seconds(step, device), device) for _ in range(args.steps)]
    row = common.quantiles(times)
    if device.type == "cuda":
        row["peak_gib"] = round(common.over_processes(torch.cuda.max_memory_allocated(), device) / GIB, 2)
    budget = getattr(loss, "_budget", None)
    return row | ({"note": f"{budget.kept} graphs kept"} if budget is not None else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["MiniLM", "decoder"], choices=["MiniLM", "decoder"])
    parser.add_argument("--lengths", nargs="+", default=["equal", "mixed"], choices=["equal", "mixed"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4096], help="rows of all processes")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a mini-batch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--implementations", nargs="+")
