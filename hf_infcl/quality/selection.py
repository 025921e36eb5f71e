"""Pairs that do not belong together are left out of the windows (``leave_out``)."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..data.store import NO_KEY
from ..loss.pair_scores import pair_scores
from ..processes.collectives import Processes
from ..step.extensions import NO_ROWS, PairSelection
from ..step.grad_cache import Features
from ..step.terms import Context
from ..step.window import Window

_MOST_VISITS = 255

# Measured on 17,168 pairs of drawings with 0, 10, 20 and 50% wrong captions.
FAST = 0.3  # the least weight of a visit in the average that decides
SLOW = 0.1  # and in that of the ledger, which finds more of the wrong pairs, but forgets its mistakes too slowly
BORDER, BORDER_OF_MANY = 0.6, 0.7  # of the mean of the pairs that are trained
MANY = 0.1  # share of the pairs below 0 from which on the second border holds
LEAST_BELOW = 0.01  # share of the pairs below 0 without which nothing is left out
LEAST_MEAN = 2.0  # of the pairs that are trained
LEAST_VISITS = 3
MOST = 0.75  # share of the pairs that is never left out; with half of the captions wrong, less than two thirds are
STAYS = 0.5  # how much of the share below 0 must stay after another visit; right pairs leave it as they are learned
_BETWEEN = 0.5  # visits from one look at it to the next
TURNS = 4  # epochs after which a row of a table has rested once, or was looked at again
RESTED = 0.5, 0.3  # as FAST and SLOW, for a visit after an epoch without training
_ITERATIONS = 12

logger = logging.get_logger(__name__)


def tell_if_too_short(visits: float) -> None:
    """Warns before a training that will see each pair too rarely for ``leave_out`` to leave any out."""
    if 0 < visits < LEAST_VISITS:
        logger.warning(
            f"leave_out will leave nothing out: this training sees each pair {visits:.1f} times, and the rule begins "
            f"after {LEAST_VISITS}. Train longer, or leave it out."
        )


def make_selections(context: Context, steps: int) -> tuple[PairSelection, ...]:
    """The selection that the arguments of a training with so many steps ask for."""
    args, rows = context.args, context.rows
    if args.leave_out is None or rows is None:
        return ()
    tell_if_too_short(steps * args.global_batch_size * (1 - (args.replay_share or 0)) / rows)
    return (WithoutNoisyPairs(rows),)


class WithoutNoisyPairs(PairSelection):
    """Leaves out pairs whose image and captions do not belong together, found by the model that is trained.

    Each pair has a score, see `pair_scores`, which is 0 on average where image and text do not belong together, and a
    moving average of it over its visits. With m, the mean of those averages of the window that are at least 0.6 m, a
    pair is left out while its average is below f m. A pair that is left out is not learned, so its score stays honest,
    and it comes back if the average rises.

    The epochs of a shuffled table skip the rows that are left out, so that global batches are full of pairs that
    are trained. In each epoch a quarter of the rows, in turn, has the other part: those that are left out are looked at
    again, and those that are trained rest. A wrong pair that is trained is learned by heart, so its score says nothing
    then: only visits after an epoch without training count. That takes 5 more bytes for each row.

    It begins in the first window in which m is at least 2, once the pairs have been seen three times on average, and
    1% of all averages are below 0, a share that has not halved with the last visit. Where all pairs belong together
    there are fewer, or they become fewer, and the training is, bit for bit, the one without the selection. f is chosen
    at that moment: 0.6, or 0.7 if a tenth or more are below 0. It stops for good, with a warning, before it leaves out
    more than three quarters of the pairs.

    Never left out are pairs that were seen fewer than three times, old pairs of a replay, pairs that replace bad
    samples, and the best one of those that would leave a process without new pairs. All processes exchange keys and
    scores of the window and decide alike.

    Args:
        rows: of the table.
    """

    name = "leave_out"

    def __init__(self, rows: int) -> None:
        self.averages = PairAverages(rows)
        self.border: float | None = None  # once it has begun
        self.waits_for = ""  # why it has not, as of the last window, or has stopped
        self._stopped = False
        self._look: tuple[float, float, bool] = 0.0, math.inf, False  # visits, share below 0, and whether that stays
        self._epoch, self._skipped_rows = -1, NO_ROWS
        self._missing = 0.0  # the share of the rows that this epoch skips because they are left out
        # The last epoch in which each row was; empty unless epochs pass rows over.
        self._trained = torch.empty(0, dtype=torch.int32)
        self._counts = 0.0, 0.0  # the pairs left out, and all new ones
        self._logged = 0.0, 0.0  # the same at the last log

    @property
    def card(self) -> Mapping[str, str]:
        which = "those that did not seem to belong together"
        left, pairs = self._counts
        if self.waits_for:
            before = f"; before it stopped, {left / pairs:.1%} of those seen" if left else ""
            return {"pairs left out": f"none, because {self.waits_for}{before}"}
        return {"pairs left out": f"{which}, {left / pairs:.1%} of those seen" if pairs else which}

    def select(
        self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None
    ) -> Tensor | None:
        processes, (images, texts) = Processes(), features
        score = pair_scores(images, texts, window.caption_image(), window.pair_ids())
        keys, old = window.pair_keys().to(score.device), window.replayed()
        is_new = torch.ones_like(keys) if old is None else (~old.to(score.device)).long()
        everyone = processes.gather_all(keys.masked_fill(is_new == 0, NO_KEY), score.double(), is_new)
        keys, score, is_new = (numbers.cpu() for numbers in everyone)  # [processes, images of each]
        stays, pairs = self._stays(keys, score), int(is_new.sum())
        left = self._missing * pairs + (1 - self._missing) * int((~stays).sum())  # of a window of all rows
        self._counts = self._counts[0] + left, self._counts[1] + pairs
        return None if bool(stays.all()) else stays[processes.rank]

    def _stays(self, keys: Tensor, score: Tensor) -> Tensor:
        """Which pairs of the window are trained, [processes, images of each]."""
        statistics = self.averages.visit(keys.flatten(), score.flatten(), self._weights(keys.flatten()))
        average, visits = (numbers.view_as(keys) for numbers in statistics)
        if begins := self.border is None and not self._stopped and bool(visits.any()):
            self._begin(mean_of_trained(average[visits > 0], BORDER))
        left = self._left(average, visits)
        if self._stops(at_once=begins or float(left.double().mean()) > MOST):
            left = self._left(average, visits)  # none
        # ---- At least one new pair stays on each process ----
        for none_stays, row, averages in zip((left | (keys == NO_KEY)).all(1), left, average, strict=True):
            if none_stays and bool(row.any()):
                row[averages.masked_fill(~row, -torch.inf).argmax()] = False
        if len(self._trained):
            self._trained[keys[~left & (keys != NO_KEY)]] = self._epoch
        return ~left

    def _left(self, average: Tensor, visits: Tensor) -> Tensor:
        """Which pairs the rule leaves out, bool, by their averages fp64 and visits of this shape."""
        if self.border is None:
            return torch.zeros_like(visits, dtype=torch.bool)
        return (visits >= LEAST_VISITS) & (average < self.border * mean_of_trained(average[visits > 0], self.border))

    def left_out(self) -> Tensor:
        """Whether the rule leaves each pair seen out by its present average, [n] bool, as by `PairAverages.slow`."""
        visits = self.averages.visits
        return self._left(self.averages.fast.double(), visits)[visits > 0]

    def _weights(self, keys: Tensor) -> Tensor | None:
        """The least weights of these visits for `PairAverages.visit`; None for its own."""
        if self.border is None or not len(self._trained):
            return None
        rows = keys.clamp(min=0)
        counts = (self._epoch - self._trained[rows] > 1) | (self.averages.visits[rows] < LEAST_VISITS)
        return torch.tensor(RESTED, dtype=torch.float64)[:, None] * counts

    def skipped_rows(self, epoch: int) -> Tensor:
        visits = self.averages.visits
        if not len(self._trained):
            self._trained = torch.full((len(visits),), epoch, dtype=torch.int32)
        if epoch > self._epoch:  # otherwise the epoch goes on, with the same rows
            left = self._left(self.averages.fast.double(), visits)
            turn = (torch.arange(len(visits)) % TURNS == epoch % TURNS) & (visits > 0)
            self._missing = float((left & ~turn).double().mean())
            self._epoch, self._skipped_rows = epoch, NO_ROWS if self.border is None else left ^ turn
        return self._skipped_rows

    def _begin(self, mean: float) -> None:
        """Begins, if the pairs are known well enough."""
        visits, below = self.averages.mean_visits, self.averages.share_below_zero
        if (passed := visits - self._look[0]) >= _BETWEEN:
            self._look = visits, below, below >= STAYS**passed * self._look[1]
        if visits < LEAST_VISITS:
            self.waits_for = f"each pair was seen {visits:.1f} times, and the rule begins after {LEAST_VISITS}"
        elif mean < LEAST_MEAN:
            self.waits_for = (
                f"pairs that are learned score {mean:.1f} on average, and the rule begins at {LEAST_MEAN:g}"
            )
        elif below < LEAST_BELOW:
            self.waits_for = f"{below:.1%} of the pairs score below 0, and the rule begins at {LEAST_BELOW:.0%}"
        elif not self._look[2]:
            self.waits_for = f"the share of the pairs that score below 0 falls fast, to {below:.1%}: they are learned"
        else:
            self.border, self.waits_for = BORDER if below < MANY else BORDER_OF_MANY, ""

    def _stops(self, at_once: bool) -> bool:
        """Whether it leaves out too many of all pairs; looked at after each half visit, or at once."""
        visits = self.averages.mean_visits
        if self.border is None or not (at_once or visits - self._look[0] >= _BETWEEN):
            return False
        self._look = visits, *self._look[1:]
        if (share := float(self.left_out().double().mean())) > MOST:
            self.border, self._stopped = None, True
            self.waits_for = f"it would leave out {share:.0%} of the pairs"
            if Processes().rank == 0:
                logger.warning(f"The rule of leave_out stops, because {self.waits_for}. All are trained from now on.")
        return self._stopped

    def logs(self) -> dict[str, float]:
        """``left_out``: the share of the new pairs that were left out, since the last log."""
        left, pairs = (now - before for now, before in zip(self._counts, self._logged, strict=True))
        self._logged = self._counts
        return {"left_out": round(left / pairs, 4)} if pairs else {}

    def close(self) -> None:
        if self.waits_for and not self._stopped and Processes().rank == 0:
            logger.warning(f"leave_out has left nothing out: {self.waits_for}.")

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), **self.averages.state_dict()}  # which has tensors by the name "averages"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages.load_state_dict(state)
        vars(self).update({name: copy.deepcopy(state[name]) for name in vars(self).keys() - {"averages"}})


def mean_of_trained(averages: Tensor, border: float) -> float:
    """m, the mean of the averages [n] fp64 that are at least ``border`` times m."""
    least = border * averages.mean()
    for _ in range(_ITERATIONS):
        chosen = averages >= least
        least = border * (averages * chosen).sum() / chosen.sum().clamp(min=1)
    return float(least) / border


class PairAverages:
    """A fast and a slow moving average for each row of a table, and the number of its visits.

    The first visits count alike: the weight of a visit is at least 1 divided by the number of visits. A pair takes 9
    bytes, in the host memory of every process and in checkpoints: a billion rows take 9 GB.
    """

    def __init__(self, rows: int) -> None:
        self._averages = torch.zeros(2, rows)
        self.visits = torch.zeros(rows, dtype=torch.uint8)

    def visit(self, keys: Tensor, values: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Adds a visit of each pair, and returns the fast averages after it, [n] fp64, and the visits, [n] int64.

        Pairs that are equal get the mean of their values as one visit. Those without a key, or whose value is not
        finite, are not kept; their average is NaN and they have no visits.

        Args:
            keys: [n] int64 on the CPU, at least 0, or `NO_KEY`.
            values: [n] fp64 on the CPU.
            least: [2, n] fp64, the least weights of these visits in the two averages, equal for pairs that are equal;
                of a weight of 0 nothing is added. By default `FAST` and `SLOW`.
        """
        kept = (keys != NO_KEY) & values.isfinite()
        pairs, place, repeats = keys[kept].unique(return_inverse=True, return_counts=True)
        value = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, place, values[kept]) / repeats
        visits = (self.visits[pairs].long() + 1).clamp(max=_MOST_VISITS)
        earlier = self._averages[:, pairs].double()
        weights = torch.tensor((FAST, SLOW), dtype=torch.float64)[:, None].repeat(1, len(pairs))
        if least is not None:
            weights[:, place] = least[:, kept]
        weights = torch.where(weights > 0, weights.clamp(min=1 / visits.double()), 0.0)
        averages = (earlier + weights * (value - earlier)).float()
        self._averages[:, pairs], self.visits[pairs] = averages, visits.to(torch.uint8)
        results = torch.full(keys.shape, math.nan, dtype=torch.float64), torch.zeros(keys.shape, dtype=torch.int64)
        results[0][kept], results[1][kept] = averages[0].double()[place], visits[place]
        return results

    @property
    def mean_visits(self) -> float:
        """The visits of a pair that was seen, on average."""
        return int(self.visits.sum(dtype=torch.int64)) / max(1, int((self.visits > 0).sum()))

    @property
    def share_below_zero(self) -> float:
        """The share of the pairs seen whose fast average is below 0."""
        return int((self.fast < 0).sum()) / max(1, int((self.visits > 0).sum()))

    @property
    def fast(self) -> Tensor:
        """The fast averages of all rows, [rows] fp32."""
        return self._averages[0]

    def slow(self) -> tuple[Tensor, Tensor]:
        """The rows [n] int64 of all pairs seen, in ascending order, and their slow averages [n] fp32."""
        rows = self.visits.nonzero().flatten()
        return rows, self._averages[1][rows]

    def state_dict(self) -> dict[str, Any]:
        """The averages [2, rows] and the visits [rows]."""
        return {"averages": self._averages, "visits": self.visits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages, self.visits = state["averages"].clone(), state["visits"].clone()
