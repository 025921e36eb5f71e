"""A command as one of several launched processes: a mistake is told once, and all processes end together."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

from ..processes import OtherRankFailedError
from ..training.trainer import InfCLTrainer

PACKAGE = Path(__file__).parent.parent


def tell(command: str, message: str) -> None:
    """Prints an error as one line, on whichever of torchrun's or accelerate's processes comes to it first.

    That process prints before it ends. The launcher then ends the others, which need not have met the error.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The launcher's own store. The processes need not have joined a group yet.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if store.add(f"infcl/{attempt}/{message}", 1) > 1:
            return
    print(f"{command}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


@contextmanager
def mistakes_in_one_line(command: str, *, of_libraries: bool) -> Iterator[None]:
    """Ends the program with exit code 1 and one line, without a traceback, for a mistake of the user.

    A process that stops because another one failed says nothing: the other one has given the reason.

    Args:
        command: for the line.
        of_libraries: a ValueError or OSError from any library counts, as it should where data and models are opened;
            otherwise a ValueError that this package raises.
    """
    try:
        yield
    except OtherRankFailedError:
        sys.exit(1)
    except (OSError, ValueError) as error:
        if not of_libraries and not (isinstance(error, ValueError) and _raised_here(error)):
            raise
        tell(command, str(error))
        sys.exit(1)


def _raised_here(error: Exception) -> bool:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return PACKAGE in Path(traceback.tb_frame.f_code.co_filename).parents


def leave(trainer: InfCLTrainer, code: int = 0) -> None:
    """The processes end together, with this exit code and without Python's own clean-up at the end.

    On gloo a process sometimes aborted ("terminate called without an active exception") after all its work was done: in
    one of 47 runs that waited for each other here. The cause is presumed, not known, to be a thread that outlives the
    group and meets that clean-up.
    """
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.args.world_size > 1:
        atexit._run_exitfuncs()  # trackers finish here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
