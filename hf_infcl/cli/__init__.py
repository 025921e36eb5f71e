"""The command `infcl`: `check`, `train`, `evaluate` and the other commands parse options and call the rest."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import __version__
from ..options.declaring import documented
from .commands import PARSERS

# Their versions decide what happens in a run, so a bug report needs them; not all have to be installed.
PACKAGES = (
    "torch transformers accelerate datasets evaluate huggingface_hub tokenizers numpy pillow torchvision triton peft"
)


def main(command: str | None = None, words: Sequence[str] | None = None) -> None:
    """Runs one of `PARSERS` with the words of its command line; by default, as the words of this process say.

    It ends without a traceback if the reader of its output has ended, as in ``infcl ... | head``. This is the recipe of
    https://docs.python.org/3/library/signal.html#note-on-sigpipe, for both outputs.
    """
    try:
        try:
            words = list(sys.argv[1:] if words is None else words)
            _run(words if command is None else [command, *words])
        except SystemExit:
            sys.stdout.flush()  # an error within Python's clean-up at exit would be printed
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:  # outside of a training, which would save a checkpoint first
        if os.environ.get("RANK", "0") == "0":
            print("\ninfcl: ended by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        poll = select.poll()
        for number in (1, 2):
            poll.register(number, 0)  # for the end of its pipe alone
        outputs = [number for number, _ in poll.poll(0)]
        if not outputs:
            raise  # it was another pipe, such as that of a worker
        for number in outputs:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.exit(1)


def _run(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="infcl",
        description="Exact contrastive training of image-text models at any batch size.",
        epilog="commands:\n"
        + "\n".join(f"  {name:9} {re.split('[.:]( |$)', documented(kind)[0])[0]}" for name, kind in PARSERS.items())
        + "\n\n`infcl COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=PARSERS, nargs="?", metavar="COMMAND", help=", ".join(PARSERS))
    parser.add_argument("--version", action="store_true", help="print the versions that a bug report needs")
    asked = parser.parse_args(words[:1])
    if asked.version:
        print(versions())
        parser.exit()
    if (command := asked.command) is None:
        parser.print_help()
        parser.exit(2)
    reader = PARSERS[command]()
    namespace = reader.read(words[1:])
    # Imported here, because importing torch takes seconds, and neither `--help` nor a mistyped option needs it.
    from .. import trainer as training  # noqa: F401  # first, as its error names a torchvision that does not fit
    from .launched import run

    place = command if command in ("check", "train") else "embeddings" if command in ("embed", "score") else "models"
    run(getattr(importlib.import_module(f".{place}", __name__), command), reader, namespace)


def versions() -> str:
    """One line each for this package, Python, the system, every installed package of the list, and the GPUs."""
    import torch

    lines = [f"hf_infcl {__version__}", f"python {platform.python_version()}", f"system {platform.platform()}"]
    for package in PACKAGES.split():
        with suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{package} {importlib.metadata.version(package)}")
    lines.append(f"CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'}")
    lines += [f"GPU {index}: {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    return "\n".join(lines)
