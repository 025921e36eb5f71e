"""Warns about captions of a dataset that the model does not read to their end, or that repeat."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import logging

from ..data.collator import ContrastiveCollator
from ..data.pairs import REPEATED, caption_pair_id
from ..windows.setup import Context
from .wrapped import all_parts

logger = logging.get_logger(__name__)

_SAMPLED = 10_000  # images whose captions are compared
_TOKENIZED = 2_000  # captions whose tokens are counted


@dataclass
class CaptionNotices:
    """Looks once at the captions of each dataset, and warns about those that are cut or repeated."""

    was_told: bool = False  # whether the run that is resumed has told all this
    cut: dict[str, float] = field(default_factory=dict)  # the share of captions that are, if any, by the dataset's name
    _seen: set[str] = field(default_factory=set)

    def look(self, name: str, datasets: Iterable[Any], collator: object, batch_size: int | None = None) -> None:
        """Looks at up to 10,000 images of each dataset, without reading images of tables.

        Args:
            name: the name of the datasets for the warnings. Only its first call has an effect.
            datasets: the parts of the data; those without a method ``sample_captions`` are left out.
            collator: captions are tokenized only for a `ContrastiveCollator`, which knows the limit.
            batch_size: the global batch of a training, in which repeated captions are each other's negatives.
        """
        if name in self._seen:
            return
        self._seen.add(name)
        parts = [part for part in datasets if hasattr(part, "sample_captions")]
        samples = [part.sample_captions(_SAMPLED) for part in parts]
        if isinstance(collator, ContrastiveCollator):
            texts = [caption for sample in samples for captions in sample for caption in captions]
            texts = texts[:: -(-len(texts) // _TOKENIZED) or 1]
            if cut := sum(map(collator.is_cut, texts)):
                self.cut[name] = share = cut / len(texts)
                tell = logger.info if self.was_told else logger.warning
                tell(
                    f"{share:.1%} of {len(texts):,} captions of the {name} have more than {collator.max_length} "
                    "tokens, the limit of the model, which does not see what follows. Captions that differ only there "
                    f"are equal to it. Shorten them, or use a model with a higher limit.{collator.more_positions}"
                )
        for part, sample in zip(parts, samples, strict=True):
            if self.was_told or batch_size is None or part.pair_id_column is not None:
                continue
            if (repeated := repeated_captions(sample)) > REPEATED * len(sample):
                logger.warning(
                    f"{repeated:,} of {len(sample):,} images of the {name} have a caption that another one also has. "
                    f"Equal captions in a global batch, which has {batch_size:,} pairs, are each other's negatives "
                    f"unless you pass pair_id_column={part.caption_column!r} (--pair_id_column {part.caption_column} "
                    "on the command line)."
                )

    def look_at_all(self, context: Context, evaluated: object) -> None:
        """Looks at the training set, or at the ``parts`` that it consists of, and at the evaluation sets."""
        parts: Mapping[str, object] = getattr(context.data, "parts", {"training set": context.data})
        for name, part in parts.items():
            self.look(name, all_parts(part), context.collator, context.args.global_batch_size)
        for name, dataset in evaluated.items() if isinstance(evaluated, Mapping) else [("", evaluated)]:
            self.look(f"evaluation set of eval_{name}{'_' if name else ''}*", all_parts(dataset), context.collator)


def repeated_captions(sample: list[list[str]]) -> int:
    """The number of images with a caption that reads the same as one of another image."""
    ids = [{caption_pair_id(caption) for caption in captions} for captions in sample]
    times = collections.Counter(number for ids_of_image in ids for number in ids_of_image)
    return sum(any(times[number] > 1 for number in ids_of_image) for ids_of_image in ids)
