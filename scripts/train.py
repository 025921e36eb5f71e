#!/usr/bin/env python3
"""Train a dual encoder (CLIP, SigLIP, ...) with the exact contrastive loss of the global batch.

    python scripts/train.py --model openai/clip-vit-base-patch32 --dataset my/images --output_dir outputs/mine
    accelerate launch scripts/train.py config.yaml
    torchrun --nproc_per_node 8 scripts/train.py config.yaml --learning_rate 1e-4

Every argument may stand in one YAML or JSON file, given first; those after it on the command line win. `--help` lists
them: the ones below, then those of `transformers.TrainingArguments` and what InfCLTrainingArguments adds.
"""

import atexit
import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModel, AutoProcessor, HfArgumentParser

from hf_infcl import ImageTextDataset, InfCLTrainer, InfCLTrainingArguments, ZeroShotDataset, load_pairs
from hf_infcl.publishing.model_card import Evaluation, model_card, plot_curves


@dataclass
class ModelArguments:
    model: str = field(metadata={"help": "Checkpoint: a Hub id or a folder."})


@dataclass
class PairArguments:
    image_column: str = field(default="image", metadata={"help": "Column of images, paths or encoded images."})
    caption_column: str = field(default="caption", metadata={"help": "Column of captions: a string or a list of them."})
    pair_id_column: str | None = field(
        default=None,
        metadata={"help": "Rows equal in this column, the caption's for instance, are never each other's negatives."},
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Image-text pairs to measure the loss and retrieval on: Hub id or folder."}
    )
    eval_split: str = field(default="test", metadata={"help": "Its split."})

    @property
    def columns(self) -> dict[str, str | None]:
        names = "image_column", "caption_column", "pair_id_column"
        return {name: getattr(self, name) for name in names}


@dataclass
class ZeroShotArguments:
    zero_shot_dataset: str | None = field(
        default=None, metadata={"help": "Labelled images to measure zero-shot classification on: Hub id or folder."}
    )
    zero_shot_split: str = field(default="test", metadata={"help": "Its split."})
    label_column: str = field(default="label", metadata={"help": "Its column of class numbers."})
    class_names: list[str] | None = field(
        default=None, metadata={"help": "A name for each class; by default those that the dataset knows."}
    )
    templates: list[str] = field(
        default_factory=lambda: ["a photo of a {}."], metadata={"help": "Prompts, with {} for the name of the class."}
    )


@dataclass
class TrainArguments:
    dataset: str = field(metadata={"help": "Image-text pairs to train on: a Hub id or a folder."})
    dataset_name: str | None = field(default=None, metadata={"help": "Configuration of it, where it has several."})
    split: str = field(default="train", metadata={"help": "Its split."})
    on_bad_sample: str = field(default="raise", metadata={"help": "'raise' or 'skip' a broken image or empty caption."})


@record  # the launcher's last words are then the error of the process that failed first
def main() -> None:
    model_args, data, pairs, zero_shot, args = parse(
        ModelArguments, TrainArguments, PairArguments, ZeroShotArguments, InfCLTrainingArguments
    )
    train_dataset = ImageTextDataset(
        load_pairs(data.dataset, split=data.split, name=data.dataset_name),
        seed=args.seed,
        on_bad_sample=data.on_bad_sample,
        **pairs.columns,
    )
    eval_datasets = evaluation_datasets(pairs, zero_shot)
    model, processor = load(model_args.model)
    trainer = InfCLTrainer(
        model, args, train_dataset=train_dataset, eval_dataset=eval_datasets or None, processing_class=processor
    )
    resume: Any = {"true": True}.get((args.resume_from_checkpoint or "").lower(), args.resume_from_checkpoint)
    trained = trainer.train(resume_from_checkpoint=resume).metrics
    trainer.log_metrics("train", trained)
    trainer.save_metrics("train", trained)
    trainer.save_state()
    trainer.save_model()
    measured: dict[str, float] = {}
    if eval_datasets:
        measured = trainer.evaluate()
        trainer.log_metrics("eval", measured)
        trainer.save_metrics("eval", measured)
    if trainer.is_world_process_zero():
        curves = None
        if importlib.util.find_spec("matplotlib") is None:
            print("No curves: pip install matplotlib draws them next time.")
        elif any("loss" in entry for entry in trainer.state.log_history):  # not with more logging_steps than steps
            curves = "curves.png"
            plot_curves(trainer.state.log_history, Path(args.output_dir, curves))
        model_card(
            model_class=type(model).__name__,
            start=model_args.model,
            dataset=data.dataset,
            pairs=len(train_dataset),
            objective=trainer.contrastive_objective,
            args=args,
            state=trainer.state,
            seconds=trained["train_runtime"],
            pair_id_column=pairs.pair_id_column,
            evaluations=evaluations(pairs, zero_shot, eval_datasets, measured),
            curves=curves,
        ).save(Path(args.output_dir, "README.md"))
        if args.push_to_hub:  # save_model has pushed the model, with a card that Trainer wrote
            HfApi(token=args.hub_token).upload_folder(
                repo_id=trainer.hub_model_id,
                folder_path=args.output_dir,
                allow_patterns=["README.md", "curves.png", "*_results.json"],
                commit_message="Model card, curves and results",
                revision=args.hub_revision,
            )
        and_curves = ", its curves" if curves else ""
        print(f"The model, its card (README.md){and_curves} and results (*.json) are in {args.output_dir}")
    leave(trainer)


def leave(trainer: InfCLTrainer) -> None:
    """The processes end together, and without Python's own clean-up at the end.

    On gloo a process sometimes aborted ("terminate called without an active exception") after all its work was done: in
    one of 47 runs that waited for each other here. The cause is presumed, not known, to be a thread that outlives the
    group and meets that clean-up.
    """
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.args.world_size > 1:
        atexit._run_exitfuncs()  # trackers finish here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def load(checkpoint: str) -> tuple[Any, Any]:
    """Model in fp32, which the optimizer needs whatever the checkpoint was saved in, and processor."""
    return AutoModel.from_pretrained(checkpoint, dtype=torch.float32), AutoProcessor.from_pretrained(checkpoint)


def evaluation_datasets(pairs: PairArguments, zero_shot: ZeroShotArguments) -> dict[str, Any]:
    """What the arguments ask to be measured: any of "pairs" and "zero_shot"."""
    found: dict[str, Any] = {}
    if pairs.eval_dataset:
        rows = load_pairs(pairs.eval_dataset, split=pairs.eval_split)
        found["pairs"] = ImageTextDataset(rows, all_captions=True, **pairs.columns)
    if zero_shot.zero_shot_dataset:
        found["zero_shot"] = ZeroShotDataset(
            load_pairs(zero_shot.zero_shot_dataset, split=zero_shot.zero_shot_split),
            image_column=pairs.image_column,
            label_column=zero_shot.label_column,
            class_names=zero_shot.class_names,
            templates=zero_shot.templates,
        )
    return found


def evaluations(
    pairs: PairArguments, zero_shot: ZeroShotArguments, datasets: dict[str, Any], metrics: dict[str, float]
) -> list[Evaluation]:
    """For the card: what `evaluation_datasets` named, with its part of the metrics."""
    found = []
    for key, dataset in datasets.items():
        own = {name.removeprefix(f"eval_{key}_"): v for name, v in metrics.items() if name.startswith(f"eval_{key}_")}
        if key == "pairs":
            found.append(Evaluation(str(pairs.eval_dataset), pairs.eval_split, len(dataset), own))
        else:
            source, split = str(zero_shot.zero_shot_dataset), zero_shot.zero_shot_split
            found.append(Evaluation(source, split, len(dataset), own, dataset.templates, dataset.class_names))
    return found


def parse(*dataclasses: type) -> tuple[Any, ...]:
    """The dataclasses from the command line, or from a YAML or JSON file named first and what follows it."""
    parser = HfArgumentParser(
        dataclasses,
        allow_abbrev=False,
        usage="%(prog)s [FILE.yaml or FILE.json] [--NAME VALUE ...]",
        description=(sys.modules["__main__"].__doc__ or "").split("\n")[0],
    )
    words = sys.argv[1:]
    try:
        if words and words[0].endswith((".yaml", ".yml", ".json")):
            words = _as_words(Path(words[0])) + words[1:]
        return parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _as_words(path: Path) -> list[str]:
    """A file's arguments as on the command line. Scalars stay text: YAML would turn `no` to False and 1e-3 to a str."""
    text = path.read_text(encoding="utf-8")
    try:
        as_text, typed = yaml.load(text, Loader=yaml.BaseLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(typed, dict):
        raise ValueError(f"{path} must hold a mapping of argument names to values, not a {type(typed).__name__}.")
    words = []
    for name, value in as_text.items():
        if isinstance(value, list):
            words += [f"--{name}", *value]
        else:
            words.append(f"--{name}={json.dumps(typed[name]) if isinstance(value, dict) else value}")
    return words


if __name__ == "__main__":
    main()
