"""The blocks of code of the guides and of model cards, which tests run in other places and with smaller sizes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def block_of(guide: str, words: str, language: str = "python") -> str:
    """The only block of a guide that contains the words."""
    (block,) = [block for block in blocks((ROOT / guide).read_text(encoding="utf-8"), language) if words in block]
    return block


def replaced(text: str, changes: dict[str, str]) -> str:
    """The text with other words for some of its own, all of which it must have."""
    for shown, given in changes.items():
        assert shown in text
        text = text.replace(shown, given)
    return text
