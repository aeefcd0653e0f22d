"""HTTP itself: connections, hosts, keys, bodies, streams, errors, and the log's line of each request."""
