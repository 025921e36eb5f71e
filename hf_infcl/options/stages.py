"""Words such as 112:0.5 160:0.4 224: a number for each stage of a training, with the share that the stage takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence


def split_words(value: Sequence[str]) -> list[str]:
    """The words of the option, one for each stage, of a value that may hold several in one."""
    return " ".join([value] if isinstance(value, str) else map(str, value)).split()


def same_words(value: Sequence[str]) -> list[str]:
    """The words in which all values of the same stages are equal, for comparisons with another run."""
    parts = (word.partition(":") for word in split_words(value))
    return [f"{int(number)}:{float(share)}" if share else str(int(number)) for number, _, share in parts]


def read_stages(
    name: str, words: Sequence[str], of: str, least: str, example: str
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The numbers of the stages, and for each stage but the last the share of the training after which it ends.

    Args:
        words: its value; the last stage gets the rest, and has no share.
        of: what the words list, for messages.
        least: the smallest numbers that are allowed, for messages.
        example: a valid value, for messages.

    Raises:
        ValueError: the words are no such stages, or a number is not larger than the one before.
    """
    words = split_words(words)
    *earlier, last = [re.fullmatch(r"(\d+)(?::(0?\.\d+))?", word) for word in words] or [None]
    shares = [float(stage[2] or 0) if stage else 0.0 for stage in earlier]
    if not earlier or last is None or last[2] or not all(shares) or sum(shares) >= 1:
        raise ValueError(
            f"{name} must be {of} and then the last one, which gets the rest, such as {example}, got "
            f"{' '.join(words) or 'nothing'}."
        )
    numbers = tuple(int(stage[1]) for stage in (*earlier, last) if stage)
    if numbers[0] == 0 or any(later <= number for number, later in itertools.pairwise(numbers)):
        raise ValueError(f"{name} must have {least} that grow, got {' '.join(words)}.")
    return numbers, tuple(itertools.accumulate(shares))
