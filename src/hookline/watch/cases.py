"""What is to be run once more for an incident, and putting it into a bundle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from hookline.watch.bundle import write_bundle
from hookline.watch.incident import Incident
from hookline.watch.running import Running

__all__ = ["Case", "bundled"]


class Case(NamedTuple):
    """What an incident needs for a bundle.

    Attributes:
        running: The call that is to be replayed.
        gradients: Whether its backward is.
    """

    running: Running
    gradients: bool


def bundled(incident: Incident, case: Case, folder: Path) -> Incident:
    """Write a bundle for ``hookline replay`` into a folder; the training goes on whatever comes of it.

    Returns:
        The incident with the path of the bundle, or with ``bundle_failed`` in its evidence.
    """
    running = case.running
    module = running.module()
    args, kwargs = running.held or (running.args, running.kwargs)
    if module is None or (case.gradients and running.held is None):
        return incident
    place = folder / f"step-{incident.step:06d}-rank-{incident.rank}"
    try:
        write_bundle(
            place,
            module,
            args,
            kwargs,
            grad_outputs=running.grads if case.gradients else None,
            rng=running.rng,
            incident=incident.to_json(),
            autocast=running.autocast,
        )
    except Exception as error:  # what a user's module or a disk raises cannot be known
        told = {"bundle_failed": f"{type(error).__name__}: {error}"}
        return dataclasses.replace(incident, evidence={**incident.evidence, **told})
    return dataclasses.replace(incident, bundle=str(place))
