"""Writing a manifest line: by hand, since a JSON encoder takes longer for an event than the disk for its tensor."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence

from hookline.store import strict_json
from hookline.store.format import EventLine, ShardLine, TensorLine
from hookline.store.strict_json import encode_scalar

__all__ = ["dump_commit", "dump_event"]

_ONE_TENSOR, _NO_DATA, _CONVERTED = '{"t":0}', ',"data":false', ',"converted_from":'
_BATCH, _ROWS = '"batch":%d,', ',"rows":'
_text = json.encoder.encode_basestring_ascii


def dump_commit(shards: Sequence[ShardLine], events: Sequence[str]) -> bytes:
    """One manifest line with its newline, of events as `dump_event` gives them."""
    listed = [{"file": shard.file, "bytes": shard.nbytes, "crc32c": f"{shard.crc32c:08x}"} for shard in shards]
    return strict_json.seal(f'{{"shards":{strict_json.COMPACT.encode(listed)},"events":[{",".join(events)}]}}')


def dump_event(line: EventLine) -> str:
    """One event of a manifest line; by hand, since a JSON encoder takes longer for it than the disk for its tensor."""
    structure = _ONE_TENSOR if line.structure == {"t": 0} else strict_json.COMPACT.encode(line.structure)
    return (
        f'{{"order":{line.order:d},"step":{line.step:d},"path":{_text(line.path)},"port":{_text(line.port)},'
        f'"call":{line.call:d},"backward":{line.backward:d},{"" if line.batch is None else _BATCH % line.batch}'
        f'"shard":{"null" if line.shard is None else _text(line.shard)},"structure":{structure},'
        f'"tensors":[{",".join(map(_dump_tensor, line.tensors))}]}}'
    )


def _dump_tensor(line: TensorLine) -> str:
    return (
        f'{{"name":{_text(line.name)},"path":{_text(line.path)},"dtype":"{line.dtype}",'
        f'"shape":[{",".join(map(str, line.shape))}],"summary":{_dump_summary(line.summary)}'
        f"{'' if line.data else _NO_DATA}"
        f"{'' if line.converted_from is None else _CONVERTED + _text(line.converted_from)}"
        f"{'' if line.rows is None else _ROWS + _text(line.rows)}}}"
    )


def _dump_summary(summary: dict[str, int | float] | None) -> str:
    if summary is None:
        return "null"
    values = tuple(summary.values())
    if {*map(type, values)} <= {int, float} and all(map(math.isfinite, values)):
        return _template(tuple(summary)) % values
    return strict_json.COMPACT.encode({key: encode_scalar(value) for key, value in summary.items()})


@functools.cache
def _template(keys: tuple[str, ...]) -> str:
    """An object with these keys, whose values are to be filled in."""
    entries = (f"{_text(key).replace('%', '%%')}:%r" for key in keys)
    return f"{{{','.join(entries)}}}"
