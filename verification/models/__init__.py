"""Whole models of transformers, timm and diffusers on a mesh, compared with one device."""
