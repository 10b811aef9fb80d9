"""Recorders and recordings, and edits."""

from __future__ import annotations

from hookline.fp8 import dequantize
from hookline.record.call import CallRecord, ModuleRecord
from hookline.record.coverage import Coverage, Fate
from hookline.record.dataset import Batches
from hookline.record.edit import Edits, edit
from hookline.record.event import Event
from hookline.record.load import load
from hookline.record.plan import Plan, plan
from hookline.record.recorder import Recorder, record
from hookline.record.recording import Recording
from hookline.record.rows import RowPlace, Rows
from hookline.record.verify import Mismatch, Verification, verify

__all__ = [
    "Batches",
    "CallRecord",
    "Coverage",
    "Edits",
    "Event",
    "Fate",
    "Mismatch",
    "ModuleRecord",
    "Plan",
    "Recorder",
    "Recording",
    "RowPlace",
    "Rows",
    "Verification",
    "dequantize",
    "edit",
    "load",
    "plan",
    "record",
    "verify",
]
