"""The engine: one process per model replica that turns requests into tokens.

A step is a function of plain data: state -> plan -> tensors -> tokens. `scheduler` and everything it rests on import no
torch; `runner` and `sampler` know tensors and nothing of requests' lives; `process` is the child, `client` its owner.
"""
