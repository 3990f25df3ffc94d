"""Per-partition admission control for procrastinate, inside Postgres."""
