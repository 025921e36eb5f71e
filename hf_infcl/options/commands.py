"""The options of the commands, beside those of the training; read without torch."""

from dataclasses import fields

from ..files.text import ON_BAD_SAMPLE
from .declaring import FRACTION, FROM_0, FROM_1, FROM_2, described, option


@described
class ModelOptions:
    """Model.

    Attributes:
        model: The model: a Hub id, a folder or a .pt, of transformers or of OpenCLIP. Adapters come with their model,
            and a training continues them. Required.
        open_clip_model: For a .pt: OpenCLIP's name of the model, such as ViT-B-32, or its config as JSON.
        tokenizer: Another tokenizer than the model's own: a Hub id or a folder. It is saved with the model. A .pt has
            none, and gets CLIP's from the Hub without this option.
    """

    model: str
    open_clip_model: str | None = None
    tokenizer: str | None = None


@described
class MeasuredModelOptions(ModelOptions):
    """Models that are measured.

    Attributes:
        model: The model, or several to compare: Hub ids, folders or a .pt, of transformers or of OpenCLIP. Adapters
            come with their model. Required.
    """

    model: list[str]  # type: ignore[assignment]  # several in place of one


@described
class TrainedModelOptions(ModelOptions):
    """Model that is trained.

    Attributes:
        new_weights: Weights or modules that the checkpoint may lack, such as visual_projection. They are drawn from
            --seed. A checkpoint that lacks others is refused.
    """

    new_weights: list[str] | None = None


@described
class LoraOptions:
    """LoRA adapters (package peft).

    Attributes:
        lora_rank: Train LoRA adapters of this rank instead of the weights. Their alpha is twice the rank.
        lora_targets: Names of the layers that get adapters, such as q_proj v_proj.
        lora_logit_scale: Train logit_scale and logit_bias beside new adapters. They are then in the adapter's file.
        lora_merge: At the end, merge the adapters into the weights. The whole model is saved and pushed instead.
    """

    lora_rank: int | None = option(within=FROM_1)
    lora_targets: list[str] = option(["all-linear"])
    lora_logit_scale: bool = option(False, needs="lora_rank")
    lora_merge: bool = False


@described
class DataOptions:
    """Training data.

    Attributes:
        dataset: Image-text pairs to train on: a Hub id or a folder. Required. With --streaming also shards, such as
            'shards/{00000..00127}.tar', and more than one dataset.
        dataset_name: Configuration of the training data, if it has several.
        split: Split of the training data.
        on_bad_sample: For a broken image or an empty caption: 'raise' or 'skip'.
        augmentation: Random changes of the images: 'none', 'crop' or 'flip_crop'. 'crop' takes 0.9 to 1 of the image,
            as CLIP is trained from scratch; 'flip_crop' also flips half of the images left to right.
        min_side: Decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This is
            faster and changes the pixels slightly.
        streaming: Read tar or parquet shards during the training, as a stream of unknown length.
        dataset_weights: With --streaming: the proportions in which the samples of several datasets are mixed. By
            default, they are read as one set.
        samples_per_epoch: With --streaming: the number of pairs per epoch. Without it, pass --max_steps.
        caption_templates: Captions from the names of classes, such as 'a photo of a {c}', or a file of them. For images
            in a folder for each class: an epoch draws one of the captions of its class for each image, and images of
            one class are not each other's negatives.
        captions_per_image: Captions drawn per epoch from an image's list. All of them are its positives.
        negative_caption_column: Column of captions that are wrong for the image, strings or lists. Each epoch draws
            one, which is a negative of all images.
        shuffle_buffer: With --streaming: the number of samples among which each lane is shuffled.
        lanes: With --streaming: the number of lanes among which the shards are dealt; a worker reads each alone. A run
            can resume with other numbers of processes and workers (--dataloader_num_workers) if their product divides
            it. Defaults to that product at the start.
        replay_dataset: Old pairs that the model should not forget. Every global batch gets --replay_share of them. Hub
            ids or folders, or shards whose name ends with '?streaming=true'; several are read as one set. Options of
            the training data, such as --augmentation, apply to them as well.
        exclude: Train without the pairs that a ledger calls wrong. Give the file that `infcl score` has written and the
            least probability of what is left out, such as _ledger.parquet:0.5, or the share with the lowest scores,
            such as _ledger.parquet:5%. A second ledger must come from a training without what the first one excludes.
        check_samples: Pairs to read before the training, to tell what is wrong with them; 0 for none. Defaults to 256,
            and to 10,000 of each set in `infcl check`.
        dry_run: Train three steps and print memory, images a second and the time of the whole training. Nothing is
            written.
        overwrite_output_dir: Delete the checkpoints and results of an earlier run first.
    """

    dataset: list[str]
    dataset_name: str | None = None
    split: str = "train"
    on_bad_sample: str = option("raise", choices=ON_BAD_SAMPLE)
    augmentation: str = option("none", choices=("none", "crop", "flip_crop"))
    min_side: int | None = option(within=FROM_1)
    streaming: bool = False
    dataset_weights: list[float] | None = option(needs="streaming")
    samples_per_epoch: int | None = option(within=FROM_1, needs="streaming")
    caption_templates: list[str] | None = None
    captions_per_image: int = option(1, within=FROM_1)
    negative_caption_column: str | None = None
    shuffle_buffer: int = option(2048, within=FROM_1)
    lanes: int | None = option(needs="streaming")
    replay_dataset: list[str] | None = None
    exclude: list[str] | None = None
    check_samples: int | None = option(within=FROM_0)
    dry_run: bool = False
    overwrite_output_dir: bool = False


@described
class ColumnOptions:
    """Columns of the training data, and of other datasets that have them.

    Attributes:
        image_column: Column of images, paths or encoded images. A table without this column is read by the only one of
            images or of a usual name, such as filepath.
        caption_column: Column of captions: a string or a list of them. A table without this column is read by the only
            one of a usual name, such as text.
        pair_id_column: Rows with equal values in this column are never each other's negatives. It may be the column of
            captions or, in a table, that of images.
    """

    image_column: str = "image"
    caption_column: str = "caption"
    pair_id_column: str | None = None


# The options that say which pairs a training has, and how they are read.
OF_PAIRS = {one.name for kind in (DataOptions, ColumnOptions) for one in fields(kind)}
OF_PAIRS -= {"overwrite_output_dir", "dry_run"}


@described
class EvaluationOptions:
    """Evaluation.

    Attributes:
        eval_dataset: Image-text pairs to measure the loss and retrieval on: a Hub id or a folder. By default, the split
            of a set to evaluate is test, or validation where it chooses the model, or the other, or its only one;
            'my/tables?split=dev' names another.
        zero_shot_dataset: Labelled images to measure zero-shot classification on: a Hub id or a folder.
        eval_pictures: Images of --eval_dataset to draw with the captions that they find. Each evaluation draws them
            into pictures.png in --output_dir, which is pushed with the model.
        eval_benchmark: Named benchmarks to measure, such as imagenet1k flickr30k vtab+. They are read from the Hub
            (clip-benchmark/wds_imagenet1k) or --benchmark_folder, and their own files name classes and prompts.
        benchmark_folder: Folder with local copies of the benchmarks. Each is in a folder such as wds_imagenet1k.
        label_column: Column of class numbers in --zero_shot_dataset.
        class_names: Names of the classes, in the order of their numbers, or a file with one in each line. Names of the
            folders may have any order. By default those stored in the dataset, or the names of its folders.
        templates: Prompts with {c} for the class, or a file of them; 'a photo of a {c}.' by default.
    """

    eval_dataset: str | None = None
    zero_shot_dataset: str | None = None
    eval_pictures: int = option(0, within=FROM_0, needs="eval_dataset")
    eval_benchmark: list[str] | None = option(aliases=["--benchmark"])
    benchmark_folder: str | None = None
    label_column: str = "label"
    class_names: list[str] | None = None
    templates: list[str] = option(["a photo of a {}."])


@described
class GuardOptions:
    """What the model should keep.

    Attributes:
        guard_dataset: Pairs or classes on which the model should not get worse, Hub ids or folders. Images without
            captions are classified with --templates. A training measures them before and after.
        guard_benchmark: Named benchmarks, as for --eval_benchmark, on which the model should not get worse.
        guard_tolerance: What each guard may lose in the average that is chosen, as a fraction. 0.01 is one point of
            recall@1 (the mean of both directions) or of top-1 accuracy. One half of the rows of each guard chooses, the
            other half reports what was kept.
    """

    guard_dataset: list[str] | None = None
    guard_benchmark: list[str] | None = None
    guard_tolerance: float = option(0.01, within=FRACTION)


@described
class StartOptions(GuardOptions):
    """What the model should keep, and its average with the start.

    Attributes:
        average_with_start: Save the average of the weights before and after the training: 0.5 is halfway, or 'auto'.
            This measures 0, 0.1 ... 1 and takes the greatest gain on --eval_dataset and --zero_shot_dataset at which
            every --guard_dataset stays within --guard_tolerance; among gains within the interval of the greatest, that
            with the lowest loss. The last checkpoint keeps the weights of the end.
    """

    average_with_start: str | None = None


OF_TRAINING = (TrainedModelOptions, LoraOptions, DataOptions, ColumnOptions, EvaluationOptions, StartOptions)


@described
class AverageOptions:
    """Average.

    Attributes:
        alpha: How far to go from START (0) to END (1), or 'auto'. This measures 0, 0.1 ... 1 and takes the greatest
            gain on --eval_dataset and --zero_shot_dataset at which every --guard_dataset stays within
            --guard_tolerance; among gains within the interval of the greatest, that with the lowest loss.
    """

    alpha: str = "0.5"


@described
class CheckOptions:
    """Check.

    Attributes:
        all: Read all pairs instead of --check_samples.
    """

    all: bool = False


@described
class EmbedOptions:
    """Embeddings.

    Attributes:
        key_column: Column that names each row of a table. By default the path of its image, or else its number. The
            keys of a stream are the names of the samples, after that of the shard.
        format: The format of the files that are written: npy, parquet or safetensors. A training reads npy alone, with
            --teacher_embeddings.
        half_precision: With npy: 16 instead of 32 bits for each number, half of the disk.
    """

    key_column: str | None = None
    format: str = option("npy", choices=("npy", "parquet", "safetensors"))
    half_precision: bool = False


@described
class ScoreOptions:
    """Scores.

    Attributes:
        split: Split of the data.
        streaming: The data are tar or parquet shards, such as 'shards/{00000..00127}.tar', which are read once.
        on_bad_sample: For a broken image or an empty caption: 'raise' or 'skip'.
        captions_per_image: Number of captions drawn from an image's list, whose mean cosine counts.
        window: Number of pairs that are compared with each other. All are drawn at random.
    """

    split: str = "train"
    streaming: bool = False
    on_bad_sample: str = option("raise", choices=ON_BAD_SAMPLE)
    captions_per_image: int = option(1, within=FROM_1)
    window: int = option(4096, within=FROM_2)


@described
class ConvertOptions:
    """Conversion.

    Attributes:
        to: The format to write: transformers or open_clip.
        open_clip_model: For a .pt: OpenCLIP's name of the model, such as ViT-B-32, or a JSON file with its config.
        tokenizer: With --to transformers: the folder or the Hub id of the tokenizer, in place of the model's own.
        repository: With --to open_clip: the Hub repository to which the target will be pushed, where OpenCLIP will look
            for a tokenizer that is not CLIP's.
        max_text_tokens: With --to open_clip: the tokens at which OpenCLIP cuts texts. Defaults to the limit of the
            tokenizer.
    """

    to: str = "transformers"
    open_clip_model: str | None = None
    tokenizer: str | None = None
    repository: str = "."
    max_text_tokens: int | None = None
