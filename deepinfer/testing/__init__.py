"""Tests of ownership that others can run: planted faults, explorer, conformance kit.

Above the engine and never imported by it. Imports nothing by itself.
"""
