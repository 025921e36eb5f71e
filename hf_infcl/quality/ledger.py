"""The ledger: a parquet file that says of each pair of a training set how well image and caption belong together.

It also draws the most suspicious pairs, to be looked at."""

import importlib.util
import io
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from ..data import ImageTextDataset, ImageTextStream
from ..files.text import counted, describe_cause
from ..files.whole import written_whole
from ..processes.collectives import Processes
from .selection import LEAST_BELOW

# A push leaves out what begins with an underscore: ledger and sheet show captions and images of the training.
LEDGER_FILE, SHEET_FILE = "_ledger.parquet", "_ledger.png"
CERTAIN = 0.9  # the probability from which on a pair is told to be wrong
RATHER_WRONG = 0.5  # the probability whose exclusion gained more than that of CERTAIN in scripts/real_pairs
_WIDTH = 0.25  # of the window in which scores are counted, to both sides


@dataclass
class Ledger:
    """The n pairs of a training set, each with its score, which it puts in the ascending order of their keys."""

    content: str  # the `key_fingerprint` of the training set, or its `content_fingerprint` in earlier versions
    key: np.ndarray  # [n] int64, the row of a table, or the hash of a stream's sample
    # [n] fp32; see `hf_infcl.loss.pair_scores.pair_scores`. After a training with ``leave_out``, their moving averages.
    score: np.ndarray
    caption: Sequence[str] = ()  # of each pair one, which may be empty
    # n names of a stream's samples, each after that of its shard; of a table, the image files of its rows if it names
    # all of them, or else no names.
    sample: Sequence[str] = ()
    # n times whether a training with ``leave_out`` leaves the pair out at its end; empty without such a training.
    left_out: Sequence[bool] = ()
    p_wrong: np.ndarray = field(init=False)  # [n] fp32; see `probability_wrong`

    def __post_init__(self) -> None:
        order = np.argsort(self.key, kind="stable")
        self.key, self.score = self.key[order], self.score[order].astype(np.float32)
        self.caption = self.caption if len(self.caption) else [""] * len(self)
        for name in ("caption", "sample", "left_out"):
            if len(values := getattr(self, name)):
                setattr(self, name, [values[place] for place in order])
        self.p_wrong = probability_wrong(self.score)

    def __len__(self) -> int:
        return len(self.key)

    def most_suspicious(self, count: int) -> np.ndarray:
        """The places of the pairs with the lowest scores, the lowest first."""
        return np.argsort(self.score, kind="stable")[:count]

    def write(self, path: str | Path) -> None:
        """Writes a parquet file with these columns, without names and ``left_out`` if it has none."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in ("key", "score", "p_wrong", "caption")}
        columns |= {name: values for name in ("sample", "left_out") if len(values := getattr(self, name))}
        columns["content"] = pa.DictionaryArray.from_arrays(np.zeros(len(self), np.int8), pa.array([self.content]))
        with written_whole(Path(path)) as partial:
            pq.write_table(pa.table(columns), partial)


def probability_wrong(score: np.ndarray) -> np.ndarray:
    """The probability that each pair does not belong together, [n] fp32, from all scores [n].

    Scores of pairs that do not belong together lie around 0, as many above it as below, and those of other pairs
    above. So there are as many wrong pairs with a score near s > 0 as pairs with one near -s, and their share of all
    pairs near s is the probability; near means within 0.25. It is 1 for s <= 0, and at least that of any higher score.
    Where all pairs belong together, hardly any score is below 0, and hardly any pair is taken for wrong.

    Of the scores after trainings with ``leave_out`` on drawings with 10, 20 and 50% wrong captions, those with a
    probability of at least 0.9 were wrong in 76, 87 and 93% of the cases, and were half of all that are wrong; the sum
    of all probabilities was 11, 19 and 39% of the pairs. A model that has learned wrong pairs by heart no longer gives
    them low scores, and finds none.
    """
    order = np.argsort(score, kind="stable")
    ordered = score[order]

    def near(values: np.ndarray) -> np.ndarray:
        return np.searchsorted(ordered, values + _WIDTH) - np.searchsorted(ordered, values - _WIDTH)

    share = np.where(ordered <= 0, 1.0, np.minimum(1.0, near(-ordered) / np.maximum(1, near(ordered))))
    probabilities = np.empty(len(score), np.float32)
    probabilities[order] = np.maximum.accumulate(share[::-1])[::-1]
    return probabilities


# ---- Training without the pairs that a ledger says are wrong ----


def rows_kept(dataset: ImageTextDataset, asked: str) -> np.ndarray:
    """The rows of a table whose pairs are not wrong with at least some probability, [n] int64.

    The file of the ledger and the probability are asked for as in ``"_ledger.parquet:0.5"``. ``"_ledger.parquet:5%"``
    asks for that share of the pairs, those with the lowest scores, rounded down. A ValueError says that the number is
    missing, or that the file is no ledger, is of another table, or excludes all pairs.
    """
    wrong = _excluded(dataset, asked)
    if len(wrong) and not 0 <= wrong.min() <= wrong.max() < len(dataset):
        raise ValueError(
            f"The ledger of {asked} leaves out rows {wrong.min()} to {wrong.max()}, but the table has {len(dataset):,} "
            "rows, the first of which is row 0. Keep the keys in a copy of a ledger."
        )
    return np.setdiff1d(np.arange(len(dataset)), wrong)


def stream_kept(stream: ImageTextStream, asked: str) -> ImageTextStream:
    """A stream without the samples that are wrong with at least some probability; as `rows_kept`.

    Every process and worker holds 8 bytes for each sample that is left out, and none for the others.
    """
    return stream.without(_excluded(stream, asked))


def _excluded(dataset: ImageTextDataset | ImageTextStream, asked: str) -> np.ndarray:
    """The keys [n] int64, in ascending order, of a dataset's pairs that are to be left out."""
    wrong, of_ledger, recorded = _wrong(asked)
    # A table may have rows that are not in the ledger: all of its rows count.
    count = of_ledger if isinstance(dataset, ImageTextStream) else len(dataset)
    if recorded not in (content := dataset.key_fingerprint(), dataset.content_fingerprint()):
        raise ValueError(
            f"The ledger {asked.rpartition(':')[0]} is of other data: it was written for {recorded}, and this is "
            f"{content}. Its keys mean other pairs here. Run `infcl score` on this data, or name that of the ledger."
        )
    if len(wrong) == count:
        raise ValueError(f"{asked} excludes all {count:,} pairs. Choose a higher probability, or a smaller share.")
    if Processes().rank == 0:
        print(f"Excluded by {asked}: {len(wrong):,} of {count:,} pairs.", file=sys.stderr)
    return wrong


def _wrong(asked: str) -> tuple[np.ndarray, int, str]:
    """The keys [n] int64 of a ledger's pairs that are to be left out, the number of all pairs, and whose they are."""
    path, _, number = asked.rpartition(":")
    is_share = number.endswith("%")
    try:
        least = float(number.removesuffix("%"))
    except ValueError:
        least = -1.0
    if not path or not 0 < least <= (100 if is_share else 1):
        raise ValueError(
            "exclude must be a ledger and the least probability of the pairs to leave out, more than 0 and at most 1, "
            f"or the share with the lowest scores, such as _ledger.parquet:0.5 or _ledger.parquet:5%, got {asked!r}."
        )
    name = "score" if is_share else "p_wrong"
    try:
        with pq.ParquetFile(path) as file:
            first = next(file.iter_batches(1, columns=["content"]), None)  # every row has the same
            if first is None:
                raise ValueError("it has no rows")
            key, values = (column.to_numpy() for column in file.read(columns=["key", name]).columns)
        if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
            raise ValueError(f"its column {name} does not hold a number in every row")
        content = str(first["content"][0].as_py())
    except FileNotFoundError:
        raise ValueError(f"There is no ledger {path}. `infcl score` writes one.") from None
    except (OSError, KeyError, ValueError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path} is not a ledger that `infcl score` has written: {describe_cause(error)}. An edited copy "
            "has to be a parquet file that keeps the ledger's columns."
        ) from error
    count = int(least * len(key) / 100)  # in this order, since 0.58 * 50 is less than 29
    wrong = np.argsort(values, kind="stable")[:count] if is_share else np.flatnonzero(values >= least)
    return np.unique(key[wrong]).astype(np.int64), len(key), content


def words_of_excluded(asked: str) -> tuple[str, str]:
    """A phrase that says how many pairs of a ledger are left out, and which; and the name of its file."""
    path, _, number = asked.rpartition(":")
    keys, count, _ = _wrong(asked)
    lowest = number.endswith("%")
    which = f"the {number} with the lowest scores" if lowest else f"wrong with a probability of at least {number}"
    return f"{len(keys):,} of {count:,}, {which}", Path(path).name


SHOWN = 64  # pairs
_COLUMNS, _WIDTH_OF_SHEET, _SIDE, _HEIGHT = 4, 260, 120, 216  # pixels of a cell, and the longer side of its image
_LETTERS, _BESIDE = 36, 18  # in a line below and beside an image


def resized(image: np.ndarray, longer_side: int) -> Image.Image:
    """An image in uint8 [H, W, 3], enlarged or reduced to so many pixels of its longer side."""
    scale = longer_side / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)


def small_jpeg(image: np.ndarray) -> bytes:
    """A JPEG of the size of a cell from an image in uint8 [H, W, 3]."""
    file = io.BytesIO()
    resized(image, _SIDE).save(file, "jpeg", quality=85)
    return file.getvalue()


def draw_suspicious(ledger: Ledger, pictures: Mapping[int, bytes]) -> Image.Image:
    """A cell for each of the `SHOWN` pairs with the lowest scores: its image and its caption.

    ``pictures`` are the `small_jpeg` of these pairs by their keys, as far as they are known.
    """
    places = ledger.most_suspicious(SHOWN)
    font = letters_of(11)
    rows = -(-len(places) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _WIDTH_OF_SHEET, max(1, rows) * _HEIGHT), "white")
    for number, place in enumerate(places):
        cell = Image.new("RGB", (_WIDTH_OF_SHEET, _HEIGHT), "white")  # beyond which no wide letters are drawn
        pen = ImageDraw.Draw(cell)
        key = int(ledger.key[place])
        if key in pictures:
            cell.paste(Image.open(io.BytesIO(pictures[key])), (8, 8))
        name = f"sample {ledger.sample[place]}" if ledger.sample else f"row {key}"
        facts = [f"score {ledger.score[place]:.2f}", f"wrong {ledger.p_wrong[place]:.0%}", *lines_of(name, _BESIDE, 5)]
        pen.text((_SIDE + 16, 8), "\n".join(facts), "#555555", font)
        pen.text((8, _SIDE + 14), "\n".join(lines_of(ledger.caption[place], _LETTERS, 4)), "black", font)
        sheet.paste(cell, (number % _COLUMNS * _WIDTH_OF_SHEET, number // _COLUMNS * _HEIGHT))
    return sheet


def write_ledger_and_sheet(ledger: Ledger, pictures: Mapping[int, bytes], folder: Path) -> None:
    """Writes a ledger into a folder, and the picture of `draw_suspicious` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger.write(folder / LEDGER_FILE)
    draw_suspicious(ledger, pictures).save(folder / SHEET_FILE)


def lines_of(text: str, letters: int, most: int) -> list[str]:
    """At most so many lines of a text, each of at most so many letters; "…" stands for the rest of a longer one."""
    lines = textwrap.wrap(text, letters)
    if len(lines) > most:
        last = lines[most - 1]
        if len(last) > letters - 2:  # at a space, which some languages do not write
            last = last[: letters - 2].rpartition(" ")[0] or last[: letters - 2]
        lines[most - 1 :] = [f"{last} …"]
    return lines


def letters_of(size: int) -> Any:
    """The font of so many pixels that pictures of captions are drawn with.

    It comes with matplotlib, if that is installed: Pillow's own has neither accents nor other scripts.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return ImageFont.load_default(size=size)
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)


def ledger_lines(ledger: Ledger, folder: str | Path, *, waits_for: str = "", learned: bool = False) -> Iterator[str]:
    """The report of a ledger that was written into a folder, for a person.

    Args:
        waits_for: why the rule of ``leave_out`` has not begun, or has stopped; empty if there was none.
        learned: whether the model was trained on these pairs, wrong ones included.
    """
    wrong, expected = int((ledger.p_wrong >= CERTAIN).sum()), float(ledger.p_wrong.sum())
    few = expected < max(0.5, LEAST_BELOW * len(ledger))
    file = Path(folder, LEDGER_FILE)
    if learned:
        yield (
            "This model was trained on these pairs, as its record says. It may know wrong ones by heart, and finds too "
            "few of them. Score with another model, or train with --leave_out noisy."
        )
    if len(ledger) > 0 and float(np.median(ledger.p_wrong)) >= 0.5:  # as to a model that does not know such pairs yet
        yield (
            f"The scores in {file} do not mean anything yet: to this model most of the {len(ledger):,} pairs look "
            "wrong. Do not exclude pairs by them."
        )
        return
    if not wrong and expected < 0.5:
        by_heart = ", but this model was trained on all of them, and may know wrong ones by heart" if waits_for else ""
        yield f"None of {len(ledger):,} pairs seems wrong{by_heart}. The score of each is in {file}."
    elif waits_for and not few:
        yield f"Do not exclude pairs by the scores in {file}, because --leave_out did not: {waits_for}."
        return
    else:
        exclude = (
            f" `infcl train --exclude {file}:{RATHER_WRONG:g}` trains without all that are likelier wrong than right."
        )
        about = "At least" if learned or waits_for else "About"
        do = "does" if round(expected) == 1 else "do"
        yield (
            f"{about} {expected:,.0f} of {counted(len(ledger), 'pair')} {do} not seem to belong together, {wrong:,} of "
            f"them with a probability of at least {CERTAIN:g}.{exclude if wrong else ''}"
        )
    yield f"The {min(SHOWN, len(ledger))} pairs with the lowest scores are drawn in {Path(folder, SHEET_FILE)}."
    if few and (learned or waits_for):
        yield (
            "Wrong pairs that a model knows by heart may still have the lowest scores. Look at these: if they are "
            f"wrong, `infcl train --exclude {file}:5%` trains without the lowest 5%."
        )
