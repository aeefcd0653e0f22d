"""Small tools of the server that know nothing of models."""
