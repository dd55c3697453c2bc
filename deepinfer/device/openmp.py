"""Keep side streams of the CPU device out of OpenMP, which has room for one team of threads only.

libgomp gives every thread that runs a parallel region a team of its own, and as soon as all teams
together have more threads than the machine has cores it lets waiting threads sleep at once instead
of spinning. A sleeping team costs each operation of a decode step 50 to 100 us to wake: a step of
18 ms became one of 28 ms. So one thread, that of stream `compute`, gets the cores, and every other
thread of a device calls `use_one_thread`.

Knows nothing of streams. Invariant: changes the calling thread only (torch.set_num_threads would
change MKL for the whole process).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_RUNTIMES = re.compile(r"/\S*lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*")


def use_one_thread() -> None:
    """Let torch operations of the calling thread run without a team; torch is loaded already.

    Where no OpenMP runtime is found (another system than Linux), nothing changes.
    """
    import torch

    torch.get_num_threads()  # torch sets up a new thread at its first question; this comes after
    for path in _loaded_runtimes():
        ctypes.CDLL(path).omp_set_num_threads(1)


def _loaded_runtimes() -> set[str]:
    try:
        return set(_RUNTIMES.findall(_MAPS.read_text(encoding="utf-8")))
    except OSError:
        return set()
