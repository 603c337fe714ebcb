"""Where the elements of a tensor live: placements, meshes, specs and the boxes of ranks."""
