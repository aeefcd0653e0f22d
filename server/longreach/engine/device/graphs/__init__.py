"""CUDA graphs of steps: `decode` for answers alone, `mixed` beside prompts, `policy` under attention policies."""
