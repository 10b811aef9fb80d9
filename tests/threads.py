"""Run several things at the same time, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*tasks: Callable[[], Any]) -> None:
    """Begin them together, and fail where one of them does."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> None:
        try:
            start.wait()
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
