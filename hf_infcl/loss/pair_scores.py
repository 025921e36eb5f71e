"""How far each pair of a global batch stands out from what its image and its texts are compared with."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..processes.collectives import Processes, gather_rows

_LEAST_VARIANCE = 1e-8  # of cosines
_LEAST_SHARE = 0.1  # of the mean variance over the global batch: where few others remain, they may be all alike
_ROWS = 1024  # whose cosines with pairs of equal ids are computed at a time


class _Side(NamedTuple):
    """The images of the global batch, or its texts, as this process sees them."""

    embeddings: Tensor  # [n, D] fp32, those of this process
    image: Tensor  # [n] int64, the image of the global batch that each belongs to
    number: Tensor  # of them in the global batch
    mean: Tensor  # [D], of the global batch
    moments: Tensor  # [D, D], the sum of (x - mean)(x - mean)ᵀ over the global batch


def pair_scores(
    images: Tensor,
    texts: Tensor,
    caption_image: Tensor | None = None,
    pair_ids: Tensor | None = None,
    processes: Processes | None = None,
) -> Tensor:
    """The z-score of each pair among the cosines of the global batch; collective.

    From the cosine of an image with its text, the mean of its cosines with all other texts is subtracted, and the
    difference is divided by their standard deviation; the same for the text among all other images. The score is the
    mean of both. Where image and text do not belong together, it is 0 on average, whatever the temperature, the
    objective, the size of the batch and how far the training has come. Others that are nearly all alike, such as the
    texts of two classes, count with a third of the mean deviation of the global batch. Without others there is no
    score.

    The mean and the variance of a row of cosines follow from the mean and the second moments of what the row is
    compared with, so no process computes more than its rows times D². Others are pairs with another pair id. The
    cosines with those of the same id are computed and taken out, ``_ROWS`` rows at a time. An image with several
    captions has the mean of their cosines, and none of them is among its others. Negative captions do not count.

    Args:
        images, texts: embeddings of this process, [images, D] and [texts, D]; all processes have equally many images.
        caption_image: [texts] int64, the image of each text or -1 for negative captions; None if text i belongs to i.
        pair_ids: [images] int64.
        processes: those that have the global batch; by default, all.

    Returns:
        [images] fp32, NaN without others.
    """
    processes = Processes() if processes is None else processes
    v, t = images.float(), texts.float()
    belongs = torch.arange(len(v), device=v.device) if caption_image is None else caption_image.to(v.device)
    t, belongs = t[belongs >= 0], belongs[belongs >= 0]
    first = processes.rank * len(v)
    of_images = _side(v, first + torch.arange(len(v), device=v.device), processes)
    of_texts = _side(t, first + belongs, processes)
    # ---- Cosines less their mean over the global batch ----
    by_image = torch.linalg.vecdot(v[belongs], t - of_texts.mean)  # of each text with its image, among all texts
    by_text = torch.linalg.vecdot(t, v[belongs] - of_images.mean)  # the same, among all images
    # ---- What is not among the others: count, sum and sum of squares [n, 3] of such cosines ----
    captions = torch.zeros(len(v), 3, device=v.device).index_add_(0, belongs, _powers(by_image))
    without = [captions, _powers(by_text)]
    if pair_ids is not None:
        of_equal_ids = _of_equal_ids(of_images, of_texts, pair_ids, processes)
        without = [alone + equal for alone, equal in zip(without, of_equal_ids, strict=True)]
    mean = captions[:, 1] / captions[:, 0]
    z_of_images = _standardised(mean, of_images, of_texts, without[0])
    z_of_texts = _standardised(by_text, of_texts, of_images, without[1])
    mean_of_texts = torch.zeros_like(mean).index_add_(0, belongs, z_of_texts) / captions[:, 0]
    return (z_of_images + mean_of_texts) / 2


def _side(embeddings: Tensor, image: Tensor, processes: Processes) -> _Side:
    sums = processes.sum(torch.cat((embeddings.sum(0), embeddings.new_tensor([len(embeddings)]))))
    mean = sums[:-1] / sums[-1]
    centred = embeddings - mean
    return _Side(embeddings, image, sums[-1], mean, processes.sum(centred.T @ centred))


def _standardised(cosines: Tensor, side: _Side, other_side: _Side, without: Tensor) -> Tensor:
    """Each cosine less the mean, in standard deviations of the cosines with all of the other side but the excluded."""
    squares = torch.linalg.vecdot(side.embeddings @ other_side.moments, side.embeddings)
    count, total, of_squares = without.unbind(1)
    number = other_side.number - count
    number = number.masked_fill(number < 1, torch.nan)
    mean = -total / number  # all deviations from the mean add up to 0
    variance = (squares - of_squares) / number - mean.square()
    second_moments = side.moments / side.number + side.mean.outer(side.mean)
    of_all = (second_moments * other_side.moments).sum() / other_side.number  # the mean variance of all rows of cosines
    return (cosines - mean) / variance.clamp(min=_LEAST_VARIANCE).maximum(_LEAST_SHARE * of_all).sqrt()


def _powers(cosines: Tensor) -> Tensor:
    return torch.stack((torch.ones_like(cosines), cosines, cosines.square()), 1)


# ---- Equal ids ----


def _of_equal_ids(images: _Side, texts: _Side, pair_ids: Tensor, processes: Processes) -> list[Tensor]:
    """Count, sum and sum of squares of the cosines with others of the same id, for each image and each text."""
    ids = processes.gather(pair_ids.to(images.embeddings.device)).flatten()
    _, same, counts = ids.unique(return_inverse=True, return_counts=True)
    repeated = counts[same] > 1  # [images of the global batch]
    sides = (images, texts)
    powers = [side.embeddings.new_zeros(len(side.embeddings), 3) for side in sides]
    if bool(repeated.any()):
        rows = [repeated[side.image].nonzero().flatten() for side in sides]
        of_ids = [(side.embeddings[own] - side.mean, side.image[own]) for side, own in zip(sides, rows, strict=True)]
        everyone = [gather_rows(own, processes) for own in of_ids]
        for sums, side, own, (of_others, image_of_others) in zip(powers, sides, rows, everyone[::-1], strict=True):
            for part in own.split(_ROWS):
                cosines = side.embeddings[part] @ of_others.T
                image = side.image[part, None]
                counted = (same[image] == same[image_of_others]) & (image != image_of_others)
                cosines = torch.where(counted, cosines, 0.0)
                sums[part] = torch.stack((counted.sum(1).float(), cosines.sum(1), cosines.square().sum(1)), 1)
    return powers
