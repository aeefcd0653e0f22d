"""From a JSON schema as it was sent to one that llguidance follows."""

from __future__ import annotations

import copy

from longreach.api.service.json_schema.close import Closer
from longreach.api.service.json_schema.cycles import refuse_endless
from longreach.api.service.json_schema.document import Document, Schema
from longreach.api.service.json_schema.reduce import reduce
from longreach.api.service.json_schema.shapes import check_shapes


def prepared(schema: Schema) -> Schema:
    """A schema whose answers follow `schema`: the same ones, but for members that objects do not name.

    Annotations and what constrains nothing are gone, `oneOf` is `anyOf` where its branches are apart, and objects that
    name properties have no others unless `additionalProperties` or `unevaluatedProperties` allows them.

    Raises:
        SchemaError: no grammar can follow it exactly; names the place.
    """
    document = Document(copy.deepcopy(schema))
    check_shapes(document)
    refuse_endless(document)
    reduce(document)
    Closer(document).close()
    return document.root
