"""What was recorded, in memory or on disk: one reading interface for both."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hookline import store
from hookline.errors import OptionError, SiteError
from hookline.hooks import original_class
from hookline.record.batch import Batch, InBatch
from hookline.record.call import ModuleRecord
from hookline.record.coverage import Coverage
from hookline.record.dataset import Batches, check_options
from hookline.record.export import export
from hookline.record.held import Pressure
from hookline.record.log import Log
from hookline.record.rows import Rows
from hookline.record.scaled_rows import rows_of
from hookline.record.step_parts import StepParts, check_there, numbers_of
from hookline.record.tables import to_pandas, to_polars
from hookline.report.rows import choose, select_events
from hookline.sites import PORTS, ROOT_LABEL, Pattern, Site, label, match_paths, nearest
from hookline.store import ModuleInfo

__all__ = ["Recording", "module_info"]


class Recording:
    """Values of a run, by module, call and port.

    ``rec["layer1.0.conv1"].output`` is the output of a module that ran once; ``rec["rnn.cell"].calls[3].output`` that
    of its fourth call. ``for event in rec`` gives every value in the order in which it came. ``print(rec)`` is a table.

    Attributes:
        modules: What was asked for, by path, in the order of the model.
        info: Versions, model, sites, ports and time; log: the events, as recorders add them.
    """

    def __init__(
        self, *, modules: Mapping[str, ModuleInfo], info: Mapping[str, Any], events: Iterable[Any] = ()
    ) -> None:
        self.modules = dict(modules)
        self.info = dict(info)
        self._aliases = {alias: path for path, module in self.modules.items() for alias in module.aliases}
        self._asked = _asked(self.info.get("sites"))
        self.log = Log()
        self._records: dict[str, ModuleRecord] = {}
        self._recorder: weakref.ref[Any] | None = None
        self._part: list[str] | None = None
        for event in events:
            self.log.add(event)

    # ------------------------------------------------------------ reading

    @property
    def events(self) -> list[Any]:
        """Every event, in order."""
        return self.log.events

    def __iter__(self) -> Iterator[Any]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.log)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._canonical(path) in self.modules

    def __getitem__(self, path: str) -> ModuleRecord:
        found = self._canonical(path) if isinstance(path, str) else None
        if found not in self.modules:
            raise SiteError(self._unknown(path))
        return self._record(found)

    def _canonical(self, path: str) -> str:
        if path in self.modules:
            return path
        return "" if path == ROOT_LABEL else self._aliases.get(path, path)

    def _record(self, path: str) -> ModuleRecord:
        if path not in self._records:
            module = self.modules.get(path)
            made = ModuleRecord(path, module.type_name if module else "", self._asked.get(path, ()), self.log)
            self._records.setdefault(path, made)
        return self._records[path]

    def _unknown(self, path: object) -> str:
        if not isinstance(path, str):
            return f"a recording is read by module path, got {type(path).__name__}: {path!r:.40}."
        close = ", ".join(f'"{label(name)}"' for name in nearest(path, self.modules)) or "none is close"
        return f'"{path}" was not recorded; nearest of the {len(self.modules)} recorded modules: {close}.'

    @property
    def paths(self) -> list[str]:
        """Paths of the modules that were asked for."""
        return list(self.modules)

    @property
    def ports(self) -> list[str]:
        """Ports of which there are values, in the order input, output, grad_input, grad_output."""
        seen = {event.port for event in self.events}
        return [port for port in PORTS if port in seen]

    @property
    def sites(self) -> list[str]:
        """Sites of which there are values, such as ``"h.3:output"``, in the order of the model."""
        seen = {(event.path, event.port) for event in self.events}
        paths = dict.fromkeys([*self.modules, *(path for path, _ in sorted(seen))])
        return [str(Site(path, port)) for path in paths for port in PORTS if (path, port) in seen]

    @property
    def steps(self) -> StepParts:
        """The steps of which there are values: ``rec.steps[120]`` is the recording of one, iterating gives numbers."""
        return StepParts(self)

    @property
    def writers(self) -> list[int]:
        """Numbers of the processes of which there are values, such as ranks."""
        return sorted({event.writer for event in self.events})

    @property
    def nbytes(self) -> int:
        """Bytes of all kept tensors."""
        return sum(event.nbytes for event in self.events)

    def select(
        self,
        sites: Pattern = "**",
        *,
        steps: int | Iterable[int] | None = None,
        writers: int | Iterable[int] | None = None,
    ) -> Recording:
        """The part of the recording at some sites, in some steps and of some processes.

        Args:
            sites: Patterns over the recorded paths, as in ``hookline.record``; one without a port means all ports.
            steps: One step or several; all by default.
            writers: One process or several, such as ranks; all by default.

        Raises:
            SiteError: Nothing that was recorded is named, or no such step or process.
        """
        paths = match_paths(sites, self.modules)
        wanted, processes = map(numbers_of, (steps, writers))
        events = [
            event
            for event in select_events(self, sites)
            if (wanted is None or event.step in wanted) and (processes is None or event.writer in processes)
        ]
        if not events:
            check_there("steps", wanted, list(self.steps))
            check_there("writers", processes, self.writers)
        part = Recording(modules={path: self.modules[path] for path in paths}, info=self.info, events=events)
        part._recorder = self._recorder
        chosen = choose(sites, list(self.modules))
        part._part = [text for text in self.coverage if _place(text) in chosen]
        return part

    def rows(self, site: Site | str, *, leaf: str | None = None) -> Rows:
        """All rows of a site, over its calls, steps and writers, as one array with random access.

        Args:
            site: Such as ``"h.3:output"``.
            leaf: Value path of the tensor where the values hold several, such as ``"output[0]"``. With ``dtype="fp8"``
                that gives float32, ``"output[0].data"`` and ``"output[0].scale"`` what is kept.

        Returns:
            ``rows[7]`` is a row, ``rows[10:20]`` and ``rows[[3, 1, 4]]`` are tensors of rows, ``rows.place(7)`` says
            step and call. Rows of values that are recorded later are not in it.

        Raises:
            SiteError: Nothing was recorded at the site, or there is no tensor at ``leaf``.
            OptionError: ``leaf`` is needed, or the values differ in dtype or in the shape of a row.
        """
        wanted = site if isinstance(site, Site) else Site.parse(site)
        record = self[wanted.path]
        events = [event for event in record.events if event.port == wanted.port]
        if not events:
            raise SiteError(record.missing(wanted.port))
        return rows_of(wanted, events, leaf)

    def dataset(self, sites: Site | str | Sequence[Site | str], **options: Any) -> Batches:
        """Batches of the rows of some sites, for training on what was recorded.

        Args:
            sites: One site or several, such as ``["h.3:output", "head:output"]``; several must have the same rows.
            options: ``batch_size=256``; ``shuffle=False``; ``seed=0``, which repeats the order; ``window=65_536``, the
                rows that are shuffled together, of values that are shuffled themselves; ``drop_last=False``;
                ``rank`` and ``world_size``, which are those of torchrun by default: each rank has batches of its own,
                none twice and none left out, unless ``drop_last`` gives every rank as many.

        Returns:
            A map-style dataset of whole batches, ``{"h.3:output": rows, "row": numbers}``; for a ``DataLoader`` with
            ``batch_size=None``.

        Raises:
            SiteError: As for ``rows``.
            OptionError: An option cannot be used, or the sites have different rows.
        """
        several = [sites] if isinstance(sites, (Site, str)) else list(sites)
        check_options(options)
        if not several:
            raise OptionError('sites: got none, wanted one or more such as "h.3:output".')
        return Batches([self.rows(site) for site in several], **options)

    def to_dict(self) -> dict[str, dict[str, list[Any]]]:
        """``{path: {port: [value of each call]}}``, with the tensors themselves."""
        found: dict[str, dict[str, list[Any]]] = {}
        for event in self.events:
            found.setdefault(event.path, {}).setdefault(event.port, []).append(event.value)
        return found

    def __repr__(self) -> str:
        return (
            f"<Recording of {self.info.get('model', 'a model')}: {len(self)} events at {len(self.modules)} modules, "
            f"{len(self.steps)} steps>"
        )

    def __str__(self) -> str:
        from hookline.report.table import render  # rich takes longer to import than most recordings take to make

        return render(self)

    @property
    def coverage(self) -> Coverage:
        """What became of every site that was asked for; see ``Coverage``. While it is recorded, what holds so far."""
        recorder = None if self._recorder is None else self._recorder()
        found = Coverage.from_json(self.info.get("coverage")) if recorder is None else recorder.coverage()
        return found if self._part is None else found.select(self._part)

    # ------------------------------------------------------------ writing

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the recording into a folder, all or nothing.

        Args:
            path: Folder to make, such as ``"run.hookline"``.
            overwrite: Take the place of a recording that is there.

        Raises:
            OptionError: A recording is there and ``overwrite`` is False.
            FormatError: The folder cannot be written.
        """
        store.save(path, info=self.info, modules=self.modules, events=self.events, overwrite=overwrite)

    def export(self, path: str | os.PathLike[str], to: str, *, sites: Pattern = "**", bf16: str | None = None) -> None:
        """Write what was recorded for other programs, exactly or not at all; memory is bounded.

        Args:
            path: File or folder to make. Nothing may be there, and nothing stays there after an error.
            to: ``"npz"`` and ``"safetensors"`` are one file, in which each tensor of each event has a name
                ``STEP/SITE/CALL/VALUEPATH``, behind ``wWRITER/`` where there are several writers; ``"parquet"`` is a
                folder with a file for each site, one line for each row of its values; ``"zarr"`` is a store with a
                group for each site. These two have what rows are, as ``rec.batch`` said.
            sites: Patterns over the recorded paths, as for ``select``.
            bf16: What bfloat16 becomes where the format does not have it: ``"float32"``, each value exactly, or
                ``"uint16"``, the bits.

        Raises:
            SiteError: Nothing that was recorded is named.
            OptionError: The format has no exact type for a tensor, the values of a site do not fit together as rows,
                something of that name exists, or an option cannot be used.
            HooklineError: The package that writes the format is not installed.
            FormatError: The place cannot be written to.
        """
        export(self, path, to, sites=sites, bf16=bf16)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a line for each tensor of each event: its place, layout and statistics.

        The columns are order, step, path, port, call, backward, writer, leaf, dtype, shape, the fields of a summary
        from numel to subnormal, and nbytes. Of a recording on disk, no tensor is read.

        Raises:
            HooklineError: pandas is not installed.
        """
        return to_pandas(self.events)

    def to_polars(self) -> Any:
        """The same as ``to_pandas`` as a ``polars.DataFrame``.

        Raises:
            HooklineError: polars is not installed.
        """
        return to_polars(self.events)

    def watched_by(self, recorder: Any, **info: Any) -> None:
        """A recorder begins to fill the recording, or None does; recorders do this."""
        self._recorder = None if recorder is None else weakref.ref(recorder)
        self.info |= info

    # ------------------------------------------------------------ while it is recorded

    def flush(self) -> None:
        """Return when everything so far is on disk; what is acknowledged so survives a crash.

        Call it between steps, and outside of ``rec.batch``: of a step or batch that goes on, what is there so far is
        committed as if it were all of it.

        Raises:
            OptionError: It is not being recorded to disk.
            FormatError, QuotaError: The disk refuses, or the quota is reached.
        """
        self._live("flush").flush()

    def next_step(self) -> None:
        """Mark the end of a step by hand; the next call begins another one.

        With ``record(..., steps="manual")`` nothing else does, so that a step may have many forwards of the model.

        Raises:
            OptionError: It is not being recorded.
        """
        self._live("next_step").next_step()

    def batch(
        self, ids: Sequence[int] | Sequence[str] | Tensor, *, tokens: Any = None, mask: Any = None
    ) -> contextlib.AbstractContextManager[bool]:
        """Say what the rows of the values of a with-block are, so that none can be mistaken for another.

        ::

            with rec.batch(ids=batch["id"], tokens=batch["input_ids"], mask=batch["attention_mask"]) as wanted:
                if wanted:
                    model(**batch)

        Values whose first dimension is that of ``ids`` have a row for each sample. With ``tokens`` or ``mask``, values
        that begin with (samples, length), or with samples * length, are kept as rows of their chosen tokens, one below
        the other; ``reduce`` gets these rows. ``rec.rows(site).identity()`` gives them back. Gradients have the rows of
        their forward. It holds for the thread that it is used in. A batch that an exception ends counts as recorded.

        Args:
            ids: An id of each sample, all int or all str; (n,).
            tokens: Token ids, (n, length).
            mask: Which tokens to keep, (n, length); those that are true or not 0, all by default.

        Returns:
            A context manager that gives whether its values are recorded: False where ``resume=True`` has found all of
            ``ids`` in the recording, which then takes nothing.

        Raises:
            OptionError: It is not being recorded, the shapes differ, or only some of the ids are recorded already.
            ArgumentError: The ids are none.
        """
        self._live("batch")
        return InBatch(Batch(ids, tokens, mask), lambda batch: self._live("batch").in_batch(batch))

    @property
    def first_step(self) -> int:
        """Number of the first step that is recorded now: with ``resume=True``, how many are there already.

        Raises:
            OptionError: It is not being recorded.
        """
        return int(self._live("first_step").first_step)

    @property
    def pressure(self) -> Pressure:
        """How often, and how many seconds in all, the model has waited for the disk."""
        recorder = None if self._recorder is None else self._recorder()
        if recorder is not None:
            return recorder.pressure  # type: ignore[no-any-return]
        waits, seconds = self.info.get("waits"), self.info.get("waited_s")
        if isinstance(waits, int) and isinstance(seconds, (int, float)):
            return Pressure(waits, float(seconds))
        return Pressure(0, 0.0)  # a file may hold anything

    def _live(self, what: str) -> Any:
        recorder = None if self._recorder is None else self._recorder()
        if recorder is None:
            raise OptionError(f"{what} is for a recording that is going on; use it inside `with hookline.record(...)`.")
        return recorder


def module_info(module: nn.Module, aliases: tuple[str, ...] = ()) -> ModuleInfo:
    """What a recording says of a module; a lazy module's parameters count once they have a shape."""
    count = sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))
    return ModuleInfo(original_class(module).__name__, count, aliases)


def _asked(sites: Any) -> dict[str, set[str]]:
    """The ports that were asked for, by path, from the texts in ``info``; a file may hold anything there."""
    found: dict[str, set[str]] = {}
    for text in sites if isinstance(sites, list) else ():
        if isinstance(text, str):
            path, port = _place(text)
            found.setdefault(path, set()).add(port)
    return found


def _place(text: str) -> tuple[str, str]:
    """Path and port of a site as it is written; unlike ``Site.parse`` it takes anything."""
    path, _, port = text.rpartition(":")
    return "" if path == ROOT_LABEL else path, port
