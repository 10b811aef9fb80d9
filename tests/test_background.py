"""Threads of our own: they compute alone, and are waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hookline.store.background import Background, use_one_core


def test_a_thread_on_one_core_leaves_the_others_as_they_are() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert Background(torch.get_num_threads, one_core=True).result() == 1
        assert torch.get_num_threads() == 3
        assert Background(torch.get_num_threads).result() == 3

        def with_a_child() -> tuple[int, int, int]:
            mine = torch.get_num_threads()
            use_one_core()
            return mine, torch.get_num_threads(), Background(torch.get_num_threads).result()

        assert Background(with_a_child).result() == (3, 1, 3)
    finally:
        torch.set_num_threads(before)


def test_its_result_and_its_error() -> None:
    def fail() -> None:
        raise ValueError("so it is")

    assert Background(lambda: 7).result() == 7
    failed = Background(fail)
    failed.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="so it is"):
            failed.result()


def test_it_runs_beside_its_caller_and_is_waited_for() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> bool:
        told = go.wait(10)
        time.sleep(0.2)  # so that a wait that does not wait is over before
        ended.set()
        return told

    beside = Background(work)
    assert not ended.is_set()
    go.set()
    beside.wait()
    assert ended.is_set()
    assert beside.result()


def test_without_threads_it_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = torch.get_num_threads()
    assert Background(threading.get_ident, one_core=True).result() == threading.get_ident()
    assert torch.get_num_threads() == before
