"""`infcl check`: reads the data as a training would, and tells what would spoil it."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..data import ContrastiveCollator, ImageTextDataset, ImageTextStream
from ..files.text import counted
from ..models.adapters import resize_config
from ..models.open_clip import load_readers
from ..options.commands import DataOptions
from ..processes.lock import check_writable
from ..quality.selection import tell_if_too_short
from ..quality.teachers import StoredTeacher
from ..trainer.checkpoints import full_disk_explained
from ..trainer.loaders import set_sizes
from ..trainer.trainer import InfCLTrainer
from .checking import REPLAYED, TRAINED, Finding, Inspector, SetFacts, find
from .datasets import evaluation_datasets, guard_datasets, training_parts
from .defaults import check_embedded, chooses_model
from .launched import cores, mistakes_in_one_line
from .parser import Parser

FINDINGS_FILE = "_check.json"  # in --output_dir; a push leaves out what begins with an underscore
SAMPLES, SHORT_SAMPLES = 10_000, 256  # pairs that are read by `infcl check`, and before a training


def check(parser: Parser, namespace: argparse.Namespace) -> None:
    """Prints what is wrong with all sets, and writes it with all rows into --output_dir, if named."""
    options, of_model, _, data, columns, evaluation, keep, args = parser.build(namespace)
    if args.world_size > 1:
        parser.error("The check reads with the workers of one process. Start it without a launcher.")
    samples = None if options.all else SAMPLES if data.check_samples is None else data.check_samples
    if samples == 0:
        parser.error("--check_samples must be at least 1, got 0.")
    is_written = "output_dir" in parser.given and ("output_dir" in parser.typed or not namespace.recipe)
    workers = args.dataloader_num_workers if "dataloader_num_workers" in parser.given else cores()
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_embedded(args.teacher_embeddings, parser.words)
        config, processor = load_readers(of_model.model, of_model.open_clip_model, of_model.tokenizer)
        resize_config(config, args.image_size)
        collator = ContrastiveCollator.for_model(processor, config, uint8=True)
        set_sizes(collator, args)  # what is cut on purpose is no finding
        inspector = Inspector(collator, config)
        parts = training_parts(data, columns, args)
        if args.teacher_embeddings is not None:
            teacher = StoredTeacher([args.teacher_embeddings], parts, args)  # compares them
            print(f"Teacher: {teacher.words}, of {teacher.width} dimensions. They are of these pairs.")
        sets: dict[str, Any] = {
            **{f"{REPLAYED}{number}" if number else TRAINED: one.plain() for number, one in enumerate(parts)},
            **evaluation_datasets(columns, evaluation, data, chooses=chooses_model(args, keep)),
            **guard_datasets(columns, keep, evaluation, data, chooses=chooses_model(args, keep)),
        }
        if is_written:
            check_writable(str(args.output_dir))  # before hours of reading
    trained: list[SetFacts] = []
    every: list[Finding] = []
    of_sets: dict[str, dict[str, Any]] = {}
    for key, dataset in sets.items():
        progress = "" if args.disable_tqdm else f"check {key}"
        facts = SetFacts(key, dataset, inspector, samples, workers=workers, progress=progress)
        findings = find(facts, trained, skips_bad=data.on_bad_sample == "skip")
        print(facts.words, *lines_of(findings), sep="\n")
        if facts.is_trained:
            trained.append(facts)
        every += findings
        of_sets[key] = {"read": len(facts.pairs), "whole": facts.is_whole, "findings": list(map(asdict, findings))}
    first, limited = trained[0], namespace.max_steps > 0
    if args.leave_out is not None:  # of a table
        seen = namespace.max_steps * args.global_batch_size * (1 - (args.replay_share or 0)) / len(first.dataset)
        tell_if_too_short(seen if limited else args.num_train_epochs)
    print("It was not checked whether captions fit their images. `infcl score` checks that.")
    remedies = dict.fromkeys(finding.options for finding in every if finding.options)
    if first.is_whole and isinstance(first.dataset, ImageTextStream) and data.samples_per_epoch is None and not limited:
        unusable = first.rows("broken").keys() | first.rows("captionless").keys()
        remedies[f"--samples_per_epoch {len(first.pairs) - len(unusable)}"] = None
    to_add, path = " ".join(remedies), Path(args.output_dir, FINDINGS_FILE)
    if is_written:
        with full_disk_explained(path.parent, "again"):
            path.write_text(json.dumps({"options": to_add, "sets": of_sets}, indent=1), encoding="utf-8")
    print(f"All rows of each finding are in {path}." if is_written else "With --output_dir, it also writes all rows.")
    if to_add:
        print(f"Add to `infcl train`: {to_add}")
    sys.exit(int(any(finding.spoils for finding in every)))


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """The findings of a set, for a person."""
    lines = [f"  {'SPOILS' if finding.spoils else 'note'}: {finding.text}" for finding in findings]
    return lines or ["  Nothing wrong was found."]


def short_check(trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream, data: DataOptions) -> Iterator[str]:
    """Lines about some pairs of the training set, before the training; those that the trainer tells are left out."""
    samples = SHORT_SAMPLES if data.check_samples is None else data.check_samples
    if samples == 0:
        return
    collator: Any = trainer.data_collator
    inspector = Inspector(collator, trainer.dual_encoder.model.config, before_training=True)
    facts = SetFacts(TRAINED, dataset.plain(), inspector, samples)
    every = find(facts, (), skips_bad=data.on_bad_sample == "skip")
    findings = [finding for finding in every if finding.kind not in ("cut", "repeated_captions")]
    verb = "was" if len(facts.pairs) == 1 else "were"
    checked = f"{counted(len(facts.pairs), 'pair')} of the training set {verb} checked"
    yield f"{checked}. `infcl check` reads more, with the same options."
    if findings:
        yield from lines_of(findings)
