"""Several connections at once: nobody waits, no gate is exceeded, nothing is lost or doubled."""
