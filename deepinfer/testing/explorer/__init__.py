"""Every order of events of a small engine: scenarios, search, shrinking, files."""
