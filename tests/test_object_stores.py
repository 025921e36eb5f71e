"""Shards from object stores, with a cache that a machine's processes share, and checkpoints that are copied there.

Most tests take fsspec's memory or a local folder for a store, the last ones moto's server of S3.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from helpers import models
from helpers.processes import alone, on_ranks
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, parameters, trained, trainer_for

from hf_infcl import InfCLTrainer
from hf_infcl.shards import opening
from hf_infcl.trainer.checkpoints import MANIFEST_NAME, CheckpointStore

# ---- The cache of shards ----


@pytest.fixture
def fetched(monkeypatch, tmp_path) -> list[str]:
    """The names of the files that were fetched from the "store" in a folder, with a cache in another one."""
    names: list[str] = []
    get = LocalFileSystem.get_file

    def noting(self: Any, remote: str, *args: Any, **options: Any) -> Any:
        names.append(Path(remote).name)
        return get(self, remote, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", noting)
    monkeypatch.setattr(opening, "RETRY_SECONDS", (0,))
    monkeypatch.setenv("INFCL_SHARD_CACHE", str(tmp_path / "cache"))
    return names


def read(path: Path, position: int = 0) -> bytes:
    with opening.open_shard(f"file://{path}", position) as file:
        return file.read()


def in_cache(folder: Path) -> int:
    return sum(not path.name.startswith("_") for path in (folder / "cache").iterdir())


def test_a_shard_is_fetched_once_and_read_from_any_byte(tmp_path, fetched):
    (shard := tmp_path / "0.tar").write_bytes(bytes(range(200)))
    (image := tmp_path / "0.png").write_bytes(b"no shard")
    assert read(shard) == shard.read_bytes()
    assert read(shard, 150) == bytes(range(150, 200))
    assert read(image) == b"no shard"
    assert fetched == ["0.tar"]
    shard.write_bytes(b"another of the same name")  # is told by its size
    assert read(shard) == b"another of the same name"
    assert fetched == ["0.tar", "0.tar"]


def test_the_shards_used_longest_ago_are_removed(tmp_path, fetched, monkeypatch):
    monkeypatch.setenv("INFCL_SHARD_CACHE_GB", "3e-7")  # 300 bytes
    shards = [tmp_path / f"{number}.tar" for number in range(4)]
    for shard in shards:
        shard.write_bytes(b"x" * 100)
    for shard in [*shards[:3], shards[0], shards[3], shards[0], shards[1]]:
        with opening.open_shard(f"file://{shard}") as file:
            file.read(1)
            time.sleep(0.01)  # so that times differ
            assert in_cache(tmp_path) <= 3
    assert fetched == ["0.tar", "1.tar", "2.tar", "3.tar", "1.tar"]


@pytest.mark.parametrize("limit", ["100 GB", "", "-1", "nan"])
def test_a_limit_that_is_no_number_is_told_at_once(tmp_path, monkeypatch, limit):
    monkeypatch.setenv("INFCL_SHARD_CACHE_GB", limit)
    (tmp_path / "0.tar").touch()
    with pytest.raises(ValueError, match="INFCL_SHARD_CACHE_GB is the size of the cache in gigabytes"):
        opening.open_shard(str(tmp_path / "0.tar"))


def test_a_shard_larger_than_the_cache_stays_until_the_next(tmp_path, fetched, monkeypatch):
    monkeypatch.setenv("INFCL_SHARD_CACHE_GB", "5e-8")  # 50 bytes
    (shard := tmp_path / "0.tar").write_bytes(b"x" * 100)
    assert read(shard) == read(shard) == shard.read_bytes()
    assert fetched == ["0.tar"]


def test_a_shard_that_came_in_part_is_fetched_again_and_never_read(tmp_path, fetched, monkeypatch, caplog):
    (shard := tmp_path / "0.tar").write_bytes(b"x" * 100)
    noting, parts = LocalFileSystem.get_file, iter([b"half", None])

    def cut_off(self: Any, remote: str, local: str, **options: Any) -> None:
        noting(self, remote, local, **options)
        if (part := next(parts)) is not None:
            Path(local).write_bytes(part)

    monkeypatch.setattr(LocalFileSystem, "get_file", cut_off)
    assert read(shard) == b"x" * 100
    assert "it has 100 bytes, of which 4 came. It is tried again" in caplog.text
    assert in_cache(tmp_path) == 1


def reads(path: Path, cache: str, queue: Any) -> None:
    os.environ["INFCL_SHARD_CACHE"] = cache
    get = LocalFileSystem.get_file

    def slowly(self: Any, remote: str, local: str, **options: Any) -> None:
        Path(local).write_bytes(b"half")
        time.sleep(0.2)
        get(self, remote, local, **options)
        queue.put("fetched")

    LocalFileSystem.get_file = slowly
    queue.put(len(read(path)))


def test_processes_share_the_copy_and_see_it_when_it_is_whole(tmp_path):
    (shard := tmp_path / "0.tar").write_bytes(b"x" * 100)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=reads, args=(shard, str(tmp_path / "cache"), queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted((queue.get(timeout=60) for _ in range(4)), key=str) == [100, 100, 100, "fetched"]
    for process in processes:
        process.join()


# ---- Checkpoints ----

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
OPTIONS: dict[str, Any] = {**SAVES, "max_steps": 4, "save_total_limit": 2}
OPTIONS |= {"learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


def training(folder: Path, store: str | None, **options: Any) -> InfCLTrainer:
    shown = models.Pairs(8, seed=1)
    return trainer_for(
        folder, models.clip(dropout=0.3), eval_dataset=shown, checkpoint_store=store, **OPTIONS, **options
    )


def stored(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(place.split("/")[-2] for place in files.glob(f"{root}/*/{MANIFEST_NAME}"))


def goes_on_elsewhere(folder: Path, store: str) -> None:
    """A machine is lost with its disk after two steps; another one goes on, and ends as if nothing had happened."""
    whole = trained(training(folder / "whole", None))
    trained(training(folder / "lost", store, callbacks=[StopAt(2)]))
    assert stored(store) == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(folder / "lost")
    run = trained(training(folder / "new", store), "auto")
    assert run.steps_trained == 2
    assert torch.equal(parameters(run), parameters(whole))
    assert stored(store) == sorted(path.name for path in (folder / "new").glob("checkpoint-*"))
    assert "checkpoint-4" in stored(store)


def test_another_machine_goes_on_from_the_store(tmp_path):
    goes_on_elsewhere(tmp_path, f"memory://{tmp_path.name}/run")


@on_ranks(2)
def test_a_machine_gets_a_disk_of_its_own_back(rank, world_size, tmp_path):
    """Every process is the first process of a machine with its own disk; that of the last one was lost."""
    os.environ["LOCAL_RANK"] = "0"
    own, before = tmp_path / str(rank), os.getcwd()
    own.mkdir()
    os.chdir(own)
    try:
        whole = trained(trainer_for("whole", **SAVES, max_steps=3, save_on_each_node=True))
        options = {**SAVES, "max_steps": 3, "save_on_each_node": True, "checkpoint_store": f"file://{tmp_path}/store"}
        trained(trainer_for("run", **options, callbacks=[StopAt(2)]))
        dist.barrier()  # until rank 0 has copied the checkpoint
        if rank == 1:
            shutil.rmtree("run")
        run = trained(trainer_for("run", **options), "auto")
        assert run.steps_trained == 1
        assert torch.equal(parameters(run), parameters(whole))
    finally:
        os.chdir(before)


def test_the_newest_complete_copy_is_fetched_with_the_best(tmp_path, monkeypatch):
    folders = [tmp_path / "lost" / f"checkpoint-{step}" for step in (1, 2, 3)]
    store = CheckpointStore(f"file://{tmp_path}/store")
    for number, folder in enumerate(folders):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "file").write_text(folder.name)
        (folder / MANIFEST_NAME).write_text(json.dumps({"written": number + 1}))
        (folder / "trainer_state.json").write_text('{"best_model_checkpoint": "lost/checkpoint-1"}')
        store.copy(folder, limited=False)
        wait(store.jobs)
    (tmp_path / "store" / "checkpoint-3" / MANIFEST_NAME).unlink()  # the machine was lost while it was copied
    CheckpointStore(f"file://{tmp_path}/store").fetch(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "new" / "checkpoint-2" / "part" / "file").read_text() == "checkpoint-2"
    shutil.rmtree(tmp_path / "new" / "checkpoint-1")
    CheckpointStore(f"file://{tmp_path}/store").fetch(tmp_path / "new")  # it has the newest
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoint-2"]


def refused(*_: Any, **__: Any) -> None:
    raise OSError("no answer")


def test_a_store_that_fails_costs_a_copy_and_ends_no_training(tmp_path, caplog, monkeypatch):
    (tmp_path / "store").write_text("a file, not a folder")
    run = trained(trainer_for(tmp_path / "out", checkpoint_store=f"file://{tmp_path}/store", **SAVES))
    assert run.state.global_step == 2
    assert "checkpoint-2 could not be copied to" in caplog.text
    run = trainer_for(tmp_path / "new", checkpoint_store="memory://x", **SAVES)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "glob", refused)
    with pytest.raises(ValueError, match=r"The checkpoints in memory://x could not be read: OSError: no answer\."):
        run.train(resume_from_checkpoint="auto")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://KEY:SECRET@bucket/run", "checkpoint_store would store a key beside the model"),
        ("nowhere://run", "checkpoint_store=nowhere://run cannot be opened: Protocol not known: nowhere"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_the_training(tmp_path, url, words):
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, checkpoint_store=url)


# ---- S3 ----

PACKAGES = Path(sys.prefix) / "object_stores"  # which scripts/environment.sh installs apart


def on_s3(folder: str) -> None:
    sys.path.append(str(PACKAGES))
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {**keys, "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}", "INFCL_SHARD_CACHE": f"{folder}/cache"}
    fsspec.config.set_conf_env(fsspec.config.conf)
    from s3fs import S3FileSystem

    fetched, get = [], S3FileSystem._get_file

    async def noting(self: Any, remote: str, *args: Any, **options: Any) -> Any:
        fetched.append(remote)
        return await get(self, remote, *args, **options)

    S3FileSystem._get_file = noting
    files = S3FileSystem()
    files.mkdir("bucket")
    write_tars(Path(folder, "shards"), [20] * 4)
    files.put(f"{folder}/shards/", "bucket/shards/", recursive=True)
    local, remote = f"{folder}/shards/*.tar", "s3://bucket/shards/*.tar"
    weights = []
    for source in (local, remote):
        options = {"max_steps": 20, "learning_rate": 1e-2, "data_collator": collate}  # two epochs
        weights.append(parameters(trained(trainer_for(f"{folder}/out", None, stream_of(source), **options))))
    assert torch.equal(*weights)
    assert sorted(fetched) == [f"bucket/shards/0000{number}.tar" for number in range(4)]
    goes_on_elsewhere(Path(folder), "s3://bucket/run")
    server.stop()


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs tests/object_stores.txt")
def test_a_stream_and_checkpoints_on_s3(tmp_path):
    code, printed = alone(on_s3, str(tmp_path))
    assert code == 0, printed
