"""One tensor in, one summary out; summaries of several tensors merge exactly."""

from __future__ import annotations

from hookline.stats.summary import Summary, merge, summarize

__all__ = ["Summary", "merge", "summarize"]
