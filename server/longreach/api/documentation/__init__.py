"""The OpenAPI document and the reference that is made from it."""
