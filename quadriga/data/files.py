# SPDX-License-Identifier: Apache-2.0
"""From what the user names (a path, a list, a glob, a URL) to files on this machine.

Anything that fsspec opens may be named (`s3://`, `gs://`, `hf://`, `https://`, ...). A remote file is copied once into
the cache, under a key made of its URL, its size and whatever its store says about its version.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from quadriga.data.storage import written_aside
from quadriga.errors import DataError

_VERSION_FIELDS = ("etag", "mtime", "lastmodified", "last_modified", "last-modified", "updated", "created", "md5hash")


def resolve_files(names: str | Path | Sequence[str | Path], cache_dir: str | Path, *, where: str) -> list[Path]:
    """The local files behind `names`, in the order given; those of a glob in alphabetical order.

    Args:
        names: a path, a glob, a URL that fsspec understands, or a list of these.
        cache_dir: remote files are copied to `files/` inside it.
        where: the key that an error names.

    Raises:
        DataError: nothing is named, a file does not exist, a glob matches nothing, or a store cannot be read.
    """
    listed = [names] if isinstance(names, str | Path) else list(names)
    if not listed or not all(str(name) for name in listed):
        raise DataError(where, got="no file", expected="a path, a glob, a URL or a list of these")
    cache = Path(cache_dir).expanduser() / "files"
    return [file for name in listed for file in _resolve(str(name), cache, where)]


def _resolve(name: str, cache: Path, where: str) -> list[Path]:
    try:
        filesystem, root = url_to_fs(str(Path(name).expanduser()) if "://" not in name else name)
        found = sorted(filesystem.glob(root)) if _is_pattern(name) else [root]
        if not found:
            raise DataError(where, got=f"{name!r}, which matches no file", expected="at least one file")
        if isinstance(filesystem, LocalFileSystem):
            return [_check_local(Path(path), where) for path in found]
        return [_copy(filesystem, path, cache, where) for path in found]
    except DataError:
        raise
    except Exception as error:
        # Each store has exceptions of its own; whatever it says, the user needs to know which file it is about.
        raise DataError(
            where,
            got=f"{name!r}: {type(error).__name__}: {error}",
            expected="a file that fsspec can open",
            fix="Check the address, the credentials, and that the package for this kind of store is installed.",
        ) from error


def _is_pattern(name: str) -> bool:
    # The question mark of a web address starts its query.
    return any(sign in name for sign in ("*[" if "://" in name else "*[?")) and not Path(name).exists()


def _check_local(path: Path, where: str) -> Path:
    if path.is_dir():
        raise DataError(
            where, got=f"{path}, a folder", expected="files", fix=f"Name its files, as in {path}/*.parquet."
        )
    if not path.is_file():
        raise DataError(where, got=f"{path}, which does not exist", expected="a file", fix="Check the path.")
    return path


def _copy(filesystem: fsspec.AbstractFileSystem, path: str, cache: Path, where: str) -> Path:
    info = filesystem.info(path)
    url = filesystem.unstrip_protocol(path)
    key = hashlib.sha256(repr((url, info.get("size"), _version(info))).encode()).hexdigest()[:20]
    target = cache / f"{key}-{PurePosixPath(urlsplit(url).path).name}"
    if not target.is_file():
        with written_aside(target, where="data.cache_dir") as draft:
            filesystem.get_file(path, str(draft))
    return target


def _version(info: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((key, str(value)) for key, value in info.items() if key.lower() in _VERSION_FIELDS)
