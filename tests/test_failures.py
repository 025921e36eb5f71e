"""If one of two launched processes fails, in any phase of a step, both end and the launcher reports the cause.

For tests that kill the launcher, torchrun runs this file as a script. A timeout here means that a process hangs; no
other time is measured.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import models
from helpers.processes import launched
from helpers.trainers import AtEndOf, trained, trainer_for
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import default_collate
from transformers import TrainerCallback

from hf_infcl.trainer.checkpoints import choose

ROOT = Path(__file__).parent.parent
HANG = 120

# With these, nothing is tried on a GPU before the first step, and a step that runs out of memory is not repeated.
GIVEN = {"texts_at_once": 1, "retain_graphs": "1", "torch_compile": False}

# The text that the launcher's output must contain. A window of two micro-batches has three forwards, the last one in
# the second pass. Everything happens in the second window.
FAILURES = {
    "data": "MemoryError: no room for this batch",
    "keys": "dict with pixel_values and input_ids at least, got keys ['input_ids', 'attention_mask']",
    "first pass": "tried to allocate",
    "second pass": "tried to allocate",
    "backward": "RuntimeError: this gradient is lost",
    "not finite": "rank 1: image embeddings of micro-batch 1, row 0",
}


def torchrun(*arguments: str) -> tuple[int, str]:
    """Runs this file; returns the launcher's exit code, and the output when launcher and processes have ended."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launcher.communicate(timeout=HANG)
    finally:
        launcher.terminate()  # if it is still running; the launcher then ends its processes
        launcher.wait()
    return launcher.returncode, output


def check_ended(code: int, output: str) -> None:
    processes = [int(line.split()[-1]) for line in output.splitlines() if line.startswith("training in process")]
    assert len(processes) == 2, output
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert code != 0, output
    assert "trained to the end" not in output


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_process_ends_all(kind, backend):
    code, output = launched(main, kind, backend)
    check_ended(code, output)
    assert FAILURES[kind].lower() in output.lower(), output


def test_a_killed_process_ends_all(backend):
    code, output = launched(main, "killed", backend)
    check_ended(code, output)
    assert "Signal 9 (SIGKILL) received" in output
    assert "Rank 1 does not answer; its last phase was the second pass after step 1." in output


def launch_here(*arguments: str) -> tuple[int, str]:
    return launched(main, *arguments)


# A launcher forwards SIGTERM and SIGINT. SIGKILL, and SIGUSR1, which it does not handle, end it at once.
@pytest.mark.parametrize(
    ("number", "launch"),
    [("SIGTERM", launch_here), ("SIGINT", launch_here), ("SIGUSR1", launch_here), ("SIGKILL", torchrun)],
)
def test_processes_save_a_checkpoint_when_their_launcher_ends(tmp_path, number, launch):
    code, output = launch(number, "gloo", str(tmp_path))
    assert code != 0
    assert "trained to the end" not in output
    forwarded = "SIGINT" if number == "SIGINT" else "SIGTERM"
    assert output.count(f"{forwarded} has ended the training after step") == 1, output
    assert choose(str(tmp_path), "auto") is not None, output


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        ("before the group", "The launcher ended while its processes formed their group"),
        ("before the training", "SIGTERM has ended the training after step 0. Nothing was trained before that."),
    ],
)
def test_a_launcher_that_ends_before_the_training_leaves_no_orphans(tmp_path, moment, message):
    """The launcher ends while processes wait for a machine, or load a model or a data set."""
    code, output = launched(main, moment, "gloo", str(tmp_path))
    assert code == -signal.SIGKILL
    assert output.count(message) >= 1, output
    assert "trained to the end" not in output


class Decide(TrainerCallback):
    """Asks for a checkpoint after step 2, and for the end of the training when step 3 is logged."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 2
        control.should_log |= state.global_step == 3

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 3


def rank_decides(rank: int, world_size: int, folder: str) -> int:
    """A callback acts on one rank only, such as one that depends on the time."""
    options = {"save_strategy": "steps", "save_steps": 100, "logging_steps": 100, "max_steps": 6}
    run = trained(trainer_for(folder, **options, callbacks=[Decide()] if rank == 1 else []))
    return run.state.global_step


def test_callbacks_that_decide_alike_everywhere_cost_no_exchange(tmp_path):
    with mock.patch("hf_infcl.trainer.loop_events._share", side_effect=AssertionError):
        trainer_for(str(tmp_path), max_steps=1).train()
        with pytest.raises(AssertionError):
            trainer_for(str(tmp_path), max_steps=1, callbacks=[Decide()]).train()


def test_what_a_callback_of_one_rank_asks_for_is_done_on_all(ranks, tmp_path, backend):
    assert ranks.run(rank_decides, 2, str(tmp_path), backend=backend) == [3, 3]
    assert choose(str(tmp_path), "auto") == str(tmp_path / "checkpoint-2")


class Normalising:
    """A collator of uint8 images, for which there is no memory once they are prepared the ``time``-th time, if any."""

    def __init__(self, time: int | None) -> None:
        self.time, self.calls = time, itertools.count(1)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = default_collate(items)
        return {**batch, "pixel_values": batch["pixel_values"].to(torch.uint8)}

    def normalise(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return too_much() if next(self.calls) == self.time else pixel_values.float()


def rank_first_pass(rank: int, world_size: int, folder: str, place: str, time: int) -> str:
    model = models.clip()
    options = dict(GIVEN)
    options |= {"torch_compile": True, "torch_compile_backend": "eager"} if place == "compiled inputs" else {}
    collator = default_collate if place == "forward" else Normalising(time if rank == 1 else None)
    trainer = trainer_for(folder, model, max_steps=4, data_collator=collator, **options)
    if rank == 1 and place == "forward":
        exhaust_memory(model, time)
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return "went on"


# A window has three forwards, the last one in the second pass. In the fourth forward DDP by itself exchanges its
# buckets.
@pytest.mark.parametrize(
    ("place", "time"),
    [("forward", 1), ("forward", 5), ("inputs", 2), ("inputs", 4), ("inputs", 7), ("compiled inputs", 4)],
)
def test_a_process_without_memory_for_the_first_pass_stops_all_with_its_reason(ranks, tmp_path, place, time, backend):
    job = (rank_first_pass, 2, str(tmp_path), place, time)
    heard, own = ranks.run(*job, backend=backend, always_ring=True)
    assert heard.startswith("All ranks stop because of an error:\n  rank 1: ")
    assert "tried to allocate" in heard.lower()
    assert "tried to allocate" in own.lower()
    assert "All ranks stop" not in own


def too_much() -> torch.Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


def exhaust_memory(model: torch.nn.Module, forward: int) -> None:
    """Makes forward number ``forward`` of the model allocate more memory than there is."""
    calls = itertools.count(1)
    model.register_forward_pre_hook(lambda module, args: too_much() if next(calls) == forward else None)


# ---- The training that fails ----


def say(words: str) -> None:
    """Prints a line in a single write. Both processes print to one pipe, and print() may split a line."""
    os.write(1, f"{words} {os.getpid()}\n".encode())


class Collator:
    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.calls += 1
        batch = default_collate(items)
        if self.calls == 4 and self.kind == "data":
            raise MemoryError("no room for this batch")
        if self.calls == 4 and self.kind == "keys":
            del batch["pixel_values"]
        if self.calls == 4 and self.kind == "not finite":
            batch["pixel_values"][:] = torch.nan
        return batch


def end_of_launcher(ends_it: bool, folder: str) -> None:
    """Ends the launcher once both processes know its process id, and returns when it has ended."""
    launcher = os.getppid()
    Path(folder, f"ready {os.environ['RANK']}").touch()
    if ends_it:
        while len(list(Path(folder).glob("ready *"))) < 2:
            time.sleep(0.01)
        os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
        time.sleep(0.01)


@record
def main(kind: str, backend: str, folder: str = "") -> None:
    say("training in process")
    own = kind if os.environ["RANK"] == "1" else "none"
    model = models.clip()
    options = {**GIVEN, "use_cpu": backend == "gloo", "logging_strategy": "no", "data_collator": Collator(own)}
    if kind == "before the group":
        end_of_launcher(own == kind, folder)
    if kind.startswith("SIG"):  # the launcher ends before this training does
        options |= {"max_steps": 5_000, "save_strategy": "steps", "save_steps": 5_000}
        end_launcher = AtEndOf(2, lambda: os.kill(os.getppid(), signal.Signals[own]))
        options["callbacks"] = [end_launcher] if own == kind else []
    trainer = trainer_for(folder or tempfile.mkdtemp(), model, **{"max_steps": 4, **options})
    exhaust_memory(model, {"first pass": 5, "second pass": 6}.get(own, 0))

    def in_backward(gradient: torch.Tensor) -> None:
        if trainer.state.global_step == 1 and own == "backward":
            raise RuntimeError("this gradient is lost")
        if trainer.state.global_step == 1 and own == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    model.visual_projection.weight.register_hook(in_backward)
    if kind == "before the training":
        end_of_launcher(own == kind, folder)
    trainer.train()
    print("trained to the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
