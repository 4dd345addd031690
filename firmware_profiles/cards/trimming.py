"""Leaves out files of packages that a board never imports: half of a release.

`docs/boards/index.md` has the sizes for cp313 on aarch64 (MB compressed by xz, before and after). A file stays unless a
pattern matches it, so a new version of a package can only make a release larger. `test_bundle.py` trains a round with
the remaining files.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

DROPPED = (
    # every package
    "*/tests/*",
    "*.pyi",
    "*.pxd",
    "*.h",
    "*.a",
    "*.c",
    "*/RECORD",
    "*/WHEEL",
    "*/sboms/*",
    "bin/*",
    # NumPy: the Fortran binder, modules that only its own tests load, the plug-in of PyInstaller
    "numpy/f2py/*",
    "numpy/_pyinstaller/*",
    "numpy/conftest.py",
    "numpy/_core/_*tests*.so",
    "numpy/_core/_simd.*.so",
    # ONNX Runtime: its C library, which the Python module does not link; tools that make and convert models
    "onnxruntime/capi/libonnxruntime.so*",
    "onnxruntime/capi/convert_npz_to_onnx_adapter.py",
    "onnxruntime/backend/*",
    "onnxruntime/datasets/*",
    "onnxruntime/quantization/*",
    "onnxruntime/tools/*",
    "onnxruntime/transformers/*",
    # Pillow: AVIF, text, colour profiles, Tk; photographs are JPEG, PNG, TIFF, WebP, ...
    "PIL/_avif.*.so",
    "PIL/_imagingcms.*.so",
    "PIL/_imagingft.*.so",
    "PIL/_imagingmath.*.so",
    "PIL/_imagingmorph.*.so",
    "PIL/_imagingtk.*.so",
    "pillow.libs/libavif-*",
    "pillow.libs/libbrotli*",
    "pillow.libs/libfreetype-*",
    "pillow.libs/libharfbuzz-*",
    "pillow.libs/liblcms2-*",
    "pillow.libs/libpng16-*",
    # cryptography only needs cffi's C part, and msgpack and msgspec contain their sources
    "cffi/*",
    "cffi-*/entry_points.txt",
    "*.pyx",
    # array-api-compat: only NumPy is used
    "array_api_compat/cupy/*",
    "array_api_compat/dask/*",
    "array_api_compat/torch/*",
)


def is_dropped(name: str) -> bool:
    """Returns whether a file of a wheel, by its path in the wheel, is left out of a release."""
    return any(fnmatchcase(name, pattern) for pattern in DROPPED)
