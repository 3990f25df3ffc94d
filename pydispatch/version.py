"""Tell whether a schema is at the version of this code, by the ledger of its migrations."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from typing_extensions import LiteralString

from pydispatch.handoff import Query
from pydispatch.migrate import sql_files

__all__ = ["version_steps"]

logger = logging.getLogger(__name__)

# Asked before, for an error would end the transaction; null where there is no ledger.
MAY_LOOK: LiteralString = """
select coalesce(has_table_privilege(to_regclass('dispatch_migrations'), 'select'), false)
  as may_look
"""

LEDGER: LiteralString = "select name, checksum from dispatch_migrations"


def version_steps() -> Generator[Query, Any, None]:
    """Warn where the schema is not at the version of this code.

    Says nothing to a role that may not read the ledger.
    """
    (answer,) = yield Query(MAY_LOOK, {})
    if not answer["may_look"]:
        return
    rows = yield Query(LEDGER, {})
    difference = _difference({row["name"]: row["checksum"] for row in rows})
    if difference:
        logger.warning(
            "The schema is not at this version of pydispatch: %s",
            difference,
            extra={"action": "schema_differs"},
        )


def _difference(applied: dict[str, str]) -> str | None:
    """Say what is to be done about a schema in which these files are applied."""
    files = {file.name: file for file in sql_files()}
    newer = sorted(name for name in applied.keys() - files.keys() if name.startswith("migrations/"))
    if newer:
        return f"it has {newer[-1]}, which is newer. Upgrade pydispatch here"
    missing = [name for name, file in files.items() if applied.get(name) != file.checksum]
    if missing or applied.keys() - files.keys():
        place = f"sql/{missing[0]} is not applied" if missing else "it has files that are gone"
        return f"{place}. Run `pydispatch migrate`"
    return None
