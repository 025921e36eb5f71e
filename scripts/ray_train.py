#!/usr/bin/env python3
r"""Train with Ray Train: after a worker or its machine has died, all go on from the last checkpoint.

    pip install "ray[train]==2.60.0"
    python scripts/ray_train.py --model openai/clip-vit-base-patch32 --dataset my/images --workers 8 --use_gpu \
      --global_batch_size 1024 --output_dir /shared/outputs/ray

All machines need the same absolute ``output_dir``.
"""

import argparse
import os
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(options: dict[str, Any]) -> None:
    """Trains in one worker, to which Ray gives the environment of a process of torchrun."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import AutoModel, AutoProcessor

    from hf_infcl import ImageTextDataset, InfCLTrainer, InfCLTrainingArguments, load_pairs

    args = InfCLTrainingArguments(
        os.path.join(options["output_dir"], "model"),
        global_batch_size=options["global_batch_size"],
        learning_rate=options["learning_rate"],
        max_steps=options["max_steps"],
        save_strategy="steps",
        save_steps=options["save_steps"],
        save_total_limit=2,
        use_cpu=not options["use_gpu"],
        report_to=[],
    )
    trainer = InfCLTrainer(
        AutoModel.from_pretrained(options["model"]),
        args,
        train_dataset=ImageTextDataset(load_pairs(options["dataset"], split="train")),
        processing_class=AutoProcessor.from_pretrained(options["model"]),
    )
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train(resume_from_checkpoint="auto")  # also after Ray has started this worker again
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"Trained {trainer.steps_trained} steps up to step {trainer.state.global_step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--dataset", required=True, help="pairs, as `infcl train` takes them: a folder or a Hub id")
    parser.add_argument("--output_dir", required=True, help="a folder that all machines share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use_gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--global_batch_size", type=int, default=1024, help="of all workers together")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=100)
    options = vars(parser.parse_args())
    for name in ("model", "dataset", "output_dir"):  # workers run in another folder
        if name == "output_dir" or os.path.exists(options[name]):
            options[name] = os.path.abspath(options[name])
    result = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=options["workers"], use_gpu=options["use_gpu"]),
        run_config=RunConfig(
            name="ray", storage_path=options["output_dir"], failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print({name: result.metrics[name] for name in ("step", "loss", "samples_seen")}, result.checkpoint)


if __name__ == "__main__":
    main()
