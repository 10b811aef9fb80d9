"""The recording on disk: a folder with safetensors shards and JSON-lines manifests, one folder for each writer.

`format` says what lies where; `Writer` and `save` write it; `open_recording` reads it, `verify` looks for damage.
Opening never runs code, and what is damaged, foreign or hostile is a `hookline.errors.FormatError` that names the file.
"""

from __future__ import annotations

from hookline.store.appender import Staged
from hookline.store.event_like import EventLike
from hookline.store.folders import place_of
from hookline.store.format import ModuleInfo
from hookline.store.reader import StoredEvent, StoredParts, Tail, exists, open_recording
from hookline.store.remote import refuse_remote
from hookline.store.repair import Repair, repair
from hookline.store.verify import Report, verify
from hookline.store.writer import Writer, check_free, save

__all__ = [
    "EventLike",
    "ModuleInfo",
    "Repair",
    "Report",
    "Staged",
    "StoredEvent",
    "StoredParts",
    "Tail",
    "Writer",
    "check_free",
    "exists",
    "open_recording",
    "place_of",
    "refuse_remote",
    "repair",
    "save",
    "verify",
]
