"""From sites to the modules that they name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hookline.errors import SiteError
from hookline.hooks import unreachable
from hookline.hooks.torch_private import is_scripted
from hookline.sites import Pattern, Site, label, named_exactly

__all__ = ["modules_at", "refuse_unreachable"]


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


def refuse_unreachable(model: nn.Module, pattern: Pattern, sites: Iterable[Site]) -> None:
    """Refuse a pattern that gives the very name of a module whose calls cannot be seen, or finds none but such.

    Args:
        model: The model.
        pattern: The pattern.
        sites: What it names.

    Raises:
        SiteError: It does.
    """
    modules = modules_at(model, sites)
    hidden = [path for path, module in modules.items() if unreachable(module)]
    if not hidden:
        return
    exactly = modules if len(hidden) == len(modules) else named_exactly(model, pattern)
    path = next((path for path in hidden if path in exactly), None)
    if path is None:
        return
    children = [name for name, _ in modules[path].named_children()]
    advice = f'Name what it holds: "{path + "." * bool(path)}*".' if children else f'Leave it out: "!{label(path)}".'
    if is_scripted(modules[path]):
        advice = f'Record the Python model before torch.jit.script or trace, or leave it out: "!{label(path)}".'
    raise SiteError(f'nothing can be seen at "{label(path)}": {unreachable(modules[path])}. {advice}')
