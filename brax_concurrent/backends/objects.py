"""Machine code kept on disk between processes, named by a hash of what it was made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import llvmlite

ENVIRONMENT = "BRAX_CONCURRENT_CACHE"


def default_directory() -> Path:
    """`$BRAX_CONCURRENT_CACHE`, else `brax_concurrent` under the user's cache directory.

    Where there is neither, a path at which nothing can be kept.
    """
    if os.environ.get(ENVIRONMENT):
        return Path(os.environ[ENVIRONMENT])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brax_concurrent"
    except RuntimeError:  # a user without a home
        return Path(os.devnull)


class ObjectCache:
    """Files by key. Writing is atomic; a directory that cannot be used only costs the time to compile again.

    A file begins with a hash of its key and contents. One that was damaged, cut short or renamed is as if it were not
    there: what is read here is run.

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
            stored = (self.directory / key).read_bytes()
        except OSError:
            return None
        digest, data = stored[: hashlib.sha256().digest_size], stored[hashlib.sha256().digest_size :]
        return data if digest == _digest(key, data) else None

    def put(self, key: str, data: bytes) -> None:
        """Store bytes under `key`."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(key, data) + data)
                os.replace(temporary, self.directory / key)
            except BaseException:
                os.unlink(temporary)
                raise


def _digest(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + data).digest()
