#!/usr/bin/env python3
"""Write scikit-learn's 1,797 handwritten digits as an image dataset with captions, and a small CLIP to train on it.

    python scripts/make_digits.py --output_dir outputs/demo

writes `digits/` (an imagefolder: PNG files and a metadata.jsonl with file_name, caption, label for each split) and
`clip-init/` (an untrained CLIPModel of 0.2 M parameters with its processor, as `from_pretrained` loads it).

The digits are the test part of https://archive.ics.uci.edu/dataset/80: 8x8 grey images from 13 writers.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
from make_small_clip import small_clip
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASS_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CAPTIONS_PER_IMAGE = 4
CAPTION_TEMPLATES = [
    "a handwritten {}",
    "the digit {}",
    "the number {}",
    "a photo of the digit {}",
    "a photo of a handwritten {}",
    "a scan of the number {}",
    "a small picture of a {}",
    "{}, written by hand",
    "someone wrote a {}",
    "someone wrote the number {} by hand",
    "this is the handwritten digit {}",
    "a {} in white on black",
    "a grey picture of the number {}",
    "a {} on a form",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--test_size", type=int, default=300, help="held-out images, each digit in proportion")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    digits = load_digits()
    train, test = train_test_split(
        np.arange(len(digits.images)), test_size=args.test_size, stratify=digits.target, random_state=args.seed
    )
    rng = random.Random(args.seed)
    captions = write_split(args.output_dir / "digits/train", digits.images[train], digits.target[train], rng)
    write_split(args.output_dir / "digits/test", digits.images[test], digits.target[test], rng)
    print(f"{args.output_dir / 'digits'}: {len(train)} training and {len(test)} test images")

    model, processor = small_clip(captions, image_size=8, patch_size=2, seed=args.seed)
    for part in (model, processor):
        part.save_pretrained(args.output_dir / "clip-init")
    tokens = len(processor.tokenizer)
    print(f"{args.output_dir / 'clip-init'}: CLIPModel of {model.num_parameters():,} parameters, {tokens} tokens")


def write_split(folder: Path, images: np.ndarray, labels: np.ndarray, rng: random.Random) -> list[str]:
    """Write images [N, 8, 8] (ink from 0 to 16) and their captions as one split; return the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = []
    with open(folder / "metadata.jsonl", "w", encoding="utf-8") as metadata:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = f"{index:04d}.png"
            Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(folder / name)
            templates = rng.sample(CAPTION_TEMPLATES, CAPTIONS_PER_IMAGE)
            caption = [template.format(rng.choice([CLASS_NAMES[label], str(label)])) for template in templates]
            metadata.write(json.dumps({"file_name": name, "caption": caption, "label": int(label)}) + "\n")
            captions += caption
    return captions


if __name__ == "__main__":
    main()
