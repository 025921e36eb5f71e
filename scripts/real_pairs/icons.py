"""Icons of 180 sets under free licences (Iconify), as drawings with the names, tags and categories of their sets.

Left out are logos and brands, emoji and flags (the corpus has them, or their names are codes), sets that are animated,
and those whose licence excludes commercial use or is the GPL.
"""

import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .sources import PER_NAME, Drawing

PACKAGE = "@iconify/json@2.2.535"
LEFT_OUT = {  # by reason
    "flags, whose names are codes of countries": "circle-flags flag flagpack cif",
    "emoji that the corpus has": "fluent-emoji",
    "animations, whose first moment is empty": "line-md svg-spinners",
    "logos of brands": "fa6-brands fa-brands devicon devicon-plain skill-icons unjs gcp k8s academicons",
    "types of files, mostly logos": "file-icons vscode-icons material-icon-theme catppuccin",
    "symbols of laundering, whose names are numbers": "ginetex",
}
BRANDS = ("simple-icons", "fa7-brands", "cib")  # the names of these are brands in other sets too
ALWAYS_STYLES = re.compile("outlined?|filled|solid|duotone|twotone|rounded")
STYLES = re.compile(
    f"{ALWAYS_STYLES.pattern}|fill|line|linear|bold|thin|light|regular|tone|duo|sharp|round|flat|remix|broken|path|stroke"
)
HELD_OUT_SET = "hugeicons"  # "another style" of icons: none of it is trained on

# The tables of icons: to train on, of concepts that no training icon shows, and of a set that is not trained on.
ICONS = {
    "train": "icons/train.parquet",
    "validation": "evaluation/held_out_icons/validation.parquet",
    "test": "evaluation/held_out_icons/test.parquet",
    "another set": "evaluation/held_out_icon_set/test.parquet",
}


@dataclass
class Icon(Drawing):
    """An icon, whose ``file`` is the JSON of its set and whose SVG is `svg`; its source is the name of the set."""

    svg: str = ""
    tall: bool = False

    def render(self, size: int) -> Image.Image:
        """RGB [size, size], black or coloured on white; four times as fast as drawing it larger first."""
        import resvg_py

        side = {"height": size} if self.tall else {"width": size}
        drawn = resvg_py.svg_to_bytes(svg_string=self.svg, background="#ffffff", skip_system_fonts=True, **side)
        picture = Image.open(io.BytesIO(drawn)).convert("RGB")
        if picture.size == (size, size):
            return picture
        canvas = Image.new("RGB", (size, size), "white")
        canvas.paste(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
        return canvas

    def encode(self, image: Image.Image) -> bytes:
        """A PNG of 16 shades of grey or 32 colours, not compressed, so that the file of all can compress it better."""
        shades = np.asarray(image)
        if np.ptp(shades, axis=2).max() <= 2:
            small = Image.fromarray(np.round(shades[..., 0] / 17).astype(np.uint8) * 17)
        else:
            small = image.quantize(32)
        buffer = io.BytesIO()
        small.save(buffer, "PNG", compress_level=0)
        return buffer.getvalue()


def licences(package: Path) -> dict[str, dict[str, str]]:
    """Title, author and licence (SPDX) of each set that is read."""
    found, left_out = {}, " ".join(LEFT_OUT.values()).split()
    for prefix, about in sorted(json.loads((package / "collections.json").read_text(encoding="utf-8")).items()):
        licence = about["license"]["spdx"]
        free = "-NC-" not in licence and not licence.startswith("GPL")
        if free and about.get("category") not in ("Logos", "Emoji") and prefix not in left_out:
            found[prefix] = {"title": about["name"], "author": about["author"]["name"], "licence": licence}
    return found


def table_of_sets(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """The sets with their licences and numbers of pairs, the largest first, as a table in Markdown."""
    lines = ["| set | title | author | licence | pairs |", "|---|---|---|---|---|"]
    for name, about in sorted(sets.items(), key=lambda item: (-item[1]["pairs"], item[0])):
        cells = (f"`{name}`", about["title"], about["author"], about["licence"], f"{about['pairs']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read_icons(package: Path) -> list[Icon]:
    """The icons of all sets, at most `PER_NAME` of each name and set, and one size of those drawn in several."""
    brands = {" ".join(_words(name)) for prefix in BRANDS for name in _set(package, prefix)["icons"]}
    return [
        icon
        for prefix in licences(package)
        for icon in _icons_of(package / "json" / f"{prefix}.json", _set(package, prefix))
        if icon.name not in brands and _says_something(icon.name)
    ]


def _set(package: Path, prefix: str) -> dict[str, Any]:
    return json.loads((package / "json" / f"{prefix}.json").read_text(encoding="utf-8"))


def _words(name: str) -> list[str]:
    """The words of an icon's name without the numbers at their ends: "arrow-down-01" is ["arrow", "down"]."""
    return [word for part in name.lower().split("-") if (word := part.rstrip("0123456789"))]


def _says_something(name: str) -> bool:
    """Not a brand, nor a single letter, nor the flag of a country."""
    words = name.split()
    if {"brand", "brands", "logo", "logos", "wordmark"} & set(words) or re.fullmatch(r"flags? \w\w", name):
        return False
    return any(len(word) > 1 for word in words)


def _icons_of(file: Path, icons: dict[str, Any]) -> Iterator[Icon]:
    styles = {*filter(None, icons.get("suffixes", {})), *filter(None, icons.get("prefixes", {}))}
    of_icon: dict[str, list[str]] = {}
    for category, names in icons.get("categories", {}).items():
        for name in names:
            of_icon.setdefault(name, []).append(" ".join(re.findall(r"\w+", category.lower())))
    others: dict[str, list[str]] = {}
    for alias, about in icons.get("aliases", {}).items():
        if not {"rotate", "hFlip", "vFlip"} & set(about):
            others.setdefault(about["parent"], []).append(alias)
    counts: dict[str, int] = {}
    seen = set()
    for key, icon in icons["icons"].items():
        stem, style = split_style(key, styles, icons["icons"])
        name = " ".join(_words(stem))
        # Of the sizes in which some sets draw an icon the first is taken.
        drawn = (stem, style)
        categories = of_icon.get(key, [])
        is_brand = any("brand" in category or "logo" in category for category in categories)
        if icon.get("hidden") or not name or is_brand or drawn in seen or counts.get(name, 0) >= PER_NAME:
            continue
        seen.add(drawn)
        counts[name] = counts.get(name, 0) + 1
        synonyms = (" ".join(_words(split_style(alias, styles, ())[0])) for alias in others.get(key, []))
        keywords = [f"{name} {style}"] if style else []
        keywords += [synonym for synonym in dict.fromkeys(synonyms) if synonym and synonym != name]
        category = ", ".join(categories[:2]) or "unsorted"
        left, top, width, height = (
            icon.get(field, icons.get(field, usual))
            for field, usual in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
        )
        yield Icon(icons["prefix"], file, name, category, keywords, name, svg=svg, tall=height > width)


def split_style(key: str, styles: Collection[str], keys: Collection[str]) -> tuple[str, str]:
    """An icon's name without its style, and the style: ("alarm", "outline bold") of "alarm-24-outline-bold".

    ``styles`` are suffixes and prefixes of its set, styles and sizes; ``keys`` are the names in it: where no style is
    declared, a word such as "light" is one if there is an icon of the other words.
    """
    found: list[str] = []
    for style in sorted(styles, key=len, reverse=True):
        if key.endswith(f"-{style}") or key.startswith(f"{style}-"):
            key = key.removesuffix(f"-{style}").removeprefix(f"{style}-")
            found = style.split("-")
            break
    while "-" in key:
        rest, _, last = key.rpartition("-")
        if not ALWAYS_STYLES.fullmatch(last) and not (STYLES.fullmatch(last) and rest in keys):
            break
        key, found = rest, [last, *found]
    return key, " ".join(word for word in found if not word.removesuffix("px").isdigit())


class Concepts:
    """Whether a name has all the words of one of some concepts, one after another: "cloud upload" has "cloud"."""

    def __init__(self, concepts: Iterable[str]) -> None:
        self._concepts = {words for concept in concepts if (words := _singulars(concept))}
        self._longest = max(map(len, self._concepts), default=0)

    def in_name(self, name: str) -> bool:
        words = _singulars(name)
        parts = (words[i:j] for i in range(len(words)) for j in range(i + 1, min(len(words), i + self._longest) + 1))
        return any(part in self._concepts for part in parts)


def _singulars(text: str) -> tuple[str, ...]:
    words = re.findall(r"\w+", text.lower().replace("’", ""))
    return tuple(
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words
    )
