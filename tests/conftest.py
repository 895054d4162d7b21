"""What all tests share: measured costs are kept in a folder of their own, never the user's."""

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported; processes that tests start inherit it."""
    folder = tempfile.mkdtemp(prefix="asyncpipe-cache-")
    os.environ["ASYNCPIPE_CACHE"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
