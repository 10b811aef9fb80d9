"""Rules as data, the engine, and rules of users; findings on made-up histories."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookline.errors import ArgumentError, OptionError
from hookline.watch.incident import Incident
from hookline.watch.rules import DEFAULT, Engine, Finding, Rule, SiteHistory, by_name, rule
from hookline.watch.series import FIELDS, PORTS, Frame, Series
from hookline.watch.window import Window

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def values(rms: float = 1.0, **fields: float) -> list[float]:
    """A row of 100 elements of mean 0."""
    plain = {"numel": 100, "mean": 0.0, "std": rms, "min": -3 * rms, "max": 3 * rms, "l2": 10 * rms}
    return [float((plain | fields).get(name, 0.0)) for name in FIELDS]


class History:
    """Feeds made-up rows to an engine, one step at a time."""

    def __init__(self, rules: Any, *series: Series) -> None:
        self.engine, self.series, self.told = Engine(rules), list(series), list[Incident]()
        self.window, self.step = Window(self.engine.size), 0

    def add(self, *rows: list[float] | None, **extra: Any) -> list[Incident]:
        there = [number for number, one in enumerate(rows) if one is not None]
        frame = Frame(
            self.step, 0.0, np.array(there, np.int32), np.zeros(len(there), np.int32),
            np.array([rows[number] for number in there]).reshape(-1, len(FIELDS)), extra,
        )  # fmt: skip
        self.window.add(frame, self.series)
        self.step += 1
        fresh = self.engine.check(self.window)
        self.told += fresh
        return fresh


OUTPUT, GRADIENT = Series("a", "output", "", "Linear", "float32"), Series("a", "grad_output", "", "Linear", "float32")
LOSS = Series("", "loss")


def only(name: str, **changes: Any) -> list[Rule]:
    return [dataclasses.replace(by_name(name), **changes)]


# ---------------------------------------------------------------- rules on made-up histories


def test_exploding_tells_the_first_series_and_counts_the_others() -> None:
    history = History(only("exploding"), OUTPUT, Series("b", "output"), GRADIENT)
    for _ in range(5):
        assert not history.add(values(2.0), values(3.0), values(1e-4))
    (one,) = history.add(values(2001.0), values(9000.0), values(1e-4))
    assert one.series == OUTPUT and one.step == 5 and one.severity == "error" and one.direction == "forward"
    assert one.evidence == {"rms": 2001.0, "median": 2.0, "ratio": 1000.5, "others": 1, "other_series": ["b:output"]}
    (one,) = history.add(values(2001.0), values(9000.0), values(0.2))
    assert one.series == GRADIENT and one.direction == "backward"


@pytest.mark.parametrize(
    ("now", "threshold", "count"), [(999.0, 1e3, 0), (1001.0, 1e3, 1), (1001.0, 2e3, 0), (11, 10, 1)]
)
def test_a_threshold_is_where_a_rule_begins(now: float, threshold: float, count: int) -> None:
    history = History(only("exploding", threshold=threshold), OUTPUT)
    for _ in range(4):
        history.add(values(1.0))
    assert len(history.add(values(now))) == count


def test_growing_from_zeros_is_no_explosion() -> None:
    history = History(only("exploding"), OUTPUT)
    for _ in range(3):
        history.add(values(0.0))
    assert not history.add(values(0.9))
    assert history.add(values(1.1))  # a thousand times the least that counts


def test_a_spike_needs_history_and_a_jump_over_all_of_it() -> None:
    rng = np.random.default_rng(0)
    history = History(only("spike"), OUTPUT)
    for _ in range(19):
        history.add(values(float(np.exp(0.1 * rng.normal()))))
    assert not history.add(values(100.0))  # too early, and now a part of the history
    for _ in range(20):
        history.add(values(float(np.exp(0.1 * rng.normal()))))
    assert not history.add(values(700.0))  # not beyond eight times the largest
    (one,) = history.add(values(1e5))
    assert one.evidence["rms"] == 1e5 and one.evidence["median"] == pytest.approx(1.0, rel=0.1)


def test_the_deviation_of_a_spike_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(1)
    earlier = np.exp(rng.normal(size=30))
    history = History(only("spike", threshold=3.0), OUTPUT)
    for one in earlier:
        history.add(values(float(one)))
    (one,) = history.add(values(1e6))
    logs = np.log(earlier)
    mad = np.median(np.abs(logs - np.median(logs)))
    assert one.evidence["deviation"] == pytest.approx((np.log(1e6) - np.median(logs)) / (1.4826 * mad))


def test_vanishing_by_depth_tells_the_layer_nearest_to_the_loss() -> None:
    series = [Series(f"l{number}", "grad_output") for number in range(6, 0, -1)]
    for threshold, first, others in ((1e-8, "l3", 2), (1e-6, "l4", 3), (1e-3, "l5", 4), (1e-18, None, 0)):
        history = History(only("vanishing", threshold=threshold), *series)
        for step in range(25):
            told = history.add(*(values(2 * 10.0 ** (-3.5 * depth)) for depth in range(6)))
            assert not told or step == 9
        assert [one.series.path for one in history.told] == ([first] if first else [])
        assert [one.evidence.get("others", 0) for one in history.told] == ([others] if first else [])


def test_gradients_that_shrink_together_do_not_vanish() -> None:
    history = History(only("vanishing"), GRADIENT, Series("b", "grad_output"), Series("c", "parameter_grad", "bias"))
    for step in range(40):
        shrinking = 10.0 ** (-step / 2)
        assert not history.add(values(shrinking), values(1e-3 * shrinking), values(1e-9))


def test_a_loss_spike_may_be_below_zero_and_a_fall_is_none() -> None:
    history = History(only("loss-spike"), LOSS)
    loss = [-0.1 * step + 0.05 * math.sin(step) for step in range(60)]
    assert not any(history.add(values(0, mean=one)) for one in loss)
    assert not history.add(values(0, mean=loss[-1] - 100.0))
    (one,) = history.add(values(0, mean=40.0))
    assert one.evidence["loss"] == 40.0 and one.series == LOSS


def test_dead_by_all_elements_and_by_channels() -> None:
    relu = Series("r", "output", "", "ReLU")
    history = History(only("dead"), relu, Series("l", "output", "", "Linear"), Series("s", "output", "", "ReLU"))
    all_zero = values(0.0, zeros=100)
    for step in range(12):
        fresh = history.add(all_zero, all_zero, values(zeros=99), dead_channels={2: 0.7 - 0.01 * step})
        assert [str(one.series) for one in fresh] == (["r:output", "s:output"] if step == 9 else [])
    assert history.told[0].evidence == {"fraction": 1.0, "steps": 10, "elements": 100}
    assert history.told[1].evidence == {"fraction": pytest.approx(0.61), "steps": 10}


def rows_of(y: np.ndarray) -> list[float]:
    return values(0, numel=y.size, mean=y.mean(), std=y.std(), min=y.min(), max=y.max(), l2=math.sqrt((y * y).sum()))


@pytest.mark.parametrize(("scale", "count"), [(1.0, 0), (30.0, 0), (2000.0, 3)])
def test_saturated_by_the_slope_that_the_outputs_tell(scale: float, count: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 8))
    series = [Series(kind.lower(), "output", "", kind) for kind in ("Sigmoid", "Tanh", "Softmax")]
    history = History(only("saturated"), *series)
    with np.errstate(over="ignore"):
        sigmoid, tanh = 1 / (1 + np.exp(-scale * x)), np.tanh(scale * x)
    exp = np.exp(scale * (x - x.max(1, keepdims=True)))
    softmax = exp / exp.sum(1, keepdims=True)
    for _ in range(10):
        history.add(rows_of(sigmoid), rows_of(tanh), rows_of(softmax))
    assert len(history.told) == count
    slopes = [4 * (sigmoid * (1 - sigmoid)).mean(), (1 - tanh**2).mean(), (1 - (softmax**2).sum(1)).mean()]
    for one, slope in zip(history.told, slopes, strict=False):
        assert one.evidence["slope"] == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_a_softmax_over_one_element_is_not_saturated() -> None:
    history = History(only("saturated"), Series("s", "output", "", "Softmax"))
    for _ in range(12):
        assert not history.add(rows_of(np.ones(50)))


def test_no_gradient_only_where_the_module_ran() -> None:
    gradient = Series("a", "parameter_grad", "weight")
    history = History(only("no-gradient"), OUTPUT, gradient, Series("b", "parameter_grad", "weight"))
    absent = values(0.0, numel=0)
    for step in range(5):
        fresh = history.add(values(), absent, absent)
        assert [one.series for one in fresh] == ([gradient] if step == 4 else [])
    history = History(only("no-gradient"), OUTPUT, gradient)
    for step in range(8):
        assert not history.add(values(), values() if step % 4 == 0 else absent)


def test_frozen_needs_a_gradient() -> None:
    update, gradient = Series("a", "update", "weight"), Series("a", "parameter_grad", "weight")
    for rms, count in ((1e-3, 1), (0.0, 0)):
        history = History(only("frozen"), update, gradient)
        for _ in range(15):
            history.add(values(0.0, zeros=100), values(rms))
        assert len(history.told) == count


@pytest.mark.parametrize(
    ("dtype", "fields", "count"),
    [
        ("float16", {"max": 40000.0}, 1), ("float16", {"max": 30000.0}, 0), ("float16", {"min": -40000.0}, 1),
        ("float16", {"min": -65504.0}, 0), ("bfloat16", {"max": 40000.0}, 0), ("bfloat16", {"max": 2e38}, 1),
        ("float8_e4m3fn", {"max": 300.0}, 1), ("float8_e5m2", {"max": 300.0}, 0), ("float32", {"max": 3e38}, 0),
        ("int8", {"max": 127.0}, 0), ("", {"max": 1e300}, 0),
    ],
)  # fmt: skip
def test_overflow_by_the_range_of_the_dtype(dtype: str, fields: dict[str, float], count: int) -> None:
    history = History(only("overflow-risk"), OUTPUT._replace(dtype=dtype))
    assert len(history.add(values(**fields))) == count


@pytest.mark.parametrize(
    ("dtype", "zeros", "subnormal", "count"),
    [("float16", 50, 30, 1), ("float16", 50, 20, 0), ("float16", 100, 0, 0), ("bfloat16", 50, 30, 0)],
)
def test_underflow_by_the_elements_that_are_not_zero(dtype: str, zeros: int, subnormal: int, count: int) -> None:
    history = History(only("underflow-risk"), GRADIENT._replace(dtype=dtype))
    for _ in range(5):
        history.add(values(zeros=zeros, subnormal=subnormal))
    assert len(history.told) == count


def test_steps_in_which_nothing_came_give_nothing() -> None:
    kinds = ("ReLU", "Sigmoid", "Softmax", "Linear")
    history = History(DEFAULT, *(Series("m", port, "weight", kind, "float16") for port in PORTS for kind in kinds))
    for step in range(60):
        nothing = values(math.nan, numel=0, mean=math.nan, min=math.nan, max=math.nan)
        history.add(*([None] * 24 if step % 2 else [nothing] * 24))
    assert [one.rule for one in history.told if one.rule != "no-gradient"] == []


# ---------------------------------------------------------------- engine


def test_a_finding_is_told_again_once_it_was_absent() -> None:
    above = rule("above", lambda site: "above" if site.field("rms")[-1] > 1 else None, window=3, cooldown=2)
    history = History([above], OUTPUT)
    steps = [5, 5, 0, 0, 5, 5, 0, 0, 0, 5]
    told = [bool(history.add(values(float(one)))) for one in steps]
    assert told == [True, *[False] * 8, True]


def test_without_a_cooldown_a_finding_is_told_once() -> None:
    history = History([rule("always", lambda site: "again", cooldown=None)], OUTPUT, GRADIENT)
    for _ in range(70):
        history.add(values(), values())
    assert [one.series for one in history.told] == [OUTPUT, GRADIENT]


def test_what_is_wrong_everywhere_is_not_told_for_each_series() -> None:
    series = [Series(f"l{number}", "output") for number in range(20)]
    history = History([rule("always", lambda site: "again", cooldown=None)], *series)
    told = history.add(*[values()] * 20)
    assert [one.series for one in told] == series[:8] and "others" not in told[6].evidence
    assert told[7].evidence == {"others": 12, "other_series": [f"l{number}:output" for number in range(8, 13)]}
    assert not history.add(*[values()] * 20)


def test_a_function_of_the_history_of_a_series() -> None:
    seen: list[SiteHistory] = []

    def shrinks(site: SiteHistory) -> str | None:
        """The deviation fell in each of the steps."""
        seen.append(site)
        std = site.field("std")
        return f"fell to {std[-1]}" if len(site) > 2 and (np.diff(std) < 0).all() else None

    made = rule("shrinks", shrinks, ports=("output",), window=3, severity="error")
    assert made.meaning == "The deviation fell in each of the steps."
    history = History([*DEFAULT, made], OUTPUT, GRADIENT)
    for one in (9.0, 8.0, None, 7.0, 6.0, 5.0):
        history.add(None if one is None else values(one), values(1.0))
    (told,) = history.told
    assert (told.step, told.series, told.message, told.severity) == (5, OUTPUT, "fell to 5.0", "error")
    assert {site.series for site in seen} == {OUTPUT} and len(seen) == 5  # not asked where there is nothing new
    assert seen[-1].steps.tolist() == [3, 4, 5] and seen[-2].steps.tolist() == [3, 4]


def test_a_function_of_the_window() -> None:
    given: list[Any] = [None, "all of it", [Finding(1, "one", {"x": math.inf}, severity="error")], []]
    history = History([rule("own", lambda window: given[len(window) - 1], of="window", window=9)], OUTPUT, GRADIENT)
    told = [history.add(values(), values()) for _ in range(4)]
    assert told[0] == [] and told[3] == []
    assert told[1][0].message == "all of it" and told[1][0].series.path == ""
    assert (told[2][0].series, told[2][0].severity, told[2][0].evidence) == (GRADIENT, "error", {"x": "inf"})
    assert json.loads(json.dumps(told[2][0].to_json(), allow_nan=False))["message"] == "one"


def test_an_exception_in_a_rule_is_told_once_and_the_others_go_on() -> None:
    def broken(site: SiteHistory) -> str:
        raise ZeroDivisionError("of mine")

    rules = [rule("broken", broken), rule("wrong", lambda site: 3), rule("fine", lambda site: "here", cooldown=0)]  # type: ignore[list-item]
    history = History(rules, OUTPUT)
    first, second = history.add(values()), history.add(values())
    assert [one.rule for one in first] == ["broken", "wrong", "fine"] and second == []
    assert first[0].severity == "error" and "'broken' raised ZeroDivisionError: of mine" in first[0].message
    assert "gives None or a message; got 3" in first[1].message


def test_what_stops_the_program_is_not_held_back() -> None:
    def stop(site: SiteHistory) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        History([rule("stop", stop)], OUTPUT).add(values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(DEFAULT[1], threshold=-1.0), "threshold of rule 'exploding'.*got -1.0"),
        (lambda: dataclasses.replace(DEFAULT[1], threshold=math.nan), "threshold of rule 'exploding'.*got nan"),
        (lambda: dataclasses.replace(DEFAULT[1], threshold="3"), "threshold of rule 'exploding'.*got '3'"),
        (lambda: dataclasses.replace(DEFAULT[1], threshold=(2.0, 1.0)), r"range \(low, high\).*got \(2.0, 1.0\)"),
        (lambda: dataclasses.replace(DEFAULT[1], window=0), "window of rule 'exploding'.*at least 1; got 0"),
        (lambda: dataclasses.replace(DEFAULT[1], window=2.5), "window of rule 'exploding'.*got 2.5"),
        (lambda: dataclasses.replace(DEFAULT[1], cooldown=-1), "cooldown of rule 'exploding'.*got -1"),
        (lambda: dataclasses.replace(DEFAULT[1], severity="bad"), "severity of rule 'exploding'.*got 'bad'"),
        (lambda: dataclasses.replace(DEFAULT[1], ports=("outputs",)), "ports of rule 'exploding'.*outputs"),
        (lambda: dataclasses.replace(DEFAULT[1], check=3), "check of rule 'exploding'.*got 3"),
        (lambda: rule("", print), "name is a text that is not empty"),
        (lambda: rule("own", 7), "rule 'own' takes a function; got 7"),
        (lambda: rule("own", print, of="layer"), "of='layer'"),
        (lambda: Engine([*DEFAULT, by_name("dead")]), "twice there: dead.*dataclasses.replace"),
        (lambda: by_name("explodin"), "no rule is named 'explodin'; nearest: \"exploding\""),
        (lambda: by_name("?"), "there are non-finite, exploding"),
        (lambda: Engine(DEFAULT).check(Window(3)), "look at 50 steps; the window keeps 3"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_clear_error(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_a_function_is_no_rule_yet() -> None:
    def mine(site: SiteHistory) -> None: ...

    with pytest.raises(ArgumentError, match=r'Rule of hookline\.watch\.rules; got .*; write rule\("name", mine\)'):
        Engine([*DEFAULT, mine])  # type: ignore[list-item]


def test_a_rule_is_data() -> None:
    changed = dataclasses.replace(by_name("spike"), threshold=5.0)
    assert changed.threshold == 5.0 and by_name("spike").threshold != 5.0
    assert by_name("spike", [changed]) is changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.threshold = 1.0  # type: ignore[misc]
    assert {one.name for one in DEFAULT} >= {"non-finite"} and Engine([]).check(Window(1)) == []


# ---------------------------------------------------------------- the page, and the time


def test_the_page_says_what_the_rules_are() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text("utf-8"), re.M)
    assert [name for name, *_ in rows] == [one.name for one in DEFAULT]
    for (name, ports, threshold, window, meaning, to_do), one in zip(rows, DEFAULT, strict=True):
        assert ports == ("all" if one.ports == PORTS else ", ".join(f"`{port}`" for port in one.ports)), name
        limits = one.threshold if isinstance(one.threshold, tuple) else (one.threshold,)
        assert threshold == (" to ".join(f"{limit:g}" for limit in limits) if any(limits) else "none"), name
        assert window == str(one.window) and meaning == one.meaning and len(to_do) > 20, name


def test_all_rules_for_800_series_take_little_time() -> None:
    kinds = (("output", ""), ("grad_output", ""), ("parameter", "w"), ("parameter_grad", "w"), ("update", "w"))
    series = [
        Series(f"l{n}", port, place, ("ReLU", "Linear")[n % 2], "bfloat16") for n in range(160) for port, place in kinds
    ]
    rng = np.random.default_rng(3)
    typical = np.exp(rng.normal(size=800))
    typical[4::5] = typical[2::5] * 1e-3
    engine = Engine(DEFAULT)
    window, took = Window(engine.size), []
    for step in range(160):
        rms = typical * np.exp(0.3 * rng.normal(size=800))
        numel, none = np.full(800, 100.0), np.zeros(800)
        rows = np.stack([numel, none, rms, -3 * rms, 3 * rms, 10 * rms, none, none, none, none, none], 1)
        window.add(Frame(step, 0.0, np.arange(800, dtype=np.int32), np.zeros(800, np.int32), rows), series)
        start = time.thread_time()
        assert engine.check(window) == []
        took.append(time.thread_time() - start)
    assert sorted(took[60:])[50] < 2e-3  # half a millisecond where nothing else runs
