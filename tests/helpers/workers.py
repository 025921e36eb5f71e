"""The processes among which pytest-xdist deals the tests out: forks, as theirs are, of one that has imported torch."""

import functools
import multiprocessing as mp
import os
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

# What is imported once for all processes of the tests. The server ignores what it cannot import.
PRELOADED = [
    "helpers.interpreted",  # the first, for Triton reads what it sets
    *("helpers.demo", "helpers.evaluation", "helpers.parity", "helpers.trainers", "torch.distributed.run"),
    *("setuptools", "torch._dynamo.backends.common", "torch._inductor.pattern_matcher"),  # of compiled models
    *("torch._inductor.debug", "torch.distributed.tensor.experimental._func_map"),  # of these as well
    *("evaluate", "hypothesis.strategies", "matplotlib.figure", "scipy.stats", "sentence_transformers"),  # of the tests
    "helpers.frozen",  # the last, for it acts on what has been imported
]


@functools.cache
def server() -> Any:
    """The multiprocessing context whose processes are forks of a server that has imported the packages.

    The imports take seconds, longer than most tests.
    """
    forks = mp.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # so that the server finds helpers
        forkserver._forkserver.ensure_running()
    return forks


def fork_workers() -> None:
    """Makes the workers of this process forks, instead of interpreters that each import the packages anew."""
    from execnet import gateway_io

    gateway_io.create_io = _forked


def _forked(spec: Any, execmodel: Any) -> Any:
    """A forked worker, in place of an interpreter that reads from stdin, and writes to stdout, what execnet sends."""
    from execnet.gateway_base import Popen2IO

    stdin, to_worker = server().Pipe(duplex=False)
    from_worker, stdout = server().Pipe(duplex=False)
    process = server().Process(target=_work, args=(stdin, stdout, os.environ.get("PYTHONPATH", "")))
    process.start()
    for end in (stdin, stdout):
        end.close()
    files = (os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((to_worker, "wb"), (from_worker, "rb")))
    io = Popen2IO(*files, execmodel)
    io.wait, io.kill = process.join, process.kill
    return io


def _work(stdin: Connection, stdout: Connection, path: str) -> None:
    import torch

    os.environ["PYTHONPATH"] = path  # instead of the server's
    for end, descriptor in ((stdin, 0), (stdout, 1)):
        os.dup2(end.fileno(), descriptor)
        end.close()
    if torch.cuda.device_count():  # CUDA might not survive the fork
        os.execv(sys.executable, [sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"])
    forkserver._forkserver.ensure_running = lambda: None  # its own processes are forks of the same server
    mp.set_start_method(None, force=True)  # those that it starts otherwise, as loaders do, are not
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", 1, closefd=False)
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
