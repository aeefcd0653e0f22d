"""Schemas that demand themselves without end: no text is long enough to follow them."""

from __future__ import annotations

from longreach.api.service.json_schema.document import Document, SchemaError, is_schema


def refuse_endless(document: Document) -> None:
    """Refuse a document in which some schema can only be followed by following it again, deeper down.

    Raises:
        SchemaError: there is one; names the references.
    """
    refs = {ref: pointer for schema, pointer in document.schemas() if isinstance(ref := schema.get("$ref"), str)}
    refs.setdefault("#", "#")
    ending: set[str] = set()
    while True:
        more = {ref for ref in refs if ref not in ending and _stuck(document, document.pointed(ref), ending) is None}
        if not more:
            break
        ending |= more
    for ref in sorted(refs.keys() - ending):
        path = [ref]
        while (following := _stuck(document, document.pointed(path[-1]), ending)) is not None:
            if following in path:
                cycle = " -> ".join(f"`{one[:80]}`" for one in [*path[path.index(following) :], following][:8])
                raise SchemaError(refs[ref], f"it has no end: {cycle} always leads back to itself")
            path.append(following)


def _stuck(document: Document, schema: object, ending: set[str]) -> str | None:
    """A reference that every text of a schema needs, and that has no end as far as is known; None without one."""
    if not is_schema(schema):
        return None
    needed: list[object] = []
    if isinstance(ref := schema.get("$ref"), str) and document.pointed(ref) is not None and ref not in ending:
        return ref
    if isinstance(schema.get("allOf"), list):
        needed += schema["allOf"]
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        required = schema.get("required")
        needed += (
            [schema["properties"].get(name) for name in required if isinstance(name, str)]
            if isinstance(required, list)
            else []
        )
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        needed += first if len(first) >= least else [*first, schema.get("items")]
    for one in needed:
        if (found := _stuck(document, one, ending)) is not None:
            return found
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            stuck = [_stuck(document, one, ending) for one in branches]
            if None not in stuck:
                return stuck[0]
    return None
