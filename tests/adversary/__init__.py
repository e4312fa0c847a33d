"""Hostile keys, queries and values against exact rational arithmetic, over every public route.

``python -m tests.adversary --seconds 3600 --seed 0`` looks for breaks of a promise; the tests here do so for a minute.
"""
