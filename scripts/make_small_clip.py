#!/usr/bin/env python3
"""Make a small CLIP of random weights for one's own images and captions, without the network, to try the package with.

    python scripts/make_small_clip.py --dataset my/images --output_dir outputs/clip-init

writes a CLIPModel and its processor as `from_pretrained` loads them. The tokenizer is learned from the captions of the
data set, so the model is meant for these alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds, which neither --help nor a mistake should
    from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer

MOST_TOKENS = 77  # of a text, as in CLIP
HEAD = 16  # dimensions of an attention head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="pairs, as `infcl train` takes them: a folder or a Hub id")
    parser.add_argument("--split", default="train")
    parser.add_argument("--image_column", default="image")
    parser.add_argument("--caption_column", default="caption")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--image_size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--patch_size", type=int, default=8, help="a divisor of the image size")
    parser.add_argument("--width", type=int, default=128, help=f"of towers and embeddings, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=2, help="of each tower")
    parser.add_argument("--vocabulary", type=int, default=4096, help="the most tokens to learn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        write(args)
    except (OSError, ValueError) as error:
        from hf_infcl.files.text import without_secrets

        raise SystemExit(f"{parser.prog}: error: {' '.join(without_secrets(str(error)).split())}") from error


def write(args: argparse.Namespace) -> None:
    """Raises a ValueError or an OSError if an option, the data or the folder cannot be used."""
    sizes = {name: getattr(args, name) for name in ("image_size", "patch_size", "width", "layers", "vocabulary")}
    check_sizes(**sizes)
    check_places(args.dataset, args.output_dir)
    from hf_infcl import ImageTextDataset, load_pairs
    from hf_infcl.processes.lock import check_writable

    columns = {"image_column": args.image_column, "caption_column": args.caption_column}
    table = load_pairs(args.dataset, split=args.split, image_column=args.image_column)
    pairs = ImageTextDataset(table, **columns)
    captions = [caption for of_image in pairs.sample_captions(len(pairs)) for caption in of_image]
    if not captions:
        raise ValueError(f"All captions in the column {args.caption_column!r} of {args.dataset} are empty.")
    model, processor = small_clip(captions, **sizes, seed=args.seed)
    check_writable(args.output_dir)
    for part in (model, processor):
        part.save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: CLIPModel of {model.num_parameters():,} random weights for images of {args.image_size} "
        f"pixels, a vocabulary of {len(processor.tokenizer)} tokens from {len(captions):,} captions. Train them with "
        "--optimizer muon --learning_rate 5e-4: the recipes of fine-tuning are for weights that were trained"
    )


def check_sizes(*, image_size: int, patch_size: int, width: int, layers: int, vocabulary: int) -> None:
    """Raises a ValueError if no model has these sizes."""
    if image_size < 1 or patch_size < 1 or image_size % patch_size:
        raise ValueError(
            f"--image_size {image_size} must be a multiple of --patch_size {patch_size}, both at least 1 pixel."
        )
    if width < HEAD or width % HEAD:
        raise ValueError(f"--width must be a multiple of {HEAD}, which an attention head has, got {width}.")
    if layers < 1 or vocabulary < 1:
        raise ValueError(f"--layers and --vocabulary must be at least 1, got {layers} and {vocabulary}.")


def check_places(dataset: str, output_dir: Path) -> None:
    """Raises a ValueError if the model would be written over another or into the data, or if the data are no folder."""
    if any((output_dir / name).exists() for name in ("config.json", "adapter_config.json", "model.safetensors")):
        raise ValueError(f"--output_dir {output_dir} already holds a model. Choose another --output_dir.")
    data, place = Path(dataset).resolve(), output_dir.resolve()
    if data.is_dir() and data in (place, *place.parents):
        raise ValueError(f"--output_dir {output_dir} is in the folder of the data, {dataset}. Choose another one.")
    if place.is_file():
        raise ValueError(f"--output_dir {output_dir} is a file. Choose another --output_dir.")
    is_url = "://" in dataset and not dataset.startswith("hf://")
    if is_url or data.is_file() or (set(dataset) & set("*?{[") and not data.is_dir()):
        raise ValueError(
            f"--dataset {dataset} names files, and a folder or a Hub id is read here. Name the local folder that holds "
            "the shards; the captions of tar files are in a column such as --caption_column txt."
        )


def small_clip(
    captions: list[str],
    *,
    image_size: int,
    patch_size: int,
    width: int = 64,
    layers: int = 2,
    vocabulary: int = 512,
    seed: int = 0,
) -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained CLIP of two small transformers, and its processor with a tokenizer learned from the captions."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    processor = CLIPProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": image_size},
            crop_size={"height": image_size, "width": image_size},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=train_tokenizer(captions, vocabulary),
    )
    tokenizer = processor.tokenizer
    tower = {"hidden_size": width, "intermediate_size": 4 * width}
    tower |= {"num_hidden_layers": layers, "num_attention_heads": width // HEAD}
    config = CLIPConfig(
        text_config={
            **tower,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": tokenizer.model_max_length,
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        },
        vision_config={**tower, "image_size": image_size, "patch_size": patch_size},
        projection_dim=width,
    )
    torch.manual_seed(seed)
    return CLIPModel(config), processor


def train_tokenizer(captions: list[str], vocabulary: int = 512) -> CLIPTokenizer:
    """A CLIP tokenizer (lower-case byte-level BPE, words end in </w>) learned from the captions.

    CLIP's text tower takes its result from the first <|endoftext|>, so unknown characters must not be mapped to it, as
    CLIPTokenizer does by default. Its id must not be 2, which CLIPTextModel takes as a sign of old configurations.

    Raises:
        ValueError: the characters of the captions alone are more tokens than the vocabulary may have.
    """
    from transformers import CLIPTokenizer

    special = ["<|startoftext|>", "<|endoftext|>", "<|unknown|>"]
    untrained = CLIPTokenizer(vocab={token: index for index, token in enumerate(special)}, unk_token=special[2])
    trained = untrained.train_new_from_iterator(captions, vocab_size=vocabulary, show_progress=False)
    if len(trained) > vocabulary:
        raise ValueError(
            f"A vocabulary of {vocabulary} tokens is too small: all bytes and the characters of these captions are "
            f"{len(trained)}. Choose a larger --vocabulary."
        )
    # The trainer numbers tokens in the order of a hash table, which varies. Sorting makes runs repeatable.
    tokens = special + sorted(trained.get_vocab().keys() - set(special))
    merges = json.loads(trained.backend_tokenizer.to_str())["model"]["merges"]
    tokenizer = CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge) for merge in merges],
        unk_token=special[2],
    )
    longest = max(len(ids) for ids in tokenizer(captions).input_ids)
    tokenizer.model_max_length = min(2 * longest, MOST_TOKENS)  # room for prompts longer than any caption
    return tokenizer


if __name__ == "__main__":
    main()
