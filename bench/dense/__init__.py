"""Dense forwards: whole sequences at once, without paging, sharing, chunks or caches."""
