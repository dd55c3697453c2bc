"""Tests of the manager of `--block-manager`, for `pytest --pyargs` with the name of this module.

Knows nothing but the class it takes over. Invariant: without the option every test fails.
"""

from deepinfer.testing.conformance.pytest_plugin import BlockManagerConformance


class TestBlockManager(BlockManagerConformance):
    """The manager named on the command line."""
