"""A folder with all that is needed to run a module once more: the module, its arguments, and what was around it.

::

    bundle.json            the module, its arguments and what was around it, as `codec` writes them
    tensors.safetensors    parameters, buffers, arguments, gradients, states of random numbers
    source/                the source files of classes that no package brings
    replay.py              runs it

Loading a bundle runs code of its ``source`` folder: replay your own bundles only. ``describe`` reads one and runs none.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hookline.errors import BudgetError, FormatError, OptionError
from hookline.store.folders import hidden, publish, remove, sync_folder, write_synced
from hookline.store.strict_json import READABLE, parse
from hookline.watch.codec import Decoder, Encoder
from hookline.watch.sources import Sources, import_name, local_sources
from hookline.watch.surroundings import (
    Autocast,
    RandomState,
    as_it_was,
    autocast_state,
    environment,
    fault_of,
)
from hookline.watch.zoom import Zoom, zoom

__all__ = ["LIMIT", "Bundle", "describe", "load_bundle", "write_bundle"]

LIMIT = 2_000_000_000
"""Bytes up to which a module and its arguments are stored."""

_FORMAT, _VERSION = "hookline-bundle", 1
_JSON, _TENSORS, _SOURCE, _SCRIPT = "bundle.json", "tensors.safetensors", "source", "replay.py"

_REPLAY = '''\
"""Run the module of this bundle once more, and print the operation that made the first non-finite value.

It is the same as `hookline replay` with the name of this folder. Classes come from the folder `source`, whose code is
executed: imports, definitions and constants. Where bundle.json has no module, or to try a change, give this script the
name of a function that returns the module:

    python replay.py model.py:make_model
"""

import sys
from pathlib import Path

from hookline.cli.main import main

if __name__ == "__main__":
    folder = str(Path(__file__).resolve().parent)
    sys.exit(main(["replay", folder] + (["--module", sys.argv[1]] if len(sys.argv) > 1 else [])))
'''


# ---------------------------------------------------------------- writing


def write_bundle(
    folder: str | os.PathLike[str],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad_outputs: Sequence[Tensor | None] | Mapping[int, Tensor] | None = None,
    rng: Tensor | RandomState | None = None,
    incident: Mapping[str, Any] | None = None,
    autocast: tuple[Autocast, ...] | None = None,
) -> Path:
    """Write what is needed to run a module once more.

    Args:
        folder: The bundle to make; nothing of that name may be there.
        module: As it was when the incident happened; each part's training mode is stored.
        args: What it was called with.
        kwargs: What it was called with by name.
        grad_outputs: As for ``zoom``.
        rng: As for ``zoom``.
        incident: What was found, as an object for JSON.
        autocast: As for ``zoom``.

    Returns:
        The folder. A module of which a part cannot be stored is left out, and ``left_out`` in bundle.json says why;
        its parameters and buffers are stored all the same.

    Raises:
        BudgetError: The arguments, gradients and states alone are larger than ``LIMIT``.
        OptionError: There is something of that name.
        OSError: The disk is full, or refuses.
    """
    place = Path(folder)
    if os.path.lexists(place):
        raise OptionError(f"{place} is there already. Give the bundle another name.")
    encoder, content = _content(module, tuple(args), dict(kwargs), grad_outputs, rng)
    content["incident"] = dict(incident or {})
    content["autocast"] = [
        [one.device, one.enabled, str(one.dtype).removeprefix("torch.")]
        for one in (autocast_state() if autocast is None else autocast)
    ]
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = hidden(place, "new")
    try:
        draft.mkdir()
        content["sources"] = _copy_sources(draft / _SOURCE, content)
        _write_tensors(draft / _TENSORS, encoder.tensors)
        write_synced(draft / _SCRIPT, _REPLAY.encode())
        write_synced(draft / _JSON, READABLE.encode(content).encode())
        sync_folder(draft)
        publish(draft, place)
    except BaseException:
        remove(draft)
        raise
    return place


def _content(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grad_outputs: Any,
    rng: Tensor | RandomState | None,
) -> tuple[Encoder, dict[str, Any]]:
    """The tree of bundle.json, and its tensors; a module that cannot be stored is left out with the reason."""

    def around_it(encoder: Encoder) -> dict[str, Any]:
        states = {"cpu": rng} if isinstance(rng, Tensor) else rng
        grads = dict(grad_outputs) if isinstance(grad_outputs, Mapping) else grad_outputs
        return {
            "arguments": _or_none(encoder, (args, kwargs), "arguments"),
            "grad_outputs": _or_none(encoder, grads, "grad_outputs"),
            "rng": _or_none(encoder, None if states is None else dict(states), "rng"),
        }

    about: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "module": None,
        "module_class": f"{type(module).__module__}:{type(module).__qualname__}",
        "training": module.training,
        "grad": torch.is_grad_enabled() or grad_outputs is not None,
        "environment": environment(),
    }
    encoder = Encoder(import_name)
    node = encoder.encode(module, "module")
    if not (left_out := list(encoder.problems)):
        about |= around_it(encoder)
        if (size := _size(encoder)) <= LIMIT:
            return encoder, about | {"module": node, "left_out": encoder.problems}
        left_out = [f"module: with its arguments it has {size:,} bytes, more than the limit of {LIMIT:,}"]
    encoder = Encoder(import_name)
    about |= around_it(encoder)
    if (size := _size(encoder)) > LIMIT:
        raise BudgetError(f"the arguments of the module have {size:,} bytes, the limit of a bundle is {LIMIT:,}.")
    state = dict((*module.named_parameters(), *module.named_buffers()))
    if size + sum(one.numel() * one.element_size() for one in state.values()) <= LIMIT:
        about["state"] = _or_none(encoder, state, "state")
    return encoder, about | {"left_out": left_out + encoder.problems}


def _size(encoder: Encoder) -> int:
    return sum(one.numel() * one.element_size() for one in encoder.tensors)


def _or_none(encoder: Encoder, value: Any, place: str) -> dict[str, Any] | None:
    known = len(encoder.problems)
    node = encoder.encode(value, place)
    return node if len(encoder.problems) == known else None


def _write_tensors(file: Path, tensors: list[Tensor]) -> None:
    with torch.no_grad():
        save_file({str(n): _plain(one) for n, one in enumerate(tensors)}, file, {"format": "pt"})
    with open(file, "rb+") as written:
        os.fsync(written.fileno())


def _plain(tensor: Tensor) -> Tensor:
    """In memory of its own, in row-major order, on the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _copy_sources(folder: Path, content: dict[str, Any]) -> dict[str, str]:
    """Copy the files of the classes and functions that are named; returns the file of each module."""
    files: dict[str, str] = {}
    for name, file in local_sources(_modules_named(content)).items():
        if name == "__main__":
            target = file.name
        else:
            target = name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
        while target in files.values():
            target = target.removesuffix(".py") + "_.py"
        files[name] = target
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / target)
    return files


def _modules_named(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for kind in ("module", "import", "mapping", "named", "object", "enum"):
            name = node.get(kind)
            name = name[0] if kind == "enum" and isinstance(name, list) else name
            if isinstance(name, str) and ":" in name:
                yield name.partition(":")[0]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _modules_named(child)


# ---------------------------------------------------------------- reading


@dataclasses.dataclass
class Bundle:
    """What was read from a bundle, ready to be run.

    Attributes:
        module: None where it could not be stored and none was given.
        args, kwargs: What it was called with.
        grad_outputs, rng, autocast: As for ``zoom``.
        grad: Whether gradients were recorded.
        about: All of bundle.json.
    """

    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_outputs: Any
    rng: RandomState | None
    autocast: tuple[Autocast, ...]
    grad: bool
    about: dict[str, Any]

    def replay(self) -> Zoom:
        """Run the module once more, with threads and types as they were, and look for the first operation."""
        if self.module is None:
            raise OptionError(f"the bundle has no module: {'; '.join(self.about['left_out'][:3])}")
        with as_it_was(self.about["environment"]), torch.set_grad_enabled(self.grad):
            return zoom(
                self.module,
                self.args,
                self.kwargs,
                grad_outputs=self.grad_outputs,
                rng=self.rng,
                autocast=self.autocast,
                limit=sys.maxsize,
            )


def describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What bundle.json says; no code of the bundle is run.

    Raises:
        FormatError: There is no bundle, or it is damaged.
    """
    place = Path(folder) / _JSON
    try:
        data = place.read_bytes()
    except OSError as error:
        raise FormatError(f"{folder} is no bundle: {_JSON} cannot be read ({error.strerror}).") from error
    about = parse(data, place)
    if type(about) is not dict or about.get("format") != _FORMAT:
        raise FormatError(f'{place}: "format" has to be "{_FORMAT}". This is no bundle of Hookline.')
    if about.get("version") != _VERSION:
        raise FormatError(f"{place}: it has version {about.get('version')}, this Hookline reads {_VERSION}.")
    wanted = {
        "sources": dict, "environment": dict, "autocast": list, "left_out": list, "training": bool, "grad": bool
    }  # fmt: skip
    for name, kind in wanted.items():
        if type(about.get(name)) is not kind:
            raise FormatError(f'{place}: "{name}" is missing or of another type. It was changed after it was written.')
    if problem := fault_of(about["environment"]):
        raise FormatError(f"{place}: {problem}. It was changed after it was written.")
    return about


def load_bundle(folder: str | os.PathLike[str], make: Callable[[], Any] | None = None) -> Bundle:
    """Make the module and its arguments again. Code of the bundle's ``source`` folder is executed.

    Args:
        folder: The bundle.
        make: Returns the module, or ``(module, args)`` or ``(module, args, kwargs)``, in the place of the stored ones;
            a module given so gets the stored parameters and buffers that it has names for.

    Raises:
        FormatError: It is damaged, or a class cannot be made again.
        OptionError: It has no module, or no arguments, and ``make`` does not give them.
    """
    about, place = describe(folder), Path(folder)
    with Sources(place / _SOURCE, _checked_sources(place, about)) as sources:
        decoder = Decoder(_tensors(place / _TENSORS), sources.find, place / _JSON)

        def read(name: str) -> Any:
            node = about.get(name)
            return None if node is None else decoder.decode(node)

        try:
            module = read("module") if make is None else None
            arguments, grads, rng, state = read("arguments"), read("grad_outputs"), read("rng"), read("state")
        except LookupError as error:
            raise FormatError(f"{place}: {error}. Give the module by --module FILE.py:FUNCTION.") from error
    if make is not None:
        module, arguments = _given(make(), arguments, state, about)
    if arguments is None:
        raise OptionError(
            f"{place}: the arguments could not be stored ({_reasons(about)}). "
            "Let the function of --module return (module, args, kwargs)."
        )
    if module is None:
        raise OptionError(
            f"{place}: the module could not be stored ({_reasons(about)}). Give one by --module FILE.py:FUNCTION."
        )
    try:
        casts = tuple(Autocast(device, enabled, getattr(torch, dtype)) for device, enabled, dtype in about["autocast"])
    except (TypeError, ValueError, AttributeError) as error:
        raise FormatError(f'{place / _JSON}: "autocast" is damaged ({error}).') from error
    return Bundle(module, arguments[0], arguments[1], grads, rng, casts, about["grad"], about)


def _reasons(about: dict[str, Any]) -> str:
    return "; ".join(map(str, about["left_out"][:3]))


def _given(made: Any, arguments: Any, state: Any, about: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The module and the arguments that a function of the user returned, or the stored arguments."""
    parts = made if isinstance(made, tuple) else (made,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise OptionError(f"--module: a module, or (module, args, kwargs), was wanted; got {type(made).__name__}")
    module = parts[0]
    if state is not None:
        module.load_state_dict(state, strict=False)
        module.train(about["training"])
    if len(parts) > 1:
        arguments = (tuple(parts[1]), dict(parts[2]) if len(parts) > 2 else {})
    return module, arguments


def _checked_sources(folder: Path, about: dict[str, Any]) -> dict[str, str]:
    """The files of the modules, all of which lie inside the folder."""
    root = (folder / _SOURCE).resolve()
    for name, file in about["sources"].items():
        if not isinstance(file, str) or not (root / file).resolve().is_relative_to(root):
            raise FormatError(f"{folder / _JSON}: the source of {name} lies outside the bundle.")
        if not (root / file).is_file():
            raise FormatError(f"{folder}: {_SOURCE}/{file} is missing. Restore it from a copy.")
    return dict(about["sources"])


def _tensors(file: Path) -> list[Tensor]:
    try:
        found = load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise FormatError(f"{file}: it cannot be read ({error}). Restore it from a copy.") from error
    try:
        return [found[str(number)] for number in range(len(found))]
    except KeyError as error:
        raise FormatError(f"{file}: tensor {error} is missing. It was changed after it was written.") from error
