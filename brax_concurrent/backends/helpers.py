"""Threads that help out, and that nobody waits for when the process ends: a task that never ends holds one for good."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

_Inbox = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"]]
_idle: list[_Inbox] = []  # of the threads that have nothing to do, the last one to finish last

os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


def start(function: Callable[[], Any]) -> Future[Any]:
    """Call a function on a thread of its own, at once: an idle one, or else a new one.

    The thread lets go of the function before the future is done. A call that has not begun can be cancelled.

    Raises:
      RuntimeError: the interpreter starts no more threads.
    """
    future: Future[Any] = Future()
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        Thread(target=_serve, args=(inbox,), name="brax_concurrent", daemon=True).start()
    inbox.put((function, future))
    return future


def _serve(inbox: _Inbox) -> None:
    while True:
        function, future = inbox.get()
        result, failure = None, None
        if not future.set_running_or_notify_cancel():
            del function, future
            _idle.append(inbox)
            continue
        try:
            result = function()
        except BaseException as error:  # it is the caller's
            failure = error
        del function
        _idle.append(inbox)
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
        del future, result, failure
