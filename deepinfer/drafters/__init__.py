"""Drafters: where the guesses come from that a step verifies.

A drafter decides how many tokens a step may bring, never which: verification takes a draft only
where it equals the token sampled at its position. `registry.DRAFTERS` maps names to classes.
"""
