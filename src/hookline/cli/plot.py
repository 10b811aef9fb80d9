"""Draw what a recording holds into a .png or .svg file.

  hookline plot run.hookline --site layer1.0.conv1 -o maps.png
  hookline plot run.hookline --site layer1.0.conv1 --step 2 --channels 64 --scale shared -o maps.png
  hookline plot run.hookline --kind histogram --site '**:grad_output' -o gradients.svg
  hookline plot run.hookline -o flow.png

With a site it draws feature maps, without one the size of the gradients from layer to layer. Feature maps and attention
draw one tensor: name its site, and its step, call and value where there are several. Histograms take many sites.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookline.cli.parser import Parser, parser_of
from hookline.errors import OptionError, SiteError
from hookline.fp8 import whole_leaves
from hookline.record import Recording, load
from hookline.report import plot
from hookline.report.rows import select_events
from hookline.sites import PORTS, Site, label

__all__ = ["main", "parser"]

_MOST_NAMED = 5


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "FILE [options] -o PICTURE")
    made.add_argument("file", metavar="FILE", help="a recording, such as run.hookline")
    made.add_argument("-o", "--output", metavar="PICTURE", required=True, help="file to write; it ends in .png or .svg")
    made.add_argument(
        "--site", metavar="SITE", help="module or site, such as conv1, conv1:grad_output or 'layer*.conv1'"
    )
    made.add_argument("--kind", metavar="KIND", help=f"{', '.join(_KINDS)} (default: see above)")
    made.add_argument("--step", type=int, metavar="N", help="only this step")
    made.add_argument("--call", type=int, metavar="N", help="only this call of the module in its step, from 0")
    made.add_argument("--value", metavar="PATH", help="which tensor of a value that has several, such as 'output[1]'")
    made.add_argument("--batch", type=int, default=0, metavar="N", help="element of the batch (default: 0)")
    made.add_argument("--channels", type=int, default=16, metavar="N", help="how many feature maps (default: 16)")
    made.add_argument(
        "--layout", metavar="AXES", help="what the axes are: NCHW, NHWC, CHW, HW or NCL (default: a guess)"
    )
    made.add_argument(
        "--scale", default="own", metavar="SCALE", help="own, or shared by all feature maps (default: own)"
    )
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Draw and write the picture.

    Args:
        argv: What stands behind ``hookline plot``.
        own_process: Makes no difference here.
    """
    given = parser().parse_args(argv)
    kind = (given.kind or ("gradient_flow" if given.site is None else "feature_maps")).replace("-", "_")
    if kind not in _KINDS:
        raise OptionError(f"--kind is one of {', '.join(_KINDS)}; got {given.kind}")
    what = _KINDS[kind](_part(load(given.file), given), given)
    print(f"hookline: {what} -> {given.output}", file=sys.stderr)
    return 0


def _part(recording: Recording, given: argparse.Namespace) -> Recording:
    """The step and the call that were asked for."""
    events = recording.events
    for name in ("step", "call"):
        wanted = getattr(given, name)
        there = sorted({getattr(event, name) for event in events})
        if wanted is not None and wanted not in there:
            raise SiteError(f"nothing was recorded of {name} {wanted}; there is {name} {_some(there)}")
        events = [event for event in events if wanted is None or getattr(event, name) == wanted]
    return Recording(modules=recording.modules, info=recording.info, events=events)


# ---------------------------------------------------------------- the kinds


def _feature_maps(recording: Recording, given: argparse.Namespace) -> str:
    tensor, title = _one_tensor(recording, given)
    options = {"batch": given.batch, "channels": given.channels, "layout": given.layout, "scale": given.scale}
    plot.feature_maps(tensor, title=title, path=given.output, **options)
    return title


def _attention(recording: Recording, given: argparse.Namespace) -> str:
    tensor, title = _one_tensor(recording, given)
    plot.attention(tensor, title=title, path=given.output, batch=given.batch)
    return title


def _histogram(recording: Recording, given: argparse.Namespace) -> str:
    plot.histogram(recording, site=given.site, path=given.output)
    return "histogram"


def _gradient_flow(recording: Recording, given: argparse.Namespace) -> str:
    if given.site is not None:
        events = select_events(recording, given.site)
        recording = Recording(modules=recording.modules, info=recording.info, events=events)
    plot.gradient_flow(recording, path=given.output)
    return "gradient flow"


_KINDS: dict[str, Callable[[Recording, argparse.Namespace], str]] = {
    "feature_maps": _feature_maps,
    "histogram": _histogram,
    "gradient_flow": _gradient_flow,
    "attention": _attention,
}


# ---------------------------------------------------------------- one tensor


def _one_tensor(recording: Recording, given: argparse.Namespace) -> tuple[Tensor, str]:
    """The tensor to draw, and a title that says where it stood."""
    event = _one_event(recording, given)
    leaves = dict(whole_leaves(event))
    if not leaves:
        raise SiteError(f"{_site(event)} has no tensor; see: hookline show {given.file} --site '{given.site}'")
    if given.value is None and len(leaves) > 1:
        raise SiteError(f"{_site(event)} has {len(leaves)} tensors; choose one with --value: {_some(leaves)}")
    if given.value is not None and given.value not in leaves:
        raise SiteError(f"{_site(event)} has no tensor {given.value}; it has {_some(leaves)}")
    path = given.value or next(iter(leaves))
    return leaves[path], f"{_site(event)}, call {event.call} of step {event.step}"


def _one_event(recording: Recording, given: argparse.Namespace) -> Any:
    if given.site is None:
        raise OptionError("this kind of picture needs a site: pass --site, such as --site layer1.0.conv1")
    events = _of_wanted_port(select_events(recording, given.site), given.site)
    if not events:
        raise SiteError(f"{given.site} was not recorded; see: hookline show {given.file}")
    sites = dict.fromkeys(map(_site, events))
    if len(sites) > 1:
        raise SiteError(f"{given.site} names {len(sites)} sites; name one of them: {_some(sites)}")
    for name in ("step", "call"):
        numbers = sorted({getattr(event, name) for event in events})
        if len(numbers) > 1:
            raise SiteError(
                f"{next(iter(sites))} was recorded in {len(numbers)} {name}s; choose with --{name}: {_some(numbers)}"
            )
    return events[-1]


def _of_wanted_port(events: Sequence[Any], pattern: str) -> list[Any]:
    """Outputs where no port is named and there are some."""
    outputs = [event for event in events if event.port == "output"]
    names_port = pattern.rpartition(":")[2] in PORTS
    return outputs if outputs and not names_port else list(events)


def _site(event: Any) -> str:
    return str(Site(event.path, event.port))


def _some(names: Any) -> str:
    names = [label(name) if isinstance(name, str) else str(name) for name in names]
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
