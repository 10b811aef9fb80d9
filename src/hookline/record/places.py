"""From sites to the modules that they name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hookline.errors import ArgumentError, SiteError
from hookline.hooks import check_module
from hookline.sites import Site, label

__all__ = ["modules_at"]


def modules_at(model: nn.Module, sites: Iterable[Site]) -> dict[str, nn.Module]:
    """The modules of some sites, by path.

    Raises:
        SiteError: One of them is not in the model any more.
        ArgumentError: One of them cannot be hooked.
    """
    modules = dict(model.named_modules())
    paths = dict.fromkeys(site.path for site in sites)
    gone = next((path for path in paths if path not in modules), None)
    if gone is not None:
        raise SiteError(f'"{gone}" was taken out of the model since its sites were chosen; choose them again.')
    found = {path: modules[path] for path in paths}
    for path, module in found.items():
        try:
            check_module(module)
        except ArgumentError as error:
            raise ArgumentError(f'{label(path)}: {error} Or leave it out: "!{path}".') from None
    return found
