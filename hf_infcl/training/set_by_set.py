"""Evaluates one set after the other; what an interrupted command has measured is not measured again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data import ZeroShotDataset
from ..loading.feature_cache import fingerprint
from ..processes.collectives import Processes, failures_announced
from .trainer import InfCLTrainer

PROGRESS = "eval_progress.json"


def evaluate_sets(trainer: InfCLTrainer, sets: Mapping[str, object]) -> dict[str, float]:
    """The metrics of ``trainer.evaluate(sets)``, for a trainer that has evaluated nothing; collective.

    After each set they are kept in ``eval_progress.json`` of the output folder, until all are measured. A set is taken
    from there if its content, its prompts, and the weights, the processor, the precision and the loss are the same.

    Raises:
        ValueError: ``eval_progress.json`` is damaged.
    """
    path = Path(str(trainer.args.output_dir), PROGRESS)
    keys: dict[str, str] = {}
    known: dict[str, dict[str, float]] = {}
    with failures_announced():
        if trainer.is_world_process_zero():
            keys = _keys(trainer, sets)
            before = _read(path)
            known = {key: before[key] for key in keys.values() if key in before}
    Processes().agree([])
    keys, known = Processes().gather_objects((keys, known))[0]
    for name, dataset in sets.items():
        if (key := keys[name]) in known:
            if trainer.is_world_process_zero():
                print(f"{name} was measured before the command was interrupted: its metrics are those of {path}.")
            continue
        known[key] = trainer.evaluate(dataset, metric_key_prefix=f"eval_{name}")
        if trainer.is_world_process_zero():
            _write(path, known)
    if trainer.is_world_process_zero():
        path.unlink(missing_ok=True)
    return {metric: value for name in sets for metric, value in known[keys[name]].items()}


def _keys(trainer: InfCLTrainer, sets: Mapping[str, Any]) -> dict[str, str]:
    """A hash for each set of all that its metrics depend on."""
    args = trainer.args
    precision = f"{args.bf16} {args.fp16} {args.bf16_full_eval} {args.fp16_full_eval}"
    collator: Any = trainer.data_collator
    model = fingerprint("", trainer.dual_encoder.model, collator, precision)
    settings = [collator.text_fingerprint(), args.objective, args.equal_ids]
    keys = {}
    for name, dataset in sets.items():
        prompts = dataset.prompts() if isinstance(dataset, ZeroShotDataset) else []
        parts = [name, model, type(dataset).__name__, dataset.image_fingerprint(), dataset.columns, prompts, settings]
        keys[name] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return keys


def _read(path: Path) -> dict[str, dict[str, float]]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it to measure all sets again.") from error


def _write(path: Path, known: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known), encoding="utf-8")
    os.replace(partial, path)
