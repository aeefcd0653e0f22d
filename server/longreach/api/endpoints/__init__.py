"""The endpoints, one module each: they read a request, have it answered, and give the answer its form."""
