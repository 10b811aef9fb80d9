"""Attached, a module is the same to everybody else; removed, it is the same to everybody; a copy has no hooks."""

from __future__ import annotations

import abc
import copy
import enum
import gc
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import hookline
from hookline.errors import ArgumentError, HookError
from hookline.sites import PORTS

from .reference import equal

Attach = Callable[[nn.Module], Any]


def attach(model: nn.Module, seen: list[Any] | None = None) -> Callable[[], None]:
    """Put a hook of every kind at every module; returns what removes them."""
    log = [] if seen is None else seen
    handles = []
    for module in model.modules():
        if isinstance(module, nn.ModuleDict):  # where parametrizations lie; it is never called
            continue
        for register in (
            hookline.register_forward_pre_hook,
            hookline.register_forward_hook,
            hookline.register_backward_pre_hook,
            hookline.register_backward_hook,
        ):
            handles.append(register(module, lambda *_: log.append(1)))
    return lambda: [handle.remove() for handle in handles] and None


# ---------------------------------------------------------------- modules with manners of their own


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Registering(nn.Module):
    """Keeps a registry of its subclasses, with an argument that they must give."""

    known: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, name: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        Registering.known.append(cls)
        cls.registered_as = name


class Registered(Registering, name="one"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Meta(type):
    made: ClassVar[dict[str, type]] = {}

    def __new__(mcs, name: str, bases: Any, body: Any, **options: Any) -> Any:
        cls = super().__new__(mcs, name, bases, body)
        Meta.made[name] = cls
        return cls

    def __init__(cls, name: str, bases: Any, body: Any, *, flavour: str) -> None:
        super().__init__(name, bases, body)
        cls.flavour = flavour


class WithMeta(nn.Module, metaclass=Meta, flavour="sweet"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...

    def forward(self, x: Tensor) -> Tensor:
        return x * self.size()


class Concrete(Abstract):
    def size(self) -> int:
        return 2


class OwnReduce(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width, self.linear = width, nn.Linear(3, width, bias=False)

    def __reduce__(self) -> Any:
        return type(self), (self.width,), {"weight": self.linear.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "weight" not in state:
            super().__setstate__(state)
            return
        self.linear.weight = state["weight"]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OwnDeepcopy(Plain):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        made.note = "deep copy"
        return made


class OwnState(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {"inside": self.__dict__.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["inside"])


class CallsSuper(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class AsksAttributes(Plain):
    """Overrides the lookup of attributes, as wrappers do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def normed() -> nn.Module:
    return weight_norm(nn.Linear(3, 3))


def traced_graph() -> nn.Module:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Flatten()),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 3),
    "slots": Slotted,
    "registry of subclasses": Registered,
    "metaclass": WithMeta,
    "abstract class": Concrete,
    "own __reduce__": OwnReduce,
    "own __deepcopy__": OwnDeepcopy,
    "own __getstate__": OwnState,
    "calls super": CallsSuper,
    "own __getattr__": AsksAttributes,
    "parametrized": normed,
    "graph module": traced_graph,
    "own forward": lambda: _with_own_forward(),
}
CANNOT_PICKLE = {"parametrized", "own forward"}


def _with_own_forward() -> nn.Module:
    module = Plain()
    module.forward = lambda x: x * 7
    return module


def input_of(name: str) -> Tensor:
    return torch.ones(2, 2, 4) if name == "attention" else torch.ones(2, 3)


def first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else first_tensor(output[0])


def run(module: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return first_tensor(module(x))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def shape_of(model: nn.Module) -> list[Any]:
    """What there is to see of a model: classes, keys of ``__dict__``, names and hooks."""
    return [
        (path, type(module), list(module.__dict__), list(dict(module.named_parameters())), _stock_hooks(module))
        for path, module in model.named_modules()
    ]


def _stock_hooks(module: nn.Module) -> list[Any]:
    return [list(value) for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)]


# ---------------------------------------------------------------- after removal


@pytest.mark.parametrize("name", MODULES)
def test_after_removal_nothing_is_left(name: str) -> None:
    model, x = make(name), input_of(name)
    before, output = shape_of(model), run(model, x)
    remove = attach(model)
    run(model, x.requires_grad_()).sum().backward()
    remove()
    assert shape_of(model) == before
    assert equal(run(model, x), output)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - CANNOT_PICKLE))
def test_a_pickle_has_the_same_bytes_after_removal_and_gives_the_same_module_while_attached(name: str) -> None:
    model = make(name)
    before = pickle.dumps(model)
    remove = attach(model)
    attached = pickle.dumps(model)
    remove()
    assert pickle.dumps(model) == before
    assert b"hookline" not in attached
    made, wanted = pickle.loads(attached), pickle.loads(before)
    assert equal(dict(made.state_dict()), dict(wanted.state_dict()))
    if name != "graph module":  # each has a class of its own
        assert shape_of(made) == shape_of(wanted)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_gives_the_original_class(protocol: int) -> None:
    model = Plain()
    attach(model)
    made = pickle.loads(pickle.dumps(model, protocol))
    assert type(made) is Plain and type(made.linear) is nn.Linear


@pytest.mark.parametrize("name", MODULES)
def test_the_state_dict_is_the_same(name: str) -> None:
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    remove = attach(model)
    assert equal(dict(model.state_dict()), dict(before))
    model.load_state_dict(before)
    remove()
    assert equal(dict(model.state_dict()), dict(before))


def test_after_an_exception_in_forward_removal_leaves_nothing() -> None:
    class Fails(Plain):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(super().forward(x).shape)

    model = nn.Sequential(Plain(), Fails())
    before = shape_of(model)
    remove = attach(model)
    with pytest.raises(KeyError):
        model(torch.ones(2, 3))
    remove()
    assert shape_of(model) == before


def test_after_a_recorder_that_an_exception_ends_nothing_is_left() -> None:
    model = Plain()
    before = shape_of(model)
    with pytest.raises(KeyError), hookline.record(model, ports=("input", "output", "grad_input", "grad_output")):
        model(torch.ones(2, 3))
        raise KeyError
    assert shape_of(model) == before


def test_hooks_of_others_stay_in_their_order() -> None:
    model, log = Plain(), []
    model.register_forward_hook(lambda *_: log.append("before"))
    remove = attach(model)
    model.register_forward_hook(lambda *_: log.append("during"))
    remove()
    model(torch.ones(2, 3))
    assert log == ["before", "during"]


def test_a_registry_of_subclasses_hears_nothing() -> None:
    known, made = list(Registering.known), dict(Meta.made)
    for name in ("registry of subclasses", "metaclass"):
        model = make(name)
        remove = attach(model)
        assert getattr(model, "registered_as", "one") == "one" and getattr(model, "flavour", "sweet") == "sweet"
        remove()
    assert Registering.known == known and Meta.made == made


def test_the_class_that_was_made_is_freed() -> None:
    class Short(Plain):
        pass

    model = Short()
    attach(model)()
    gc.collect()
    assert Short.__subclasses__() == []


def test_modules_that_share_a_class_are_hooked_one_by_one() -> None:
    first, second, seen = Plain(), Plain(), []
    remove = attach(first, seen)
    second(torch.ones(2, 3))
    assert seen == [] and type(second) is Plain
    remove()


# ---------------------------------------------------------------- while attached


@pytest.mark.parametrize("name", MODULES)
def test_an_attached_module_looks_as_ever(name: str) -> None:
    model = make(name)
    before = (repr(model), type(model).__name__, type(model).__qualname__, type(model).__module__, dir(model))
    cls = type(model)
    attach(model)
    assert isinstance(model, cls)
    assert (repr(model), type(model).__name__, type(model).__qualname__, type(model).__module__) == before[:4]
    assert set(dir(model)) - set(before[4]) <= {"_hookline_tap", "__hookline_original__", "__prepare_scriptable__"}
    assert [path for path, _ in model.named_modules()] == [path for path, _ in make(name).named_modules()]


@pytest.mark.parametrize("name", MODULES)
def test_an_attached_module_still_trains_moves_and_freezes(name: str) -> None:
    model = make(name)
    attach(model)
    model.eval().train().requires_grad_(False).requires_grad_(True).double().float()
    model.apply(lambda module: None)
    model.zero_grad()
    run(model, input_of(name).requires_grad_()).sum().backward()


def test_forward_keeps_its_signature_and_docstring() -> None:
    import inspect

    before = (inspect.signature(Plain().forward), nn.Linear(1, 1).forward.__doc__)
    model = Plain()
    attach(model)
    assert (inspect.signature(model.forward), model.linear.forward.__doc__) == before


# ---------------------------------------------------------------- copies


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MODULES)
def test_a_copy_has_no_hooks_and_computes_the_same(name: str, how: str) -> None:
    if how != "deepcopy" and name in CANNOT_PICKLE:
        pytest.skip("torch itself cannot pickle it")
    model, x, seen = make(name), input_of(name), []
    classes = [type(module) for module in model.modules()]
    reference = COPIES[how](model)
    output = run(reference, x)
    attach(model, seen)
    twin = COPIES[how](model)
    assert equal(run(twin, x), output) and seen == []
    if name not in ("parametrized", "graph module"):  # each has a class of its own, with and without hooks
        assert [type(module) for module in twin.modules()] == classes
    assert shape_of(twin)[0][2] == shape_of(reference)[0][2]
    run(model, x)
    assert seen


def test_a_shallow_copy_has_no_hooks_and_shares_the_weights() -> None:
    model, seen = Plain(), []
    attach(model, seen)
    twin = copy.copy(model)
    assert type(twin) is Plain and twin.linear is model.linear
    assert "_hookline_tap" not in twin.__dict__
    twin.forward(torch.ones(2, 3))
    inner = 4 - 2  # the two forward hooks of the shared linear module
    assert len(seen) == inner


def test_a_copy_can_be_hooked_and_the_original_is_not_disturbed() -> None:
    model, seen, of_twin = Plain(), [], []
    attach(model, seen)
    twin = copy.deepcopy(model)
    remove = attach(twin, of_twin)
    twin(torch.ones(2, 3))
    assert seen == [] and of_twin
    remove()
    model(torch.ones(2, 3))
    assert seen and type(model) is not Plain and type(twin) is Plain


def test_a_tensor_on_the_graph_of_a_hooked_module_is_copied_as_ever() -> None:
    model = Plain()
    attach(model)
    detached = copy.deepcopy(model(torch.ones(2, 3)).detach())
    assert detached.shape == (2, 3)


def test_a_module_that_makes_another_of_its_own_class_makes_one_without_hooks() -> None:
    class Spawns(Plain):
        def spawn(self) -> Spawns:
            return type(self)()

    model, seen = Spawns(), []
    remove = attach(model, seen)
    twin = model.spawn()
    twin(torch.ones(2, 3))
    assert seen == []
    remove()
    assert type(pickle.loads(pickle.dumps(twin.linear))) is nn.Linear
    assert twin.__class__.__name__ == "Spawns" and isinstance(twin, Spawns)


class Colour(enum.Enum):
    RED = 1


def test_other_things_of_a_module_are_copied_with_it() -> None:
    model = Plain()
    model.colour, model.notes = Colour.RED, {"deep": [1, 2]}
    attach(model)
    twin = copy.deepcopy(model)
    assert twin.colour is Colour.RED and twin.notes == {"deep": [1, 2]} and twin.notes is not model.notes


# ---------------------------------------------------------------- parametrized weights


def test_hooks_see_the_modules_of_a_parametrization() -> None:
    model, seen = normed(), []
    hookline.register_forward_hook(model.parametrizations.weight, lambda module, args, output: seen.append(output))
    hookline.register_backward_hook(model.parametrizations.weight, lambda module, _, grads: seen.append(grads[0]))
    output = model(torch.ones(2, 3))
    output.sum().backward()
    weight, grad = seen
    assert equal(weight.detach(), model.weight.detach())
    assert equal(grad, torch.full((3, 3), 2.0)), "two rows of ones arrive at each entry of the weight"


def test_a_parametrization_may_come_and_go_while_hooks_are_attached() -> None:
    """Torch gives a parametrized module another class, as we do."""
    x = torch.ones(2, 3)
    model, seen = nn.Linear(3, 3), []
    handle = hookline.register_forward_hook(model, lambda *_: seen.append(1))
    output = model(x)
    weight_norm(model)
    torch.testing.assert_close(model(x), output)
    remove_parametrizations(model, "weight")
    torch.testing.assert_close(model(x), output)
    assert len(seen) == 3
    handle.remove()
    model(x)
    assert len(seen) == 3 and type(model) is nn.Linear


def test_a_parametrization_that_was_there_before_the_hook_cannot_go_before_it() -> None:
    """One of the limits: torch deletes the tensor from the class that the module has, and says that it is not there."""
    x = torch.ones(2, 3)
    model = normed()
    output = model(x)
    handle = hookline.register_forward_hook(model, lambda *_: None)
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        remove_parametrizations(model, "weight")
    handle.remove()
    torch.testing.assert_close(nn.functional.linear(x, model.weight, model.bias), output)


def test_a_parametrization_that_came_while_hooks_were_attached_may_go_after_them() -> None:
    model = nn.Linear(3, 3)
    handle = hookline.register_forward_hook(model, lambda *_: None)
    weight_norm(model)
    handle.remove()
    remove_parametrizations(model, "weight")
    assert type(model) is nn.Linear


# ---------------------------------------------------------------- scripted, traced and compiled


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(ArgumentError) as caught:
        hookline.register_forward_hook(scripted, print)
    assert "Linear is a TorchScript module" in str(caught.value)
    assert "Hook the Python model before torch.jit.script" in str(caught.value)


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.jit.script": lambda model, x: torch.jit.script(model),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
    "torch.fx": lambda model, x: fx.symbolic_trace(model),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("input_grad", [True, False])
def test_what_a_tracer_makes_of_a_recorded_model_computes_the_same(tracer: str, input_grad: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Plain())
    x = torch.randn(2, 3, requires_grad=input_grad)
    output = model(x)
    with hookline.record(model, ports=PORTS):
        made = TRACERS[tracer](model, x)
        if tracer != "torch.fx":
            torch.jit.save(made, io.BytesIO())
    assert equal(made(x), output)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_refuses_a_model_with_hooks(tracer: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Plain()), torch.randn(2, 3)
    remove = attach(model)
    with pytest.raises(HookError, match=f"{tracer} cannot take the hooks of .* along: .* and [0-9] more"):
        TRACERS[tracer](model, x)
    remove()
    assert equal(TRACERS[tracer](model, x)(x), model(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_region_may_pass_by_the_hooks_and_has_the_right_numbers(backend: str, when: str) -> None:
    def train(observed: bool) -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), Plain())
        x = torch.randn(2, 3, requires_grad=True)
        remove = attach(model) if observed and when == "before" else None
        compiled = torch.compile(model, backend=backend)
        if observed and when == "after":
            compiled(x)
            remove = attach(model)
        output = compiled(x)
        output.sum().backward()
        grads = [p.grad for p in model.parameters()]
        if remove is not None:
            remove()
        return output.detach(), x.grad, *grads, compiled(x).detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of itself when it is first imported
        bare, observed = train(observed=False), train(observed=True)
    _end_the_progress_monitor()
    assert equal(observed, bare)


def _end_the_progress_monitor() -> None:
    """Torch's compiler has a progress bar, which leaves a thread."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is not None and bar.monitor is not None:
        bar.monitor.exit()
        bar.monitor = None


def test_an_fx_trace_of_a_recorded_model_is_that_of_the_model() -> None:
    model = Plain()
    code = fx.symbolic_trace(model).code
    with hookline.record(model):
        traced = fx.symbolic_trace(model)
    assert traced.code == code
    assert equal(traced(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_a_graph_module_that_is_recompiled_while_attached_is_still_seen_and_keeps_its_new_code() -> None:
    module, x, seen = traced_graph(), torch.randn(2, 3), []
    handle = hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    for node in list(module.graph.nodes):
        if node.target == "1":  # leave the relu out
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    output = module(x)
    assert equal(seen, [output]) and (output < 0).any()
    handle.remove()
    assert equal(module(x), output)


def test_a_replica_of_data_parallel_computes_and_is_not_the_hooked_module() -> None:
    model, seen = nn.Linear(3, 3), []
    hookline.register_forward_hook(model, lambda module, args, output: seen.append(module))
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = model.weight, model.bias
    assert equal(replica(torch.ones(2, 3)), model(torch.ones(2, 3)))
    assert seen[-1] is model
