"""Lossless packing of numbers: like bytes side by side, then zstd.

The bytes of a number differ in how predictable they are: sign and exponent repeat, the low
mantissa is noise. In planes, one per byte of a number, zstd finds what there is to find.
"""

from __future__ import annotations

from types import ModuleType

from prefix_cache.errors import StoreConfigError

_LEVEL = 1
#: Most bytes that zstd may ask for to look back into, whatever a frame says.
_MAX_WINDOW = 1 << 23


class UnpackError(Exception):
    """Not what ``pack`` made of that many bytes."""


def pack(data: bytes | memoryview, element_bytes: int) -> bytes:
    """Packed form of ``data``, numbers of ``element_bytes`` bytes each.

    Raises:
        StoreConfigError: the zstandard package is not installed.
    """
    whole = bytes(data)
    planes = b"".join(whole[start::element_bytes] for start in range(element_bytes))
    packed: bytes = zstd().ZstdCompressor(level=_LEVEL, write_checksum=False).compress(planes)
    return packed


def unpack(packed: bytes | memoryview, size: int, element_bytes: int) -> bytearray:
    """Undo ``pack``. Takes memory for ``size`` bytes and a window, whatever ``packed`` says.

    Raises:
        UnpackError: ``packed`` does not hold exactly ``size`` bytes.
        StoreConfigError: the zstandard package is not installed.
    """
    library = zstd()
    reader = library.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(packed)
    try:
        planes = reader.read(size)
        exact = len(planes) == size and not reader.read(1)
    except library.ZstdError as error:
        raise UnpackError(str(error)) from error
    if not exact:
        raise UnpackError(f"not {size} bytes")
    data, plane = bytearray(size), size // element_bytes
    for start in range(element_bytes):
        data[start::element_bytes] = planes[start * plane : (start + 1) * plane]
    return data


def zstd() -> ModuleType:
    """The zstandard package, needed only where blocks are compressed.

    Raises:
        StoreConfigError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise StoreConfigError(
            "compression: zstd needs the zstandard package; pip install 'specdec[serve]'"
        ) from error
    return zstandard
