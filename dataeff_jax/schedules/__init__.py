"""Schedules: pure functions of a clock that counts steps or tokens."""
