"""What a reader sees: text tables, descriptions of a value, and plots."""

from __future__ import annotations

from hookline.report import plot
from hookline.report.describe import describe
from hookline.report.table import render

__all__ = ["describe", "plot", "render"]
