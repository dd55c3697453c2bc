"""What a runner is given and gives: a plan as the device runs it, and what was sampled.

A plan made ahead says where its sequences are if all drafts in flight are accepted. How many were
rejected only the device knows. What runs has the plan's shapes, so that nobody waits to know them,
and lies so many positions further back:

    planned    positions 12 13 14 15      tokens ? ? ? ?
    back 2     positions 10 11 12 13      tokens 4 7 9 0     two of its three drafts are there

Of a sequence that has fewer drafts than were planned, the rows behind them are computed as if they
were drafts that are rejected: they lie where the sequence has room, and nobody reads them.

Knows nothing of who put it in. Invariant: what runs lies inside what was planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.plan import Ints, StepPlan, WrongRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a runner computes, with S sequences and T tokens.

    Attributes:
        plan: what runs is as it says, but for the tokens and, with `back`, for all positions and
            lengths.
        token_ids: int32 [T] on the device; without placeholders.
        back: int64 [S] on the device, how many positions before those of the plan each sequence
            is, 0 where it is known; None where all are where the plan says. Chunks longer than a
            decode with drafts are never moved, and no plan with tags is.
    """

    plan: StepPlan
    token_ids: Tensor
    back: Tensor | None = None

    def really(self, planned: Ints, seqs: Ints, device: Device) -> Tensor:
        """Inside submitted work: positions or lengths as they are, int64, of `planned` ones.

        Args:
            planned, seqs: int, of one shape: of the plan, and of which of its sequences each is.
        """
        where: Tensor = device.upload(np.array(planned, np.int64))
        if self.back is None:
            return where
        of = device.upload(np.array(seqs, np.int64))
        return where - self.back[of]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a runner computed, on the device.

    Attributes:
        token_ids, logprobs: int32 [M] and float32 [M], of the plan's `sample_tokens`; None if
            nothing samples.
        wrong_rows: gives what was wrong with the rows read, once the step is done; None where
            nobody looks.
    """

    token_ids: Tensor | None = None
    logprobs: Tensor | None = None
    wrong_rows: Callable[[], WrongRows] | None = None
