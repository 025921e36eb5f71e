"""Hard negative captions: one word of a caption is replaced by another one of its kind, which makes the caption wrong.

The kinds are those of SugarCrepe (arXiv 2306.14610) that such short captions have: attribute, number and relation.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Words of one group exclude each other: where one of them is true, the others are false. The pattern of some groups
# requires a context for words that could mean something else by themselves ("light bulb", "an orange", "close-up").
GROUPS: dict[str, list[tuple[str, str]]] = {
    "attribute": [
        (r"{}(?= skin tone)", "light medium-light medium medium-dark dark"),
        ("{}", "man woman, men women, boy girl, male female, king queen, prince princess"),
        (r"{}(?=[ -]\w)", "red orange yellow green blue purple brown black white pink"),
        ("{}", "open closed, big small, old young, happy sad, smiling frowning crying, full empty, hot cold"),
        ("{}", "raised lowered, locked unlocked, increasing decreasing"),
    ],
    "number": [
        ("(?<!formula ){}(?! of)", "one two three four five six seven eight nine ten eleven twelve"),
        ("{}", "1st 2nd 3rd"),
        ("(?<=keycap: ){}", "0 1 2 3 4 5 6 7 8 9 10"),
    ],
    "relation": [
        ("{}", "left right, leftwards rightwards, upwards downwards"),
        ("(?<!-){}", "up down"),
        ("{}", "with without, over under, above below, top bottom, inside outside, before after"),
    ],
}
KINDS = tuple(GROUPS)


class Swap(NamedTuple):
    kind: str
    caption: str


def _compiled() -> Iterator[tuple[str, list[str], re.Pattern[str]]]:
    for kind, patterns in GROUPS.items():
        for pattern, words in ((pattern, words) for pattern, groups in patterns for words in groups.split(", ")):
            several = sorted(words.split(), key=len, reverse=True)
            word = rf"(?<![\w-])(?:{'|'.join(several)})(?!\w)"
            yield kind, words.split(), re.compile(pattern.format(word))


_PATTERNS = list(_compiled())


def swaps_of(caption: str) -> list[Swap]:
    """All captions that differ from a caption in one word, and so are wrong where it is right; often there is none.

    The word put in is one that the caption does not have yet: "red and black flag" does not become "red and red flag".
    """
    found = []
    for kind, words, pattern in _PATTERNS:
        for match in pattern.finditer(caption):
            others = (word for word in words if not re.search(rf"(?<![\w-]){word}(?!\w)", caption))
            found += [Swap(kind, caption[: match.start()] + word + caption[match.end() :]) for word in others]
    return found


def negative_captions(captions: Sequence[str]) -> list[str]:
    """The swaps of all captions of an image, without those that are another caption of it."""
    return [c for c in dict.fromkeys(swap.caption for one in captions for swap in swaps_of(one)) if c not in captions]
