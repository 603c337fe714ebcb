"""The page of operators on images: which family each follows."""

from __future__ import annotations

from . import convolution, padding, pooling, resampling, spatial
from .call import Family
from .notation import notation

__all__ = ["IMAGES"]

_PADS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)]


def _names(text: str) -> list[str]:
    return text.split()


_RESAMPLED = _names(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d"
)

IMAGES: dict[str, Family] = {
    "convolution": convolution.convolution,
    "convolution_backward": convolution.convolution_backward,
    "conv_tbc": notation("t! b i, _ i o, o -> t! b o", linear=((0, 2), (1, 2)), added=(2,)),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), pooling.avg_pool),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward"), pooling.avg_pool_backward),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), pooling.max_pool),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        pooling.max_pool_backward,
    ),
    **dict.fromkeys(
        ("fractional_max_pool2d", "fractional_max_pool3d"), spatial.planes(linear=False)
    ),
    **dict.fromkeys(
        _names(
            "max_unpool2d max_unpool3d fractional_max_pool2d_backward "
            "fractional_max_pool3d_backward"
        ),
        spatial.planes(),
    ),
    **dict.fromkeys(_RESAMPLED, resampling.resampled),
    **dict.fromkeys([f"{name}_backward" for name in _RESAMPLED], resampling.resampled_backward),
    "constant_pad_nd": padding.constant_pad,
    **dict.fromkeys([*_PADS, *(f"{name}_backward" for name in _PADS)], spatial.planes()),
    "grid_sampler_2d": spatial.grid_sampler,
    "grid_sampler_3d": spatial.grid_sampler,
    "grid_sampler_2d_backward": spatial.grid_sampler_backward,
    "grid_sampler_3d_backward": spatial.grid_sampler_backward,
    "affine_grid_generator": spatial.affine_grid,
    "pixel_shuffle": spatial.pixel_shuffle,
    "pixel_unshuffle": spatial.pixel_unshuffle,
    "channel_shuffle": spatial.channel_shuffle,
    "native_channel_shuffle": spatial.channel_shuffle,
    "im2col": spatial.im2col,
    "col2im": spatial.col2im,
    "unfold": spatial.unfold,
    "unfold_backward": spatial.unfold_backward,
}
