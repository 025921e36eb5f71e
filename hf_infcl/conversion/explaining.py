"""Why a checkpoint cannot be loaded, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..hub import path_words

_CONFIGS = (CONFIG_NAME, ADAPTER_CONFIG_NAME)  # of a whole model, and of adapters
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")


@contextmanager
def explained(checkpoint: str, *, needed: str = "", kind: str = "model") -> Iterator[None]:
    """Turns any error into a ValueError that says why the checkpoint, a folder or a Hub id, cannot be loaded.

    ``needed`` is the one file that is needed of a Hub repository; by default, all are. ``kind`` is "model" or
    "tokenizer".
    """
    try:
        yield
    except Exception as error:  # a damaged file makes the libraries raise exceptions of any class
        raise ValueError(_explanation(checkpoint, error, needed, kind)) from error


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint with a model in the folder of a training that has not written its final one.

    A folder of this name is complete: it gets its name when all its files are written.
    """
    if any((folder / name).is_file() for name in _CONFIGS):
        return None
    found = [path.parent for name in _CONFIGS for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{name}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _explanation(checkpoint: str, error: BaseException, needed: str, kind: str) -> str:
    causes: list[type[BaseException]] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__ or cause.__context__
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    if newest := _newest_checkpoint(Path(checkpoint)):
        return (
            f"{checkpoint!r} holds no final model, because its training has not ended. Write {newest}, its newest "
            "checkpoint, in its place, or end the training (infcl train with --resume_from_checkpoint auto)."
        )
    if Path(checkpoint).exists():
        parts = " with its config and its processor" if kind == "model" else ""
        return f"{checkpoint!r} does not hold a {kind} that can be loaded{parts}: {reason}"
    of_weights = Path(checkpoint).suffix in WEIGHTS
    tried = f"There is no file {checkpoint!r}" if of_weights else f"There is no folder {checkpoint!r}"
    if words := path_words(checkpoint):
        return f"{tried} to load a {kind} from{words}"
    if HFValidationError in causes:
        return f"{tried}, and the name is not the id of a {kind} on the Hub, such as openai/clip-vit-base-patch32."
    if LocalEntryNotFoundError in causes:
        words = " ".join(filter(None, [checkpoint, needed]))
        return (
            f"{tried}, no {kind} of this name was downloaded before, and the Hub could not be reached. Check the name. "
            f"Without a network, run `hf download {words}` on a machine that has one, and pass "
            f"{'the folder of the printed file' if needed else 'the printed folder'}."
        )
    if RepositoryNotFoundError in causes:
        return (
            f"{tried}, and the Hub has no {kind} of this name that you may read. Check the name. If the {kind} is "
            "private, log in with `hf auth login`."
        )
    return f"The {kind} {checkpoint!r} cannot be loaded: {reason}"
