"""`infcl check`: reads the data as a training would, and tells what would spoil it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from ...checkpoints.lock import check_writable
from ...conversion.models import load_readers
from ...data import ContrastiveCollator, ImageTextDataset, ImageTextStream
from ...encoders.image_size import config_for_images
from ...encoders.model_types import check_type_of_config
from ...encoders.pooling import Pooling
from ...evaluation.metrics import CEILING
from ...evaluation.retrieval import recall_ceilings
from ...loading.loaders import set_sizes, training_collator
from ...loading.stored_teachers import StoredTeacher, embedding_folders
from ...options.arguments import InfCLTrainingArguments
from ...options.evaluation_options import EvaluationOptions, GuardOptions
from ...shards.values import counted
from ...training.trainer import InfCLTrainer
from ...windows.selection import tell_if_too_short
from ..checking.faults import make_limits
from ..checking.findings import Finding, findings_of_ceilings, findings_of_ledger, findings_of_overlap, findings_of_set
from ..checking.looking import Looker
from ..checking.report import facts_lines, finding_lines, write_report
from ..checking.set_facts import REPLAYED, TRAINED, SetFacts, read_facts
from ..scoring.ledger import Ledger, check_data
from .command_options import ColumnOptions, DataOptions
from .datasets import evaluation_datasets, guard_datasets, replay_set, training_set
from .defaults import check_embedded
from .launched import cores, mistakes_in_one_line
from .parser import Parser

SAMPLES, SHORT_SAMPLES = 10_000, 256  # pairs that are read by `infcl check`, and before a training
TOLD_BY_TRAINER = ("cut", "repeated_captions")


def check(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Prints facts and findings of all sets, and writes contact sheet and all findings into --output_dir, if named."""
    options, of_model, _, data, columns, evaluation, keep, args = parser.build(namespace, user_options, computes=False)
    if args.world_size > 1:
        parser.error("The check reads with the workers of one process. Start it without a launcher.")
    samples = None if options.all else SAMPLES if data.check_samples is None else data.check_samples
    if samples == 0:
        parser.error("--check_samples must be at least 1, got 0.")
    decided = {name for name in user_options if parser.typed(name) or not namespace.recipe}
    workers = args.dataloader_num_workers if "dataloader_num_workers" in user_options else cores()
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_embedded(args.teacher_embeddings, parser.asked)
        config, processor = load_readers(of_model.model, of_model.open_clip_model, of_model.tokenizer)
        check_type_of_config(config, of_model.model)
        config = config_for_images(config, args.image_size)
        collator = ContrastiveCollator.for_model(processor, config, uint8=True)
        set_sizes(collator, args)
        training_collator(collator, args)  # only its checks: what is cut on purpose is no finding
        text = config.text_config
        looker = Looker(collator, getattr(text, "vocab_size", None), Pooling.of_config(text))
        sets = sets_to_check(data, columns, evaluation, keep, args)
        ledger = None if options.ledger is None else Ledger.read(options.ledger)
        if ledger is not None:
            check_data(ledger.content, sets[TRAINED], options.ledger)
        if "output_dir" in decided:
            check_writable(str(args.output_dir))  # before hours of reading
    results: dict[str, tuple[SetFacts, list[Finding]]] = {}
    for key, dataset in sets.items():
        began = time.perf_counter()
        with mistakes_in_one_line(parser.prog, of_libraries=False):
            limits = make_limits(config, collator)
            facts = read_facts(key, dataset, looker, limits, samples, workers, show=not args.disable_tqdm)
        findings = findings_of_set(facts, dataset, skips_bad=data.on_bad_sample == "skip")
        if facts.is_trained and ledger is not None:
            findings = findings_of_ledger(ledger, options.ledger) + findings
        if not facts.is_trained:
            trained = [one for one, _ in results.values() if one.is_trained]
            findings = [finding for one in trained for finding in findings_of_overlap(one, facts)] + findings
            if getattr(dataset, "kind", "pairs") == "pairs":
                findings += findings_of_ceilings(facts, reachable_recalls(facts))
        results[key] = facts, findings
        print(*facts_lines(facts, workers=max(1, workers), seconds=time.perf_counter() - began), sep="\n")
        print(*finding_lines(findings), sep="\n")
    trained_facts = results[TRAINED][0]
    if args.leave_out is not None and trained_facts.pairs:
        seen = namespace.max_steps * args.global_batch_size * (1 - (args.replay_share or 0)) / trained_facts.pairs
        tell_if_too_short(seen if namespace.max_steps > 0 else args.num_train_epochs)
    if trained_facts.has_captions and ledger is None:
        print("It was not checked whether captions fit their images. `infcl score` checks that.")
    every = [finding for _, findings in results.values() for finding in findings]
    has_length = data.samples_per_epoch is not None or namespace.max_steps > 0
    remedies = [finding.options for finding in every]
    if trained_facts.is_whole and isinstance(sets[TRAINED], ImageTextStream) and not has_length:
        remedies.append(f"--samples_per_epoch {trained_facts.usable}")
    to_add = " ".join(filter(None, dict.fromkeys(remedies)))
    write_report(Path(args.output_dir) if "output_dir" in decided else None, results, to_add)
    sys.exit(int(any(finding.spoils for finding in every)))


def sets_to_check(
    data: DataOptions,
    columns: ColumnOptions,
    evaluation: EvaluationOptions,
    guards: GuardOptions,
    args: InfCLTrainingArguments,
) -> dict[str, Any]:
    """The training set as `TRAINED`, old pairs as `REPLAYED` and a number, all other sets by their names."""
    if data.streaming and data.samples_per_epoch is None and args.max_steps <= 0:
        args.max_steps = 1  # a training needs its length, a check does not
    trained: Any = training_set(data, columns, args)
    old: Any = replay_set(data, columns, args)
    olds: list[Any] = [] if old is None else old.datasets if isinstance(old, ConcatDataset) else [old]
    sets = {
        TRAINED: trained.plain(),
        **{f"{REPLAYED}{number}": one.plain() for number, one in enumerate(olds, 1)},
        **evaluation_datasets(columns, evaluation, data),
        **guard_datasets(columns, guards, evaluation, data),
    }
    if args.teacher_embeddings is not None:
        teacher = StoredTeacher(embedding_folders(args.teacher_embeddings), [trained, *olds], args)  # compares them
        print(f"Teacher: {teacher.words}, of {teacher.width} dimensions. They are of these pairs.")
    return sets


def reachable_recalls(facts: SetFacts) -> dict[str, float]:
    """The highest recalls at 1 that a model can reach on the pairs of a table that were read."""
    ids, rows = map(torch.tensor, facts.captions_by_row())
    ceilings = recall_ceilings(ids, rows, len(facts.seen), [1]) if facts.seen else {}
    return {name.removesuffix(CEILING): value for name, value in ceilings.items()}


def short_check(trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream, data: DataOptions) -> Iterator[str]:
    """Lines about some pairs of the training set, before the training; those that the trainer tells are left out."""
    samples = SHORT_SAMPLES if data.check_samples is None else data.check_samples
    if samples == 0:
        return
    plain = dataset.plain()
    collator: Any = trainer.data_collator
    looker = Looker(collator, trainer.dual_encoder.vocabulary, trainer.dual_encoder.pooling)
    limits = make_limits(trainer.dual_encoder.model.config, collator)
    facts = read_facts(TRAINED, plain, looker, limits, samples, 0, show=False)
    findings = findings_of_set(facts, plain, skips_bad=data.on_bad_sample == "skip")
    findings = [finding for finding in findings if finding.kind not in TOLD_BY_TRAINER]
    checked = f"{counted(facts.looks, 'pair')} of the training set {'was' if facts.looks == 1 else 'were'} checked"
    yield f"{checked}. `infcl check` reads more, with the same options."
    if findings:
        yield from finding_lines(findings)
