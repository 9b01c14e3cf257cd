"""Counts of chosen experts by layer over the routes that were returned."""

from __future__ import annotations

import numpy as np

from tracklayer.routes.record import Routes


class ExpertLoad:
    """counts_LE int64 [L, E]: how often expert e was chosen at MoE layer l; `rows`: tokens counted."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts_LE = np.zeros((num_layers, num_experts), np.int64)
        self.rows = 0

    def add(self, routes: Routes) -> None:
        """Count the rows of one sequence. Raises IncompleteRoutes when one is missing."""
        routes.require_complete()
        self.rows += len(routes)
        for layer, (counts_E, top_k) in enumerate(zip(self.counts_LE, routes.top_k_L, strict=True)):
            counts_E += np.bincount(routes.experts_TLK[:, layer, :top_k].ravel(), minlength=len(counts_E))
