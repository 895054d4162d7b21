"""What all tests share: one thread a process; examples without a time limit; measured costs, and
which folders are trusted, in a folder of their own, never the user's."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The machine decides how long an example takes: a test that is slow once has not failed.
settings.register_profile("asyncpipe", deadline=None)
settings.load_profile("asyncpipe")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported; the workers and the processes of tests inherit it."""
    # A shell that starts this in the background lets it ignore Ctrl-C, and all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all modules are imported
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="asyncpipe-cache-")
    os.environ["ASYNCPIPE_CACHE"] = folder
    os.environ["ASYNCPIPE_STATE"] = f"{folder}/state"
    # The workers fill the cores; more threads in each would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Modules stay until the end, so no collection of garbage needs to go through them: a whole one
    would take seconds. Tests keep little, so that collections may be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True)
def kept_objects() -> Iterator[None]:
    """What a whole collection has left, as modules that a test has imported, is left out of later
    ones."""
    before = gc.get_stats()[2]["collections"]
    yield
    if gc.get_stats()[2]["collections"] > before:
        gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """BatchNorm and reductions round differently on several threads; ranks have one each."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, the same in every worker."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
