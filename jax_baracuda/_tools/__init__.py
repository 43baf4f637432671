"""The commands of `python -m jax_baracuda`, one module each."""
