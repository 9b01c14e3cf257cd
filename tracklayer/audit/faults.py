"""Faults that predict the rows exactly: each detector says which of the wrong sets its hypothesis accounts for.

What only shows as a pattern (old rows, a draft model, other weights) is in patterns.py.
"""

from __future__ import annotations

from tracklayer.audit.case import Detector
from tracklayer.audit.fault_origins import other_request, other_version, physical_ids, shifted_layers, shifted_rows
from tracklayer.audit.fault_values import constant_rows, duplicated_rows, shared_columns, truncated_ids, zero_rows

# The more specific first: of detectors that explain equally much, the first one's name is given.
DETECTORS: tuple[Detector, ...] = (
    zero_rows,
    duplicated_rows,
    constant_rows,
    shared_columns,
    truncated_ids,
    shifted_layers,
    shifted_rows,
    other_version,
    other_request,
    physical_ids,
)
