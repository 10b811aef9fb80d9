"""``python -m hookline`` is the command ``hookline``."""

from __future__ import annotations

import sys

from hookline.cli.main import main

sys.exit(main())
