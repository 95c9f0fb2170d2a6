"""Fixtures of this group."""

from tests.support.promotion import workspace

__all__ = ["workspace"]
