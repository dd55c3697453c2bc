"""Planted faults: engines that do one thing wrong, and the harness that watches who notices.

`FAULTS` has all of them by name. Never imported by the engine.
"""

from deepinfer.testing.faults.ahead import AHEAD
from deepinfer.testing.faults.computed import COMPUTED
from deepinfer.testing.faults.harness import ENGINE, MAX_STEPS, Outcome, run_trial
from deepinfer.testing.faults.ownership import OWNERSHIP
from deepinfer.testing.faults.planned import PLANNED
from deepinfer.testing.faults.plant import Fault, FaultList
from deepinfer.testing.faults.queued import QUEUED
from deepinfer.testing.faults.slots import SLOTS
from deepinfer.testing.faults.told import TOLD
from deepinfer.testing.faults.transfers import TRANSFERS

FAULTS = FaultList(
    {**OWNERSHIP, **PLANNED, **QUEUED, **COMPUTED, **SLOTS, **AHEAD, **TOLD, **TRANSFERS}
)

__all__ = ["ENGINE", "FAULTS", "MAX_STEPS", "Fault", "Outcome", "run_trial"]
