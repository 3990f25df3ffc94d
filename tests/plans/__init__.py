"""How much a statement reads: no scan of a backlog, whatever its size."""
