"""Opening a recording on disk."""

from __future__ import annotations

import os

from hookline import store
from hookline.record.ends import at_the_end
from hookline.record.recording import Recording

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> Recording:
    """Open a recording on disk. Tensors are mapped from the files when they are asked for; no code of it is run.

    Args:
        path: Folder that ``Recording.save`` or ``hookline run`` has written.

    Raises:
        FormatError: There is none, or it is truncated, foreign or inconsistent.
    """
    parts = store.open_recording(path)
    info = {**parts.info, **(at_the_end(parts.ends) if parts.ends else {})}
    info.pop("torn", None)  # a copy of a recording that was opened says what is true of the other one
    if parts.torn:
        info = {**info, "torn": [str(manifest) for manifest in parts.torn]}
    return Recording(modules=parts.modules, info=info, events=parts.events)
