"""What hooks cost: Hookline, PyTorch's own hooks and the bare model side by side in one process.

    python bench/bench.py                        the whole of it, some minutes
    python bench/bench.py --quick                a look whether everything runs, some seconds
    python bench/bench.py --json out.json --markdown out.md

All ways take turns, each round in another order; a ratio is taken round by round, and what is shown is its median with
the quartiles. Attaching, and freeing what was kept, are not in the time of a pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from machine import machine
from suites import QUICK, Plan, attaching, network_rows
from table import markdown
from targets import judged


def main() -> int:
    options = _parser().parse_args()
    plan = QUICK if options.quick else Plan()
    # PyTorch's full backward hooks warn where no input requires a gradient, once for each module.
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    gc.freeze()  # what the imports have made need not be searched before each sample
    about = machine()
    rows = list(network_rows(plan, lambda name: print(f"measuring {name}", file=sys.stderr)))
    attached = attaching(plan)
    targets = judged(rows, attached)
    text = markdown(about, plan, rows, attached, targets)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n", "utf-8")
    if options.json is not None:
        found = {
            "machine": about,
            "quick": options.quick,
            "plan": dataclasses.asdict(plan),
            "rows": [_as_json(row) for row in rows],
            "attaching": [_as_json(way) for way in attached],
            "targets": [{**target._asdict(), "met": target.met} for target in targets],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return int(options.check and not all(target.met for target in targets))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what hooks cost on this machine.")
    parser.add_argument("--quick", action="store_true", help="small networks and few rounds: see whether it runs")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a target is missed")
    parser.add_argument("--json", type=Path, help="write everything, each sample too, into this file")
    parser.add_argument("--markdown", type=Path, help="write what is printed into this file")
    return parser


def _as_json(value: Any) -> Any:
    """Named tuples as dicts, at every depth."""
    if hasattr(value, "_asdict"):
        return _as_json(value._asdict())
    if isinstance(value, dict):
        return {str(key): _as_json(child) for key, child in value.items()}
    return [_as_json(child) for child in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    raise SystemExit(main())
