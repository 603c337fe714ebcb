"""Times beside PyTorch's own DTensor and plain tensors: `make bench`."""
