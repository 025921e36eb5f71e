"""What the short help of a command lists, and what the options of transformers mean here. Nothing imports torch."""

from __future__ import annotations

# The short help of a training: the options that most trainings set, in the order in which people set them.
FIRST = {
    "Data": (
        *("dataset", "streaming", "samples_per_epoch", "image_column", "caption_column", "pair_id_column"),
        *("caption_templates", "captions_per_image", "augmentation", "on_bad_sample", "leave_out", "replay_dataset"),
        "replay_share",
    ),
    "Model": (
        *("model", "open_clip_model", "tokenizer", "objective", "freeze", "lora_rank", "image_size", "teacher"),
        "cache_features",
    ),
    "Batch": (
        *("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("activation_checkpointing", "gradient_checkpointing"),  # one of which is transformers' old name
    ),
    "Length": ("num_train_epochs", "max_steps", "early_stopping_patience"),
    "Rates": (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optimizer"),
        "ema_decay",
    ),
    "Precision and speed": ("bf16", "torch_compile", "dataloader_num_workers", "use_cpu"),
    "Evaluation": (
        *("eval_dataset", "zero_shot_dataset", "class_names", "templates", "eval_benchmark", "guard_dataset"),
        *("eval_strategy", "eval_steps", "eval_pictures", "metric_for_best_model"),
    ),
    "Logging and saving": (
        *("output_dir", "overwrite_output_dir", "logging_steps", "report_to", "save_steps", "save_formats"),
        *("average_with_start", "resume_from_checkpoint", "push_to_hub"),
    ),
}

# Options that only say how one set is read, for which its name has room: `hf_infcl.options.sets`.
OF_ONE_SET = {
    *("dataset_name", "dataset_weights", "split", "replay_streaming", "label_column", "zero_shot_split"),
    *(f"{of}_{fact}" for of in ("replay", "eval", "guard") for fact in ("split", "image_column", "caption_column")),
    "zero_shot_image_column",
}

# What some of them mean in a contrastive training, in place of their own help.
HELP = {
    "output_dir": "Folder for everything that the command writes.",
    "per_device_train_batch_size": "Pairs of a micro-batch, which decide how much memory a process takes. One forward "
    "and backward sees so many; the loss sees the pairs of all micro-batches and processes.",
    "gradient_accumulation_steps": "Micro-batches of ONE contrastive batch on each process. The loss compares all "
    "their pairs with each other, as if they had been one batch; it is not the mean of their own losses.",
    "num_train_epochs": "Passes over the training data.",
    "max_steps": "Steps of the optimizer; by default, --num_train_epochs decides.",
    "learning_rate": "Learning rate: about 1e-5 to fine-tune, 1e-3 from random weights. It is the highest of the "
    "schedule.",
    "lr_scheduler_type": "Schedule of the learning rate, such as cosine.",
    "warmup_steps": "Steps in which the learning rate rises from 0. A number below 1 is their share of all steps.",
    "weight_decay": "Weight decay of the optimizer; biases and norms have none.",
    "bf16": "Compute in bfloat16; the weights stay fp32.",
    "torch_compile": "Compile the model: the first step takes longer, the others less.",
    "dataloader_num_workers": "Processes that decode the data of each GPU; with 0 the training does it.",
    "use_cpu": "Compute on the CPU although there is a GPU.",
    "eval_strategy": "When to evaluate: no, steps or epoch, the default if there is a set to evaluate on. "
    "With --max_steps it is steps.",
    "eval_steps": "Steps between two evaluations, by default a tenth of --max_steps. A number below 1 is their share "
    "of all steps.",
    "per_device_eval_batch_size": "Images or texts that a process embeds at once in an evaluation.",
    "logging_steps": "Steps between two lines of the log, by default a hundredth of the run. A number below 1 is their "
    "share of all steps.",
    "save_steps": "Steps between two checkpoints, by default those between two evaluations. A number below 1 is "
    "their share of all steps.",
    "report_to": "Trackers that get the log, such as wandb or tensorboard; none by default.",
    "load_best_model_at_end": "Save the weights of the best checkpoint, by --metric_for_best_model.",
    "push_to_hub": "Push the model and its card to the Hub whenever it is saved.",
    "hub_model_id": "With --push_to_hub: the repository. By default it has the name of --output_dir.",
    "seed": "Seed of the order of the data, of dropout and of new weights.",
}
