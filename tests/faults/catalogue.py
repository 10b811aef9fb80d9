"""The fault kinds of PyTorch's hooks: what goes wrong in PyTorch 2.13, by number, and where people report it.

A test says with `@fault(number, decision, how)` which kind it proves; `table.py` makes docs/faults.md of both. A number
followed by # is an issue or pull request of pytorch/pytorch, unless a repository is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

BACKWARD = "Backward hooks on modules"
FORWARD = "Forward hooks, and what they reach"
LIFE = "Removal, copies and files"
TENSOR = "Hooks on tensors and parameters"
AROUND = "Checkpointing, transforms, modes and mixed precision"
TOOLS = "Tools that rewrite a model"
COMPILE = "torch.compile"
MANY = "Several devices and processes"
GROUPS = (BACKWARD, FORWARD, LIFE, TENSOR, AROUND, TOOLS, COMPILE, MANY)

RIGHT = "right"
REFUSED = "refused"
BY_DEFINITION = "by definition"
NOT_YET = "not yet"


class Kind(NamedTuple):
    """One way in which hooks fail: its group, what PyTorch does, and reports of it."""

    group: str
    title: str
    reports: str = ""


KINDS: dict[int, Kind] = {
    1: Kind(BACKWARD, "The legacy backward hook gets the gradients of the module's last operation", "#598, #12331"),
    2: Kind(BACKWARD, "The legacy backward hook of a module with three inputs gets two gradients", "#598, #7040"),
    3: Kind(BACKWARD, "An in-place ReLU after a hooked module raises", "#61519, pytorch/vision#4164"),
    4: Kind(BACKWARD, "A hooked module that works in place raises", "#61519, captum#979"),
    5: Kind(BACKWARD, "`out += x` on the output of a hooked module raises", "#61519, pytorch-grad-cam#183"),
    6: Kind(BACKWARD, "A module that returns a dict: the backward hook is never called", "#87540"),
    7: Kind(
        BACKWARD,
        "A module that returns a dataclass or `ModelOutput`: the backward hook is never called",
        "transformers#36508",
    ),
    8: Kind(BACKWARD, "A module that returns a list: the backward hook is never called", "#77812"),
    9: Kind(BACKWARD, "LSTM and GRU: the gradients of `h` and `c` are missing", "backpack#147"),
    10: Kind(BACKWARD, "LSTM with a loss on `h` alone: the backward hook is never called", "backpack#147"),
    11: Kind(BACKWARD, "A `PackedSequence` goes in and comes out: the backward hook is never called", "backpack#147"),
    12: Kind(BACKWARD, "Keyword arguments are missing in `grad_input`", "#35643, #156695"),
    13: Kind(BACKWARD, "Keyword arguments only: the hook is called early, with an empty tuple", "#35643, #89389"),
    14: Kind(BACKWARD, "Tensors nested in an argument are missing in `grad_input`", "#82042"),
    15: Kind(
        BACKWARD, "No input requires a gradient: the hook is called before the module's own backward", "#100528, #56380"
    ),
    16: Kind(BACKWARD, "An input that the module does not use gets a gradient of zeros in the place of None", ""),
    17: Kind(BACKWARD, "`autograd.grad(loss, parameters)`: the backward hook is never called", "#117925, #100528"),
    18: Kind(BACKWARD, "A pass for the parameters alone leaves a gradient behind that shows up in a later pair", ""),
    19: Kind(
        BACKWARD,
        "One tensor passed as two arguments arrives as two tensors: `query is key` turns False",
        "#139191, #61446",
    ),
    20: Kind(BACKWARD, "`MultiheadAttention` takes another path, with other bits, once it is hooked", "#139191"),
    21: Kind(BACKWARD, "`torch.func.grad`, `jacrev` and the like raise on a hooked module", "functorch#1124, #99556"),
    22: Kind(BACKWARD, "Forward-mode differentiation raises on a hooked module", ""),
    23: Kind(BACKWARD, "A module that returns `x.max(dim=1)` or another struct sequence raises", ""),
    24: Kind(BACKWARD, "A backward pre-hook that returns one tensor, as documented, raises", ""),
    25: Kind(BACKWARD, "After a legacy hook was removed, no full hook can be registered", ""),
    26: Kind(FORWARD, "`module.forward(x)` passes every hook by", "#117925, sglang#21686"),
    27: Kind(BACKWARD, "Two threads on one graph: pairs are made of gradients of both", "#76681, #132055"),
    28: Kind(TENSOR, "A hook that writes into its gradient changes the gradient of another branch", ""),
    29: Kind(FORWARD, "A kept output is overwritten by a later in-place operation", "captum#156, thingsvision#44"),
    30: Kind(FORWARD, "A forward hook gets the input as the module has overwritten it", "#95617"),
    31: Kind(FORWARD, "A forward hook does not get the keyword arguments", "#156695"),
    32: Kind(FORWARD, "A hook that returns a value by accident replaces the output", ""),
    33: Kind(FORWARD, "A capturing hook with a return value gives the values of the first call to every later one", ""),
    34: Kind(FORWARD, "A pre-hook that returns a list of inputs: the list becomes the one input", ""),
    35: Kind(FORWARD, "`MultiheadAttention` uses the weight of `out_proj` without calling it", "#78109, thop#157"),
    36: Kind(FORWARD, "A hook in `TransformerEncoder` gets a nested tensor in evaluation with a mask", "#82919"),
    37: Kind(FORWARD, "The fused encoder passes global hooks by", "#128413, #132700"),
    38: Kind(FORWARD, "The fused encoder and hooks on its sub-modules", "#132700"),
    39: Kind(FORWARD, "A tied weight is used without calling the module that owns it", "torchsummaryX#10"),
    40: Kind(FORWARD, "A hook on a `ModuleList` is never called", ""),
    41: Kind(FORWARD, "A shared module: the last call wins, and one of its names is hidden", "tangermeme#54"),
    42: Kind(
        BACKWARD, "A shared module: backward events come in reverse, and nothing tells the calls apart", "torch-scan#24"
    ),
    43: Kind(FORWARD, "The module raises: its forward hooks are skipped, and pairs stay open", "#103997"),
    44: Kind(FORWARD, "A global `always_call` hook with keywords is called with the wrong number of arguments", ""),
    45: Kind(LIFE, "Removing a global hook leaves its number behind", ""),
    46: Kind(FORWARD, "An `always_call` hook that fails itself is not heard of", ""),
    47: Kind(LIFE, "A probe that raises leaves its hook on the model", ""),
    48: Kind(FORWARD, "A hook that was removed by an earlier hook of the same call is called", ""),
    49: Kind(FORWARD, "A hook that is registered during the call: sometimes called, sometimes not", "#60132"),
    50: Kind(LIFE, "A deep copy writes into the store of the original", "#1148, accelerate#1835"),
    51: Kind(LIFE, "A handle does not remove the hook of a deep copy", "fairscale#816"),
    52: Kind(LIFE, "A kept activation makes the model impossible to copy", "Torch-Pruning#374"),
    53: Kind(LIFE, "A hook that is a lambda makes the model impossible to pickle", "DALLE-pytorch#154, nnsight#723"),
    54: Kind(TENSOR, "A hook on a parameter is lost in a deep copy", "#41529"),
    55: Kind(TENSOR, "A hook on a parameter is lost by `load_state_dict(assign=True)`", "#5790"),
    56: Kind(FORWARD, "A kept output keeps the whole graph alive", "opacus#176, tangermeme#84"),
    57: Kind(TENSOR, "After an in-place operation a tensor's hook and its `.grad` mean two values", ""),
    58: Kind(TENSOR, "A hook on a view is lost by a later in-place operation", "#181832, #79767"),
    59: Kind(TENSOR, "A pre-hook on the node of a view is lost in the same way", "#181832"),
    60: Kind(TENSOR, "A tensor's hook gets the gradients of all its uses, not those of one module", ""),
    61: Kind(TENSOR, "A multi-gradient hook on a leaf raises under `autograd.grad`", "#131753"),
    62: Kind(TENSOR, "A multi-gradient hook where one gradient is undefined", ""),
    63: Kind(TENSOR, "A multi-gradient hook loses events when two backward passes run at once", "#132055"),
    64: Kind(TENSOR, "A post-accumulate hook gets the sum of all passes", ""),
    65: Kind(TENSOR, "A post-accumulate hook is not called by `autograd.grad`", ""),
    66: Kind(AROUND, "A post-accumulate hook is called twice under reentrant checkpointing", "#81296"),
    67: Kind(TENSOR, "A hook on the node that accumulates a parameter's gradient goes away with the node", ""),
    68: Kind(TENSOR, "A hook on a parametrized weight is never called", ""),
    69: Kind(AROUND, "Of nested `saved_tensors_hooks` only the innermost pair is called", "#70134, #82156"),
    70: Kind(AROUND, "`saved_tensors_hooks` do not see what a checkpointed block saves", "#190581"),
    71: Kind(AROUND, "Checkpointing calls forward hooks again in the backward pass", "#81296, #134310"),
    72: Kind(AROUND, "Under reentrant checkpointing a kept activation has no graph", "#4594"),
    73: Kind(AROUND, "Under `vmap` a hook gets a tensor that cannot be used afterwards", "functorch#638"),
    74: Kind(AROUND, "Under `vmap` a backward hook raises", "functorch#638, #161266"),
    75: Kind(AROUND, "A value kept in `inference_mode` cannot be used in training", ""),
    76: Kind(AROUND, "Hooks get gradients multiplied by the scale of the `GradScaler`", "languini-kitchen#7"),
    77: Kind(AROUND, "Under autocast a hook gets the dtype of the computation", ""),
    78: Kind(TENSOR, "A hook on a lazy parameter raises", ""),
    79: Kind(FORWARD, "A pre-hook on a lazy module", "#60132"),
    80: Kind(BACKWARD, "A jagged nested tensor as input", ""),
    81: Kind(BACKWARD, "Sparse gradients", ""),
    82: Kind(TOOLS, "`fuse_modules` drops and moves hooks", "#37151, sparseml#1280"),
    83: Kind(TOOLS, "`quantize_dynamic` and hooks", "#37151"),
    84: Kind(TENSOR, "A multi-gradient hook is called twice when one of its tensors is the root", ""),
    85: Kind(TOOLS, "`torch.jit.script` of a model with a hook that is a lambda raises", "#53421, #34329"),
    86: Kind(TOOLS, "A hook on a scripted module raises", "#29037, #86818"),
    87: Kind(TOOLS, "`torch.jit.trace` freezes what a hook did during the trace", "pytorch-summary#103"),
    88: Kind(TOOLS, "`torch.fx.symbolic_trace` drops hooks in silence", "#105445, pytorch/vision#5193"),
    89: Kind(TOOLS, "`torch.export` and a hook that changes the output", "#167329"),
    90: Kind(TOOLS, "`torch.export`: a hook that observes runs during the export only", "#196819"),
    91: Kind(COMPILE, "A forward hook that is added after the first call is passed by", "#117758, #91665"),
    92: Kind(
        COMPILE, "A backward hook that is added after the first call is passed by: wrong gradients", "#115750, #117265"
    ),
    93: Kind(COMPILE, "A backward hook breaks the graph, or raises under `fullgraph`", "#117266, #133303"),
    94: Kind(COMPILE, "`print` or `.item()` in a hook breaks `fullgraph`", "#173452"),
    95: Kind(COMPILE, "A kept activation is not on the way to the loss", "#91468"),
    96: Kind(COMPILE, "A hook under `torch.compiler.disable`", "#142358"),
    97: Kind(COMPILE, "A global hook that is added after the first call is passed by", "#96722"),
    98: Kind(MANY, "`DataParallel`: the hook gets a replica, and replicas share the table of hooks", "#42478, #128272"),
    99: Kind(MANY, "`DistributedDataParallel`: a parameter's hook gets the gradient of its own rank", "#35191"),
    100: Kind(MANY, "FSDP2: a hook on a parameter is never called", "torchrec#4268"),
    101: Kind(MANY, "FSDP2: a view as output and an in-place operation lose FSDP's own hook", "#181832"),
    102: Kind(MANY, "Tensor parallelism: a hook gets the local shard", "#181850"),
    103: Kind(MANY, "`DistributedDataParallel` and backward hooks", ""),
    104: Kind(FORWARD, "Identity and Dropout in evaluation return their input: a kept output changes with it", ""),
    105: Kind(
        BACKWARD, "A function that writes into a view and returns no gradient for it: the base loses its own", "#89812"
    ),
    106: Kind(BACKWARD, "A subclass of tuple with a constructor of its own raises", ""),
    107: Kind(BACKWARD, "A backward hook reads `parameter.grad` before it is there", "#149938"),
    108: Kind(LIFE, "A copy of a model whose `forward` was patched calls the original", "accelerate#2613"),
    109: Kind(BACKWARD, "Autograd's own error about a modified tensor is replaced by another one", "#61519"),
    110: Kind(BACKWARD, "`create_graph=True` and the lifetime of the graph", "#82528, #71068"),
    111: Kind(BACKWARD, "An integer input gets a gradient of zeros", ""),
    112: Kind(AROUND, "`always_call` hooks get None when checkpointing stops a recomputation early", ""),
    113: Kind(BACKWARD, "A named tuple as output", ""),
    114: Kind(COMPILE, "A tensor that a custom operation keeps is overwritten", ""),
    115: Kind(BACKWARD, "A double backward makes one event", "#88312"),
    116: Kind(
        BACKWARD, "Loss and gradient penalty in one pass: `grad_input` holds the second-order part too", "#88312"
    ),
}


class Proof(NamedTuple):
    """What a test proves of a kind: the decision, how Hookline gets there, and the test."""

    decision: str
    how: str
    test: str


PROOFS: dict[int, list[Proof]] = {}

Test = TypeVar("Test", bound=Callable[..., Any])


def fault(number: int, decision: str, how: str) -> Callable[[Test], Test]:
    """Say that a test proves a kind.

    Args:
        number: The kind.
        decision: RIGHT, REFUSED or BY_DEFINITION.
        how: What Hookline gives, in one clause for the table. The first test of a kind says it, others pass "".
    """
    assert number in KINDS, number
    assert decision in (RIGHT, REFUSED, BY_DEFINITION), decision

    def note(test: Test) -> Test:
        where = f"{test.__module__.rpartition('.')[2]}.py::{test.__qualname__}"
        PROOFS.setdefault(number, []).append(Proof(decision, how, where))
        return test

    return note
