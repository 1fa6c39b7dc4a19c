"""Collecting experience and learning from it."""
