"""Runs a command as one of several launched processes: an error is printed once, and all processes end together."""

import argparse
import atexit
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from ..processes.collectives import OtherRankFailedError
from ..trainer.trainer import InfCLTrainer
from .parser import Parser, missing_package, print_error

PACKAGE = Path(__file__).parents[2]


@contextmanager
def mistakes_in_one_line(command: str, *, of_libraries: bool) -> Iterator[None]:
    """Turns a mistake of the user into one line and exit code 1, without a traceback.

    A process that stops because another one failed prints nothing, because the other one has printed the reason. A
    missing package that an option needs is a mistake of the user, whichever library reports it.

    Args:
        of_libraries: also treat a ValueError or OSError of any library as a mistake of the user, which is right while
            data and models are being opened; otherwise only a ValueError raised by this package.
    """
    try:
        yield
    except OtherRankFailedError:
        sys.exit(1)
    except BrokenPipeError:
        raise  # nobody reads the output any more, which is no mistake
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        is_from_here = PACKAGE in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents
        message = missing_package(error) or _raised_here_in_a_worker(error)
        if message is None and isinstance(error, (OSError, ValueError)) and (of_libraries or is_from_here):
            message = str(error)
        if message is None:
            raise
        print_error(command, message, below=not of_libraries)  # only a training or evaluation has a bar
        sys.exit(1)


def _raised_here_in_a_worker(error: Exception) -> str | None:
    """The message of a ValueError that this package raised in a worker of a data loader; None for other errors.

    torch raises the error again in the main process, with the traceback of the worker as its message.
    """
    text = str(error)
    kind = re.match(r"Caught (\w+) in DataLoader worker process", text)
    files = re.findall(r'^  File "(.+)", line \d+', text, re.MULTILINE) or [""]
    if kind is None or not isinstance(error, ValueError) or PACKAGE not in Path(files[-1]).parents:
        return None
    return re.split(rf"^(?:\w+\.)*{kind[1]}: ", text, flags=re.MULTILINE)[-1]


@record  # so the launcher's last lines are the error of the process that failed first
def run(command: Callable[..., None], parser: Parser, namespace: argparse.Namespace) -> None:
    """Runs a command with the options that its parser has read."""
    warn_once()
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        fit_workers(namespace, parser.file_of("dataloader_num_workers"))
        warn_of_bf16_on_cpu(namespace, parser.file_of("bf16"))
        command(parser, namespace)


# Their warnings are of what one process alone has met: its shards, its samples and its signals.
_OF_ONE_PROCESS = ("data.streams", "data.store", "quality.embedding", "shards", "processes")


def fit_workers(namespace: argparse.Namespace, file: str = "") -> None:
    """Tells of more workers of the data loaders than the machine has cores; those of a file become as many.

    Those of a stream stay as they are, since they decide about its order. The number is changed in place. ``file`` is
    the name of the file of options that alone sets it; empty if the user has typed it.

    Raises:
        ValueError: the environment's LOCAL_WORLD_SIZE is no number of processes.
    """
    workers = getattr(namespace, "dataloader_num_workers", None) or 0
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not local.isdecimal() or local == "0":
        raise ValueError(
            "The environment variable LOCAL_WORLD_SIZE must be the number of processes on this machine, as torchrun "
            f"sets it, got {local!r}. Unset it, or start with torchrun."
        )
    processes, there = int(local), cores()
    if workers * processes <= there or (fits := max(1, there // processes)) == workers:
        return
    each, times = (" for each process", f" × {processes} processes") if processes > 1 else ("", "")
    line = (
        f"dataloader_num_workers={workers}{times} are more than the {there} cores that are there for them, so they "
        f"take turns. Pass {fits}."
    )
    if file and not getattr(namespace, "streaming", False):
        namespace.dataloader_num_workers = fits
        line = f"Workers that load data: {fits}{each} instead of the {workers} of {file}, for the {there} cores here."
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def warn_of_bf16_on_cpu(namespace: argparse.Namespace, file: str) -> None:
    """Tells of bf16 together with ``use_cpu``; ``file`` is the name of the file that sets it, if one does."""
    if getattr(namespace, "use_cpu", False) and namespace.bf16 and os.environ.get("RANK", "0") == "0":
        of_file = f" of {file}" if file else ""
        print(f"bf16{of_file} is slower than fp32 on most processors. For fp32 pass --bf16 false.", file=sys.stderr)


def warn_once() -> None:
    """Hides warnings that the first launched process prints for all of them, and in all of them those of no use."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # which `fit_workers` tells once
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # which peft reads
    # transformers finds the ids of SigLIP's own default config outside of its vocabulary, whatever the model has.
    ids_of_siglip = logging.getLogger("transformers.configuration_utils")
    ids_of_siglip.addFilter(lambda record: "between 0 and 31999), got 4940" not in record.getMessage())
    if os.environ.get("RANK", "0") == "0":
        return

    def is_of_this_process(record: logging.LogRecord) -> bool:
        package, _, module = record.name.partition(".")
        # What other packages and these modules say may differ from process to process.
        return package != "hf_infcl" or module.startswith(_OF_ONE_PROCESS) or record.levelno > logging.WARNING

    warnings.simplefilter("ignore")
    for handler in filter(None, (logging.lastResort, *logging.root.handlers)):
        handler.addFilter(is_of_this_process)


def tell(trainer: InfCLTrainer, *lines: str) -> None:
    """Prints lines, except for empty ones, on the main process."""
    if trainer.is_world_process_zero():
        for line in filter(None, lines):
            print(line)


def leave(trainer: InfCLTrainer, code: int = 0) -> None:
    """Ends all processes together, with this exit code and without Python's clean-up at exit.

    With gloo, in one of 47 runs, a process aborted ("terminate called without an active exception") after all its work
    was done. The presumed but unproven cause is a thread that outlives the group and still runs during that clean-up.
    """
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.args.world_size > 1:
        atexit._run_exitfuncs()  # experiment trackers finish here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def cores() -> int:
    """The processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
