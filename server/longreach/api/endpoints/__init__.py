"""The endpoints, one module each: they read a request, say what its answers have to be, and how they are to look."""
