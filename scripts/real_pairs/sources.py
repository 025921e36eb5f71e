"""The drawings of each source with their captions, read from packages of Debian and npm.

The packages are fetched by name with the ordinary clients (`apt-get download`, `npm pack`) into a folder of the user's
choice and unpacked there. Nothing of theirs is part of this repository.
"""

import collections
import html
import io
import json
import re
import shutil
import struct
import subprocess
import tarfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

DOWNLOADS = Path.home() / ".cache/hf_infcl/real_pairs"
NPM = {
    "openmoji": "openmoji@17.0.0",
    "fluentui-emoji": "fluentui-emoji@1.3.0",
    "twemoji": "@discordapp/twemoji@16.0.1",
    "google": "emoji-datasource-google@16.0.0",
    "emojibase": "emojibase-data@17.0.0",
}
DEBIAN = {
    "openclipart": "openclipart-png",
    "openclipart titles": "openclipart-svg",  # the same drawings with their titles and keywords
    "tuxpaint": "tuxpaint-stamps-default",
}
LICENCES = {
    "openclipart": "public domain (Open Clip Art Library)",
    "tuxpaint": "GPL-2 (Tux Paint stamps, Bill Kendrick and others)",
    "openmoji": "CC BY-SA 4.0 (OpenMoji, HfG Schwäbisch Gmünd)",
    "fluent flat": "MIT (Fluent Emoji, Microsoft)",
    "fluent modern": "MIT (Fluent Emoji, Microsoft)",
    "twemoji": "CC BY 4.0 (Twemoji, Twitter and others)",
    "google": "Apache-2.0 (Noto Emoji, Google)",
    "emojibase": "MIT (names and keywords of the emoji)",
}
LANGUAGES = ("de", "es", "fr", "it", "ja", "nl", "pt", "ru", "zh")  # beside English, where a source has them
MAX_PIXELS = 2_000_000  # of a PNG; where clip art is larger, and some has 231 million, the SVG is drawn instead
QUALITY = 85  # of WebP
PER_NAME = 8  # drawings of one name that a source may contribute: clip art has 1,375 pictures named "star"


@dataclass
class Drawing:
    """A picture and what its source says about it."""

    source: str  # a key of `LICENCES`
    file: Path  # PNG or SVG
    name: str  # what it shows, in English and lower case: "horse face"; drawings of one name show the same thing
    category: str  # the source's, for zero-shot classification: "animal mammal"
    keywords: list[str]  # the source's
    concept: str  # what splits must not separate: variants of one motif (gender, skin tone, numbering) have one
    translations: dict[str, str] = field(default_factory=dict)  # the name by language
    title: str = ""  # of its file, if that is its collection's: "lemon svg theme" is a wrong caption

    @property
    def captions(self) -> list[str]:
        """Different English captions: the name, the keywords, the category with the name."""
        words = ", ".join(dict.fromkeys(k for k in self.keywords if k))
        categorised = "" if self.category == "unsorted" else f"{self.category}: {self.name}"
        return list(dict.fromkeys(caption for caption in (self.name, words, categorised) if caption))

    def render(self, size: int) -> Image.Image:
        """RGB [size, size] on white, the longer side filling it."""
        if self.file.suffix == ".svg":
            import resvg_py

            content = bytes(resvg_py.svg_to_bytes(svg_path=str(self.file), width=2 * size, skip_system_fonts=True))
            picture = Image.open(io.BytesIO(content)).convert("RGBA")
        else:
            picture = Image.open(self.file).convert("RGBA")
        scale = size / max(picture.size)
        picture = picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.LANCZOS)
        canvas = Image.new("RGBA", (size, size), "white")
        canvas.alpha_composite(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
        return canvas.convert("RGB")

    def encode(self, image: Image.Image) -> bytes:
        """The file of the rendered image, a WebP."""
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=QUALITY)
        return buffer.getvalue()


# ---- Fetching ----


def fetch(downloads: Path, more: dict[str, str] | None = None) -> dict[str, Path]:
    """The folder of each unpacked package, and of more of them from npm; what is there is not fetched again."""
    folders = {}
    for name, package in (DEBIAN | NPM | (more or {})).items():
        folder = folders[name] = downloads / re.sub(r"[^\w.-]+", "-", package).strip("-")
        if folder.is_dir():
            continue
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if name in DEBIAN:
            _run(["apt-get", "download", package], partial, "Use Debian or Ubuntu, and run `apt-get update` first.")
            (archive,) = partial.glob("*.deb")
            _run(["dpkg-deb", "-x", archive.name, "."], partial, "Install it with `apt-get install dpkg`.")
        else:
            _run(["npm", "pack", "--silent", package], partial, "Install it with `apt-get install npm`.")
            (archive,) = partial.glob("*.tgz")
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
        archive.unlink()
        partial.rename(folder)
    return folders


def _run(command: list[str], folder: Path, cure: str) -> None:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not installed, but {command[-1]} needs it. {cure}")
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{result.stderr.strip()}\n{cure}")


# ---- Reading ----


def read_drawings(folders: dict[str, Path]) -> list[Drawing]:
    """The drawings of all sources, at most `PER_NAME` of each name and source."""
    emoji = _Emoji(folders["emojibase"] / "package")
    found = [
        *_clip_art(
            folders["openclipart"] / "usr/share/openclipart/png",
            folders["openclipart titles"] / "usr/share/openclipart/svg",
        ),
        *_stamps(folders["tuxpaint"] / "usr/share/tuxpaint/stamps"),
        *_openmoji(folders["openmoji"] / "package", emoji),
        *emoji.named_by_words("fluent flat", folders["fluentui-emoji"] / "package/icons/flat"),
        *emoji.named_by_words("fluent modern", folders["fluentui-emoji"] / "package/icons/modern"),
        *emoji.named_by_code("twemoji", folders["twemoji"] / "package/dist/svg"),
        *emoji.named_by_code("google", folders["google"] / "package/img/google/64"),
    ]
    kept, counts = [], collections.Counter[tuple[str, str]]()
    for drawing in filter(None, found):
        counts[drawing.source, drawing.name] += 1
        if drawing.name and counts[drawing.source, drawing.name] <= PER_NAME:
            kept.append(drawing)
    return kept


def plain(text: str) -> str:
    """The words of a file name, a title or a label in lower case, without numbers: "Fall_Leaf 02" is "fall leaf"."""
    words = re.split(r"[\s_./()-]+", text.lower())
    return " ".join(word.rstrip("0123456789") for word in words if word.rstrip("0123456789"))


def concept_of(name: str) -> str:
    """The motif of an emoji's label: "woman farmer: dark skin tone" and "man farmer" are "farmer"."""
    name = re.sub(r": [^:]*skin tone.*$", "", name)
    name = re.sub(r"^(family|kiss|couple with heart): .*", r"\1", name)
    name = re.sub(r":? facing right$", "", name)
    motif = re.sub(r"^((wo)?m[ae]n|person|people)\b[ :]*", "", name)
    return motif or name


class _Emoji:
    """Names, keywords and categories of all emoji, by code and by the words of the name (emojibase)."""

    def __init__(self, package: Path) -> None:
        groups = json.loads((package / "meta/groups.json").read_text(encoding="utf-8"))
        self._categories = {int(key): name.replace("-", " ") for key, name in groups["subgroups"].items()}
        self._entries = {_code(entry["hexcode"]): entry for entry in self._read(package, "en")}
        self._names: dict[str, dict[str, str]] = {}
        for language in LANGUAGES:
            for entry in self._read(package, language):
                self._names.setdefault(_code(entry["hexcode"]), {})[language] = entry["label"]
        self._code_of = {_words(entry["label"]): code for code, entry in self._entries.items()}

    @staticmethod
    def _read(package: Path, language: str) -> Iterator[dict]:
        for entry in json.loads((package / language / "data.json").read_text(encoding="utf-8")):
            yield entry
            for variant in entry.get("skins", []):
                yield {"tags": entry.get("tags", []), **variant}

    def drawing(self, source: str, file: Path, code: str | None) -> Drawing | None:
        entry = self._entries.get(code, {})
        if "subgroup" not in entry:
            return None
        name, category = entry["label"].lower(), self._categories[entry["subgroup"]]
        names = self._names.get(code, {})
        return Drawing(source, file, name, category, list(entry.get("tags", [])), concept_of(name), names)

    def named_by_code(self, source: str, folder: Path) -> Iterator[Drawing | None]:
        files = [path for path in sorted(folder.iterdir()) if path.suffix in (".png", ".svg")]
        return (self.drawing(source, path, _code(path.stem)) for path in files)

    def named_by_words(self, source: str, folder: Path) -> Iterator[Drawing | None]:
        stems = {path: path.stem.removesuffix("-default") for path in sorted(folder.glob("*.svg"))}
        return (self.drawing(source, path, self._code_of.get(stem)) for path, stem in stems.items())


def _code(name: str) -> str:
    """A code such as 0023-FE0F-20E3 without the variation selector and in one spelling, since vendors differ there."""
    return "-".join(f"{int(part, 16):X}" for part in name.split("-") if part.upper() != "FE0F")


def _words(label: str) -> str:
    """A label as the files of fluentui-emoji are named: "man farmer: dark skin tone" is "man-farmer-dark"."""
    text = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode().lower().replace("'", "")
    text = re.sub(r": ([\w-]+) skin tone$", r" \1", text)
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _openmoji(package: Path, emoji: _Emoji) -> list[Drawing]:
    """OpenMoji's drawings of the emoji, and those of its own, which have no code in Unicode."""
    found = []
    for entry in json.loads((package / "data/openmoji.json").read_text(encoding="utf-8")):
        path = package / "color/svg" / f"{entry['hexcode']}.svg"
        if not path.is_file():
            continue
        if (drawing := emoji.drawing("openmoji", path, _code(entry["hexcode"]))) is None:
            name = entry["annotation"].lower()
            words = [word.strip().lower() for word in f"{entry['tags']}, {entry['openmoji_tags']}".split(",")]
            drawing = Drawing("openmoji", path, name, entry["subgroups"].replace("-", " "), words, concept_of(name))
        found.append(drawing)
    return found


_TITLE = re.compile(r"<dc:title[^>]*>([^<]+)</dc:title>")  # the first is the drawing's, others name its author
_KEYWORD = re.compile(r"<rdf:li[^>]*>([^<]+)</rdf:li>")
# Keywords that describe the file instead of the picture.
_NO_KEYWORDS = {"hash", "icon", "icons", "theme", "lemon_theme_icon", "clipart", "clip art", "svg", "unsorted"}


def _clip_art(pictures: Path, described: Path) -> list[Drawing]:
    """Open Clip Art: the title, or the words of the file name where many files share a title; keywords; the folder."""
    entries = []
    for path in sorted(pictures.rglob("*.png")):
        place = path.relative_to(pictures)
        description = (described / place).with_suffix(".svg")
        if path.is_symlink() or "stars" in place.parts or not description.is_file():
            continue
        with path.open("rb") as file:
            width, height = struct.unpack(">II", file.read(24)[16:])  # of PNG's header
        picture = path if width * height <= MAX_PIXELS else description
        # Some files are not XML, and the pictures in them are large: the metadata is all that is read.
        text = description.read_text(encoding="utf-8", errors="ignore")
        title = _TITLE.search(text)
        keywords = [html.unescape(keyword).strip().lower() for keyword in _KEYWORD.findall(text)]
        name = plain(html.unescape(title[1])) if title else ""
        keywords = [keyword.replace("_", " ") for keyword in keywords if keyword not in _NO_KEYWORDS]
        entries.append((picture, place.parts[:-1], name, keywords))
    titles = collections.Counter(title for _, _, title, _ in entries)
    found = []
    for path, folders, title, keywords in entries:
        of_collection = title.startswith(("clipart by", "part of")) or titles[title] > 3
        name = plain(path.stem) if not title or of_collection else title
        category = " ".join(map(plain, folders[:2]))
        of_others = title if of_collection else ""
        found.append(Drawing("openclipart", path, name, category, keywords, name, title=of_others))
    return found


def _stamps(root: Path) -> list[Drawing]:
    """Tux Paint's stamps, photographs among them: a sentence in many languages; the folder."""
    found = []
    for text in sorted(root.rglob("*.txt")):
        path = next((p for p in (text.with_suffix(".png"), text.with_suffix(".svg")) if p.is_file()), None)
        if path is None:
            continue
        first, *others = text.read_text(encoding="utf-8", errors="ignore").splitlines() or [""]
        sentence = first.strip().rstrip(".").lower()
        translations = {}
        for line in others:
            language, _, translation = line.partition(".utf8=")
            if language.removesuffix("_CN") in LANGUAGES and translation:
                translations[language.removesuffix("_CN")] = translation.strip()
        folders = [plain(part) for part in text.relative_to(root).parts[:-1] if part != "cartoon"]
        concept = plain(re.sub(r"^(an?|the) ", "", sentence))
        keywords = [plain(text.stem), *reversed(folders)]
        found.append(Drawing("tuxpaint", path, sentence, " ".join(folders[:2]), keywords, concept, translations))
    return found
