"""JSON schemas as clients send them, made into what llguidance follows: the same answers, or fewer."""
