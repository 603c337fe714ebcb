"""The public tensor class: autograd, conversion from and to plain tensors, saving, factories."""
