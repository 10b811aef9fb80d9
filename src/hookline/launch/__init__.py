"""Run a script or a module that is not ours, unchanged, and record every model that it calls.

The program has the world that ``python`` would give it: ``__main__``, ``sys.argv``, ``sys.path``, its own exit status.
Every root, which is a module that no other module's call surrounds, gets a recorder at its first call. What a step has
given is on disk before the next one begins.
"""

from __future__ import annotations

from hookline.launch.options import Options
from hookline.launch.run import run_module, run_script, take_over

__all__ = ["Options", "run_module", "run_script", "take_over"]
