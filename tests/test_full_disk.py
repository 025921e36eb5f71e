"""Where a file cannot be written, a command says so in one line and leaves nothing half."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import models
from helpers.demo import mistake
from helpers.pictures import write_folder
from helpers.processors import END, clip_processor

from hf_infcl import load_pairs
from hf_infcl.trainer.checkpoints import full_disk_explained


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit of this process, beyond which the system refuses to write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("folder")
    models.clip(end=END).save_pretrained(made / "model")
    clip_processor().save_pretrained(made / "model")
    write_folder(made / "pictures", [f"{letter} b" for letter in "abcdefghijkl"])
    load_pairs(str(made / "pictures"), split="train")  # is cached
    return made


@pytest.mark.parametrize(
    ("command", "size"),
    [
        *(("convert", 20_000), ("average", 20_000), ("embed", 512), ("score", 512), ("train", 20_000)),
        *(("evaluate", 128), ("check", 64)),
    ],
)
def test_a_file_that_may_not_grow_is_told_in_one_line_and_nothing_half_is_left(folder, tmp_path, capsys, command, size):
    out, data, model = tmp_path / "out", folder / "pictures", folder / "model"
    words: dict[str, list[Any]] = {
        "convert": [model, out, "--to", "open_clip"],
        "average": [model, model, "--output_dir", out, "--use_cpu"],
        "embed": [model, data, "--output_dir", out, "--use_cpu"],
        "score": [model, data, "--output_dir", out, "--use_cpu"],
        "evaluate": ["--model", model, "--eval_dataset", f"{data}?split=train", "--output_dir", out, "--use_cpu"],
        "check": ["--model", model, "--dataset", data, "--output_dir", out],
        "train": ["--model", model, "--dataset", data, "--output_dir", out, "--use_cpu", "--bf16", "false"],
    }
    words["train"] += ["--per_device_train_batch_size", 4, "--max_steps", 1, "--save_strategy", "no"]
    with files_of_at_most(size):
        said = mistake(capsys, command, *words[command])
    assert f"The results could not be written into {out}" in said
    assert "Allow larger files, and run the same command again" in said, "there is no checkpoint to go on from"
    left = {path.name for path in out.rglob("*") if path.is_file()} - {"training_record.json"}  # of the beginning
    assert not {name for name in left if name[:2] in {f"_{digit}" for digit in range(10)}}
    assert not {name for name in left if name.endswith((".safetensors", ".json", ".npy", ".parquet", ".bin"))}


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        OSError("512 requested and 0 written"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_what_was_there_before_stays_and_what_was_written_goes(tmp_path: Path, error: Exception):
    (tmp_path / "before").write_text("a")

    def fail() -> None:
        with full_disk_explained(tmp_path, "again"):
            (tmp_path / "config.json").write_text("{}")
            raise error

    with pytest.raises(ValueError, match=r"could not be written into .* run the same command again"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    with pytest.raises(OSError, match="of another kind"), full_disk_explained(tmp_path):
        raise OSError("of another kind")
