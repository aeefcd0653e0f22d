"""Documents that are kept, and how they stand in prompts."""
