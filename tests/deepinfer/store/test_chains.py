"""Which entry goes next: order of use, chains, holds, and that choosing changes nothing."""

from __future__ import annotations

import random

import pytest

from deepinfer.errors import OwnershipError
from deepinfer.store.chains import Chains, Evictions


def grown(*entries: str) -> Chains[str]:
    """Entries of one byte, `b:a` continues `a`, each used when it was added."""
    chains: Chains[str] = Chains()
    for entry in entries:
        name, _, parent = entry.partition(":")
        chains.add(name, parent or None, 1)
    return chains


def order(chains):
    """All that can go, as it would go one by one."""
    names = []
    while chosen := chains.choose(1):
        chains.remove(chosen[0])
        chains.check_integrity()
        names += chosen
    return "".join(names)


def test_the_example_of_the_docstring():
    """The last of the chain used longest ago; a head goes after its chain, whenever it was used."""
    chains = Chains[str]()
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None)):
        chains.add(name, parent, 1)
    for name in "acdb":
        chains.use(name)
    assert order(chains) == "cdba"


def test_a_choice_of_many_is_the_choice_of_one_after_the_other():
    """Among random trees, sizes, uses and holds; and asking leaves everything as it was."""
    draw = random.Random(7)
    for _ in range(300):
        chains = Chains[int]()
        for name in range(12):
            parent = draw.choice([None, *range(name)])
            chains.add(name, parent, draw.randint(1, 4))
        for name in draw.sample(range(12), 6):
            chains.use(name)
        for name in draw.sample(range(12), draw.randint(0, 2)):
            chains.hold(name)
        need = draw.randint(1, 20)
        at_once = chains.choose(need)
        assert chains.choose(need) == at_once
        one_by_one, freed = [], 0
        while freed < need and (chosen := chains.choose(1)):
            freed += chains.num_bytes
            chains.remove(chosen[0])
            freed -= chains.num_bytes
            one_by_one += chosen
        chains.check_integrity()
        assert at_once == (one_by_one if freed >= need else None)


def test_what_is_held_stays_and_so_does_what_it_continues():
    """Until the last hold is let go; then it has its old place."""
    chains = grown("a", "b:a", "c")
    chains.hold("b")
    chains.hold("b")
    assert chains.choose(2) is None
    assert chains.choose(1) == ["c"]
    chains.let_go("b")
    assert chains.choose(2) is None
    chains.let_go("b")
    assert chains.choose(2) == ["b", "a"]


def test_what_is_continued_no_more_can_go():
    """Also if it was passed over meanwhile."""
    chains = grown("a", "b:a")
    chains.hold("b")
    assert chains.choose(1) is None
    chains.let_go("b")
    chains.remove("b")
    chains.check_integrity()
    assert chains.choose(1) == ["a"]


def test_what_is_to_be_continued_is_spared():
    """Room for b's child is made at the cost of others, not of b and a."""
    chains = grown("a", "b:a", "c")
    assert chains.choose(1, spare="b") == ["c"]
    assert chains.choose(2, spare="b") is None
    assert chains.choose(2) == ["b", "a"]


def test_an_entry_whose_parent_comes_later_is_continued_from_the_start():
    """Children are counted by name, so the order of adding does not matter."""
    chains = grown("b:a", "a")
    assert chains.choose(2) == ["b", "a"]
    assert chains.remove("b") == "tail"
    assert chains.remove("a") == "head"


def test_places_in_a_chain():
    """A tail was never continued, a head begins its chain, the middle is the rest."""
    evictions = Evictions()
    chains = grown("a", "b:a", "c:b", "x")
    for name in "cbax":
        evictions.count(chains.remove(name))
    found = evictions.num_evicted_tail, evictions.num_evicted_middle, evictions.num_evicted_head
    assert found == (2, 1, 1)
    assert evictions.num_evictions == 4


def test_the_heap_stays_small_however_often_entries_are_used():
    """Its outdated entries are dropped, not kept for ever."""
    chains = grown("a", "b", "c")
    for _ in range(1000):
        chains.use("a")
    assert len(chains._candidates) < 100
    assert order(chains) == "bca"


def test_calls_that_make_no_sense_are_refused():
    """Adding twice, letting go what is free, removing what is held."""
    chains = grown("a")
    with pytest.raises(OwnershipError, match="there already"):
        chains.add("a", None, 1)
    with pytest.raises(OwnershipError, match="nobody holds it"):
        chains.let_go("a")
    chains.hold("a")
    with pytest.raises(OwnershipError, match="it is held"):
        chains.remove("a")
    chains.check_integrity()
