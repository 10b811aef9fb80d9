"""From sites to the modules that they name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hookline.errors import SiteError
from hookline.hooks import unreachable
from hookline.hooks.torch_private import is_scripted
from hookline.sites import Pattern, Site, label, named_exactly, resolve

__all__ = ["modules_at", "sites_of"]


def modules_at(model: nn.Module, sites: Iterable[Site]) -> dict[str, nn.Module]:
    """The modules of some sites, by path.

    Raises:
        SiteError: One of them is not in the model any more.
    """
    modules = dict(model.named_modules())
    paths = dict.fromkeys(site.path for site in sites)
    gone = next((path for path in paths if path not in modules), None)
    if gone is not None:
        raise SiteError(f'"{gone}" was taken out of the model since its sites were chosen; choose them again.')
    return {path: modules[path] for path in paths}


def sites_of(model: nn.Module, pattern: Pattern, ports: str | Iterable[str]) -> list[Site]:
    """The sites that a pattern names, as ``resolve`` finds them.

    Raises:
        SiteError: It names nothing, or gives the very name of a module whose calls cannot be seen, or finds none but
            such.
        ArgumentError, OptionError: As for ``resolve``.
    """
    sites = resolve(model, pattern, ports)
    modules = modules_at(model, sites)
    hidden = [path for path, module in modules.items() if unreachable(module)]
    if hidden:
        exactly = modules if len(hidden) == len(modules) else named_exactly(model, pattern)
        for path in hidden:
            if path in exactly:
                raise SiteError(_nothing_to_see(path, modules[path]))
    return sites


def _nothing_to_see(path: str, module: nn.Module) -> str:
    if is_scripted(module):
        advice = f'Record the Python model before torch.jit.script or trace, or leave it out: "!{label(path)}".'
    elif any(True for _ in module.children()):
        advice = f'Name what it holds: "{path + "." * bool(path)}*".'
    else:
        advice = f'Leave it out: "!{label(path)}".'
    return f'nothing can be seen at "{label(path)}": {unreachable(module)}. {advice}'
