"""Every operator against plain PyTorch: `make verify` runs PyTorch's operator database."""
