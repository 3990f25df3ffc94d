"""Every statement of the pages, one topic a file. None reads more of a backlog than it shows.

What grows with the number of partitions is one pass over them (the totals), with the number of
ticks the last hour's samples; staged jobs are only ever read by index, a page at a time.
"""

from pydispatch.web.queries import history, jobs, operation, partitions, policies

__all__ = ["history", "jobs", "operation", "partitions", "policies"]
