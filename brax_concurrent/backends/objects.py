"""Machine code kept on disk between processes, named by a hash of what it was made from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import llvmlite

ENVIRONMENT = "BRAX_CONCURRENT_CACHE"


def default_directory() -> Path:
    """`$BRAX_CONCURRENT_CACHE`, else `brax_concurrent` under the user's cache directory."""
    if ENVIRONMENT in os.environ:
        return Path(os.environ[ENVIRONMENT])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brax_concurrent"


class ObjectCache:
    """Files by key. Writing is atomic; a directory that cannot be used only costs the time to compile again.

    Args:
        directory: where; None for `default_directory()`.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None):
        self.directory = (
            Path(directory) if directory is not None else default_directory()
        ) / f"llvm{llvmlite.__version__}"

    def get(self, key: str) -> bytes | None:
        """The stored bytes, or None."""
        try:
            return (self.directory / key).read_bytes()
        except OSError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Store bytes under `key`."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.directory)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self.directory / key)
