"""A plan says what a step will record, to the byte, and leaves everything as it was."""

from __future__ import annotations

import copy
import functools
import random
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.sites import PORTS

EXAMPLES = Path(__file__).parents[2] / "examples"


class Net(nn.Module):
    """Statistics, random numbers of three kinds, a counter, several outputs, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 4)
        self.drop = nn.Dropout()
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(1, 1)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        h = self.relu(self.drop(self.relu(self.linear(self.norm(x)))))
        return {"h": h * scale + noise, "top": h.argmax(1)}


def state_of(model: Net) -> list[Any]:
    tensors = [tensor.detach().clone() for tensor in model.state_dict(keep_vars=True).values()]
    python = [random.getstate(), model.calls, model.training, [p.grad for p in model.parameters()]]
    return [*tensors, torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype("int64")), python]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ports", [("output",), ("input", "output"), PORTS], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_the_bytes_are_those_of_a_step_and_nothing_moves(ports: tuple[str, ...], input_grad: bool) -> None:
    model, x = Net(), torch.randn(5, 3, requires_grad=input_grad)
    before = state_of(model)
    plan = hookline.plan(model, "**", x, ports=ports, kwargs={"scale": torch.tensor(2.0)})
    assert same(state_of(model), before) and x.grad is None
    assert not any("hookline" in name for module in model.modules() for name in vars(module))
    with hookline.record(model, ports=ports) as rec:
        output = model(x, scale=torch.tensor(2.0))
        output["h"].sum().backward()
    assert plan.nbytes == rec.nbytes > 0
    assert dict(plan.coverage) == dict(rec.coverage)
    for text, site in plan.sites.items():
        events = [event for event in rec if f"{event.path or '(root)'}:{event.port}" == text]
        assert site.nbytes == sum(event.nbytes for event in events)
        assert site[:3] == rec.coverage[text][:3] and site.reason == rec.coverage[text].reason


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"reduce": lambda t: t.sum(0)}, {"reduce": lambda t: 1.0}],
    ids=["dtype", "tensor", "number"],
)
def test_what_is_made_of_the_values_counts(options: dict[str, Any]) -> None:
    model, x = Net(), torch.randn(5, 3)
    plan = hookline.plan(model, ["linear", "norm"], x, **options)
    with hookline.record(model, ["linear", "norm"], **options) as rec:
        model(x)
    assert plan.nbytes == rec.nbytes > 0


def test_a_model_that_cannot_be_copied_runs_itself_and_keeps_its_buffers() -> None:
    model, x = Net(), torch.randn(5, 3)
    model.lock = threading.Lock()
    with pytest.raises(TypeError):
        copy.deepcopy(model)
    before = state_of(model)[:-1]
    assert hookline.plan(model, "linear", x).nbytes == 5 * 4 * 4
    assert same(state_of(model)[:-1], before)


def test_a_loss_of_ones_own_decides_where_gradients_come() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    both = nn.Sequential(nn.Linear(3, 3))
    both.forward = lambda x: (model[0](x), model[1](x))
    both.heads = model
    plan = hookline.plan(both, "heads.*", torch.ones(1, 3), ports="grad_output", loss=lambda output: output[1].sum())
    assert [site.status for site in plan.sites.values()] == ["bypassed", "captured"] and plan.nbytes == 8
    with pytest.raises(ArgumentError, match=r"^loss returned shape \(1, 2\); it must return one number as a tensor\.$"):
        hookline.plan(both, "heads.*", torch.ones(1, 3), ports="grad_output", loss=lambda output: output[0])


class Writes(nn.Module):
    """Writes over a parameter, a buffer and its input, and runs a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.1)
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        self.count = self.count + 1
        with torch.no_grad():
            self.average.add_(1)
        with torch.enable_grad():
            self.linear(x.detach()).sum().backward()
        return checkpoint(self.linear, self.table(index) + F.relu_(x * 1) + x.detach().mul_(2), use_reentrant=True)


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_a_model_that_writes_to_all_that_it_has_is_as_before(can_be_copied: bool) -> None:
    model, index, x = Writes(), torch.tensor([0, 1]), torch.randn(2, 4, requires_grad=True)
    if not can_be_copied:
        model.lock = threading.Lock()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    given = x.detach().clone()
    plan = hookline.plan(model, "**", index, x, ports=PORTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, given) and x.grad is None and plan.coverage["table:grad_output"].status == "captured"


def test_a_lazy_model_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1))
    assert hookline.plan(model, "0", torch.randn(2, 3, 4, 4)).nbytes == 2 * 4 * 16 * 4
    assert isinstance(model[0], nn.LazyConv2d) and model(torch.randn(1, 5, 2, 2)).shape == (1, 4, 2, 2)
    norm = nn.Sequential(nn.LazyBatchNorm2d())  # which torch cannot copy
    with pytest.raises(OptionError, match="call it once first"):
        hookline.plan(norm, "0", torch.randn(2, 3, 4, 4))
    assert isinstance(norm[0], nn.LazyBatchNorm2d)


def test_mistakes_are_told_before_anything_runs() -> None:
    model = Net()
    with pytest.raises(SiteError, match="nearest"):
        hookline.plan(model, "liner", torch.ones(5, 3))
    assert model.calls == 0


# ---------------------------------------------------------------- all is as before


class Unsafe(nn.Module):
    """Cannot be copied, and does in its forward whatever a test wants."""

    def __init__(self, act: Callable[[Unsafe], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.lock = threading.Lock()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.linear(x)


def test_what_cannot_be_put_back_is_told_after_all_the_rest_is() -> None:
    memory = [torch.zeros(1), torch.zeros(1)]

    def act(model: Unsafe) -> None:
        for one in memory:
            one.fill_(1)
        model.count.add_(1)

    def model_with_buffers() -> Unsafe:
        model = Unsafe(act)
        for name, one in zip(("wide", "high"), memory, strict=True):
            one.zero_()
            model.register_buffer(name, one.expand(3))  # which nothing can be copied into
        model.register_buffer("count", torch.tensor(5))
        model.linear.weight.grad = torch.full((2, 2), 3.0)
        return model

    model = model_with_buffers()
    grad = model.linear.weight.grad
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as info:
        hookline.plan(model, "linear", torch.ones(1, 2), ports="grad_output")
    first, second = info.value.__notes__
    assert first == "hookline.plan could not put back wide"
    assert second.startswith("hookline.plan could not put back high: unsupported operation")
    assert model.count == 5 and model.linear.weight.grad is grad and torch.equal(grad, torch.full((2, 2), 3.0))
    model = model_with_buffers()
    with pytest.raises(RuntimeError, match="cannot be multiplied") as info:
        hookline.plan(model, "linear", torch.ones(1, 3))
    assert [note.split(":")[0] for note in info.value.__notes__] == [
        "hookline.plan could not put back wide",
        "hookline.plan could not put back high",
    ]
    assert model.count == 5


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_a_loss_that_uses_the_model_by_name_leaves_its_gradients(can_be_copied: bool) -> None:
    model, weight = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), nn.Parameter(torch.ones(2))
    if not can_be_copied:
        model.lock = threading.Lock()
    own = torch.arange(6.0).reshape(2, 3)
    model[0].weight.grad, weight.grad = own, torch.ones(2)
    others = weight.grad

    def loss(output: Tensor) -> Tensor:
        return output.sum() + model[0].weight.norm() + model[1].bias.sum() + weight.sum()

    plan = hookline.plan(model, "*", torch.ones(4, 3), ports="grad_output", loss=loss)
    assert [site.nbytes for site in plan.sites.values()] == [4 * 2 * 4, 4 * 4]
    assert model[0].weight.grad is own and torch.equal(own, torch.arange(6.0).reshape(2, 3))
    assert [parameter.grad for parameter in model.parameters()][1:] == [None, None, None]
    assert weight.grad is others and torch.equal(others, torch.ones(2))


def test_names_and_entries_are_those_of_before() -> None:
    def act(model: Unsafe) -> None:
        model.late = torch.ones(2)
        model.register_buffer("new", torch.ones(1))
        model.extra = nn.Parameter(torch.ones(1))
        model.layer = nn.Linear(1, 1)
        model.history.append(1)
        model.table["key"] = 2
        model.names.discard("a")
        model.cache.add_(1)
        model.calls += 1
        del model.linear.bias
        model.linear.bias = nn.Parameter(torch.ones(2))

    model = Unsafe(act)
    model.register_buffer("late", None)
    model.register_buffer("last", torch.zeros(1), persistent=False)
    model.register_parameter("scale", None)
    model.history, model.table, model.names, model.calls = [0], {"a": 1}, {"a"}, 0
    model.cache = torch.zeros(2)
    modules = [model, model.linear]
    tables = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    before = [(list(vars(one)), [copy.copy(getattr(one, table)) for table in tables]) for one in modules]
    assert hookline.plan(model, "**", torch.ones(1, 2)).nbytes == 2 * 2 * 4
    after = [(list(vars(one)), [getattr(one, table) for table in tables]) for one in modules]
    for (names, old), (names_now, now) in zip(before, after, strict=True):
        assert names == names_now
        for one, other in zip(old, now, strict=True):
            assert list(one) == list(other)
            if isinstance(one, dict):
                assert all(a is b for a, b in zip(one.values(), other.values(), strict=True))
    assert (model.history, model.table, model.names, model.calls) == ([0], {"a": 1}, {"a"}, 0)
    assert model.late is None and torch.equal(model.cache, torch.zeros(2))


def test_a_tensor_that_gets_another_shape_storage_or_graph_is_put_back() -> None:
    def act(model: Unsafe) -> None:
        with torch.no_grad():
            model.linear.weight.data = torch.ones(2, 2)
            model.grown.resize_(7).fill_(1)
        model.freed.untyped_storage().resize_(0)
        model.average.mul_(model.linear.bias)

    model = Unsafe(act)
    for name in ("grown", "freed", "average"):
        model.register_buffer(name, torch.arange(2.0))
    weight, value = model.linear.weight, model.linear.weight.detach().clone()
    hookline.plan(model, "linear", torch.ones(1, 2), ports="grad_output")
    assert model.linear.weight is weight and torch.equal(weight, value) and weight.requires_grad
    for buffer in model.buffers():
        assert torch.equal(buffer, torch.arange(2.0)) and buffer.grad_fn is None


# ---------------------------------------------------------------- inputs with a state


class Store:
    """A cache: tensors in attributes, one with a graph."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(1, requires_grad=True) * 2]
        self.seen = torch.zeros(1)


class Taking(nn.Module):
    """Writes to what it is given, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, *things: Any, **named: Any) -> Tensor:
        for thing in (*things, *named.values()):
            if isinstance(thing, list):
                thing.append(x)
            elif isinstance(thing, Store):
                thing.keys.append(thing.keys[0] + x)
                thing.seen.add_(1)
            elif isinstance(thing, torch.Generator):
                torch.rand(1, generator=thing)
            elif isinstance(thing, nn.Module):
                x = thing(x)
            elif hasattr(thing, "__next__"):
                next(thing)
        return self.linear(x)


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_inputs_with_a_state_are_copied(can_be_copied: bool) -> None:
    model, seen, store, rng, lines = Taking(), [1], Store(), torch.Generator().manual_seed(3), iter([1, 2])
    if not can_be_copied:
        model.lock = threading.Lock()
    state, first = rng.get_state(), store.keys[0]
    lock = threading.Lock()
    plan = hookline.plan(model, "**", torch.ones(1, 2), seen, store, rng, lines, kwargs={"log": seen, "lock": lock})
    assert plan.nbytes == 2 * 2 * 4
    assert seen == [1] and len(store.keys) == 1 and store.keys[0] is first and torch.equal(store.seen, torch.zeros(1))
    assert torch.equal(rng.get_state(), state) and list(lines) == [1, 2]


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_an_input_that_is_a_part_of_the_model_is_that_part(can_be_copied: bool) -> None:
    model = Taking()
    if not can_be_copied:
        model.lock = threading.Lock()
    plan = hookline.plan(model, "linear", torch.ones(1, 2), model.linear)
    assert plan.coverage["linear:output"].calls == 2


class Feed:
    """Holds what gives the batches."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches


def test_an_input_that_the_pass_would_use_up_is_refused(tmp_path: Path) -> None:
    model, x = Taking(), torch.ones(1, 2)
    values = (value for value in [1, 2])
    advice = (
        "which cannot be copied and which the dry pass would use up; "
        r"give a list of its items, or iter\(list\) where the model wants an iterator\.$"
    )
    with pytest.raises(ArgumentError, match=rf"^example_inputs\[1\]: got an object of type generator, {advice}"):
        hookline.plan(model, "**", x, values)
    with pytest.raises(ArgumentError, match=r"^kwargs\['rows'\]\['a'\]\[0\]: got an object of type generator, "):
        hookline.plan(model, "**", x, kwargs={"rows": {"a": [values]}})
    with pytest.raises(ArgumentError, match=r"^example_inputs\[1\]: got an object of type Feed, "):
        hookline.plan(model, "**", x, Feed(values))
    assert list(values) == [1, 2]
    (tmp_path / "lines.txt").write_text("1\n2\n")
    with open(tmp_path / "lines.txt") as file:
        assert hookline.plan(model, "linear", x, Feed(file)).nbytes == 2 * 4
        assert hookline.plan(model, "linear", x, {"lock": threading.Lock(), threading.Lock(): x}).nbytes == 2 * 4


def test_inputs_in_the_place_of_the_sites_are_told() -> None:
    said = r'^sites: got an object of type {}; they come before the inputs: hookline\.plan\(model, "\*\*", x\)\.$'
    for inputs, kind in ((torch.ones(1, 2), "Tensor"), ([torch.ones(1)], "list"), (np.ones(2), "ndarray")):
        with pytest.raises(ArgumentError, match=said.format(kind)):
            hookline.plan(nn.Linear(2, 1), inputs)


def test_the_text() -> None:
    plan = hookline.plan(nn.Sequential(nn.Linear(3, 64), nn.ReLU()), "*", torch.ones(8, 3))
    assert str(plan).splitlines() == [
        "  0:output  1 call        2 kB",
        "  1:output  1 call        2 kB",
        "a step records 4.1 kB (4,096 bytes)",
        "coverage of 2 sites: 2 captured (2 calls), 0 not reached, 0 bypassed",
    ]
    assert repr(plan) == "<Plan of 2 sites: 4,096 bytes a step>"


# ---------------------------------------------------------------- real models


@pytest.fixture(autouse=True)
def no_progress_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of transformers would start a thread that stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def picture_network() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    names = runpy.run_path(str(EXAMPLES / "classify_cat.py"))
    return names["pretrained"](), (names["prepare"](names["cat_photo"]()),), {}


def sentence_encoder() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    names = runpy.run_path(str(EXAMPLES / "sentence_similarity.py"))
    model = transformers.AutoModel.from_pretrained(names["model_folder"]())
    return model.eval(), (), {"input_ids": torch.tensor([[101, 7592, 2088, 102]])}


def voice_encoder() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    names = runpy.run_path(str(EXAMPLES / "speaker_lstm.py"))
    return names["pretrained"](), (torch.rand(2, 40, 40),), {}


@pytest.mark.filterwarnings("ignore")  # transformers has another name for it since 5.20
def test_the_cache_of_a_decoder_stays_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=5, num_hidden_layers=1, **sizes)
    model, cache = transformers.LlamaModel(config).eval(), transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    named = {"input_ids": torch.tensor([[1, 2]]), "past_key_values": cache, "use_cache": True}
    plan = hookline.plan(model, "layers.0.self_attn.k_proj", kwargs=named)
    assert plan.nbytes == 2 * 8 * 4 and cache.get_seq_length() == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [picture_network, sentence_encoder, voice_encoder])
@pytest.mark.parametrize("ports", [("output",), PORTS], ids=["output", "all"])
def test_the_bytes_of_a_real_model(make: Callable[[], Any], ports: tuple[str, ...]) -> None:
    model, args, kwargs = make()
    plan = hookline.plan(model, "**", *args, ports=ports, kwargs=kwargs)
    with hookline.record(model, ports=ports) as rec:
        output = model(*args, **kwargs)
        if len(ports) > 1:
            leaves = [leaf for leaf in (output.values() if isinstance(output, dict) else [output])]
            functools.reduce(torch.add, [leaf.sum() for leaf in leaves if leaf.requires_grad]).backward()
    assert plan.nbytes == rec.nbytes > 0
    assert dict(plan.coverage) == dict(rec.coverage)


class Uncopyable(nn.Module):
    """Runs itself in a dry pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.layer = threading.Lock(), nn.Linear(4, 4)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.missing = torch.full((4,), float("nan"))
        self.register_buffer("wide", torch.tensor(float("nan")).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.missing


def test_a_value_that_is_not_written_stays_untouched_even_where_it_cannot_be_compared() -> None:
    model, x = Uncopyable(), torch.ones(3, 4)
    y = model(x)
    assert hookline.plan(model, "layer", x).nbytes == 48
    y.sum().backward()  # a tensor of the graph that had been written to would be refused
    assert torch.equal(model.adjacency.to_dense(), torch.eye(3))
