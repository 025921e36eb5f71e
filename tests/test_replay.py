"""Replay: exact shares of old pairs in every global batch, from tables and streams, in one loss or in two."""

import itertools
import json
import pickle
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers import models
from helpers.demo import copy_rows, infcl
from helpers.parity import FLOOR, MODELS, TOLERANCE, Gradients
from helpers.processors import clip_processor
from helpers.shards import number_of, numbered, png, write_tars
from helpers.streams import PAIRS, collate, stream_of
from helpers.trainers import StopAt, TrainedRows, arguments, parameters, trained, trainer_for
from torch.utils.data import DataLoader

from hf_infcl import ContrastiveCollator, ImageTextDataset, InfCLTrainer
from hf_infcl.cli.datasets import replay_set, shared_images
from hf_infcl.data.replay import Replayed
from hf_infcl.data.streams import Share
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.options.commands import ColumnOptions, DataOptions

NEW, OLD = range(60), range(500, 540)  # the numbers of the pairs, which their images hold
KINDS = [(new, old) for new in ("table", "stream") for old in ("table", "stream")]


def table(numbers: Any, **options: Any) -> ImageTextDataset:
    """Pairs with five captions each, one of which is drawn in each pass."""
    return numbered(numbers, [[f"caption {number} {letter}" for letter in "abcde"] for number in numbers], **options)


def pairs_of(kind: str, numbers: Any, folder: Path) -> Any:
    if kind == "table":
        return table(numbers)
    write_tars(folder, [len(numbers) // 10] * 10, first=numbers[0])
    return stream_of(folder)


def replayed(new: Any, old: Any, folder: Any = "unused", **options: Any) -> Replayed:
    """Global batches of 16 pairs, of which 5 are old."""
    options = {"gradient_accumulation_steps": 4, "replay_share": 0.3, **options}
    return Replayed(new, old, arguments(folder, **options))


def numbers_and_captions(items: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(number_of(item), item["caption"][0]) for item in items]


def read(
    pairs: Replayed, windows: int, processes: int = 1, workers: int = 0, position: int = 0, states: Any = ()
) -> Any:
    """The (number, caption) of the pairs of each global batch, and the states of all processes after them."""
    steps, found, after = 4 // processes, [[] for _ in range(windows)], []
    for rank in range(processes):
        where = {"rank": rank, "world_size": processes, "num_workers": workers}
        batches = pairs.batches(Share(4, 4), numbers_and_captions, **where, position=position, states=states)
        loader = iter(DataLoader(batches, batch_size=None, num_workers=workers))
        for window in found:
            for _ in range(steps):
                batch, tag = next(loader)
                assert len(batch) == 4
                window += batch
                batches.consume(tag)
        after.append(json.loads(json.dumps(batches.state())))
    return found, after


# ---- Which pairs ----


@pytest.mark.parametrize("old", [1, 5, 8, 15])
@pytest.mark.parametrize("micro_batches", [1, 4, 12])
def test_shares_are_exact_balanced_and_drawn_anew(old, micro_batches):
    if old > 4 * micro_batches:
        return
    share, rest = (Share(4, micro_batches, old, is_old=is_old) for is_old in (True, False))
    extra = Counter()
    for window in range(300):
        numbers = range(window * micro_batches, (window + 1) * micro_batches)
        sizes = [len(share.pairs(number)) for number in numbers]
        assert sum(sizes) == old == share.of_batch
        assert [4 - size for size in sizes] == [len(rest.pairs(number)) for number in numbers]
        assert [share.pairs(number).start for number in numbers] == np.cumsum([0, *sizes[:-1]]).tolist()
        assert max(sizes) - min(sizes) <= 1
        for processes in (2, 3, 4):
            if micro_batches % processes == 0:
                of_each = [sum(sizes[rank::processes]) for rank in range(processes)]
                assert max(of_each) - min(of_each) <= (old % processes > 0), "equal for a whole number of pairs each"
        extra.update(place for place, size in enumerate(sizes) if size > min(sizes))
    if old % micro_batches:
        assert min(extra.values()) > 0.4 * max(extra.values()), "no lane of a stream is left out"


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_global_batches_are_those_of_any_split_and_after_a_resume(tmp_path, kinds):
    """Two processes, then one with two workers: the same pairs and captions as without an interruption."""
    new, old = pairs_of(kinds[0], NEW, tmp_path / "new"), pairs_of(kinds[1], OLD, tmp_path / "old")
    whole, _ = read(replayed(new, old), 20)
    first, states = read(replayed(new, old), 9, processes=2)
    rest, _ = read(replayed(new, old), 11, workers=2, position=9, states=states)
    assert [sorted(window) for window in first + rest] == [sorted(window) for window in whole]
    of_old = [[number for number, _ in window if number in OLD] for window in whole]
    assert [len(window) for window in of_old] == [5] * 20
    counts = Counter(number for window in of_old for number in window)
    assert counts.keys() == set(OLD), "every old pair"
    if kinds[1] == "table":  # eight global batches are a pass
        passes = [list(itertools.chain(*of_old[first : first + 8])) for first in (0, 8)]
        assert all(sorted(one) == list(OLD) for one in passes)
        assert passes[0] != passes[1], "shuffled anew"
        captions = {(number, caption) for window in whole for number, caption in window if number in OLD}
        assert len(captions) > 1.5 * len(OLD), "captions are drawn anew"
    if kinds[0] == "table":  # 60 pairs, which global batches of eleven do not divide
        of_new = [number for window in whole for number, _ in window if number in NEW]
        assert all(sorted(of_new[first : first + 60]) == list(NEW) for first in (0, 60, 120))


def test_sets_of_one_length_do_not_always_meet_in_the_same_pairs():
    windows, _ = read(replayed(table(range(40)), table(range(500, 540)), replay_share=0.5), 10)
    numbers = [{number for number, _ in window} for window in windows]
    partners = sum(number + 500 in window for window in numbers for number in window if number < 500)
    assert partners < 40, "with the same order, all of 80"


def test_every_pair_has_an_id_and_a_count_of_skipped_ones_if_any_has(tmp_path):
    write_tars(tmp_path, [4] * 10, first=500)
    pairs = replayed(table(NEW), stream_of(tmp_path, on_bad_sample="skip"))
    collator = ContrastiveCollator(clip_processor())
    for processes in (1, 2):
        of_ranks = [pairs.batches(Share(4, 4), collator, rank=rank, world_size=processes) for rank in range(processes)]
        of_workers = pickle.loads(pickle.dumps(of_ranks))  # as workers get them that are not forked
        batches = [batch for of_rank in of_workers for batch, _ in itertools.islice(of_rank, 4 // processes)]
        ids = torch.cat([batch["pair_ids"] for batch in batches])
        assert len(ids.unique()) == 16, "each its own"
        assert all((batch["skipped"] == 0).all() for batch in batches)
        assert sum(4 - batch["new_images"] for batch in batches) == 5


# ---- The loss ----

WHOLE_NEW, WHOLE_OLD = models.Pairs(16), models.Pairs(8, seed=1)  # a global batch of all pairs


def rank_gradients(rank: int, world_size: int, cells: list[tuple]) -> list[Any]:
    found = []
    for objective, steps in cells:
        with tempfile.TemporaryDirectory() as folder:
            options = {"replay_share": 1 / 3, "max_steps": 1, "max_grad_norm": 0.0}
            size = {"per_device_train_batch_size": 24 // world_size // steps, "gradient_accumulation_steps": steps}
            gradients = Gradients()
            parts = {"replay_dataset": WHOLE_OLD, "callbacks": [gradients]}
            trainer = trained(trainer_for(folder, MODELS[objective](), WHOLE_NEW, **parts, **options, **size))
        found.append((trainer.state.log_history[0], gradients.seen))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_equal_plain_autograd(ranks, world_size):
    """All pairs in one loss, on one or two processes with and without accumulation."""
    cells = [(o, k) for o in MODELS for k in (1, 3)]
    by_rank = ranks.run(rank_gradients, world_size, cells, always_ring=True)
    for cell, *results in zip(cells, *by_rank, strict=True):
        objective, _ = cell
        model = MODELS[objective]().train()
        encoder = DualEncoder(model)
        encoder.initialise_sigmoid()
        parts = [encoder.embed(model, data.batch()) for data in (WHOLE_NEW, WHOLE_OLD)]
        scalars = encoder.scale_and_bias()
        images, texts = (torch.cat(column) for column in zip(*parts, strict=True))
        loss = reference.contrastive_loss(images, texts, *scalars, objective=objective)
        loss.sum().backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = torch.stack([g.norm() for g in expected.values()]).norm()
        cosines = [torch.linalg.vecdot(*part).mean().item() for part in parts]
        for logs, gradients in results:
            assert logs["loss"] == pytest.approx(loss.item(), rel=TOLERANCE), cell
            assert [logs[f"{part}_positive_cosine"] for part in ("new", "replay")] == pytest.approx(cosines, rel=1e-4)
            assert logs["replay_samples"] == 8
            for name, gradient in expected.items():
                error = (gradients[name].reshape(gradient.shape) - gradient).norm()
                assert error <= TOLERANCE * gradient.norm() + FLOOR * whole, (cell, name)


# ---- A training ----


def train(folder: Any, new: Any, old: Any, resume: Any = None, **options: Any) -> Any:
    """Trains with dropout; returns the trainer, and the rows that this process trained in each step."""
    rows, callbacks = TrainedRows(), options.pop("callbacks", [])
    given = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, "replay_share": 0.4}
    given |= {"replay_dataset": old, "data_collator": collate, "callbacks": [rows, *callbacks]}
    trainer = trainer_for(folder, models.clip(dropout=0.3, seed=5 if resume else 0), new, **{**given, **options})
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer, rows.steps[:-1]


def rank_resumes(rank: int, world_size: int, folder: str, kinds: tuple[str, str], workers: int) -> list[list[tuple]]:
    sets = [
        pairs_of(kind, numbers, Path(folder, f"{rank} {numbers[0]}"))
        for kind, numbers in zip(kinds, (NEW, OLD), strict=True)
    ]
    # The new pairs of a table are 12 or 6 global batches, the old ones 13 or 6.
    epochs, last = (1.5, 18) if world_size == 1 else (2, 12)
    options = {"dataloader_num_workers": workers, "max_steps": -1, "num_train_epochs": epochs}
    if kinds[0] == "stream":
        options |= {"max_steps": last}
    whole, steps = train(f"{folder}/whole", *sets, **options, save_strategy="no")
    assert whole.state.global_step == last
    train(f"{folder}/parts", *sets, **options, save_steps=7, callbacks=[StopAt(7)])
    torch.manual_seed(rank + 7)
    resumed, rest = train(f"{folder}/parts", *sets, f"{folder}/parts/checkpoint-7", **options)
    assert rest == steps[7:]
    assert torch.equal(parameters(whole), parameters(resumed))
    assert resumed.state.epoch == whole.state.epoch
    for entry, other in zip(whole.state.log_history, resumed.state.log_history, strict=True):
        assert entry.get("replay_samples") == other.get("replay_samples")
    return steps


@pytest.mark.parametrize("kinds", [("table", "stream"), ("stream", "table")], ids="-".join)
def test_resume_is_bit_identical(ranks, tmp_path, kinds):
    """With dropout, in the middle of an epoch; the old pairs have been read once and more."""
    by_rank = ranks.run(rank_resumes, 2, str(tmp_path), kinds, 0, timeout=300)
    old = set(map(tuple, PAIRS.tokens[list(OLD)].tolist()))
    for step in zip(*by_rank, strict=True):
        rows = list(itertools.chain(*step))
        assert (len(rows), sum(row in old for row in rows)) == (16, 6)


def test_resume_of_tables_is_bit_identical_with_workers(tmp_path):
    rank_resumes(0, 1, str(tmp_path), ("table", "table"), 2)


def rank_stops(rank: int, world_size: int, folder: str) -> list[list[tuple]]:
    return train(folder, table(NEW), stream_of(f"{folder}/shards"), callbacks=[StopAt(3)])[1]


def test_one_process_goes_on_where_two_stopped(ranks, tmp_path):
    write_tars(tmp_path / "shards", [4] * 10, first=OLD[0])
    by_rank = ranks.run(rank_stops, 2, str(tmp_path))
    first = [list(itertools.chain(*step)) for step in zip(*by_rank, strict=True)]
    sets, options = (table(NEW), stream_of(tmp_path / "shards")), {"gradient_accumulation_steps": 4}
    _, rest = train(tmp_path, *sets, tmp_path / "checkpoint-3", **options)
    _, whole = train(tmp_path / "whole", *sets, **options)
    assert [sorted(step) for step in first + rest] == [sorted(step) for step in whole]


def test_a_checkpoint_of_another_replay_is_refused(tmp_path):
    train(tmp_path, table(NEW), table(OLD), max_steps=3)
    checkpoint = tmp_path / "checkpoint-3"
    for other, words in (
        ({"old": table(OLD[1:])}, "data was .*, 40 rows, shuffled, seed 42' and is .*, 39 rows"),
        ({"replay_share": 0.2}, "replay_share was 0.4 and is 0.2"),
        ({"old": None, "replay_share": None}, "data was 'ImageTextDataset, 60 rows, .*; 3 old pairs in a global batch"),
    ):
        with pytest.raises(ValueError, match=words):
            train(tmp_path, table(NEW), **{"old": table(OLD), **other, "resume": checkpoint})


@pytest.mark.parametrize(
    ("old", "options", "words"),
    [
        (table(range(500, 504)), {}, r"The replay set has 4 pairs, fewer than its 5 of each global batch of 16 pairs"),
        (table(OLD), {"replay_share": 0.02}, r"replay_share=0\.02 of a global batch of 16 pairs is 0 old pairs after"),
        (table(OLD), {"replay_share": 0.99}, "is 16 old pairs after rounding"),
        (table(OLD), {"replay_share": 1.0}, "replay_share must be a number of more than 0 and less than 1, got 1.0"),
        (models.Stream(40), {}, "replay_dataset must be a dataset with a length or an ImageTextStream, got a Stream"),
        (None, {}, "replay_share had no effect without old pairs. Pass a replay_dataset"),
    ],
)
def test_what_cannot_be_mixed_is_refused(tmp_path, old, options, words):
    with pytest.raises(ValueError, match=words):
        train(tmp_path, table(NEW), old, **{"gradient_accumulation_steps": 4, "replay_share": 0.3, **options})


def test_new_pairs_that_cannot_be_mixed_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The training set has 10 pairs, fewer than its 11 of each global batch"):
        replayed(table(range(10)), table(OLD))
    args = arguments(tmp_path, replay_share=0.4)
    with pytest.raises(ValueError, match="mixed into a train_dataset, which is missing"):
        InfCLTrainer(models.clip(), args, collate, replay_dataset=table(OLD))


# ---- The command ----


def test_the_command_replays_old_pairs_and_tells_of_a_guard_that_is_trained_on(small, demo, tmp_path, capsys):
    copy_rows(demo / "digits/train", tmp_path / "digits/train", 30, first=20)
    old = ["--replay_dataset", tmp_path / "digits", "--replay_share", 0.25]
    infcl(*small, *old, "--guard_dataset", f"{tmp_path / 'pairs'}?split=train", f"{tmp_path / 'digits'}?split=train")
    printed = capsys.readouterr().out
    assert "2 of these pairs are old (0.25, after rounding)." in printed
    assert re.search(r"Warning: 26 of 26 images of guard1_pairs, .*, are also trained on", printed)
    assert re.search(r"Warning: \d+ of \S+ images of guard2_digits", printed)
    card = (tmp_path / "out/README.md").read_text()
    replay = "2 replayed pairs in each global batch (25.0%) of `digits` (split train, no licence stated)"
    assert f"| replay | {replay}; negatives of the new pairs, and these of them |" in card
    assert "26 images with captions" in card
    assert "| length | 9 optimizer steps, 72 pairs seen, 2.1 epochs |" in card


def test_old_sets_may_lack_columns_and_be_streams(demo, tmp_path):
    """A table of other columns beside a folder of images, without the ids and the wrong captions of the new pairs."""
    (tmp_path / "table").mkdir()
    paths = sorted((demo / "digits/train").glob("*.png"))[:5]
    lines = ["filepath,title", *(f"{path},a digit" for path in paths)]
    (tmp_path / "table/train.csv").write_text("\n".join(lines))
    write_tars(tmp_path / "shards", [4] * 2)
    columns = ColumnOptions(pair_id_column="id")
    args = arguments(tmp_path, data_seed=3)

    def opened(*names: Any, **options: Any) -> Any:
        names = [str(name) for name in names]
        return replay_set(DataOptions(dataset=["new"], replay_dataset=names, **options), columns, args)

    more = {"negative_caption_column": "wrong", "captions_per_image": 2}
    tables = opened(tmp_path / "table", demo / "digits", **more)
    assert len(tables) == 5 + len(list((demo / "digits/train").glob("*.png")))
    assert tables[0]["caption"] == ["a digit"]
    assert not {"pair_id", "negative_captions"} & tables[0].keys()
    columns = ColumnOptions()
    stream = opened(f"{tmp_path / 'shards'}?streaming=true&caption_column=txt")
    assert (len(stream.shards), stream.seed) == (2, 3)
    with pytest.raises(ValueError, match=rf"--replay_dataset {tmp_path / 'shards'}: .*\?caption_column="):
        opened(f"{tmp_path / 'shards'}?caption_column=text")


def test_shared_images_are_counted_by_their_bytes(tmp_path):
    """In the table or in files beside it; not those that differ in one pixel and so not in their size."""
    paths = [tmp_path / f"{number}.png" for number in range(3, 8)]
    for number, path in enumerate(paths, 3):
        path.write_bytes(png(number))
    rows = {"image": [str(path) for path in [*paths, tmp_path / "none.png"]], "caption": ["c"] * 6}
    files = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    guard = ImageTextDataset(files, all_captions=True)
    assert {len(png(number)) for number in range(20)} == {len(png(0))}
    assert shared_images(table(range(5)), guard) == (2, 5)
    assert shared_images(guard, table(range(5))) == (2, 5)
    assert shared_images(table([0, 1, 9]), guard) == (0, 5)
