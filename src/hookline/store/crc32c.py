"""The checksum of a shard: CRC-32C, which processors compute as fast as memory is read. No torch in here."""

from __future__ import annotations

import google_crc32c
import numpy as np


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of some bytes that follow others with the checksum ``before``; there has to be at least one."""
    # the library takes no memoryview
    return int(google_crc32c.extend(before, np.frombuffer(data, np.uint8)))
