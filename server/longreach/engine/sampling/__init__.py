"""From logits to tokens: processors, grammars, log-probabilities, the draw."""
