"""A recording in the formats of others: .npz, Parquet, Zarr and safetensors. All or nothing, a part at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from hookline import store
from hookline.errors import ArgumentError, FormatError, OptionError, SiteError
from hookline.fp8 import scaled_places
from hookline.record import columns
from hookline.record.exact import FORMATS, check_bf16, convert, refuse, target_of
from hookline.record.rows import Rows
from hookline.record.scaled_rows import rows_of, tensors_of
from hookline.report.rows import select_events
from hookline.sites import Pattern, Site
from hookline.spelling import nearest_clause, quoted
from hookline.store import folders, header
from hookline.store.dtypes import STORAGE
from hookline.store.names import prefix_of, unique
from hookline.store.tensors import Stage, Stored, stored, write_all

__all__ = ["export"]

_LONGEST_MEMBER = 65_535 - len(".npy")
"""Bytes of a name in a zip file."""
_LONGEST_FILE = 200
"""Bytes of a file name; most file systems take 255."""
_OWN: dict[str, str] = {}
"""The dtype that has each code of safetensors for itself; it comes first among those with that code."""
for _dtype, _storage in STORAGE.items():
    _OWN.setdefault(_storage.code, _dtype)


class _Leaf(NamedTuple):
    """One tensor that is written.

    Attributes:
        event: Whose tensor it is.
        place: Its place among the leaves.
        path: Its value path.
        dtype: Its dtype.
        target: The dtype in which it is written.
        shape: Its shape.
        plain: Whether it is a plain dense tensor as it stands.
    """

    event: Any
    place: int
    path: str
    dtype: str
    target: str
    shape: tuple[int, ...]
    plain: bool

    @property
    def site(self) -> Site:
        return Site(self.event.path, self.event.port)

    def stored(self) -> Stored:
        return stored(self.event.leaf(self.place))

    def data(self) -> Tensor:
        """Its elements, which may share memory with the recording, in the dtype that is written."""
        found = self.stored().data
        assert found is not None
        return found if self.dtype == self.target else convert(found, self.dtype, self.target)


def export(
    recording: Any, path: str | os.PathLike[str], to: str, *, sites: Pattern = "**", bf16: str | None = None
) -> int:
    """Write what was recorded for other programs; see ``Recording.export``. Returns the number of tensors."""
    if to not in FORMATS:
        near = nearest_clause(to, FORMATS) if isinstance(to, str) else ""
        raise OptionError(f"to: got {to!r}, wanted one of {quoted(FORMATS)}{near}.")
    check_bf16(bf16)
    store.refuse_remote(path, "export")
    place = Path(os.path.abspath(path))
    _check_free(place)
    leaves = _leaves(recording, sites, to, bf16)
    if to in ("parquet", "zarr"):
        write = _folder_of_rows(leaves, to, bf16)
    else:
        several = len(recording.writers) > 1
        write = _npz(leaves, several) if to == "npz" else _safetensors(leaves, several, place)
    _publish(place, write)
    return len(leaves)


# ---------------------------------------------------------------- what is written


def _leaves(recording: Any, sites: Pattern, to: str, bf16: str | None) -> list[_Leaf]:
    """Every tensor that is written, all of them checked before the first one is."""
    found = [
        _leaf(event, place, path, to, bf16)
        for event in select_events(recording, None if sites == "**" else sites)
        for place, path in (_row_paths(event) if to in ("parquet", "zarr") else enumerate(_paths(event)))
    ]
    if not found:
        raise SiteError("there is no tensor to export: nothing was recorded there, or no value holds a tensor.")
    return found


def _paths(event: Any) -> list[str]:
    try:
        return [path for path, _, _ in event.layouts()]
    except RuntimeError:  # a nested tensor has no shape
        return [path for path, _ in event.leaves()]


def _row_paths(event: Any) -> list[tuple[int, str]]:
    """Place and value path of each tensor that has rows; the data of two that are kept for one stand for it."""
    try:
        layout = event.layouts()
    except RuntimeError:
        return list(enumerate(_paths(event)))
    return [(place, path) for place, path, *_ in tensors_of(scaled_places(event, layout), layout)]


def _leaf(event: Any, place: int, path: str, to: str, bf16: str | None) -> _Leaf:
    where = f"{Site(event.path, event.port)}, {path}, call {event.call} of step {event.step}"
    dtype, shape, has_data, plain = _kept_form(event, place, where)
    if not has_data:
        raise OptionError(f"{where}: only dtype and shape were recorded, there are no values. Leave the site out.")
    dtype = dtype if path == _paths(event)[place] else "float32"
    target = target_of(dtype, to, bf16)
    if target is None:
        raise refuse(where, dtype, to)
    return _Leaf(event, place, path, dtype, target, shape, plain)


def _kept_form(event: Any, place: int, where: str) -> tuple[str, tuple[int, ...], bool, bool]:
    """Dtype and shape of a tensor as it is stored, whether it has elements, and whether it is plain as it stands.

    Of a stored event the manifest says it; on an object store, the tensor would have to be downloaded.
    """
    if isinstance(event, store.StoredEvent):
        _, dtype, shape = event.layouts()[place]
        return str(dtype).removeprefix("torch."), tuple(shape), event.has_data(place), True
    tensor = event.leaf(place)
    try:
        kept = stored(tensor)
    except ArgumentError as error:
        raise OptionError(f"{where}: {error}") from error
    return kept.dtype, kept.shape, kept.data is not None, kept.converted_from is None


# ---------------------------------------------------------------- one file of tensors


def _named(leaves: Sequence[_Leaf], several: bool, spell: Callable[[str], str]) -> Iterator[tuple[str, _Leaf]]:
    """A name for each tensor; with several writers it begins with ``w`` and the number of its own."""
    taken: set[str] = set()
    for leaf in leaves:
        writer = f"w{leaf.event.writer}/" if several else ""
        yield unique(spell(writer + prefix_of(leaf.event) + leaf.path), taken), leaf


def _npz(leaves: Sequence[_Leaf], several: bool) -> Callable[[Path], None]:
    named = list(_named(leaves, several, _member_name))
    for name, leaf in named:
        if len(name.encode()) > _LONGEST_MEMBER:
            raise OptionError(f'{leaf.site}: a name of {len(name)} characters is too long for npz. to="safetensors"')

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, leaf in named:
                _write_member(archive, f"{name}.npy", leaf)

    return write


def _member_name(name: str) -> str:
    """A name that zip tools take as it is and that leads out of no folder."""
    parts = (_escaped(part, "%\\") for part in name.split("/"))
    return "/".join(part.replace(".", "%2E") if part in (".", "..") else part for part in parts)


def _escaped(text: str, signs: str) -> str:
    """Those signs and control characters as ``%XX``."""
    return "".join(quote(sign, safe="") if sign in signs or not sign.isprintable() else sign for sign in text)


def _write_member(archive: zipfile.ZipFile, name: str, leaf: _Leaf) -> None:
    about = {"descr": np.dtype(leaf.target).newbyteorder("<").str, "fortran_order": False, "shape": leaf.shape}
    with archive.open(
        zipfile.ZipInfo(name), "w", force_zip64=True
    ) as file:  # its date is 1980, so files can be compared
        np.lib.format.write_array_header_2_0(file, about)
        _write_elements(file, [leaf])


def _safetensors(leaves: Sequence[_Leaf], several: bool, place: Path) -> Callable[[Path], None]:
    named = sorted(_named(leaves, several, str), key=lambda item: -STORAGE[item[1].target].itemsize)
    listed = ((name, STORAGE[leaf.target].code, STORAGE[leaf.target].shape(leaf.shape)) for name, leaf in named)
    other = {name: leaf.dtype for name, leaf in named if _lies_as_another(leaf)}
    start = header.build(listed, place, {"hookline.dtypes": json.dumps(other)} if other else None)

    def write(path: Path) -> None:
        with open(path, "xb", buffering=0) as file:
            write_all(file, start)
            _write_elements(file, [leaf for _, leaf in named])

    return write


def _lies_as_another(leaf: _Leaf) -> bool:
    """Whether the dtype in a safetensors file does not tell that of the tensor."""
    return _OWN[STORAGE[leaf.target].code] != leaf.dtype


def _write_elements(file: Any, leaves: Sequence[_Leaf]) -> None:
    stage = Stage(file, sum(math.prod(leaf.shape) * STORAGE[leaf.target].itemsize for leaf in leaves))
    with torch.no_grad():
        for leaf in leaves:
            stage.add(leaf.data())
    stage.flush()


# ---------------------------------------------------------------- rows


def _folder_of_rows(leaves: Sequence[_Leaf], to: str, bf16: str | None) -> Callable[[Path], None]:
    named = _named_rows(_sites(leaves, to))
    if to == "zarr":
        for rows in named.values():
            columns.target(rows, to, bf16)
            columns.told(rows)
        return _zarr(named, bf16)
    for rows in named.values():
        columns.check_parquet(rows, bf16)

    def write(path: Path) -> None:
        path.mkdir()
        for name, rows in named.items():
            columns.write_parquet(path / f"{name}.parquet", rows, bf16)

    return write


def _zarr(named: Mapping[str, Rows], bf16: str | None) -> Callable[[Path], None]:
    columns.need_zarr()

    def write(path: Path) -> None:
        group = columns.open_zarr(path)
        for name, rows in named.items():
            columns.write_zarr(group, name, rows, bf16)

    return write


def _sites(leaves: Sequence[_Leaf], to: str) -> dict[Site, dict[str, list[Any]]]:
    """The events of each tensor of each site."""
    found: dict[Site, dict[str, list[Any]]] = {}
    for leaf in leaves:
        if not leaf.plain:
            raise OptionError(
                f"{leaf.site}, {leaf.path}: a tensor that is not plain has no rows in {to}. Save the recording and "
                "export what hookline.load gives, in which it is dense."
            )
        found.setdefault(leaf.site, {}).setdefault(leaf.path, []).append(leaf.event)
    return found


def _named_rows(sites: Mapping[Site, Mapping[str, Sequence[Any]]]) -> dict[str, Rows]:
    taken: set[str] = set()
    found = {}
    for site, paths in sites.items():
        for path, events in paths.items():
            name = _file_name(site, path if len(paths) > 1 else None)
            # some file systems take A and a as one name
            found[name + unique(name.casefold(), taken)[len(name.casefold()) :]] = rows_of(site, events, path)
    return found


def _file_name(site: Site, leaf: str | None) -> str:
    """``layer1.0.output``, or ``rnn.output.1.0`` where a value has several tensors."""
    name = f"{site.path or '(root)'}.{site.port}"
    if leaf is not None:
        inner = leaf.removeprefix("output").replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
        name += inner if inner.startswith(".") else f".{inner}"
    name = "".join(
        sign if sign.isalnum() or sign in "._-()" else quote(sign, safe="", errors="replace") for sign in name
    )
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return name.encode()[:_LONGEST_FILE].decode(errors="ignore")


# ---------------------------------------------------------------- all or nothing


def _check_free(place: Path) -> None:
    if os.path.lexists(place):
        raise OptionError(f"{place}: something of that name exists and was left as it is. Choose another name.")


def _publish(place: Path, write: Callable[[Path], None]) -> None:
    """Write under a hidden name beside the place, then rename; nothing stays after an error.

    The disk has all of it before it gets its name, so that nothing half-written has it after a crash of the machine.
    """
    made = folders.hidden(place, "new")
    with _writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(made)
            _sync(made)
            _check_free(place)
            os.rename(made, place)
            made = place
            folders.sync_folder(place.parent)
        except BaseException:
            folders.remove(made) if made.is_dir() else made.unlink(missing_ok=True)
            raise


def _sync(made: Path) -> None:
    """Wait until the disk has a file, or a folder with all that is in it."""
    if made.is_dir():
        for entry in made.iterdir():
            _sync(entry)
        folders.sync_folder(made)
    else:
        with open(made, "rb+") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "Nothing was left behind. Free some space, or choose a folder that you may write to."
        raise FormatError(f"{place}: it cannot be written ({error.strerror or error}). {advice}") from error
