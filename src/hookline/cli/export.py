"""Write what was recorded for other programs: NumPy, Parquet, Zarr, safetensors.

  hookline export run.hookline --to npz -o run.npz
  hookline export run.hookline --to parquet --sites 'h.*:output' -o tables
  hookline export run.hookline --to zarr --bf16 float32 -o run.zarr

npz and safetensors are one file with each tensor of each event. parquet is a folder with a file for each site, one line
for each row; zarr has a group for each site. Values keep their exact types, or nothing is written: bfloat16 needs
--bf16 where the format does not have it. Something that exists under the name is never replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hookline.cli.parser import Parser, encodable, parser_of
from hookline.record import load
from hookline.record.exact import BF16, FORMATS
from hookline.record.export import export
from hookline.report.text import plural, size_text
from hookline.store.folders import size_of

__all__ = ["main", "parser"]


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "DIR --to FORMAT -o OUT [options]")
    made.add_argument("folder", metavar="DIR", help="a recording, such as run.hookline")
    made.add_argument("--to", metavar="FORMAT", required=True, help=", ".join(FORMATS))
    made.add_argument("-o", "--output", metavar="OUT", required=True, help="file or folder to make")
    made.add_argument(
        "--sites",
        action="append",
        metavar="PATTERN",
        help="only these modules or sites, such as 'layer1.*' or 'conv1:output'; may be repeated (default: all)",
    )
    made.add_argument("--bf16", metavar="TYPE", help=f"what bfloat16 becomes: {' or '.join(BF16)} (its bits)")
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Write the file or folder.

    Args:
        argv: What stands behind ``hookline export``.
        own_process: Makes no difference here.
    """
    given = parser().parse_args(argv)
    count = export(load(given.folder), given.output, given.to, sites=given.sites or "**", bf16=given.bf16)
    size = size_text(size_of(Path(given.output)))
    print(encodable(f"hookline: {plural(count, 'tensor')} -> {given.output} ({size})"), file=sys.stderr)
    return 0
