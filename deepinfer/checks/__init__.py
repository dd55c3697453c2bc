"""Checkers that watch an engine run and prove that no block was touched by the wrong hands.

`suite.Checks` is what an engine has: the checkers its configuration names, or none. No torch here
except in `row_tags`.
"""
