"""How a step's decodes are grouped. Numbers are checked in test_qwen3."""

import numpy as np

from deepinfer.models.attention import shared_groups


def groups(tables: list[list[int]], complete: list[int], min_saved: int = 1) -> list[tuple]:
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    found = shared_groups(padded, np.array(complete, np.int32), min_saved)
    return sorted((tuple(members.tolist()), num) for members, num in found)


def test_strangers_form_no_group() -> None:
    """Tables without a common first block stay alone."""
    assert groups([[1, 2], [3, 2], [4, 5]], [2, 2, 2]) == []


def test_forks_share_what_all_have_complete() -> None:
    """The shared length ends at the first difference, and at the shortest complete part."""
    assert groups([[1, 2, 3, 4], [1, 2, 3, 5], [9]], [3, 3, 1]) == [((0, 1), 3)]
    assert groups([[1, 2, 3, 4], [1, 2, 3, 5]], [3, 2]) == [((0, 1), 2)]


def test_padding_is_not_shared() -> None:
    """Block 0 in the padding of two short tables is no common block."""
    assert groups([[1], [2], [3, 4, 5]], [0, 0, 2]) == []
    assert groups([[1, 8], [1, 9], [1, 2, 3, 4]], [1, 1, 3]) == [((0, 1, 2), 1)]


def test_a_group_splits_where_that_saves_more() -> None:
    """Two prompts behind one system block are two groups if their own parts are longer."""
    tables = [[1, 2, 3, 4, 20], [1, 2, 3, 4, 21], [1, 6, 7, 8, 22], [1, 6, 7, 8, 23]]
    assert groups(tables, [4] * 4) == [((0, 1), 4), ((2, 3), 4)]
    assert groups([[1, 5, 6, 7], [1, 5, 6, 7], [1, 5, 8, 9], [1, 5, 8, 9]], [3] * 4) == [
        ((0, 1, 2, 3), 2)
    ]


def test_small_savings_form_no_group() -> None:
    """A group that saves fewer block reads than asked is not worth its launches."""
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert groups(tables, [2, 2, 2], min_saved=4) == [((0, 1, 2), 2)]
    assert groups(tables, [2, 2, 2], min_saved=5) == []
