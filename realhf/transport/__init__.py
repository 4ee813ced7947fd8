"""Typed, authenticated messages between the master and its workers."""
