"""Named documents: texts that a server keeps, for requests that refer to them."""
