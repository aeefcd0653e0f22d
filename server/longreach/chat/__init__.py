"""`longreach chat`: a conversation with a server, in a terminal."""
