"""Checkpoints of a training run, written by Orbax: each is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_KEPT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, is another run's, or could not be written."""


class Checkpoints:
    """The checkpoints in a folder, by iteration; the last two are kept.

    Orbax writes each into a folder with a temporary name, which it renames when all is written, and deletes the oldest
    only then: a process that is killed, or a disk that is full, leaves those before.

    Args:
        folder: where they are; made if it is not there.

    Raises:
        CheckpointError: there is something else, or it cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        if not self.folder.is_dir() and (self.folder.exists() or self.folder.is_symlink()):
            raise CheckpointError(f"{self.folder} is no folder, so that no checkpoint can be there: move it away")
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        try:
            with _quiet():
                self._manager = ocp.CheckpointManager(self.folder, options=options)
        except Exception as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {_reason(error)}") from error

    def latest(self) -> int | None:
        """The iteration of the newest, None if there is none."""
        return self._manager.latest_step()

    def save(self, iteration: int, tree: Any, about: dict[str, Any]) -> None:
        """Write a checkpoint.

        Args:
            iteration: greater than that of any before.
            tree: pytree of JAX arrays.
            about: what JSON can hold.

        Raises:
            CheckpointError: it could not be written; those before are as they were.
        """
        leaves = _leaves(tree)
        kinds = {name: _kind(leaf) for name, leaf in leaves.items()}
        contents = {"about": about, "arrays": kinds, "digest": _digest(leaves.values())}
        arrays = {str(i): leaf for i, leaf in enumerate(leaves.values())}
        items = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), contents=ocp.args.JsonSave(contents))
        try:
            with _quiet():
                self._manager.save(iteration, args=items)
        except Exception as error:  # what Orbax and TensorStore raise has no class in common
            for rest in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(rest, ignore_errors=True)
            text = f"cannot write a checkpoint into {self.folder}: {_reason(error)}"
            raise CheckpointError(f"{text}; {self._before()}") from error

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint.

        Args:
            like: pytree of arrays with the structure, shapes and dtypes that it must have.

        Returns:
            Its iteration, its tree and `about`.

        Raises:
            CheckpointError: there is none, it is damaged, or it has other arrays; the message names the first.
        """
        iteration = self.latest()
        if iteration is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        path = self.folder / str(iteration)
        leaves = _leaves(like)
        lacking = [name for name in ("arrays", "contents") if not (path / name).is_dir()]
        if lacking:
            text = f"{path} is damaged or no checkpoint of a training run here: it lacks {' and '.join(lacking)}"
            raise CheckpointError(text + self._earlier(iteration))
        contents = self._read(path, iteration, contents=ocp.args.JsonRestore())["contents"]
        try:
            about, found, digest = contents["about"], contents["arrays"], contents["digest"]
        except (KeyError, TypeError) as error:
            text = f"{path} is no checkpoint of a training run here: it lacks {error}"
            raise CheckpointError(text + self._earlier(iteration)) from error
        for name in dict.fromkeys([*leaves, *found]):
            expected = _kind(leaves[name]) if name in leaves else "nothing"
            if found.get(name, "nothing") != expected:
                text = f"expected {expected} as {name}, found {found.get(name, 'nothing')}"
                raise CheckpointError(f"{path} is a checkpoint of another run: {text}")
        abstract = {str(i): ocp.utils.to_shape_dtype_struct(leaf) for i, leaf in enumerate(leaves.values())}
        arrays = self._read(path, iteration, arrays=ocp.args.StandardRestore(abstract))["arrays"]
        restored = [arrays[str(i)] for i in range(len(leaves))]
        if _digest(restored) != digest:
            text = f"{path} is damaged: its numbers are not those that were saved"
            raise CheckpointError(text + self._earlier(iteration))
        return iteration, jax.tree.unflatten(jax.tree.structure(like), restored), about

    def close(self) -> None:
        """Let go of the folder."""
        self._manager.close()

    def _read(self, path: Path, iteration: int, **items: Any) -> Any:
        try:
            with _quiet():
                return self._manager.restore(iteration, args=ocp.args.Composite(**items))
        except Exception as error:
            text = f"{path} is damaged or no checkpoint of a training run here: {_reason(error)}"
            raise CheckpointError(text + self._earlier(iteration)) from error

    def _earlier(self, iteration: int) -> str:
        """What to do without that checkpoint."""
        steps = [step for step in self._manager.all_steps() if step != iteration]
        if not steps:
            return "; there is no other: train in another folder"
        return f"; without {self.folder / str(iteration)} a resumed run goes on from iteration {max(steps)}"

    def _before(self) -> str:
        self._manager.reload()
        steps = self._manager.all_steps()
        return f"the last good one is that of iteration {max(steps)}" if steps else "there is none before it"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's log, to which its threads write traces of errors that are raised as well."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _digest(arrays: Iterable[Any]) -> str:
    """Orbax notices files that are cut short or missing, but no changed bits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _reason(error: Exception) -> str:
    """What an error says, in one line; TensorStore gives the system's errors by number, in a text of many lines."""
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(number[1]))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
