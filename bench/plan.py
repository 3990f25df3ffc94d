"""How much is measured."""

from __future__ import annotations

import dataclasses

from bench.server import Server

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The server, and the sizes: those of the bars, or small ones that only show the shape."""

    server: Server
    repeat: int = 5
    """Repetitions of which the median counts."""
    small: bool = False

    def size(self, full: int, small: int) -> int:
        """Return one of two sizes."""
        return small if self.small else full
