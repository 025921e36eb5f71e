"""Trainings of random settings, of which only the global batch is given: does what is found fit in every step?"""

from __future__ import annotations

import dataclasses
import logging
import random
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from torch.utils.data import Dataset

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.step import micro_batches as repeating

END = 3  # the token with which CLIP's texts end; SigLIP's need none
OPERATIONS = 6e14  # of a step, at most: one to two seconds of an H100
STEPS = 3


@dataclass(frozen=True)
class Setting:
    """What is drawn of a training."""

    kind: str  # of `tf.AutoModel`: "clip" or "siglip"
    width: int
    layers: int
    text_layers: int
    patch: int
    image_size: int
    tokens: int
    global_batch: int
    options: dict[str, Any]

    @staticmethod
    def draw(seed: int) -> Setting:
        drawn = random.Random(seed)
        width, layers = drawn.choice([(384, 12), (768, 12), (768, 12), (1024, 24)])
        patch, image_size = drawn.choice([(32, 224), (16, 128), (16, 224), (16, 224), (14, 224), (14, 336)])
        text_layers, tokens = drawn.choice([4, 12]), drawn.choice([16, 32, 77])
        options: dict[str, Any] = {
            "gradient_checkpointing": drawn.random() < 0.15,
            "offload_inputs": drawn.random() < 0.2,
            "patch_dropout": drawn.choice([None, None, None, 0.5]),
            "freeze": drawn.choice([None, None, None, None, "image", "text"]),
            "optim": drawn.choice(["adamw_torch", "adamw_torch_fused"]),
            "optimizer": drawn.choice([None, None, "muon"]),
        }
        if options["freeze"] == "image":
            options["patch_dropout"] = None
        options["bf16"] = drawn.random() < 0.9
        # A forward takes 2 operations for each weight and token, and a step four times as much: two forwards and a
        # backward. A layer has 12 · width² weights, and those of the text tower about half as many.
        patches = (image_size // patch) ** 2
        of_pair = 8 * 12 * width**2 * (layers * patches + text_layers * tokens / 2)
        slower = 1 if options["bf16"] else 6  # fp32
        most = max(256, int(OPERATIONS / of_pair / slower))
        batch = drawn.choice([32 * drawn.randint(2, most // 32), 2 ** drawn.randint(6, most.bit_length() - 1)])
        kind = drawn.choice(["clip", "siglip"])
        return Setting(kind, width, layers, text_layers, patch, image_size, tokens, min(batch, 8192), options)

    def model(self) -> Any:
        text_width = self.width if self.kind == "siglip" else max(384, self.width * 2 // 3 // 64 * 64)
        vision = _sizes(self.width, self.layers) | {"patch_size": self.patch, "image_size": self.image_size}
        text = _sizes(text_width, self.text_layers) | {"max_position_embeddings": self.tokens, "eos_token_id": END}
        config_class = {"clip": tf.CLIPConfig, "siglip": tf.SiglipConfig}[self.kind]
        config = config_class(text_config=text, vision_config=vision)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return tf.AutoModel.from_config(config, attn_implementation="sdpa")


def _sizes(width: int, layers: int) -> dict[str, int]:
    """The options of a transformer of the usual proportions."""
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }


class Rows(Dataset):
    """Random pairs, of which few have the longest text, so that the steps differ in the length of their texts."""

    def __init__(self, setting: Setting, rows: int) -> None:
        self._setting, self._rows = setting, rows
        self._image = torch.randn(3, setting.image_size, setting.image_size)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        drawn = random.Random(row)
        most = self._setting.tokens if drawn.random() < 0.02 else max(6, self._setting.tokens // 2)
        tokens = [drawn.randrange(4, 1000) for _ in range(drawn.randint(4, most - 1))]
        return {"pixel_values": self._image, "input_ids": [*tokens, END]}


class Padded:
    """A data collator that pads the texts of a batch to the longest of them, or all to one length."""

    def __init__(self, setting: Setting) -> None:
        self.text_padding = {"input_ids": END, "attention_mask": 0}
        self.max_length, self._to_one_length = setting.tokens, setting.kind == "siglip"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = self.max_length if self._to_one_length else max(len(row["input_ids"]) for row in rows)
        tokens = torch.full((len(rows), longest), END)
        mask = torch.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[number, : len(row["input_ids"])] = 1
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "input_ids": tokens,
            "attention_mask": mask,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a training."""

    failure: str  # empty if it trained to its end
    repeated: int  # how often a step was repeated, because memory ran out
    division: str  # that was found: micro-batch × accumulation, and what is kept
    peak: float  # share of the memory of the device
    seconds: float


class Repeats(logging.Handler):
    """Counts the repetitions that are told."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "It is repeated" in record.getMessage()


def train(setting: Setting) -> Outcome:
    """Trains the steps of a setting on this process's device."""
    repeating.logger.addHandler(repeats := Repeats())
    begin, on_gpu = time.perf_counter(), torch.cuda.is_available()
    trainer, failure = None, ""
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        try:
            args = InfCLTrainingArguments(
                output_dir=folder,
                global_batch_size=setting.global_batch,
                max_steps=STEPS,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not on_gpu,
                dataloader_num_workers=4 if on_gpu else 0,
                remove_unused_columns=False,
                **setting.options,
            )
            rows = Rows(setting, STEPS * setting.global_batch)
            trainer = InfCLTrainer(setting.model(), args, Padded(setting), train_dataset=rows)
            trainer.train()
        except (RuntimeError, ValueError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    repeating.logger.removeHandler(repeats)
    division, peak = "", 0.0
    if trainer is not None:
        found = trainer.args
        division = (
            f"{found.per_device_train_batch_size} × {found.gradient_accumulation_steps}, texts {found.texts_at_once}, "
            f"graphs {found.retain_graphs}"
        )
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    return Outcome(failure, repeats.count, division, round(peak, 3), round(time.perf_counter() - begin, 1))


def described(seed: int, setting: Setting, outcome: Outcome) -> str:
    values = {name: value for name, value in dataclasses.asdict(setting).items() if name != "options"}
    given = {name: value for name, value in setting.options.items() if value}
    return f"{seed}: {values} {given} -> {outcome}"
