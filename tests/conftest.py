"""What holds for all tests. Their fixtures are in helpers/fixtures.py."""

import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
from helpers import workers

# pytest --hypothesis-profile=long
hypothesis.settings.register_profile("long", max_examples=10_000, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures, or has the processes forked to which the tests are dealt out."""
    # A script starts what it runs in the background with Ctrl-C ignored, and so would be all processes of the tests.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        workers.fork_workers()  # this process imports nothing that takes seconds
    else:
        gc.disable()  # a third of the imports and of the collection of the tests would be searches for garbage
        config.pluginmanager.import_plugin("helpers.fixtures")


def pytest_collection_finish() -> None:
    gc.enable()
