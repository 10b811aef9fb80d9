"""Watch a training: statistics of every step, and incidents with their origin."""

from __future__ import annotations
