"""The C kernel against plain torch operations and exact sums, on every level of vector instructions it has here."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.hooks.torch_private import address
from hookline.stats import Summary, native, summarize, summarize_all
from hookline.stats.compute import row_of

pytestmark = pytest.mark.skipif(not native.available(), reason="the kernel was not built")

BLOCK = 32_768
NAN, INF = math.nan, math.inf
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
LEVELS = range(native._kernel.level + 1 if native._kernel else 0)
COUNTS = ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each level that the machine has; 0 is the one of every machine."""
    monkeypatch.setattr(native._kernel, "level", request.param)
    return int(request.param)


def plainly(tensor: Tensor) -> Summary:
    kernel, native._kernel = native._kernel, None
    try:
        return summarize(tensor)
    finally:
        native._kernel = kernel


def assert_same(got: Summary, want: Summary, std_abs: float = 0.0) -> None:
    for name in COUNTS:
        assert getattr(got, name) == getattr(want, name), name
    assert got.min == pytest.approx(want.min, rel=0, abs=0, nan_ok=True)
    assert got.max == pytest.approx(want.max, rel=0, abs=0, nan_ok=True)
    largest = 0.0 if math.isnan(want.min) else max(abs(want.min), abs(want.max))
    assert got.mean == pytest.approx(want.mean, rel=1e-12, abs=1e-14 * largest, nan_ok=True)
    assert got.std == pytest.approx(want.std, rel=1e-9, abs=max(1e-13 * largest, std_abs), nan_ok=True)
    assert got.l2 == pytest.approx(want.l2, rel=1e-12, nan_ok=True)


def values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.3
    if not dtype.is_floating_point:
        low = 0 if torch.iinfo(dtype).min == 0 else -100
        return torch.randint(low, 100, (count,), generator=generator).to(dtype)
    tensor = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 33, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_it_is_what_plain_operations_give(dtype: torch.dtype, count: int, level: int) -> None:
    tensor = values(dtype, count, count)
    assert native.takes(tensor)
    assert_same(summarize(tensor), plainly(tensor))


SPECIAL = [0.0, -0.0, NAN, INF, -INF, 1.0, -1.0, 6e-8, -6e-5, 1e-40, 3e38, 60000.0, 448.0, 1e-310, 5e-324]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn],
    ids=str,
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_special_values_anywhere(dtype: torch.dtype, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(SPECIAL) | st.floats(-1e3, 1e3), min_size=1, max_size=120))
    tensor = torch.tensor(some, dtype=torch.float64).to(dtype)
    for number in LEVELS:
        kernel = native._kernel
        assert kernel is not None
        best, kernel.level = kernel.level, number
        try:
            assert_same(summarize(tensor), plainly(tensor))
        finally:
            kernel.level = best


@pytest.mark.parametrize("place", [0, 1, 31, 32, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_one_bad_element_is_found_and_leaves_the_others_right(
    dtype: torch.dtype, bad: float, place: int, level: int
) -> None:
    tensor = values(dtype, 2 * BLOCK + 100, 3)
    tensor[place] = bad
    got = summarize(tensor)
    assert (got.nan, got.inf, got.neg_inf) == (int(bad != bad), int(abs(bad) == INF), int(bad == -INF))
    assert_same(got, plainly(tensor))


def test_nothing_but_bad_elements(level: int) -> None:
    got = summarize(torch.full((3 * BLOCK,), NAN))
    assert (got.nan, got.inf) == (3 * BLOCK, 0)
    assert math.isnan(got.mean) and math.isnan(got.min) and math.isnan(got.l2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_small_deviation_around_a_large_mean(dtype: torch.dtype, level: int) -> None:
    """Against exact fractions."""
    tensor = (torch.arange(100_000) % 7).to(dtype) * 8 + 2.0**26
    exact = [Fraction(value) for value in tensor.tolist()]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    got = summarize(tensor)
    assert got.mean == pytest.approx(float(mean), rel=1e-15)
    assert got.std == pytest.approx(math.sqrt(variance), rel=1e-10)


def test_sums_are_as_those_of_fsum(level: int) -> None:
    tensor = values(torch.float32, 300_001, 5) * 1000
    numbers = tensor.tolist()
    got = summarize(tensor)
    assert got.mean == pytest.approx(math.fsum(numbers) / len(numbers), rel=1e-11)
    assert got.l2 == pytest.approx(math.sqrt(math.fsum(value * value for value in numbers)), rel=1e-13)


@pytest.mark.parametrize("count", [5, BLOCK, 300_000])
@pytest.mark.parametrize("value", [0.1, -3e38, 1e-30, 1e-42])
def test_a_constant_has_no_deviation_and_its_own_mean(value: float, count: int, level: int) -> None:
    tensor = torch.full((count,), value)
    got = summarize(tensor)
    assert got.std == 0.0
    assert got.mean == got.min == got.max == tensor[0].item()


def test_the_number_of_threads_changes_no_bit() -> None:
    tensor = values(torch.float32, 5_000_003, 7)
    before = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(summarize(tensor))
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


def test_it_runs_on_the_threads_that_torch_has() -> None:
    assert native._kernel is not None
    if sys.platform == "linux" and torch.backends.openmp.is_available():
        assert native._kernel.parallel, "torch's libgomp was not found, so that one thread does all the work"


def test_many_at_once_give_the_same_bits_as_one_by_one() -> None:
    tensors = [values(dtype, count, seed) for seed, dtype in enumerate(DTYPES) for count in (1, 5, 512, 512, 4096)]
    tensors += [torch.tensor([1e200, 1.0], dtype=torch.float64), torch.tensor([1e200, 1.0], dtype=torch.float64)]
    tensors += [
        torch.tensor(1 + 2j).imag,
        torch.tensor(1 + 2j).conj().imag,
        torch.ones(4),
        torch._neg_view(torch.ones(4)),
    ]
    tensors += [torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1, count=10), torch.zeros(10)]
    assert [repr(one) for one in summarize_all(tensors)] == [repr(summarize(tensor)) for tensor in tensors]


# ---------------------------------------------------------------- layouts


LAYOUTS = {
    "channels last": lambda x: x.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.view(10, 12).T,
    "one row": lambda x: x.view(10, 12)[3],
    "every second": lambda x: x[::2],
    "a corner": lambda x: x.view(10, 12)[2:7, 3:9],
    "expanded": lambda x: x[:12].expand(5, 12),
    "a scalar": lambda x: x[7],
    "empty": lambda x: x[:0],
    "flipped axes": lambda x: x.view(2, 3, 20).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, level: int) -> None:
    tensor = LAYOUTS[name](values(torch.float32, 120, 1))
    assert_same(summarize(tensor), plainly(tensor.clone(memory_format=torch.contiguous_format)))


def test_one_run_of_memory_is_read_as_it_lies() -> None:
    assert native.takes(LAYOUTS["channels last"](values(torch.float32, 120, 1)))
    assert native.takes(LAYOUTS["transposed"](values(torch.float32, 120, 1)))
    assert not native.takes(LAYOUTS["every second"](values(torch.float32, 120, 1)))
    assert not native.takes(LAYOUTS["expanded"](values(torch.float32, 120, 1)))


@pytest.mark.parametrize("count", [100, 9_000_000])
@pytest.mark.parametrize("together", [False, True])
def test_a_storage_that_is_too_small_is_not_read(count: int, together: bool) -> None:
    tensor = torch.randn(count)
    tensor.untyped_storage().resize_(64)
    with pytest.raises(RuntimeError, match=r"out of bounds|storage"):
        summarize_all([tensor, tensor]) if together else summarize(tensor)


def test_what_has_no_plain_memory_is_left_to_torch() -> None:
    assert summarize(torch._efficientzerotensor((3,))).zeros == 3
    assert summarize(torch.empty(3, device="meta")).numel == 3
    assert summarize(torch.tensor([1 + 1j, 3 - 4j]).conj().imag).min == -1.0
    seen = []
    torch.vmap(lambda row: seen.append(summarize(row)) or row)(torch.ones(3, 4))
    assert seen[0].numel == 4


def test_a_nested_tensor_that_is_not_contiguous() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert summarize(nested).mean == summarize(nested.transpose(1, 2)).mean == 1.0


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_memory_that_is_not_aligned(dtype: torch.dtype, offset: int) -> None:
    data = bytearray(offset) + bytes(range(160))
    tensor = torch.frombuffer(data, dtype=dtype, offset=offset)
    assert_same(summarize(tensor), plainly(tensor.clone()))


@pytest.mark.parametrize("name", sorted(native._OF_ONE_BYTE))
def test_what_each_byte_means(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    value, smallest = native._OF_ONE_BYTE[name]
    want = torch.arange(256, dtype=torch.uint8)
    want = (want != 0) if dtype is torch.bool else want.view(dtype)
    got = torch.tensor([value(byte) for byte in range(256)], dtype=torch.float64)
    assert torch.equal(got.nan_to_num(7e77), want.to(torch.float64).nan_to_num(7e77))
    if dtype.is_floating_point and name != "float8_e8m0fnu":
        assert smallest == torch.finfo(dtype).smallest_normal


@pytest.mark.parametrize("count", [100, 300_000])
def test_subnormals_count_whatever_the_thread_was_told(count: int) -> None:
    tensor = torch.full((count,), 1e-42)
    want = summarize(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        assert {summarize(tensor) for _ in range(20)} == {want}
    finally:
        torch.set_flush_denormal(False)
    assert want.subnormal == count and want.mean == want.min == tensor[0].item() != 0.0


def test_a_signal_in_between_changes_no_row() -> None:
    ones, zeros = torch.ones(50), torch.zeros(50)
    before = signal.signal(signal.SIGALRM, lambda *_: summarize(ones))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        assert {summarize(zeros).mean for _ in range(5000)} == {0.0}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_deviation_among_bytes() -> None:
    tensor = torch.full((1 << 20,), 255, dtype=torch.uint8)
    tensor[7] = 0
    count = tensor.numel()
    want = math.sqrt(Fraction(255**2 * (count - 1), count**2))
    assert summarize(tensor).std == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("inside", ['torch.device("meta")', "FakeTensorMode()"])
def test_it_is_imported_inside_a_mode(inside: str) -> None:
    code = (
        "import torch; from torch._subclasses import FakeTensorMode\n"
        f"with {inside}:\n    from hookline.stats import native\n"
        "assert native.available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_copy_on_write_snapshot_stays_one() -> None:
    tensor = torch.randn(100)
    copy = tensor._lazy_clone()
    want = summarize(tensor.clone())
    assert (summarize(copy), summarize(tensor)) == (want, want)
    assert torch._C._is_cow_tensor(copy)
    assert torch._C._is_cow_tensor(tensor)


def test_the_address_is_that_of_the_first_element() -> None:
    tensor = torch.randn(10, 4)
    assert address(tensor) == tensor.data_ptr()
    assert address(tensor[3:, 1:]) == tensor[3:, 1:].data_ptr()


# ---------------------------------------------------------------- processes and threads


def test_after_a_fork() -> None:
    tensor = torch.ones(3_000_000)
    assert summarize(tensor).mean == 1.0  # the parent's threads are there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own word on forks beside threads
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(summarize_of_ones()).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "1.0"
    assert os.waitpid(child, 0)[1] == 0


def summarize_of_ones() -> float:
    found = native.row_of(_ONES)
    assert found is not None
    return found[1]


_ONES = torch.ones(3_000_000)


def test_from_several_threads_at_once() -> None:
    tensors = [values(torch.float32, 400_000 + 1000 * number, number) for number in range(6)]
    want = [summarize(tensor) for tensor in tensors]
    found: list[Summary | None] = [None] * len(tensors)

    def work(number: int) -> None:
        for _ in range(10):
            found[number] = summarize(tensors[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == want


def test_it_can_be_switched_off() -> None:
    code = (
        "import torch; from hookline.stats import native, summarize; "
        "print(native.available(), summarize(torch.ones(3)).mean)"
    )
    environment = os.environ | {"HOOKLINE_KERNEL": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1.0"]


def test_row_of_is_the_summary() -> None:
    for tensor in (torch.randn(50), torch.randn(5, 4)[:, ::2], torch.eye(3).to_sparse()):
        assert row_of(tensor) == tuple(getattr(summarize(tensor), name) for name in native.FIELDS)
