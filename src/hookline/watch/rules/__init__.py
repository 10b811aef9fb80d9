"""Rules over the last steps of a watch, as data: what each looks at, from which threshold on, and what it means."""

from __future__ import annotations

from hookline.watch.rules.default import DEFAULT, by_name
from hookline.watch.rules.engine import Engine
from hookline.watch.rules.rule import Check, Finding, Rule, SiteHistory, rule

__all__ = ["DEFAULT", "Check", "Engine", "Finding", "Rule", "SiteHistory", "by_name", "rule"]
