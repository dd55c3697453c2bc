"""Any project's block manager put through named invariants."""
