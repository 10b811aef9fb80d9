"""The folder that a recorder was told to record into: what it may hold, and how it goes on with what is there."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hookline import store
from hookline.errors import ArgumentError, OptionError
from hookline.hooks import original_class
from hookline.record import ranks
from hookline.record.policy import Policy, parse_bytes
from hookline.record.stream import BUDGET, Stream
from hookline.sites import label
from hookline.store import ModuleInfo, StoredParts, Writer

if TYPE_CHECKING:
    from hookline.record.recording import Recording

__all__ = ["Target", "fingerprint", "target_of"]

_SAME = ("sites", "structure", "kept")
"""What has to be the same where a recording goes on."""


def target_of(
    to: str | os.PathLike[str] | None, policy: Policy, *, quota: int | str | None, on_error: str, resume: bool
) -> Target | None:
    """The folder for a recorder; None when it records into memory.

    Raises:
        OptionError: A recording is there already, an option cannot be used, or what is kept cannot be put on disk.
        FormatError: Something else stands there.
    """
    if on_error not in ("raise", "warn"):
        raise OptionError(f'on_error is "raise" or "warn", got {on_error!r}.')
    if to is None:
        for name, given in (("quota", quota is not None), ("resume", resume), ("on_error", on_error != "raise")):
            if given:
                raise OptionError(f'{name}= is for a recording on disk; pass to="run.hookline" as well.')
        return None
    if not policy.detach:
        raise OptionError("to= writes values to disk, where a graph cannot go; leave detach=False out, or to=.")
    if resume and policy.keep == "last":
        raise OptionError('resume=True adds steps to a recording, keep="last" has none; leave one of them out.')
    return Target(to, None if quota is None else parse_bytes(quota), on_error, resume)


class Target:
    """A folder for a recorder.

    Args:
        folder: The recording, ``run.hookline``.
        quota: Most bytes on disk.
        on_error: ``"raise"`` or ``"warn"``.
        resume: Whether to go on with what is there.

    Attributes:
        number: Number of this writer, the rank of the process.
        first_step: Number of the first step that is recorded now.
        first_order: Number of the first event.
        ids: Of the samples that are recorded already.
    """

    def __init__(self, folder: str | os.PathLike[str], quota: int | None, on_error: str, resume: bool) -> None:
        self._folder = store.place_of(folder)
        self._quota, self._on_error, self._resume = quota, on_error, resume
        self.number = ranks.rank()
        self.first_step = self.first_order = 0
        self.ids: frozenset[int | str] = frozenset()
        if not resume:
            try:
                store.check_free(self._folder, writer=self.number)
            except OptionError as error:
                advice = "Choose another name, delete it first, or go on with it: resume=True"
                raise OptionError(f"{self._folder}: a recording of that name exists. {advice}.") from error

    def open(
        self, model: nn.Module, recording: Recording, policy: Policy, refused: Callable[[Any, ArgumentError], None]
    ) -> Stream:
        """Make the folder, or join it; ``refused`` gets each event that cannot be stored.

        Raises:
            OptionError: What is there cannot be gone on with.
            FormatError: It cannot be written.
        """
        recording.info |= _about(model, policy)
        if self._resume and store.exists(self._folder):
            self._go_on(store.open_recording(self._folder), recording)
        writer = Writer(
            self._folder,
            info=recording.info,
            modules=recording.modules,
            writer=self.number,
            again=self._resume,
            quota=self._quota,
        )
        return Stream(
            writer,
            recording.log,
            number=self.number,
            first=self.first_step,
            budget=policy.budget or BUDGET,
            on_error=self._on_error,
            at_the_end=policy.keep == "last",
            refused=refused,
        )

    def _go_on(self, parts: StoredParts, recording: Recording) -> None:
        if "repaired" in parts.info and not all(name in parts.info for name in _SAME):
            raise OptionError(
                f"{self._folder} was repaired without its recording.json, so nobody can tell whether it is of this "
                "model. It can be read; record into another folder."
            )
        for name in _SAME:
            there, here = parts.info.get(name), recording.info.get(name)
            if there != here and name == "structure":
                raise OptionError(
                    f"{self._folder} was recorded from another model: {_differs(parts.modules, recording.modules)}. "
                    "Resume with the same one, or record into another folder."
                )
            if there != here:
                raise OptionError(
                    f"{self._folder} was recorded with other {_TOLD[name]}: {_shown(there)} there, {_shown(here)} "
                    "here. Resume with the same ones, or record into another folder."
                )
        own = [event for event in parts.events if event.writer == self.number]
        self.first_step = max((event.step for event in own), default=-1) + 1
        batches = {id(event.batch): event.batch for event in parts.events if event.batch is not None}
        last = max((event.order for event in (*own, *batches.values())), default=-1)
        self.first_order = last + 1
        self.ids = frozenset(one for batch in batches.values() for one in _ids(batch))


_TOLD = {"sites": "sites", "kept": "ways of keeping values"}


def _differs(there: Mapping[str, ModuleInfo], here: Mapping[str, ModuleInfo]) -> str:
    """The first of the recorded modules that is another one."""
    for path in dict.fromkeys([*there, *here]):
        old, new = there.get(path), here.get(path)
        if old is None or new is None:
            return f"{label(path)} is only {'here' if old is None else 'there'}"
        if old.type_name != new.type_name:
            return f"{label(path)} is {old.type_name} there, {new.type_name} here"
        if old.parameters != new.parameters:
            return f"{label(path)} has {old.parameters:,} parameters there, {new.parameters:,} here"
    return "a name, shape or dtype of its parameters, or a module that is not recorded, is another one"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _ids(batch: Any) -> Iterable[int | str]:
    found = batch.value["ids"]
    return found.tolist() if isinstance(found, torch.Tensor) else found


def _about(model: nn.Module, policy: Policy) -> dict[str, Any]:
    structure, weights = fingerprint(model)
    return {
        "structure": structure,
        "weights": weights,
        "kept": {"dtype": policy.dtype and str(policy.dtype).removeprefix("torch."), "reduced": bool(policy.reduce)},
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
        "ranks": ranks.world_size(),
        "environment": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
        },
    }


def fingerprint(model: nn.Module) -> tuple[str, str | None]:
    """Of the names, classes and shapes of a model, and of some elements of each parameter.

    Returns:
        16 hexadecimal digits each; None for the second where a parameter cannot be read, such as on the meta device.
    """
    structure = hashlib.sha256()
    for path, module in model.named_modules():
        structure.update(f"{path}|{original_class(module).__qualname__}\n".encode("utf-8", "backslashreplace"))
    for name, parameter in model.named_parameters():
        shape = "lazy" if nn.parameter.is_lazy(parameter) else list(parameter.shape)
        structure.update(f"{name}|{shape}|{parameter.dtype}\n".encode("utf-8", "backslashreplace"))
    return structure.hexdigest()[:16], _of_weights(model)


def _of_weights(model: nn.Module) -> str | None:
    found = hashlib.sha256()
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                flat = parameter.detach().reshape(-1)
                some = flat[:: max(1, len(flat) // 8)].to(device="cpu", dtype=torch.float64)
                found.update(some.contiguous().numpy().tobytes())
    except Exception:  # what a subclass, a lazy or a meta tensor raises cannot be known
        return None
    return found.hexdigest()[:16]
