"""One training of a small CLIP: its settings, its trainer, and what is measured on the way."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import benchmarks.training
import torch
from benchmarks.common import Row, now
from benchmarks.inputs import tower
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.evaluation import retrieval_metrics, zero_shot_classifier, zero_shot_metrics
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.optim import MuonAdamW, parameter_groups

from .in_memory import LENGTH, SPECIAL, TEMPLATES, InMemory, normalised
from .swaps import KINDS
from .tables import score

TOY = tower(32, 64, 2, 2)
SIZES = {  # of the ViT and of the text tower
    "tiny": (tower(192, 768, 5, 3), tower(192, 768, 2, 3)),  # 5 M
    "small": (tower(320, 1280, 7, 5), tower(320, 1280, 3, 5)),  # 8.7 and 6.3 M, 2.6 M of them embeddings of tokens
    "large": (tower(512, 2048, 9, 8), tower(384, 1536, 4, 6)),  # 39 M
}


@dataclass(frozen=True)
class Run:
    """The settings of one training."""

    table: str  # the CSV of its rows
    method: str  # a key of `TRAINERS`
    batch: int  # the pairs of one optimizer step
    micro_batch: int  # the pairs of one forward; `Trainer` computes a loss for each
    samples: int  # the pairs seen, in all
    learning_rate: float  # after a warm-up over a tenth of the steps; a cosine ends at 0. With Muon, of its matrices
    experiment: str = ""  # the experiment in results.csv that it belongs to
    objective: str = "softmax"  # or "sigmoid"
    pair_ids: bool = False  # pairs of one name are not each other's negatives
    seed: int = 0  # of the initial weights, the order, the captions drawn and the augmentation
    evaluations: int = 1  # how often the run is measured; with 0, only its time and memory are
    captions: int = 1  # that are drawn per image
    equal_ids: str = "exclude"  # or "positive", as in `InfCLTrainingArguments`
    negatives: bool = False  # a hard negative caption is drawn for each image that has any
    optimizer: str = "adamw"  # or "muon"
    way: str = ""  # of fine-tuning on clip art: "full", "LoRA", "locked image tower"; "base" is the training before it
    options: str = "{}"  # further options of `InfCLTrainingArguments`, in JSON
    sources: str = ""  # of the pairs, with commas between them; by default all
    replay: str = ""  # the sources of old pairs that are mixed in, with commas between them
    size: str = "small"  # a key of `SIZES`
    wrong: str = "0.0"  # the share of the pairs with the captions of others, or "titles": also those of collections
    oracle: bool = False  # pairs with wrong captions are removed before the training
    cleaned: float = 0.0  # the p_wrong, in the ledger of a training on all or of the base, from which pairs are removed
    taught_by: str = ""  # the teacher whose stored embeddings are learned
    weight: float = 0.0  # of the teacher
    side: str = "both"  # that it teaches: "image", "text" or "both"
    towers: str = ""  # of pretrained towers, what trains beside their heads: "heads", "lit", "text lora" or "both"
    compiled: bool = True  # whether the layers are compiled, on a GPU

    @property
    def adamw_rate(self) -> float:
        """The learning rate of the parameters that AdamW updates: with Muon, a quarter of Muon's, and at most 5e-4.

        A quarter is the default of `InfCLTrainingArguments`, and 5e-4 the best rate of AdamW alone for every batch.
        """
        return self.learning_rate if self.optimizer == "adamw" else min(self.learning_rate / 4, 5e-4)


# ---- Model and trainers ----


def new_model(
    data: dict, seed: int, objective: str = "softmax", *, toy: bool = False, size: str = "small"
) -> CLIPModel:
    """A CLIP with random weights; with the sigmoid objective it has SigLIP's temperature and bias at their start."""
    vision, words = (TOY, TOY) if toy else SIZES[size]
    start, end, padding = SPECIAL.values()
    text = {"vocab_size": data["vocabulary"], "max_position_embeddings": LENGTH, "bos_token_id": start}
    text |= {"eos_token_id": end, "pad_token_id": padding}
    image = {"image_size": data["images"].shape[-1], "patch_size": 16 if toy else 8}
    config = CLIPConfig(text_config={**words, **text}, vision_config={**vision, **image}, projection_dim=256)
    torch.manual_seed(seed)
    model = CLIPModel(config)
    if objective == "sigmoid":  # arXiv 2303.15343, section 3.3
        model.logit_bias = nn.Parameter(torch.full((1,), -10.0))
        model.logit_scale.data.fill_(math.log(10))
    return model


def compile_layers(model: CLIPModel, *, texts: bool) -> None:
    """Compiles the layers in place, each for itself: a layer's code serves all layers and all models.

    With ``texts`` those of the text tower, too; batches have to have the same number of texts then.
    """
    for side in (model.vision_model, model.text_model) if texts else (model.vision_model,):
        for layer in side.encoder.layers:
            layer.compile(dynamic=False)


class _SameDecay(Trainer):
    """Trainer that decays matrices only, as InfCLTrainer does: neither side shall win by its weight decay."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    get_train_dataloader = Trainer.get_train_dataloader  # the benchmark's trainers read from a pool


class PlainTrainer(_SameDecay, benchmarks.training.PlainTrainer):
    """`transformers.Trainer` with CLIPModel's own loss of each micro-batch."""


class OpenCLIPTrainer(_SameDecay, benchmarks.training.OpenCLIPTrainer):
    """OpenCLIP's --accum-freq."""


TRAINERS: Any = {"Trainer": PlainTrainer, "OpenCLIP accumulation": OpenCLIPTrainer, "InfCLTrainer": InfCLTrainer}


# ---- Measuring ----


def encoded(dual: DualEncoder, values: Tensor, size: int = 1024) -> Tensor:
    """The embeddings of tokens [N, L], or of images or their features, in batches of this size."""

    def of(part: Tensor) -> Tensor:
        if values.dtype == torch.int32:
            return dual.encode_texts({"input_ids": part.long()})
        return dual.encode_images({"pixel_values": normalised(part)})

    with torch.autocast(values.device.type, torch.bfloat16, enabled=values.is_cuda):
        return torch.cat([of(part) for part in values.split(size)]).float()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # evaluation sets are of many sizes
def measure(model: Any, data: dict, sets: Sequence[str], width: int | None = None) -> Row:
    """Retrieval recalls, the images found for ten captions, and zero-shot accuracies of evaluation sets.

    With a ``width`` the embeddings are cut to it. The model is left in evaluation mode.
    """
    model.eval()
    dual = DualEncoder(model, width)
    row: Row = {}
    for name in sets:
        values = data["sets"][name]
        images = encoded(dual, values["images"])
        if "labels" in values:
            classifier = zero_shot_classifier(encoded(dual, values["prompts"]), num_templates=len(TEMPLATES))
            accuracies = zero_shot_metrics(images, classifier, values["labels"])
            row |= {f"{name}_{metric}": round(accuracies[metric], 5) for metric in ("acc1", "mean_per_class_recall")}
            continue
        texts = encoded(dual, values["tokens"])
        found = retrieval_metrics(images, texts, torch.arange(len(images), device=images.device))
        row |= {f"{name}_{metric.replace('_retrieval', '')}": round(value, 5) for metric, value in found.items()}
        if name != "validation":
            swaps = swap_accuracies(images, texts, values["swaps"], dual)
            row |= {f"{name}_{kind}_swaps": share for kind, share in swaps}
            ten = [number * len(texts) // 10 for number in range(10)]  # captions at equal distances, to be looked at
            best = (texts[ten] @ images.T).topk(min(5, len(images)), dim=1)
            row[f"{name}_examples"] = json.dumps(best.indices.tolist())
    return row


def swap_accuracies(
    images: Tensor, texts: Tensor, swaps: dict[str, Tensor], dual: DualEncoder
) -> Iterator[tuple[str, float | str]]:
    """For each kind of swap how often an image is nearer to its caption than to the swapped one (SugarCrepe's measure).

    The share is empty where a set has no such swap.
    """
    of_image = swaps["image"]
    swapped = encoded(dual, swaps["tokens"])
    right = (images[of_image] * (texts[of_image] - swapped)).sum(1) > 0
    for number, kind in enumerate(KINDS):
        found = right[swaps["kind"] == number]
        yield kind, round(found.float().mean().item(), 5) if len(found) else ""


def recalls(row: Row) -> Row:
    """In per cent, both directions averaged: another style, new concepts, those of icons, and validation."""
    found = {}
    for name, k in (("vendor", 1), ("concepts", 5), ("icon_set", 1), ("icons", 5)):
        if f"{name}_image_recall@{k}" in row:
            found[f"{name}_recall@{k}"] = 50 * sum(row[f"{name}_{way}_recall@{k}"] for way in ("image", "text"))
    return {**found, "validation": 100 * score(row)}


SETS = ("validation", "concepts", "vendor", "zero_shot_concepts", "zero_shot_vendor")
ICON_SETS = ("icons", "icon_set")  # of a corpus with icons


class Measure(TrainerCallback):
    """Measures at equal distances and at the end; counts the seconds of training without the measuring."""

    def __init__(self, data: dict, run: Run, origin: Row) -> None:
        self._data, self._run, self._origin = data, run, origin
        self._device = data["images"].device
        self._seconds = 0.0
        self._since = 0.0
        self.step_seconds: list[float] = []
        self.rows: list[Row] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._since = now(self._device)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        points = max(1, self._run.evaluations)
        due = {round(state.max_steps * (k + 1) / points) for k in range(points)}
        if state.global_step not in due and self._run.evaluations:
            return
        self.step_seconds.append(now(self._device) - self._since)
        self._seconds += self.step_seconds[-1]
        if state.global_step in due:
            row: Row = {
                "steps": state.global_step,
                "samples_seen": state.global_step * self._run.batch,
                "finished": state.global_step == state.max_steps,
                "seconds": round(self._seconds, 3),
                "logit_scale": round(model.logit_scale.exp().item(), 4),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if self._device.type == "cuda" else "",
            }
            if self._run.evaluations:
                row |= measure(model, self._data, [name for name in SETS + ICON_SETS if name in self._data["sets"]])
            model.train()
            self.rows.append(row | self._origin)
        self._since = now(self._device)


def arguments(run: Run, folder: str, *, on_gpu: bool) -> TrainingArguments:
    kind = InfCLTrainingArguments if run.method == "InfCLTrainer" else TrainingArguments
    ours = {"objective": run.objective, "equal_ids": run.equal_ids}
    if run.optimizer == "muon":
        ours |= {"optimizer": "muon", "muon_learning_rate": run.learning_rate}
    ours |= json.loads(run.options)
    steps = run.samples // run.batch
    own = ours if run.method == "InfCLTrainer" else {"dataloader_drop_last": True}
    usual = {"weight_decay": 0.1, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "bf16": on_gpu, "use_cpu": not on_gpu}
    usual |= {"remove_unused_columns": False, "dataloader_pin_memory": False, "learning_rate": run.adamw_rate}
    return kind(
        output_dir=folder,
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=run.batch // run.micro_batch,
        max_steps=steps,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(0.1 * steps),
        seed=run.seed,
        **{**benchmarks.training.ONLY_STEPS, **usual, **own},
    )


def muon_for_trainer(run: Run, model: nn.Module, args: TrainingArguments) -> MuonAdamW:
    """For `Trainer`, the optimizer that InfCLTrainer makes of ``optimizer="muon"``."""
    rates = {"learning_rate": args.learning_rate, "muon_learning_rate": run.learning_rate}
    decaying = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    groups = parameter_groups(model, **rates, weight_decay=args.weight_decay, decaying=decaying)
    return MuonAdamW(groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, fused=True)


def train(
    run: Run, data: dict, origin: Row, *, model: Any = None, toy: bool = False, **guests: Any
) -> tuple[list[Row], Any]:
    """Trains on the data of `prepare`; returns what was measured, with the columns of ``origin``, and the trainer.

    Without a ``model`` it trains a new one, which is tiny if it is a ``toy``; ``guests`` are of `InfCLTrainer` alone.
    """
    if run.batch % run.micro_batch or run.samples < run.batch:
        raise ValueError(f"{run.samples} samples and micro-batches of {run.micro_batch} do not make up {run.batch}.")
    drawn: Any = {"pair_ids": run.pair_ids, "captions_per_image": run.captions, "negatives": run.negatives}
    pairs = InMemory(data, run.seed, sources=run.sources.split(",") if run.sources else None, **drawn)
    old = {"replay_dataset": InMemory(data, run.seed, sources=run.replay.split(","), **drawn)} if run.replay else {}
    if run.batch > len(pairs) and not old:
        raise ValueError(f"A batch of {run.batch} pairs needs as many, and there are {len(pairs)}.")
    if model is None:
        model = new_model(data, run.seed, run.objective, toy=toy)
    callback = Measure(data, run, origin)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(run, folder, on_gpu=data["images"].is_cuda)
        own = run.method == "InfCLTrainer" or run.optimizer == "adamw"
        optimizer = None if own else muon_for_trainer(run, model, args)
        more = {"callbacks": [callback], "optimizers": (optimizer, None), **old, **guests}
        trainer = TRAINERS[run.method](model, args, pairs.collate, train_dataset=pairs, **more)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not run.evaluations:  # a run for its cost: the median of the steps, without the first ones
        steps = sorted(callback.step_seconds[2:])
        callback.rows[-1]["seconds"] = round(steps[len(steps) // 2] * callback.rows[-1]["steps"], 4)
    return callback.rows, trainer
