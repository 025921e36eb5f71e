"""At which token a causal text tower takes the embedding of a text, and texts that get one embedding by that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from .model_types import AT_END, AT_END_IF_PADDED, AT_END_OR_LARGEST, AT_LARGEST, TEXT_TOWERS

LOOKED_AT = 10_000  # texts


class Reading(NamedTuple):
    """A text that a tower does not read to its end."""

    read: tuple[int, ...]  # the tokens on which its embedding depends
    text: tuple[int, ...]  # all tokens of the text


@dataclass(frozen=True)
class Pooling:
    """The token at which a causal text tower takes the embedding, so that nothing behind it is read."""

    stated: int  # the eos_token_id of the tower. Its first place in a text is taken, or that of the first token
    place: str = AT_END  # one of these names of `model_types`
    padding: int | None = None  # the pad_token_id of the tower's config, unless it is ``stated``

    @property
    def at_largest(self) -> bool:
        """Whether the first place of the largest token is taken instead."""
        return self.place == AT_LARGEST or (self.place == AT_END_OR_LARGEST and self.stated == 2)

    @classmethod
    def of_config(cls, config: object, stated: int | None = None) -> Pooling | None:
        """The pooling that a text tower's config implies; None for towers that read all tokens, or are not known.

        Args:
            stated: the ``eos_token_id`` with which the tower was built, if it is there.
        """
        place = TEXT_TOWERS.get(getattr(config, "model_type", ""))
        stated = getattr(config, "eos_token_id", None) if stated is None else stated
        if place is None or not isinstance(stated, int):
            return None
        padding = getattr(config, "pad_token_id", None)
        return cls(stated, place, None if padding == stated else padding)

    @classmethod
    def of_tower(cls, tower: nn.Module | None) -> Pooling | None:
        """The pooling of a text tower, or of the tower of transformers inside a custom one."""
        for module in () if tower is None else tower.modules():
            pooling = cls.of_config(getattr(module, "config", None), getattr(module, "eos_token_id", None))
            if pooling is not None:
                return pooling
        return None

    def reading(self, tokens: Sequence[int], last: int, ends: int = 1) -> Reading | None:
        """What the tower reads of a text; None if it takes the embedding at a token that ends texts.

        Args:
            last: the index of its last token.
            ends: the number of tokens up to this one that may end it.
        """
        if self.at_largest:
            taken = tokens.index(max(tokens))
        else:
            taken = tokens.index(self.stated) if self.stated in tokens else 0
        if taken >= last or tokens[taken] in tokens[last + 1 - ends : last + 1]:
            return None
        return Reading(tuple(tokens[: taken + 1]), tuple(tokens[: last + 1]))

    def fault(self, first: Reading, texts: tuple[str, str]) -> str:
        """Why two texts have one embedding, and what to do."""
        end, taken = first.text[-1], first.read[-1]
        if self.place == AT_LARGEST:
            why = "A model of this type takes the embedding of a text at its largest token"
            cure = f"Take a tokenizer that has no token above {end}."
        else:
            why = f"The eos_token_id of the model's text_config is {self.stated}, "
            why += "by which old configs mean the largest token of a text" if self.at_largest else ""
            why += "" if self.at_largest else "and the embedding of a text is taken there, or else at its first token"
            cure = (
                f"Set eos_token_id to {end} in the text_config of the model's config.json and load the model again, or "
                f"load tokenizer and model from one checkpoint. If {end} is a part of a word, the tokenizer adds no "
                "end token: give it a post_processor that does, such as TemplateProcessing of tokenizers."
            )
        return (
            f"{why}: here {taken}. But the tokenizer ends texts with {end}, and what follows {taken} is not read, so "
            f"that different texts have one embedding, such as {texts[0]!r} and {texts[1]!r}. {cure}"
        )


class SameEmbeddings:
    """Finds two different texts that get one embedding, among the first `LOOKED_AT`; none without a pooling."""

    def __init__(self, pooling: Pooling | None) -> None:
        self._pooling, self._looked_at = pooling, 0
        self._read: dict[tuple[int, ...], Reading] = {}

    def check(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Raises a ValueError if two of the texts so far have one embedding, although their tokens differ.

        Args:
            input_ids, attention_mask: [n, L]. Tensors on a GPU are waited for.
        """
        if self._pooling is None or self._looked_at >= LOOKED_AT:
            return
        if self._pooling.place == AT_END_IF_PADDED and (attention_mask is None or bool(attention_mask.all())):
            return
        self._looked_at += len(input_ids)
        for tokens, last, ends in _rows(input_ids, attention_mask, self._pooling.padding):
            if (reading := self._pooling.reading(tokens, last, ends)) is None:
                continue
            other = self._read.setdefault(reading.read, reading)
            if other.text != reading.text:
                raise ValueError(self._pooling.fault(other, (_words(other.text), _words(reading.text))))


def _rows(
    input_ids: Tensor, attention_mask: Tensor | None, padding: int | None
) -> Iterator[tuple[list[int], int, int]]:
    """The arguments of `Pooling.reading` for each text of a batch."""
    rows = input_ids.tolist()
    masks = [None] * len(rows) if attention_mask is None else attention_mask.tolist()
    for tokens, mask in zip(rows, masks, strict=True):
        if mask is not None:
            if any(mask):
                yield tokens, max(place for place, seen in enumerate(mask) if seen), 1
            continue
        last = len(tokens) - 1
        while last > 0 and tokens[last] == padding:
            last -= 1
        if last < len(tokens) - 1:
            yield tokens, last, 1
            continue
        # Equal tokens at the end are another padding, or the end itself.
        while last > 0 and tokens[last - 1] == tokens[-1]:
            last -= 1
        yield tokens, last, 2


def _words(tokens: Sequence[int]) -> str:
    shown = " ".join(map(str, tokens[:20]))
    return f"tokens {shown}{' ...' if len(tokens) > 20 else ''}"
