"""One run at a time in a folder, which all processes can write to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

from filelock import FileLock, Timeout

from .collectives import Processes

# Trainer neither pushes files whose names begin with an underscore nor regards them as checkpoints.
LOCK_NAME = "_run.lock"

logger = logging.getLogger(__name__)


def check_writable(folder: str | Path, option: str = "output_dir") -> None:
    """Creates the folder that an option names, and raises a ValueError if no file can be written to it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"Nothing can be written to {option} {folder}: {error}. Choose another {option}.") from error


@contextmanager
def locked(output_dir: str | Path, *, locks: bool | None = None, shared: bool = True) -> Iterator[None]:
    """Keeps other runs from training in the same folder; collective. The lock ends with the process.

    Args:
        locks: whether this process takes the lock; by default, only the main process does. If every machine has its own
            folder, one process of each machine must.
        shared: whether all processes write to the folder, which must then be the same for all of them.

    Raises:
        ValueError: on every process, if another run holds the lock, or if the folder of a process is not writable or
            differs from that of the process that takes the lock.
    """
    processes = Processes()
    locks = processes.rank == 0 if locks is None else locks
    lock = FileLock(Path(output_dir, LOCK_NAME), timeout=0)

    def refuse(problem: str) -> None:
        for rank, text in enumerate(processes.gather_objects(problem)):
            if text:
                raise ValueError(text if rank == 0 else f"On rank {rank}: {text}")

    problem = ""
    try:
        try:
            if locks or shared:
                check_writable(output_dir)
            if locks:
                lock.acquire()
        except ValueError as error:
            problem = str(error)
        except Timeout:
            problem = (
                f"Another run is training in {output_dir}. Choose another output_dir, or end that run first. If its "
                "launcher was killed, some of its processes may still be running. If this is one run on several "
                "machines that share the folder, leave save_on_each_node off. If nothing is running, remove "
                f"{lock.lock_file}: some file systems keep it after a run that was killed."
            )
        except (OSError, NotImplementedError) as error:  # the file system has no locks
            logger.warning(
                f"{lock.lock_file} cannot be locked ({error}), so a second run in this folder is not refused."
            )
        refuse(problem)
        if shared:
            refuse(_not_shared(output_dir, processes, marks=locks))
        yield
    finally:
        lock.release()


def _not_shared(output_dir: str | Path, processes: Processes, *, marks: bool) -> str:
    """A sentence if this process's output_dir is not that of any process with ``marks``; otherwise empty; collective.

    The processes with ``marks`` put a new file into their folders, and every process looks for these files in its own.
    """
    mark = problem = ""
    with ExitStack() as files:
        if marks:
            try:
                # The name of the mark is new, so that no file system can have cached whether it is there.
                mark = Path(files.enter_context(NamedTemporaryFile(prefix="_", dir=output_dir)).name).name
            except OSError as error:
                problem = f"No file can be created in output_dir {output_dir}: {error}. Choose another output_dir."
        names = processes.gather_objects(mark)
        is_shared = any(Path(output_dir, name).exists() for name in names if name)
        processes.agree([])  # the marks stay until all processes have looked for them
    return (
        problem
        if is_shared or problem
        else f"output_dir {output_dir} is not the folder in which checkpoints are completed. Choose a folder that "
        "all machines share, or let each machine complete its own checkpoints with save_on_each_node=True."
    )
