"""torchrun starts a training again that has lost a process or a whole machine; it ends as if nothing had happened."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.processes import launched
from helpers.trainers import AtEndOf, parameters, trained, trainer_for
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 5
LOST_IN = 3  # before its checkpoint
# As several_nodes.sh sets it: otherwise the restarted processes cannot form a group of gloo (torch 2.13).
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def training(folder: Path, **options: Any) -> Any:
    # 12 pairs divide by four processes and by two; of 40, a step holds rows of two passes.
    options |= {"global_batch_size": 12, "per_device_train_batch_size": None, "gradient_accumulation_steps": None}
    options |= {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1}
    options |= {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 1e-2}
    return trainer_for(folder, models.clip(), models.Pairs(40), **options)


def end_of(folder: Path) -> list[float]:
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def lose(what: str) -> None:
    """Kills this process, or its agent with all processes, as if the machine were gone."""
    agent = psutil.Process(os.getppid())
    for process in [agent, *agent.children(recursive=True)] if what == "agent" else []:
        if process.pid != os.getpid():
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


@record
def main(folder: str, what: str) -> None:
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    victim = is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    end = AtEndOf(LOST_IN, lambda: lose(what) if victim else None)
    run = trained(training(Path(folder), callbacks=[end], use_cpu=what != "process with a GPU"), "auto")
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} trained {run.steps_trained} steps")
    if os.environ["RANK"] == "0":
        torch.save(parameters(run), f"{folder}/weights.pt")


@pytest.mark.parametrize("what", ["process", "agent", pytest.param("process with a GPU", marks=pytest.mark.gpu)])
def test_a_training_goes_on_with_what_is_left(tmp_path, what):
    count = 2 if what == "process with a GPU" else 4
    if count == 2 and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    whole = trained(training(tmp_path / "whole"))
    options = ["--nproc-per-node", str(count), "--rdzv-endpoint", "localhost:0"]
    if what == "agent":  # the rendezvous is elsewhere: without its host, no agent could go on
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = ["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", f"localhost:{store.port}"]
        options += ["--rdzv-conf", "is_host=0,last_call_timeout=3,keep_alive_interval=1"]
    options += ["--rdzv-backend", "c10d", "--max-restarts", "2"]
    folder, nodes = tmp_path / "lost", 1 + (what == "agent")
    code, printed = launched(main, str(folder), what, options=options, nodes=nodes, variables=RESTARTS)
    left = 2 if what == "agent" else count
    assert code == (-signal.SIGKILL if what == "agent" else 0), printed
    for rank in range(left):
        assert f"rank {rank} of {left} trained {STEPS - LOST_IN + 1} steps" in printed, printed
    assert end_of(folder) == pytest.approx(end_of(tmp_path / "whole"), abs=1e-4)  # the same rows in every step
    weights = torch.load(folder / "weights.pt", map_location="cpu")
    torch.testing.assert_close(weights, parameters(whole), atol=5e-5, rtol=0)
