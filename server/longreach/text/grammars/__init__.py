"""Grammars of answers that may call functions, in the formats of models. They are llguidance's Lark.

A grammar refers to others by name: `@answer` for the form of an answer, `@object` for any JSON object, and
`@arguments0` for the arguments of the first function.
"""
