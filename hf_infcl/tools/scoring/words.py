"""What the captions of suspicious pairs have in common: rare concepts look wrong, so their words tell what is lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

LISTED = 12  # words
_FEWEST = 2  # pairs of a word that is listed


class Word(NamedTuple):
    """A word of captions, how many pairs have it, and how many of these pairs are chosen."""

    word: str
    chosen: int
    pairs: int


def most_chosen_words(captions: Sequence[str], chosen: np.ndarray) -> list[Word]:
    """The words of which most pairs beyond their share are chosen, the first one by the most pairs.

    Each of n pairs has one caption; ``chosen`` [n] bool are, for example, those that are left out.
    """
    words = [_words(caption) for caption in captions]
    every = Counter(word for pair in words for word in pair)
    some = Counter(word for pair, yes in zip(words, chosen, strict=True) if yes for word in pair)
    share = float(chosen.mean()) if len(chosen) else 0.0
    candidates = [Word(word, count, every[word]) for word, count in some.items() if count >= _FEWEST]
    candidates = [one for one in candidates if one.chosen > 2 * share * one.pairs]
    return sorted(candidates, key=lambda one: (share * one.pairs - one.chosen, one.word))[:LISTED]


def lines_of_words(captions: Sequence[str], chosen: np.ndarray) -> Iterator[str]:
    """The same in sentences; and how often pairs with a unique word are chosen, if more often than the rest."""
    if not chosen.any() or chosen.all():
        return
    if words := most_chosen_words(captions, chosen):
        told = ", ".join(f"{one.word!r} ({one.chosen:,} of {one.pairs:,})" for one in words)
        yield f"Words that many of them share, of all pairs with the word: {told}."
    every = Counter(word for caption in captions for word in _words(caption))
    rare = np.array([any(every[word] == 1 for word in _words(caption)) for caption in captions])
    if rare.any() and not rare.all() and chosen[rare].mean() > chosen[~rare].mean():
        yield (
            f"Of pairs with a word that no other caption has ({int(rare.sum()):,}), {chosen[rare].mean():.1%} are "
            f"among them, and {chosen[~rare].mean():.1%} of the others: what is rare looks wrong."
        )


def _words(caption: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]{2,}", caption.lower()))
