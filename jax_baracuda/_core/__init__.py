"""What turns an op's definition into a JAX primitive: nothing in here knows any particular op."""
