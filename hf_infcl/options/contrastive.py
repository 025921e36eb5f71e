"""The options of contrastive training, and those of transformers.TrainingArguments, without torch.

Names, types, defaults and helps of the latter are in a file, which ``python tests/helpers/theirs.py`` writes. A name
that the installed release has and the file lacks is accepted, see `hf_infcl.cli.parser`.
"""

import json
from collections.abc import Collection
from dataclasses import fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal  # noqa: F401  # types in the file are Literal

from .declaring import FINITE, FRACTION, FROM_0, FROM_1, MULTIPLIER, PART, SHARE, described, field_of, option

FILE = Path(__file__).with_name("transformers_options.json")

DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")  # of a global batch among the processes
SEARCHED = ("texts_at_once", "retain_graphs")  # what a training finds for its micro-batches, in this order
OF_TEACHER = "teacher or teacher_embeddings"  # what the options of a teacher need
# Those that an optimizer from elsewhere does not know.
RATES = ("logit_scale_learning_rate", "image_learning_rate", "text_learning_rate")
OPTIM_ARGS = {"momentum": float, "ns_steps": int}  # the settings of ``optimizer="muon"`` in ``optim_args``


def objectives() -> Collection[str]:
    from ..loss.objectives import OBJECTIVES  # which imports torch

    return OBJECTIVES


@described
class ContrastiveOptions:
    """Exact contrastive training (hf_infcl.InfCLTrainingArguments).

    These are options beside those of transformers.TrainingArguments, or other defaults of them.

    Attributes:
        objective: The loss: softmax (InfoNCE, as CLIP) or sigmoid (as SigLIP). Sigmoid needs a model with a logit_bias.
            Defaults to the one that the model was designed for.
        strategy: How the processes share the batch: ring, disco, local or gather. All give the same loss and gradient.
        backend: Which kernels compute the loss: auto, triton or torch.
        equal_ids: What pairs with equal pair ids are to each other: 'exclude' (neither positives nor negatives) or
            'positive'. Defaults to 'positive' with several captions per image, which require it, else to 'exclude'. It
            also applies to the evaluation loss.
        max_logit_scale: Upper limit of the multiplier of the cosines, applied after each step. Defaults to 100 with
            softmax, as in CLIP, and to none with sigmoid. The lower limit is then 1.
        global_batch_size: Pairs of one optimizer step, on all processes together. This number decides the result; its
            division into micro-batches only takes time and memory, and is found without per_device_train_batch_size. By
            default the product of per_device_train_batch_size, gradient_accumulation_steps and the processes.
        per_device_train_batch_size: Pairs of a micro-batch, which a process encodes at once. By default it follows from
            global_batch_size, or is 8.
        gradient_accumulation_steps: Micro-batches of ONE contrastive batch on each process: its loss compares all their
            pairs with each other. By default it follows from global_batch_size, or is 1.
        retain_graphs: Micro-batches of a step whose autograd graph is kept, which saves their second forward. Each
            takes the activation memory of a micro-batch; 0 means 1. By default ('auto') as many as fit on a GPU.
            Sharded models keep 1 by default.
        texts_at_once: Micro-batches whose texts are encoded at once. More of them save time and take memory. By default
            ('auto') as many as fit on a GPU, at most 4; 1 of a sharded or a compiled model.
        offload_inputs: Keep the inputs of a step in host memory, and copy them to the GPU one micro-batch ahead. GPU
            memory then grows with gradient_accumulation_steps only by the embeddings.
        torch_compile: Compile the whole model (torch.compile). By default each layer is compiled, on a GPU with Triton
            and in a training of more than some minutes; false leaves that out.
        logit_scale_learning_rate: Learning rate of logit_scale and logit_bias, on the same schedule. Defaults to
            learning_rate.
        image_learning_rate: Learning rate of the image tower and its projection, by default learning_rate. It has the
            same schedule. The rate of Muon's matrices changes in proportion.
        text_learning_rate: The same for the text tower.
        no_decay_parameters: Regular expressions for names of parameters without weight decay. One is vision_model for a
            pretrained tower. Vectors and scalars never decay.
        optimizer: 'muon' trains the matrices of layers and projections by Muon (arXiv 2502.16982), and the rest by
            AdamW. It is for training from random weights. By default optim, which is AdamW, trains all parameters.
        muon_learning_rate: Learning rate of Muon's matrices, by default four times learning_rate. It has the same
            schedule.
        muon_parameters: With optimizer=muon: regular expressions for names of further parameters that Muon trains.
        adamw_parameters: With optimizer=muon: regular expressions for names of matrices that AdamW trains.
        leave_out: Leave out pairs of a table that do not seem to belong together: 'noisy'. They are neither positives
            nor negatives, but teachers and keep_features still draw them, and epochs of a shuffled table pass over
            them. It leaves out none while too few pairs look wrong, and begins when the pairs have been seen three
            times, so it needs several epochs.
        freeze: Tower that does not train, with its projection: image or text (LiT, arXiv 2111.07991). It runs once per
            step, in evaluation mode.
        freeze_layers: Layers to freeze at the beginning of each tower, with the embeddings before them; 0 for these
            alone. They keep no graph, and run in evaluation mode.
        image_size: Height and width of the images in pixels, such as 336. The position embeddings of the model are
            interpolated to this size, which is saved with the model and its processor. Defaults to the size of the
            model.
        patch_dropout: Share of the patches of each image to leave out at random, such as 0.5 (FLIP, arXiv 2212.00794).
            Evaluations see all patches.
        max_text_tokens: Cut training captions to this many tokens, special ones included. Evaluations do not cut them.
            A number above the tokenizer's limit, up to the positions of the model, raises that limit, also for
            evaluations and in what is saved.
        teacher: Model whose embeddings the student learns: a Hub id or a folder, also of OpenCLIP. It embeds the
            training set once, as `infcl embed` does, into a folder in output_dir where a second start finds them.
        teacher_embeddings: Folder with a teacher's embeddings, written by `infcl embed --dataset`. They are read beside
            the pairs, of the images as they are, and cost no more than the reading.
        teacher_weight: Weight β of the squared distance to the embeddings of the teacher. All are normalised. The mean
            over the images of the batch, summed over both towers and all captions of an image, is minimised with the
            loss.
        teacher_side: Which embeddings the teacher teaches: both, image or text.
        teacher_missing: Pairs without a stored embedding: 'refuse' to train, or leave them to the 'contrastive' loss.
            They are counted before the first step.
        contrastive_weight: Weight of the contrastive loss beside the teacher. With 0 it alone teaches, also images and
            texts that do not belong together.
        matryoshka_dims: Dimensions at which the embeddings may be cut, for example 32 64 128. The loss is the mean of
            those of the first so many dimensions, normalised, and of all (Matryoshka, arXiv 2205.13147).
        dims: Evaluate with only the first so many dimensions of the embeddings, normalised. Defaults to all.
        keep_features: Weight β of the squared distance to the embeddings before the training. All are normalised. The
            mean over the images of the batch, summed over both towers and all captions of an image, is minimised with
            the loss. A frozen copy of the model runs once per step.
        cache_features: Folder for the outputs of what does not train, computed once for all epochs. That is the frozen
            image tower (freeze=image), whose outputs are read instead of the images, and the start (keep_features).
            Images must not be augmented. Many runs can share the folder.
        replay_share: With replay_dataset: share of old pairs in each global batch, by default 0.5.
        save_formats: Formats of the saved models: transformers, or transformers and open_clip. OpenCLIP's files are
            then beside those of transformers, in checkpoints too.
        skip_nonfinite: Skip up to this many steps in a row if their embeddings, loss or gradient are not finite. One
            more ends the training.
        resume_from_checkpoint: The folder of a checkpoint, or 'auto' for the newest complete one in output_dir and a
            new start if there is none. 'true' is the same but without a new start; 'last-checkpoint' is one pushed with
            --hub_strategy checkpoint.
        checkpoint_store: URL of fsspec, such as s3://bucket/run, to which complete checkpoints are copied in the
            background. With resume_from_checkpoint 'auto' or 'true', the newest one there is fetched if output_dir has
            none that is newer. With save_on_each_node they are those of the first machine, without other machines'
            random states.
        metric_for_best_model: Metric by which the best checkpoint is chosen, for example pairs_loss. It also ends the
            training (early_stopping_patience) or lowers the learning rate.
        early_stopping_patience: End the training when so many evaluations in a row have not improved
            metric_for_best_model. By default, the training runs to its end.
        logging_nan_inf_filter: Log the average of earlier losses instead of one that is not finite.
        remove_unused_columns: Drop columns that neither the model's forward nor the loss uses.
    """

    # ---- The loss ----
    objective: str | None = option(choices=objectives)
    strategy: str = option("ring", decides=False, choices=("ring", "disco", "local", "gather"))
    backend: str = option("auto", one_machine=True, choices=("auto", "triton", "torch"))
    equal_ids: str | None = option(choices=("exclude", "positive"))
    max_logit_scale: float | None = option(within=MULTIPLIER)

    # ---- The global batch, and the memory and time that it takes ----
    # A checkpoint's run has it, whichever options it follows from.
    global_batch_size: int | None = option(decides=False, within=FROM_1)
    per_device_train_batch_size: int = option(decides=False, within=FROM_1)
    gradient_accumulation_steps: int = option(decides=False, within=FROM_1)
    retain_graphs: str | None = option(one_machine=True)
    texts_at_once: str | None = option(decides=False)
    offload_inputs: bool = option(False, one_machine=True)
    torch_compile: bool | None = option(decides=False)

    # ---- Learning rates and the optimizer ----
    logit_scale_learning_rate: float | None = option(within=FINITE)
    image_learning_rate: float | None = option(within=FINITE, card="learning rate of the image tower")
    text_learning_rate: float | None = option(within=FINITE, card="learning rate of the text tower")
    no_decay_parameters: list[str] | None = option(card="no weight decay of")
    optimizer: str | None = option(choices=("muon",))
    muon_learning_rate: float | None = option(within=FINITE, needs="optimizer=muon")
    muon_parameters: list[str] | None = option(needs="optimizer=muon")
    adamw_parameters: list[str] | None = option(needs="optimizer=muon")

    # ---- Which pairs train, and which parts of the towers ----
    leave_out: str | None = None
    freeze: str | None = option(choices=("image", "text"))
    freeze_layers: int | None = option(within=FROM_0, card="frozen layers of each tower, with the embeddings")
    image_size: int | None = option(
        within=FROM_1, card="height and width that images were resized to, for which positions were interpolated"
    )
    patch_dropout: float | None = option(within=SHARE, card="share of the patches of an image that training left out")
    max_text_tokens: int | None = option(within=FROM_1, card="tokens to which training cut captions")

    # ---- A teacher, and embeddings that can be cut ----
    teacher: str | None = None
    teacher_embeddings: str | None = option(one_machine=True)
    teacher_weight: float = option(1.0, within=FINITE, needs=OF_TEACHER)
    teacher_side: str = option("both", choices=("both", "image", "text"), needs=OF_TEACHER)
    teacher_missing: str = option("refuse", choices=("refuse", "contrastive"), needs=OF_TEACHER)
    contrastive_weight: float = option(1.0, within=FRACTION, card="weight of the contrastive loss")
    matryoshka_dims: list[int] | None = option(card="dimensions at which the embeddings may be cut")
    dims: int | None = option(decides=False, within=FROM_1, card="dimensions of the embeddings in evaluations")

    # ---- What keeps the model near its start ----
    keep_features: float | None = option(within=FINITE, card="weight of the distance from the embeddings of the start")
    cache_features: str | None = option(one_machine=True)
    replay_share: float | None = option(within=PART)

    # ---- Resumes, errors, the end, and what is saved ----
    save_formats: list[str] = option(["transformers"], decides=False)
    skip_nonfinite: int = option(0, decides=False, within=FROM_0)
    resume_from_checkpoint: str | None = option(one_machine=True)
    checkpoint_store: str | None = option(decides=False)
    metric_for_best_model: str | None = option(decides=False)
    early_stopping_patience: int | None = option(decides=False, within=FROM_1)
    # A loss that is not finite stops the training, so the log must show it unfiltered.
    logging_nan_inf_filter: bool = option(False, decides=False)
    # The collator needs the raw columns of images and captions.
    remove_unused_columns: bool = False


def muon_settings(text: str | None) -> dict[str, Any]:
    """Muon's settings in ``optim_args``, "name=value,name=value".

    Raises:
        ValueError: there are other names, or values that are no numbers.
    """
    try:
        pairs = [pair.split("=") for pair in (text or "").replace(" ", "").split(",") if pair]
        return {name: OPTIM_ARGS[name](value) for name, value in pairs}
    except (KeyError, ValueError) as error:
        known = " and ".join(f"{name} ({kind.__name__})" for name, kind in OPTIM_ARGS.items())
        raise ValueError(
            f"optimizer='muon' takes {known} from optim_args, as in 'momentum=0.9,ns_steps=6', got {text!r}. "
            "Adam's options are the arguments adam_beta1, adam_beta2, adam_epsilon and weight_decay."
        ) from error


def release_of_file() -> str:
    """The release of transformers whose options the file has."""
    return str(json.loads(FILE.read_text(encoding="utf-8"))["release"])


@cache
def of_transformers() -> type:
    """A dataclass with the fields of transformers.TrainingArguments that this package does not declare itself."""
    ours = {one.name for one in fields(ContrastiveOptions)}
    declared: list[tuple[str, Any, Any]] = []
    for name, one in json.loads(FILE.read_text(encoding="utf-8"))["options"].items():
        kind, default = one.pop("type"), one.pop("default")
        declared += [(name, kind, field_of(default, one))] * (name not in ours)
    # The types are text, which is evaluated in this module.
    space = {"_argument_group_name": "The training (transformers.TrainingArguments)", "__module__": __name__}
    return make_dataclass("TheirOptions", declared, namespace=space)
