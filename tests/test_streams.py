"""Streams: every sample once per pass, the same order for any number of readers, and exact resume from a cursor."""

import functools
import io
import itertools
import json
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import tarfile
import types
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from helpers.servers import serving
from helpers.shards import number_of, pair, png, write_parquet, write_tar, write_tars
from torch.utils.data import DataLoader

from hf_infcl.data import ImageTextStream, streams
from hf_infcl.data.pairs import as_pair_id, caption_pair_id
from hf_infcl.shards import opening, readers
from hf_infcl.shards.lanes import Shard
from hf_infcl.shards.layout import DamagedShardError
from hf_infcl.shards.opening import find_shards, shard_names
from hf_infcl.shards.readers import Columns, TarReader


def numbers(items):
    return [number_of(item) for item in items]


class Run:
    """All processes and workers of a training on a stream, in this process. Gives micro-batches of numbers in order."""

    def __init__(self, monkeypatch, make, batch_size=2, world_size=1, workers=1, states=(), steps=1):
        self._patch, self._workers = monkeypatch, workers
        self._batches = [
            make().batches(
                batch_size,
                numbers,
                rank=rank,
                world_size=world_size,
                num_workers=workers,
                accumulation_steps=steps,
                states=states,
            )
            for rank in range(world_size)
        ]
        self._turn = itertools.cycle([(rank, worker) for worker in range(workers) for rank in range(world_size)])
        self._readers = {}

    def take(self, count):
        """Consumes the next micro-batches. The workers read ahead some more, which are never consumed."""
        if not self._readers:
            for rank, batches in enumerate(self._batches):
                for worker in range(self._workers):
                    self._readers[rank, worker] = self._read(batches, worker), []
        return [self._next(*next(self._turn)) for _ in range(count)]

    def _read(self, batches, worker):
        info = types.SimpleNamespace(id=worker, num_workers=self._workers)
        with self._patch.context() as patch:
            patch.setattr(streams, "get_worker_info", lambda: info)
            reader = iter(batches)
            return itertools.chain([next(reader)], reader)

    def _next(self, rank, worker):
        reader, ahead = self._readers[rank, worker]
        ahead.extend(itertools.islice(reader, 4 - len(ahead)))
        batch, tag = ahead.pop(0)
        self._batches[rank].consume(json.loads(json.dumps(tag)))
        return batch

    def states(self):
        """The states as in a checkpoint, in no particular order."""
        return json.loads(json.dumps([batches.state() for batches in reversed(self._batches)]))


@pytest.fixture
def folder(tmp_path):
    """13 tar files with 0, 5, 10, ... 60 samples."""
    write_tars(tmp_path / "shards", [5 * shard for shard in range(13)])
    return tmp_path / "shards"


@pytest.fixture
def make(folder):
    """A stream with lanes for 4 readers. A lane's buffer holds a third of what the lane reads in a pass."""
    return lambda source=folder, **options: ImageTextStream(
        str(source), **{"lanes": 4, "shuffle_buffer": 30, "open_shards": 2, "seed": 3, **options}
    )


# ---- Order ----


def test_every_sample_comes_once_per_pass_and_no_two_readers_share_one(make, monkeypatch):
    for passes in range(3):
        dealt = [read_in_pass(make, monkeypatch, lane, passes) for lane in range(4)]
        assert sorted(itertools.chain(*dealt)) == list(range(390))
        assert dealt != [sorted(part) for part in dealt]


def read_in_pass(make, monkeypatch, lane, passes):
    """The samples of one lane in one pass."""
    batches = make().batches(1, numbers, num_workers=4)
    monkeypatch.setattr(streams, "get_worker_info", lambda: types.SimpleNamespace(id=lane, num_workers=4))
    found = []
    for (number,), tag in batches:
        at = tag["cursor"]["sources"][0]
        ended = at["pass"] - (at["taken"] == at["buffer"] == 0)  # the pass of the sample before the cursor
        if ended > passes:
            return found
        if ended == passes:
            found.append(number)
    raise AssertionError


def test_passes_and_seeds_have_their_own_order(make, monkeypatch):
    one, again, other = (Run(monkeypatch, lambda seed=seed: make(seed=seed)).take(100) for seed in (3, 3, 4))
    assert one == again
    assert one != other
    first, second = (read_in_pass(make, monkeypatch, 0, passes) for passes in (0, 1))
    assert first != second


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_the_sequence_does_not_depend_on_processes_and_workers(make, monkeypatch, world_size, workers):
    alone = Run(monkeypatch, make).take(200)
    assert Run(monkeypatch, make, world_size=world_size, workers=workers).take(200) == alone


def test_data_loader_workers_give_the_same_sequence(make, monkeypatch):
    expected = Run(monkeypatch, make, workers=2).take(60)
    monkeypatch.undo()
    batches = make().batches(2, numbers, num_workers=2)
    loader = DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [batch for batch, _ in itertools.islice(loader, 60)] == expected
    with pytest.raises(ValueError, match="has 1 worker, but the batches were made for 2"):
        next(iter(batches))
    items = DataLoader(make(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert len({item["pair_id"] for item in itertools.islice(items, 100)}) > 90


def test_neighbours_in_a_shard_end_up_far_apart(tmp_path, monkeypatch):
    """Two samples that are adjacent in a shard are a third of all buffers apart in the sequence."""
    write_tars(tmp_path, [100] * 16)
    options = {"lanes": 2, "shuffle_buffer": 200, "open_shards": 4, "seed": 1}
    run = Run(monkeypatch, lambda: ImageTextStream(str(tmp_path), **options), batch_size=1, workers=2)
    place = {}
    for index, (number,) in enumerate(run.take(1600)):
        place.setdefault(number, index)
    apart = [abs(place[n] - place[n + 1]) for n in range(1599) if n in place and n + 1 in place and n % 100 != 99]
    assert len(apart) > 1400
    assert 0.8 < statistics.mean(apart) / (2 * 200 / 3) < 1.3
    assert statistics.quantiles(apart, n=10)[0] > 0.05 * 2 * 200


def rank_iterates(rank, world_size, folder):
    stream = ImageTextStream(folder, shuffle_buffer=10)
    with pytest.raises(ValueError, match=r"Each of the 2 processes would iterate over the same items.*batches\("):
        next(iter(DataLoader(stream, batch_size=None)))
    batch, _tag = next(iter(stream.batches(4, rank=rank, world_size=world_size)))
    return pickle.dumps(stream), [number_of(item) for item in batch]


def test_processes_do_not_iterate_over_the_same_items(ranks, tmp_path):
    write_tars(tmp_path / "shards", [20] * 4)
    (stream, first), (_, second) = ranks.run(rank_iterates, 2, str(tmp_path / "shards"))
    assert not set(first) & set(second)
    with pytest.raises(ValueError, match="Each of the 2 processes"):  # in a worker, which belongs to no group
        next(iter(pickle.loads(stream)))


# ---- Resume ----


def test_resume_is_exact_again_and_again_on_any_number_of_readers(make, monkeypatch):
    """More than two passes, interrupted at random, with 2×2, 1×4, 4×1 and 1×1 processes × workers."""
    whole = Run(monkeypatch, make).take(600)
    draw, got, states = random.Random(0), [], ()
    readers = itertools.cycle([(2, 2), (1, 4), (4, 1), (1, 1), (2, 1), (1, 2)])
    while len(got) < 600:
        world_size, workers = next(readers)
        run = Run(monkeypatch, make, world_size=world_size, workers=workers, states=states)
        got += run.take(4 * draw.randrange(1, 25))
        states = run.states()
    assert got == whole[:600] + got[600:]
    assert len(states) in (1, 2, 4)


def test_a_resume_reads_one_buffer_wherever_it_is(tmp_path, monkeypatch):
    """This holds after any number of steps: the cursor contains the position to seek and the number of passes."""
    write_tars(tmp_path, [500] * 4)
    make = lambda: ImageTextStream(str(tmp_path), shuffle_buffer=100, open_shards=2)  # noqa: E731
    run = Run(monkeypatch, make)
    run.take(300)
    (state,) = run.states()
    state["consumed"] = 200_000 * 4
    state["lanes"]["0"]["drawn"] = 2 * state["consumed"]
    state["lanes"]["0"]["sources"][0]["pass"] = 800
    read = []
    monkeypatch.setattr(TarReader, "samples", counted(TarReader.samples, read))
    Run(monkeypatch, make, states=[state]).take(1)
    assert 100 <= len(read) < 130


def counted(samples, read):
    def wrapper(self, *args):
        for sample in samples(self, *args):
            read.append(sample)
            yield sample

    return wrapper


def test_a_moved_folder_goes_on_and_other_data_does_not(make, folder, monkeypatch, tmp_path):
    run = Run(monkeypatch, make)
    run.take(7)
    states, rest = run.states(), run.take(20)
    folder.rename(tmp_path / "elsewhere")
    moved = functools.partial(make, tmp_path / "elsewhere")
    assert Run(monkeypatch, moved, states=states).take(20) == rest
    for options, words in (
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"shuffle_buffer": 31}, "shuffle_buffer was 30 and is 31"),
        ({"lanes": 8}, "lanes was 4 and is 8"),
    ):
        with pytest.raises(ValueError, match=f"because its order has changed: {words}"):
            moved(**options).batches(2, states=states)
    with pytest.raises(ValueError, match="batch_size was 2 and is 3"):
        moved().batches(3, states=states)
    (tmp_path / "elsewhere" / "00003.tar").unlink()
    with pytest.raises(ValueError, match=r"sources was .*12"):
        moved().batches(2, states=states)


def test_numbers_of_readers_that_do_not_fit_are_refused_with_those_that_do(make, monkeypatch):
    with pytest.raises(ValueError, match=r"4 lanes .* 3 processes with 1 .* Use one of \[1, 2, 4\] processes"):
        make().batches(1, world_size=3)
    with pytest.raises(ValueError, match=r"With 2 processes set dataloader_num_workers to one of \[1, 2\]\."):
        make().batches(1, world_size=2, num_workers=4)
    run = Run(monkeypatch, make, world_size=2)
    run.take(2)
    with pytest.raises(ValueError, match="2 micro-batches were consumed at the checkpoint, which 4 processes"):
        make().batches(2, world_size=4, states=run.states())
    with pytest.raises(ValueError, match=r"not those of all processes of one checkpoint.*\[\(1, 2, 2\)\]"):
        make().batches(2, states=run.states()[:1])


def test_the_number_of_lanes_is_that_of_the_readers_at_the_start(make, monkeypatch):
    run = Run(monkeypatch, lambda: make(lanes=None), world_size=2, workers=2)
    expected = run.take(8)
    assert Run(monkeypatch, make).take(8) == expected
    rest = Run(monkeypatch, lambda: make(lanes=None), states=run.states()).take(8)
    assert rest == run.take(8)


def test_batches_are_consumed_in_their_order(make):
    batches = make().batches(2)
    first, second = itertools.islice(iter(batches), 2)
    with pytest.raises(ValueError, match="Micro-batch 0 of the stream must be consumed next, got 1"):
        batches.consume(second[1])
    batches.consume(first[1])
    batches.consume(second[1])
    assert batches.counts() == {"samples": 4, "skipped": 0, "shards": batches.counts()["shards"]}
    whole = make(lanes=1).batches(390)
    whole.consume(next(iter(whole))[1])
    assert whole.counts() == {"samples": 390, "skipped": 0, "shards": 13}, "one pass"


# ---- Fewer shards than readers ----


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_fewer_shards_than_readers_are_split_evenly(tmp_path, monkeypatch, kind, caplog):
    if kind == "tar":
        write_tars(tmp_path, [100, 99, 101])
    else:
        for shard in range(3):
            write_parquet(tmp_path / f"{shard}.parquet", range(100 * shard, 100 * shard + 100))
    make = lambda: ImageTextStream(str(tmp_path), shuffle_buffer=16)  # noqa: E731
    run = Run(monkeypatch, make, batch_size=1, world_size=2, workers=2)
    assert "3 shards are fewer than the 4 lanes" in caplog.text
    first = run.take(40)
    states, rest = run.states(), run.take(252)
    assert sorted(itertools.chain(*first, *rest)) == sorted({*itertools.chain(*first, *rest)})  # 4 × 73 of 300 samples
    monkeypatch.setattr(Shard, "borders", None)  # the checkpoint contains the parts
    assert Run(monkeypatch, make, batch_size=1, world_size=2, workers=2, states=states).take(252) == rest


def test_a_shard_with_fewer_samples_than_readers_is_named(tmp_path):
    write_tars(tmp_path, [3])
    with pytest.raises(ValueError, match=r"'.*00000.tar' has 3 samples and cannot be shared among 4 readers"):
        ImageTextStream(str(tmp_path)).batches(1, num_workers=4)


# ---- Mixtures ----


def test_a_mixture_has_the_share_of_its_weights_and_resumes(tmp_path, monkeypatch):
    write_tars(tmp_path / "a", [50] * 4)
    write_parquet(tmp_path / "b.parquet", range(1000, 1040))
    sources = [str(tmp_path / "a"), str(tmp_path / "b.parquet")]
    make = lambda: ImageTextStream(sources, weights=[7, 3], shuffle_buffer=20, lanes=2)  # noqa: E731
    whole = Run(monkeypatch, make).take(500)
    from_b = [number for number in itertools.chain(*whole) if number >= 1000]
    assert 0.27 < len(from_b) / 1000 < 0.33
    assert set(Counter(from_b).values()) <= {6, 7, 8, 9}  # about 300 draws, one pass after another
    run = Run(monkeypatch, make)
    start = run.take(222)
    assert start + Run(monkeypatch, make, workers=2, states=run.states()).take(278) == whole


def test_without_weights_sources_are_one_set(tmp_path, monkeypatch):
    write_tars(tmp_path / "a", [6, 4])
    write_parquet(tmp_path / "b.parquet", range(10, 14))
    sources = [str(tmp_path / "a"), str(tmp_path / "b.parquet")]
    run = Run(monkeypatch, lambda: ImageTextStream(sources, shuffle_buffer=4), batch_size=7)
    assert sorted(itertools.chain(*run.take(2))) == list(range(14))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0], "There are 1 weights for 2 sources"),
        ([1.0, 0.0], "must be a positive number, got 0.0"),
        ([1.0, float("nan")], "must be a positive number, got nan"),
        ([1.0, -2.0], "must be a positive number, got -2.0"),
    ],
)
def test_weights_that_do_not_fit(folder, weights, words):
    with pytest.raises(ValueError, match=words):
        ImageTextStream([str(folder), str(folder)], weights=weights)


# ---- Items ----


def one_pass(stream, batch_size=1):
    """The items of one pass of a stream with one lane."""
    for items, tag in stream.batches(batch_size):
        yield from items
        if tag["cursor"]["sources"][0]["pass"]:
            return


def test_items_of_tar_and_parquet_files(tmp_path):
    write_tar(tmp_path / "a" / "0.tar", pair(7, caption=["one", " ", "two"], url="x", uid=5))
    write_parquet(tmp_path / "b.parquet", [7], caption=[["one", "", "two"]], url=["x"], uid=[5])
    for source in (tmp_path / "a", tmp_path / "b.parquet"):
        drawn = set()
        for seed in range(20):
            (item,) = one_pass(ImageTextStream(str(source), seed=seed, pair_id_column="uid"))
            assert (number_of(item), item["pair_id"], item["image"].shape) == (7, 5, (4, 4, 3))
            assert "skipped" not in item
            drawn.add(*item["caption"])
        assert drawn == {"one", "two"}
        streams = (ImageTextStream(str(source), pair_id_column=column) for column in ("url", "caption"))
        by_url, by_caption = (next(one_pass(stream)) for stream in streams)
        assert by_url["pair_id"] not in (5, by_caption["pair_id"])
        assert by_caption["pair_id"] == caption_pair_id(by_caption["caption"][0])


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_samples_of_several_streams_have_ids_of_their_own_and_a_sample_has_one_everywhere(tmp_path, kind):
    """Shards and samples of the two folders have the same names, and the captions are equal."""
    for part in range(2):
        images = [png(4 * part + n) for n in range(4)]
        if kind == "tar":
            files = [[(f"{n}.png", image), (f"{n}.txt", b"text")] for n, image in enumerate(images)]
            write_tar(tmp_path / f"{part}" / "0.tar", list(itertools.chain(*files)))
        else:
            write_parquet(tmp_path / f"{part}" / "0.parquet", range(4), image=images, caption=["text"] * 4)
    one, two = (ImageTextStream(f"{tmp_path}/{part}/0.{kind}") for part in range(2))
    ids = {number_of(item): item["pair_id"] for item in itertools.chain(one_pass(one), one_pass(two))}
    assert len(set(ids.values())) == 8
    source = f"{tmp_path}/0/0.{kind}"
    for stream in (
        ImageTextStream([f"{tmp_path}/{{0,1}}/*.{kind}"]),
        ImageTextStream([source, source], weights=[1, 1]),
    ):
        assert all(item["pair_id"] == ids[number_of(item)] for item in itertools.islice(stream, 16))


def test_several_captions_and_negative_ones(tmp_path):
    members = [*pair(7, caption=["one", "two", "three"], wrong="other"), *pair(8, caption=["one"])]
    write_tar(tmp_path / "a" / "0.tar", members)
    lists = {"caption": [["one", "two", "three"], ["one"]], "wrong": [["other"], None]}
    write_parquet(tmp_path / "b.parquet", [7, 8], **lists)
    for source in (tmp_path / "a", tmp_path / "b.parquet"):
        drawn = set()
        for seed in range(20):
            stream = ImageTextStream(str(source), seed=seed, captions_per_image=2, negative_caption_column="wrong")
            first, second = sorted(one_pass(stream), key=number_of)
            assert (second["caption"], second["negative_captions"]) == (["one"], [])
            assert first["negative_captions"] == ["other"]
            assert len(set(first["caption"])) == 2
            drawn.update(first["caption"])
        assert drawn == {"one", "two", "three"}


def test_captions_in_text_files_and_images_by_name(tmp_path):
    files = [("x/1.jpg", png(1)), ("x/1.right.png", png(2)), ("x/1.TXT", " says é \n".encode()), ("x/1.alt", b"other")]
    write_tar(tmp_path / "0.tar", [*files, ("x/1.json", b'{"jpg": "a field"}')])
    (item,) = one_pass(ImageTextStream(str(tmp_path)))
    assert (number_of(item), item["caption"]) == (1, ["says é"])
    (item,) = one_pass(ImageTextStream(str(tmp_path), image_column="right.png", caption_column="alt"))
    assert (number_of(item), item["caption"]) == (2, ["other"])
    write_parquet(tmp_path / "b.parquet", [1])
    for source, column in (
        (tmp_path / "0.tar", "jpg"),
        (tmp_path / "0.tar", "image"),
        (tmp_path / "b.parquet", "image"),
    ):
        (item,) = one_pass(ImageTextStream(str(source), image_column=column, pair_id_column=column))
        assert (number_of(item), item["pair_id"]) == (1, as_pair_id(png(1)))


def test_parquet_whose_metadata_datasets_cannot_read(tmp_path):
    """They may name features of its later versions."""
    path = write_parquet(tmp_path / "0.parquet", [1])
    plain = pyarrow.parquet.read_table(path)
    for metadata in ('{"info": {"features": {"image": {"_type": "Hologram"}}}}', '{"info": null}', "{"):
        pyarrow.parquet.write_table(plain.replace_schema_metadata({"huggingface": metadata}), path)
        assert numbers(one_pass(ImageTextStream(str(path)))) == [1]


def test_parquet_of_plain_bytes_and_of_paths(tmp_path):
    write_parquet(tmp_path / "bytes.parquet", [3], image=[png(3)])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "4.png").write_bytes(png(4))
    write_parquet(tmp_path / "paths.parquet", [4], image=["images/4.png"])
    for name, number in (("bytes", 3), ("paths", 4)):
        assert numbers(one_pass(ImageTextStream(str(tmp_path / f"{name}.parquet")))) == [number]
    write_parquet(tmp_path / "out.parquet", [4], image=[f"../{tmp_path.name}/images/4.png"])
    with pytest.raises(
        ValueError, match=r"Sample '0' of the shard '.*out.parquet' is bad: .* points outside the shard's"
    ):
        list(one_pass(ImageTextStream(str(tmp_path / "out.parquet"))))


BAD = {
    "are not an image of a known format": [("{}.png", b"no image"), ("{}.txt", b"text")],
    "no image in column 'image'": [("{}.txt", b"text")],
    "no caption in column 'caption'": [("{}.png", png(1)), ("{}.txt", b" \n")],
    "can't decode byte": [("{}.png", png(1)), ("{}.txt", b"\xff\xfe\xff")],
    "its name points outside its folder": [("../{}.png", png(1)), ("../{}.txt", b"text")],
    "name points outside its folder": [("/etc/{}.png", png(1)), ("/etc/{}.txt", b"text")],
}


def bad(cause, name):
    return [(template.format(name), data) for template, data in BAD[cause]]


@pytest.mark.parametrize("cause", BAD)
def test_a_bad_sample_is_named_or_left_out_and_counted(tmp_path, cause):
    write_tar(tmp_path / "00.tar", [*pair(50), *bad(cause, "x"), *pair(51), *bad(cause, "y"), *bad(cause, "z")])
    batches = ImageTextStream(str(tmp_path), on_bad_sample="skip").batches(2)
    got, reported = Counter(), 0
    for items, tag in itertools.islice(batches, 50):  # one pass each, with 2 good and 3 bad samples
        batches.consume(tag)
        got.update(numbers(items))
        reported += sum(item["skipped"] for item in items)
    assert got == {50: 50, 51: 50}
    assert reported == batches.counts()["skipped"] >= 3 * 49
    with pytest.raises(ValueError, match=rf"of the shard '.*00.tar' is bad: .*{cause}.*on_bad_sample=\"skip\""):
        list(itertools.islice(ImageTextStream(str(tmp_path)), 5))


def test_nothing_but_bad_samples_ends_the_stream(tmp_path):
    write_tar(tmp_path / "0.tar", [*pair(1), *[(f"{n}.txt", b"text") for n in range(150)]])
    stream = ImageTextStream(str(tmp_path), on_bad_sample="skip")
    with pytest.raises(ValueError, match=r"100 samples in succession were bad\. The last: Sample '.*0.tar' is bad"):
        list(itertools.islice(stream, 10))


def test_bad_samples_do_not_change_the_order_of_others_and_resume(tmp_path, monkeypatch):
    rng = random.Random(1)
    for shard in range(6):
        kind = "no image in column 'image'"
        files = [pair(40 * shard + n) if rng.random() < 0.8 else bad(kind, f"x{n}") for n in range(40)]
        write_tar(tmp_path / f"{shard}.tar", list(itertools.chain(*files)))
    make = lambda: ImageTextStream(str(tmp_path), on_bad_sample="skip", shuffle_buffer=25, lanes=2)  # noqa: E731
    whole = Run(monkeypatch, make).take(150)
    run = Run(monkeypatch, make, world_size=2)
    start = run.take(62)
    resumed = Run(monkeypatch, make, workers=2, states=run.states())
    assert start + resumed.take(88) == whole


# ---- Tar files ----


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar_files_are_read_as_tarfile_reads_them(tmp_path, form):
    """With long names, other alphabets, folders and hidden files; also when started from any position."""
    deep = "d" * 70 + "/" + "e" * 60
    names = [f"{deep}/{n:03d}.{extension}" for n in range(5) for extension in ("png", "txt")]
    if form != tarfile.USTAR_FORMAT:
        names += [f"{'long/' * 60}é{n}中.{extension}" for n in range(5) for extension in ("png", "txt")]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, name in enumerate(names):
            data = png(number) if name.endswith("png") else b"x" * (510 + number)
            for member in (name, f"._{number}.png") if number == 3 else (name,):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with tarfile.open(path) as tar:
        expected = {m.name: tar.extractfile(m).read() for m in tar if m.isfile() and not m.name.startswith("._")}
    reader = TarReader(Columns("image", "caption"), [str(path)])
    found = list(reader.samples(str(path)))
    assert {f"{key}.{e}": data for _, key, sample in found for e, data in sample.items()} == expected
    positions = [0] + [position for position, _, _ in found]
    for skipped, position in enumerate(positions):
        assert list(reader.samples(str(path), position)) == found[skipped:]
    assert [
        s for start, stop in Shard(str(path), "", reader).borders(3) for s in reader.samples(str(path), start, stop)
    ] == found


def test_sizes_beyond_8_gib_are_understood(tmp_path):
    """GNU's binary sizes and POSIX's records. The contents are absent, so the reader must tell where they would end."""
    for form, end in ((tarfile.GNU_FORMAT, 1024), (tarfile.PAX_FORMAT, 2048)):
        path = write_tar(tmp_path / f"{form}.tar", pair(1))
        reader = TarReader(Columns("image", "caption"), [str(path)])
        info = tarfile.TarInfo("2.other")
        info.size = 2**33 + 5
        path.write_bytes(info.tobuf(form) + path.read_bytes())
        with pytest.raises(DamagedShardError, match=rf"'.*{form}.tar' is truncated: byte {2**33 + end} "):
            list(reader.samples(str(path)))


def test_a_tar_file_cut_anywhere_is_said_to_be(tmp_path):
    whole = write_tar(tmp_path / "00000.tar", [*pair(1), *pair(2), *pair(3)]).read_bytes()
    reader = TarReader(Columns("image", "caption"), [str(tmp_path / "00000.tar")])
    contents = [key for _, key, _ in reader.samples(str(tmp_path / "00000.tar"))]
    cut = tmp_path / "cut.tar"
    end = whole.rstrip(b"\0")
    for length in range(0, len(end), 97):
        cut.write_bytes(whole[:length])
        got = []
        with pytest.raises(DamagedShardError, match=r"The shard '.*cut.tar' is truncated: byte"):
            got.extend(key for _, key, _ in reader.samples(str(cut)))
        assert got == contents[: len(got)]
    cut.write_bytes(whole[:3000].replace(b"000001.txt", b"000001.txx") + whole[3000:])
    with pytest.raises(DamagedShardError, match=r"'.*cut.tar' is damaged: there is no tar header at byte"):
        list(reader.samples(str(cut)))


def links(kind):
    info = tarfile.TarInfo("9.png")
    info.type, info.linkname = kind, "000001.png"
    return info.tobuf(tarfile.GNU_FORMAT)


def members(*files):
    """The members of a tar file without the zeros at its end."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return file.getvalue()[:end]


@pytest.mark.parametrize(
    ("middle", "key", "words"),
    [
        (members(*pair(9), *pair(9)), "000009", "more than one file '000009.png'"),
        (members(("9.png", png(8)), ("9.txt", b"a"), ("9.PNG", png(9))), "9", "more than one file '9.png'"),
        (links(tarfile.LNKTYPE) + members(("9.txt", b"a")), "9", "'9.png' as a link"),
        (links(tarfile.SYMTYPE), "9", "'9.png' as a link"),
    ],
    ids=["equal keys", "a file added again", "hard link", "symbolic link"],
)
def test_samples_that_a_tar_file_cannot_give_are_told_by_file_and_key(tmp_path, caplog, middle, key, words):
    path = tmp_path / "0.tar"
    path.write_bytes(members(*pair(1), *pair(2)) + middle + members(*pair(3), *pair(4)) + bytes(1024))
    with pytest.raises(ValueError, match=rf"The shard '.*/0.tar' holds {words}.*on_bad_sample"):
        list(one_pass(ImageTextStream(str(path))))
    stream = ImageTextStream(str(path), on_bad_sample="skip")
    assert sorted(numbers(one_pass(stream))) == [1, 2, 3, 4]
    assert words in caplog.text
    reader, url = stream.shards[0].reader, str(path)
    found = [found[1] for found in reader.samples(url)]
    assert found == ["000001", "000002", key, "000003", "000004"]
    assert [
        s[1] for start, stop in Shard(url, "", reader).borders(5) for s in reader.samples(url, start, stop)
    ] == found


def test_a_sample_that_cannot_be_read_is_not_asked_where_the_captions_are(tmp_path):
    (tmp_path / "0.tar").write_bytes(members(*pair(9), *pair(9)) + bytes(1024))
    with pytest.raises(ValueError, match=r"0.tar' holds more than one file '000009.png'"):
        ImageTextStream(str(tmp_path))
    (tmp_path / "0.tar").write_bytes(members(*pair(9), *pair(9), *pair(1)) + bytes(1024))
    assert {*numbers(one_pass(ImageTextStream(str(tmp_path), on_bad_sample="skip")))} == {1}


def test_concatenated_tar_files_are_read_as_one(tmp_path):
    parts = [write_tar(tmp_path / f"{n}.part", [*pair(2 * n), *pair(2 * n + 1)]).read_bytes() for n in range(3)]
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(parts))
    assert sorted(numbers(one_pass(ImageTextStream(str(path))))) == [*range(6)]
    reader = TarReader(Columns("image", "caption"), [str(path)])
    found = list(reader.samples(str(path)))
    for skipped, (position, _, _) in enumerate(found, 1):
        assert list(reader.samples(str(path), position)) == found[skipped:]
    assert [
        s for start, stop in Shard(str(path), "", reader).borders(3) for s in reader.samples(str(path), start, stop)
    ] == found
    path.write_bytes(b"".join(parts)[: 2 * len(parts[0]) + 700])
    with pytest.raises(DamagedShardError, match="truncated"):
        list(reader.samples(str(path)))
    path.write_bytes(parts[0] + b"something else" * 40)
    with pytest.raises(DamagedShardError, match=f"no tar header at byte {len(parts[0])}"):
        list(reader.samples(str(path)))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_truncated_shard_ends_the_training_or_is_left_out_with_a_warning(tmp_path, kind, caplog, monkeypatch):
    for shard in range(3):
        if kind == "tar":
            write_tars(tmp_path / f"{shard}", [20], first=20 * shard)
        else:
            write_parquet(tmp_path / f"{shard}" / "0.parquet", range(20 * shard, 20 * shard + 20))
    broken = next((tmp_path / "1").iterdir())
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    pattern = f"{tmp_path}/{{0..2}}/*.{kind}"
    with pytest.raises(ValueError, match=rf"{broken}' is truncated.*on_bad_sample"):
        list(one_pass(ImageTextStream(pattern)))
    make = lambda: ImageTextStream(pattern, on_bad_sample="skip", shuffle_buffer=8)  # noqa: E731
    run = Run(monkeypatch, make, batch_size=1)
    whole = list(itertools.chain(*run.take(60)))
    assert {*range(20), *range(40, 60)} <= set(whole)
    assert f"{broken}' is truncated" in caplog.text
    assert 1 <= run.states()[0]["lanes"]["0"]["skipped"] <= 2  # in the first pass and perhaps in the second
    run = Run(monkeypatch, make, batch_size=1)
    start = run.take(17)
    assert list(itertools.chain(*start, *Run(monkeypatch, make, batch_size=1, states=run.states()).take(43))) == whole


# ---- Names ----


def test_names_of_shards(folder, tmp_path, monkeypatch):
    every = [str(folder / f"{shard:05d}.tar") for shard in range(13)]
    assert find_shards(str(folder)) == every
    assert find_shards(f"{folder}/*.tar") == every
    assert find_shards(f"{folder}/{{00000..00012}}.tar") == every
    assert find_shards(f"{folder}/0000{{3,7}}.tar") == [every[3], every[7]]
    assert find_shards(every[4]) == [every[4]]
    monkeypatch.chdir(tmp_path)
    assert find_shards("shards/{00009..00010}.tar") == ["shards/00009.tar", "shards/00010.tar"]
    assert find_shards(f"file://{folder}/0000*.tar") == [f"file://{url}" for url in every[:10]]
    assert find_shards(f"file://{folder}") == [f"file://{url}" for url in every]
    assert find_shards("https://host/{8..11}/a.tar") == [f"https://host/{n}/a.tar" for n in (8, 9, 10, 11)]
    assert shard_names(["https://host/a/1.tar", "https://host/ab/1.tar"]) == ["a/1.tar", "ab/1.tar"]
    assert shard_names(every[:1]) == ["00000.tar"]


def test_splits_of_a_folder(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(tmp_path / f"{name}.parquet", [1])
    assert [url.rpartition("/")[2] for url in find_shards(str(tmp_path))] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert len(find_shards(str(tmp_path), split="test")) == 1
    with pytest.raises(ValueError, match=r"has no split 'valid'\. Its splits are \['train', 'test'\]"):
        find_shards(str(tmp_path), split="valid")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("*.tar", "012"),
        ("[01].tar", "01"),
        ("{1..2}.tar", "12"),
        ("[01]{a}.tar", ["[01]{a}"]),
        ("[01]*.tar", ["0", "1"]),
        ("../my [*/2.tar", "2"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_patterns_below_a_folder_whose_name_is_a_pattern(tmp_path, name, numbers, prefix, monkeypatch):
    folder = tmp_path / "my [v1] {a}"
    names = [*"012", "[01]{a}"] if "{a}" in name else "012"
    for number in names:
        write_tar(folder / f"{number}.tar", pair(0))
    found = find_shards(f"{prefix}{folder}/{name}")
    assert [os.path.realpath(url.removeprefix(prefix)) for url in found] == [f"{folder}/{n}.tar" for n in numbers]
    monkeypatch.chdir(folder)
    if not prefix:
        assert [os.path.realpath(url) for url in find_shards(name)] == [f"{folder}/{n}.tar" for n in numbers]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{folder}/{{00011..00013}}.tar", r"The shard '.*00013.tar' is not there"),
        ("{folder}/none.tar", r"The shard '.*none.tar' is not there"),
        ("{folder}/x*.tar", r"No .tar or .parquet files were found at '.*x\*.tar'"),
        ("{folder}/{{5..3}}.tar", "The range {5..3} in .* ends before it begins"),
        ("{folder}/{{a}}.tar", "is neither a range such as"),
        ("{folder}/{{1,1}}/00001.tar", "00001.tar' is not there"),
        ("{folder}/0000{{1,1}}.tar", "names the shard '.*00001.tar' more than once"),
        ("{folder}/nothing", "There are no shards at '.*nothing'"),
        ("{folder}/*", r"reads .tar and .parquet files, but .* has '.*a.tar.gz'. Compressed"),
    ],
)
def test_shards_that_are_not_there(folder, name, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "a.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        ImageTextStream(name.format(folder=folder))


def test_wrong_options_and_columns(folder, tmp_path):
    write_parquet(tmp_path / "a.parquet", [1], wrong=[[1]])
    parquet = str(tmp_path / "a.parquet")
    write_tar(tmp_path / "two.tar", [("1.png", png(1)), ("1.jpg", png(1)), ("1.txt", b"text")])
    write_tar(tmp_path / "json.tar", [("1.png", png(1)), ("1.json", b"[1]")])
    write_tar(tmp_path / "empty.tar", [])
    for source, options, words in (
        ([], {}, "A stream needs at least one source, got none"),
        (parquet, {"image_column": "picture"}, r"a.parquet' has no column 'picture'.* with image_column \(--im"),
        (
            parquet,
            {"image_column": "wrong"},
            "image_column 'wrong' must hold images, encoded images, their paths",
        ),
        (parquet, {"caption_column": "wrong"}, "caption_column 'wrong' must hold strings or lists of strings"),
        (parquet, {"pair_id_column": "wrong"}, "pair_id_column 'wrong' must hold integers or strings"),
        (str(folder), {"caption_column": "text"}, r"No caption was found for caption_column 'text'.*\.png, \.txt"),
        (str(folder), {"image_column": "jpg"}, "No image was found for image_column 'jpg'"),
        (str(folder), {"pair_id_column": "uid"}, "No pair id was found for pair_id_column 'uid'"),
        (str(tmp_path / "two.tar"), {}, r"There are several images: name one of \.png, \.jpg with image_column"),
        (str(tmp_path / "json.tar"), {}, "json.tar' has a .json that cannot be read: its .json holds a list"),
        (str(tmp_path / "empty.tar"), {}, "empty.tar' holds no samples"),
        (f"{tmp_path}/{{a.parquet,two.tar}}", {}, "a.parquet' and .*two.tar' have different formats"),
        (parquet, {"negative_caption_column": "wrong"}, "negative_caption_column 'wrong' must hold strings or lists"),
        (str(folder), {"negative_caption_column": "w"}, "No caption was found for negative_caption_column 'w'"),
        (parquet, {"caption_column": "a", "negative_caption_column": "a"}, "are both 'a', so every caption would"),
        (str(folder), {"caption_column": "image"}, "image_column and caption_column are both 'image'"),
        (parquet, {"captions_per_image": 0}, "captions_per_image must be an integer of at least 1, got 0"),
        (parquet, {"captions_per_image": 2}, "captions_per_image is 2, but the caption_column 'caption' holds one"),
        (str(folder), {"captions_per_image": 2}, "captions_per_image is 2, but the caption_column 'caption' holds one"),
        (parquet, {"on_bad_sample": "ignore"}, 'must be "raise" or "skip"'),
        (parquet, {"shuffle_buffer": 0}, "shuffle_buffer must be at least 1, got 0"),
        (parquet, {"samples_per_epoch": 0}, "samples_per_epoch must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ImageTextStream(source, **options)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"no.parquet' is truncated or no parquet file"):
        ImageTextStream(str(tmp_path / "no.parquet"))


def test_a_stream_shorter_than_a_global_batch(make, monkeypatch):
    Run(monkeypatch, make, batch_size=10, world_size=2, workers=2, steps=1).take(2)
    with pytest.raises(
        ValueError, match=r"shorter than one global batch, which takes 400 pairs of it: lane \d of 4, .*0000\d.tar"
    ):
        Run(monkeypatch, make, batch_size=10, world_size=2, workers=2, steps=20).take(40)


# ---- Networks ----


@pytest.fixture
def no_waiting(monkeypatch):
    """Retries do not wait, and files are read in small parts."""
    monkeypatch.setattr(opening, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(readers, "open_shard", functools.partial(opening.open_shard, buffer=4096))


@pytest.fixture
def remote(folder):
    """The shards in fsspec's memory, and the outcomes of their reads: an iterator of errors, or None for success."""
    import fsspec
    from fsspec.implementations.memory import MemoryFile

    file_system = fsspec.filesystem("memory")
    for path in folder.iterdir():
        file_system.pipe(f"/data/{path.name}", path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        failures = []
        read = MemoryFile.read

        def failing(self, *args):
            error = failures.pop(0) if failures else None
            if error is not None:
                raise error
            return read(self, *args)

        patch.setattr(MemoryFile, "read", failing)
        yield failures
    file_system.rm("/data", recursive=True)


def test_read_errors_are_tried_again_from_the_offset_and_never_count_as_bad(
    remote, make, monkeypatch, no_waiting, caplog
):
    expected = Run(monkeypatch, make).take(100)
    run = Run(monkeypatch, lambda: make("memory://data/*.tar", on_bad_sample="skip"))
    rng = random.Random(0)
    remote += [OSError("reset by peer") if rng.random() < 0.2 else None for _ in range(1000)]
    assert run.take(100) == expected
    assert run.states()[0]["lanes"]["0"]["skipped"] == 0
    assert re.search(r"failed at byte [1-9]\d+: OSError: reset by peer. It is tried again", caplog.text)
    remote[:] = [TimeoutError("no answer")] * 1000
    with pytest.raises(opening.ReadError, match=r"'memory:///data/000\d\d.tar' failed at byte \d+: .*tried 4 times"):
        run.take(100)


def test_a_shard_that_disappears_is_named(remote, monkeypatch, no_waiting):
    import fsspec

    stream = ImageTextStream("memory://data/*.tar", on_bad_sample="skip")
    fsspec.filesystem("memory").rm("/data/00007.tar")
    with pytest.raises(ValueError, match=r"The file 'memory:///data/00007.tar' cannot be opened: FileNotFoundError"):
        list(itertools.islice(stream, 390))


def test_shards_of_a_web_server_whose_connections_break(folder, make, monkeypatch, no_waiting, caplog):
    expected = Run(monkeypatch, make).take(100)
    with serving(folder.parent) as (address, dropped):
        run = Run(monkeypatch, lambda: make(f"{address}/shards/{{00000..00012}}.tar"))
        dropped += [False, True, True, False, True] * 4
        assert run.take(100) == expected
    assert "It is tried again" in caplog.text


def test_repositories_of_the_hub(folder, make, monkeypatch, tmp_path):
    """Repositories given by id and split, and by path. `huggingface_hub` and `datasets` talk to a double."""
    expected = Run(monkeypatch, make).take(50)
    (tmp_path / "data").mkdir()
    folder.rename(tmp_path / "data" / "train")
    write_tars(tmp_path / "data" / "test", [3])
    with serving(tmp_path / "data") as (address, _):
        code = """
import itertools
from helpers.shards import number_of
from hf_infcl import ImageTextStream
for source in ("me/data", "hf://datasets/me/data/train/*.tar", "hf://datasets/me/data/train"):
    stream = ImageTextStream(source, lanes=4, shuffle_buffer=30, open_shards=2, seed=3)
    assert stream.shards[0].url.startswith("hf://datasets/me/data"), stream.shards
    print([number_of(item) for items, _ in itertools.islice(stream.batches(2), 50) for item in items])
print(len(ImageTextStream("me/data", split="test").shards))
for source in ("me/none", "hf://datasets/me/none"):
    try:
        ImageTextStream(source)
    except ValueError as error:
        print(repr(str(error)))
"""
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    *sequences, test, first, second = done.stdout.splitlines() or [done.stderr]
    assert sequences == [str(list(itertools.chain(*expected)))] * 3, done.stderr
    assert test == "1"
    assert "There are no shards at 'me/none', neither in a local folder nor on the Hub" in first
    assert "No .tar or .parquet files were found at 'hf://datasets/me/none'." in second
