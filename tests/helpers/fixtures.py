"""Fixtures that several test files share: groups of processes, the demo's data. A plugin of pytest, for conftest.py."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import interpreted  # noqa: F401 - before Triton is imported
from .demo import all_digits, copy_rows, made_once
from .hub import Hub, hub_for_this_process
from .processes import FreshRanks, Ranks, leave_out_of_collections, without_tf32


@pytest.fixture(autouse=True)
def fast_collections() -> None:
    """Excludes what exists before a test, such as imported modules, from the garbage collections in it."""
    leave_out_of_collections()


@pytest.fixture(autouse=True)
def memory_for_other_tests() -> Iterator[None]:
    """Frees the memory of a GPU that a test has cached, because tests in other processes need it."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """A training of another test may have enabled TF32 in this process."""
    yield
    if "tf32" in (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision):
        without_tf32()


@pytest.fixture(scope="module")
def once() -> Callable[..., Any]:
    """Calls a function for the first of a module's tests that ask for this key; the others get the same result.

    It is for what several cases are compared with, such as an uninterrupted training. Tests only read the result.
    """
    results: dict[Any, Any] = {}

    def result_of(key: Any, make: Callable[[], Any]) -> Any:
        if key not in results:
            results[key] = make()
        return results[key]

    return result_of


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clip-init/ and a third of digits/. Tests only read it.

    Each command looks for the files of its folders with dozens of patterns, so many files cost many seconds.
    """
    base = tmp_path_factory.getbasetemp()

    def make(folder: Path) -> None:
        shutil.copytree(all_digits(base), folder)
        for split, count in (("train", 500), ("test", 120)):
            table = folder / f"digits/{split}/metadata.jsonl"
            lines = table.read_text().splitlines(keepends=True)
            table.write_text("".join(lines[:count]))
            for line in lines[count:]:
                (table.parent / json.loads(line)["file_name"]).unlink()

    return made_once(base, "demo", make)


@pytest.fixture
def small(demo: Path, tmp_path: Path) -> list[Any]:
    """The words of a training of 2 epochs with 3 steps each."""
    for split, count in (("train", 26), ("test", 12)):
        copy_rows(demo / "digits" / split, tmp_path / "pairs" / split, count)
    words = ["train", "--model", demo / "clip-init", "--dataset", tmp_path / "pairs", "--output_dir", tmp_path / "out"]
    return [
        *words,
        *["--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "8", "--num_train_epochs", "2"],
    ]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def fresh_ranks() -> FreshRanks:
    return FreshRanks()


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of two processes."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
