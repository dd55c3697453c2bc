"""The log of a run's blocks and events, and its replay with other choices."""
