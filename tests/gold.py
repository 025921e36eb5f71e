"""What small trainings compute, bit for bit: written before a change that must not alter anything, compared after it.

python tests/gold.py write FILE      trains each configuration, in about a minute; a folder gets a gold.json
python tests/gold.py compare FILE    trains each again, and prints every difference; the exit code is 1 if there is any

The file holds, for each process of each configuration, every number that was logged except times, the hash of each
weight and each state of the optimizer at the end, the record of the last checkpoint, the order of the trained pairs
where it is recorded, and the files of the output folder with hashes of the last checkpoint's weights, states and random
states. ``--results`` compares the logs, weights, states and order alone, for changes of the files.

It is only valid for the machine and the versions of the packages with which it was written. ``--only`` selects
configurations by name.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of other processes

import datasets
import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from helpers import models
from helpers.pictures import picture
from helpers.processes import FreshRanks, Ranks, alone
from helpers.processors import clip_processor
from helpers.shards import png, write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, TrainedRows, killed_at, trainer_for
from torch.distributed.tensor import DTensor

from hf_infcl import ContrastiveCollator, ImageTextDataset, ImageTextStream, InfCLTrainer

TIMES = (
    "_seconds",
    "_per_second",
    "_runtime",
    "data_wait",
    "slowest_rank",
    "total_flos",
)  # the ends of the names of logged times
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
ACCUMULATING = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}


# ---- Data and models ----


def captioned(rows: int = 40, first: int = 0, **options: Any) -> ImageTextDataset:
    """Images with one to four captions of different lengths; two images share each id."""
    numbers = range(first, first + rows)
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    captions = [[" ".join(letters[(n + 5 * k) % 26 :][: 1 + (n + k) % 6]) for k in range(1 + n % 4)] for n in numbers]
    columns = {"image": [picture(n, (40, 32)) for n in numbers], "caption": captions, "id": [n // 2 for n in numbers]}
    return ImageTextDataset(datasets.Dataset.from_dict(columns), **{"seed": 3, **options})


def numbered(numbers: range) -> ImageTextDataset:
    """Images that hold their numbers, for the collator of `stream`."""
    images = [{"bytes": png(number), "path": None} for number in numbers]
    rows = datasets.Dataset.from_dict({"image": images, "caption": [f"caption {number}" for number in numbers]})
    return ImageTextDataset(rows.cast_column("image", datasets.Image()))


def stream(folder: Path, numbers: range, **options: Any) -> ImageTextStream:
    shards = folder / f"shards-{numbers[0]}"
    if not shards.exists() and (not dist.is_initialized() or dist.get_rank() == 0):
        write_tars(shards, [len(numbers) // 10] * 10, first=numbers[0])
    if dist.is_initialized():
        dist.barrier()
    return stream_of(shards, **options)


def of_words(seed: int = 0) -> transformers.CLIPModel:
    """A CLIP with dropout that reads the tokens of `clip_processor`."""
    torch.manual_seed(seed)
    text = {**models.TEXT, "eos_token_id": 1, "pad_token_id": 0, "attention_dropout": 0.3}
    config = {"text_config": text, "vision_config": {**models.VISION, "attention_dropout": 0.3}}
    return transformers.CLIPModel(transformers.CLIPConfig(**config, projection_dim=12))


def words(**options: Any) -> dict[str, Any]:
    """The collator of captions, and further arguments of `trainer_for`."""
    return {"data_collator": ContrastiveCollator(clip_processor(), uint8=True), **options}


# ---- Configurations ----


def resumed(folder: Path, stop: int, make: Callable[..., InfCLTrainer]) -> InfCLTrainer:
    """A training that ends after ``stop`` steps, and goes on with a trainer of other weights and random state.

    Args:
        make: ``make(folder, model seed, callbacks=...)`` is a trainer, which saves after step ``stop``.
    """
    make(folder, 0, callbacks=[StopAt(stop)]).train()
    torch.manual_seed(7)
    trainer = make(folder, 5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.steps_trained == trainer.state.max_steps - stop, "it has begun anew"
    return trainer


def trained(trainer: InfCLTrainer) -> InfCLTrainer:
    trainer.train()
    return trainer


def table(folder: Path) -> InfCLTrainer:
    """Several captions per image and random crops, in two and a half epochs with evaluations."""
    data = captioned(captions_per_image=2, augmentation="flip_crop", pair_id_column="id")
    options = {**SAVING, **ACCUMULATING, "max_steps": -1, "num_train_epochs": 2.5, "dataloader_num_workers": 1}
    options |= {"eval_dataset": captioned(11, 50, all_captions=True), "eval_strategy": "epoch"}
    return trained(trainer_for(folder / "run", of_words(), data, **words(), **options))


def of_stream(folder: Path, seed: int, **options: Any) -> InfCLTrainer:
    options = {**SAVING, "max_steps": 8, "save_steps": 4, **options}
    return trainer_for(
        folder / "run", models.clip(0.3, seed), stream(folder, range(60)), data_collator=collate, **options
    )


def of_replay(new: str, old: str, folder: Path, seed: int, **options: Any) -> InfCLTrainer:
    numbers = {"new": range(60), "old": range(500, 540)}
    sets = [
        numbered(of_kind) if kind == "table" else stream(folder, of_kind)
        for kind, of_kind in zip((new, old), numbers.values(), strict=True)
    ]
    options = {**SAVING, **ACCUMULATING, "max_steps": 8, "save_steps": 4, "replay_share": 0.4, **options}
    model = models.clip(0.3, seed)
    return trainer_for(folder / "run", model, sets[0], replay_dataset=sets[1], data_collator=collate, **options)


def lora(folder: Path) -> InfCLTrainer:
    """Adapters with a trained temperature."""
    torch.manual_seed(0)
    model = peft.get_peft_model(models.clip(), peft.LoraConfig(r=2, target_modules=r".*(q_proj|v_proj|fc1)"))
    model.logit_scale.requires_grad_(True)
    return trained(trainer_for(folder / "run", model, max_steps=4, **SAVING))


def of_rows(folder: Path, seed: int, **options: Any) -> InfCLTrainer:
    """Five steps per epoch, and a checkpoint after every second one."""
    data = models.Pairs(43, longest=16)
    return trainer_for(folder / "run", models.clip(0.3, seed), data, **SAVING, max_steps=12, **options)


def train_until_killed(folder: Path) -> None:
    torch.set_num_threads(1)
    of_rows(folder, 0, callbacks=[killed_at(9)]).train()


def after_kill(folder: Path) -> InfCLTrainer:
    """A process that is killed in the middle of the second epoch; this one goes on, and trains one step again."""
    code, printed = alone(train_until_killed, folder)
    assert code == -signal.SIGKILL, printed
    torch.manual_seed(7)
    trainer = of_rows(folder, 5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.steps_trained == 4, "it has begun anew"
    return trainer


def many_options(folder: Path, **options: Any) -> InfCLTrainer:
    """What a step can do to its inputs and to its loss, together."""
    options |= {**SAVING, "max_steps": 6, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    options |= {"image_size": 24, "patch_dropout": 0.5, "keep_features": 0.5}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": captioned(9, 50)}
    return trained(trainer_for(folder / "run", of_words(), captioned(), **words(), **options))


def sharded(state_dict_type: str, folder: Path, seed: int, **options: Any) -> InfCLTrainer:
    options = {**SAVING, "max_steps": 4, "use_cpu": False, "fsdp": True, **options}
    options["fsdp_config"] = {"state_dict_type": state_dict_type}
    return trainer_for(folder / "run", models.clip(0.3, seed), models.Pairs(64), **options)


def sigmoid(folder: Path) -> InfCLTrainer:
    options = {**SAVING, "max_steps": 4, "gradient_accumulation_steps": 4, "retain_graphs": "2", "offload_inputs": True}
    return trained(trainer_for(folder / "run", models.siglip(0.3), models.Pairs(48, repeats=3), **options))


def of_muon(folder: Path, seed: int, **options: Any) -> InfCLTrainer:
    options = {**SAVING, "max_steps": 6, "save_steps": 3, "optimizer": "muon", **options}
    options |= {"text_learning_rate": 2e-3, "weight_decay": 0.1}
    options |= {"eval_dataset": models.Pairs(9), "eval_strategy": "steps", "eval_steps": 3}
    return trainer_for(folder / "run", models.clip(0.3, seed), **options)


def cached(folder: Path) -> InfCLTrainer:
    """The cached features of a frozen image tower, and of the model before the training."""
    options = {**SAVING, "max_steps": 6, "freeze": "image", "keep_features": 0.5}
    options |= {"cache_features": str(folder / "features")}
    return trained(trainer_for(folder / "run", of_words(), captioned(), **words(), **options))


def of_order(kind: str, workers: int, folder: Path) -> InfCLTrainer:
    """Three epochs, of which the report holds the pairs that each process has trained in each step."""
    rows = TrainedRows()
    multiprocessing.current_process()._config["daemon"] = False  # a daemon, as in the pool, may not start workers
    options: dict[str, Any] = {**SAVING, "save_steps": 1000, "max_steps": -1, "num_train_epochs": 3}
    options |= {"per_device_train_batch_size": 2, "dataloader_num_workers": workers, "callbacks": [rows]}
    if kind == "stream":
        data, options["data_collator"] = stream(folder, range(80), lanes=8), collate
        options |= {"max_steps": 18, "per_device_train_batch_size": 1}
    else:
        data = models.Pairs(90, longest=16)
    trainer = trained(trainer_for(folder / "run", models.clip(), data, **options))
    trainer.order = rows.steps
    return trainer


class Configuration(NamedTuple):
    """A training in a folder, whose ``output_dir`` is ``run`` in it."""

    train: Callable[[Path], InfCLTrainer]
    processes: int = 1
    as_on_accelerators: bool = False  # for FSDP2


def after_resume(stop: int, make: Callable[..., InfCLTrainer]) -> Callable[[Path], InfCLTrainer]:
    return partial(resumed, stop=stop, make=make)


KINDS = [(new, old) for new in ("table", "stream") for old in ("table", "stream")]
SHARDINGS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
CONFIGURATIONS = {
    "table": Configuration(table),
    "stream": Configuration(after_resume(4, partial(of_stream, dataloader_num_workers=1))),
    "stream, two processes": Configuration(after_resume(4, of_stream), 2),
    **{f"replay, {new} and {old}": Configuration(after_resume(4, partial(of_replay, new, old))) for new, old in KINDS},
    "replay, two processes": Configuration(after_resume(4, partial(of_replay, "table", "stream")), 2),
    "lora": Configuration(lora),
    "kill": Configuration(after_kill),
    "many options, ring": Configuration(partial(many_options, strategy="ring", texts_at_once=2), 2),
    "many options, disco": Configuration(partial(many_options, strategy="disco"), 2),
    **{f"fsdp, {kind}": Configuration(after_resume(2, partial(sharded, kind)), 2, True) for kind in SHARDINGS},
    "sigmoid": Configuration(sigmoid),
    "muon": Configuration(after_resume(3, of_muon)),
    "cached features": Configuration(cached),
    **{
        f"order of a {kind}, {processes} processes, {workers} workers": Configuration(
            partial(of_order, kind, workers), processes
        )
        for kind in ("table", "stream")
        for processes in (1, 2, 4)
        for workers in (0, 2)
    },
}


# ---- What they have computed ----


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested containers, each with the keys that lead to it. Tensors and arrays are hashed."""
    if isinstance(value, (Mapping, list, tuple)) and not value:
        yield path, "empty"
    elif isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path} / {key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from leaves(one, f"{path} / {place}" if path else str(place))
    elif isinstance(value, DTensor):
        yield path, digest(value.full_tensor())
    elif isinstance(value, torch.Tensor):
        yield path, digest(value)
    elif isinstance(value, np.ndarray):
        yield path, hashed(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    else:
        yield path, value if isinstance(value, (int, str, type(None))) else repr(value)  # floats to the bit


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashed(f"{tensor.dtype} {list(tensor.shape)}".encode() + content)


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def report(trainer: InfCLTrainer, folder: Path) -> dict[str, Any]:
    """JSON of a training that has ended. Collective."""
    output = Path(trainer.args.output_dir)
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    files = {path.relative_to(output).as_posix(): path for path in sorted(output.rglob("*")) if path.is_file()}
    logs = [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in trainer.state.log_history]
    found = {
        "logs": dict(leaves(logs)),
        "weights": dict(leaves(trainer.model.state_dict())),
        "optimizer": dict(leaves(trainer.optimizer.state_dict())),
        "record": dict(leaves(json.loads((last / "infcl_run.json").read_text(encoding="utf-8")))),
        "order": dict(leaves(getattr(trainer, "order", []))),
        "files": {name: content_of(path) if last in path.parents else "" for name, path in files.items()},
    }
    return json.loads(json.dumps(found).replace(str(folder), "FOLDER"))


def content_of(file: Path) -> str:
    """The hash of weights or states; empty for a file that also holds times or paths."""
    if file.suffix == ".safetensors":
        return hashed(file.read_bytes())
    if file.suffix in (".pt", ".pth", ".bin") and file.name != "training_args.bin":
        return hashed(json.dumps(list(leaves(torch.load(file, weights_only=False)))).encode())
    return ""


def rank_report(rank: int, world_size: int, name: str, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # Trainer prints its logs
        return report(CONFIGURATIONS[name].train(folder), folder)


def run(names: list[str]) -> dict[str, Any]:
    """The reports of the configurations, by name and process, and the versions that they are of."""
    torch.set_num_threads(1)
    packages = ("torch", "transformers", "accelerate", "datasets", "peft")
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}
    }
    pool = Ranks()
    try:
        for name in names:
            begin, configuration = time.monotonic(), CONFIGURATIONS[name]
            with tempfile.TemporaryDirectory() as folder:
                job = (rank_report, configuration.processes, name, Path(folder))
                if configuration.processes == 1:
                    reports = [rank_report(0, 1, name, Path(folder))]
                elif configuration.as_on_accelerators:
                    reports = FreshRanks().run(*job)
                else:
                    reports = pool.run(*job, always_ring=True)
            found[name] = {f"process {rank}": of_rank for rank, of_rank in enumerate(reports)}
            print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    finally:
        pool.close()
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each value that has changed, is gone or is new."""
    old, new = dict(leaves(before)), dict(leaves(now))
    for path in [*old, *(path for path in new if path not in old)]:
        was, is_now = (values.get(path, "absent") for values in (old, new))
        if was != is_now:
            yield f"{path}: was {was!r} and is {is_now!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path, help="the gold file, or a folder with its gold.json")
    parser.add_argument("--results", action="store_true", help="compare neither records nor files")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="NAME", help=", ".join(CONFIGURATIONS))
    options = parser.parse_args()
    file = options.file / "gold.json" if options.file.is_dir() else options.file
    if options.command == "write":
        found = run(options.only or list(CONFIGURATIONS))
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    found = run(options.only or list(CONFIGURATIONS))
    if options.only:
        before = {name: before[name] for name in ("versions", *options.only) if name in before}
    lines = list(differences(before, found))
    if options.results:
        lines = [line for line in lines if not any(f" / {part} / " in line for part in ("record", "files"))]
    print("\n".join(lines) if lines else f"{len(found) - 1} configurations: nothing differs.")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
