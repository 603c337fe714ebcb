"""Local tensors of a DTensor: versions, cached reductions, moves into another layout."""
