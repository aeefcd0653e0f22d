"""How the embedded model is made: text, tokenizer, tasks, training, evaluation. See README.md."""
