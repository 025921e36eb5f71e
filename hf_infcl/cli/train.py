"""`infcl train`: from options to a trained checkpoint with its results, curves and model card."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch.distributed.elastic.multiprocessing.errors import record
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data import ImageTextDataset, load_pairs
from ..publishing.model_card import Evaluation, model_card, plot_curves
from ..training.arguments import InfCLTrainingArguments
from ..training.trainer import InfCLTrainer
from .evaluate import evaluation_datasets, load
from .launched import leave, mistakes_in_one_line
from .options import ColumnOptions, DataOptions, EvaluationOptions, LoraOptions, ModelOptions, Parser

CARD, CURVES = "README.md", "curves.png"
RESULTS = ("*_results.json", "trainer_state.json", CURVES)
PAIR_METRICS = ("loss", *(f"{way}_retrieval_recall@{k}" for way in ("image", "text") for k in (1, 5, 10)))
ZERO_SHOT_METRICS = ("acc1", "acc5", "mean_per_class_recall")


@record  # the launcher's last words are then the error of the process that failed first
def train(words: Sequence[str]) -> None:
    """Trains, evaluates, and writes checkpoint, results, curves and card into --output_dir."""
    parser = Parser(
        "train",
        "Train a dual encoder (CLIP, SigLIP, ...) with the exact contrastive loss of the global batch.",
        *(ModelOptions, LoraOptions, DataOptions, ColumnOptions, EvaluationOptions, InfCLTrainingArguments),
    )
    namespace, given = parser.read(words)
    chosen = rhythm(namespace, given)
    vars(namespace).update(chosen)
    try:
        check_best_metric(namespace)
    except ValueError as error:
        parser.error(str(error))
    model_options, lora, data, columns, evaluation, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        earlier = earlier_results(Path(args.output_dir)) if not args.resume_from_checkpoint else []
        if earlier and not data.overwrite_output_dir:
            names = ", ".join(path.name for path in earlier)
            raise ValueError(
                f"{args.output_dir} holds an earlier run ({names}). Go on with it by --resume_from_checkpoint true, "
                "choose another --output_dir, or delete it by --overwrite_output_dir."
            )
        train_dataset = ImageTextDataset(
            load_pairs(data.dataset, split=data.split, name=data.dataset_name),
            seed=args.seed,
            on_bad_sample=data.on_bad_sample,
            augmentation=data.augmentation,
            min_side=data.min_side,
            **columns.of_pairs,
        )
        eval_datasets = evaluation_datasets(columns, evaluation)
        if "zero_shot" in eval_datasets:
            check_best_metric(namespace, len(eval_datasets["zero_shot"].class_names))
        model, processor = load(model_options.model)
        model_class = type(model).__name__
        if lora.lora_rank is not None:
            model = with_adapters(model, lora.lora_rank, lora.lora_targets)
        trainer = InfCLTrainer(
            model, args, train_dataset=train_dataset, eval_dataset=eval_datasets or None, processing_class=processor
        )
    if trainer.is_world_process_zero():
        if chosen:
            print("Not given, and therefore chosen:", *(f"--{name} {value}" for name, value in chosen.items()))
        for path in earlier:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    resume: Any = {"true": True}.get((args.resume_from_checkpoint or "").lower(), args.resume_from_checkpoint)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        trained = trainer.train(resume_from_checkpoint=resume)
    if trainer.steps_trained == 0:  # the trainer has said that the run was complete
        if trainer.is_world_process_zero():
            print(f"The model, its card and its results in {args.output_dir} stay as they are.")
        leave(trainer)
        return
    trainer.log_metrics("train", trained.metrics)
    trainer.save_metrics("train", trained.metrics)
    trainer.save_state()
    trainer.save_model()
    measured: dict[str, float] = {}
    if eval_datasets:
        with mistakes_in_one_line(parser.prog, of_libraries=False):
            measured = trainer.evaluate()
        trainer.log_metrics("eval", measured)
        trainer.save_metrics("eval", measured)
    if trainer.is_world_process_zero():
        curves = draw_curves(trainer)
        model_card(
            model_class=model_class,
            start=model_options.model,
            dataset=data.dataset,
            pairs=len(train_dataset),
            objective=trainer.contrastive_objective,
            args=args,
            state=trainer.state,
            seconds=trained.metrics["train_runtime"],
            pair_id_column=columns.pair_id_column,
            evaluations=evaluations(evaluation, eval_datasets, measured),
            curves=curves,
        ).save(Path(args.output_dir, CARD))
        if args.push_to_hub:  # save_model has pushed the model, with a card that Trainer wrote
            HfApi(token=args.hub_token).upload_folder(
                repo_id=str(trainer.hub_model_id),
                folder_path=str(args.output_dir),
                allow_patterns=[CARD, CURVES, "*_results.json"],
                commit_message="Model card, curves and results",
                revision=args.hub_revision,
            )
        and_curves = ", its curves" if curves else ""
        print(f"The model, its card ({CARD}){and_curves} and results (*.json) are in {args.output_dir}.")
    leave(trainer)


def rhythm(namespace: argparse.Namespace, given: set[str]) -> dict[str, Any]:
    """Chooses how often to log, save and evaluate where the user did not.

    Trainer's defaults of 500 steps are made for many small steps, but a run of large batches may have 50 in all. Such a
    run logs every step (or every hundredth part of the run, if that is longer), and saves and evaluates every epoch (or
    every tenth part, if ``max_steps`` ends the run).
    """
    limited = namespace.max_steps > 0
    tenth, hundredth = (math.ceil(namespace.max_steps / n) if limited else 1 / n for n in (10, 100))
    chosen: dict[str, Any] = {}
    if not given & {"logging_steps", "logging_strategy"}:
        chosen["logging_steps"] = hundredth
    steps = next((getattr(namespace, name) for name in ("save_steps", "eval_steps") if name in given), None)
    if steps is None and limited:
        steps = tenth
    for what, wanted in (("save", True), ("eval", namespace.eval_dataset or namespace.zero_shot_dataset)):
        strategy = getattr(namespace, f"{what}_strategy")
        if wanted and f"{what}_strategy" not in given:
            strategy = chosen[f"{what}_strategy"] = "epoch" if steps is None else "steps"
        if strategy == "steps" and f"{what}_steps" not in given:
            chosen[f"{what}_steps"] = steps or tenth
    if namespace.save_strategy != "no" and "save_total_limit" not in given:
        chosen["save_total_limit"] = 3
    if namespace.load_best_model_at_end and "metric_for_best_model" not in given:
        chosen["metric_for_best_model"] = "pairs_loss" if namespace.eval_dataset else "zero_shot_acc1"
    return chosen


def check_best_metric(namespace: argparse.Namespace, classes: int | None = None) -> None:
    """Raises a ValueError if the checkpoint that is best by some metric is wanted and that metric is not measured.

    Args:
        namespace: all options.
        classes: the number of classes, once the zero-shot data set is open; fewer than five have no top-5 accuracy.
    """
    if not namespace.load_best_model_at_end:
        return
    names = [f"pairs_{metric}" for metric in PAIR_METRICS] if namespace.eval_dataset else []
    if namespace.zero_shot_dataset:
        few = classes is not None and classes < 5
        names += [f"zero_shot_{metric}" for metric in ZERO_SHOT_METRICS if not (few and metric == "acc5")]
    if not names:
        raise ValueError(
            "load_best_model_at_end needs something to evaluate: pass --eval_dataset, --zero_shot_dataset or both."
        )
    if (wanted := namespace.metric_for_best_model.removeprefix("eval_")) not in names:
        raise ValueError(f"metric_for_best_model must be one of {', '.join(names)}, got {wanted!r}.")


def earlier_results(folder: Path) -> list[Path]:
    """The checkpoints and results that an earlier run left in the folder."""
    patterns = (f"{PREFIX_CHECKPOINT_DIR}-*", *RESULTS)
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def with_adapters(model: Any, rank: int, targets: list[str]) -> Any:
    """Adds LoRA adapters (arXiv 2106.09685). Nothing else trains: logit_scale and logit_bias keep their values."""
    try:
        import peft
    except ImportError:
        raise ValueError("--lora_rank needs the package peft: pip install 'hf_infcl[peft]'.") from None
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets[0] if targets == ["all-linear"] else targets
    )
    return peft.get_peft_model(model, config)


def draw_curves(trainer: InfCLTrainer) -> str | None:
    """Draws the curves into output_dir and returns the picture's name; None without matplotlib or without losses."""
    if importlib.util.find_spec("matplotlib") is None:
        print("The curves were not drawn, because matplotlib is not installed.")
        return None
    if not any("loss" in entry for entry in trainer.state.log_history):  # with more logging_steps than steps
        return None
    plot_curves(trainer.state.log_history, Path(str(trainer.args.output_dir), CURVES))
    return CURVES


def evaluations(
    options: EvaluationOptions, datasets: Mapping[str, Any], metrics: Mapping[str, float]
) -> list[Evaluation]:
    """For the card: each data set that was measured, with its part of the metrics."""
    found = []
    for key, dataset in datasets.items():
        prefix = f"eval_{key}_"
        part = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if key == "pairs":
            found.append(Evaluation(str(options.eval_dataset), options.eval_split, len(dataset), part))
        else:
            source, split = str(options.zero_shot_dataset), options.zero_shot_split
            found.append(Evaluation(source, split, len(dataset), part, dataset.templates, dataset.class_names))
    return found
