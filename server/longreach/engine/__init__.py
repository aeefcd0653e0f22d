"""The engine: one process for each replica, which turns requests into tokens.

A step is a function of plain data: state -> plan -> tensors -> tokens. This folder holds the seam with the API:
`client` owns the process, `messages` travel, `admission` bounds them, and `engine` runs the steps. Below it:

- `requests`, `kv_cache` and `scheduling` are plain data and import no torch;
- `sampling` and `device` know tensors and nothing of requests' lives;
- `startup` loads a model, measures it, and starts the process.
"""
