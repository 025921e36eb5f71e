"""Processes that form a group on demand: gloo on CPUs, NCCL on GPUs."""

import contextlib
import functools
import gc
import inspect
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import jinja2
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.utils import imports

from .workers import server

# In each training, accelerate reads the metadata of packages several times, which takes 5% of a small one.
imports._is_package_available = functools.cache(imports._is_package_available)
# The Hub's library compiles the template of a model card for each card, which takes as long as a small training.
jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]
# torch keeps the whole stack of each call that seeds a device which is not there, which takes 5% of a small training.
for device in () if torch.cuda.is_available() else (torch.cuda, torch.mtia, torch.xpu):
    device.manual_seed_all = lambda seed: None


def context() -> Any:
    """The multiprocessing context of the tests: processes are forks of a server that has imported the packages.

    On machines with CUDA, which does not survive a fork, every process imports the packages itself.
    """
    return mp.get_context("spawn") if torch.cuda.is_available() else server()


def leave_out_of_collections() -> None:
    """Excludes all objects that exist now from later garbage collections.

    accelerate collects garbage in every training. With the objects of all imported modules that takes 0.3 s.
    """
    gc.collect()
    gc.freeze()


class Ranks:
    """A pool of processes that lives as long as the tests."""

    def __init__(self) -> None:
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str = "gloo",
        timeout: float = 120,
        always_ring: bool | int = False,
    ) -> list[Any]:
        """Calls function(rank, world_size, *args) on every rank of a new group; returns the results in rank order.

        Args:
            backend: the backend of the group; with "nccl" rank r has GPU r.
            timeout: the seconds without an answer after which the test fails.
            always_ring: strategy="ring" sends texts around the ring even if they are small enough to be gathered; a
                number is that of the processes that gather those of a block.

        Raises:
            AssertionError: the function raised an error on some ranks; the message contains their tracebacks.
            pytest.skip.Exception: there are fewer GPUs than ranks with "nccl".
        """
        if backend == "nccl" and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        while len(self._processes) < world_size:
            parent, child = context().Pipe()
            process = context().Process(target=_serve, args=(child,), daemon=True)
            process.start()
            self._pipes.append(parent)
            self._processes.append(process)
        # The store itself finds and binds a free port. A port found first and bound later could be taken in between.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            self._pipes[rank].send((function, rank, world_size, store.port, backend, always_ring, args))
        results = []
        for rank in range(world_size):
            if not self._pipes[rank].poll(timeout):
                self.close()
                raise TimeoutError(f"Rank {rank} of {world_size} has not answered for {timeout} s: it hangs.")
            results.append(torch.load(io.BytesIO(self._pipes[rank].recv_bytes()), weights_only=False))
        failures = [(rank, text) for rank, (ok, text) in enumerate(results) if not ok]
        if failures:
            self.close()  # the processes may be in different states
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failures))
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # on SIGTERM a training would first finish its step
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []


def join_group(rank: int, world_size: int, port: int, backend: str = "gloo", seconds: float = 60) -> None:
    """Makes this process one of a group on this machine, as if a launcher had started it."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": backend == "gloo"}
    os.environ.update({name: str(value) for name, value in launched.items()})
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    store, limit = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)


@contextlib.contextmanager
def ring_of(gathered: int, world_size: int) -> Iterator[None]:
    """A context in which a ring has blocks of the texts of so many processes, if all of them share a batch."""
    from hf_infcl.loss import strategies

    def choose(size: int, *sizes: Any) -> Any:
        of_block = gathered if size == world_size else 1
        return strategies.Exchange(size // of_block, of_block, 0.0)

    machines = mock.patch.dict(os.environ, HF_INFCL_RING_GROUP=str(gathered))
    forgotten = mock.patch.object(strategies, "_machines", WeakKeyDictionary())
    with machines, forgotten, mock.patch.object(strategies, "choose_exchange", choose):
        yield


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, rank, world_size, port, backend, always_ring, args = pipe.recv()
        except EOFError:
            return
        leave_out_of_collections()  # also the modules that the function needs
        try:
            join_group(rank, world_size, port, backend)
            dist.barrier()  # a job without communication could end and leave the group before others have joined
            with ring_of(int(always_ring), world_size) if always_ring else contextlib.nullcontext():
                answer = _as_bytes(True, function(rank, world_size, *args))
        except BaseException:
            answer = _as_bytes(False, traceback.format_exc())
        with contextlib.suppress(Exception):
            forget()
        pipe.send_bytes(answer)


def _as_bytes(*answer: Any) -> bytes:
    """The answer of a rank. multiprocessing would send each tensor as a shared file, over a connection of its own."""
    saved = io.BytesIO()
    torch.save(answer, saved)
    return saved.getvalue()


def forget() -> None:
    """Leaves the group, frees cached memory, and resets accelerate's state and torch's precision for the next job."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate has no other way to begin anew
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.cuda.empty_cache()  # tests in other processes need it
    without_tf32()


def without_tf32() -> None:
    """Turns TF32 off, which transformers (first name) and accelerate (second name) enable for compiled models."""
    torch.backends.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # which torch.export reads, and refuses to read after the first line alone


class FreshRanks:
    """`Ranks` with new processes for each job, because FSDP2 keeps state of earlier groups.

    With "gloo" a job can use it on CPUs, which accelerate allows only on accelerators.
    """

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", **options: Any
    ) -> list[Any]:
        pool = Ranks()
        try:
            job = (
                (_as_on_accelerators, world_size, function, args)
                if backend == "gloo"
                else (function, world_size, *args)
            )
            return pool.run(*job, backend=backend, **options)
        finally:
            pool.close()


def on_ranks(world_size: int = 0, *, fresh: bool = False, **options: Any) -> Callable[..., Any]:
    """Makes a test of a function of rank, world size and fixtures, which the test calls on every rank of a group.

    Args:
        world_size: the number of ranks; by default, the parameter ``world_size`` of the test.
        fresh: the ranks are new processes.
        options: those of `Ranks.run`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, _, *names = inspect.signature(function).parameters
        pool = "fresh_ranks" if fresh else "ranks"

        @functools.wraps(function)
        def test(*of_rank: Any, **fixtures: Any) -> None:
            if of_rank:
                function(*of_rank)
            else:
                size = world_size or fixtures["world_size"]
                fixtures[pool].run(test, size, *(fixtures[name] for name in names), **options)

        asked = [pool, *names, *([] if world_size else ["world_size"])]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _as_on_accelerators(rank: int, world_size: int, function: Callable[..., Any], args: tuple) -> Any:
    as_on_accelerators()
    return function(rank, world_size, *args)


def as_on_accelerators() -> None:
    """Lets this process train with FSDP2 on a CPU."""
    from accelerate import DistributedType, PartialState

    os.environ["ACCELERATE_USE_CPU"] = "false"
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


TWO_PROCESSES = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def launched(
    function: Callable[..., Any],
    *args: Any,
    options: Sequence[str] = TWO_PROCESSES,
    nodes: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:
    """Calls a function in two processes, which torchrun's agent starts and monitors like the processes of a script.

    Args:
        options: the options of torchrun.
        nodes: the number of agents, each of which represents a machine.
        variables: of the environment of the agents.

    Returns:
        The worst exit code of the launchers, and everything that launchers and processes printed until all had ended.

    Raises:
        TimeoutError: the processes have not ended after 120 s. The message contains what they have printed.
    """
    with tempfile.NamedTemporaryFile("r") as printed:
        end_of_all, held = context().Pipe(duplex=False)  # a process whose launcher was killed still holds it open
        job = (held, printed.name, options, dict(variables), function, *args)
        launchers = [context().Process(target=_launch, args=job) for _ in range(nodes)]
        for launcher in launchers:
            launcher.start()
        held.close()
        end = time.monotonic() + 120
        for launcher in launchers:
            launcher.join(max(0, end - time.monotonic()))
        if not end_of_all.poll(max(0, end - time.monotonic())):
            for launcher in launchers:
                launcher.terminate()  # the launcher then ends its processes
                launcher.join()
            raise TimeoutError(f"The launched processes hang. They have printed:\n{printed.read()}")
        return max((launcher.exitcode for launcher in launchers), key=abs), printed.read()


def alone(function: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """Calls a function in a new process without a launcher; returns its exit code and everything that it printed.

    Raises:
        TimeoutError: as `launched` does.
    """
    with tempfile.NamedTemporaryFile("r") as printed:
        process = context().Process(target=_main, args=(printed.name, function, *args))
        process.start()
        process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"The process hangs. It has printed:\n{printed.read()}")
        return process.exitcode, printed.read()


def without_os_exit() -> Any:
    """A context for a command in a launched process. The launcher's agent waits until a function ends."""
    return mock.patch.object(os, "_exit", sys.exit)


def _launch(
    held: Any, path: str, options: Sequence[str], variables: dict[str, str], function: Callable[..., Any], *args: Any
) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    _print_to(path)
    os.environ.update(variables)
    start_method = "spawn" if torch.cuda.is_available() else "fork"
    config, _, _ = config_from_args(parse_args(["--start-method", start_method, *options, "script"]))
    elastic_launch(config, _main)(path, function, *args)


def _main(path: str, function: Callable[..., Any], *args: Any) -> None:
    """Calls the function as an interpreter runs a script: it prints its error and can outlive its launcher."""
    mp._prctl_pr_set_pdeathsig(0)  # when the launcher dies, torch would have the kernel send SIGINT to this process
    _print_to(path)
    try:
        function(*args)
    except Exception:
        traceback.print_exc()
        raise


def _print_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
