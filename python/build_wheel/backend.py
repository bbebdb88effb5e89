"""Builds the wheel: the package, and the shared library that cargo makes.

`pip wheel --no-deps -w dist python` calls it, as `python -m build --wheel python` does, and `pip install ./python`. Run
as a program it does the same with no tool at all: `python3 python/build_wheel/backend.py dist`. FERROKV_LIBRARY names a
shared library that is built already. The interface is PEP 517's, the file PEP 427's.
"""

import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
WORKSPACE = PROJECT.parent
# One time for all files: equal contents make equal wheels.
TIME = (1980, 1, 1, 0, 0, 0)


def version():
    """The workspace's."""
    manifest = (WORKSPACE / "Cargo.toml").read_text()
    return re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', manifest, re.MULTILINE).group(1)


def library():
    """The shared library, built unless it is named."""
    named = os.environ.get("FERROKV_LIBRARY")
    if named:
        return Path(named)
    subprocess.run(["cargo", "build", "--locked", "--release", "-p", "ferrokv-capi"], cwd=WORKSPACE, check=True)
    # A relative folder is cargo's, which runs in the workspace.
    return WORKSPACE / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "libferrokv_c.so"


def stripped(path):
    """Its bytes without symbols of the debugger, where `strip` is there."""
    copy = path.with_name(path.name + ".stripped")
    try:
        subprocess.run(["strip", "--strip-unneeded", "-o", copy, path], check=True)
        return copy.read_bytes()
    except FileNotFoundError:
        return path.read_bytes()
    finally:
        copy.unlink(missing_ok=True)


def tag(binary):
    """Which machines the wheel is for: those with a C library as new as the one that the binary asks for."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", binary)
    major, minor = max((int(a), int(b)) for a, b in versions)
    return f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"


def metadata():
    """The text of METADATA."""
    lines = ["Metadata-Version: 2.1", "Name: ferrokv", f"Version: {version()}",
             "Summary: Attention over quantized KV caches: Rust kernels on PyTorch's tensors",
             "License: MIT OR Apache-2.0", "Requires-Python: >=3.9", "Description-Content-Type: text/markdown", ""]
    return "\n".join(lines) + "\n" + (PROJECT / "README.md").read_text()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Writes the wheel and says what it is called."""
    del config_settings, metadata_directory
    binary = stripped(library())
    info, of = f"ferrokv-{version()}.dist-info", tag(binary)
    files = {f"ferrokv/{path.name}": path.read_bytes() for path in sorted((PROJECT / "ferrokv").glob("*.py"))}
    files["ferrokv/libferrokv_c.so"] = binary
    files["ferrokv/ferrokv.h"] = (WORKSPACE / "crates/capi/include/ferrokv.h").read_bytes()
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{name}"] = (WORKSPACE / name).read_bytes()
    files[f"{info}/METADATA"] = metadata().encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: ferrokv\nRoot-Is-Purelib: false\nTag: {of}\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    record = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()

    name = f"ferrokv-{version()}-{of}.whl"
    folder = Path(wheel_directory)
    folder.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole.
    unfinished = folder / (name + ".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, content)
    unfinished.replace(folder / name)
    return name


def build_sdist(sdist_directory, config_settings=None):
    """There is none: the package is built from the repository, whose crates it needs."""
    raise NotImplementedError("build the wheel from the repository: pip wheel --no-deps -w dist python")


if __name__ == "__main__":
    print(Path(sys.argv[1]) / build_wheel(sys.argv[1]) if len(sys.argv) == 2 else "usage: backend.py FOLDER")
