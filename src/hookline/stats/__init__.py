"""One tensor in, one summary out; summaries of several tensors merge exactly."""

from __future__ import annotations

from hookline.stats.compute import summarize, summarize_all
from hookline.stats.summary import Summary, merge

__all__ = ["Summary", "merge", "summarize", "summarize_all"]
