"""The grammar of recall tasks that the embedded model is trained and tested on: documents, questions and right answers.

`longreach bench recall` has a plain sampler of its own; its client, its scores and its heat map serve both.
"""
