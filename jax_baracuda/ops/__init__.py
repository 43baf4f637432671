"""The op families, one file each."""
