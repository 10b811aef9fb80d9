"""The rules that a watch has if none are named; ``docs/rules.md`` says what to do about each."""

from __future__ import annotations

from collections.abc import Iterable

from hookline.errors import OptionError
from hookline.spelling import nearest_clause
from hookline.watch.rules.activations import dead, saturated
from hookline.watch.rules.magnitude import exploding, loss_spike, spike, vanishing
from hookline.watch.rules.parameters import frozen, no_gradient, update_ratio
from hookline.watch.rules.precision import overflow_risk, underflow_risk
from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.series import PORTS
from hookline.watch.window import Window

__all__ = ["DEFAULT", "by_name"]


def non_finite(window: Window, rule: Rule) -> Iterable[Finding]:
    """Nothing: what is not finite is found at the moment it is made, before the step is over."""
    return ()


DEFAULT: tuple[Rule, ...] = (
    Rule(
        "non-finite", non_finite, "NaN or infinite values came out of a module, or into its gradient; told at once.",
        PORTS, threshold=0.0, window=1, severity="error",
    ),
    Rule(
        "exploding", exploding, "The root mean square is many times its median over the last steps.",
        ("output", "grad_output", "parameter", "parameter_grad"), threshold=1e3, window=50, severity="error",
    ),
    Rule(
        "vanishing", vanishing,
        "The gradient is nothing beside the largest one of the step, at this depth or against its own past.",
        ("grad_output", "parameter_grad"), threshold=1e-8, window=20, cooldown=None,
    ),
    Rule(
        "dead", dead, "A rectifier gave nothing but zeros, or did so in most of its channels, for a whole window.",
        ("output",), threshold=0.5, window=10, cooldown=None,
    ),
    Rule(
        "saturated", saturated, "A sigmoid, tanh or softmax was so close to its bounds that no gradient passes.",
        ("output",), threshold=5e-3, window=10, cooldown=None,
    ),
    Rule(
        "spike", spike, "The root mean square of one step stands far out of those of the steps before.",
        ("output", "grad_output", "parameter_grad"), threshold=12.0, window=50, cooldown=10,
    ),
    Rule(
        "no-gradient", no_gradient, "A parameter of a module that ran has a gradient of zeros, or none at all.",
        ("parameter_grad",), threshold=0.0, window=5, cooldown=None,
    ),
    Rule(
        "frozen", frozen, "The optimizer did not move a parameter, though it has a gradient.",
        ("update",), threshold=0.0, window=10, cooldown=None,
    ),
    Rule(
        "update-ratio", update_ratio, "A parameter's updates are too large or too small for its size.",
        ("update",), threshold=(1e-7, 0.2), window=20, cooldown=None,
    ),
    Rule(
        "overflow-risk", overflow_risk, "A value is close to the largest number of its dtype of 16 bits or less.",
        ("output", "grad_output", "parameter_grad"), threshold=0.5, window=1,
    ),
    Rule(
        "underflow-risk", underflow_risk, "Most of a gradient lies below the smallest normal number of its dtype.",
        ("grad_output", "parameter_grad"), threshold=0.5, window=5, cooldown=None,
    ),
    Rule(
        "loss-spike", loss_spike, "The loss stands far above those of the steps before.",
        ("loss",), threshold=10.0, window=50, cooldown=10,
    ),
)  # fmt: skip
"""Every rule with its threshold and window."""


def by_name(name: str, rules: Iterable[Rule] = DEFAULT) -> Rule:
    """The rule of that name.

    Args:
        name: Such as ``"exploding"``.
        rules: Among which it is.

    Raises:
        OptionError: There is none of that name.
    """
    names = {one.name: one for one in rules}
    if name not in names:
        hint = nearest_clause(str(name), names) or f"; there are {', '.join(names)}"
        raise OptionError(f"no rule is named {name!r}{hint}")
    return names[name]
