"""What a recording says of its model: modules, versions, time."""

from __future__ import annotations

import functools
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from hookline.hooks import original_class
from hookline.record.recording import module_info
from hookline.sites import PORTS, Site, canonical_paths
from hookline.store import ModuleInfo

__all__ = ["described", "info_of"]


def described(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, ModuleInfo]:
    """The modules as the recording has them."""
    aliases: dict[str, list[str]] = {}
    for alias, path in canonical_paths(model).items():
        if alias != path:
            aliases.setdefault(path, []).append(alias)
    return {path: module_info(module, tuple(aliases.get(path, ()))) for path, module in modules.items()}


def info_of(model: nn.Module, sites: list[Site]) -> dict[str, Any]:
    """Versions, model, sites, ports and time."""
    seen = {site.port for site in sites}
    return {
        "hookline": _version(),
        "torch": str(torch.__version__),
        "model": original_class(model).__name__,
        "sites": [str(site) for site in sites],
        "ports": [port for port in PORTS if port in seen],
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@functools.cache
def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:
        return "unknown"
