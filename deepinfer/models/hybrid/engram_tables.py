"""The fixed numbers of an Engram's hashes, as its rule gives them.

Multipliers come from a seed of the layer's number, moduli are primes of which no layer uses one
twice, so that two columns seldom collide for the same n-grams.

No torch. Invariant: a table is a function of the config's sizes and the Engram layers' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import UserError
from deepinfer.models.hybrid.layer_plan import Engram

_SEED = 10007  # times the layer's number
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # witnesses for all of 64 bits


def engram_tables(plan: Engram, layers: Sequence[int]) -> dict[str, NDArray[np.int64]]:
    """`multipliers` [L, n], `primes` [L, n-1, heads], `offsets` [L, columns] of L `layers`.

    Raises UserError if the primes do not add up to the rows `plan.num_embeddings` says.
    """
    sizes, heads = plan.max_ngram_size, plan.num_heads
    bound = (2**63 - 1) // plan.compressed_vocab_size // 2  # so that id * multiplier fits 63 bits
    multipliers = [
        np.random.default_rng(_SEED * layer).integers(0, bound, sizes) * 2 + 1 for layer in layers
    ]
    primes: list[list[list[int]]] = []
    used: set[int] = set()
    for _ in layers:
        primes.append([])
        for _ in range(sizes - 1):
            last = plan.vocab_size - 1
            primes[-1].append([])
            for _ in range(heads):
                last = _next_prime(last, used)
                primes[-1][-1].append(last)
    table = np.array(primes, np.int64)
    flat = table.reshape(len(layers), -1)
    rows = tuple(flat.sum(1).tolist())
    if rows != plan.num_embeddings:
        raise UserError(
            f"engram_num_embeddings: {list(plan.num_embeddings)}; engram_vocab_size "
            f"{plan.vocab_size} gives tables of {list(rows)} rows"
        )
    return {
        "multipliers": np.array(multipliers, np.int64),
        "primes": table,
        "offsets": np.cumsum(flat, axis=1) - flat,
    }


def _next_prime(last: int, used: set[int]) -> int:
    """The next prime above `last` that is not in `used`; put there."""
    number = last + 1
    while number in used or not _is_prime(number):
        number += 1
    used.add(number)
    return number


def _is_prime(number: int) -> bool:
    """Miller-Rabin, exact below 2^64."""
    if number < 2 or any(number % prime == 0 for prime in _PRIMES):
        return number in _PRIMES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(
        pow(witness, odd, number) == 1
        or any(pow(witness, odd << power, number) == number - 1 for power in range(twos))
        for witness in _PRIMES
    )
