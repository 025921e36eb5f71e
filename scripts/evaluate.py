#!/usr/bin/env python3
"""Measure a dual encoder: zero-shot classification, or loss and retrieval on image-text pairs, or both.

    python scripts/evaluate.py --model outputs/mine --zero_shot_dataset my/labelled --templates "a photo of a {}."
    accelerate launch scripts/evaluate.py --model google/siglip-base-patch16-224 --eval_dataset my/pairs

Takes the arguments of `scripts/train.py` but for the training data, in a file too, and has no use for those about the
training itself. Prints a table and writes eval_results.json into --output_dir.
"""

from pathlib import Path

from train import ModelArguments, PairArguments, ZeroShotArguments, evaluation_datasets, leave, load, parse

from hf_infcl import InfCLTrainer, InfCLTrainingArguments


def main() -> None:
    model_args, pairs, zero_shot, args = parse(ModelArguments, PairArguments, ZeroShotArguments, InfCLTrainingArguments)
    datasets = evaluation_datasets(pairs, zero_shot)
    if not datasets:
        raise SystemExit("Nothing to measure: pass --eval_dataset, --zero_shot_dataset or both.")
    model, processor = load(model_args.model)
    trainer = InfCLTrainer(model, args, eval_dataset=datasets, processing_class=processor)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics, combined=False)
    if trainer.is_world_process_zero():
        print(f"Written to {Path(args.output_dir) / 'eval_results.json'}")
    leave(trainer)


if __name__ == "__main__":
    main()
