"""Continues, keeps and runs the responses of `/v1/responses`."""
