"""Time and memory of a training step of a CLIP: bf16 autocast, sdpa, fused AdamW, random weights.

    python scripts/benchmark.py step --micro-batch-size 256 --accumulation-steps 4 --compile Trainer
    python scripts/benchmark.py step --micro-batch-size 256 --accumulation-steps 4 16 --text-tokens 24 77 \\
        --implementations 'hf_infcl by default' 'OpenCLIP accumulation' --compile
    torchrun --nproc-per-node 4 scripts/benchmark.py step --global-batch-sizes 32768 131072 --micro-batch-size 256

Without --global-batch-sizes, InfCLTrainer is measured beside the plain Trainer, which computes a loss for each
micro-batch, with the same model, micro-batch and accumulation steps; beside OpenCLIP's --accum-freq, whose loss is that
of the whole batch, too; and, if open_clip_torch is installed, beside OpenCLIP's own model in its own loop, with and
without --accum-freq. With --compile all, or those that it names, are measured again under torch.compile. --memory-gib
lets the process take no more of the GPU, which the note says. Times are quantiles of single steps after a warm-up.
``ratio`` is the rate of images relative to that of the plain Trainer, not compiled, in the same run and settings.

With several values of --accumulation-steps, --text-tokens, --patch-dropout and --image-size, everything is measured for
each combination. In both of OpenCLIP's accumulations the second forward drops other patches than the first, so that
their gradient belongs to no batch. A model for another image size has as many positions as that needs.

With --global-batch-sizes there is a row per global batch and loss, as in the first table of the Inf-CL paper:
``loss_gib`` is what the loss allocates from its call to its gradients, ``peak_gib`` the memory of the whole step, each
on the GPU with the most. The losses of CLIP, OpenCLIP and DisCo replace ours in InfCLTrainer's window, with logits in
bf16. With --warmup 0 a single step is measured, with Adam's state, after a window of two micro-batches and one call of
each loss at its full size; with --compile it includes the compilation, which that window has cached on disk. A batch
that does not fit by computation (the peak of that window, the inputs of the full window, the logits) gets a row with a
note.

Inputs come from a pool of a few micro-batches of random images in pinned memory: data loading is not measured. On the
device every micro-batch is a tensor of its own, except with offload_inputs, which holds two at a time. Images are fp32,
as processors return them, unless --pixel-dtype (of --global-batch-sizes) is given; those of "hf_infcl by default,
uint8" are uint8, as of InfCLTrainer's own collator. InfCLTrainer compiles each layer, as it does in a long training,
unless the whole model is compiled or "torch_compile false" is said.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_infcl import contrastive_loss

from . import common, inputs, peers, training
from .common import SCALE, Row, grouped

COLUMNS = """
    date commit device torch transformers world_size model pixel_dtype image_size patch_dropout text_tokens
    micro_batch_size accumulation_steps batch_size comparison implementation steps ms ms_p10 ms_p90 images_per_s ratio
    loss_gib peak_gib note
""".split()
PLAIN, OURS, OFFLOAD = "Trainer", "hf_infcl", "hf_infcl offload"
UINT8 = {"global_batch_size": "all", "pixels": torch.uint8}  # images as its own collator returns them
# Our options by implementation; all is replaced by the number of accumulation steps.
OVERHEAD: dict[str, dict[str, Any]] = {
    "hf_infcl": {"retain_graphs": "1"},
    "hf_infcl retain all": {"retain_graphs": "all"},
    "hf_infcl retain auto": {"retain_graphs": "auto"},
    "hf_infcl offload": {"retain_graphs": "1", "offload_inputs": True},
    "hf_infcl retain all, offload": {"retain_graphs": "all", "offload_inputs": True},
    "hf_infcl freeze image": {"retain_graphs": "1", "freeze": "image"},
    "hf_infcl stored teacher": {"retain_graphs": "1", "taught": True},
    "hf_infcl matryoshka": {"retain_graphs": "1", "matryoshka_dims": "all"},
    "hf_infcl texts at once": {"retain_graphs": "1", "texts_at_once": "all"},
    "hf_infcl texts at once, retain auto": {"retain_graphs": "auto", "texts_at_once": "all"},
    "hf_infcl by default": {"global_batch_size": "all"},  # as if the user had said nothing else
    "hf_infcl by default, uint8": UINT8,
    "hf_infcl by default, uint8, torch_compile false": {**UINT8, "torch_compile": False},
}
TOGETHER = "two runs at once on one host"  # in the note of a row
DRAWN = {  # the implementations of a picture, and their names there
    "Trainer": "Trainer",
    "Trainer, compiled": "Trainer, compiled",
    "OpenCLIP accumulation": "OpenCLIP accumulation",
    "hf_infcl by default, uint8": "hf_infcl",
    "hf_infcl by default, uint8, torch_compile false": "hf_infcl, torch_compile false",
}
LOSSES: dict[str, Any] = {
    OURS: contrastive_loss,
    OFFLOAD: contrastive_loss,
    "CLIP": lambda x, y, scale, bias, **options: peers.clip(x, y, scale, scale),
    "OpenCLIP local loss": lambda x, y, scale, bias, **options: peers.open_clip_local(x, y, scale, scale),
    "DisCo-CLIP": lambda x, y, scale, bias, **options: peers.disco(x, y, scale, scale),
}


def run(args: argparse.Namespace) -> Iterator[Row]:
    if "RANK" in os.environ:
        common.start_processes()
    if args.pixel_dtype == "uint8" and not args.global_batch_sizes:
        raise SystemExit("--pixel-dtype uint8 is for --global-batch-sizes: only InfCLTrainer takes such images.")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if args.memory_gib:
        fraction = args.memory_gib * common.GIB / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction)
    # ---- One run for each combination of settings ----
    sizes = inputs.MODELS[args.model]
    values = {
        "image_size": args.image_size or [sizes["vision_config"]["image_size"]],
        "text_tokens": args.text_tokens or [sizes["text_config"]["max_position_embeddings"]],
        "patch_dropout": args.patch_dropout,
        "accumulation_steps": args.accumulation_steps,
    }
    combinations = [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]
    settings = [argparse.Namespace(**{**vars(args), **one}) for one in combinations]
    for one in settings:
        inputs.sizes_of(args.model, one.image_size)  # refuses before anything is measured
    for one in settings:
        environment = common.environment(device, "transformers")
        pool = make_pool(one, getattr(torch, args.pixel_dtype))
        if one is settings[0] and not args.global_batch_sizes:  # warms the card up for the rows
            few = argparse.Namespace(**{**vars(one), "warmup": 1, "steps": 1})
            measured(few, one.accumulation_steps, device, trains(one, pool, training.PlainTrainer))
        told = vars(one) | {"world_size": common.world_size()}
        environment |= {name: told[name] for name in common.STEP_SETTING}
        for row in (table if args.global_batch_sizes else overhead)(one, pool, device):
            yield environment | row


def make_pool(args: argparse.Namespace, pixels: torch.dtype) -> list[Any]:
    shape = {"image_size": args.image_size, "tokens": args.text_tokens}
    return inputs.make_pool(args.model, args.pool, args.micro_batch_size, pixels, **shape)


def measured(
    args: argparse.Namespace, accumulation: int, device: torch.device, train: Callable[..., tuple[Any, Any]]
) -> Row:
    """The columns for the steps of ``train(steps, accumulation)``; a note if memory did not suffice."""
    batch = accumulation * args.micro_batch_size * common.world_size()
    row: Row = {"accumulation_steps": accumulation, "batch_size": batch, "steps": args.steps}
    notes = [f"in {args.memory_gib:g} GiB"] * bool(args.memory_gib)
    try:
        clock, trainer = train(args.warmup + args.steps, accumulation)
    except torch.OutOfMemoryError:
        trainer = None
        notes.append("out of memory")
    else:
        times = [b - a for a, b in zip(clock.stamps, clock.stamps[1:], strict=False)][args.warmup :]
        row |= common.quantiles(common.over_processes(t, device) for t in times)
        row["images_per_s"] = round(1000 * batch / row["ms"], 1)
        if device.type == "cuda":
            row["peak_gib"] = round(common.over_processes(clock.peak, device) / common.GIB, 3)
            row["loss_gib"] = round(common.over_processes(clock.loss_peak, device) / common.GIB, 3) or ""
        if isinstance(trainer, training.PooledInfCLTrainer) and trainer.args.passed[3] in (None, "auto"):
            found = trainer.args
            notes.append(f"keeps {trainer.window_step.graphs.kept} graphs")
            if found.divides_by_itself:
                notes.append(f"{found.gradient_accumulation_steps} × {found.per_device_train_batch_size} images")
                notes.append(f"texts of {found.texts_at_once} at once")
    row["note"] = ", ".join(notes)
    del trainer
    torch.compiler.reset()  # compiled code and its memory belong to this row only
    gc.collect()  # trainers and models refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def trains(args: argparse.Namespace, pool: list[Any], trainer_class: Any, **options: Any) -> Callable[..., Any]:
    """A function that trains a new model with a trainer, for `measured`."""

    def train(steps: int, accumulation: int) -> tuple[Any, Any]:
        model = inputs.build(args.model, args.image_size)
        patches = {"patch_dropout": args.patch_dropout}
        return training.train(trainer_class, model, pool, steps, accumulation, **patches, **options)

    return train


def overhead(args: argparse.Namespace, pool: list[Any], device: torch.device) -> Any:
    """Rows of the plain Trainer, InfCLTrainer with its options, and OpenCLIP's accumulation."""
    plain: float | None = None
    for compiled in (False, True) if args.compile is not None else (False,):
        for name, train, accumulation in implementations(args, pool, device, compiled):
            label = name + ", compiled" * compiled
            wanted = not args.implementations or not {name, label}.isdisjoint(args.implementations)
            if compiled and args.compile:
                wanted = name in args.compile
            if not wanted and label != PLAIN:
                continue
            row = measured(args, accumulation, device, train)
            plain = plain or row.get("images_per_s")
            if plain and "images_per_s" in row:
                row["ratio"] = round(row["images_per_s"] / plain, 3)
            yield {"comparison": "overhead", "implementation": label} | row


def implementations(
    args: argparse.Namespace, pool: list[Any], device: torch.device, compiled: bool
) -> Iterator[tuple[str, Callable[..., Any], int]]:
    """Name, training function and accumulation steps of everything measured, beginning with the plain Trainer."""
    steps = args.accumulation_steps
    common_options: dict[str, Any] = {"torch_compile": True} if compiled else {}
    yield PLAIN, trains(args, pool, training.PlainTrainer, **common_options), steps
    for name, options in OVERHEAD.items():
        if args.patch_dropout and options.get("freeze") == "image":
            continue  # a frozen image tower sees all patches
        all_of: dict[str, Any] = {"global_batch_size": steps * args.micro_batch_size * common.world_size()}
        all_of["matryoshka_dims"] = [inputs.MODELS[args.model]["projection_dim"] // part for part in (8, 4, 2)]
        numbers = {name: all_of.get(name, steps) if value == "all" else value for name, value in options.items()}
        options = ({} if "global_batch_size" in numbers else {"texts_at_once": 1}) | numbers
        options |= common_options
        images = pool
        if pixels := options.pop("pixels", None):
            images = make_pool(args, pixels)
        yield name, trains(args, images, training.PooledInfCLTrainer, **options), steps
    yield "OpenCLIP accumulation", trains(args, pool, training.OpenCLIPTrainer, **common_options), steps
    if importlib.util.find_spec("open_clip_train") is None or common.world_size() > 1:
        return

    def own(count: int, accumulation: int) -> tuple[Any, Any]:
        patches = {"image_size": args.image_size, "patch_dropout": args.patch_dropout}
        return training.train_open_clip(args.model, pool, count, accumulation, device, **patches, compiled=compiled)

    yield "OpenCLIP's own model", own, 1
    yield "OpenCLIP's own model, --accum-freq", own, steps


def table(args: argparse.Namespace, pool: list[Any], device: torch.device) -> Any:
    """Rows of each loss at each global batch."""
    w = common.world_size()
    # This compiles, allocates and times everything once. The peak is that of a step without its window and loss.
    once = argparse.Namespace(**{**vars(args), "warmup": 0, "steps": 1})
    compiled: dict[str, Any] = {"torch_compile": True} if args.compile is not None else {}
    small = measured(once, 2, device, trains(args, pool, training.PooledInfCLTrainer, **compiled))
    free = common.free_bytes(device)
    window = sum(value.nbytes for value in pool[0].values())
    for batch in args.global_batch_sizes:
        accumulation, rest = divmod(batch, w * args.micro_batch_size)
        if rest:
            raise SystemExit(f"A global batch of {batch} is no multiple of {w} × --micro-batch-size.")
        for name, loss in LOSSES.items():
            if args.implementations and name not in args.implementations:
                continue
            rows = batch if name == "CLIP" else batch // w
            logits = 0 if loss is contrastive_loss else peers.MATRICES * 2 * rows * batch
            needed = small.get("peak_gib", 0) * common.GIB + logits + (name != OFFLOAD) * accumulation * window
            label = name + ", compiled" * bool(compiled)
            row: Row = {"comparison": "table", "implementation": label, "accumulation_steps": accumulation}
            if needed > 0.95 * free:
                gib = needed / common.GIB
                yield row | {"batch_size": batch, "note": f"not tried: needs {gib:.0f} GiB (computed)"}
                continue
            warm_up(loss, batch // w, args.model, device)
            offload = name == OFFLOAD
            ours = trains(args, pool, training.PooledInfCLTrainer, loss=loss, offload_inputs=offload, **compiled)
            row |= measured(args, accumulation, device, ours)
            row["note"] = f"inputs repeat from a pool of {len(pool)} micro-batches"
            if compiled and not args.warmup:
                row["note"] += "; with the compilation"
            yield row


def warm_up(loss: Any, rows: int, model: str, device: torch.device) -> None:
    """Calls a loss once on features of the window's shape."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, y = common.features(rows, inputs.MODELS[model]["projection_dim"], dtype, device, seed=common.rank())
    loss(x.requires_grad_(), y.requires_grad_(), torch.tensor(SCALE, device=device), None).backward()


def plot(table: Path) -> None:
    """Plots the rates of the trainers relative to the plain one, of the newest day, and memory over the global batch.

    There is a panel for each setting of that day, with its run of the most implementations. The one of the memory shows
    the setting that has the most rows.
    """

    def is_overhead(row: Row) -> bool:
        return row["comparison"] == "overhead" and bool(row["ratio"]) and row["implementation"] in DRAWN

    def is_table(row: Row) -> bool:
        return row["comparison"] == "table" and bool(row["peak_gib"])

    def setting_of(row: Row) -> tuple[str, ...]:
        batch = () if row["comparison"] == "table" else (row["batch_size"], limit_of(row["note"]))
        return tuple(row[key] for key in common.STEP_SETTING) + batch

    last = next(reversed(common.read(table, is_overhead)), {})
    of_day = [row for row in common.read(table, is_overhead) if all(row[k] == last[k] for k in ("date", "device"))]
    runs = [grouped(rows, lambda row: row["commit"]).values() for rows in grouped(of_day, setting_of).values()]
    panels = [rows for rows in (max(reversed(one), key=len) for one in runs) if len(rows) > 1]
    of_tables = common.newest(table, (*common.STEP_SETTING, "batch_size", "implementation"), is_table)
    panels += [max(grouped(of_tables, setting_of).values(), key=len)] if of_tables else []
    if not panels:
        return
    height = max(3.0, 0.4 * max(map(len, panels)))
    figure, axes = common.panels(len(panels), (7.6, height))
    for axis, rows in zip(axes, panels, strict=True):
        first = rows[-1]
        card = first["device"].removeprefix("NVIDIA ").split()[0]
        details = [first["model"], f"{first['world_size']} × {card}"]
        dropped = float(first["patch_dropout"])
        details += [f"{dropped:.0%} of the patches left out"] * bool(dropped)
        if first["comparison"] == "overhead":
            details += [f"{int(first['batch_size']):,} pairs", f"texts of {first['text_tokens']} tokens"]
            details += [limit_of(first["note"])] * bool(limit_of(first["note"]))
            details += [TOGETHER] * (TOGETHER in first["note"])
            values = {DRAWN[row["implementation"]]: float(row["ratio"]) for row in rows}
            common.draw_bars(axis, values, {DRAWN[row["implementation"]]: described(row) for row in rows})
            axis.set(xlabel="images per second, Trainer = 1; peak memory; micro-batches")
            axis.axvline(1, color="black", lw=0.8, zorder=0)
        else:
            details += [f"micro-batches of {first['micro_batch_size']}", f"{first['pixel_dtype']} images"]
            lines = common.lines_of(rows, "batch_size", "peak_gib")
            common.draw_lines(axis, lines, common.styles(lines))
            axis.set(xlabel="global batch", ylabel="peak memory of a step per GPU, GiB")
            sizes = sorted({batch for points in lines.values() for batch, _ in points})
            axis.set_xticks(sizes, [f"{batch:,}" for batch in sizes])
            axis.set_xticks([], minor=True)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(", ".join(details[:2]) + ",\n" + ", ".join(details[2:]))
    common.save(figure, table.with_suffix(".png"), [row for rows in panels for row in rows])


def limit_of(note: str) -> str:
    """The memory in a row's note that the process was limited to, or nothing."""
    return note.partition(",")[0] if note.startswith("in ") else ""


def described(row: Row) -> str:
    """Rate, memory and micro-batches of a row."""
    found = re.search(r"\d+ × \d+(?= images)", row["note"])
    divided = found[0] if found else f"{row['accumulation_steps']} × {row['micro_batch_size']}"
    memory = f", {float(row['peak_gib']):.3g} GiB" if row["peak_gib"] else ""
    return f"{float(row['ratio']):.3g}{memory}, {divided}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="vit-b-16", choices=inputs.MODELS)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--accumulation-steps", type=int, nargs="+", default=[8], help="without global batches")
    parser.add_argument("--global-batch-sizes", type=int, nargs="*", default=[], help="measure the table instead")
    parser.add_argument("--warmup", type=int, default=4, help="steps before; retain_graphs='auto' needs two")
    parser.add_argument("--steps", type=int, default=8, help="steps measured")
    parser.add_argument("--pool", type=int, default=8, help="different micro-batches of inputs")
    parser.add_argument("--image-size", type=int, nargs="+", metavar="PIXELS", help="default: that of the model")
    parser.add_argument("--patch-dropout", type=float, nargs="+", default=[0.0], metavar="SHARE", help="default: none")
    parser.add_argument(
        "--text-tokens",
        type=lambda text: text if text == "web" else int(text),
        nargs="+",
        metavar="N|web",
        help="of a text, or lengths as of captions on the web; default: as many as it may have",
    )
    parser.add_argument("--pixel-dtype", default="float32", choices=["float32", "bfloat16", "uint8"])
    parser.add_argument("--implementations", nargs="+", help="'NAME, compiled' is not measured eager; default: all")
    parser.add_argument("--compile", nargs="*", metavar="NAME", help="measure these, or all, under torch.compile too")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="that the process may take")
