"""Builds the C kernel of ``hookline.stats`` into the wheel, where there is a C compiler.

The wheel then says for which platform it is, and for every Python 3: the library is called through ctypes and needs
neither Python's nor PyTorch's headers. Without a compiler, or with HOOKLINE_BUILD_KERNEL=0, the wheel is pure and the
statistics are computed in torch operations.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without hatchling: python hatch_build.py
    BuildHookInterface = object

ROOM = Path(__file__).parent / "src" / "hookline" / "stats"
LIBRARY = ROOM / "_kernel.so"
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wno-psabi",
)


class KernelHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """What hatchling calls before it packs the files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and name the platform."""
        if self.target_name != "wheel" or not build():
            return
        build_data["artifacts"].append("/src/hookline/stats/_kernel.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"


def build() -> bool:
    """Compile the kernel; says whether it is there."""
    LIBRARY.unlink(missing_ok=True)
    if os.environ.get("HOOKLINE_BUILD_KERNEL", "1") == "0" or sys.platform == "win32":
        return False
    compilers = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    for compiler in dict.fromkeys(filter(None, compilers)):
        draft = LIBRARY.with_name(f"_kernel.{os.getpid()}.so")
        command = [*shlex.split(compiler), *FLAGS, str(ROOM / "kernel.c"), "-o", str(draft), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            draft.replace(LIBRARY)  # a process that runs has the old one open
            return True
        draft.unlink(missing_ok=True)
        print(f"hookline: {compiler} could not compile the kernel:\n{done.stderr}", file=sys.stderr)
    print("hookline: no C compiler; statistics will be computed in torch operations, more slowly", file=sys.stderr)
    return False


def _platform() -> str:
    """As wheels name it; the compiler builds for this machine alone, also under a Python for two kinds."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    sys.exit(not build())
