"""The engine's start: load, measure, allocate, capture, warm up."""
