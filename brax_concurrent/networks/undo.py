"""Methods that add to a graph add all that they are to, or, where they fail, nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def undo_on_error(*methods: str) -> Callable[[C], C]:
    """A class whose methods of these names leave what `_lists` names as it was if they raise an exception.

    Without it, a layer that was refused would have left weights and a name behind, and could not be added again.

    Args:
      methods: names. The class has `_lists()`, lists and dicts that only grow at their ends, and `batch_norms`.
    """

    def decorate(cls: C) -> C:
        for name in methods:
            setattr(cls, name, _undoing(getattr(cls, name)))
        return cls

    return decorate


def _undoing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_norms, lengths = self.batch_norms, [len(each) for each in self._lists()]
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.batch_norms = batch_norms
            for each, length in zip(self._lists(), lengths, strict=True):
                while len(each) > length:
                    each.popitem() if isinstance(each, dict) else each.pop()
            raise

    return call
