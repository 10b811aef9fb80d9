"""What several tests of recordings need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hookline
from hookline.record import Recording


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Gives back a recording as it is, or from the disk."""

    def put(rec: Recording) -> Recording:
        if request.param == "memory":
            return rec
        rec.save(tmp_path / "run.hookline")
        return hookline.load(tmp_path / "run.hookline")

    return put


@pytest.fixture
def zarr() -> Iterator[Any]:
    """The package, whose thread is ended before the guard looks for threads."""
    package = pytest.importorskip("zarr", minversion="3")
    yield package
    package.core.sync.cleanup_resources()
