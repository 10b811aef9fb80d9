"""Recorders and recordings, and edits."""

from __future__ import annotations

from hookline.record.call import CallRecord, ModuleRecord
from hookline.record.edit import Edits, edit
from hookline.record.event import Event
from hookline.record.recorder import Recorder, record
from hookline.record.recording import Recording, load

__all__ = ["CallRecord", "Edits", "Event", "ModuleRecord", "Recorder", "Recording", "edit", "load", "record"]
