"""The ledger: a parquet file that says of each pair of a training set how well image and caption belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ...data import ImageTextDataset, ImageTextStream

# A push leaves out what begins with an underscore: ledger and sheet show captions and images of the training.
LEDGER_FILE, SHEET_FILE = "_ledger.parquet", "_ledger.png"
RECORD = b"infcl"  # in the metadata of the file
CERTAIN = 0.9  # the probability from which on a pair is told to be wrong
RATHER_WRONG = 0.5  # the probability whose exclusion gained more than that of CERTAIN in scripts/real_pairs
_WIDTH = 0.25  # of the window in which scores are counted, to both sides
_ARRAYS = {"key": np.int64, "score": np.float32, "p_wrong": np.float32, "text_key": np.int64, "image_key": np.int64}


@dataclass
class Ledger:
    """What is known about the n pairs of a training set, by their keys in ascending order."""

    content: str  # the `key_fingerprint` of the training set, or its `content_fingerprint` in earlier versions
    key: np.ndarray  # [n] int64, the row of a table, or the hash of a stream's sample
    # [n] fp32; see `hf_infcl.loss.pair_scores.pair_scores`. After a training with ``leave_out``, their moving averages.
    score: np.ndarray
    p_wrong: np.ndarray  # [n] fp32; see `probability_wrong`
    # [n] int64: in a window of pairs, the pair whose text the image prefers, and the pair whose image the text prefers.
    # Both are the pair itself if it has the highest cosine, or its image, its caption or its id. -1 if unknown.
    text_key: np.ndarray
    image_key: np.ndarray
    caption: list[str] = field(default_factory=list)  # n captions, of each pair one; empty if unknown
    # n names of a stream's samples, each after that of its shard, or "" if it is not known; of a table, the image files
    # of its rows if it names all of them, or else no names.
    sample: list[str] = field(default_factory=list)
    # [n] bool: whether a training with ``leave_out`` leaves the pair out at its end; None without such a training.
    left_out: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.key)

    def most_suspicious(self, count: int) -> np.ndarray:
        """The places of the pairs with the lowest scores, the lowest first."""
        return np.argsort(self.score, kind="stable")[:count]

    def find_name(self, key: int) -> str:
        """The name by which a person knows the pair with a key: its sample or file if it is known, or the key."""
        return self._find(self.sample, key) or str(key)

    def find_caption(self, key: int) -> str:
        """The caption of the pair with a key; empty if it is not in the ledger."""
        return self._find(self.caption, key)

    def _find(self, words: list[str], key: int) -> str:
        """The entry of a pair in ``words``, which has one for each pair or is empty; "" if there is none."""
        place = int(np.searchsorted(self.key, key))
        return words[place] if place < len(words) and self.key[place] == key else ""

    def wrong(self, least: float) -> np.ndarray:
        """The keys of the pairs that are wrong with at least this probability."""
        return self.key[self.p_wrong >= least]

    def says_nothing(self) -> bool:
        """Whether most pairs look wrong, as they do to a model that does not know such pairs yet."""
        return len(self) > 0 and float(np.median(self.p_wrong)) >= 0.5

    # ---- Files ----

    def write(self, path: str | Path) -> None:
        """Writes a parquet file with these columns, and ``prefers_text`` and ``prefers_image`` as captions.

        A ledger without names has no column ``sample``, and one that no training has written no ``left_out``. The
        column ``content`` is for copies: most programs that edit them drop the metadata.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        columns["caption"] = pa.array(self.caption, pa.string())
        for name, keys in (("prefers_text", self.text_key), ("prefers_image", self.image_key)):
            columns[name] = pa.array([self.find_caption(int(key)) for key in keys], pa.string())
        if self.sample:
            columns["sample"] = pa.array(self.sample, pa.string())
        if self.left_out is not None:
            columns["left_out"] = self.left_out
        zeros = np.zeros(len(self), np.int8)
        columns["content"] = pa.DictionaryArray.from_arrays(zeros, pa.array([self.content]))
        table = pa.table(columns).replace_schema_metadata({RECORD: json.dumps({"content": self.content})})
        partial = Path(path).with_name(f"_{os.getpid()}.{Path(path).name}")
        pq.write_table(table, partial)
        os.replace(partial, path)

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """The ledger in a file; see `read_as_ledger` for errors."""
        import pyarrow.parquet as pq

        with read_as_ledger(path), pq.ParquetFile(path) as file:
            content, table = recorded_content(file), file.read()
            arrays = {name: table[name].to_numpy().astype(kind) for name, kind in _ARRAYS.items()}
            words = {name: table[name].to_pylist() for name in ("caption", "sample") if name in table.column_names}
            left_out = table["left_out"].to_numpy() if "left_out" in table.column_names else None
        return cls(content, **arrays, **words, left_out=left_out)


def recorded_content(file: Any) -> str:
    """The fingerprint of the data of a ledger that is open as a ``pyarrow.parquet.ParquetFile``."""
    if (record := (file.schema_arrow.metadata or {}).get(RECORD)) is not None:
        return str(json.loads(record)["content"])
    for batch in file.iter_batches(1, columns=["content"]):  # of a copy without the metadata; every row has the same
        return str(batch["content"][0].as_py())
    raise ValueError("it has no rows")


@contextmanager
def read_as_ledger(path: str | Path) -> Iterator[None]:
    """Within the context, an error becomes a ValueError that says that the file is missing or no ledger."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"There is no ledger {path}. `infcl score` writes one.") from None
    except (OSError, KeyError, ValueError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path} is not a ledger that `infcl score` has written: {type(error).__name__}: {error}. An edited copy "
            "has to be a parquet file that keeps the ledger's columns."
        ) from error


def check_data(recorded: str, dataset: ImageTextDataset | ImageTextStream, path: str | Path) -> None:
    """Raises a ValueError if the ledger in a file was written for data of another fingerprint."""
    if recorded not in (content := dataset.key_fingerprint(), dataset.content_fingerprint()):
        raise ValueError(
            f"The ledger {path} is of other data: it was written for {recorded}, and this is {content}. Its "
            "keys mean other pairs here. Run `infcl score` on this data, or name the data and split of the ledger."
        )


def make_ledger(
    content: str,
    key: np.ndarray,
    score: np.ndarray,
    prefers: tuple[np.ndarray, np.ndarray] | None = None,
    caption: list[str] | None = None,
    sample: list[str] | None = None,
) -> Ledger:
    """The ledger of pairs in any order; the arguments as for `Ledger`, ``prefers`` has its text and image keys."""
    order = np.argsort(key, kind="stable")
    text_key, image_key = (np.full(len(key), -1), np.full(len(key), -1)) if prefers is None else prefers
    captions = [""] * len(key) if caption is None else [caption[place] for place in order]
    samples = [] if sample is None else [sample[place] for place in order]
    score = score[order].astype(np.float32)
    arrays = key[order], score, probability_wrong(score), text_key[order], image_key[order]
    return Ledger(content, *arrays, captions, samples)


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
    ordered = np.sort(score)

    def near(values: np.ndarray) -> np.ndarray:
        upper, lower = (np.searchsorted(ordered, values + step) for step in (_WIDTH, -_WIDTH))
        return upper - lower

    share = np.where(score <= 0, 1.0, np.minimum(1.0, near(-score) / np.maximum(1, near(score))))
    order = np.argsort(score, kind="stable")
    probabilities = np.empty(len(score), np.float32)
    probabilities[order] = np.maximum.accumulate(share[order][::-1])[::-1]
    return probabilities
