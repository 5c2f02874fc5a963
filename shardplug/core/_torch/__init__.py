"""The one place that touches private names of torch.

FSDP2 keeps its state (gathered copies, unreduced gradients) in private objects; the engine needs
to read them for its memory account and for the checks that plain FSDP2 leaves out. Tested with
the torch versions that pyproject.toml admits; a test fails if another file of the package
reaches for a private name.
"""
