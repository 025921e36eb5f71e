"""One run at a time in a folder, which all processes can write to."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from filelock import FileLock, Timeout

from .collectives import Processes

# Trainer neither pushes files whose names begin with an underscore nor regards them as checkpoints.
LOCK_NAME = "_run.lock"

logger = logging.getLogger(__name__)


@contextmanager
def _new_file(folder: str | Path, option: str) -> Iterator[str]:
    """The name of a new file in the folder that an option names; the context creates both, and removes the file."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = NamedTemporaryFile(prefix="_", dir=folder)  # noqa: SIM115 - its own errors alone are the folder's
    except OSError as error:
        raise ValueError(f"Nothing can be written to {option} {folder}: {error}. Choose another {option}.") from error
    with file:
        yield Path(file.name).name


def check_writable(folder: str | Path, option: str = "output_dir") -> None:
    """Creates the folder that an option names, and raises a ValueError if no file can be written to it."""
    with _new_file(folder, option):
        pass


@contextmanager
def locked(output_dir: str | Path, *, locks: bool, shared: bool) -> Iterator[None]:
    """Keeps other runs from training in the same folder; collective. The lock ends with the process.

    Args:
        locks: whether this process takes the lock: the main one, or one of each machine if each has its own folder.
        shared: whether all processes write to the folder, which must then be the same for all of them.

    Raises:
        ValueError: on every process, if another run holds the lock, or if the folder of a process is not writable or
            differs from that of the process that takes the lock.
    """
    processes = Processes()
    lock, mark, problem = FileLock(Path(output_dir, LOCK_NAME), timeout=0), "", ""
    try:
        with ExitStack() as files:
            try:
                if locks or shared:
                    mark = files.enter_context(_new_file(output_dir, "output_dir"))
                if locks:
                    lock.acquire()
            except ValueError as error:
                problem = str(error)
            except Timeout:
                problem = (
                    f"Another run is training in {output_dir}: choose another output_dir, or end that run first. If "
                    "its launcher was killed, some of its processes may still be running. If this is one run on "
                    "several machines that share the folder, leave save_on_each_node off. If nothing is running, "
                    f"remove {lock.lock_file}: some file systems keep it after a run that was killed."
                )
            except (OSError, NotImplementedError) as error:  # the file system has no locks
                logger.warning(
                    f"{lock.lock_file} cannot be locked ({error}), so a second run in this folder is not refused."
                )
            # Every process looks for the files of those that lock, of which no file system has cached anything yet.
            marks = processes.gather_objects(mark if locks else "")
            if shared and not problem and not any(mark and Path(output_dir, mark).exists() for mark in marks):
                problem = (
                    f"output_dir {output_dir} is not the folder in which checkpoints are completed. Choose a folder "
                    "that all machines share, or let each machine complete its own checkpoints with "
                    "save_on_each_node=True."
                )
            problems = processes.gather_objects(problem)  # after which all have looked
        for rank, text in enumerate(problems):
            if text:
                raise ValueError(text if rank == 0 else f"On rank {rank}: {text}")
        yield
    finally:
        lock.release()
