"""Why a checkpoint cannot be loaded, in a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import http_backoff

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")


@contextmanager
def explained(checkpoint: str, *, needed: str = "") -> Iterator[None]:
    """Turns any error into a ValueError that says why the checkpoint, a folder or a Hub id, cannot be loaded.

    ``needed`` is the one file that is needed of a Hub repository; by default, all are.
    """
    try:
        yield
    except Exception as error:  # a damaged file makes the libraries raise exceptions of any class
        raise ValueError(_explanation(checkpoint, error, needed)) from error


def asks_hub_once(load: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that loads a model: if the Hub cannot be reached, it takes what was downloaded before.

    The libraries would ask for each of the files, and try again for 24 seconds each time. The first argument of the
    function is the model; for a path that exists nothing is asked.
    """
    first = next(iter(inspect.signature(load).parameters))

    @wraps(load)
    def loading(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        source = str(args[0] if args else kwargs[first])
        if constants.HF_HUB_OFFLINE or Path(source).exists() or _hub_answers():
            return load(*args, **kwargs)
        constants.HF_HUB_OFFLINE = True
        try:
            return load(*args, **kwargs)
        finally:
            constants.HF_HUB_OFFLINE = False

    return loading


def _hub_answers() -> bool:
    try:
        http_backoff("HEAD", constants.ENDPOINT, max_retries=1, retry_on_status_codes=(), timeout=10)
    except Exception:  # of the library that speaks HTTP, which differs between releases
        return False
    return True


def _explanation(checkpoint: str, error: BaseException, needed: str) -> str:
    causes: list[type[BaseException]] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__ or cause.__context__
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    if Path(checkpoint).exists():
        return f"{checkpoint!r} does not hold a model that can be loaded with its config and its processor: {reason}"
    of_weights = Path(checkpoint).suffix in WEIGHTS
    tried = f"There is no file {checkpoint!r}" if of_weights else f"There is no folder {checkpoint!r}"
    if HFValidationError in causes:
        return f"{tried}, and the name is not the id of a model on the Hub, such as openai/clip-vit-base-patch32."
    if LocalEntryNotFoundError in causes:
        words = " ".join(filter(None, [checkpoint, needed]))
        return (
            f"{tried}, no model of this name was downloaded before, and the Hub could not be reached. Check the name. "
            f"Without a network, run `hf download {words}` on a machine that has one, and pass "
            f"{'the folder of the printed file' if needed else 'the printed folder'}."
        )
    if RepositoryNotFoundError in causes:
        return (
            f"{tried}, and the Hub has no model of this name that you may read. Check the name. If the model is "
            "private, log in with `hf auth login`."
        )
    return f"The model {checkpoint!r} cannot be loaded: {reason}"
