"""Recall of facts in long prompts: the tasks, made offline, and their measurement through a server.

The same tasks train the embedded model (`training/`) and test it.
"""
