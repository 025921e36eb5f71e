"""Time, memory and error of this package's loss and others on one GPU.

A row is a forward and backward of one implementation. Features are L2-normalised, positives have cosines of about 0.24,
logit_scale is 100, and logit_bias is -10 for the sigmoid loss. Times are quantiles over repetitions in milliseconds.
first_call_s is the very first step in seconds, with any compilation (or loading from a cache on disk). Memory is the
peak beyond the inputs; it is empty if torch replays its own graphs, whose memory it does not count. Errors are relative
to float64. The floor is the time of torch.matmul (cuBLAS) in bf16, measured in the same run, for the fewest products of
B×B×D that are possible: four for softmax, three for sigmoid. Others are measured if they are installed: inf_cl 1.2.1,
cut-cross-entropy 25.1.1, siglip-kernel 0.1.2 (in bf16 or FP8), open_clip_torch, torch's linear_cross_entropy.

``--forms`` also measures batches other than plain pairs. The batch size is then the number of images, the floor is that
of all their texts, and the float64 results are those of this package's torch backend:

- ``repeated``: 1% of the pairs have the id of another pair, and equal `pair_ids` are excluded;
- ``captions``: each image has four captions, in no order, all of them positives. siglip-kernel's loss is SigLIP+, which
  weights the positives; its errors are not measured;
- ``negatives``: additional texts that belong to no image, a quarter as many as images.
"""

import argparse
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_infcl import contrastive_loss
from hf_infcl.loss import OBJECTIVES, cuda_graphs

from . import common, peers
from .common import BIAS, SCALE, Row
from .peers import Loss

COMPILED_UP_TO = 16384  # for larger batches our kernels take longer than their launches
FORMS = {"pairs": "", "repeated": ", 1% repeated", "captions": ", 4 captions", "negatives": ", b/4 negatives"}
REPLAYED = ("hf_infcl compiled", "vanilla compiled, graphs")
COLUMNS = """
    date commit device torch triton objective dtype dim batch_size implementation ms ms_p10 ms_p90 floor_fraction
    matmul_tflops peak_mib loss_error gradient_error first_call_s note
""".split()


def implementations(objective: str, batch: int) -> dict[str, Loss]:
    """New implementations for each row, because each compiles its own code."""
    ours = functools.partial(contrastive_loss, objective=objective)
    losses: dict[str, Loss] = {
        "hf_infcl": ours,
        "hf_infcl torch backend": functools.partial(ours, backend="torch"),
        "vanilla": functools.partial(peers.vanilla, objective=objective),
        "vanilla compiled": torch.compile(functools.partial(peers.vanilla, objective=objective), dynamic=False),
        "checkpointed": functools.partial(peers.checkpointed, objective=objective),
        "open_clip": functools.partial(peers.open_clip, objective=objective),
    }
    if batch <= COMPILED_UP_TO:  # both as CUDA graphs
        plain = functools.partial(peers.vanilla, objective=objective)
        losses["hf_infcl compiled"] = torch.compile(ours, mode="reduce-overhead", dynamic=False)
        losses["vanilla compiled, graphs"] = torch.compile(plain, mode="reduce-overhead", dynamic=False)
    if objective == "softmax":
        losses |= {"inf_cl": peers.inf_cl, "cut_cross_entropy": peers.cut_cross_entropy}
        if hasattr(F, "linear_cross_entropy"):
            losses["torch linear_cross_entropy"] = peers.torch_linear_cross_entropy
    else:
        losses["siglip_kernel"] = peers.siglip_kernel
        losses["siglip_kernel FP8"] = functools.partial(peers.siglip_kernel, backend="chunked_bf16_fp8")
    return losses


def form_of_batch(
    form: str, objective: str, x: Tensor, y: Tensor
) -> tuple[Tensor, Callable[..., Tensor], dict[str, Loss]]:
    """The texts [m, D] of a form made from x and y [b, D], our loss, with any ``backend``, and other losses."""
    batch = len(x)
    g = torch.Generator(x.device).manual_seed(batch)
    others: dict[str, Loss] = {}
    options: dict[str, Tensor] = {}
    if form == "negatives":
        negatives, _ = common.features(batch // 4, x.shape[1], x.dtype, x.device, seed=1)

        def with_negatives(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, **kinds: Any) -> Tensor:
            texts, negatives = y.split((batch, batch // 4))
            return contrastive_loss(x, texts, scale, bias, objective=objective, negative_texts=negatives, **kinds)

        return torch.cat((y, negatives)), with_negatives, others
    if form == "repeated":
        ids = torch.arange(batch, device=x.device)
        ids[: batch // 200] += batch // 200
        options["pair_ids"] = ids[torch.randperm(batch, generator=g, device=x.device)]
    else:
        ids = torch.arange(4 * batch, device=x.device) % batch
        order = torch.randperm(4 * batch, generator=g, device=x.device)
        options = {"image_ids": ids[:batch], "text_ids": ids[order]}
        captions = [common.features(batch, x.shape[1], torch.float32, x.device, seed=2 + i)[1] for i in range(3)]
        y = F.normalize(torch.cat([y, *(x + 4 * c for c in captions)]), dim=-1)[order].to(x.dtype)
        if objective == "sigmoid":
            others["siglip_kernel SigLIP+"] = functools.partial(
                peers.siglip_kernel_plus, image_ids=options["image_ids"], text_ids=options["text_ids"]
            )
    return y, functools.partial(contrastive_loss, objective=objective, **options), others


def in_float64(loss_of: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients by x and y."""
    x, y = (t.double().requires_grad_() for t in (x, y))
    scale, bias = (torch.tensor(value, dtype=torch.float64, device=x.device) for value in (SCALE, BIAS))
    loss = loss_of(x, y, scale, bias)
    return loss.detach(), *torch.autograd.grad(loss, (x, y))


def relative(value: Tensor, true: Tensor) -> float:
    return (torch.linalg.vector_norm(value.double() - true) / torch.linalg.vector_norm(true)).item()


def matmul_rate(size: int = 8192) -> float:
    """The TFLOP/s of a square product in bf16."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / milliseconds_of(lambda: a @ a, 1000)[0] / 1e9  # long enough for the clock to settle


def milliseconds_of(step: Callable[[], Any], milliseconds: int) -> tuple[float, float, float]:
    """Median, first and last decile of the time in ms, from a single run if that takes longer than a second."""
    from triton.testing import do_bench

    if (once := 1000 * common.seconds(step, torch.device("cuda"))) > 1000:
        return once, once, once
    median, low, high = do_bench(step, warmup=milliseconds // 4, rep=milliseconds, quantiles=[0.5, 0.1, 0.9])
    return median, low, high


def measure(loss: Loss, x: Tensor, y: Tensor, true: tuple[Tensor, ...] | None, milliseconds: int) -> dict[str, Any]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    bias = torch.tensor(BIAS, device="cuda", requires_grad=True)

    def step() -> Tensor:
        x.grad = y.grad = scale.grad = bias.grad = None
        value = loss(x, y, scale, bias)
        value.backward()
        return value.detach()

    cuda_graphs.recording.cache_clear()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"first_call_s": round(time.perf_counter() - begin, 3)}
    x.grad = y.grad = scale.grad = bias.grad = None
    gc.collect()
    values: list[Tensor] = []  # the last of these calls is recorded; the memory that it keeps counts
    peak = common.peak_bytes(lambda: values.extend(step() for _ in range(cuda_graphs.PATIENCE)), x.device)
    row["peak_mib"] = round((peak or 0) / common.MIB)
    if true is not None:
        assert x.grad is not None
        assert y.grad is not None
        row["loss_error"] = f"{relative(values[-1], true[0]):.1e}"
        row["gradient_error"] = f"{max(relative(x.grad, true[1]), relative(y.grad, true[2])):.1e}"
    row["ms"], row["ms_p10"], row["ms_p90"] = (round(t, 4) for t in milliseconds_of(step, milliseconds))
    return row


def run(args: argparse.Namespace) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise SystemExit("benchmark.py loss times kernels on a GPU, and torch sees none.")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise torch refuses matmul
        torch.use_deterministic_algorithms(True)
    environment = common.environment(torch.device("cuda"), "triton")
    for objective, dtype_name, dim, batch, form in itertools.product(
        args.objectives, args.dtypes, args.dims, args.batch_sizes, args.forms
    ):
        x, y = common.features(batch, dim, getattr(torch, dtype_name), "cuda")
        rate = matmul_rate()
        true = None
        if form == "pairs":
            losses = implementations(objective, batch)
            if batch <= args.errors_up_to:
                true = in_float64(functools.partial(peers.checkpointed, objective=objective, rows=2048), x, y)
        else:
            y, ours, others = form_of_batch(form, objective, x, y)
            losses = {"hf_infcl": ours, **others}
            if batch <= args.errors_up_to:
                true = in_float64(functools.partial(ours, backend="torch"), x, y)
        floor = OBJECTIVES[objective].products * 2 * batch * len(y) * dim / rate / 1e9
        for name, loss in losses.items():
            if args.implementations and name not in args.implementations:
                continue
            row = environment | {
                "objective": objective,
                "dtype": dtype_name,
                "dim": dim,
                "batch_size": batch,
                "implementation": name + (" deterministic" if args.deterministic else "") + FORMS[form],
                "matmul_tflops": round(rate),
            }
            torch._dynamo.reset()
            try:
                comparable = true if name != "siglip_kernel SigLIP+" else None
                row |= measure(loss, x, y, comparable, args.milliseconds)
                if name in REPLAYED:
                    row["peak_mib"] = ""
                row["floor_fraction"] = round(floor / row["ms"], 3)
            except torch.OutOfMemoryError:
                row["note"] = "out of memory"
            except Exception as error:  # other losses fail in various ways; the row has the error
                row["note"] = f"{type(error).__name__}: {error}".splitlines()[0]
            torch.cuda.empty_cache()
            yield row


def plot(table: Path) -> None:
    """Plots time and memory of pairs over the batch size, in two panels for each setting with at least three sizes."""
    rows = common.newest(table, ("objective", "dtype", "dim", "batch_size", "implementation"), lambda row: row["ms"])
    rows = [row for row in rows if not row["implementation"].endswith(tuple(filter(None, FORMS.values())))]
    style = common.styles(dict.fromkeys(row["implementation"] for row in rows))
    settings = common.grouped(rows, lambda row: f"{row['objective']}, {row['dtype']}, D = {row['dim']}")
    shown = {k: v for k, v in settings.items() if len({row["batch_size"] for row in v}) > 2}
    if not shown:
        return
    figure, axes = common.subplots(len(shown), 2, (7.2, 4.6))
    labels = {"ms": "forward + backward, ms", "peak_mib": "peak memory, MiB"}
    for (title, group), panels in zip(shown.items(), axes, strict=True):
        for axis, (key, label) in zip(panels, labels.items(), strict=True):
            lines = common.lines_of((row for row in group if row[key]), "batch_size", key)
            # A line needs two points.
            common.draw_lines(axis, {name: points for name, points in lines.items() if len(points) > 1}, style)
            axis.set(xlabel="pairs", ylabel=label, title=title)
    common.save(figure, table.with_suffix(".png"), [row for group in shown.values() for row in group])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--dims", type=int, nargs="+", default=[512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--objectives", nargs="+", default=["softmax"], choices=list(OBJECTIVES))
    parser.add_argument("--forms", nargs="+", default=["pairs"], choices=list(FORMS), help="of the batch, see above")
    parser.add_argument("--implementations", nargs="+", help="by name, default: all that are installed")
    parser.add_argument("--milliseconds", type=int, default=300, help="of repetitions per row")
    parser.add_argument("--deterministic", action="store_true", help="under torch.use_deterministic_algorithms")
    parser.add_argument("--errors-up-to", type=int, default=65536, help="largest batch compared with float64")
