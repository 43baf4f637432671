"""Turns the definition of an op into a JAX primitive. No code in here is specific to one op."""
