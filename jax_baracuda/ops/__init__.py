"""The op families, one module or package each.

A module reads top to bottom: public functions, reference in plain JAX, ops (one per native kernel), derivative rules,
canonicalisation of arguments.
"""
