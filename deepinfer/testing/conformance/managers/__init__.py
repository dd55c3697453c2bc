"""Adapters that come with the kit, one file each; the first to read is `reference`."""
