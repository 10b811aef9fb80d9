"""Pictures of feature maps, distributions, gradients and attention, as matplotlib figures.

matplotlib is loaded by the first call, not by the import. No window is opened and no global state is touched: figures
are made without pyplot, so a training loop can draw as often as it likes.
"""

from __future__ import annotations

from hookline.report.plot.distribution import histogram
from hookline.report.plot.feature import feature_maps
from hookline.report.plot.flow import gradient_flow
from hookline.report.plot.heads import attention

__all__ = ["attention", "feature_maps", "gradient_flow", "histogram"]
