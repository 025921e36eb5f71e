"""Reads from the Hub, which is asked once. If it does not answer, earlier downloads are used."""

import difflib
import inspect
import os
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from huggingface_hub import RepoCard, constants
from huggingface_hub.utils import http_backoff, logging

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
logger = logging.get_logger(__name__)


def hub_asked_once(source: str) -> AbstractContextManager[object]:
    """The context in which a model or a data set is loaded, with the Hub's client offline if the Hub does not answer.

    The libraries would ask for each file, and try again for 24 seconds each time. For a path nothing is asked.
    """
    is_path = os.path.exists(source) or source.startswith((".", os.sep))
    return patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not (is_path or hub_answers()))


def asks_hub_once(load: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function, whose first argument is what it loads, with `hub_asked_once`."""

    @wraps(load)
    def loading(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with hub_asked_once(str(inspect.signature(load).bind(*args, **kwargs).args[0])):
            return load(*args, **kwargs)

    return loading


@asks_hub_once
def stated_licence(name: str, kind: str = "model") -> str | None:
    """The licence, or several in one line, that the card of a model or a dataset states, in its folder or on the Hub.

    None if none is stated, or the card cannot be read. ``kind`` is "model" or "dataset".
    """
    path = Path(name, "README.md")
    if not path.is_file() and os.path.exists(name):
        return None
    try:
        stated = RepoCard.load(path if path.is_file() else name, repo_type=kind).data.get("license")
    except Exception as error:  # of the Hub's client, of its HTTP library or of YAML
        logger.warning("The model card states no licence for %s, because its own card cannot be read: %s", name, error)
        return None
    return ", ".join(stated) if isinstance(stated, list) else stated


def hub_answers() -> bool:
    """Whether the Hub can be reached, after two attempts; an answer holds for up to a minute."""
    return _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # the second attempt is no news
    try:
        http_backoff("HEAD", endpoint, max_retries=1, retry_on_status_codes=(), timeout=10)
    except Exception:  # of the library that speaks HTTP, which differs between releases
        return False
    finally:
        logging.set_verbosity(verbosity)
    return True


def path_words(name: str) -> str:
    """The rest of a sentence which says that no folder has this name; empty if a Hub id may have been meant.

    A path was meant if the name begins like one, or if its first folder or a path of a similar name exists.
    """
    parts = Path(name).parts
    begins_as_path, near = name.startswith((".", os.sep)), _path_near(parts)
    is_path = near or begins_as_path or (len(parts) > 1 and os.path.isdir(parts[0]))
    if os.path.exists(name) or not is_path:
        return ""
    forms = {unicodedata.normalize("NFC", path) for path in (near, name.rstrip("/"))}
    same = ", the same name in another Unicode normalisation: rename one" if len(forms) == 1 else ""
    but = f", but there is {near!r}{same}" if near else ""
    where = "" if os.path.isabs(name) else f" A path is relative to {os.getcwd()}."
    return f"{but}.{where}" + ("" if begins_as_path else " The Hub has nothing of this name, or could not be asked.")


def _path_near(parts: Sequence[str]) -> str:
    """The existing path whose folders have names similar to these; empty if there is none."""
    path = ""
    for part in parts:
        if not os.path.exists(os.path.join(path, part)):
            try:
                names = os.listdir(path or ".")
            except OSError:  # a file, or a folder that may not be read
                return ""
            forms = {unicodedata.normalize("NFC", name): name for name in names}
            if not (near := difflib.get_close_matches(unicodedata.normalize("NFC", part), forms, n=1)):
                return ""
            part = forms[near[0]]
        path = os.path.join(path, part)
    return path


def not_there(begin: str, source: str, error: BaseException) -> str:
    """The sentence for a name that is no folder, and that the Hub does not know or cannot be asked for.

    ``begin`` is such as "There is no dataset"; ``error`` is a ConnectionError if the Hub could not be asked.
    """
    if words := path_words(source):
        return f"{begin} at {source!r}: no such folder exists{words}"
    if not isinstance(error, ConnectionError):
        return f"{begin} at {source!r}, neither in a local folder nor on the Hub: {error}"
    return (
        f"{begin} at {source!r}: no local folder has this name, nothing of this name was downloaded before, "
        f"and the Hub could not be reached. Check the name; a path is relative to {os.getcwd()}."
    )
